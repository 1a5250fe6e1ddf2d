"""The host's part of assisted steps as the ranks above 0 see it: they do what rank 0 says in the ring."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor

from lorikeet.engine.arrival import Arrival
from lorikeet.engine.host_lora.assisted_step import AssistedStep
from lorikeet.engine.host_lora.layout import Ring
from lorikeet.engine.host_lora.polling import LOOKS, Rests
from lorikeet.engine.host_lora.pool import Deal, HostRows, y_of
from lorikeet.kernels.base import LoraBatch

_T = TypeVar("_T")


class HostFollower:
    """See the module, and ``assisted_step.HostSide``. It never waits in vain: this process ends with that of rank 0.

    Args:
        ring: of rank 0; owned by this object from now on.
        rank: whose columns of y are read.
    """

    def __init__(self, ring: Ring, rank: int) -> None:
        self._ring = ring
        self._y = y_of(ring, rank)
        self._turn = 0
        self._ticket = 0
        self._submitted: Deal | None = None

    @contextmanager
    def assisting(self, lora: LoraBatch, arrivals: Sequence[Arrival]) -> Iterator[AssistedStep]:
        """See ``HostSide``."""
        yield AssistedStep(self, lora, arrivals)

    def choose(self, arrivals: Sequence[Arrival], layer: int, tokens: Sequence[int]) -> frozenset[int]:
        """Return what rank 0 has chosen, once it has."""
        self._turn += 1
        self._ticket = _wait(lambda: self._ring.turn(self._turn))
        if not self._ticket:
            return frozenset()
        description = self._ring.description(self._ticket)
        assert description is not None, "rank 0 waits for this rank before it goes on"
        slices = self._ring.cut(description[1])
        assert slices is not None
        return frozenset(part.adapter for part in slices)

    def deal(self, parts: Sequence[HostRows]) -> Deal:
        """Return where this rank finds what workers make of these rows."""
        return Deal(parts, 0, [], 0, self._y)

    def submit(self, layer: int, x: Tensor, deal: Deal | None) -> None:
        """Do nothing: rank 0 has the same x, and submits it."""
        self._submitted = deal

    def add_to(self, qkv: Tensor) -> None:
        """See ``HostSide``."""
        assert self._submitted is not None
        _wait(lambda: self._ring.has_all(self._ticket) or None)
        for part, y in zip(self._submitted.parts, self._submitted.y[self._ring.slot(self._ticket)], strict=True):
            qkv[part.start : part.stop].add_(y)

    def close(self) -> None:
        """Let go of the ring."""
        self._ring.close()


def _wait(look: Callable[[], _T | None]) -> _T:
    """Return what is seen as soon as there is something."""
    rests = Rests()
    while True:
        for _ in range(LOOKS):
            if (seen := look()) is not None:
                return seen
        rests.rest()
