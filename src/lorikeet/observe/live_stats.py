"""Keeps the latest requests of each adapter, in memory of a fixed size, for ``/v1/stats``.

Counters since the start are in ``traffic.py``. This module keeps the requests of the last minutes one by one, so that
percentiles and parts of TTFT describe the present, and errors have their messages.
"""

import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from lorikeet.client.state import ReplicaView
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import AdapterEvent, AdapterLoaded, Mechanism, RequestTimings
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId
from lorikeet.core.messages import EngineStats
from lorikeet.core.request import Request
from lorikeet.http.errors import hide_paths
from lorikeet.observe.ended_request import EndedRequest
from lorikeet.observe.waits import cause_of, parts_of

RECENT_S = 300.0
"""Requests that ended longer ago are left out of percentiles and means."""
MOST_ADAPTERS = 2048
"""Most adapters whose requests are kept one by one; the least recently used are forgotten first."""
REQUESTS_PER_ADAPTER = 64
ERRORS_PER_ADAPTER = 8
_MOST_REQUESTS = 2048
_MOST_GAPS = 4096
_RATE_S = 10
HISTORY_EVERY_S = 2.0
MOST_HISTORY = 300
"""Samples of the history: ten minutes."""

BASE = ""
"""Key of the base model, as in the label of metrics."""


class RecentRequest(NamedTuple):
    """A request that has ended. Times are in seconds; ``ended_s`` is on the monotonic clock.

    Attributes:
        request_id: id of the sequence.
        tenant: tenant of the request.
        ended_s: time of the end.
        reason: the finish reason.
        error: the error message; empty without an error.
        prompt_tokens, completion_tokens: lengths of prompt and answer.
        parts: the parts of TTFT in the order of ``PARTS``. Without a first token, they last until the end.
        ttft_s: time from arrival to first token; None without a first token.
        itl_s: mean gap between outputs; None for a single output.
        itl_max_s: largest gap between outputs.
        e2e_s: time from arrival to end.
        hit: whether the adapter was on the device at the admission; None without an adapter or an admission.
        cause: cause of the time in the queue.
    """

    request_id: RequestId
    tenant: str
    ended_s: float
    reason: str
    error: str
    prompt_tokens: int
    completion_tokens: int
    parts: tuple[float, float, float, float]
    ttft_s: float | None
    itl_s: float | None
    itl_max_s: float | None
    e2e_s: float
    hit: bool | None
    cause: str


class RecentError(NamedTuple):
    """An error of an adapter's request, or of its load (``request_id`` is None)."""

    unix_s: float
    request_id: RequestId | None
    tenant: str
    message: str


class Rate:
    """Computes a rate per second over the last whole seconds.

    Args:
        clock: returns the present time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_s = clock()
        self._seconds: deque[list[int]] = deque()

    def add(self, count: int = 1) -> None:
        """Count now."""
        second = int(self._clock())
        if not self._seconds or self._seconds[-1][0] != second:
            self._forget(second)
            self._seconds.append([second, 0])
        self._seconds[-1][1] += count

    def per_s(self) -> float:
        """Return the mean rate of the last ten seconds, or since the start if that is shorter."""
        now_s = self._clock()
        self._forget(int(now_s))
        passed_s = min(float(_RATE_S), now_s - self._started_s)
        return sum(count for _, count in self._seconds) / max(passed_s, 1.0)

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - _RATE_S:
            self._seconds.popleft()


def percentiles(values: Iterable[float]) -> dict[str, float | int] | None:
    """Return count, mean, median, P90, P99 and maximum as JSON, in seconds; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None

    def at(share: float) -> float:
        return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 6)

    mean = round(sum(ordered) / len(ordered), 6)
    return {"count": len(ordered), "mean": mean, "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": at(1.0)}


def _is_hit(request: Request, timings: RequestTimings) -> bool | None:
    if request.adapter is None or timings.admitted_s is None:
        return None
    return not timings.waits_for_adapter and Mechanism.ASSIST not in timings.saved_s


