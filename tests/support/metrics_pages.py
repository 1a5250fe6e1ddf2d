"""Pages of metrics, and engine statistics for them."""

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from lorikeet.core.messages import DecisionTimes, EngineStats, ImageStats, MemoryStats, RouteStats, TierBytes
from tests.support.api_server import Running

MEMORY = MemoryStats(
    device=TierBytes(total=100, free=40, adapters=25, kv_running=30, kv_cached=3, inflight=2),
    host=TierBytes(total=50, free=4, adapters=30, kv_running=0, kv_cached=15, inflight=1),
    host_adapters=6,
    packing_waste_bytes=5,
    invalid_kv_bytes=1,
    invalid_kv_share=0.25,
    adapter_queries=20,
    adapter_hits=15,
    kv_queries_tokens=1000,
    kv_hits_tokens=300,
    kv_host_hits_tokens=200,
    transfers={"source-host": RouteStats(6, 300, 1, 0.5), "host-device": RouteStats(9, 400, 0, 0.25)},
    prefetched=8,
    prefetched_used=7,
    decisions=DecisionTimes(count=4, total_s=0.004, worst_s=0.003),
    nodes=120,
    metadata_bytes=30_000,
)

STATS = EngineStats(
    at_s=0.0,
    steps=7,
    running=2,
    waiting=5,
    waiting_for_adapter=2,
    waiting_for_kv=1,
    free_blocks=40,
    cached_blocks=10,
    kv_blocks=30,
    adapter_blocks=18,
    inflight_blocks=2,
    total_blocks=100,
    kv_limit_blocks=100,
    resident_adapters={},
    running_adapters=(),
    waiting_adapters=(),
    prefix_queries_tokens=100,
    prefix_hits_tokens=25,
    preemptions=3,
    drafted_tokens=7,
    kept_tokens=5,
    steps_by_tokens=(4, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1),
    computed_tokens=20_030,
    memory=MEMORY,
    images=ImageStats(computed=3, computed_tokens=768, reused=6, tower_s=1.5),
)


async def page(server: Running) -> dict[str, list[Sample]]:
    """Read the page with the official parser."""
    text = (await server.http.get("/metrics")).text
    samples: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    return samples


def value(samples: dict[str, list[Sample]], name: str, **labels: str) -> float:
    (found,) = [s for s in samples[name] if labels.items() <= s.labels.items()]
    assert {"model_name": "base", "engine": "0"}.items() <= found.labels.items()
    return found.value
