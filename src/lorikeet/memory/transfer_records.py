"""Defines the records of the tiers: counts of blocks, transfers in flight, and totals of finished transfers."""

from dataclasses import dataclass, field
from typing import NamedTuple

from lorikeet.core.plan import Transfer, TransferDone

KV_BLOCKS_PER_TRANSFER = 32
"""Largest number of KV blocks in one transfer that no sequence waits for.

Smaller transfers have more overhead; larger transfers delay their first blocks.
"""


class BlockCounts(NamedTuple):
    """Counts the device blocks by state. The counts add up to the size of the arena.

    Attributes:
        free: blocks that are not leased.
        cached: blocks of adapters and KV that are not pinned, so they are evictable.
        kv: blocks with KV of running sequences.
        adapter: blocks with adapters of running sequences.
        inflight: blocks that a transfer writes, or that are freed after a transfer.
    """

    free: int
    cached: int
    kv: int
    adapter: int
    inflight: int


class HostCounts(NamedTuple):
    """Counts the host blocks by state, as in ``BlockCounts``. Pinned and cached blocks are not distinguished."""

    free: int
    kv: int
    adapter: int
    inflight: int


@dataclass(eq=False)
class InflightTransfer:
    """Describes a transfer in flight.

    Attributes:
        transfer: the transfer as it is sent to the executor. Until it is sent, a transfer of KV names no blocks, and
            more nodes may join.
        nodes: nodes that the transfer moves: one adapter, or KV in the order of the blocks.
        began_s: time at which the transfer was scheduled.
        demand: whether a sequence waits for the transfer.
    """

    transfer: Transfer
    nodes: tuple[int, ...]
    began_s: float
    demand: bool


@dataclass
class RouteTotals:
    """Counts the finished transfers from one tier to another.

    Attributes:
        transfers: number of transfers.
        failed: number of transfers that failed.
        blocks, busy_s: number of blocks of the successful transfers, and the seconds in which they were read or copied.
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
    """Holds the result of a transfer.

    Attributes:
        inflight: the transfer.
        error: cause of the failure; None if the transfer succeeded.
        arrived: nodes that are on the device now, and that were missing or about to be freed before.
    """

    inflight: InflightTransfer
    error: str | None
    arrived: list[int] = field(default_factory=list)
