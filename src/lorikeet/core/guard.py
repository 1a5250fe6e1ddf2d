"""The guard: switches a part of the engine off while its safe alternative costs less.

A part is a mechanism with an alternative that needs no estimates. Its shadow prices both choices on the events that the
engine sees, whichever of them acts, and passes the prices to a :class:`Guard`, which decides which one acts.
"""

import math
from collections import deque
from enum import StrEnum
from typing import NamedTuple

from lorikeet.core.messages import GuardStats

HALF_LIFE_S = 60.0
"""Time in seconds in which what a guard or a shadow has measured fades to half."""
_SHARE = 0.01
"""Share of the time for which all requests wait that the acting choice may cost more, before it is switched."""


_DEVIATIONS_OFF = 4.0
_DEVIATIONS_ON = 2.0
"""Standard deviations that the regret must exceed: a part is switched off if it is almost certain that it loses, and on
again soon if it would have won."""
_SETTLING_S = 3.0
"""Seconds after a switch in which costs do not count, because the choice that begins to act inherits the state of the
other one: KV without copies, for example, or no reserve of free blocks."""
_FEWEST = 8
"""Fewest events of a regret that causes a switch."""
_MOST_LOGGED = 64
"""Switches that are kept for a log that nobody reads."""


class GuardedPart(StrEnum):
    """Guarded parts of the engine."""

    COPIES = "copies"
    """KV is copied to the host ahead of its eviction; else when it is evicted."""
    EVICTION = "eviction"
    """KV that is rarely reused is evicted first; else the least recently used."""
    ORDER = "order"
    """Short requests go first within bounds; else the first to come."""
    LOADS = "loads"
    """KV on the host is loaded where that is estimated to pay; else it is computed again."""


class Switch(NamedTuple):
    """A change of a guard's choice.

    Attributes:
        part: the part.
        is_on: whether it acts now.
        regret_s: regret that caused the switch, in seconds.
        at_s: the time.
    """

    part: GuardedPart
    is_on: bool
    regret_s: float
    at_s: float

    def __str__(self) -> str:
        """Return the switch in words."""
        now, before = ("on", "without it") if self.is_on else ("off", "with it")
        return f"{self.part} is switched {now}: {before} requests waited {self.regret_s:.3f} s longer"


class Guard:
    """Chooses between a part and its alternative by what both cost.

    The regret is what the acting choice has cost more than the other one since it last cost no more; it fades. The
    choice changes when the regret exceeds its bound: a share of the time for which all requests wait, and some standard
    deviations of a sum of such differences without a winner. Each recent time that the part was switched off doubles
    the deviations that it takes to do it again.

    For some seconds after a change nothing is counted, since the state is still that of the other choice.

    At the start the part is on: without data, a part behaves like its alternative by itself.

    Args:
        part: the part.

    Attributes:
        is_on: whether the part acts.
        regret_s: the regret in seconds.
        switches: number of changes so far.
    """

    def __init__(self, part: GuardedPart) -> None:
        self.part = part
        self.is_on = True
        self.regret_s = 0.0
        self.switches = 0
        self._waited_s = 0.0
        self._events = self._squares = self._recent = 0.0
        self._total_on_s = self._total_off_s = 0.0
        self._at_s = 0.0
        self._settled_at_s = -math.inf

    @property
    def bound_s(self) -> float:
        """Regret in seconds beyond which the choice changes; infinite before enough events."""
        if self._events < _FEWEST:
            return math.inf
        deviations = _DEVIATIONS_OFF * 2**self._recent if self.is_on else _DEVIATIONS_ON
        return max(_SHARE * self._waited_s, deviations * math.sqrt(self._squares))

    def note(self, on_s: float, off_s: float, now: float) -> Switch | None:
        """Add the costs of an event.

        Args:
            on_s: seconds that all requests together wait if the part acts.
            off_s: the same for its alternative.
            now: the time.

        Returns:
            The switch that it causes; None for none.
        """
        self._fade(now)
        difference_s = on_s - off_s
        self._total_on_s += on_s
        self._total_off_s += off_s
        if not difference_s or now < self._settled_at_s:
            return None
        self._events += 1
        self._squares += difference_s * difference_s
        self.regret_s += difference_s if self.is_on else -difference_s
        if self.regret_s <= 0:
            self._begin()
        if self.regret_s <= self.bound_s:
            return None
        switch = Switch(self.part, not self.is_on, self.regret_s, now)
        self.is_on = switch.is_on
        self._begin()
        self._settled_at_s = now + _SETTLING_S
        self._recent += not self.is_on
        self.switches += 1
        return switch

    def _begin(self) -> None:
        """Begin a new regret."""
        self.regret_s = self._events = self._squares = 0.0

    def waited(self, seconds: float, now: float) -> None:
        """Add time for which requests waited for their first tokens, for whatever reason."""
        self._fade(now)
        self._waited_s += seconds

    def _fade(self, now: float) -> None:
        passed_s = now - self._at_s
        if passed_s <= 0:
            return
        fade = 0.5 ** (passed_s / HALF_LIFE_S)
        self._at_s = now
        self._waited_s *= fade
        self._events *= fade
        self._squares *= fade
        self._recent *= fade
        self.regret_s *= fade

    def stats(self) -> GuardStats:
        """Return the state and the sums since the start."""
        return GuardStats(self.is_on, self.regret_s, self.switches, self._total_on_s, self._total_off_s)


class Guards:
    """The guards of an engine.

    Args:
        enabled: False leaves every part on, whatever it costs.
    """

    def __init__(self, *, enabled: bool = False) -> None:
        self.enabled = enabled
        self._guards: dict[GuardedPart, Guard] = {}
        self._switched: list[Switch] = []
        self._logged: deque[Switch] = deque(maxlen=_MOST_LOGGED)

    def add(self, part: GuardedPart) -> None:
        """Guard a part from now on; nothing happens if guards are not enabled."""
        if self.enabled:
            self._guards.setdefault(part, Guard(part))

    def is_on(self, part: GuardedPart) -> bool:
        """Return whether a part acts. A part that is not guarded always does."""
        guard = self._guards.get(part)
        return guard is None or guard.is_on

    def note(self, part: GuardedPart, on_s: float, off_s: float, now: float) -> bool:
        """Add the costs of an event of a guarded part (see :meth:`Guard.note`); return whether it was switched."""
        switch = self._guards[part].note(on_s, off_s, now)
        if switch is not None:
            self._switched.append(switch)
            self._logged.append(switch)
        return switch is not None

    def waited(self, seconds: float, now: float) -> None:
        """Add time for which requests waited for their first tokens, for whatever reason."""
        for guard in self._guards.values():
            guard.waited(seconds, now)

    def take_switches(self) -> list[Switch]:
        """Return the switches since the last call, for the next request that is admitted."""
        switched = self._switched
        self._switched = []
        return switched

    def take_logged(self) -> list[Switch]:
        """Return the switches since the last call, for the log."""
        logged = list(self._logged)
        self._logged.clear()
        return logged

    def stats(self) -> dict[str, GuardStats]:
        """Return the statistics of each guarded part."""
        return {part.value: guard.stats() for part, guard in self._guards.items()}
