"""In which order waiting requests are considered. One short class each, one row in ``ADMISSION``."""

from bisect import insort
from collections.abc import Callable, Iterator
from typing import Protocol

from lorikeet.core.request import Request


class AdmissionQueue(Protocol):
    """Holds the waiting requests."""

    def add(self, request: Request, now: float) -> None:
        """Take a new or a resumed request in."""
        ...

    def remove(self, request: Request) -> None:
        """Take a request out: admitted or aborted."""
        ...

    def candidates(self, now: float) -> Iterator[Request]:
        """Yield the waiting requests in the order in which they should be tried. Changes nothing."""
        ...

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        ...


class Fifo:
    """First come, first served, by the time of arrival. A preempted request keeps its place."""

    def __init__(self) -> None:
        self._waiting: list[Request] = []

    def add(self, request: Request, now: float) -> None:
        """Insert by arrival; equal arrivals keep the order in which they were added."""
        insort(self._waiting, request, key=lambda waiting: waiting.arrival_s)

    def remove(self, request: Request) -> None:
        """Take it out."""
        self._waiting.remove(request)

    def candidates(self, now: float) -> Iterator[Request]:
        """Yield from the oldest to the newest."""
        return iter(tuple(self._waiting))

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._waiting)


ADMISSION: dict[str, Callable[[], AdmissionQueue]] = {"fifo": Fifo}
