"""Values of the tiers: counts of blocks, transfers in flight, and totals of finished ones."""

from dataclasses import dataclass, field
from typing import NamedTuple

from lorikeet.core.plan import Transfer, TransferDone

KV_BLOCKS_PER_TRANSFER = 32
"""Most blocks of KV in one transfer that no sequence waits for. Smaller transfers have more overhead; larger ones delay
their first blocks."""


class BlockCounts(NamedTuple):
    """Device blocks by state; they add up to the size of the arena.

    Attributes:
        free: not leased.
        cached: an adapter or KV that is not pinned, so evictable.
        kv: KV of running sequences.
        adapter: adapters of running sequences.
        inflight: part of a transfer that writes them, or after which they are freed.
    """

    free: int
    cached: int
    kv: int
    adapter: int
    inflight: int


class HostCounts(NamedTuple):
    """Host blocks by state, as in ``BlockCounts``, without a difference between pinned and cached blocks."""

    free: int
    kv: int
    adapter: int
    inflight: int


@dataclass(eq=False)
class InflightTransfer:
    """A transfer in flight.

    Attributes:
        transfer: as it is sent to the executor. Until then a transfer of KV names no blocks, and more nodes may join.
        nodes: the nodes that it moves: one adapter, or KV in the order of the blocks.
        began_s: when it was decided.
        demand: whether a sequence waits for it.
    """

    transfer: Transfer
    nodes: tuple[int, ...]
    began_s: float
    demand: bool


@dataclass
class RouteTotals:
    """Finished transfers from one tier to another.

    Attributes:
        transfers: number of transfers.
        failed: number of transfers that failed.
        blocks, busy_s: blocks of the others, and the seconds in which they were read or copied.
    """

    transfers: int = 0
    blocks: int = 0
    failed: int = 0
    busy_s: float = 0.0

    def note(self, blocks: int, done: TransferDone) -> None:
        """Count a finished transfer."""
        self.transfers += 1
        if done.error is None:
            self.blocks += blocks
            self.busy_s += done.duration_s
        else:
            self.failed += 1


@dataclass(eq=False)
class TransferResult:
    """How a transfer ended.

    Attributes:
        inflight: the transfer.
        error: why it failed, None if it did not.
        arrived: nodes that are on the device now, and were not there or were about to be freed.
    """

    inflight: InflightTransfer
    error: str | None
    arrived: list[int] = field(default_factory=list)
