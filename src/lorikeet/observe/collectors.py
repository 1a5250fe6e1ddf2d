"""Collects, at every scrape, the metrics of engines, memory, adapters, tenants, connections and the cluster.

Gauges come from the newest statistics of the engines; the label ``engine`` names the replica. Only the busiest and the
slowest adapters have separate labels.

Names and labels: https://docs.vllm.ai/en/latest/design/metrics/
"""

import heapq
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from lorikeet.client.client import Engines
from lorikeet.client.state import ReplicaView
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest
from lorikeet.core.messages import (
    STEP_TOKENS_BOUNDS,
    AssistCounters,
    EngineStats,
    GuardStats,
    MemoryStats,
    QueueStats,
    RouteStats,
    SnapshotStats,
    TierBytes,
)
from lorikeet.core.plan import Tier
from lorikeet.observe.metric_families import MetricFamilies
from lorikeet.observe.traffic import TTFT_BOUNDS_S, AdapterUsage, RequestCounts
from lorikeet.observe.waits import CAUSES


@dataclass(frozen=True, slots=True)
class AdapterNames:
    """What a metrics page knows about adapters beside the engines' statistics.

    Attributes:
        by_digest: Maps adapter versions to all their names.
        activity: Recent requests of a name, decaying with time. Only the busiest names are listed.
        typical_blocks: Device blocks of the median registered adapter; 1 if none is registered.
        pinned: Names of the pinned adapters, read at every scrape.
        most: Most names in one metric, so that a page stays small.
    """

    by_digest: Callable[[Set[AdapterDigest]], dict[AdapterDigest, list[AdapterRef]]]
    activity: Callable[[str], float]
    typical_blocks: Callable[[], float]
    pinned: Set[str]
    most: int

    def busiest(self, names: Iterable[str]) -> list[str]:
        """Return the ``most`` busiest names in alphabetical order."""
        return sorted(heapq.nlargest(self.most, sorted(names), key=self.activity))


def device_capacity(stats: EngineStats, typical_blocks: float) -> int:
    """Return how many adapters the device can hold without evicting one or preempting a request.

    The count is the held adapters and as many of median size as fit into blocks that are free or hold KV of no
    sequence. Routers compare it with the number of held adapters to see whether a replica has room.

    Args:
        stats: A replica's newest statistics.
        typical_blocks: Blocks of the median registered adapter, for a device that holds none.
    """
    held = stats.resident_adapters
    median = statistics.median(held.values()) if held else typical_blocks
    return len(held) + int((stats.free_blocks + stats.cached_blocks) / max(1.0, median))


