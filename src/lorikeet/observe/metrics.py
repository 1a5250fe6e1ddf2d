"""Metrics of the server.

Histograms and counters are updated by requests. Gauges of engines, memory and the cluster are read from the latest
statistics at every scrape; the label ``engine`` names the replica. Only the busiest adapters have labels of their own.

Names and labels: https://docs.vllm.ai/en/latest/design/metrics/
"""

import bisect
import heapq
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from starlette.responses import Response

from lorikeet.client.client import Engines
from lorikeet.client.state import ReplicaView
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import Mechanism, RequestTimings
from lorikeet.core.ids import AdapterDigest
from lorikeet.core.messages import (
    STEP_TOKENS_BOUNDS,
    AssistCounters,
    EngineStats,
    MemoryStats,
    QueueStats,
    RouteStats,
    TierBytes,
)
from lorikeet.core.plan import Tier
from lorikeet.observe.causes import CAUSES, cause_of

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
    """Sums over finished requests, and over those that were refused.

    ``ttft_met`` and the like count requests with such a target, ``ttft_buckets`` requests by ``TTFT_BOUNDS_S``. Times
    are whole nanoseconds: differences of float sums have rounding errors, and a counter that decreases by one looks to
    Prometheus like a restart.
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
        """Return the sum, or with ``sign`` -1 the difference."""
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
    """Return the ``ttft_buckets`` of one request; None if it had no first token."""
    if seconds is None:
        return _NO_TTFT
    at = bisect.bisect_left(TTFT_BOUNDS_S, seconds)
    return tuple(int(number == at) for number in range(len(TTFT_BOUNDS_S)))


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
        slowest_s: largest TTFT, decaying likewise.
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
        """Return the activity, decayed until ``now_s``."""
        return self.activity * self._decay(now_s)

    def slowest_at(self, now_s: float) -> float:
        """Return the largest TTFT, decayed until ``now_s``."""
        return self.slowest_s * self._decay(now_s)

    def _decay(self, now_s: float) -> float:
        return math.exp2((self.last_used_s - now_s) / _HALF_LIFE_S)


class AdapterUsage:
    """Traffic of every adapter that had any; tenants are counted by another one of these.

    Args:
        labels: number of adapters that are labelled.
        clock: in seconds; replaced in tests.
        most: records to keep; of more, the one that was used longest ago is dropped, and its counts stay in ``other``.
            None for no limit.
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
                # A label is free: it counts from the first request on.
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
        """Return the usage of an adapter, read only; one without traffic gets neither a record nor a label."""
        return self._adapters.get(adapter) or AdapterTraffic(self._clock, self._all_adapters)

    def labelled(self) -> dict[str, RequestCounts]:
        """Choose the labelled adapters; return the counts under each label, ``other`` included."""
        now_s = self._clock()

        def kept(usage: AdapterTraffic) -> float:
            return _HYSTERESIS if usage.baseline else 1.0

        # An adapter called "other" is counted in that sum, since two sums cannot have one label.
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
        """Drop the record of a removed adapter; its counts stay in ``other``."""
        usage = self._adapters.pop(adapter, None)
        if usage is not None and usage.baseline is not None:
            self._labels_used -= 1


Values = Iterable[tuple[tuple[str, ...], float]]
"""Pairs of label values and the value of the metric."""


