"""One allocator for all device blocks, whatever they hold."""

from collections.abc import Iterable, Sequence

from lorikeet.core.ids import BlockId


class BlockError(RuntimeError):
    """A block was used against the rules (double release, stale generation): a bug, never load."""


class BlockPool:
    """Equal blocks, each free or leased to exactly one owner.

    A block's generation rises whenever it is freed, so that whoever remembers a block can tell whether
    it still holds what it held (``rivals`` confuse tenants exactly here: vLLM issue 47724).
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = [BlockId(block) for block in range(total - 1, -1, -1)]
        self._leased = bytearray(total)
        self._generation = [0] * total

    @property
    def free(self) -> int:
        """Number of blocks nobody leases."""
        return len(self._free)

    def lease(self, count: int) -> list[BlockId]:
        """Lease ``count`` blocks.

        Raises:
            BlockError: fewer are free; callers look at ``free`` first.
        """
        if count > len(self._free):
            raise BlockError(f"{count} blocks asked for, {len(self._free)} free")
        at = len(self._free) - count
        blocks = self._free[at:]
        del self._free[at:]
        blocks.reverse()  # what was freed last comes first
        for block in blocks:
            self._leased[block] = 1
        return blocks

    def release(self, blocks: Iterable[BlockId]) -> None:
        """Give blocks back.

        Raises:
            BlockError: one of them is not leased.
        """
        for block in blocks:
            if not self._leased[block]:
                raise BlockError(f"block {block} (generation {self._generation[block]}) is released twice")
            self._leased[block] = 0
            self._generation[block] += 1
            self._free.append(block)

    def generation(self, block: BlockId) -> int:
        """Return how often the block was freed so far."""
        return self._generation[block]

    def checked(self, blocks: Sequence[int], generations: Sequence[int]) -> list[BlockId]:
        """Return blocks, having made sure that each is leased and still of its generation.

        Raises:
            BlockError: one is not.
        """
        for block, generation in zip(blocks, generations, strict=True):
            if not self._leased[block] or self._generation[block] != generation:
                raise BlockError(f"block {block} is of generation {self._generation[block]}, expected {generation}")
        return [BlockId(block) for block in blocks]
