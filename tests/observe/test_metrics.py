"""The metrics page: vLLM's names, true numbers, bounded size."""

import asyncio
import json
import time

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.samples import Sample

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import AdapterArrived, AdapterLoaded, Admitted, KvArrived, Queued, RequestTimings
from lorikeet.core.ids import AdapterDigest, AdapterName, RequestId
from lorikeet.core.messages import (
    AssistCounters,
    GuardStats,
    ModeStats,
    QueueStats,
    SnapshotStats,
)
from lorikeet.core.request import Request, SamplingParams
from lorikeet.http.auth import key_name
from lorikeet.observe.ended_request import EndedRequest
from lorikeet.observe.metrics import RequestMetrics
from lorikeet.observe.traffic import TTFT_BOUNDS_S, AdapterUsage, RequestCounts
from tests.support.api_server import Running, Start
from tests.support.chat_requests import CHAT, bearer, body, events
from tests.support.metrics_pages import MEMORY, STATS, page, value
from tests.support.waiting import until

pytestmark = pytest.mark.slow


async def test_finished_requests_are_counted_under_vllms_names(server: Running) -> None:
    answer = (await server.http.post(CHAT, json=body())).json()
    await events(server.http, CHAT, body(max_tokens=1))
    samples = await page(server)
    usage = answer["usage"]
    assert value(samples, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(samples, "vllm:request_success_total", finished_reason="length") == 1
    assert value(samples, "vllm:prompt_tokens_total") == 2 * usage["prompt_tokens"]
    assert value(samples, "vllm:generation_tokens_total") == usage["completion_tokens"] + 1
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_inference_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_num_preemptions",
    ):
        assert value(samples, f"vllm:{name}_count") == 2
    assert value(samples, "vllm:request_time_per_output_token_seconds_count") == 1
    assert value(samples, "vllm:inter_token_latency_seconds_count") == usage["completion_tokens"] - 1


async def test_engine_metrics_have_the_names_that_gateways_expect(server: Running) -> None:
    server.engine.stats = STATS
    samples = await page(server)
    assert value(samples, "vllm:num_requests_running") == 2
    assert value(samples, "vllm:num_requests_waiting") == 5
    assert value(samples, "vllm:num_requests_waiting_by_reason", reason="capacity") == 2
    assert value(samples, "vllm:num_requests_waiting_by_reason", reason="deferred") == 3
    waiting = {s.labels["for"]: s.value for s in samples["lorikeet:num_requests_waiting_for_transfer"]}
    assert waiting == {"adapter": 2, "kv": 1}
    assert value(samples, "vllm:kv_cache_usage_perc") == 30 / 80
    server.engine.stats = msgspec.structs.replace(STATS, kv_limit_blocks=60)  # a static split
    assert value(await page(server), "vllm:kv_cache_usage_perc") == 30 / 60
    assert value(samples, "vllm:prefix_cache_queries_total") == 100
    assert value(samples, "vllm:prefix_cache_hits_total") == 25
    assert value(samples, "vllm:num_preemptions_total") == 3
    assert value(samples, "vllm:spec_decode_num_draft_tokens_total") == 7
    assert value(samples, "vllm:spec_decode_num_accepted_tokens_total") == 5
    assert value(samples, "vllm:mm_cache_queries_total") == 9
    assert value(samples, "vllm:mm_cache_hits_total") == 6
    assert value(samples, "lorikeet:image_tokens_total") == 768
    assert value(samples, "lorikeet:tower_seconds_total") == 1.5
    assert (
        value(
            samples,
            "vllm:cache_config_info",
            block_size="16",
            num_gpu_blocks="100",
            kv_cache_size_tokens="1600",
            kv_cache_max_concurrency="6.25",
        )
        == 1
    )
    assert value(samples, "lorikeet:blocks", use="adapter") == 18


