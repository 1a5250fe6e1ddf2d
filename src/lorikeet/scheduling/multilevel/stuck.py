"""Heads of classes that have found no room, and since when."""

from typing import NamedTuple

from lorikeet.core.request import Request
from lorikeet.scheduling.multilevel.entries import Waiting


class Stuck(NamedTuple):
    """The head of class ``number``, without room since ``since_s``."""

    number: int
    entry: Waiting
    since_s: float


class StuckHeads:
    """One for each class at most."""

    def __init__(self) -> None:
        self._by_class: dict[int, Stuck] = {}

    def note(self, number: int, entry: Waiting, now: float) -> None:
        """The head of a class has found no room, perhaps once more."""
        if number not in self._by_class or self._by_class[number].entry is not entry:
            self._by_class[number] = Stuck(number, entry, now)

    def forget(self, number: int, request: Request) -> None:
        """A request waits no more."""
        if number in self._by_class and self._by_class[number].entry.request is request:
            del self._by_class[number]

    def clear(self) -> None:
        """Classes are others from now on."""
        self._by_class.clear()

    def oldest(self) -> Stuck | None:
        """Return who arrived first."""
        return min(self._by_class.values(), key=lambda stuck: stuck.entry.request.arrival_s, default=None)
