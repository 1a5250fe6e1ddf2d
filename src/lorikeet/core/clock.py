"""Time is passed in: real for live engines, virtual for the simulator and for tests."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since an arbitrary start. Never goes backwards."""

    def now(self) -> float:
        """Return the present time in seconds."""
        ...


class WaitableClock(Clock, Protocol):
    """A clock on which somebody can wait: by sleeping, or by moving it."""

    def wait_until(self, when_s: float) -> None:
        """Return at ``when_s``, at once if it is past."""
        ...


class MonotonicClock:
    """The machine's monotonic clock; comparable between processes of one machine."""

    def now(self) -> float:
        """Return ``time.monotonic()``."""
        return time.monotonic()

    def wait_until(self, when_s: float) -> None:
        """Sleep until ``when_s``."""
        time.sleep(max(0.0, when_s - time.monotonic()))


class VirtualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds``.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"a clock cannot go back ({seconds} s)")
        self._now_s += seconds

    def wait_until(self, when_s: float) -> None:
        """Move forward to ``when_s``; a time already past changes nothing."""
        self._now_s = max(self._now_s, when_s)