class MetricFamilies:
    """Builds metrics that share labels.

    Args:
        labels: of every metric.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)

    def gauge(self, name: str, text: str, value: float, more: Mapping[str, str] | None = None) -> Metric:
        """Return a gauge of one value, with ``more`` labels."""
        more = more or {}
        return self.gauges(name, text, tuple(more), [(tuple(more.values()), value)])

    def gauges(self, name: str, text: str, labels: tuple[str, ...], values: Values) -> Metric:
        """Return a gauge with a value for each combination of ``labels``."""
        return self._fill(GaugeMetricFamily(name, text, labels=[*self._labels, *labels]), values)

    def count(self, name: str, text: str, value: float) -> Metric:
        """Return a counter of one value."""
        return self.counts(name, text, (), [((), value)])

    def counts(self, name: str, text: str, labels: tuple[str, ...], values: Values) -> Metric:
        """Return a counter with a value for each combination of ``labels``."""
        return self._fill(CounterMetricFamily(name, text, labels=[*self._labels, *labels]), values)

    def histogram(self, name: str, text: str, counts: Mapping[float, int], total: float) -> Metric:
        """Return a histogram: ``counts`` by upper bound, each with those below, and the sum of all values."""
        return self.histograms(name, text, (), [((), counts, total)])

    def histograms(
        self,
        name: str,
        text: str,
        labels: tuple[str, ...],
        values: Iterable[tuple[tuple[str, ...], Mapping[float, int], float]],
    ) -> Metric:
        """Return a histogram for each combination of ``labels``: counts and sum as of :meth:`histogram`."""
        family = HistogramMetricFamily(name, text, labels=(*self._labels, *labels))
        for chosen, counts, total in values:
            buckets = [("+Inf" if bound == math.inf else str(float(bound)), count) for bound, count in counts.items()]
            family.add_metric((*self._labels.values(), *chosen), buckets, total)
        return family

    def _fill(self, family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
        for chosen, value in values:
            family.add_metric([*self._labels.values(), *chosen], value)
        return family


_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_PREEMPTIONS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
_ANSWERS = (1, 2, 5, 10, 20, 50, 100)
_LOAD_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

_FINISHED_REASONS = ("stop", "length", "abort", "error")


def metrics_page(registry: CollectorRegistry, accept: str) -> Response:
    """Return all metrics in Prometheus's text format, or in that of OpenMetrics 1.0 for a client that accepts it.

    Args:
        registry: has the metrics.
        accept: the header ``Accept``.
    """
    kinds = [kind.replace(" ", "").lower().split(";") for kind in accept.split(",")]
    if any(kind == "application/openmetrics-text" and "version=0.0.1" not in options for kind, *options in kinds):
        # The default escaping writes vllm_x for vllm:x. These names need none.
        content = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return Response(content, media_type=openmetrics.CONTENT_TYPE_LATEST)
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


class RequestMetrics:
    """Histograms and counters of requests. Gauges come from collectors.

    Args:
        model_name: label of every metric.
        max_model_len: upper end of the token histograms.
    """

    def __init__(self, model_name: str, max_model_len: int) -> None:
        self.registry = CollectorRegistry()
        self.labels = {"model_name": model_name, "engine": "0"}
        lengths = _one_two_five(max_model_len)
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_S)
        self.outputs = OutputCounts(MetricFamilies(self.labels))
        self.registry.register(self.outputs)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per output token after the first.", _TOKEN_S
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to end.", _REQUEST_S)
        self._queue = self._histogram("request_queue_time_seconds", "Time in the admission queue.", _REQUEST_S)
        self._inference = self._histogram("request_inference_time_seconds", "Admission to end.", _REQUEST_S)
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "Admission to first token, transfers included.", _REQUEST_S
        )
        self._decode = self._histogram("request_decode_time_seconds", "First token to end.", _REQUEST_S)
        self._prompt_lengths = self._histogram("request_prompt_tokens", "Tokens of a prompt.", lengths)
        self._answer_lengths = self._histogram("request_generation_tokens", "Tokens of an answer.", lengths)
        self._preemptions = self._histogram("request_num_preemptions", "Preemptions of a request.", _PREEMPTIONS)
        self._params_n = self._histogram("request_params_n", "Answers asked for.", _ANSWERS)
        self._params_max_tokens = self._histogram("request_params_max_tokens", "Most tokens asked for.", lengths)
        self.adapter_load = self._histogram("lora_adapter_load_seconds", "Transfer of an adapter.", _LOAD_S)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._adapter_wait = self._histogram(
            "request_adapter_wait_seconds", "Time a request waited for its adapter's transfer.", _LOAD_S, "lorikeet"
        )
        self._kv_wait = self._histogram(
            "request_kv_wait_seconds", "Time beyond that a request waited for its KV's transfer.", _LOAD_S, "lorikeet"
        )
        self._saved, self._lost = (
            Counter(f"lorikeet:seconds_{name}", text, (*self.labels, "mechanism"), registry=self.registry)
            for name, text in (
                ("saved", "Seconds that requests waited less because of a mechanism."),
                ("lost", "Seconds that they waited more because of it, where it did not pay."),
            )
        )
        self._queue_by = Counter(
            "lorikeet:request_queue_seconds",
            "Time in the admission queue by what requests were refused for last.",
            (*self.labels, "cause"),
            registry=self.registry,
        )
        for cause in CAUSES:
            self._queue_by.labels(**self.labels, cause=cause)
        for mechanism in Mechanism:
            for counter in (self._saved, self._lost):
                counter.labels(**self.labels, mechanism=mechanism)
        success = Counter(
            "vllm:request_success",
            "Requests ended.",
            (*self.labels, "finished_reason"),
            registry=self.registry,
        )
        refused = Counter(
            "vllm:admission_rejections",
            "Sequences refused: too many were unfinished, or the TTFT target would be missed.",
            ("model_name", "reason"),
            registry=self.registry,
        )
        self._refused = {
            is_shed: refused.labels(model_name=model_name, reason=reason)
            for is_shed, reason in ((False, "max_num_queued_reqs"), (True, "shed"))
        }
        self._ended = {reason: success.labels(**self.labels, finished_reason=reason) for reason in _FINISHED_REASONS}

    def add_collector(self, collector: Collector) -> None:
        """Include the metrics of ``collector`` in every scrape."""
        self.registry.register(collector)

    def page(self, accept: str) -> Response:
        """Return all metrics, as :func:`metrics_page`."""
        return metrics_page(self.registry, accept)

    def count_refused(self, sequences: int, *, shed: bool) -> None:
        """Count sequences that were refused because too many are unfinished, or ``shed`` by the forecast."""
        self._refused[shed].inc(sequences)

    def observe_params(self, n: int, max_tokens: int) -> None:
        """Count what an accepted request asks for: answers for each prompt, and the most tokens of one."""
        self._params_n.observe(n)
        self._params_max_tokens.observe(max_tokens)

    def observe_request(
        self,
        timings: RequestTimings,
        prompt_tokens: int,
        completion_tokens: int,
        reason: str,
        ended_s: float,
        *,
        latencies: bool = True,
        exemplar: Mapping[str, str] | None = None,
    ) -> None:
        """Count one request that ended at ``ended_s`` for ``reason``, with or without its times.

        Args:
            timings, prompt_tokens, completion_tokens, reason, ended_s: of the request.
            latencies: whether its times count.
            exemplar: names it beside its TTFT and its other times.
        """
        named = dict(exemplar) if exemplar else None
        for mechanism, saved_s in timings.saved_s.items():
            counter = self._saved if saved_s > 0 else self._lost
            counter.labels(**self.labels, mechanism=mechanism).inc(abs(saved_s))
        self._ended[reason].inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._prompt_lengths.observe(prompt_tokens)
        self._answer_lengths.observe(completion_tokens)
        self._preemptions.observe(timings.preemptions)
        if not latencies:
            return
        self._e2e.observe(ended_s - timings.arrival_s, named)
        if timings.adapter_wait_s:
            self._adapter_wait.observe(timings.adapter_wait_s, named)
        if timings.kv_wait_s:
            self._kv_wait.observe(timings.kv_wait_s)
        queued_s, admitted_s, first_s = timings.queued_s, timings.admitted_s, timings.first_token_s
        if queued_s is None or admitted_s is None:
            return
        self._queue.observe(admitted_s - queued_s, named)
        self._queue_by.labels(**self.labels, cause=cause_of(timings)).inc(max(0.0, admitted_s - queued_s))
        self._inference.observe(ended_s - admitted_s)
        if first_s is None:
            return
        self._first_token.observe(first_s - timings.arrival_s, named)
        self._prefill.observe(first_s - admitted_s)
        self._decode.observe(ended_s - first_s)
        if completion_tokens > 1:
            self._per_token.observe((ended_s - first_s) / (completion_tokens - 1))

    def _histogram(self, name: str, text: str, buckets: Sequence[float], owner: str = "vllm") -> Histogram:
        histogram = Histogram(f"{owner}:{name}", text, tuple(self.labels), buckets=buckets, registry=self.registry)
        return histogram.labels(**self.labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, tuple(self.labels), registry=self.registry).labels(**self.labels)


class OutputCounts(Collector):
    """Counts tokens and the gaps between outputs, for which the library's counter and histogram take ten times as long.

    Args:
        families: with the labels of both metrics.
    """

    def __init__(self, families: MetricFamilies) -> None:
        self._families = families
        self._tokens = 0
        self._gaps = [0] * (len(_TOKEN_S) + 1)
        self._gaps_s = 0.0

    def add(self, tokens: int, gap_s: float | None) -> None:
        """Count one output that came ``gap_s`` seconds after the one before; None for the first."""
        self._tokens += tokens
        if gap_s is not None:
            self._gaps[bisect.bisect_left(_TOKEN_S, gap_s)] += 1
            self._gaps_s += gap_s

    def collect(self) -> Iterable[Metric]:
        """Yield both metrics."""
        yield self._families.count("vllm:generation_tokens", "Tokens generated.", self._tokens)
        counts = dict(zip((*_TOKEN_S, math.inf), accumulate(self._gaps), strict=True))
        yield self._families.histogram(
            "vllm:inter_token_latency_seconds", "Gaps between outputs.", counts, self._gaps_s
        )


def _one_two_five(largest: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, 50, … up to ``largest``."""
    steps = [factor * 10.0**power for power in range(10) for factor in (1, 2, 5)]
    return [step for step in steps if step <= largest] or [1.0]


