"""What a cache that forgets nothing would find: the most that any policy could have reused."""

from collections.abc import Sequence

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest
from lorikeet.memory.tree import block_keys


class InfiniteCache:
    """Counts whole blocks of text by adapter version; a text is known from when it is added.

    Args:
        block_size: tokens of KV in a block.

    Attributes:
        adapters: those that requests asked for.
    """

    def __init__(self, block_size: int) -> None:
        self._block_tokens = block_size
        self._keys: set[bytes] = set()
        self.adapters: dict[AdapterDigest, AdapterRef] = {}

    def reusable_tokens(self, adapter: AdapterRef | None, prompt: Sequence[int]) -> int:
        """Return the length of the longest known beginning of ``prompt``, in whole blocks.

        The last token never counts: an engine computes it anew, since it wants its logits.
        """
        found = 0
        for key in self._keys_of(adapter, prompt[:-1]):
            if key not in self._keys:
                break
            found += self._block_tokens
        return found

    def add(self, adapter: AdapterRef | None, token_ids: Sequence[int]) -> None:
        """Know a prompt, or a prompt and its answer."""
        if adapter is not None:
            self.adapters[adapter.digest] = adapter
        self._keys.update(self._keys_of(adapter, token_ids))

    @property
    def kv_blocks(self) -> int:
        """Blocks of KV of all that was added."""
        return len(self._keys)

    def _keys_of(self, adapter: AdapterRef | None, token_ids: Sequence[int]) -> list[bytes]:
        return block_keys(None if adapter is None else adapter.digest, token_ids, self._block_tokens)
