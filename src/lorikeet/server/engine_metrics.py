"""Gauges read from the engine's latest statistics when somebody scrapes, and the counts per adapter."""

import time
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest
from lorikeet.core.messages import EngineStats
from lorikeet.engine.client import EngineClient
from lorikeet.server.usage import AdapterUsage, Counts

_MAX_NAMES = 500
"""Most adapters named in one metric, so that a page stays small whatever fits on the device."""


class EngineCollector(Collector):
    """The engine's state under vLLM's names.

    Args:
        client: holds the latest statistics.
        labels: of every metric.
        adapter_of: the adapter version of a digest, None if it is no longer known.
    """

    def __init__(
        self,
        client: EngineClient,
        labels: dict[str, str],
        adapter_of: Callable[[AdapterDigest], AdapterRef | None],
    ) -> None:
        self._client = client
        self._labels = labels
        self._adapter_of = adapter_of

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        yield self._gauge("lorikeet:engine_up", "1 while the engine process answers.", float(self._client.alive))
        yield self._count("lorikeet:engine_restarts", "Times the engine process was restarted.", self._client.restarts)
        hello = self._client.hello
        shape = {"block_size": str(hello.block_tokens), "num_gpu_blocks": str(hello.total_blocks)}
        yield self._gauge("vllm:cache_config_info", "Sizes of the block pool.", 1.0, shape)
        stats = self._client.stats
        if stats is None:
            return
        yield from self._requests(stats)
        yield from self._blocks(stats)
        yield from self._adapters(stats)

    def _requests(self, stats: EngineStats) -> Iterable[Metric]:
        yield self._gauge("vllm:num_requests_running", "Sequences that hold blocks.", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests in the admission queue.", stats.waiting)
        reasons = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Why they wait.", labels=[*self._labels, "reason"]
        )
        reasons.add_metric([*self._labels.values(), "capacity"], stats.waiting - stats.waiting_for_adapter)
        reasons.add_metric([*self._labels.values(), "deferred"], stats.waiting_for_adapter)
        yield reasons
        yield self._count("vllm:num_preemptions", "Requests that gave their blocks back.", stats.preemptions)
        yield self._count("vllm:prefix_cache_queries", "Tokens looked up in cached KV.", stats.prefix_queries_tokens)
        yield self._count("vllm:prefix_cache_hits", "Tokens found in cached KV.", stats.prefix_hits_tokens)
        yield self._count("lorikeet:steps", "Steps of the engine.", stats.steps)

    def _blocks(self, stats: EngineStats) -> Iterable[Metric]:
        for_kv = stats.kv_blocks + stats.free_blocks + stats.cached_blocks
        usage = stats.kv_blocks / for_kv if for_kv else 1.0
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the blocks open to KV that sequences hold.", usage)
        blocks = GaugeMetricFamily("lorikeet:blocks", "Device blocks by use.", labels=[*self._labels, "use"])
        for use in ("free", "cached", "kv", "adapter", "inflight"):
            blocks.add_metric([*self._labels.values(), use], getattr(stats, f"{use}_blocks"))
        yield blocks

    def _adapters(self, stats: EngineStats) -> Iterable[Metric]:
        """Residency, for routers that prefer a replica that holds an adapter already."""
        resident = sorted(stats.resident_adapters, key=self._name)[:_MAX_NAMES]
        # A waiting adapter that is resident or runs counts as running: the two sets never overlap.
        serving = {*stats.running_adapters, *stats.resident_adapters}
        running = sorted({self._name(digest) for digest in serving})[:_MAX_NAMES]
        waiting = sorted({self._name(digest) for digest in stats.waiting_adapters if digest not in serving})
        info = {
            "max_lora": str(stats.total_blocks),
            "running_lora_adapters": ",".join(running),
            "waiting_lora_adapters": ",".join(waiting[:_MAX_NAMES]),
        }
        yield self._gauge("vllm:lora_requests_info", "Adapters held and queued; value: unix time.", time.time(), info)
        loaded = GaugeMetricFamily(
            "vllm:lora_adapter_loaded",
            "Adapters on the device.",
            labels=[*self._labels, "adapter_name", "level", "pinned", "rank"],
        )
        for digest in resident:
            adapter = self._adapter_of(digest)
            rank = "" if adapter is None else str(adapter.max_rank)
            loaded.add_metric([*self._labels.values(), self._name(digest), "gpu", "false", rank], 1.0)
        yield loaded
        held = len(stats.resident_adapters)
        yield self._gauge("vllm:num_gpu_loaded_lora_adapters", "Adapters on the device.", held)
        yield self._gauge("vllm:max_gpu_lora_adapters", "Most that could be there: one a block.", stats.total_blocks)

    def _name(self, digest: AdapterDigest) -> str:
        adapter = self._adapter_of(digest)
        return digest[:12] if adapter is None else adapter.name

    def _gauge(self, name: str, text: str, value: float, more: dict[str, str] | None = None) -> Metric:
        labels = {**self._labels, **(more or {})}
        gauge = GaugeMetricFamily(name, text, labels=list(labels))
        gauge.add_metric(list(labels.values()), value)
        return gauge

    def _count(self, name: str, text: str, value: float) -> Metric:
        counter = CounterMetricFamily(name, text, labels=list(self._labels))
        counter.add_metric(list(self._labels.values()), value)
        return counter


_PER_ADAPTER: tuple[tuple[str, str, Callable[[Counts], float]], ...] = (
    ("requests", "Requests ended.", lambda counts: counts.requests),
    ("requests_aborted", "Requests whose client hung up.", lambda counts: counts.aborted),
    ("requests_failed", "Requests that ended with an error.", lambda counts: counts.failed),
    ("prompt_tokens", "Prompt tokens.", lambda counts: counts.prompt_tokens),
    ("cached_tokens", "Prompt tokens found in KV.", lambda counts: counts.cached_tokens),
    ("generation_tokens", "Tokens generated.", lambda counts: counts.completion_tokens),
    ("time_to_first_token_seconds", "Sum of TTFT.", lambda counts: counts.ttft_s),
    ("first_tokens", "Requests that had a first token.", lambda counts: counts.ttft_count),
    ("e2e_seconds", "Sum of time from arrival to end.", lambda counts: counts.e2e_s),
    ("load_wait_seconds", "Sum of time spent waiting for the adapter.", lambda counts: counts.adapter_wait_s),
)


class UsageCollector(Collector):
    """Counts of the busiest adapters and of all others together, as ``lorikeet:adapter_…``."""

    def __init__(self, usage: AdapterUsage, labels: dict[str, str]) -> None:
        self._usage = usage
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        by_adapter = self._usage.labelled()
        for name, text, value in _PER_ADAPTER:
            family = CounterMetricFamily(f"lorikeet:adapter_{name}", text, labels=[*self._labels, "adapter"])
            for adapter, counts in by_adapter.items():
                family.add_metric([*self._labels.values(), adapter], value(counts))
            yield family