_MAX_NAMES = 500
"""Most adapters named in one metric, so that a page stays small however many fit on the device."""


class EngineCollector(Collector):
    """One replica's state under vLLM's names.

    Args:
        client: holds the latest statistics.
        labels: of every metric.
        adapters_by_digest: gives adapter versions under all their names.
        pinned: names of pinned adapters, read at every scrape.
    """

    def __init__(
        self,
        client: ReplicaView,
        labels: dict[str, str],
        adapters_by_digest: Callable[[Set[AdapterDigest]], dict[AdapterDigest, list[AdapterRef]]],
        pinned: Set[str] = frozenset(),
    ) -> None:
        self._client = client
        self._make = MetricFamilies(labels)
        self._adapters_by_digest, self._pinned = adapters_by_digest, pinned

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        make = self._make
        yield make.gauge("lorikeet:engine_up", "1 while the engine process answers.", float(self._client.alive))
        yield make.count("lorikeet:engine_restarts", "Times the engine process was restarted.", self._client.restarts)
        engine_info = self._client.engine_info
        tokens = engine_info.block_size * engine_info.total_blocks
        shape = {
            "block_size": str(engine_info.block_size),
            "num_gpu_blocks": str(engine_info.total_blocks),
            "kv_cache_size_tokens": str(tokens),
            "kv_cache_max_concurrency": f"{tokens / engine_info.max_model_len:.2f}",
        }
        yield make.gauge("vllm:cache_config_info", "Sizes of the block pool.", 1.0, shape)
        stats = self._client.stats
        if stats is None:
            return
        yield from self._requests(stats)
        yield from self._blocks(stats)
        yield from self._adapters(stats)
        yield from self._modes(stats)
        if stats.queue is not None:
            yield from self._classes(stats.queue)
        if stats.assist is not None:
            yield from self._host_workers(stats.assist)

    def _requests(self, stats: EngineStats) -> Iterable[Metric]:
        make = self._make
        deferred = stats.waiting_for_adapter + stats.waiting_for_kv
        reasons = [(("capacity",), stats.waiting - deferred), (("deferred",), deferred)]
        transfers = [(("adapter",), stats.waiting_for_adapter), (("kv",), stats.waiting_for_kv)]
        yield make.gauge("vllm:num_requests_running", "Sequences that can run.", stats.running)
        yield make.gauge("vllm:num_requests_waiting", "All other requests.", stats.waiting)
        yield make.gauges(
            "vllm:num_requests_waiting_by_reason",
            "Why they wait: for blocks, or with them for transfers.",
            ("reason",),
            reasons,
        )
        yield make.gauges(
            "lorikeet:num_requests_waiting_for_transfer",
            "The deferred ones by what they wait for.",
            ("for",),
            transfers,
        )
        yield make.gauges(
            "lorikeet:num_requests_queued",
            "Those without blocks by what they were refused for last; order: they are behind others.",
            ("cause",),
            [((cause,), stats.queued.get(cause, 0)) for cause in CAUSES],
        )
        yield make.count("vllm:num_preemptions", "Requests that gave their blocks back.", stats.preemptions)
        yield make.count("vllm:prefix_cache_queries", "Tokens looked up in cached KV.", stats.prefix_queries_tokens)
        yield make.count("vllm:prefix_cache_hits", "Tokens found in cached KV.", stats.prefix_hits_tokens)
        yield make.count("vllm:spec_decode_num_draft_tokens", "Tokens drafted for a step.", stats.drafted_tokens)
        yield make.count("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that came.", stats.kept_tokens)
        yield make.count("lorikeet:steps", "Steps of the engine.", stats.steps)
        steps = dict(zip((*STEP_TOKENS_BOUNDS, math.inf), accumulate(stats.steps_by_tokens), strict=True))
        text = "Tokens computed by a step."
        yield make.histogram("vllm:iteration_tokens_total", text, steps, stats.computed_tokens)

    def _blocks(self, stats: EngineStats) -> Iterable[Metric]:
        make = self._make
        text = "Share of the blocks open to KV that sequences hold."
        yield make.gauge("vllm:kv_cache_usage_perc", text, kv_usage(stats))
        blocks = [((use,), getattr(stats, f"{use}_blocks")) for use in ("free", "cached", "kv", "adapter", "inflight")]
        yield make.gauges("lorikeet:blocks", "Device blocks by use.", ("use",), blocks)

    def _adapters(self, stats: EngineStats) -> Iterable[Metric]:
        """Yield residency, for routers that prefer a replica that already has the adapter."""
        make = self._make
        serving = {*stats.running_adapters, *stats.resident_adapters}
        known = self._adapters_by_digest(serving | {*stats.waiting_adapters})
        running = {name for digest in serving for name in _names(known, digest)}
        # A waiting adapter that is resident or runs counts as running: the two sets never overlap.
        waiting = {name for digest in stats.waiting_adapters for name in _names(known, digest)} - running
        info = {
            "max_lora": str(stats.total_blocks),
            "running_lora_adapters": ",".join(sorted(running)[:_MAX_NAMES]),
            "waiting_lora_adapters": ",".join(sorted(waiting)[:_MAX_NAMES]),
        }
        yield make.gauge("vllm:lora_requests_info", "Adapters held and queued; value: unix time.", time.time(), info)
        ranks = {
            name: str(known[digest][0].max_rank) for digest in stats.resident_adapters for name in _names(known, digest)
        }
        shown = sorted(ranks)[:_MAX_NAMES]
        loaded = [((name, "gpu", str(name in self._pinned).lower(), ranks[name]), 1.0) for name in shown]
        labels = ("adapter_name", "level", "pinned", "rank")
        yield make.gauges("vllm:lora_adapter_loaded", "Adapters on the device.", labels, loaded)
        held, hosted = len(stats.resident_adapters), stats.memory.host_adapters
        yield make.gauge("vllm:num_gpu_loaded_lora_adapters", "Adapters on the device.", held)
        yield make.gauge("vllm:num_cpu_loaded_lora_adapters", "Adapters in the host tier.", hosted)
        yield make.gauge("vllm:max_gpu_lora_adapters", "Most that could be there: one a block.", stats.total_blocks)

    def _modes(self, stats: EngineStats) -> Iterable[Metric]:
        make, modes = self._make, stats.modes
        merged = () if modes.merged is None else _names(self._adapters_by_digest({modes.merged}), modes.merged)
        values = [((name,), 1.0) for name in merged]
        yield make.gauges("lorikeet:merged_adapter", "The adapter merged into the base, if any.", ("adapter",), values)
        yield make.count("lorikeet:merge_switches", "Changes of the merged adapter.", modes.switches)
        yield make.count("lorikeet:merge_switch_seconds", "Time that they took.", modes.switch_s)
        yield make.count("lorikeet:merged_steps", "Steps with a merged adapter.", modes.merged_steps)
        yield make.count("lorikeet:assisted_steps", "Steps with prefills assisted by the host.", modes.assisted_steps)
        yield make.gauge(
            "lorikeet:num_requests_ahead_of_adapter",
            "Sequences whose prefill is done while their adapter is still being transferred.",
            stats.ahead_of_adapter,
        )

    def _host_workers(self, counts: AssistCounters) -> Iterable[Metric]:
        for name, text, value in (
            ("host_layers", "Layers of adapters in transfer that host workers computed.", counts.host_layers),
            ("device_layers", "Layers that the device computed, since they had arrived.", counts.device_layers),
            (
                "host_layers_after_arrival",
                "Layers that the host computed though they had arrived by then.",
                counts.host_layers_after_arrival,
            ),
            ("rescued_slices", "Slices of host workers that the engine computed itself.", counts.rescued_slices),
            ("lost_workers", "Host workers that ended unexpectedly.", counts.lost_workers),
        ):
            yield self._make.count(f"lorikeet:assist_{name}", text, value)

    def _classes(self, queue: QueueStats) -> Iterable[Metric]:
        make = self._make
        for name, text, by_class in (
            ("waiting", "Waiting requests by class; 0 has the smallest requests.", queue.waiting),
            ("quota_tokens", "Quota of each class, in tokens of KV.", queue.quota_tokens),
            ("held_tokens", "Tokens of the quota that requests hold.", queue.held_tokens),
        ):
            values = [((str(number),), float(value)) for number, value in enumerate(by_class)]
            yield make.gauges(f"lorikeet:queue_{name}", text, ("class",), values)
        yield make.count("lorikeet:queue_refreshes", "Times classes and quotas were recomputed.", queue.refreshes)
        yield make.count(
            "lorikeet:queue_bypassed", "Requests that bypassed one whose adapter did not fit.", queue.bypassed
        )
        yield make.count("lorikeet:queue_squashed", "Bypassing requests that were squashed.", queue.squashed)
        yield make.count("lorikeet:queue_joined", "Requests that joined others under their adapter.", queue.joined)


