"""Request counts per adapter, and the choice of adapters that have metric labels of their own.

A server may have ten thousand adapters, and a metrics page must stay small: only the busiest K are labelled, the rest
share ``other``. The busiest change with the traffic. So a label counts from when its adapter got it (its first
request, while labels are free), and ``other`` holds everything that is not labelled. When an adapter loses its label,
its counts move to ``other``. So the sum over all labels is exact, and ``other`` never decreases.
"""

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

OTHER = "other"

_HALF_LIFE_S = 300.0
_HYSTERESIS = 1.5
"""An adapter replaces the least busy labelled one only if it is busier by this factor."""


@dataclass
class RequestCounts:
    """Sums over finished requests, and over those that were refused.

    ``ttft_met`` and the like count requests with such a target. Times are whole nanoseconds: differences of float sums
    have rounding errors, and a counter that decreases by one looks to Prometheus like a restart.
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
        """Sum of TTFT, in seconds."""
        return self.ttft_ns / 1e9

    @property
    def e2e_s(self) -> float:
        """Sum of the time from arrival to end, in seconds."""
        return self.e2e_ns / 1e9

    @property
    def adapter_wait_s(self) -> float:
        """Sum of the time spent waiting for the adapter, in seconds."""
        return self.adapter_wait_ns / 1e9

    @property
    def kv_wait_s(self) -> float:
        """Sum of the further time spent waiting for KV, in seconds."""
        return self.kv_wait_ns / 1e9

    def add(self, other: "RequestCounts") -> None:
        """Add ``other`` in place."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def nanoseconds(seconds: float) -> int:
    """Return a time in seconds as whole nanoseconds."""
    return round(seconds * 1e9)


@dataclass
class AdapterTraffic:
    """One adapter's traffic (or the base model's).

    Attributes:
        clock: in seconds.
        all_adapters: the sum over all adapters, which is updated with it.
        total: since the server started.
        running: running requests.
        last_used_s: monotonic time of the latest end.
        activity: number of requests, decaying with time.
        baseline: ``total`` when the adapter got its label; None without a label.
    """

    clock: Callable[[], float]
    all_adapters: RequestCounts
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
        self.all_adapters.add(request)

    def activity_at(self, now_s: float) -> float:
        """Return the activity, decayed until ``now_s``."""
        return self.activity * math.exp2((self.last_used_s - now_s) / _HALF_LIFE_S)


class AdapterUsage:
    """Traffic of every adapter that had any.

    Args:
        labels: number of adapters that are labelled.
        clock: in seconds; replaced in tests.
    """

    def __init__(self, labels: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._labels = labels
        self._clock = clock
        self._base = AdapterTraffic(clock, RequestCounts())
        self._adapters: dict[str, AdapterTraffic] = {}
        self._all_adapters = RequestCounts()
        self._labels_used = 0

    def of(self, adapter: str | None) -> AdapterTraffic:
        """Return the usage of an adapter, or of the base model for None."""
        if adapter is None:
            return self._base
        usage = self._adapters.get(adapter)
        if usage is None:
            usage = self._adapters[adapter] = AdapterTraffic(self._clock, self._all_adapters)
            if self._labels_used < self._labels and adapter != OTHER:
                # A label is free: it counts from the first request on.
                usage.baseline = RequestCounts()
                self._labels_used += 1
        return usage

    @property
    def base(self) -> RequestCounts:
        """The base model's counts."""
        return self._base.total

    def peek(self, adapter: str) -> AdapterTraffic:
        """Return the usage of an adapter, read only; one without traffic gets neither a record nor a label."""
        return self._adapters.get(adapter) or AdapterTraffic(self._clock, self._all_adapters)

    def labelled(self) -> dict[str, RequestCounts]:
        """Choose the labelled adapters; return the counts under each label, ``other`` included."""
        now_s = self._clock()

        def rank(item: tuple[str, AdapterTraffic]) -> tuple[float, str]:
            name, usage = item
            return usage.activity_at(now_s) * (_HYSTERESIS if usage.baseline else 1.0), name

        # An adapter called "other" is counted in that sum, since two sums cannot have one label.
        named = (item for item in self._adapters.items() if item[0] != OTHER)
        chosen = dict(heapq.nlargest(self._labels, named, key=rank))
        for name, usage in self._adapters.items():
            if name not in chosen:
                usage.baseline = None
            elif usage.baseline is None:
                usage.baseline = usage.total.plus(RequestCounts())
        self._labels_used = len(chosen)
        counts = {name: usage.total.plus(usage.baseline or RequestCounts(), -1) for name, usage in chosen.items()}
        other = self._all_adapters
        for labelled in counts.values():
            other = other.plus(labelled, -1)
        return {**counts, OTHER: other}

    def forget(self, adapter: str) -> None:
        """Drop the record of a removed adapter; its counts stay in ``other``."""
        usage = self._adapters.pop(adapter, None)
        if usage is not None and usage.baseline is not None:
            self._labels_used -= 1
