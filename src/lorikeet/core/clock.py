"""Clocks: monotonic for live engines, virtual for simulator and tests, and the clock of another machine."""

import time
from pathlib import Path
from typing import Protocol

import msgspec

from lorikeet.core.messages import StepOutputs
from lorikeet.core.request import Request


class Clock(Protocol):
    """A clock of seconds since an arbitrary start. It never goes backwards."""

    def now(self) -> float:
        """Return the present time in seconds."""
        ...


class WaitableClock(Clock, Protocol):
    """A clock that can wait: a real clock sleeps, a virtual clock moves forward."""

    def wait_until(self, when_s: float) -> None:
        """Wait until ``when_s``. Returns immediately if the time is past."""
        ...


class MonotonicClock:
    """The machine's monotonic clock. Times are comparable between processes of one machine."""

    def now(self) -> float:
        """Return ``time.monotonic()``."""
        return time.monotonic()

    def wait_until(self, when_s: float) -> None:
        """Sleep until ``when_s``."""
        time.sleep(max(0.0, when_s - time.monotonic()))


class VirtualClock:
    """A clock that moves only by :meth:`advance` and :meth:`wait_until`."""

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
        """Move forward to ``when_s``. A past time changes nothing."""
        self._now_s = max(self._now_s, when_s)


_MAX_DRIFT = 1e-4
"""Upper bound of the drift between two clocks, in seconds per second; synchronised clocks drift less."""


def boot_id() -> str:
    """Return the kernel's boot id. Monotonic clocks with the same boot id are the same clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class RemoteClock:
    """Converts times between this machine's monotonic clock and the clock of an engine on another machine.

    A message arrives after it was sent, so each message gives an upper bound of the offset between the clocks. The
    tightest bound is kept. It is too large by the latency of its message.

    Args:
        sent_s: time at which a message was sent, on the engine's clock.
        received_s: time at which the message arrived, on this machine's clock.
    """

    def __init__(self, sent_s: float, received_s: float) -> None:
        self._offset_s = received_s - sent_s
        self._updated_s = received_s

    def to_remote(self, request: Request) -> Request:
        """Return a request with its arrival time on the engine's clock."""
        return msgspec.structs.replace(request, arrival_s=request.arrival_s - self._offset_s)

    def to_local(self, outputs: StepOutputs, received_s: float) -> StepOutputs:
        """Return outputs with times on this machine's clock.

        Gauges also tighten the bound.

        Args:
            outputs: outputs with times on the engine's clock.
            received_s: time at which the outputs arrived, on this machine's clock.
        """
        stats = outputs.stats
        if stats is not None:
            loosened_s = self._offset_s + _MAX_DRIFT * (received_s - self._updated_s)
            self._offset_s = min(loosened_s, received_s - stats.at_s)
            self._updated_s = received_s
            stats = msgspec.structs.replace(stats, at_s=stats.at_s + self._offset_s)
        return msgspec.structs.replace(
            outputs,
            events=tuple(msgspec.structs.replace(each, at_s=each.at_s + self._offset_s) for each in outputs.events),
            adapter_events=tuple(
                msgspec.structs.replace(each, at_s=each.at_s + self._offset_s) for each in outputs.adapter_events
            ),
            stats=stats,
        )