def _names(known: dict[AdapterDigest, list[AdapterRef]], digest: AdapterDigest) -> list[str]:
    """Return the names of a version; a version that was removed has none and is not shown while it is freed."""
    return [adapter.name for adapter in known.get(digest, ())]


_PER_ADAPTER: tuple[tuple[str, str, Callable[[RequestCounts], float]], ...] = (
    ("requests", "Requests ended.", lambda counts: counts.requests),
    ("requests_aborted", "Requests whose client disconnected.", lambda counts: counts.aborted),
    ("requests_failed", "Requests that ended with an error.", lambda counts: counts.failed),
    ("prompt_tokens", "Prompt tokens.", lambda counts: counts.prompt_tokens),
    ("cached_tokens", "Prompt tokens found in KV.", lambda counts: counts.cached_tokens),
    ("generation_tokens", "Tokens generated.", lambda counts: counts.completion_tokens),
    ("time_to_first_token_seconds", "Sum of TTFT.", lambda counts: counts.ttft_s),
    ("first_tokens", "Requests that had a first token.", lambda counts: counts.ttft_count),
    ("e2e_seconds", "Sum of time from arrival to end.", lambda counts: counts.e2e_s),
    ("load_wait_seconds", "Sum of time spent waiting for the adapter.", lambda counts: counts.adapter_wait_s),
    ("kv_wait_seconds", "Sum of time spent waiting for KV beyond that.", lambda counts: counts.kv_wait_s),
)


