"""What is still to happen in a simulated cluster, and in which order."""

import math
from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple


class Kind(IntEnum):
    """What happens; of several things at one time the first here comes first.

    What became known is heard before anything is decided by it, and engines begin their turns when all else is done:
    a request that comes at that very moment is part of the turn.
    """

    HEARD = 0
    """An engine has ended a turn, and tells."""
    COPIED = 1
    """A copy of an adapter has come."""
    PERIOD = 2
    """A period of demand ends."""
    REVIEW = 3
    """Co-migration looks at the cluster."""
    ARRIVAL = 4
    """A request arrives. These are not kept here, but with the workload."""
    TURN = 5
    """An engine begins a turn."""


class Event(NamedTuple):
    """Something to happen. Earlier ones are smaller; no two are equal, by their numbers.

    Attributes:
        at_s: when.
        kind: what.
        number: in the order in which they were added.
        act: does it; called with the time.
    """

    at_s: float
    kind: Kind
    number: int
    act: Callable[[float], None]


class Agenda:
    """See the module."""

    def __init__(self) -> None:
        self._of_engines: list[Event] = []
        self._others: list[Event] = []
        self._numbers = count()

    def add(self, at_s: float, kind: Kind, act: Callable[[float], None]) -> None:
        """Note something to happen at a time that is not past."""
        events = self._of_engines if kind in (Kind.HEARD, Kind.TURN) else self._others
        heappush(events, Event(at_s, kind, next(self._numbers), act))

    def pop_before(self, arrival_s: float) -> Event | None:
        """Take and return what happens next, None if it is an arrival at ``arrival_s``, or if there is nothing."""
        heaps = [events for events in (self._of_engines, self._others) if events]
        events = min(heaps, key=lambda events: events[0], default=None)
        if events is None or events[0][:2] > (arrival_s, Kind.ARRIVAL):
            return None
        return heappop(events)

    @property
    def engine_s(self) -> float:
        """When an engine begins a turn or tells of one next; infinity if none does."""
        return self._of_engines[0].at_s if self._of_engines else math.inf

    @property
    def other_s(self) -> float:
        """When anything else happens next, arrivals apart."""
        return self._others[0].at_s if self._others else math.inf