async def test_the_memory_tells_where_its_bytes_are_and_they_add_up_to_its_tiers(server: Running) -> None:
    server.engine.stats = STATS
    samples = await page(server)
    by_tier: dict[str, dict[str, float]] = {"device": {}, "host": {}}
    for sample in samples["lorikeet:memory_bytes"]:
        by_tier[sample.labels["tier"]][sample.labels["kind"]] = sample.value
    assert by_tier["device"] == {"free": 40, "adapters": 25, "kv_running": 30, "kv_cached": 3, "inflight": 2}
    assert {tier: sum(kinds.values()) for tier, kinds in by_tier.items()} == {"device": 100, "host": 50}
    assert value(samples, "lorikeet:memory_packing_waste_bytes") == 5
    assert value(samples, "lorikeet:memory_invalid_kv_bytes") == 1
    assert value(samples, "lorikeet:memory_invalid_kv_share") == 0.25
    assert value(samples, "vllm:num_cpu_loaded_lora_adapters") == 6


async def test_kept_states_have_sizes_and_counts(server: Running) -> None:
    server.engine.stats = STATS
    assert not [name for name in await page(server) if name.startswith("lorikeet:snapshot")], "no layer has a state"
    kept = SnapshotStats(device_bytes=12, host_bytes=8, state_bytes=4, taken=9, used=6)
    server.engine.stats = msgspec.structs.replace(STATS, memory=msgspec.structs.replace(MEMORY, snapshots=kept))
    samples = await page(server)
    sizes = [value(samples, "lorikeet:snapshot_bytes", tier=tier) for tier in ("device", "host")]
    assert sizes == [12, 8]
    assert value(samples, "lorikeet:snapshot_state_bytes") == 4
    assert value(samples, "lorikeet:snapshots_taken_total") == 9
    assert value(samples, "lorikeet:snapshots_used_total") == 6


async def test_memory_metrics_count_hits_transfers_and_decisions(server: Running) -> None:
    server.engine.stats = STATS
    samples = await page(server)
    told = {
        name.removeprefix("lorikeet:memory_"): found[0].value
        for name, found in samples.items()
        if name.startswith("lorikeet:memory_") and set(found[0].labels) == {"model_name", "engine"}
    }
    assert told == {
        "packing_waste_bytes": 5,
        "invalid_kv_bytes": 1,
        "invalid_kv_share": 0.25,
        "adapter_queries_total": 20,
        "adapter_hits_total": 15,
        "kv_query_tokens_total": 1000,
        "prefetched_total": 8,
        "prefetched_used_total": 7,
        "decisions_total": 4,
        "decision_seconds_total": 0.004,
        "decision_seconds_max": 0.003,
        "nodes": 120,
        "metadata_bytes": 30_000,
    }
    assert value(samples, "lorikeet:memory_kv_hit_tokens_total", tier="device") == 300
    assert value(samples, "lorikeet:memory_kv_hit_tokens_total", tier="host") == 200
    moved = {"source": "source", "target": "host"}
    numbers = ("transfers", "transfer_bytes", "transfer_failures", "transfer_busy_seconds")
    assert [value(samples, f"lorikeet:memory_{name}_total", **moved) for name in numbers] == [6, 300, 1, 0.5]
    assert value(samples, "lorikeet:memory_transfers_total", source="host", target="device") == 9
    unused = {"source": "source", "target": "device"}
    assert [value(samples, f"lorikeet:memory_{name}_total", **unused) for name in numbers] == [0, 0, 0, 0]


async def test_metrics_count_merging_and_cold_starts(server: Running) -> None:
    merged = AdapterRef(AdapterName("merged"), AdapterDigest("d" * 64), "", {"q": (8,)}, 1)
    server.service.used_adapters[merged.digest] = merged
    modes = ModeStats(merged.digest, switches=4, switch_s=0.5, merged_steps=30, assisted_steps=2)
    server.engine.stats = msgspec.structs.replace(STATS, modes=modes, ahead_of_adapter=3)
    samples = await page(server)
    assert value(samples, "lorikeet:merged_adapter", adapter="merged") == 1
    names = ("merge_switches", "merge_switch_seconds", "merged_steps", "assisted_steps")
    assert [value(samples, f"lorikeet:{name}_total") for name in names] == [4, 0.5, 30, 2]
    assert value(samples, "lorikeet:num_requests_ahead_of_adapter") == 3
    server.engine.stats = STATS
    assert "lorikeet:merged_adapter" not in await page(server)


