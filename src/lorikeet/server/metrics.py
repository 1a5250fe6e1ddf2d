"""Prometheus metrics under vLLM's names, so that gateways and dashboards work unchanged.

Names and labels: https://docs.vllm.ai/en/latest/design/metrics/
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.registry import Collector

from lorikeet.core.ids import ReplicaId
from lorikeet.core.messages import EngineStats
from lorikeet.core.timings import RequestTimings

_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_LOAD_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

_FINISHED_REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """What is counted as requests go by. Gauges of the engine's state are collectors of their own.

    Args:
        model_name: label of every metric.
        max_model_len: upper end of the token histograms.
    """

    def __init__(self, model_name: str, max_model_len: int) -> None:
        self.registry = CollectorRegistry()
        self.labels = {"model_name": model_name, "engine": "0"}
        self._last_steps: dict[ReplicaId, int] = {}
        lengths = _one_two_five(max_model_len)
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_S)
        self.inter_token = self._histogram("inter_token_latency_seconds", "Gaps between outputs.", _TOKEN_S)
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
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens computed by a step.", _STEP_TOKENS)
        self.adapter_load = self._histogram("lora_adapter_load_seconds", "Transfer of an adapter.", _LOAD_S)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._answer_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._adapter_wait = self._histogram(
            "request_adapter_wait_seconds", "Time a request waited for its adapter's transfer.", _LOAD_S, "lorikeet"
        )
        self._kv_wait = self._histogram(
            "request_kv_wait_seconds", "Time beyond that a request waited for its KV's transfer.", _LOAD_S, "lorikeet"
        )
        success = Counter(
            "vllm:request_success",
            "Requests ended.",
            (*self.labels, "finished_reason"),
            registry=self.registry,
        )
        self._ended = {reason: success.labels(**self.labels, finished_reason=reason) for reason in _FINISHED_REASONS}

    def add_collector(self, collector: Collector) -> None:
        """Ask ``collector`` at every scrape too."""
        self.registry.register(collector)

    def page(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def observe_step(self, replica: ReplicaId, stats: EngineStats) -> None:
        """Count the last step that a replica's gauges tell of, once; they tell of one now and then."""
        if stats.steps != self._last_steps.get(replica):
            self._last_steps[replica] = stats.steps
            self._step_tokens.observe(stats.step_tokens)

    def generated(self, tokens: int) -> None:
        """Count tokens as they are sent."""
        self._answer_tokens.inc(tokens)

    def observe_request(
        self, timings: RequestTimings, prompt_tokens: int, completion_tokens: int, reason: str, ended_s: float
    ) -> None:
        """Count one request that ended at ``ended_s`` for ``reason``."""
        self._ended[reason].inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._prompt_lengths.observe(prompt_tokens)
        self._answer_lengths.observe(completion_tokens)
        self._e2e.observe(ended_s - timings.arrival_s)
        if timings.adapter_wait_s:
            self._adapter_wait.observe(timings.adapter_wait_s)
        if timings.kv_wait_s:
            self._kv_wait.observe(timings.kv_wait_s)
        queued_s, admitted_s, first_s = timings.queued_s, timings.admitted_s, timings.first_token_s
        if queued_s is None or admitted_s is None:
            return
        self._queue.observe(admitted_s - queued_s)
        self._inference.observe(ended_s - admitted_s)
        if first_s is None:
            return
        self._first_token.observe(first_s - timings.arrival_s)
        self._prefill.observe(first_s - admitted_s)
        self._decode.observe(ended_s - first_s)
        if completion_tokens > 1:
            self._per_token.observe((ended_s - first_s) / (completion_tokens - 1))

    def _histogram(self, name: str, text: str, buckets: Sequence[float], owner: str = "vllm") -> Histogram:
        histogram = Histogram(f"{owner}:{name}", text, tuple(self.labels), buckets=buckets, registry=self.registry)
        return histogram.labels(**self.labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, tuple(self.labels), registry=self.registry).labels(**self.labels)


def _one_two_five(largest: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, 50, … up to ``largest``."""
    steps = [factor * 10.0**power for power in range(10) for factor in (1, 2, 5)]
    return [step for step in steps if step <= largest] or [1.0]
