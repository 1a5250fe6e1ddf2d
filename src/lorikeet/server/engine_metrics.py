"""Gauges read from the engine's latest statistics when somebody scrapes, and the counts per adapter."""

import time
from collections.abc import Callable, Iterable, Set

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest
from lorikeet.core.messages import AssistCounters, EngineStats, QueueStats
from lorikeet.engine.views import EngineView
from lorikeet.server.families import Families
from lorikeet.server.usage import AdapterUsage, Counts

_MAX_NAMES = 500
"""Most adapters named in one metric, so that a page stays small whatever fits on the device."""


class EngineCollector(Collector):
    """One replica's state under vLLM's names.

    Args:
        client: holds the latest statistics.
        labels: of every metric.
        adapters_by_digest: gives adapter versions under all their names.
    """

    def __init__(
        self,
        client: EngineView,
        labels: dict[str, str],
        adapters_by_digest: Callable[[Set[AdapterDigest]], dict[AdapterDigest, list[AdapterRef]]],
    ) -> None:
        self._client = client
        self._make = Families(labels)
        self._adapters_by_digest = adapters_by_digest

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        make = self._make
        yield make.gauge("lorikeet:engine_up", "1 while the engine process answers.", float(self._client.alive))
        yield make.count("lorikeet:engine_restarts", "Times the engine process was restarted.", self._client.restarts)
        hello = self._client.hello
        shape = {"block_size": str(hello.block_size), "num_gpu_blocks": str(hello.total_blocks)}
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
        yield make.count("vllm:num_preemptions", "Requests that gave their blocks back.", stats.preemptions)
        yield make.count("vllm:prefix_cache_queries", "Tokens looked up in cached KV.", stats.prefix_queries_tokens)
        yield make.count("vllm:prefix_cache_hits", "Tokens found in cached KV.", stats.prefix_hits_tokens)
        yield make.count("lorikeet:steps", "Steps of the engine.", stats.steps)

    def _blocks(self, stats: EngineStats) -> Iterable[Metric]:
        make = self._make
        for_kv = min(stats.kv_blocks + stats.free_blocks + stats.cached_blocks, stats.kv_limit_blocks)
        usage = stats.kv_blocks / for_kv if for_kv else 1.0
        yield make.gauge("vllm:kv_cache_usage_perc", "Share of the blocks open to KV that sequences hold.", usage)
        blocks = [((use,), getattr(stats, f"{use}_blocks")) for use in ("free", "cached", "kv", "adapter", "inflight")]
        yield make.gauges("lorikeet:blocks", "Device blocks by use.", ("use",), blocks)

    def _adapters(self, stats: EngineStats) -> Iterable[Metric]:
        """Residency, for routers that prefer a replica that holds an adapter already."""
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
            name: str(known[digest][0].max_rank) if digest in known else ""
            for digest in stats.resident_adapters
            for name in _names(known, digest)
        }
        loaded = [((name, "gpu", "false", ranks[name]), 1.0) for name in sorted(ranks)[:_MAX_NAMES]]
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
            "Sequences whose prefill is done, and whose adapter is still on its way.",
            stats.ahead_of_adapter,
        )

    def _host_workers(self, counts: AssistCounters) -> Iterable[Metric]:
        for name, text, value in (
            ("host_layers", "Layers of adapters on their way that host workers computed.", counts.host_layers),
            ("device_layers", "Those that the device computed, as they had arrived.", counts.device_layers),
            (
                "host_layers_after_arrival",
                "Of the host's, those that had arrived when it was decided.",
                counts.host_layers_after_arrival,
            ),
            ("rescued_slices", "Shares of host workers that the engine computed itself.", counts.rescued_slices),
            ("lost_workers", "Host workers that ended unasked.", counts.lost_workers),
        ):
            yield self._make.count(f"lorikeet:assist_{name}", text, value)

    def _classes(self, queue: QueueStats) -> Iterable[Metric]:
        make = self._make
        for name, text, by_class in (
            ("waiting", "Waiting requests by class, 0 that of the smallest.", queue.waiting),
            ("quota_tokens", "Room of each class, in tokens of KV.", queue.quota_tokens),
            ("held_tokens", "Those of its tokens that requests hold.", queue.held_tokens),
        ):
            values = [((str(number),), float(value)) for number, value in enumerate(by_class)]
            yield make.gauges(f"lorikeet:queue_{name}", text, ("class",), values)
        yield make.count("lorikeet:queue_refreshes", "Times classes and quotas were found anew.", queue.refreshes)
        yield make.count(
            "lorikeet:queue_bypassed", "Requests that passed one whose adapter lacked room.", queue.bypassed
        )
        yield make.count("lorikeet:queue_squashed", "Those of them that were sent back.", queue.squashed)
        yield make.count("lorikeet:queue_joined", "Requests that joined others under their adapter.", queue.joined)


def _names(known: dict[AdapterDigest, list[AdapterRef]], digest: AdapterDigest) -> list[str]:
    """The names of a version; the start of its digest if it has none."""
    return [adapter.name for adapter in known.get(digest, ())] or [digest[:12]]


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
    ("kv_wait_seconds", "Sum of time spent waiting for KV beyond that.", lambda counts: counts.kv_wait_s),
)


class UsageCollector(Collector):
    """Counts of the busiest adapters and of all others together; where it is about targets, of the base model too."""

    def __init__(self, usage: AdapterUsage, labels: dict[str, str]) -> None:
        self._usage = usage
        self._make = Families(labels)

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        by_adapter = self._usage.labelled()
        for name, text, value in _PER_ADAPTER:
            values = [((adapter,), value(counts)) for adapter, counts in by_adapter.items()]
            yield self._make.counts(f"lorikeet:adapter_{name}", text, ("adapter",), values)
        with_base = {"": self._usage.base, **by_adapter}
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