async def test_metrics_show_which_guarded_parts_act_and_what_both_choices_cost(server: Running) -> None:
    guards = {"order": GuardStats(is_on=False, regret_s=0.5, switches=3, on_s=9.0, off_s=7.0)}
    server.engine.stats = msgspec.structs.replace(STATS, guards=guards)
    samples = await page(server)
    assert value(samples, "lorikeet:guard_on", part="order") == 0
    assert value(samples, "lorikeet:guard_regret_seconds", part="order") == 0.5
    assert value(samples, "lorikeet:guard_switches_total", part="order") == 3
    costs = [value(samples, "lorikeet:guard_cost_seconds_total", part="order", choice=each) for each in ("on", "off")]
    assert costs == [9, 7]
    server.engine.stats = STATS
    assert "lorikeet:guard_on" not in await page(server)


async def test_metrics_count_layers_of_host_workers(server: Running) -> None:
    server.engine.stats = msgspec.structs.replace(STATS, assist=AssistCounters(50, 30, 2, 4, 1))
    samples = await page(server)
    names = ("host_layers", "device_layers", "host_layers_after_arrival", "rescued_slices", "lost_workers")
    assert [value(samples, f"lorikeet:assist_{name}_total") for name in names] == [50, 30, 2, 4, 1]
    server.engine.stats = STATS
    assert "lorikeet:assist_host_layers_total" not in await page(server)


async def test_metrics_show_classes_of_the_admission_queue(server: Running) -> None:
    queue = QueueStats((5, 0), (300, 700), (310, 20), refreshes=2, bypassed=7, squashed=1, joined=4)
    server.engine.stats = msgspec.structs.replace(STATS, queue=queue)
    samples = await page(server)
    for name, by_class in (("waiting", (5, 0)), ("quota_tokens", (300, 700)), ("held_tokens", (310, 20))):
        told = [value(samples, f"lorikeet:queue_{name}", **{"class": number}) for number in ("0", "1")]
        assert tuple(told) == by_class, name
    names = ("refreshes", "bypassed", "squashed", "joined")
    assert [value(samples, f"lorikeet:queue_{name}_total") for name in names] == [2, 7, 1, 4]
    server.engine.stats = STATS
    assert "lorikeet:queue_waiting" not in await page(server)


async def test_without_gauges_of_the_engine_the_page_has_none_of_the_memory(server: Running) -> None:
    assert not [name for name in await page(server) if name.startswith("lorikeet:memory_")]


def test_waits_for_adapters_and_for_kv_are_separate_metrics() -> None:
    name = RequestId("r")
    timings = RequestTimings(arrival_s=0.0)
    for event in (
        Queued(name, 0.5),
        Admitted(name, 1.0, 32, True, True),
        AdapterArrived(name, 3.0),
        KvArrived(name, 7.0),
    ):
        timings.apply(event)
    metrics = RequestMetrics("base", 256)
    request = Request(name, [1] * 40, SamplingParams(4), 0.0)
    metrics.on_ended(EndedRequest(request, timings, 0, "abort", 8.0))
    metrics.on_ended(EndedRequest(request, RequestTimings(arrival_s=0.0), 0, "abort", 8.0))
    text = bytes(metrics.page("").body).decode()
    assert 'lorikeet:request_adapter_wait_seconds_sum{engine="0",model_name="base"} 2.0' in text
    assert 'lorikeet:request_kv_wait_seconds_sum{engine="0",model_name="base"} 4.0' in text
    assert 'lorikeet:request_kv_wait_seconds_count{engine="0",model_name="base"} 1.0' in text


