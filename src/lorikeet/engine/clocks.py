"""The monotonic clock of another machine, in terms of this one's."""

from pathlib import Path

import msgspec

from lorikeet.core.messages import StepOutputs
from lorikeet.core.request import Request

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
