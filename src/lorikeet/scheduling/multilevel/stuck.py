"""Heads of classes that lack tokens or room, and classes that full steps keep from being tried; and since when."""

from collections.abc import Iterable
from typing import NamedTuple

from lorikeet.core.request import Request
from lorikeet.scheduling.multilevel.entries import Waiting

PATIENCE = 0.5
"""Of the longest run of a class: so long those who join others may take what its head waits for, and full steps may
end before it is tried."""


class Stuck(NamedTuple):
    """The head of class ``number``, which has found no room or no tokens since ``since_s``; now it lacks the former."""

    number: int
    entry: Waiting
    since_s: float
    lacks_room: bool


class StuckHeads:
    """One head for each class at most."""

    def __init__(self) -> None:
        self._by_class: dict[int, Stuck] = {}
        self._untried_since_s: dict[int, float] = {}
        self._longest_run_s: dict[int, float] = {}

    def ran(self, number: int, ran_s: float) -> None:
        """A request of a class has ended after so long a time."""
        self._longest_run_s[number] = max(self._longest_run_s.get(number, 0.0), ran_s)

    def has_waited(self, head: Stuck, now: float) -> bool:
        """Whether a head has waited for half of what its class's longest request ran; so it starts within that time."""
        return now - head.since_s >= self._patience_s(head.number)

    def untried_for_long(self, numbers: Iterable[int], now: float) -> list[int]:
        """Of the classes with waiters, return those that were not tried for so long a time, the longest first.

        That all of them wait to be tried is noted.
        """
        since_s = {number: self._untried_since_s.get(number, now) for number in numbers}
        self._untried_since_s = since_s
        late = (number for number, at_s in since_s.items() if at_s < now and now - at_s >= self._patience_s(number))
        return sorted(late, key=lambda number: since_s[number])

    def tried(self, number: int) -> None:
        """The head of a class was tried, or needed not be: it lacks tokens or room."""
        self._untried_since_s.pop(number, None)

    def _patience_s(self, number: int) -> float:
        runs_s = self._longest_run_s
        return PATIENCE * runs_s.get(number, max(runs_s.values(), default=0.0))

    def note(self, number: int, entry: Waiting, now: float, *, lacks_room: bool = True) -> None:
        """The head of a class could not be admitted, perhaps once more."""
        self.tried(number)
        before = self._by_class.get(number)
        since_s = before.since_s if before is not None and before.entry is entry else now
        self._by_class[number] = Stuck(number, entry, since_s, lacks_room)

    def forget(self, number: int, request: Request) -> None:
        """A request waits no more."""
        if number in self._by_class and self._by_class[number].entry.request is request:
            del self._by_class[number]

    def renew(self, longest_run_s: dict[int, float]) -> None:
        """Classes are others from now on; of each that of late had somebody end, the longest run is given."""
        self._by_class.clear()
        self._untried_since_s.clear()
        self._longest_run_s = longest_run_s

    def of(self, number: int) -> Stuck | None:
        """Return the head of a class, if it is stuck."""
        return self._by_class.get(number)

    def oldest_without_room(self) -> Stuck | None:
        """Return who of those that lack room arrived first."""
        without = (stuck for stuck in self._by_class.values() if stuck.lacks_room)
        return min(without, key=lambda stuck: stuck.entry.request.arrival_s, default=None)