async def test_every_step_is_counted_with_its_tokens(server: Running) -> None:
    server.engine.stats = STATS
    samples = await page(server)
    assert value(samples, "vllm:iteration_tokens_total_count") == 7
    assert value(samples, "vllm:iteration_tokens_total_sum") == 20_030
    buckets = {s.labels["le"]: s.value for s in samples["vllm:iteration_tokens_total_bucket"]}
    assert len(buckets) == 14
    assert (buckets["1.0"], buckets["8.0"], buckets["16.0"], buckets["16384.0"], buckets["+Inf"]) == (4, 4, 6, 6, 7)


async def test_resident_and_waiting_adapters_are_separate_labels(server: Running) -> None:
    def adapter(name: str) -> AdapterRef:
        return AdapterRef(AdapterName(name), AdapterDigest(name * 20), "", {"q": (8, 16)}, 1)

    held = adapter("held")
    queued = adapter("queued")
    server.service.used_adapters.update({held.digest: held, queued.digest: queued})
    server.engine.stats = msgspec.structs.replace(
        STATS,
        resident_adapters={held.digest: 3},
        running_adapters=(held.digest,),
        waiting_adapters=(held.digest, queued.digest),
    )
    server.engine.callbacks[0](AdapterLoaded(held.digest, 0.0, 0.2))
    samples = await page(server)
    (info,) = samples["vllm:lora_requests_info"]
    assert (info.labels["running_lora_adapters"], info.labels["waiting_lora_adapters"]) == ("held", "queued")
    assert abs(info.value - time.time()) < 60
    assert value(samples, "vllm:lora_adapter_loaded", adapter_name="held", level="gpu", pinned="false", rank="16") == 1
    assert value(samples, "vllm:num_gpu_loaded_lora_adapters") == 1
    assert value(samples, "vllm:lora_adapter_load_seconds_sum") == 0.2


async def test_resident_adapter_is_listed_under_all_its_names(server: Running) -> None:
    await server.http.post(CHAT, json=body(model="formal"))
    twin = server.service.catalog.register("twin", str(server.sources / "formal")).record
    unused = server.service.catalog.register("pirate", str(server.sources / "pirate")).record
    server.engine.stats = msgspec.structs.replace(
        STATS,
        resident_adapters={twin.digest: 3, AdapterDigest("0123456789abcdef"): 1},
        waiting_adapters=(unused.digest,),
    )
    samples = await page(server)
    (info,) = samples["vllm:lora_requests_info"]
    assert info.labels["running_lora_adapters"] == "formal,twin"
    assert info.labels["waiting_lora_adapters"] == "pirate"
    assert {s.labels["adapter_name"] for s in samples["vllm:lora_adapter_loaded"]} == {"formal", "twin"}
    for name in ("formal", "twin"):
        assert value(samples, "vllm:lora_adapter_loaded", adapter_name=name, rank="4") == 1
    assert value(samples, "vllm:num_gpu_loaded_lora_adapters") == 2
    assert "0123456789ab" not in (await server.http.get("/metrics")).text, "it was removed, and has no name"


def residency_score(samples: dict[str, list[Sample]], adapter: str) -> float:
    """Score a replica for an adapter as llm-d's scorer of residency does, from the metrics page alone."""
    levels = {s.labels["level"] for s in samples["vllm:lora_adapter_loaded"] if s.labels["adapter_name"] == adapter}
    if "gpu" in levels:
        return 1.0
    if "cpu" in levels:
        return 0.7
    return 0.6 if value(samples, "vllm:num_gpu_loaded_lora_adapters") < capacity(samples) else 0.0


def affinity_score(samples: dict[str, list[Sample]], adapter: str) -> float:
    """Score a replica as the Gateway API inference extension's scorer of adapter affinity does."""
    (info,) = samples["vllm:lora_requests_info"]
    running = [name for name in info.labels["running_lora_adapters"].split(",") if name]
    waiting = [name for name in info.labels["waiting_lora_adapters"].split(",") if name]
    if adapter in running:
        return 1.0
    if len(running) + len(waiting) < int(info.labels["max_lora"]):
        return 0.8
    return 0.6 if adapter in waiting else 0.0