class EngineCollector(Collector):
    """Collects the state of one replica under vLLM's names.

    Args:
        client: the engine's client, with the latest statistics.
        labels: the labels of every metric.
        names: Names, activity and sizes of adapters.
    """

    def __init__(self, client: ReplicaView, labels: dict[str, str], names: AdapterNames) -> None:
        self._client = client
        self._make = MetricFamilies(labels)
        self._names = names

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        make = self._make
        yield make.gauge("lorikeet:engine_up", "1 while the engine process answers.", float(self._client.alive))
        asleep = float(self._client.is_asleep)
        yield make.gauge("lorikeet:engine_asleep", "1 while /sleep keeps pool, or weights, out of memory.", asleep)
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
        if stats.guards:
            yield from self._guards(stats.guards)
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
        queries = stats.prefix_queries_tokens
        hits = stats.prefix_hits_tokens
        for prefix in ("", "gpu_"):  # production-stack reads vLLM's older names
            yield make.count(f"vllm:{prefix}prefix_cache_queries", "Tokens looked up in cached KV.", queries)
            yield make.count(f"vllm:{prefix}prefix_cache_hits", "Tokens found in cached KV.", hits)
        share = hits / queries if queries else 0.0
        yield make.gauge("vllm:gpu_prefix_cache_hit_rate", "Share of these tokens that was found.", share)
        yield make.count("vllm:spec_decode_num_draft_tokens", "Tokens drafted for a step.", stats.drafted_tokens)
        yield make.count("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that came.", stats.kept_tokens)
        images = stats.images
        text = "Images of prompts whose embeddings a step needed."
        yield make.count("vllm:mm_cache_queries", text, images.computed + images.reused)
        yield make.count("vllm:mm_cache_hits", "Those whose embeddings were kept.", images.reused)
        yield make.count("lorikeet:image_tokens", "Tokens of images that the tower computed.", images.computed_tokens)
        yield make.count("lorikeet:tower_seconds", "Seconds of steps spent on computing images.", images.tower_s)
        yield make.count("lorikeet:steps", "Steps of the engine.", stats.steps)
        steps = dict(zip((*STEP_TOKENS_BOUNDS, math.inf), accumulate(stats.steps_by_tokens), strict=True))
        text = "Tokens computed by a step."
        yield make.histogram("vllm:iteration_tokens_total", text, steps, stats.computed_tokens)

    def _blocks(self, stats: EngineStats) -> Iterable[Metric]:
        make = self._make
        text = "Share of the blocks open to KV that sequences hold."
        # production-stack reads vLLM's older names.
        for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
            yield make.gauge(name, text, kv_usage(stats))
        blocks = [((use,), getattr(stats, f"{use}_blocks")) for use in ("free", "cached", "kv", "adapter", "inflight")]
        yield make.gauges("lorikeet:blocks", "Device blocks by use.", ("use",), blocks)

    def _adapters(self, stats: EngineStats) -> Iterable[Metric]:
        """Yield the resident adapters. Routers use them to prefer a replica that already has the adapter."""
        make = self._make
        names = self._names
        resident = stats.resident_adapters.keys()
        hosted = {*stats.hosted_adapters}
        serving = {*stats.running_adapters, *resident}
        known = names.by_digest(serving | hosted | {*stats.waiting_adapters})
        capacity = device_capacity(stats, 1.0 if resident else names.typical_blocks())
        running = {name for digest in serving for name in _names(known, digest)}
        # A waiting adapter that is resident or runs counts as running, so that the two sets never overlap.
        waiting = {name for digest in stats.waiting_adapters for name in _names(known, digest)} - running
        info = {
            "max_lora": str(capacity),
            "running_lora_adapters": ",".join(names.busiest(running)),
            "waiting_lora_adapters": ",".join(names.busiest(waiting)),
        }
        yield make.gauge("vllm:lora_requests_info", "Adapters held and queued; value: unix time.", time.time(), info)
        loaded: list[tuple[tuple[str, ...], float]] = []
        unlisted: list[tuple[tuple[str, ...], float]] = []
        for level, digests in (("gpu", resident), ("cpu", hosted)):
            ranks = {name: str(known[digest][0].max_rank) for digest in digests for name in _names(known, digest)}
            listed = names.busiest(ranks)
            loaded += [((name, level, str(name in names.pinned).lower(), ranks[name]), 1.0) for name in listed]
            unlisted.append(((level,), float(len(ranks) - len(listed))))
        labels = ("adapter_name", "level", "pinned", "rank")
        yield make.gauges("vllm:lora_adapter_loaded", "Adapters on the device and in the host tier.", labels, loaded)
        text = "Adapters that the limit of names leaves out of vllm:lora_adapter_loaded."
        yield make.gauges("lorikeet:unlisted_adapters", text, ("level",), unlisted)
        yield make.gauge("vllm:num_gpu_loaded_lora_adapters", "Adapters on the device.", len(resident))
        hosted_count = stats.memory.host_adapters
        yield make.gauge("vllm:num_cpu_loaded_lora_adapters", "Adapters in the host tier.", hosted_count)
        text = "Held adapters, and as many of median size as fit beside them."
        yield make.gauge("vllm:max_gpu_lora_adapters", text, capacity)

    def _modes(self, stats: EngineStats) -> Iterable[Metric]:
        make = self._make
        modes = stats.modes
        merged = () if modes.merged is None else _names(self._names.by_digest({modes.merged}), modes.merged)
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

    def _guards(self, guards: Mapping[str, GuardStats]) -> Iterable[Metric]:
        make = self._make
        states = [((part,), float(each.is_on)) for part, each in guards.items()]
        regrets = [((part,), each.regret_s) for part, each in guards.items()]
        switches = [((part,), float(each.switches)) for part, each in guards.items()]
        costs = [((part, "on"), each.on_s) for part, each in guards.items()]
        costs += [((part, "off"), each.off_s) for part, each in guards.items()]
        yield make.gauges(
            "lorikeet:guard_on", "1 while a guarded part acts, 0 while its alternative does.", ("part",), states
        )
        yield make.gauges(
            "lorikeet:guard_regret_seconds",
            "Waiting that the other choice would have spared, fading.",
            ("part",),
            regrets,
        )
        yield make.counts("lorikeet:guard_switches", "Times a part was switched on or off.", ("part",), switches)
        text = "Waiting of all requests with the part always on, and always off, as its shadow counts it."
        yield make.counts("lorikeet:guard_cost_seconds", text, ("part", "choice"), costs)

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
    """Return the names of a version; empty for a removed version, which is not shown while it is freed."""
    return [adapter.name for adapter in known.get(digest, ())]


