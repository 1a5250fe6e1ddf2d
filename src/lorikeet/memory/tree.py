"""The usage-dependency tree: adapters below the root, their KV below them (ELORA §4.1).

KV is useful only with the adapter version that made it, so it hangs below that version's node and can
neither be found from another one nor outlive it. The base model counts as an adapter without weights.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from lorikeet.core.ids import AdapterDigest, BlockId


class Residency(Enum):
    """Where an adapter's weights are, seen from the device."""

    ABSENT = auto()
    LOADING = auto()
    LOADED = auto()


@dataclass(eq=False)
class KvNode:
    """One block of KV.

    Attributes:
        tokens: the token ids it covers.
        parent: the block before it, or its adapter.
        block, generation: where it lies.
        pins: sequences that use it (each pins its whole path).
        last_use_s: when a sequence last used it.
        children: following blocks by their tokens.
    """

    tokens: tuple[int, ...]
    parent: "KvNode | AdapterNode"
    block: BlockId
    generation: int
    last_use_s: float
    pins: int = 0
    children: "dict[tuple[int, ...], KvNode]" = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        """Number of blocks it takes."""
        return 1


@dataclass(eq=False)
class AdapterNode:
    """One adapter version, or the base.

    Attributes:
        digest: the version; None for the base.
        residency: whether its weights are on the device.
        held: the blocks of its weights, loading or loaded.
        load_generation: number of its latest load.
        load_started_s: when that load started.
        pins: sequences that run under it.
        last_use_s: when a sequence last used it.
        children: KV of the first block of tokens, by tokens.
    """

    digest: AdapterDigest | None
    residency: Residency = Residency.ABSENT
    held: tuple[BlockId, ...] = ()
    load_generation: int = 0
    load_started_s: float = 0.0
    last_use_s: float = 0.0
    pins: int = 0
    children: dict[tuple[int, ...], KvNode] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        """Number of blocks it takes."""
        return len(self.held)


Node = KvNode | AdapterNode


def match(adapter: AdapterNode, token_ids: list[int], block_tokens: int, limit_tokens: int) -> list[KvNode]:
    """Return the longest path of KV blocks below ``adapter`` that covers a prefix of ``token_ids``.

    At most ``limit_tokens`` tokens are matched, in whole blocks.
    """
    path: list[KvNode] = []
    node: Node = adapter
    for end in range(block_tokens, limit_tokens + 1, block_tokens):
        child = node.children.get(tuple(token_ids[end - block_tokens : end]))
        if child is None:
            break
        path.append(child)
        node = child
    return path
