"""Clocks: monotonic for live engines, virtual for the simulator and tests, and the clock of another machine."""

import time
from pathlib import Path
from typing import Protocol

import msgspec

from lorikeet.core.messages import StepOutputs
from lorikeet.core.request import Request


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


_DRIFT = 1e-4
"""Most by which the two clocks come apart, in seconds per second: more than clocks that are kept right do."""


def boot_id() -> str:
    """Return what tells one machine's monotonic clock from another's (it begins when the kernel is booted)."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class RemoteClock:
    """Knows by how much an engine's clock is behind ours, from the times of its messages.

    Each of them tells a bound: it came after it was sent. The tightest is kept, and is a message's way too large.

    Args:
        sent_s: a time on the engine's clock.
        received_s: when we heard of it, on ours.
    """

    def __init__(self, sent_s: float, received_s: float) -> None:
        self._behind_s = received_s - sent_s
        self._heard_s = received_s

    def theirs(self, request: Request) -> Request:
        """Return a request of ours with the engine's times."""
        return msgspec.structs.replace(request, arrival_s=request.arrival_s - self._behind_s)

    def ours(self, outputs: StepOutputs, received_s: float) -> StepOutputs:
        """Return what the engine told at ``received_s`` with our times; its gauges tell how late it is."""
        stats = outputs.stats
        if stats is not None:
            loosened_s = self._behind_s + _DRIFT * (received_s - self._heard_s)
            self._behind_s, self._heard_s = min(loosened_s, received_s - stats.at_s), received_s
            stats = msgspec.structs.replace(stats, at_s=stats.at_s + self._behind_s)
        return msgspec.structs.replace(
            outputs,
            events=tuple(msgspec.structs.replace(each, at_s=each.at_s + self._behind_s) for each in outputs.events),
            adapter_events=tuple(
                msgspec.structs.replace(each, at_s=each.at_s + self._behind_s) for each in outputs.adapter_events
            ),
            stats=stats,
        )