class UsageCollector(Collector):
    """Counts of the busiest adapters and the sum of all others; for SLO targets, also of the base model."""

    def __init__(self, usage: AdapterUsage, labels: dict[str, str]) -> None:
        self._usage = usage
        self._make = MetricFamilies(labels)

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        by_adapter = self._usage.labelled()
        for name, text, value in _PER_ADAPTER:
            values = [((adapter,), value(counts)) for adapter, counts in by_adapter.items()]
            yield self._make.counts(f"lorikeet:adapter_{name}", text, ("adapter",), values)
        yield self._ttft(by_adapter)
        with_base = {"": self._usage.base.total, **by_adapter}
        shed = [((adapter,), float(counts.shed)) for adapter, counts in with_base.items()]
        yield self._make.counts("lorikeet:shed_requests", "Refused: too late for their TTFT.", ("adapter",), shed)
        met = [
            ((adapter, target, str(met).lower()), float(getattr(counts, f"{target}_{'met' if met else 'missed'}")))
            for adapter, counts in with_base.items()
            for target in ("ttft", "tpot")
            for met in (True, False)
        ]
        labels = ("adapter", "target", "met")
        yield self._make.counts("lorikeet:slo_requests", "Requests by whether they met a target.", labels, met)

    def _ttft(self, by_adapter: Mapping[str, RequestCounts]) -> Metric:
        """Return a histogram for each label."""
        values = [
            (
                (adapter,),
                dict(zip(TTFT_BOUNDS_S, accumulate(counts.ttft_buckets), strict=True)),
                counts.ttft_s,
            )
            for adapter, counts in by_adapter.items()
        ]
        return self._make.histograms("lorikeet:adapter_ttft_seconds", "TTFT.", ("adapter",), values)