def capacity(samples: dict[str, list[Sample]]) -> float:
    return value(samples, "vllm:max_gpu_lora_adapters")


@pytest.mark.parametrize(
    ("free", "cached", "held", "most", "new_residency", "new_affinity"),
    [
        pytest.param(64, 0, 0, 16, 0.6, 0.8, id="empty"),
        pytest.param(20, 4, 10, 16, 0.6, 0.8, id="half full"),
        pytest.param(0, 8, 14, 16, 0.6, 0.8, id="kept KV makes room"),
        pytest.param(3, 0, 15, 15, 0.0, 0.0, id="full"),
        pytest.param(0, 0, 2, 2, 0.0, 0.0, id="full of running KV"),
    ],
)
async def test_routers_see_whether_a_replica_has_room_for_an_adapter(
    server: Running, free: int, cached: int, held: int, most: int, new_residency: float, new_affinity: float
) -> None:
    refs = [
        AdapterRef(AdapterName(f"adapter-{number}"), AdapterDigest(f"{number:064x}"), "", {"q": (8,)}, 1)
        for number in range(held + 1)
    ]
    on_host = refs[-1]
    server.service.used_adapters.update({ref.digest: ref for ref in refs})
    server.engine.stats = msgspec.structs.replace(
        STATS,
        free_blocks=free,
        cached_blocks=cached,
        resident_adapters={ref.digest: 4 for ref in refs[:held]},
        hosted_adapters=(on_host.digest,),
    )
    samples = await page(server)
    if held:
        assert capacity(samples) == most
        assert residency_score(samples, "adapter-0") == affinity_score(samples, "adapter-0") == 1.0
    else:
        assert capacity(samples) >= 1
    assert residency_score(samples, on_host.name) == 0.7
    assert residency_score(samples, "absent") == new_residency
    assert affinity_score(samples, "absent") == new_affinity


async def test_the_busiest_adapters_are_listed_and_the_rest_counted(server: Running) -> None:
    refs = [
        AdapterRef(AdapterName(f"adapter-{number:03}"), AdapterDigest(f"{number:064x}"), "", {"q": (8,)}, 1)
        for number in range(600)
    ]
    server.service.used_adapters.update({ref.digest: ref for ref in refs})
    server.service.observer.usage.of("adapter-599").add(RequestCounts(requests=1))
    server.engine.stats = msgspec.structs.replace(
        STATS,
        resident_adapters={ref.digest: 4 for ref in refs},
        hosted_adapters=tuple(ref.digest for ref in refs[:510]),
    )
    samples = await page(server)
    listed = [s.labels["adapter_name"] for s in samples["vllm:lora_adapter_loaded"] if s.labels["level"] == "gpu"]
    assert len(listed) == 500
    assert "adapter-599" in listed
    (info,) = samples["vllm:lora_requests_info"]
    assert "adapter-599" in info.labels["running_lora_adapters"].split(",")
    assert value(samples, "lorikeet:unlisted_adapters", level="gpu") == 100
    assert value(samples, "lorikeet:unlisted_adapters", level="cpu") == 10


async def test_adapters_have_counts_of_their_own(server: Running) -> None:
    for _ in range(2):
        await server.http.post(CHAT, json=body(model="formal"))
    await server.http.post(CHAT, json=body())
    samples = await page(server)
    assert value(samples, "lorikeet:adapter_requests_total", adapter="formal") == 2
    assert value(samples, "lorikeet:adapter_requests_total", adapter="other") == 0
    assert value(samples, "lorikeet:adapter_first_tokens_total", adapter="formal") == 2


async def test_ten_thousand_busy_adapters_fit_on_a_small_page(server: Running) -> None:
    refs = {}
    for number in range(10_000):
        name = f"organisation/team-{number % 7}/adapter-{number:05}"
        server.service.observer.usage.of(name).add(RequestCounts(requests=1))
        digest = AdapterDigest(f"{number:064x}")
        refs[digest] = AdapterRef(AdapterName(name), digest, "/somewhere", {"q": (8,)}, 1)
    server.service.used_adapters.update(refs)
    server.engine.stats = msgspec.structs.replace(
        STATS, resident_adapters=dict.fromkeys(refs, 1), waiting_adapters=tuple(refs)
    )
    reply = await server.http.get("/metrics")
    assert len(reply.content) < 2**20
    samples = await page(server)
    assert len(samples["lorikeet:adapter_requests_total"]) == 21
    assert value(samples, "vllm:num_gpu_loaded_lora_adapters") == 10_000


