"""Request counts per adapter, and which adapters have metrics of their own.

A server may know ten thousand adapters, and a metrics page must stay small: only the busiest K are labelled, the rest
share ``other``. Which those are changes with the traffic, so a label counts from the moment its adapter was given it
(its first request, while labels are free), and ``other`` holds everything that is not labelled. When an adapter gives
its label up, its counts move to ``other``. So the sum over all labels is exact, and ``other`` never falls.
"""

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

OTHER = "other"

_HALF_LIFE_S = 300.0
_HYSTERESIS = 1.5
"""An adapter must be this much busier than the least busy labelled one to take its place."""


@dataclass
class RequestCounts:
    """Sums over finished requests, and over those that were refused for lack of room or time.

    Attributes of targets count requests that had one and met it, or did not. Times are whole nanoseconds: differences
    of sums of floats would be off by their rounding, and a counter that falls by that looks like one that began anew.
    """

    requests: int = 0
    aborted: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_count: int = 0
    ttft_ns: int = 0
    e2e_ns: int = 0
    adapter_wait_ns: int = 0
    kv_wait_ns: int = 0
    shed: int = 0
    ttft_met: int = 0
    ttft_missed: int = 0
    tpot_met: int = 0
    tpot_missed: int = 0

    def plus(self, other: "RequestCounts", sign: int = 1) -> "RequestCounts":
        """Return the sum, or with ``sign`` -1 the difference."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return RequestCounts(*(mine + sign * theirs for mine, theirs in pairs))

    @property
    def ttft_s(self) -> float:
        """Sum of TTFT."""
        return self.ttft_ns / 1e9

    @property
    def e2e_s(self) -> float:
        """Sum of the time from arrival to end."""
        return self.e2e_ns / 1e9

    @property
    def adapter_wait_s(self) -> float:
        """Sum of the time spent waiting for the adapter."""
        return self.adapter_wait_ns / 1e9

    @property
    def kv_wait_s(self) -> float:
        """Sum of the time spent waiting for KV beyond that."""
        return self.kv_wait_ns / 1e9

    def add(self, other: "RequestCounts") -> None:
        """Add ``other`` in place."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def nanoseconds(seconds: float) -> int:
    """Return a time as it is counted."""
    return round(seconds * 1e9)


@dataclass
class AdapterTraffic:
    """One adapter's traffic (or the base model's).

    Attributes:
        clock: seconds.
        everyone: the sum that it is part of.
        total: since the server started.
        running: requests under way.
        last_used_s: monotonic time of the latest end.
        activity: requests, the older ones counting less.
        baseline: ``total`` when the label was given; None while unlabelled.
    """

    clock: Callable[[], float]
    everyone: RequestCounts
    total: RequestCounts = field(default_factory=RequestCounts)
    running: int = 0
    last_used_s: float = 0.0
    activity: float = 0.0
    baseline: RequestCounts | None = None

    def add(self, request: RequestCounts) -> None:
        """Count one finished request."""
        now_s = self.clock()
        self.activity = self.activity_at(now_s) + 1
        self.last_used_s = now_s
        self.total.add(request)
        self.everyone.add(request)

    def activity_at(self, now_s: float) -> float:
        """Return the activity as it has faded until ``now_s``."""
        return self.activity * math.exp2((self.last_used_s - now_s) / _HALF_LIFE_S)


class AdapterUsage:
    """Traffic of every adapter that had any.

    Args:
        labels: how many adapters are labelled at once.
        clock: seconds; replaced in tests.
    """

    def __init__(self, labels: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._labels = labels
        self._clock = clock
        self._base = AdapterTraffic(clock, RequestCounts())
        self._adapters: dict[str, AdapterTraffic] = {}
        self._everyone = RequestCounts()
        self._given = 0

    def of(self, adapter: str | None) -> AdapterTraffic:
        """Return the usage of an adapter, or of the base model for None."""
        if adapter is None:
            return self._base
        usage = self._adapters.get(adapter)
        if usage is None:
            usage = self._adapters[adapter] = AdapterTraffic(self._clock, self._everyone)
            if self._given < self._labels and adapter != OTHER:
                # A label is free: it counts from the first request on.
                usage.baseline = RequestCounts()
                self._given += 1
        return usage

    @property
    def base(self) -> RequestCounts:
        """The base model's counts."""
        return self._base.total

    def peek(self, adapter: str) -> AdapterTraffic:
        """Return the usage of an adapter to look at; one without traffic gets neither a record nor a label."""
        return self._adapters.get(adapter) or AdapterTraffic(self._clock, self._everyone)

    def labelled(self) -> dict[str, RequestCounts]:
        """Choose who is labelled now; return the counts under each label, ``other`` included."""
        now_s = self._clock()

        def rank(item: tuple[str, AdapterTraffic]) -> tuple[float, str]:
            name, usage = item
            return usage.activity_at(now_s) * (_HYSTERESIS if usage.baseline else 1.0), name

        # One that is called like the sum of the others is counted among them: two sums cannot have one label.
        named = (item for item in self._adapters.items() if item[0] != OTHER)
        chosen = dict(heapq.nlargest(self._labels, named, key=rank))
        for name, usage in self._adapters.items():
            if name not in chosen:
                usage.baseline = None
            elif usage.baseline is None:
                usage.baseline = usage.total.plus(RequestCounts())
        self._given = len(chosen)
        counts = {name: usage.total.plus(usage.baseline or RequestCounts(), -1) for name, usage in chosen.items()}
        other = self._everyone
        for labelled in counts.values():
            other = other.plus(labelled, -1)
        return {**counts, OTHER: other}

    def forget(self, adapter: str) -> None:
        """Give up the record of an adapter that was removed; its counts stay in ``other``."""
        usage = self._adapters.pop(adapter, None)
        if usage is not None and usage.baseline is not None:
            self._given -= 1