_PER_TENANT: tuple[tuple[str, str, Callable[[RequestCounts], float]], ...] = (
    ("requests", "Requests ended.", lambda counts: counts.requests),
    ("requests_failed", "Requests that ended with an error.", lambda counts: counts.failed),
    ("requests_refused", "Requests that got a 429.", lambda counts: counts.refused),
    ("prompt_tokens", "Prompt tokens.", lambda counts: counts.prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda counts: counts.completion_tokens),
    ("time_to_first_token_seconds", "Sum of TTFT.", lambda counts: counts.ttft_s),
    ("first_tokens", "Requests that had a first token.", lambda counts: counts.ttft_count),
)


class TenantCollector(Collector):
    """Counts of the busiest and slowest tenants, and the sum of all others; nothing before a request has had a key."""

    def __init__(self, usage: AdapterUsage, labels: dict[str, str]) -> None:
        self._usage = usage
        self._make = MetricFamilies(labels)

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        by_tenant = self._usage.labelled()
        if len(by_tenant) == 1:
            return
        for name, text, value in _PER_TENANT:
            values = [((tenant,), value(counts)) for tenant, counts in by_tenant.items()]
            yield self._make.counts(f"lorikeet:tenant_{name}", text, ("tenant",), values)
        running = [((tenant,), float(count)) for tenant, count in self._usage.running(by_tenant).items()]
        yield self._make.gauges("lorikeet:tenant_requests_running", "Requests not ended.", ("tenant",), running)


_KINDS: tuple[tuple[str, Callable[[TierBytes], int]], ...] = (
    ("free", lambda tier: tier.free),
    ("adapters", lambda tier: tier.adapters),
    ("kv_running", lambda tier: tier.kv_running),
    ("kv_cached", lambda tier: tier.kv_cached),
    ("inflight", lambda tier: tier.inflight),
)
"""Uses of a tier's bytes; they add up to the tier."""


