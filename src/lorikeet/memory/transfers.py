"""Values of the tiers: counts of blocks, and transfers under way."""

from dataclasses import dataclass, field
from typing import NamedTuple

from lorikeet.core.plan import Transfer, TransferDone

KV_BLOCKS_PER_TRANSFER = 32
"""So many blocks of KV are moved at once where nobody waits for more: fewer take longer, more come later."""


class BlockCounts(NamedTuple):
    """Device blocks by state; their sum is the arena.

    Attributes:
        free: nobody leases them.
        cached: they hold an adapter or KV that nobody needs where it is.
        kv: KV of running sequences.
        adapter: weights that running sequences use.
        inflight: part of a transfer that writes them, or that ends with their release.
    """

    free: int
    cached: int
    kv: int
    adapter: int
    inflight: int


class HostCounts(NamedTuple):
    """Host blocks by state; their sum is the arena. See ``BlockCounts``; who needs them makes no difference here."""

    free: int
    kv: int
    adapter: int
    inflight: int


@dataclass(eq=False)
class InflightTransfer:
    """A transfer under way.

    Attributes:
        transfer: as the executor was told; before that KV has no blocks in it, and more may join.
        nodes: whose bytes move: one adapter, or nodes of KV in the order of the blocks.
        began_s: when it was decided.
        demand: whether somebody waits for it by now.
    """

    transfer: Transfer
    nodes: tuple[int, ...]
    began_s: float
    demand: bool


@dataclass
class RouteTotals:
    """What went one way so far.

    Attributes:
        transfers: that have ended.
        failed: of these.
        blocks, busy_s: of the others: how many, and the time that they were read or copied.
    """

    transfers: int = 0
    blocks: int = 0
    failed: int = 0
    busy_s: float = 0.0

    def note(self, blocks: int, done: TransferDone) -> None:
        """Count a transfer that has ended."""
        self.transfers += 1
        if done.error is None:
            self.blocks += blocks
            self.busy_s += done.duration_s
        else:
            self.failed += 1


@dataclass(eq=False)
class TransferResult:
    """The end of a transfer.

    Attributes:
        inflight: what it was.
        error: why it failed, None if it did not.
        came: nodes that are on the device now and were not, or were to leave it.
    """

    inflight: InflightTransfer
    error: str | None
    came: list[int] = field(default_factory=list)
