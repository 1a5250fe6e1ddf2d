"""Block pool of one tier, and the lease of a sequence.

A pool hands out block numbers and checks that each is released once. The lease of a sequence holds its block table and
the transfers that it waits for.
"""

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, cast

from lorikeet.core.ids import BlockId
from lorikeet.core.plan import TransferDone


class BlockError(RuntimeError):
    """A block was used wrongly (double release, stale generation). Always a bug, never caused by load."""


class BlockPool:
    """Equal blocks, each free or leased to exactly one owner.

    The generation of a block rises whenever it is freed. A remembered block number with an old generation is therefore
    recognised as stale, and the block of another tenant is never read (compare vLLM issue 47724).

    Args:
        total: number of blocks.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        # Four bytes a block, where a list of numbers takes 36: a simulated cluster has a thousand pools.
        self._free = array("i", range(total - 1, -1, -1))
        self._leased = bytearray(total)
        self._generation = array("q", bytes(8 * total))  # it rises for as long as the engine runs

    @property
    def free(self) -> int:
        """Number of blocks that are not leased."""
        return len(self._free)

    def lease(self, count: int) -> list[BlockId]:
        """Lease ``count`` blocks.

        Raises:
            BlockError: fewer are free; callers check ``free`` first.
        """
        if count > len(self._free):
            raise BlockError(f"{count} blocks requested, {len(self._free)} free")
        at = len(self._free) - count
        blocks = cast(list[BlockId], self._free[at:].tolist())
        del self._free[at:]
        blocks.reverse()  # the block freed last comes first
        for block in blocks:
            self._leased[block] = 1
        return blocks

    def release(self, blocks: Iterable[BlockId]) -> None:
        """Free blocks.

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
        """Return how often the block has been freed."""
        return self._generation[block]

    def checked(self, blocks: Sequence[int], generations: Sequence[int]) -> list[BlockId]:
        """Return ``blocks`` after checking that each is leased and still of its generation.

        Raises:
            BlockError: one is not.
        """
        for block, generation in zip(blocks, generations, strict=True):
            if not self._leased[block] or self._generation[block] != generation:
                raise BlockError(f"block {block} is of generation {self._generation[block]}, expected {generation}")
        return cast(list[BlockId], list(blocks))


class WaitReason(Enum):
    """Why a request cannot be admitted now."""

    KV_BLOCKS = auto()
    """There are too few blocks for its KV."""
    ADAPTER_BLOCKS = auto()
    """There are enough blocks for its KV, but not for its adapter as well."""
    SLOT = auto()
    """There are too few blocks in the share reserved for adapters, or the step may use no further adapter; requests for
    other adapters may be admitted."""
    TRANSFER = auto()
    """Its adapter is being read into the host tier; other requests may be admitted."""


WAITS_FOR = {
    WaitReason.KV_BLOCKS: "memory for its KV",
    WaitReason.ADAPTER_BLOCKS: "memory for its adapter",
    WaitReason.SLOT: "a place beside the adapters or the batch that run",
    WaitReason.TRANSFER: "its adapter to be read into host memory",
}
"""The reason why a refused request waits, as text for users."""


@dataclass(eq=False, slots=True)
class SequenceLease:
    """Blocks and pins of one admitted sequence.

    Attributes:
        adapter: node of its adapter version; pinned.
        blocks: its block table.
        path: tree nodes of its leading blocks; pinned. A node may have another block than the sequence, if two
            sequences computed the same tokens at the same time.
        keys: keys of its whole blocks, as far as they were needed.
        private: blocks of the sequence that are not in the tree.
        adapter_transfers, kv_transfers: ids of the transfers that it waits for.
        cached_blocks: number of leading blocks that were found in the cache at admission.
        assisted: whether host cores compute its adapter's part of a prefill while the adapter is in flight.
        salt: salt of its keys.
        prefetched: prefetched nodes that this sequence is the first to use.
        adapter_start: position of the first token on which the adapter acts; whole blocks before it are the base's.
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
    salt: str = ""
    prefetched: tuple[int, ...] = ()
    adapter_start: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether all transfers that it waited for have ended."""
        return not (self.adapter_transfers or self.kv_transfers)

    @property
    def is_cold(self) -> bool:
        """Whether only its adapter is missing, and host cores can assist its prefill."""
        return self.assisted and bool(self.adapter_transfers) and not self.kv_transfers


class TransferOutcome(NamedTuple):
    """The leases that the end of a transfer concerns.

    Attributes:
        adapter: leases whose adapter has arrived.
        kv: leases whose KV has arrived.
        error: why the transfer failed; None if it succeeded.
        without_adapter: leases whose adapter did not arrive, if the transfer failed.
        without_kv: leases whose KV did not arrive and must be computed again, if it failed.
        began_s: time at which a failed transfer was decided.
    """

    adapter: tuple[SequenceLease, ...]
    kv: tuple[SequenceLease, ...]
    error: str | None = None
    without_adapter: tuple[SequenceLease, ...] = ()
    without_kv: tuple[SequenceLease, ...] = ()
    began_s: float = 0.0


def arrived(leases: Collection[SequenceLease], done: TransferDone, began_s: float) -> TransferOutcome:
    """Remove a finished transfer from the leases that waited for it, and return the leases that it affects.

    Args:
        leases: leases that waited for the transfer.
        done: result of the transfer.
        began_s: time at which the transfer was decided.
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