class MemoryCollector(Collector):
    """The newest ``MemoryStats`` as ``lorikeet:memory_…``. Bytes are those of one rank.

    Args:
        client: holds the latest statistics.
        labels: of every metric.
    """

    def __init__(self, client: ReplicaView, labels: dict[str, str]) -> None:
        self._client = client
        self._make = MetricFamilies(labels)

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        stats = self._client.stats
        if stats is None:
            return
        yield from self._bytes(stats.memory)
        yield from self._hits(stats.memory)
        yield from self._transfers(stats.memory)
        yield from self._decisions(stats.memory)

    def _bytes(self, memory: MemoryStats) -> Iterable[Metric]:
        make, tiers = self._make, (("device", memory.device), ("host", memory.host))
        by_kind = [((name, kind), read(tier)) for name, tier in tiers for kind, read in _KINDS]
        yield make.gauges("lorikeet:memory_bytes", "Bytes of each tier by what they hold.", ("tier", "kind"), by_kind)
        yield make.gauge(
            "lorikeet:memory_packing_waste_bytes",
            "Bytes of adapters' device blocks that hold no weights.",
            memory.packing_waste_bytes,
        )
        yield make.gauge(
            "lorikeet:memory_invalid_kv_bytes",
            "Unneeded KV on the device that is unusable, since its adapter or earlier KV is not there.",
            memory.invalid_kv_bytes,
        )
        yield make.gauge(
            "lorikeet:memory_invalid_kv_share",
            "The same as a share of all unneeded KV on the device, averaged over time.",
            memory.invalid_kv_share,
        )

    def _hits(self, memory: MemoryStats) -> Iterable[Metric]:
        make = self._make
        yield make.count("lorikeet:memory_adapter_queries", "Requests with an adapter.", memory.adapter_queries)
        yield make.count(
            "lorikeet:memory_adapter_hits", "Those whose adapter was on the device on arrival.", memory.adapter_hits
        )
        yield make.count("lorikeet:memory_kv_query_tokens", "Prompt tokens on arrival.", memory.kv_queries_tokens)
        hits = [(("device",), memory.kv_hits_tokens), (("host",), memory.kv_host_hits_tokens)]
        where = "Those whose KV was there then: on the device, or on the host only."
        yield make.counts("lorikeet:memory_kv_hit_tokens", where, ("tier",), hits)

    def _transfers(self, memory: MemoryStats) -> Iterable[Metric]:
        make, labels = self._make, ("source", "target")
        routes = [(tuple(route.split("-")), each) for route, each in (_NO_TRANSFERS | memory.transfers).items()]
        numbers = (
            ("transfers", "Transfers that have ended.", [(route, each.transfers) for route, each in routes]),
            ("transfer_failures", "Those that failed.", [(route, each.failed) for route, each in routes]),
            ("transfer_bytes", "Bytes of those that did not fail.", [(route, each.bytes) for route, each in routes]),
            ("transfer_busy_seconds", "Time of reading and copying.", [(route, each.busy_s) for route, each in routes]),
        )
        for name, text, values in numbers:
            yield make.counts(f"lorikeet:memory_{name}", text, labels, values)
        yield make.count(
            "lorikeet:memory_prefetched", "Adapters and blocks of KV that were prefetched.", memory.prefetched
        )
        yield make.count(
            "lorikeet:memory_prefetched_used",
            "Prefetched ones that were used before their eviction.",
            memory.prefetched_used,
        )

    def _decisions(self, memory: MemoryStats) -> Iterable[Metric]:
        make, times = self._make, memory.decisions
        yield make.count("lorikeet:memory_decisions", "Ticks of the swapper.", times.count)
        yield make.count("lorikeet:memory_decision_seconds", "Time that they took.", times.total_s)
        yield make.gauge("lorikeet:memory_decision_seconds_max", "Time that the longest took.", times.worst_s)
        yield make.gauge("lorikeet:memory_nodes", "Adapters and blocks of KV in the tree.", memory.nodes)
        yield make.gauge("lorikeet:memory_metadata_bytes", "Bytes that the tree takes.", memory.metadata_bytes)


# Counted from 0 on each route: ``increase()`` sees nothing of a counter whose first sample is its first failure.
_NO_TRANSFERS = {
    f"{source}-{target}": RouteStats(0, 0, 0, 0.0)
    for target in (Tier.HOST, Tier.DEVICE)
    for source in Tier
    if source is not target
}