_COUNTED: dict[str, tuple[str, Callable[[RequestCounts], float]]] = {
    "requests": ("Requests ended.", lambda counts: counts.requests),
    "requests_aborted": ("Requests whose client disconnected.", lambda counts: counts.aborted),
    "requests_failed": ("Requests that ended with an error.", lambda counts: counts.failed),
    "requests_refused": ("Requests that got a 429.", lambda counts: counts.refused),
    "prompt_tokens": ("Prompt tokens.", lambda counts: counts.prompt_tokens),
    "cached_tokens": ("Prompt tokens found in KV.", lambda counts: counts.cached_tokens),
    "generation_tokens": ("Tokens generated.", lambda counts: counts.completion_tokens),
    "time_to_first_token_seconds": ("Sum of TTFT.", lambda counts: counts.ttft_s),
    "first_tokens": ("Requests that had a first token.", lambda counts: counts.ttft_count),
    "e2e_seconds": ("Sum of time from arrival to end.", lambda counts: counts.e2e_s),
    "load_wait_seconds": ("Sum of time spent waiting for the adapter.", lambda counts: counts.adapter_wait_s),
    "kv_wait_seconds": ("Sum of time spent waiting for KV beyond that.", lambda counts: counts.kv_wait_s),
}
"""Text and value of each counter of requests by adapter or tenant, by the end of its name."""
_NOT_OF_ADAPTERS = {"requests_refused"}
_NOT_OF_TENANTS = {"requests_aborted", "cached_tokens", "e2e_seconds", "load_wait_seconds", "kv_wait_seconds"}


def _request_counts(
    make: MetricFamilies, label: str, omitted: Set[str], by_label: Mapping[str, RequestCounts]
) -> Iterable[Metric]:
    """Yield the counters ``lorikeet:LABEL_…`` of requests.

    Args:
        make: builds the metrics.
        label: ``adapter`` or ``tenant``.
        omitted: counters to leave out.
        by_label: counts of each adapter or tenant.
    """
    for name, (text, value) in _COUNTED.items():
        if name not in omitted:
            values = [((each,), value(counts)) for each, counts in by_label.items()]
            yield make.counts(f"lorikeet:{label}_{name}", text, (label,), values)


class UsageCollector(Collector):
    """Collects counts of the busiest adapters and the sum of all others; with SLO targets, also of the base model."""

    def __init__(self, usage: AdapterUsage, labels: dict[str, str]) -> None:
        self._usage = usage
        self._make = MetricFamilies(labels)

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        by_adapter = self._usage.labelled()
        yield from _request_counts(self._make, "adapter", _NOT_OF_ADAPTERS, by_adapter)
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


