"""Counts requests in histograms and counters, and writes the page of all metrics.

Names and labels: https://docs.vllm.ai/en/latest/design/metrics/
"""

import bisect
import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from starlette.responses import Response

from lorikeet.core.events import Mechanism
from lorikeet.observe.ended_request import EndedRequest
from lorikeet.observe.metric_families import MetricFamilies
from lorikeet.observe.waits import CAUSES, cause_of

_MOST_CHOSEN = 500
"""Models with their own count of choices by the prompt; the others share the label ``other``."""
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_PREEMPTIONS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
_ANSWERS = (1, 2, 5, 10, 20, 50, 100)
_LOAD_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

_MOST_EXEMPLAR = 64
"""Characters of an id in an exemplar. OpenMetrics allows 128 for all labels of one."""

_FINISHED_REASONS = ("stop", "length", "abort", "error")


def metrics_page(registry: CollectorRegistry, accept: str) -> Response:
    """Return all metrics in Prometheus's text format, or in OpenMetrics 1.0 for a client that accepts it.

    Args:
        registry: the registry of the metrics.
        accept: the header ``Accept``.
    """
    kinds = [kind.replace(" ", "").lower().split(";") for kind in accept.split(",")]
    if any(kind == "application/openmetrics-text" and "version=0.0.1" not in options for kind, *options in kinds):
        # The default escaping writes vllm_x for vllm:x. These names need none.
        content = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return Response(content, media_type=openmetrics.CONTENT_TYPE_LATEST)
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


class RequestMetrics:
    """Counts requests in histograms and counters. Gauges come from collectors.

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
        self._split = Counter(
            "lorikeet:split_requests",
            "Requests of a name that is split between versions.",
            (*self.labels, "split", "version", "kind"),
            registry=self.registry,
        )
        self._auto_names = set[str]()
        self._auto = Counter(
            "lorikeet:auto_model_requests",
            "Requests whose model the server chose by their prompt.",
            (*self.labels, "chosen"),
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
        """Return all metrics; see :func:`metrics_page`."""
        return metrics_page(self.registry, accept)

    def count_refused(self, sequences: int, *, shed: bool) -> None:
        """Count sequences that were refused because too many were unfinished, or that the forecast ``shed``."""
        self._refused[shed].inc(sequences)

    def count_split(self, name: str, version: str, kind: str) -> None:
        """Count a request of a split.

        Args:
            name: the split.
            version: the adapter that got the request.
            kind: ``served``, or ``shadow`` for a copy.
        """
        self._split.labels(**self.labels, split=name, version=version, kind=kind).inc()

    def count_auto(self, chosen: str) -> None:
        """Count a request whose model, ``chosen``, was chosen by the prompt."""
        if chosen not in self._auto_names and len(self._auto_names) >= _MOST_CHOSEN:
            chosen = "other"
        self._auto_names.add(chosen)
        self._auto.labels(**self.labels, chosen=chosen).inc()

    def observe_params(self, n: int, max_tokens: int) -> None:
        """Count the fields of an accepted request: number of answers per prompt, and token limit of an answer."""
        self._params_n.observe(n)
        self._params_max_tokens.observe(max_tokens)

    def on_ended(self, ended: EndedRequest) -> None:
        """Count an ended request. The times of background requests do not count.

        The ids of the request and its trace are the exemplar of its TTFT and other times.
        """
        timings = ended.timings
        named = {"request_id": ended.request.request_id[:_MOST_EXEMPLAR]}
        if ended.trace_id:
            named["trace_id"] = ended.trace_id
        for mechanism, saved_s in timings.saved_s.items():
            counter = self._saved if saved_s > 0 else self._lost
            counter.labels(**self.labels, mechanism=mechanism).inc(abs(saved_s))
        self._ended[ended.reason].inc()
        self._prompt_tokens.inc(ended.prompt_tokens)
        self._prompt_lengths.observe(ended.prompt_tokens)
        self._answer_lengths.observe(ended.completion_tokens)
        self._preemptions.observe(timings.preemptions)
        if ended.request.background:
            return
        self._e2e.observe(ended.e2e_s, named)
        if timings.adapter_wait_s:
            self._adapter_wait.observe(timings.adapter_wait_s, named)
        if timings.kv_wait_s:
            self._kv_wait.observe(timings.kv_wait_s)
        queued_s = timings.queued_s
        admitted_s = timings.admitted_s
        first_s = timings.first_token_s
        if queued_s is None or admitted_s is None:
            return
        self._queue.observe(admitted_s - queued_s, named)
        self._queue_by.labels(**self.labels, cause=cause_of(timings)).inc(max(0.0, admitted_s - queued_s))
        self._inference.observe(ended.ended_s - admitted_s)
        if first_s is None:
            return
        self._first_token.observe(first_s - timings.arrival_s, named)
        self._prefill.observe(first_s - admitted_s)
        self._decode.observe(ended.ended_s - first_s)
        if ended.completion_tokens > 1:
            self._per_token.observe((ended.ended_s - first_s) / (ended.completion_tokens - 1))

    def _histogram(self, name: str, text: str, buckets: Sequence[float], owner: str = "vllm") -> Histogram:
        histogram = Histogram(f"{owner}:{name}", text, tuple(self.labels), buckets=buckets, registry=self.registry)
        return histogram.labels(**self.labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, tuple(self.labels), registry=self.registry).labels(**self.labels)


class OutputCounts(Collector):
    """Counts tokens and gaps between outputs, ten times faster than the library's counter and histogram.

    Args:
        families: builds the metrics with their labels.
    """

    def __init__(self, families: MetricFamilies) -> None:
        self._families = families
        self._tokens = 0
        self._gaps = [0] * (len(_TOKEN_S) + 1)
        self._gaps_s = 0.0

    def add(self, tokens: int, gap_s: float | None) -> None:
        """Count an output that came ``gap_s`` seconds after the previous output; None for the first output."""
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
