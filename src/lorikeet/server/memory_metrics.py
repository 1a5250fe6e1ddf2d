"""What the engine's memory tells, as metrics: where the bytes are, what was found, what moved, what deciding took."""

from collections.abc import Callable, Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from lorikeet.core.messages import MemoryStats, TierBytes
from lorikeet.engine.views import EngineView
from lorikeet.server.families import Families

_KINDS: tuple[tuple[str, Callable[[TierBytes], int]], ...] = (
    ("free", lambda tier: tier.free),
    ("adapters", lambda tier: tier.adapters),
    ("kv_running", lambda tier: tier.kv_running),
    ("kv_cached", lambda tier: tier.kv_cached),
    ("inflight", lambda tier: tier.inflight),
)
"""Kinds of bytes, which add up to a tier."""


class MemoryCollector(Collector):
    """The newest ``MemoryStats`` as ``lorikeet:memory_…``. Bytes are those of one rank.

    Args:
        client: holds the latest statistics.
        labels: of every metric.
    """

    def __init__(self, client: EngineView, labels: dict[str, str]) -> None:
        self._client = client
        self._make = Families(labels)

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
            "Unneeded KV on the device that nobody can use there, its adapter or earlier KV being elsewhere.",
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
        routes = [(tuple(route.split("-")), each) for route, each in memory.transfers.items()]
        numbers = (
            ("transfers", "Transfers that have ended.", [(route, each.transfers) for route, each in routes]),
            ("transfer_failures", "Those that failed.", [(route, each.failed) for route, each in routes]),
            ("transfer_bytes", "Bytes of those that did not fail.", [(route, each.bytes) for route, each in routes]),
            ("transfer_busy_seconds", "Time of reading and copying.", [(route, each.busy_s) for route, each in routes]),
        )
        for name, text, values in numbers:
            yield make.counts(f"lorikeet:memory_{name}", text, labels, values)
        yield make.count(
            "lorikeet:memory_prefetched", "Adapters and blocks of KV that were brought unasked.", memory.prefetched
        )
        yield make.count(
            "lorikeet:memory_prefetched_used", "Those that were used before they left.", memory.prefetched_used
        )

    def _decisions(self, memory: MemoryStats) -> Iterable[Metric]:
        make, times = self._make, memory.decisions
        yield make.count("lorikeet:memory_decisions", "Ticks of the swapper.", times.count)
        yield make.count("lorikeet:memory_decision_seconds", "Time that they took.", times.total_s)
        yield make.gauge("lorikeet:memory_decision_seconds_max", "Time that the longest took.", times.worst_s)
        yield make.gauge("lorikeet:memory_nodes", "Adapters and blocks of KV that the tree knows.", memory.nodes)
        yield make.gauge("lorikeet:memory_metadata_bytes", "Bytes that the tree takes.", memory.metadata_bytes)