def kv_usage(stats: EngineStats) -> float:
    """Return the share of the blocks open to KV that sequences hold."""
    for_kv = min(stats.kv_blocks + stats.free_blocks + stats.cached_blocks, stats.kv_limit_blocks)
    return stats.kv_blocks / for_kv if for_kv else 1.0


def load_of(engines: Engines) -> dict[str, float]:
    """Return what gateways ask about all replicas: the mean share of KV blocks in use, and requests that wait."""
    known = [view.stats for view in engines.views.values() if view.stats is not None]
    return {
        "kv_cache_usage_perc": sum(map(kv_usage, known)) / len(known) if known else 0.0,
        "num_requests_waiting": float(sum(stats.waiting for stats in known)),
    }


class ReplicasCollector(Collector):
    """Metrics of all replicas: engine and memory.

    Args:
        client: has the replicas, which may change.
        labels: of every metric, but for ``engine``.
        adapters_by_digest: gives adapter versions under all their names.
        pinned: names of pinned adapters, read at every scrape.
    """

    def __init__(
        self,
        client: Engines,
        labels: dict[str, str],
        adapters_by_digest: Callable[[Set[AdapterDigest]], dict[AdapterDigest, list[AdapterRef]]],
        pinned: Set[str] = frozenset(),
    ) -> None:
        self._client = client
        self._labels = labels
        self._adapters_by_digest, self._pinned = adapters_by_digest, pinned

    def collect(self) -> Iterable[Metric]:
        """Return each metric once, with the values of all replicas: a page may not name a metric twice."""
        merged: dict[str, Metric] = {}
        for replica, view in self._client.views.items():
            labels = {**self._labels, "engine": replica}
            engine = EngineCollector(view, labels, self._adapters_by_digest, self._pinned)
            for collector in (engine, MemoryCollector(view, labels)):
                for metric in collector.collect():
                    merged.setdefault(metric.name, metric)
                    if merged[metric.name] is not metric:
                        merged[metric.name].samples += metric.samples
        return merged.values()


class ConnectionCollector(Collector):
    """Connections that were closed for a limit.

    Args:
        closed: how many, by reason; counted on by others.
        labels: of the metric.
    """

    def __init__(self, closed: Mapping[str, int], labels: Mapping[str, str]) -> None:
        self._closed = closed
        self._make = MetricFamilies(labels)

    def collect(self) -> Iterable[Metric]:
        """Yield the metric."""
        values = [((reason,), float(count)) for reason, count in self._closed.items()]
        yield self._make.counts("lorikeet:connections_closed", "Connections closed for a limit.", ("reason",), values)


class ClusterCollector(Collector):
    """Metrics of a cluster as a whole.

    Args:
        client: has the cluster's state.
        model_name: label of every metric.
    """

    def __init__(self, client: Engines, model_name: str) -> None:
        self._client = client
        self._make = MetricFamilies({"model_name": model_name})

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        make, state = self._make, self._client.describe()
        copies = state.copies
        by_state = [
            (("open",), sum(replica.is_open for replica in state.replicas)),
            (("draining",), sum(replica.alive and not replica.is_open for replica in state.replicas)),
            (("down",), sum(not replica.alive for replica in state.replicas)),
        ]
        yield make.gauges("lorikeet:cluster_replicas", "Replicas; those that start are down.", ("state",), by_state)
        if state.wanted is not None:
            yield make.gauge("lorikeet:cluster_replicas_wanted", "Replicas that the autoscaler wants.", state.wanted)
        yield make.gauge("lorikeet:cluster_requests_unrouted", "Requests that wait for a replica.", state.unrouted)
        yield make.count("lorikeet:cluster_requests_moved", "Requests moved between replicas.", state.moves)
        yield make.gauge("lorikeet:cluster_placement_epoch", "Number of the placement.", state.epoch)
        made = [(("replica",), copies.fetches), (("files",), copies.provisions)]
        made_bytes = [(("replica",), copies.fetched_bytes), (("files",), copies.provided_bytes)]
        yield make.counts("lorikeet:cluster_copies", "Copies of adapters to replicas.", ("source",), made)
        yield make.counts("lorikeet:cluster_copied_bytes", "Their bytes.", ("source",), made_bytes)
        ways = [(("peer",), copies.peer_bytes), (("disk",), copies.disk_bytes)]
        yield make.counts("lorikeet:cluster_copies_moved_bytes", "Those by their way.", ("way",), ways)
        yield make.count("lorikeet:cluster_copies_failed", "Copies that failed.", copies.failed)
        yield make.count("lorikeet:cluster_copies_deleted", "Copies deleted.", copies.deletes)
        yield make.gauge("lorikeet:cluster_copies_under_way", "Copies in progress.", copies.under_way)