@pytest.mark.parametrize(
    ("accept", "is_openmetrics"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain;version=abc", False),
        ("application/openmetrics-text;version=0.0.1,text/plain;version=0.0.4;q=0.3", False),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", True),
        ("application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4", True),
    ],
)
async def test_scrapers_choose_the_format(server: Running, accept: str, is_openmetrics: bool) -> None:
    server.engine.stats = STATS
    await server.http.post(CHAT, json=body())
    reply = await server.http.get("/metrics", headers={"Accept": accept})
    kind = "application/openmetrics-text; version=1.0.0" if is_openmetrics else "text/plain; version=0.0.4"
    assert reply.headers["content-type"] == f"{kind}; charset=utf-8"
    if is_openmetrics:
        families = openmetrics_families(reply.text)
        found = {sample.name for family in families for sample in family.samples}
        plain = (await page(server)).keys()
        assert {name for name in plain ^ found if not name.endswith("_created")} == set()


async def test_request_parameters_are_counted_once_for_each_request(server: Running) -> None:
    await server.http.post(CHAT, json=body(n=3, max_tokens=7))
    samples = await page(server)
    for name, asked in (("n", 3), ("max_tokens", 7)):
        assert value(samples, f"vllm:request_params_{name}_count") == 1
        assert value(samples, f"vllm:request_params_{name}_sum") == asked


