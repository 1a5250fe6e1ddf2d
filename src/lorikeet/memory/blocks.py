"""Blocks of one tier, and what sequences lease of them.

A pool hands out block numbers and checks their return. A sequence lease holds a request's block table and the transfers
that it waits for.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from lorikeet.core.ids import BlockId
from lorikeet.core.plan import TransferDone


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


class WaitReason(Enum):
    """Why a request cannot be admitted now."""

    ROOM = auto()
    """Blocks for its KV are lacking."""
    ADAPTER_ROOM = auto()
    """There is room for its KV, but not for its adapter beside it."""
    SLOT = auto()
    """Blocks set aside for adapters are lacking, or the step may use no further adapter; requests of other adapters may
    be admitted."""
    TRANSFER = auto()
    """Its adapter is being read into the host tier; others may be admitted."""


@dataclass(eq=False, slots=True)
class SequenceLease:
    """What one admitted sequence holds.

    Attributes:
        adapter: node of the version it runs under; pinned.
        blocks: its block table.
        path: tree nodes of its leading blocks; pinned. A node may lie in another block than the sequence's own, if
            two sequences computed the same tokens at the same time.
        keys: of its whole blocks, as far as they were needed.
        private: those of ``blocks`` that the tree does not know.
        adapter_transfers, kv_transfers: ids of those it waits for.
        cached_blocks: blocks found for it.
        assisted: while its adapter is on its way, the host computes what that adds to a prefill.
    """

    adapter: int
    blocks: list[BlockId] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    private: set[BlockId] = field(default_factory=set)
    adapter_transfers: set[int] = field(default_factory=set)
    kv_transfers: set[int] = field(default_factory=set)
    cached_blocks: int = 0
    assisted: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether all it waited for has arrived."""
        return not (self.adapter_transfers or self.kv_transfers)

    @property
    def is_cold(self) -> bool:
        """Whether only its adapter has not arrived, and a prefill can do without."""
        return self.assisted and bool(self.adapter_transfers) and not self.kv_transfers


class TransferOutcome(NamedTuple):
    """What the end of a transfer means for leases.

    Attributes:
        adapter: leases whose adapter has arrived.
        kv: leases whose KV has arrived.
        error: why it failed, None if it did not.
        without_adapter: then, leases whose adapter did not arrive.
        without_kv: then, leases whose KV did not arrive; it has to be computed again.
        began_s: when the transfer was decided.
    """

    adapter: tuple[SequenceLease, ...]
    kv: tuple[SequenceLease, ...]
    error: str | None = None
    without_adapter: tuple[SequenceLease, ...] = ()
    without_kv: tuple[SequenceLease, ...] = ()
    began_s: float = 0.0


def arrived(leases: Collection[SequenceLease], done: TransferDone, began_s: float) -> TransferOutcome:
    """Take the end of a transfer in for those who waited for it, and return what it means for them.

    Args:
        leases: who waited.
        done: how it ended.
        began_s: when it was decided.
    """
    adapter = tuple(lease for lease in leases if done.transfer_id in lease.adapter_transfers)
    kv = tuple(lease for lease in leases if done.transfer_id not in lease.adapter_transfers)
    for lease in leases:
        lease.adapter_transfers.discard(done.transfer_id)
        lease.kv_transfers.discard(done.transfer_id)
    if done.error is not None:
        return TransferOutcome((), (), done.error, adapter, kv, began_s)
    return TransferOutcome(
        tuple(lease for lease in adapter if not lease.adapter_transfers),
        tuple(lease for lease in kv if not lease.kv_transfers),
    )
