"""Policies that keep one order: what they share."""

from abc import abstractmethod
from bisect import insort
from collections.abc import Iterable
from typing import Any

from lorikeet.core.request import Request
from lorikeet.memory.leases import Wait
from lorikeet.scheduling.admission import Admission, AdmissionQueue, EngineView


class Ordered(AdmissionQueue):
    """By a rank that a request keeps for as long as it lives, so one that was admitted before gets its place again.

    Whoever finds no room ends admission: no later one can starve it. Whoever waits for something else is passed over.
    """

    def __init__(self, view: EngineView) -> None:
        super().__init__(view)
        self._waiting: list[Request] = []

    @abstractmethod
    def rank(self, request: Request) -> Any:
        """Return its place in the order, the smallest first."""

    def urgency(self, request: Request) -> Any:
        """Return its rank."""
        return self.rank(request)

    def add(self, request: Request, now: float) -> None:
        """Insert by rank; those of equal rank keep the order in which they were added."""
        insort(self._waiting, request, key=self.rank)

    def remove(self, request: Request, now: float) -> None:
        """Take it out."""
        self._waiting.remove(request)

    def admit(self, now: float) -> Admission:
        """Yield by rank."""
        for request in tuple(self._waiting):
            match (yield request):
                case None:
                    self._waiting.remove(request)
                case Wait.ROOM | Wait.ADAPTER_ROOM:
                    return

    def waiting(self) -> Iterable[Request]:
        """Return them by rank."""
        return tuple(self._waiting)

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._waiting)