async def test_refused_requests_are_counted_and_background_ones_have_no_latencies(start: Start) -> None:
    async with start(max_queued=1) as server:
        assert (await server.http.post(CHAT, json=body(n=2))).status_code == 400
        server.engine.open.clear()
        first = asyncio.create_task(server.http.post(CHAT, json=body(service_tier="flex")))
        await until(lambda: len(server.engine.submitted) == 1, "a request is in flight")
        assert (await server.http.post(CHAT, json=body())).status_code == 429
        server.engine.open.set()
        assert (await first).status_code == 200
        samples = await page(server)
    refused = {each.labels["reason"]: each.value for each in samples["vllm:admission_rejections_total"]}
    assert refused == {"max_num_queued_reqs": 1, "shed": 0}
    assert value(samples, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(samples, "vllm:e2e_request_latency_seconds_count") == 0
    assert value(samples, "vllm:time_to_first_token_seconds_count") == 0


async def test_gateways_get_the_load_with_an_answer_if_they_ask(server: Running) -> None:
    server.engine.stats = STATS
    asked = "endpoint-load-metrics-format"
    text = await server.http.post(CHAT, json=body(), headers={asked: "text"})
    assert text.headers["endpoint-load-metrics"] == (
        "TEXT named_metrics.kv_cache_usage_perc=0.375, named_metrics.num_requests_waiting=5.0"
    )
    as_json = await server.http.post(CHAT, json=body(stream=True), headers={asked: "JSON"})
    form, _, report = as_json.headers["endpoint-load-metrics"].partition(" ")
    assert (form, json.loads(report)["named_metrics"]["num_requests_waiting"]) == ("JSON", 5)
    for unasked in ({}, {asked: "binary"}):
        assert "endpoint-load-metrics" not in (await server.http.post(CHAT, json=body(), headers=unasked)).headers


def test_half_of_the_labels_are_for_adapters_that_were_slow_lately() -> None:
    now = [0.0]
    usage = AdapterUsage(4, lambda: now[0])
    for name, requests, ttft_s in (("busy", 50, 0.1), ("second", 40, 0.1), ("rare", 1, 9.0), ("lame", 2, 3.0)):
        for _ in range(requests):
            usage.of(name).add(RequestCounts(requests=1, ttft_count=1, ttft_ns=round(ttft_s * 1e9)))
    for number in range(20):
        usage.of(f"other-{number}").add(RequestCounts(requests=3, ttft_ns=10**8))
    assert set(usage.labelled()) == {"busy", "second", "rare", "lame", "other"}
    now[0] = 3600.0
    usage.of("new").add(RequestCounts(requests=1, ttft_ns=10**9))
    assert "new" in usage.labelled(), "what was slow an hour ago counts for little"


async def test_each_labelled_adapter_has_a_histogram_of_ttft(server: Running) -> None:
    for _ in range(3):
        await server.http.post(CHAT, json=body(model="formal"))
    samples = await page(server)
    counts = {
        sample.labels["le"]: sample.value
        for sample in samples["lorikeet:adapter_ttft_seconds_bucket"]
        if sample.labels["adapter"] == "formal"
    }
    assert len(counts) == len(TTFT_BOUNDS_S)
    assert counts["+Inf"] == value(samples, "lorikeet:adapter_ttft_seconds_count", adapter="formal") == 3
    assert list(counts.values()) == sorted(counts.values())
    total_s = value(samples, "lorikeet:adapter_time_to_first_token_seconds_total", adapter="formal")
    assert value(samples, "lorikeet:adapter_ttft_seconds_sum", adapter="formal") == total_s


async def test_openmetrics_names_a_request_beside_its_times(server: Running) -> None:
    await server.http.post(CHAT, json=body(), headers={"X-Request-Id": "x" * 100})
    text = (await server.http.get("/metrics", headers={"Accept": "application/openmetrics-text"})).text
    found = [
        sample.exemplar.labels["request_id"]
        for family in openmetrics_families(text)
        for sample in family.samples
        if sample.name == "vllm:time_to_first_token_seconds_bucket" and sample.exemplar
    ]
    assert found == ["x" * 64]


def test_time_in_the_queue_is_counted_by_cause() -> None:
    metrics = RequestMetrics("base", 256)
    timings = RequestTimings(0.0)
    name = RequestId("r")
    timings.apply(Queued(name, 1.0))
    timings.apply(Admitted(name, 3.0, 0, waited_for="memory for its KV"))
    metrics.on_ended(EndedRequest(Request(name, [1], SamplingParams(4), 0.0), timings, 1, "stop", 4.0))
    labels = {**metrics.labels, "cause": "kv_blocks"}
    assert metrics.registry.get_sample_value("lorikeet:request_queue_seconds_total", labels) == 2.0
    assert metrics.registry.get_sample_value("lorikeet:request_queue_seconds_total", labels | {"cause": "order"}) == 0.0


async def test_keys_are_counted_one_by_one_by_their_names(start: Start) -> None:
    async with start(api_keys=("one", "two"), max_queued=2) as server:

        async def ask(key: str) -> int:
            return (await server.http.post(CHAT, json=body(), headers=bearer(key))).status_code

        assert "lorikeet:tenant_requests_total" not in await page(server)
        assert [await ask(key) for key in ("one", "two", "one")] == [200, 200, 200]
        server.engine.open.clear()
        waiting = [asyncio.create_task(ask("one")) for _ in range(2)]
        await until(lambda: len(server.engine.submitted) == 5, "two run")
        assert await ask("two") == 429
        one = key_name("one")
        two = key_name("two")
        assert value(await page(server), "lorikeet:tenant_requests_running", tenant=one) == 2
        server.engine.open.set()
        assert await asyncio.gather(*waiting) == [200, 200]
        samples = await page(server)
    for key, requests, refused in ((one, 4, 0), (two, 1, 1)):
        assert value(samples, "lorikeet:tenant_requests_total", tenant=key) == requests
        assert value(samples, "lorikeet:tenant_first_tokens_total", tenant=key) == requests
        assert value(samples, "lorikeet:tenant_requests_refused_total", tenant=key) == refused
        assert value(samples, "lorikeet:tenant_requests_running", tenant=key) == 0
