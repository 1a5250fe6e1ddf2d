"""Counts requests by adapter and by tenant."""

import bisect
import heapq
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

OTHER = "other"
"""Label of all adapters without one of their own.

A server may have ten thousand adapters, and a metrics page must stay small: only K are labelled, half of them because
they are the busiest, the others because they were the slowest lately, which are often rare. Both change with the
traffic. So a label counts from when its adapter got it (its first request, while labels are free), and ``other`` holds
everything that is not labelled. When an adapter loses its label, its counts move to ``other``. So the sum over all
labels is exact, and ``other`` never decreases.
"""

TTFT_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, math.inf)
"""Upper bounds of an adapter's histogram of TTFT: few, since each is a series for every labelled adapter."""
_NO_TTFT = (0,) * len(TTFT_BOUNDS_S)

MOST_TENANTS = 4096
"""Tenants that are counted one by one."""
_HALF_LIFE_S = 300.0
_HYSTERESIS = 1.5
"""An adapter replaces a labelled one only if it is busier, or slower, by this factor."""


@dataclass
class RequestCounts:
    """Holds sums over finished and refused requests.

    ``ttft_met`` and similar fields count requests with such a target; ``ttft_buckets`` counts requests by
    ``TTFT_BOUNDS_S``. Times are whole nanoseconds: differences of float sums have rounding errors, and Prometheus takes
    a counter that decreases for a restart.
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
    refused: int = 0
    shed: int = 0
    ttft_met: int = 0
    ttft_missed: int = 0
    tpot_met: int = 0
    tpot_missed: int = 0
    ttft_buckets: tuple[int, ...] = _NO_TTFT

    def plus(self, other: "RequestCounts", sign: int = 1) -> "RequestCounts":
        """Return the sum of two counts; with ``sign`` -1, the difference."""
        total = RequestCounts()
        total._set_to(self, other, sign)
        return total

    def _set_to(self, one: "RequestCounts", other: "RequestCounts", sign: int) -> None:
        theirs = vars(other)
        counts = {name: mine + sign * theirs[name] for name, mine in vars(one).items() if name != "ttft_buckets"}
        vars(self).update(counts)
        self.ttft_buckets = tuple(
            [mine + sign * of for mine, of in zip(one.ttft_buckets, other.ttft_buckets, strict=True)]
        )

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
        self._set_to(self, other, 1)


def ttft_bucket(seconds: float | None) -> tuple[int, ...]:
    """Return the ``ttft_buckets`` of one request; None without a first token."""
    if seconds is None:
        return _NO_TTFT
    at = bisect.bisect_left(TTFT_BOUNDS_S, seconds)
    return tuple(int(number == at) for number in range(len(TTFT_BOUNDS_S)))


def nanoseconds(seconds: float) -> int:
    """Return a time in seconds as whole nanoseconds."""
    return round(seconds * 1e9)


@dataclass
class AdapterTraffic:
    """Counts the traffic of one adapter, or of the base model.

    Attributes:
        clock: returns the present time in seconds.
        all_adapters: the sum over all adapters, which this object also updates.
        total: counts since the server's start.
        running: number of running requests.
        last_used_s: monotonic time of the latest end.
        activity: number of requests, decaying with time.
        slowest_s: largest TTFT, decaying with time.
        baseline: ``total`` when the adapter got its label; None without a label.
    """

    clock: Callable[[], float]
    all_adapters: RequestCounts
    total: RequestCounts = field(default_factory=RequestCounts)
    running: int = 0
    last_used_s: float = 0.0
    activity: float = 0.0
    slowest_s: float = 0.0
    baseline: RequestCounts | None = None

    def add(self, request: RequestCounts) -> None:
        """Count one finished request."""
        now_s = self.clock()
        self.activity = self.activity_at(now_s) + 1
        self.slowest_s = max(self.slowest_at(now_s), request.ttft_s)
        self.last_used_s = now_s
        self.total.add(request)
        self.all_adapters.add(request)

    def activity_at(self, now_s: float) -> float:
        """Return the activity at ``now_s``, after its decay."""
        return self.activity * self._decay(now_s)

    def slowest_at(self, now_s: float) -> float:
        """Return the largest TTFT at ``now_s``, after its decay."""
        return self.slowest_s * self._decay(now_s)

    def _decay(self, now_s: float) -> float:
        return math.exp2((self.last_used_s - now_s) / _HALF_LIFE_S)


class AdapterUsage:
    """Counts the traffic of every adapter, or of every tenant.

    Args:
        labels: number of adapters with labels.
        clock: returns the present time in seconds. Tests replace it.
        most: largest number of records; None for no limit. Beyond it, the record unused for longest is dropped, and its
            counts stay in ``other``.
    """

    def __init__(self, labels: int, clock: Callable[[], float] = time.monotonic, *, most: int | None = None) -> None:
        self._labels = labels
        self._clock = clock
        self._most = most
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
                # A label is free, so the adapter is counted from its first request on.
                usage.baseline = RequestCounts()
                self._labels_used += 1
            if self._most is not None and len(self._adapters) > self._most:
                idle = (item for item in self._adapters.items() if not item[1].running and item[0] != adapter)
                self.forget(min(idle, key=lambda item: item[1].last_used_s, default=(adapter, usage))[0])
        return usage

    @property
    def base(self) -> AdapterTraffic:
        """The base model's usage."""
        return self._base

    @property
    def all_adapters(self) -> RequestCounts:
        """The sum over all adapters, without the base model."""
        return self._all_adapters

    def peek(self, adapter: str) -> AdapterTraffic:
        """Return the usage of an adapter without creating a record or label for it. The caller must not change it."""
        return self._adapters.get(adapter) or AdapterTraffic(self._clock, self._all_adapters)

    def recent_requests(self, adapter: str) -> float:
        """Return an adapter's running requests plus its ended ones, which decay with time."""
        usage = self.peek(adapter)
        return usage.running + usage.activity_at(self._clock())

    def labelled(self) -> dict[str, RequestCounts]:
        """Choose the labelled adapters, and return the counts under each label, including ``other``."""
        now_s = self._clock()

        def kept(usage: AdapterTraffic) -> float:
            return _HYSTERESIS if usage.baseline else 1.0

        # An adapter called "other" is included in the sum of the others, since two sums cannot share a label.
        named = [item for item in self._adapters.items() if item[0] != OTHER]

        def busy(item: tuple[str, AdapterTraffic]) -> tuple[float, str]:
            return item[1].activity_at(now_s) * kept(item[1]), item[0]

        def slow(item: tuple[str, AdapterTraffic]) -> tuple[float, tuple[float, str]]:
            return item[1].slowest_at(now_s) * kept(item[1]), busy(item)

        chosen = dict(heapq.nlargest((self._labels + 1) // 2, named, key=busy))
        rest = (item for item in named if item[0] not in chosen)
        chosen |= heapq.nlargest(self._labels - len(chosen), rest, key=slow)
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

    def running(self, labels: Iterable[str]) -> dict[str, int]:
        """Return the running requests under each label that :meth:`labelled` returned."""
        by_label = dict.fromkeys(labels, 0)
        for name, usage in self._adapters.items():
            by_label[name if name in by_label else OTHER] += usage.running
        return by_label

    def forget(self, adapter: str) -> None:
        """Drop the record of a removed adapter. Its counts stay in ``other``."""
        usage = self._adapters.pop(adapter, None)
        if usage is not None and usage.baseline is not None:
            self._labels_used -= 1
