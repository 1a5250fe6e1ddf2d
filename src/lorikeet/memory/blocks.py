"""Implements the block pool of one tier, and the lease of a sequence.

A pool hands out block numbers and checks that each block is released once. A sequence's lease holds the block table and
the transfers that the sequence waits for.
"""

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, cast

from lorikeet.core.ids import BlockId
from lorikeet.core.plan import TransferDone


class BlockError(RuntimeError):
    """A block was released twice, or a stale block number was used. The cause is always a bug, never load."""


class BlockPool:
    """Leases blocks of equal size, each to at most one owner.

    The generation of a block rises whenever the block is freed. So a remembered block number with an old generation is
    recognised as stale, and another tenant's block is never read (compare vLLM issue 47724).

    Args:
        total: number of blocks.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        # An array takes 4 bytes per block and a list of numbers 36. A simulated cluster has a thousand pools.
        self._free = array("i", range(total - 1, -1, -1))
        self._leased = bytearray(total)
        self._generation = array("q", bytes(8 * total))  # generations rise for as long as the engine runs

    @property
    def free(self) -> int:
        """Number of blocks that are not leased."""
        return len(self._free)

    def lease(self, count: int) -> list[BlockId]:
        """Lease ``count`` blocks.

        Raises:
            BlockError: fewer blocks are free. Callers check ``free`` first.
        """
        if count > len(self._free):
            raise BlockError(f"{count} blocks requested, {len(self._free)} free")
        at = len(self._free) - count
        blocks = cast(list[BlockId], self._free[at:].tolist())
        del self._free[at:]
        blocks.reverse()  # the last freed block is leased first
        for block in blocks:
            self._leased[block] = 1
        return blocks

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Free blocks.

        Raises:
            BlockError: a block is not leased.
        """
        leased = self._leased
        generation = self._generation
        for block in blocks:
            if not leased[block]:
                raise BlockError(f"block {block} (generation {generation[block]}) is released twice")
            leased[block] = 0
            generation[block] += 1
        self._free.extend(blocks)

    def generations(self, blocks: Iterable[BlockId]) -> list[int]:
        """Return the number of times that each block has been freed."""
        return list(map(self._generation.__getitem__, blocks))

    def checked(self, blocks: Sequence[int], generations: Sequence[int]) -> list[BlockId]:
        """Return ``blocks`` after checking that each block is leased and has the expected generation.

        Raises:
            BlockError: a block is not leased or has another generation.
        """
        found = cast(list[BlockId], list(blocks))
        if self.generations(found) != list(generations) or not all(map(self._leased.__getitem__, found)):
            for block, generation in zip(found, generations, strict=True):
                if not self._leased[block] or self._generation[block] != generation:
                    raise BlockError(f"block {block} is of generation {self._generation[block]}, expected {generation}")
        return found


class WaitReason(Enum):
    """Names the reasons why a request cannot be admitted now."""

    KV_BLOCKS = auto()
    """Too few blocks are free for the request's KV."""
    ADAPTER_BLOCKS = auto()
    """Enough blocks are free for the request's KV, but not for its KV and its adapter."""
    SLOT = auto()
    """The share reserved for adapters has too few free blocks, or the step has reached its number of adapters.

    Requests for other adapters may be admitted.
    """
    TRANSFER = auto()
    """The request's adapter is being read into the host tier. Other requests may be admitted."""


WAITS_FOR = {
    WaitReason.KV_BLOCKS: "memory for its KV",
    WaitReason.ADAPTER_BLOCKS: "memory for its adapter",
    WaitReason.SLOT: "a place beside the adapters or the batch that run",
    WaitReason.TRANSFER: "its adapter to be read into host memory",
}
"""Text for users that names the reason why a request waits."""


@dataclass(eq=False, slots=True)
class SequenceLease:
    """Holds the blocks and pins of one admitted sequence.

    Attributes:
        adapter: node of the sequence's adapter version; pinned.
        blocks: block table of the sequence.
        path: tree nodes of the sequence's leading blocks; pinned. If two sequences computed the same tokens at the same
            time, a node may have another block than the sequence.
        keys: keys of the whole blocks, as far as they were needed.
        private: blocks of the sequence that are not in the tree.
        adapter_transfers, kv_transfers: ids of the transfers that the sequence waits for.
        cached_blocks: number of leading blocks that were found in the cache at admission.
        assisted: whether host cores compute the adapter's part of a prefill while the adapter is in flight.
        salt: salt of the keys.
        prefetched: prefetched nodes that this sequence is the first to use.
        adapter_start: position of the first token on which the adapter acts. Whole blocks before this position belong
            to the base model.
        state: blocks of the sequence's state, if layers have one; private.
        state_sent: whether the executor has these blocks.
        snapshot: nodes of the snapshot from which the sequence starts; pinned until its first step has run.
        stops: numbers of tokens at which a step of the prefill must end, so that a snapshot can be taken; rising.
        saving: blocks to which the executor copies the state; private.
        saving_at: number of tokens at which the executor copies it.
        rolling: key of the block with the last snapshot that the next one replaces; None if there is none.
        taken: keys of the blocks at whose ends the sequence has taken snapshots.
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
    state: list[BlockId] = field(default_factory=list)
    state_sent: bool = False
    snapshot: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    saving: list[BlockId] = field(default_factory=list)
    saving_at: int = 0
    rolling: bytes | None = None
    taken: list[bytes] = field(default_factory=list)

    def until_stop(self, computed: int, tokens: int) -> int:
        """Return how many of the next tokens a step may compute, so that it ends at the next stop."""
        for stop in self.stops:
            if computed < stop:
                return min(tokens, stop - computed)
        return tokens

    @property
    def is_ready(self) -> bool:
        """Whether all transfers that the sequence waited for have ended."""
        return not (self.adapter_transfers or self.kv_transfers)

    @property
    def is_cold(self) -> bool:
        """Whether only the adapter is missing, and host cores can assist the prefill."""
        return self.assisted and bool(self.adapter_transfers) and not self.kv_transfers


class TransferOutcome(NamedTuple):
    """Groups the leases that waited for a transfer by its result.

    Attributes:
        adapter: leases whose adapter has arrived.
        kv: leases whose KV has arrived.
        error: cause of the failure; None if the transfer succeeded.
        without_adapter: leases whose adapter did not arrive, if the transfer failed.
        without_kv: leases whose KV did not arrive and must be computed again, if the transfer failed.
        began_s: time at which a failed transfer was scheduled.
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
        began_s: time at which the transfer was scheduled.
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
