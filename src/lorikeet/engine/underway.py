"""A transfer that has begun on a rank and has not ended there."""

import time
from dataclasses import dataclass

from lorikeet.core.ids import BlockId
from lorikeet.core.plan import Tier, Transfer
from lorikeet.engine.arrival import Arrival
from lorikeet.engine.device import Mark
from lorikeet.kernels.base import LoraWeights

STAGED_BLOCKS = 8
"""Blocks behind the host tier through which each reader passes adapters that are to lie on the device only."""


@dataclass(eq=False)
class Underway:
    """How far a transfer has come; whoever changes it holds the lock of :class:`lorikeet.engine.transfers.Transfers`.

    Attributes:
        transfer: what was asked for.
        demand: whether somebody waits for it by now.
        host_blocks: where its blocks lie in the host arena or pass through it, in order.
        reading: whether blocks are still to be read.
        filled: blocks of ``host_blocks`` that hold what they should; all of them where nothing is to be read.
        after: its copies follow the steps before this mark, which may use the blocks that it takes.
        copying: blocks being copied, or in a stream behind others.
        has_turn: some of its blocks are being copied, and are behind no others.
        copied: blocks copied.
        reader: whose turn it is to read it, and whose blocks it passes through; None before and after.
        error: why it has failed, None if it has not.
        arrival: what steps know of it that do not wait for its end, None if there is none.
        weights: where an adapter will lie on the device; None until that is found, and of everything else.
        active_s: seconds in which it was read or copied.
    """

    transfer: Transfer
    demand: bool
    host_blocks: tuple[BlockId, ...]
    reading: bool
    filled: int
    after: Mark
    copying: int = 0
    has_turn: bool = False
    copied: int = 0
    reader: int | None = None
    error: str | None = None
    arrival: Arrival | None = None
    weights: LoraWeights | None = None
    active_s: float = 0.0
    _active_since_s: float | None = None

    @property
    def urgency(self) -> tuple[bool, int]:
        """The least is the most urgent: those that are awaited, in the order in which they began, then the others."""
        return not self.demand, self.transfer.transfer_id

    @property
    def blocks(self) -> int:
        """How many blocks it has."""
        return len(self.transfer.device_blocks or self.transfer.host_blocks)

    @property
    def to_copy(self) -> int:
        """How many blocks are copied between host and device."""
        return 0 if self.transfer.source is Tier.SOURCE and self.transfer.target is Tier.HOST else self.blocks

    @property
    def is_staged(self) -> bool:
        """Whether it passes through its reader's own blocks."""
        return self.transfer.source is Tier.SOURCE and not self.transfer.host_blocks

    @property
    def room(self) -> int:
        """How many blocks may be read before one of them is copied."""
        return STAGED_BLOCKS if self.is_staged else self.blocks

    @property
    def is_over(self) -> bool:
        """Whether nobody works on its blocks any more, nor needs to."""
        return not (self.reading or self.copying) and (self.error is not None or self.copied == self.to_copy)

    @property
    def is_ready(self) -> bool:
        """Whether a block can be copied now. If it has failed, what is still being read has to go somewhere."""
        goes_on = self.error is None or self.reading
        return goes_on and self.copied + self.copying < min(self.filled, self.to_copy)

    def next_blocks(self, most: int) -> range:
        """Return which of its blocks are to be copied next: at most so many, and none of the group after."""
        begun = done = self.copied + self.copying
        for first, stop in self.transfer.groups:
            if done < stop - first:
                return range(first + done, min(stop, first + done + most))
            done -= stop - first
        return range(begun, min(self.filled, begun + most))

    def take_time(self) -> None:
        """Count the time since the last call, if it was being read or copied then."""
        now = time.monotonic()
        if self._active_since_s is not None:
            self.active_s += now - self._active_since_s
        is_read = self.reading and self.reader is not None and self.filled - self.copied < self.room
        self._active_since_s = now if is_read or self.has_turn else None