class OpenRequest:
    """A request that has not ended.

    Args:
        live: the statistics that get the ended request.
        request: the submitted request, whose tokens are not kept.
        timings: times of its events, which are filled while it runs.
    """

    def __init__(self, live: "LiveStats", request: Request, timings: RequestTimings) -> None:
        self.adapter = BASE if request.adapter is None else request.adapter.name
        self.request_id = request.request_id
        self.timings = timings
        self._live = live
        self._gaps = 0
        self._gaps_s = 0.0
        self._largest_s = 0.0

    def gap(self, seconds: float) -> None:
        """Count the time between two outputs."""
        self._gaps += 1
        self._gaps_s += seconds
        self._largest_s = max(self._largest_s, seconds)

    def on_ended(self, ended: EndedRequest) -> None:
        """Move the request to the ended requests."""
        request = ended.request
        timings = ended.timings
        recent = RecentRequest(
            request_id=request.request_id,
            tenant=request.tenant,
            ended_s=ended.ended_s,
            reason=ended.reason,
            error=ended.error,
            prompt_tokens=ended.prompt_tokens,
            completion_tokens=ended.completion_tokens,
            parts=parts_of(timings, ended.ended_s),
            ttft_s=ended.ttft_s,
            itl_s=self._gaps_s / self._gaps if self._gaps else None,
            itl_max_s=self._largest_s if self._gaps else None,
            e2e_s=ended.e2e_s,
            hit=_is_hit(request, timings),
            cause=cause_of(timings),
        )
        self._live.end(self, recent, is_background=request.background)