class TenantCollector(Collector):
    """Collects counts of the busiest and slowest tenants and the sum of all others, once a request has had a key."""

    def __init__(self, usage: AdapterUsage, labels: dict[str, str]) -> None:
        self._usage = usage
        self._make = MetricFamilies(labels)

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        by_tenant = self._usage.labelled()
        if len(by_tenant) == 1:
            return
        yield from _request_counts(self._make, "tenant", _NOT_OF_TENANTS, by_tenant)
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
    """Collects the newest ``MemoryStats`` as ``lorikeet:memory_…``. Bytes are those of one rank.

    Args:
        client: the engine's client, with the latest statistics.
        labels: the labels of every metric.
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
        if stats.memory.snapshots is not None:
            yield from self._snapshots(stats.memory.snapshots)

    def _bytes(self, memory: MemoryStats) -> Iterable[Metric]:
        make = self._make
        tiers = (("device", memory.device), ("host", memory.host))
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
        make = self._make
        labels = ("source", "target")
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
        make = self._make
        times = memory.decisions
        yield make.count("lorikeet:memory_decisions", "Ticks of the swapper.", times.count)
        yield make.count("lorikeet:memory_decision_seconds", "Time that they took.", times.total_s)
        yield make.gauge("lorikeet:memory_decision_seconds_max", "Time that the longest took.", times.worst_s)
        yield make.gauge("lorikeet:memory_nodes", "Adapters and blocks of KV in the tree.", memory.nodes)
        yield make.gauge("lorikeet:memory_metadata_bytes", "Bytes that the tree takes.", memory.metadata_bytes)

    def _snapshots(self, snapshots: SnapshotStats) -> Iterable[Metric]:
        make = self._make
        sizes = [(("device",), snapshots.device_bytes), (("host",), snapshots.host_bytes)]
        text = "Bytes of kept states, part of the KV in lorikeet:memory_bytes."
        yield make.gauges("lorikeet:snapshot_bytes", text, ("tier",), sizes)
        yield make.gauge("lorikeet:snapshot_state_bytes", "Bytes of one state.", snapshots.state_bytes)
        yield make.count("lorikeet:snapshots_taken", "States that were kept for later requests.", snapshots.taken)
        yield make.count("lorikeet:snapshots_used", "Sequences that began from a kept state.", snapshots.used)


# Each route starts at 0, since ``increase()`` would miss the first failure of a counter without an earlier sample.
_NO_TRANSFERS = {
    f"{source}-{target}": RouteStats(0, 0, 0, 0.0)
    for target in (Tier.HOST, Tier.DEVICE)
    for source in Tier
    if source is not target
}


def kv_usage(stats: EngineStats) -> float:
    """Return the share of KV blocks that sequences hold."""
    for_kv = min(stats.kv_blocks + stats.free_blocks + stats.cached_blocks, stats.kv_limit_blocks)
    return stats.kv_blocks / for_kv if for_kv else 1.0


def load_of(engines: Engines) -> dict[str, float]:
    """Return the load of all replicas, for gateways: the mean share of KV blocks in use, and waiting requests."""
    known = [view.stats for view in engines.views.values() if view.stats is not None]
    return {
        "kv_cache_usage_perc": sum(map(kv_usage, known)) / len(known) if known else 0.0,
        "num_requests_waiting": float(sum(stats.waiting for stats in known)),
    }


class ReplicasCollector(Collector):
    """Collects the metrics of all replicas' engines and memory.

    Args:
        client: the engines' client. Its replicas may change.
        labels: the labels of every metric, without ``engine``.
        names: names, activity and sizes of adapters.
    """

    def __init__(self, client: Engines, labels: dict[str, str], names: AdapterNames) -> None:
        self._client = client
        self._labels = labels
        self._names = names

    def collect(self) -> Iterable[Metric]:
        """Return each metric once, with the values of all replicas, since a page must not repeat a metric."""
        merged: dict[str, Metric] = {}
        for replica, view in self._client.views.items():
            labels = {**self._labels, "engine": replica}
            engine = EngineCollector(view, labels, self._names)
            for collector in (engine, MemoryCollector(view, labels)):
                for metric in collector.collect():
                    merged.setdefault(metric.name, metric)
                    if merged[metric.name] is not metric:
                        merged[metric.name].samples += metric.samples
        return merged.values()


class ConnectionCollector(Collector):
    """Collects the number of connections that a limit closed.

    Args:
        closed: number of closed connections by reason, which ``ConnectionStats`` updates.
        labels: the metric's labels.
    """

    def __init__(self, closed: Mapping[str, int], labels: Mapping[str, str]) -> None:
        self._closed = closed
        self._make = MetricFamilies(labels)

    def collect(self) -> Iterable[Metric]:
        """Yield the metric."""
        values = [((reason,), float(count)) for reason, count in self._closed.items()]
        yield self._make.counts("lorikeet:connections_closed", "Connections closed for a limit.", ("reason",), values)


class ClusterCollector(Collector):
    """Collects the metrics of a whole cluster.

    Args:
        client: the cluster's client, with the cluster's state.
        model_name: label of every metric.
    """

    def __init__(self, client: Engines, model_name: str) -> None:
        self._client = client
        self._make = MetricFamilies({"model_name": model_name})

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        make = self._make
        state = self._client.describe()
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
        adoptions = state.adoptions
        yield make.count("lorikeet:cluster_replicas_adopted", "Replicas of lost servers adopted.", adoptions.adopted)
        yield make.count(
            "lorikeet:cluster_replicas_handed_back", "Adopted replicas handed back.", adoptions.handed_back
        )
        yield make.count(
            "lorikeet:cluster_requests_resumed", "Requests of lost servers that went on here.", adoptions.resumed
        )
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
