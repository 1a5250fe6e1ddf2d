"""What sequences hold of the memory, and what they wait for."""

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from lorikeet.core.ids import BlockId
from lorikeet.core.plan import TransferDone


class Wait(Enum):
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
