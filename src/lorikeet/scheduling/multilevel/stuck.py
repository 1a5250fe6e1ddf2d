"""Heads of classes that lack tokens or room, and since when."""

from typing import NamedTuple

from lorikeet.core.request import Request
from lorikeet.scheduling.multilevel.entries import Waiting

PATIENCE = 0.5
"""Of the longest run of a class: so long those who join others may take what its head waits for."""


class Stuck(NamedTuple):
    """The head of class ``number``, which has found no room or no tokens since ``since_s``; now it lacks the former."""

    number: int
    entry: Waiting
    since_s: float
    lacks_room: bool


class StuckHeads:
    """One for each class at most.

    Attributes:
        longest_run_s: by class number, the longest time from admission to the end.
    """

    def __init__(self) -> None:
        self._by_class: dict[int, Stuck] = {}
        self.longest_run_s: dict[int, float] = {}

    def ran(self, number: int, ran_s: float) -> None:
        """A request of a class has ended after so long a time."""
        self.longest_run_s[number] = max(self.longest_run_s.get(number, 0.0), ran_s)

    def has_waited(self, head: Stuck, now: float) -> bool:
        """Whether a head has waited for half of what its class's longest request ran; so it starts within that time."""
        runs_s = self.longest_run_s
        return now - head.since_s >= PATIENCE * runs_s.get(head.number, max(runs_s.values(), default=0.0))

    def note(self, number: int, entry: Waiting, now: float, *, lacks_room: bool = True) -> None:
        """The head of a class could not be admitted, perhaps once more."""
        before = self._by_class.get(number)
        since_s = before.since_s if before is not None and before.entry is entry else now
        self._by_class[number] = Stuck(number, entry, since_s, lacks_room)

    def forget(self, number: int, request: Request) -> None:
        """A request waits no more."""
        if number in self._by_class and self._by_class[number].entry.request is request:
            del self._by_class[number]

    def clear(self) -> None:
        """Classes are others from now on."""
        self._by_class.clear()

    def of(self, number: int) -> Stuck | None:
        """Return the head of a class, if it is stuck."""
        return self._by_class.get(number)

    def oldest_without_room(self) -> Stuck | None:
        """Return who of those that lack room arrived first."""
        without = (stuck for stuck in self._by_class.values() if stuck.lacks_room)
        return min(without, key=lambda stuck: stuck.entry.request.arrival_s, default=None)