class AdapterHistory:
    """Holds the latest requests and errors of one adapter, or of the base model.

    Attributes:
        open: requests that have not ended.
        ended: the latest ended requests.
        errors: the latest errors of requests and loads.
        refused: number of requests answered with a 429 since the start.
        hits, misses: number of requests since the start whose adapter was, or was not, on the device at their
            admission.
        queue_s: seconds in the queue by cause, since the start.
        saved_s: seconds saved by mechanism, since the start.
        finished: rate of ended requests per second.
        is_removed: whether the adapter was removed, so that the history ends with its last open request.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.open: dict[RequestId, OpenRequest] = {}
        self.ended: deque[RecentRequest] = deque(maxlen=REQUESTS_PER_ADAPTER)
        self.errors: deque[RecentError] = deque(maxlen=ERRORS_PER_ADAPTER)
        self.refused = self.hits = self.misses = 0
        self.queue_s: dict[str, float] = {}
        self.saved_s: dict[str, float] = {}
        self.finished = Rate(clock)
        self.is_removed = False

    def recent(self, now_s: float) -> list[RecentRequest]:
        """Return the requests that ended in the last ``RECENT_S``, the oldest first."""
        return [each for each in self.ended if each.ended_s > now_s - RECENT_S]


class LoadHistory(NamedTuple):
    """Counts the loads of one version onto the device, with the duration in seconds or the error of the latest."""

    loads: int = 0
    seconds: float = 0.0
    error: str | None = None


class LiveStats:
    """Holds the latest requests of all adapters, rates, and a history of the memory.

    Args:
        views: returns the replicas.
        clock: returns the monotonic time in seconds. Tests replace it.

    Attributes:
        loads: loads of adapters by version.
        history: samples of load and memory, oldest first.
        prompt_tokens, completion_tokens, finished: rates per second.
        unloaded: names of adapters that a request would load, listed at the time ``unloaded_at_s``.
    """

    def __init__(
        self, views: Callable[[], Mapping[ReplicaId, ReplicaView]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._views = views
        self._clock = clock
        self._unix_minus_clock_s = time.time() - clock()
        self.started_s = clock()
        self._adapters: OrderedDict[str, AdapterHistory] = OrderedDict()
        self.loads: OrderedDict[AdapterDigest, LoadHistory] = OrderedDict()
        self._ended: deque[RecentRequest] = deque(maxlen=_MOST_REQUESTS)
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_MOST_GAPS)
        self.history: deque[dict[str, Any]] = deque(maxlen=MOST_HISTORY)
        self._sampled_s = self.unloaded_at_s = -math.inf
        self.unloaded: list[str] = []
        self.prompt_tokens, self.completion_tokens, self.finished = (Rate(clock) for _ in range(3))

    def begin(self, request: Request, timings: RequestTimings) -> OpenRequest:
        """Start to follow a submitted request."""
        opened = OpenRequest(self, request, timings)
        history = self._of(opened.adapter)
        history.open[opened.request_id] = opened
        history.is_removed = False
        return opened

    def output(self, opened: OpenRequest, tokens: int, gap_s: float | None) -> None:
        """Count an output of ``tokens`` tokens that came ``gap_s`` seconds after the previous output."""
        self.completion_tokens.add(tokens)
        if gap_s is not None:
            opened.gap(gap_s)
            self._gaps.append((self._clock(), gap_s))
        self.sample()

    def end(self, opened: OpenRequest, ended: RecentRequest, *, is_background: bool) -> None:
        """Keep an ended request. Background requests do not count for percentiles."""
        adapter = self._of(opened.adapter)
        adapter.open.pop(opened.request_id, None)
        adapter.finished.add()
        self.finished.add()
        self.prompt_tokens.add(ended.prompt_tokens)
        if ended.error:
            at_s = self.unix_s(ended.ended_s)
            adapter.errors.append(RecentError(at_s, ended.request_id, ended.tenant, ended.error))
        if ended.hit is not None:
            adapter.hits += ended.hit
            adapter.misses += not ended.hit
        if opened.timings.admitted_s is not None:
            adapter.queue_s[ended.cause] = adapter.queue_s.get(ended.cause, 0.0) + ended.parts[0]
        for mechanism, saved_s in opened.timings.saved_s.items():
            adapter.saved_s[mechanism] = adapter.saved_s.get(mechanism, 0.0) + saved_s
        if not is_background:
            adapter.ended.append(ended)
            self._ended.append(ended)
        self._drop_if_removed(opened.adapter, adapter)
        self.sample()

    def refused(self, adapter: AdapterRef | None, requests: int) -> None:
        """Count requests that were answered with a 429."""
        self._of(BASE if adapter is None else adapter.name).refused += requests

    def on_adapter_event(self, event: AdapterEvent, names: Callable[[AdapterDigest], Iterable[str]]) -> None:
        """Count a load. Keep the error of a failed load under all names of the version."""
        if not isinstance(event, AdapterLoaded):
            return
        before = self.loads.pop(event.digest, LoadHistory())
        error = None if event.error is None else hide_paths(event.error)
        self.loads[event.digest] = LoadHistory(before.loads + 1, event.seconds, error)
        while len(self.loads) > MOST_ADAPTERS:
            self.loads.popitem(last=False)
        if error is not None:
            for name in names(event.digest):
                self._of(name).errors.append(RecentError(self.unix_s(self._clock()), None, "", error))

    def forget(self, adapter: str) -> None:
        """Drop the history of a removed adapter, once no request runs."""
        known = self._adapters.get(adapter)
        if known is not None:
            known.is_removed = True
            self._drop_if_removed(adapter, known)

    def _drop_if_removed(self, adapter: str, history: AdapterHistory) -> None:
        if history.is_removed and not history.open:
            del self._adapters[adapter]

    def peek(self, adapter: str) -> AdapterHistory:
        """Return the history of an adapter, which the caller must not change."""
        return self._adapters.get(adapter) or AdapterHistory(self._clock)

    def now_s(self) -> float:
        """Return the present time on the clock of requests, in seconds."""
        return self._clock()

    def unix_s(self, at_s: float) -> float:
        """Convert a time on the clock of requests to Unix time."""
        return round(at_s + self._unix_minus_clock_s, 3)

    def recent(self) -> list[RecentRequest]:
        """Return the requests of all adapters that ended in the last ``RECENT_S``."""
        since_s = self._clock() - RECENT_S
        return [each for each in self._ended if each.ended_s > since_s]

    def recent_gaps_s(self) -> list[float]:
        """Return the latest gaps between outputs, in seconds."""
        since_s = self._clock() - RECENT_S
        return [gap_s for at_s, gap_s in self._gaps if at_s > since_s]

    def engine_stats(self) -> list[EngineStats]:
        """Return the newest gauges of all replicas that have sent gauges."""
        return [view.stats for view in self._views().values() if view.stats is not None]

    def sample(self) -> None:
        """Add a sample to the history, unless the newest sample is recent."""
        now_s = self._clock()
        if now_s - self._sampled_s < HISTORY_EVERY_S:
            return
        self._sampled_s = now_s
        stats = self.engine_stats()
        self.history.append(
            {
                "unix_s": self.unix_s(now_s),
                "generation_tokens_per_s": round(self.completion_tokens.per_s(), 2),
                "requests_per_s": round(self.finished.per_s(), 3),
                "running": sum(each.running for each in stats),
                "waiting": sum(each.waiting for each in stats),
                "memory": memory_by_tier(stats),
            }
        )

    def _of(self, adapter: str) -> AdapterHistory:
        known = self._adapters.get(adapter)
        if known is None:
            known = self._adapters[adapter] = AdapterHistory(self._clock)
            self._make_room()
        self._adapters.move_to_end(adapter)
        return known

    def _make_room(self) -> None:
        """Drop the histories of the adapters that were unused for longest, except adapters with unfinished requests."""
        while len(self._adapters) > MOST_ADAPTERS:
            idle = next((name for name, each in self._adapters.items() if not each.open), None)
            if idle is None:
                return
            del self._adapters[idle]


def memory_by_tier(stats: Iterable[EngineStats]) -> dict[str, dict[str, int]]:
    """Return the bytes of each tier by use, over all replicas."""
    kinds = ("total", "free", "adapters", "kv_running", "kv_cached", "inflight")
    tiers: dict[str, Counter[str]] = {"device": Counter(), "host": Counter()}
    for each in stats:
        for tier, counts in tiers.items():
            held = getattr(each.memory, tier)
            counts.update({kind: getattr(held, kind) for kind in kinds})
    return {tier: {kind: counts[kind] for kind in kinds} for tier, counts in tiers.items()}
