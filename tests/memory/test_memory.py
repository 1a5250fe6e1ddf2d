"""The memory on the live engine's loop, with the executor that refuses whatever does not belong together."""

import math
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from lorikeet.core.events import AdapterEvicted, AdapterLoaded, Admitted, FinishReason, KvArrived, Preempted
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.plan import Tier, Transfer, TransferDone
from lorikeet.memory import swapper
from lorikeet.memory.blocks import SequenceLease, WaitReason
from lorikeet.memory.known_adapters import AdapterSize
from lorikeet.memory.memory import Memory
from lorikeet.memory.options import MemoryOptions
from lorikeet.memory.policies.base import MemoryView, PrefetchPolicy
from lorikeet.memory.policies.lru import Lru
from lorikeet.memory.transfer_records import RouteTotals
from lorikeet.memory.tree import BASE, NodeKind, NodeTransfer
from lorikeet.policies import EVICTION, PREFETCH
from lorikeet.presets import PRESETS, HostKv, KvAfterFinish, Preset
from lorikeet.scheduling.state import SchedulerLimits
from tests.memory.asks import ask, cached_tokens, words
from tests.support.scripted import BLOCK_TOKENS, Bench, adapter, request

ELORA, PLAIN = PRESETS["elora"], Preset()
NO_KV = Preset(kv_after_finish=KvAfterFinish.DROPPED)


def fill_host(bench: Bench) -> None:
    """Let known adapters be read into the host tier."""
    while bench.engine.host_fill_pending:
        bench.step()


def routes(bench: Bench) -> dict[str, int]:
    """Transfers so far, by route."""
    return {route: total.transfers for route, total in bench.engine.memory_stats().transfers.items()}


# --- tiers ------------------------------------------------------------------------------------------


def test_kv_evicted_to_the_host_is_fetched_not_recomputed() -> None:
    bench = Bench(blocks=12, host_blocks=20)
    ask(bench, "first", words(0, 4))
    for index in range(3):
        ask(bench, f"other{index}", words(100 * (index + 1), 4))
    assert routes(bench)["device-host"] > 0
    ask(bench, "again", words(0, 4))
    assert cached_tokens(bench)["again"] == 16
    assert [event.request_id for event in bench.events if isinstance(event, KvArrived)] == ["again"]


@pytest.mark.parametrize("name", ["lorikeet:plain", "elora:halp", "elora:bfs"])
@pytest.mark.parametrize("texts", [1, 7])
def test_kv_that_makes_room_at_once_leaves_by_few_transfers(name: str, texts: int) -> None:
    """Of whatever branches and chosen however: as many as blocks would have to be started, chosen from and reported."""
    preset = msgspec.structs.replace(PRESETS[name], swap_interval_s=0.0)
    bench = Bench(blocks=80, host_blocks=100, preset=preset, limits=SchedulerLimits(8, 400, 400))
    for text in range(texts):
        ask(bench, f"r{text}", words(1000 * text, 70 // texts))
    ask(bench, "last", words(10_000, 70))
    stored = bench.engine.memory_stats().transfers["device-host"]
    assert stored.bytes >= 61 * 1024
    assert stored.transfers in (2, 3), "up to 32 blocks at a time"
    ask(bench, "again", words(0, 70 // texts))
    assert cached_tokens(bench)["again"] == 70 // texts * BLOCK_TOKENS


def test_without_a_host_tier_it_is_computed_again() -> None:
    bench = Bench(blocks=12, host_blocks=0)
    ask(bench, "first", words(0, 4))
    for index in range(3):
        ask(bench, f"other{index}", words(100 * (index + 1), 4))
    ask(bench, "again", words(0, 4))
    assert cached_tokens(bench)["again"] == 0
    assert not routes(bench)


def test_host_copy_is_kept_so_second_eviction_copies_nothing() -> None:
    bench = Bench(blocks=12, host_blocks=40)
    for name in ("a", "b", "c", "a2", "b2", "c2"):
        ask(bench, name, words(100 * ord(name[0]), 4))
    stored = routes(bench)["device-host"]
    for name in ("a3", "b3", "c3"):
        ask(bench, name, words(100 * ord(name[0]), 4))
    assert routes(bench)["device-host"] == stored


def test_adapter_is_read_once_and_then_loaded_from_the_host() -> None:
    bench = Bench(blocks=10, host_blocks=20)
    for name in ("a", "b", "c", "a2"):
        ask(bench, name, [1, 2], name[0], blocks=4)
    counts = routes(bench)
    assert counts["source-device"] == 3
    assert counts["host-device"] == 1


def test_known_adapters_are_read_into_the_host_tier_before_any_request() -> None:
    bench = Bench(blocks=10, host_blocks=20, preset=NO_KV)
    bench.engine.register_adapters(tuple(adapter(f"a{index}", 3) for index in range(9)))
    fill_host(bench)
    assert bench.memory.host_counts().adapter == 18, "six of three blocks each; a seventh does not fit"
    ask(bench, "x", [1, 2], "a0", blocks=3)
    assert routes(bench)["host-device"] == 1


@pytest.mark.parametrize(("kv", "on_host"), [(0, 2), (1, 2), (2, 1), (12, 0)])
def test_prefetched_adapters_use_at_most_half_of_the_host_tier(kv: int, on_host: int) -> None:
    """All are brought to the device; what the others would take is promised to KV, and KV that is there stays."""
    bench = Bench(blocks=60, host_blocks=14, preset=PRESETS["elora"])
    ask(bench, "x", words(0, 12))
    memory, now = bench.memory, bench.clock.now()
    memory.evictor.evict_kv(list(memory.tree.below(BASE))[: -kv - 1 : -1], now)
    bench.run()
    assert memory.host_counts() == (14 - kv, kv, 0, 0)
    nodes = [memory.adapters.add(adapter(name, 3)) for name in "abc"]
    for node in nodes:
        memory.swapper.load(node, now, demand=False)
    bench.run()
    assert memory.tree.on_device[nodes].all()
    assert memory.host_counts() == (14 - kv - 3 * on_host, kv, 3 * on_host, 0)


def test_adapter_too_large_for_the_host_does_not_block_other_reads() -> None:
    bench = Bench(blocks=30, host_blocks=20, preset=NO_KV)
    bench.engine.register_adapters((adapter("big", 21), adapter("a", 3), adapter("b", 3)))
    fill_host(bench)
    assert bench.memory.host_counts().adapter == 6


def test_adapter_on_the_device_does_not_wait_for_its_host_copy() -> None:
    bench = Bench(blocks=30, host_blocks=2, preset=NO_KV)
    bench.engine.register_adapters((adapter("b", 2),))
    fill_host(bench)
    bench.engine.submit(request("long", [1, 2], 0.0, adapter("b", 2), max_tokens=40))
    bench.engine.register_adapters((adapter("c", 2), adapter("a", 2)))
    bench.engine.submit(request("first", [1, 2], 0.0, adapter("a", 2), max_tokens=1))
    while RequestId("first") not in bench.finished():
        bench.step()
    assert routes(bench)["source-device"] == 1, "the host is full of an adapter in use"
    bench.engine.abort(RequestId("long"))
    for name in ("b", "c"):
        bench.engine.drop_adapter(AdapterDigest(f"digest-{name}"))
    node = bench.memory.tree.adapter(AdapterDigest("digest-a"))
    while bench.memory.tree.moving[node] != NodeTransfer.READ:
        bench.engine.step()
    bench.engine.submit(request("second", [1, 2], bench.clock.now(), adapter("a", 2), max_tokens=2))
    bench.engine.step()
    assert bench.memory.tree.moving[node] == NodeTransfer.READ
    assert [step.request_id for step in bench.plans[-1].sequences] == ["second"]


def test_host_victims_are_childless_kv_first_and_then_other_adapters() -> None:
    bench = Bench(blocks=20, host_blocks=8, preset=Preset(host_kv=HostKv.EVICTED))
    ask(bench, "kv", words(0, 6))
    for index in range(3):
        ask(bench, f"more{index}", words(1000 * (index + 1), 5))
    host = bench.memory.host_counts()
    assert (host.kv > 0, host.adapter) == (True, 0)
    ask(bench, "a", [1, 2], "a", blocks=5)
    assert bench.memory.host_counts().adapter == 5
    ask(bench, "b", [1, 2], "b", blocks=5)
    host = bench.memory.host_counts()
    assert (host.adapter, bench.memory.tree.on_host[bench.memory.tree.adapter(AdapterDigest("digest-b"))]) == (5, True)


def test_adapters_that_left_the_device_go_on_being_host_victims() -> None:
    bench = Bench(blocks=6, host_blocks=12)
    for index in range(12):
        ask(bench, f"r{index}", [1, 2], f"a{index % 6}", blocks=4)
        node = bench.memory.tree.adapter(AdapterDigest(f"digest-a{index % 6}"))
        assert bench.memory.tree.on_host[node], f"{index}: the oldest makes room on the host"


def test_adapters_leave_the_host_by_the_scores_of_that_moment() -> None:
    bench = Bench(blocks=14, host_blocks=8, preset=PRESETS["chameleon"])  # nobody leaves the device
    for index, name in enumerate(("often", "often", "once", "often", "later")):
        ask(bench, f"r{index}", [1, 2], name, blocks=4)
    tree = bench.memory.tree
    nodes = {name: tree.adapter(AdapterDigest(f"digest-{name}")) for name in ("often", "once", "later")}
    there = {name: bool(tree.on_host[node]) for name, node in nodes.items()}
    assert there == {"often": True, "once": False, "later": True}


def test_host_evicts_nothing_for_an_adapter_that_cannot_fit() -> None:
    bench = Bench(blocks=20, host_blocks=10, preset=Preset(host_kv=HostKv.EVICTED))
    ask(bench, "kv", words(0, 6))
    for index in range(3):
        ask(bench, f"more{index}", words(1000 * (index + 1), 5))
    kept = bench.memory.host_counts().kv
    assert kept > 0
    assert not bench.memory.evictor.ensure_host_free(11, 0.0)
    assert bench.memory.host_counts().kv == kept


def test_host_keeps_beginning_of_text_evicted_block_by_block() -> None:
    bench = Bench(blocks=12, host_blocks=5)
    ask(bench, "long", words(0, 10))
    ask(bench, "other", [1000], max_tokens=12 * BLOCK_TOKENS - 2)
    ask(bench, "again", words(0, 10))
    assert cached_tokens(bench)["again"] == 5 * BLOCK_TOKENS


# --- the dependency tree ----------------------------------------------------------------------------


def test_kv_leaves_before_the_adapter_it_depends_on_and_later_kv_before_earlier() -> None:
    bench = Bench(blocks=8)
    ask(bench, "x", words(0, 4), "a", blocks=2)
    tree = bench.memory.tree
    node = tree.adapter(AdapterDigest("digest-a"))
    assert node is not None
    left = []
    while bench.memory.counts().cached:
        depths = tree.depth.copy()
        before = {n for n in range(tree.end) if tree.kind[n] >= NodeKind.ADAPTER and tree.on_device[n]}
        assert bench.memory.evictor.ensure_free(bench.memory.counts().free + 1, 0, 10.0)
        after = {n for n in range(tree.end) if tree.kind[n] >= NodeKind.ADAPTER and tree.on_device[n]}
        left += [int(depths[n]) for n in before - after]
    assert left == [4, 3, 2, 1, 0]


def test_a_prompt_that_diverges_shares_the_blocks_before_it_does() -> None:
    bench = Bench()
    ask(bench, "x", [*range(12), 50, 51, 52, 53, 1])
    ask(bench, "y", [*range(12), 60, 61, 62, 63, 1])
    assert cached_tokens(bench)["y"] == 12
    assert len(bench.memory.tree) == 5, "three shared, one of each"


def test_visits_and_last_uses_are_noted_on_arrival_along_the_matched_path() -> None:
    bench = Bench()
    ask(bench, "x", words(0, 3), "a")
    bench.clock.advance(5.0)
    arrived_s = bench.clock.now()
    bench.engine.submit(request("y", words(0, 2), arrived_s, adapter("a", 2)))
    tree = bench.memory.tree
    node = tree.adapter(AdapterDigest("digest-a"))
    assert node is not None
    by_depth = {int(tree.depth[n]): n for n in tree.below(node)}
    assert [int(tree.visits[by_depth[depth]]) for depth in (1, 2, 3)] == [2, 2, 1]
    assert int(tree.visits[node]) == 2
    assert tree.last_use_s[by_depth[2]] == arrived_s > tree.last_use_s[by_depth[3]]
    bench.run()


def test_imported_request_counts_as_visit_and_preempted_one_does_not() -> None:
    source, bench = Bench(), Bench(blocks=14, limits=SchedulerLimits(8, 64, 64))
    source.engine.submit(request("moves", words(0, 2), 0.0, adapter("a", 2), max_tokens=24))
    while len(source.tokens.get(RequestId("moves"), [])) < 3:
        source.step()
    moved = source.engine.export_request(RequestId("moves"))
    bench.tokens[moved.request_id] = source.tokens[moved.request_id]
    bench.engine.submit(moved)
    bench.engine.submit(request("new", words(100, 2), 0.0, adapter("a", 2), max_tokens=24))
    bench.run()
    assert any(isinstance(event, Preempted) for event in bench.events)
    node = bench.memory.tree.adapter(AdapterDigest("digest-a"))
    assert node is not None
    assert (bench.memory.tree.visits[node], bench.engine.memory_stats().adapter_queries) == (2, 2)


def test_kv_is_never_invalid_with_the_tree_and_outlives_adapters_without() -> None:
    shares = {}
    for name in ("elora", "vllm-static"):
        bench = Bench(blocks=30, host_blocks=30, preset=PRESETS[name])
        worst = 0
        for index in range(12):
            ask(bench, f"r{index}", words(100 * index, 3), f"a{index % 6}", blocks=4)
            worst = max(worst, bench.engine.memory_stats().invalid_kv_bytes)
        shares[name] = worst
    assert shares["elora"] == 0
    assert shares["vllm-static"] > 0


def test_kv_wanted_again_during_eviction_leaves_if_its_parent_has_left() -> None:
    bench = Bench(blocks=12, host_blocks=20)
    ask(bench, "x", words(0, 2))
    memory, tree, now = bench.memory, bench.memory.tree, bench.clock.now()
    first, second = tree.below(BASE)
    memory.tiers.adopt_on_host(first, memory.tiers.host.lease(1)[0])
    memory.evictor.evict_kv([second], now)
    ((third,),) = tree.add_kv([second], [[b"key"]], now)
    memory.tiers.adopt([third], memory.tiers.lease_private(1))
    memory.evictor.evict_kv([first], now)
    bench.run()
    assert not tree.on_device[[first, second, third]].any()
    assert memory.host_counts().kv == 3


# --- rows -------------------------------------------------------------------------------------------


def test_a_static_split_lends_nothing_across_and_pads_its_slots() -> None:
    preset = PRESETS["vllm-static"]
    bench = Bench(blocks=40, host_blocks=0, preset=preset)
    bench.engine.register_adapters((adapter("big", 4),))
    for index in range(4):
        ask(bench, f"r{index}", [1, 2, 3], f"small{index}", blocks=1)
    assert len(bench.memory.resident()) == 2, "8 of 40 blocks are for adapters: two slots of four"
    assert set(bench.memory.resident().values()) == {4}
    assert bench.engine.memory_stats().packing_waste_bytes == 2 * 3 * 1024
    assert bench.memory.why_impossible(None, 33 * BLOCK_TOKENS) is not None
    assert bench.memory.why_impossible(None, 32 * BLOCK_TOKENS) is None


def test_an_adapter_too_large_for_its_share_is_refused_and_makes_no_slot_larger() -> None:
    bench = Bench(blocks=40, preset=PRESETS["vllm-static"])
    ask(bench, "huge", [1, 2], "huge", blocks=9)
    ask(bench, "small", [1, 2], "small", blocks=2)
    reasons = {name: event.reason for name, event in bench.finished().items()}
    assert reasons == {"huge": FinishReason.ERROR, "small": FinishReason.LENGTH}
    assert bench.memory.resident() == {"digest-small": 2}


def test_request_without_slot_lets_other_adapters_pass() -> None:
    bench = Bench(blocks=40, preset=PRESETS["vllm-static"], limits=SchedulerLimits(8, 32, 64))
    for index in range(3):
        bench.engine.submit(request(f"r{index}", [1, 2], 0.0, adapter(f"a{index}", 4), max_tokens=20))
    bench.engine.submit(request("last", [3, 4], 0.0, adapter("a0", 4), max_tokens=3))
    bench.run()
    order = [event.request_id for event in bench.events if isinstance(event, Admitted)]
    assert order == ["r0", "r1", "last", "r2"]


def test_s_lora_frees_an_idle_adapter_and_all_kv() -> None:
    for preset, resident in (("chameleon:s-lora", set()), ("elora:s-lora", set()), (NO_KV, {"digest-a"})):
        bench = Bench(preset=PRESETS[preset] if isinstance(preset, str) else preset)
        ask(bench, "x", words(0, 3), "a")
        assert set(bench.memory.resident()) == resident
        assert bench.memory.counts().kv == 0
        assert len(bench.memory.tree) == 1, "no KV is kept"


def test_elora_prefetches_adapters_and_then_their_kv_while_memory_is_idle() -> None:
    bench = Bench(blocks=40, host_blocks=80, preset=ELORA)
    bench.engine.register_adapters(tuple(adapter(f"a{index}", 3) for index in range(6)))
    fill_host(bench)
    for _ in range(8):
        bench.clock.advance(0.1)
        bench.step()
    assert len(bench.memory.resident()) == 6, "never asked for, and fetched nevertheless (Fig. 14a)"
    assert bench.memory.total_blocks - bench.memory.counts().free <= 0.7 * 40
    ask(bench, "x", [1, 2], "a3", blocks=3)
    stats = bench.engine.memory_stats()
    assert (stats.adapter_hits, stats.adapter_queries) == (1, 1)
    assert (stats.prefetched_used, stats.prefetched) == (1, 6)


def test_adapter_chain_is_evicted_from_its_end_and_reloads_only_missing_blocks() -> None:
    bench = Bench(blocks=12, host_blocks=40, preset=ELORA)
    ask(bench, "x", [1, 2], "a", blocks=6)
    ask(bench, "y", words(0, 7))  # eight blocks with its answer: two of the adapter's have to go
    node = bench.memory.tree.adapter(AdapterDigest("digest-a"))
    assert node is not None
    assert (bench.memory.resident(), bench.memory.tree.kept[node]) == ({}, 4)
    assert bench.memory.counts().cached == 11, "seven of KV, and four of the adapter"
    before = bench.engine.memory_stats().transfers["host-device"].bytes if "host-device" in routes(bench) else 0
    ask(bench, "z", [1, 2], "a", blocks=6)
    assert bench.memory.resident() == {"digest-a": 6}
    copied = bench.engine.memory_stats().transfers["host-device"].bytes - before
    assert copied == 2 * bench.memory.block_bytes


def test_retiring_an_adapter_frees_what_it_has_kept() -> None:
    bench = Bench(blocks=12, host_blocks=40, preset=ELORA)
    ask(bench, "x", [1, 2], "a", blocks=6)
    ask(bench, "y", words(0, 7))
    assert bench.memory.retire(AdapterDigest("digest-a"), bench.clock.now())
    bench.memory.check_integrity()
    assert bench.memory.tree.adapter(AdapterDigest("digest-a")) is None


@pytest.mark.parametrize("name", ["elora", "lorikeet:plain"])
def test_file_prefetches_are_few_at_a_time_and_all_arrive(name: str) -> None:
    preset = msgspec.structs.replace(PRESETS[name], prefetch="all" if name != "elora" else PRESETS[name].prefetch)
    bench = Bench(blocks=100, preset=preset)
    bench.engine.register_adapters(tuple(adapter(f"a{index}", 2) for index in range(30)))
    most = 0
    for _ in range(100):
        bench.clock.advance(0.1)
        bench.step()
        most = max(most, bench.memory.transfers_in_flight)
    assert most == 8
    assert len(bench.memory.resident()) == 30


@pytest.mark.parametrize(
    ("name", "follows"), [("elora", False), ("lorikeet:plain", False), ("chameleon:no-scheduler", True)]
)
def test_queued_demand_is_counted_only_for_policies_that_use_it(
    name: str, follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every step; there may be thousands. That some wait is known in any case."""
    bench, asked = Bench(preset=PRESETS[name]), []
    wanted = bench.engine.queue.wanted
    monkeypatch.setattr(bench.engine.queue, "wanted", lambda: (asked.append(1), wanted())[1])
    for index in range(3):
        bench.engine.submit(request(f"r{index}", [1, 2], 0.0, adapter("a", 2)))
    bench.step()
    assert (bool(asked), bench.memory._view.queued) == (follows, 3)


def test_a_full_device_is_cleared_to_95_percent_by_the_tick() -> None:
    bench = Bench(blocks=40, host_blocks=80, preset=ELORA, limits=SchedulerLimits(8, 64, 64))
    index = 0
    while bench.memory.counts().free:
        ask(bench, f"r{index}", words(100 * index, 3 if bench.memory.counts().free > 3 else 0))
        index += 1
        if index > 40:
            break
    bench.clock.advance(0.2)
    bench.step()
    bench.run()
    assert bench.memory.counts().free >= 2


# --- suspend and resume -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lorikeet:plain", "lorikeet:plain-no-reuse", "elora"])
def test_a_suspended_request_goes_on_with_the_blocks_it_left(name: str) -> None:
    bench = Bench(blocks=20, host_blocks=20, preset=PRESETS[name])
    bench.engine.submit(request("x", words(0, 5), 0.0, adapter("a", 2), max_tokens=12, seed=3))
    while len(bench.tokens.get(RequestId("x"), [])) < 6:
        bench.step()
    moved = bench.engine.export_request(RequestId("x"))
    assert bench.memory.counts().kv == 0
    bench.engine.submit(moved)
    bench.run()
    assert [e.cached_tokens for e in bench.events if isinstance(e, Admitted)] == [0, 24]
    if bench.preset.kv_after_finish != "kept":
        assert len(bench.memory.tree) == 1, "afterwards it is dropped as always"


def test_preemption_under_pressure_swaps_over_the_host_and_loses_no_token() -> None:
    bench = Bench(blocks=14, host_blocks=40, limits=SchedulerLimits(8, 64, 64))
    for index in range(4):
        bench.engine.submit(request(f"r{index}", [index] * 6, float(index), max_tokens=24, seed=index))
    bench.run()
    assert any(isinstance(event, Preempted) for event in bench.events)
    assert routes(bench).get("host-device", 0) > 0
    assert all(len(tokens) == 24 for tokens in bench.tokens.values())


# --- bad days ---------------------------------------------------------------------------------------


def test_when_everything_is_needed_requests_wait_and_all_are_answered() -> None:
    bench = Bench(blocks=9, host_blocks=3, limits=SchedulerLimits(8, 16, 24))
    for index in range(10):
        bench.engine.submit(request(f"r{index}", [index] * 9, 0.0, adapter(f"a{index % 4}", 3), max_tokens=8))
    bench.run(5_000)
    assert {event.reason for event in bench.finished().values()} == {FinishReason.LENGTH}
    assert len(bench.finished()) == 10


def test_kv_whose_copy_to_the_device_fails_is_computed_again() -> None:
    broken = [False]

    def fails(transfer: Transfer) -> bool:
        return broken[0] and transfer.source is Tier.HOST and transfer.adapter is None

    bench = Bench(blocks=12, host_blocks=20, fails=fails)
    ask(bench, "first", words(0, 4))
    for index in range(3):
        ask(bench, f"other{index}", words(100 * (index + 1), 4))
    broken[0] = True
    ask(bench, "again", words(0, 4))
    assert bench.finished()[RequestId("again")].reason is FinishReason.LENGTH
    assert [e.cached_tokens for e in bench.events if isinstance(e, Admitted) and e.request_id == "again"] == [16, 0]


def test_arrived_kv_is_freed_with_its_sequence_if_earlier_kv_is_missing() -> None:
    bench = Bench(blocks=20, host_blocks=20)
    ask(bench, "x", words(0, 4))
    memory, now = bench.memory, bench.clock.now()
    memory.evictor.evict_kv(list(memory.tree.below(BASE))[::-1], now)
    bench.run()
    keys = memory.keys_of(None, words(0, 4))
    leases = [memory.try_admit(None, keys[:blocks], blocks * BLOCK_TOKENS + 1, now) for blocks in (1, 4)]
    first, rest = memory.take_transfers()[0]
    assert (len(first.device_blocks), len(rest.device_blocks)) == (1, 3)
    memory.finish_transfer(TransferDone(rest.transfer_id), now)
    assert memory.finish_transfer(TransferDone(first.transfer_id, "failed"), now).error == "failed"
    for lease in leases:
        assert isinstance(lease, SequenceLease)
        memory.suspend(lease, words(0, 4), 0, now)
    memory.check_integrity()
    assert memory.counts().free == 20


def test_failed_copy_to_the_host_loses_only_its_kv() -> None:
    bench = Bench(blocks=12, host_blocks=20, fails=lambda transfer: transfer.target is Tier.HOST)
    for index in range(4):
        ask(bench, f"r{index}", words(100 * index, 4))
    host = bench.memory.host_counts()
    assert host.free == 20
    assert len(bench.finished()) == 4


def test_adapter_dropped_during_its_load_is_freed_when_the_load_ends() -> None:
    bench = Bench(host_blocks=10, preset=NO_KV)
    bench.engine.register_adapters((adapter("a", 2),))
    bench.engine.step()
    assert bench.engine.has_transfers
    bench.engine.drop_adapter(AdapterDigest("digest-a"))
    bench.run()
    bench.step()
    assert bench.memory.host_counts().free == 10
    dropped = [e for e in bench.adapter_events if isinstance(e, AdapterEvicted)]
    assert [(e.freed_bytes, e.dropped) for e in dropped] == [(2 * 1024, True)]


def test_unload_frees_every_tier_and_reports_the_bytes() -> None:
    bench = Bench(blocks=20, host_blocks=40)
    ask(bench, "x", words(0, 4), "a", blocks=2)
    for index in range(5):
        ask(bench, f"other{index}", words(100 * (index + 1), 4))
    assert bench.memory.host_counts().kv > 0
    tree = bench.memory.tree
    node = tree.adapter(AdapterDigest("digest-a"))
    assert node is not None
    held = sum(bool(tree.on_device[n]) + bool(tree.on_host[n]) for n in tree.below(node))
    held += 2 * (bool(tree.on_device[node]) + bool(tree.on_host[node]))
    bench.engine.drop_adapter(AdapterDigest("digest-a"))
    bench.run()
    dropped = [e for e in bench.adapter_events if isinstance(e, AdapterEvicted) and e.dropped]
    assert [e.freed_bytes for e in dropped] == [held * 1024]
    assert tree.adapter(AdapterDigest("digest-a")) is None


def test_a_prefetch_that_fails_is_not_tried_again_at_once() -> None:
    bench = Bench(blocks=40, host_blocks=0, preset=ELORA, failing=frozenset({AdapterDigest("digest-a")}))
    bench.engine.register_adapters((adapter("a", 2),))
    for _ in range(20):
        bench.clock.advance(0.1)
        bench.step()
    failed = [e for e in bench.adapter_events if isinstance(e, AdapterLoaded) and e.error]
    assert len(failed) == 1


def test_unreachable_files_are_retried_rarely_and_read_later() -> None:
    is_out = [True]
    bench = Bench(
        blocks=10,
        host_blocks=40,
        preset=NO_KV,
        fails=lambda each: is_out[0] and each.source is Tier.SOURCE,
    )
    bench.engine.register_adapters(tuple(adapter(f"a{index}", 3) for index in range(9)))
    fill_host(bench)
    for tries in (2, 4, 6):
        assert bench.engine.memory_stats().transfers["source-host"].failed == tries
        assert bench.engine.has_chores
        assert bench.engine.due_s == pytest.approx(bench.clock.now() + 5.0, abs=0.1)
        is_out[0] = tries < 6
        bench.clock.wait_until(bench.engine.due_s)
        fill_host(bench)
    assert bench.memory.host_counts().adapter == 27
    assert bench.engine.due_s == math.inf


def test_broken_adapter_file_is_retried_and_blocks_no_other_read() -> None:
    bench = Bench(blocks=10, host_blocks=40, preset=NO_KV, failing=frozenset({AdapterDigest("digest-a1")}))
    bench.engine.register_adapters(tuple(adapter(f"a{index}", 3) for index in range(9)))
    began_s = bench.clock.now()
    fill_host(bench)
    assert bench.memory.host_counts().adapter == 24
    assert bench.clock.now() < began_s + 5.0
    failed = bench.engine.memory_stats().transfers["source-host"].failed
    bench.clock.wait_until(bench.engine.due_s)
    bench.run()
    assert bench.engine.memory_stats().transfers["source-host"].failed == failed + 1
    bench.engine.drop_adapter(AdapterDigest("digest-a1"))
    bench.run()
    assert bench.engine.due_s == math.inf


def test_retired_versions_leave_no_blocks_on_a_full_host() -> None:
    bench = Bench(blocks=10, host_blocks=8, preset=NO_KV)
    bench.engine.register_adapters((adapter("a", 4), adapter("b", 3), adapter("waits", 4)))
    fill_host(bench)
    for index in range(20):
        bench.engine.register_adapters((adapter(f"v{index}", 3),))
        bench.engine.drop_adapter(AdapterDigest(f"digest-v{index}"))
        bench.run()
    assert len(bench.memory.swapper._to_read) == 1


@pytest.mark.slow
def test_ten_thousand_known_adapters_of_which_few_are_asked_for() -> None:
    bench = Bench(blocks=40, host_blocks=64, preset=ELORA)
    bench.engine.register_adapters(tuple(adapter(f"a{index}", 3) for index in range(10_000)))
    bench.step()
    ask(bench, "x", [1, 2], "a7777", blocks=3)
    assert bench.finished()[RequestId("x")].reason is FinishReason.LENGTH
    assert len(bench.memory.tree) == 10_000


def test_an_idle_engine_comes_to_rest() -> None:
    bench = Bench(blocks=40, host_blocks=40, preset=ELORA)
    ask(bench, "x", words(0, 3), "a")
    for _ in range(5):
        bench.clock.advance(0.1)
        bench.step()
    assert bench.engine.due_s == math.inf
    assert not bench.engine.has_transfers


def test_kv_prefetch_is_not_dropped_from_the_host_for_a_later_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class KvThenAdapters(PrefetchPolicy):
        def targets(self, now: float) -> Iterator[int]:
            tree = self.view.tree
            yield from [node for node in tree.below(BASE) if tree.on_host[node]]
            yield from list(tree.adapters)

    monkeypatch.setitem(PREFETCH.own, "kv-then-adapters", KvThenAdapters)
    bench = Bench(blocks=30, host_blocks=4, preset=Preset(prefetch="kv-then-adapters", swap_interval_s=0.1))
    ask(bench, "x", words(0, 4))
    bench.memory.evictor.ensure_free(30, 0, bench.clock.now())
    bench.run()
    assert bench.memory.host_counts().kv == 4, "the host is full of KV"
    bench.engine.register_adapters((adapter("b", 2),))
    bench.clock.advance(1.0)
    bench.run()
    ask(bench, "again", words(0, 4))
    assert cached_tokens(bench)["again"] == 16
    assert set(bench.memory.resident()) == {"digest-b"}


def test_blocks_freed_by_a_request_are_prefetched_into_without_arrivals() -> None:
    bench = Bench(blocks=20, host_blocks=40, preset=ELORA)
    bench.engine.submit(request("x", list(range(50)), max_tokens=4))
    bench.step()
    bench.engine.register_adapters((adapter("a", 3),))
    bench.step()
    assert not bench.memory.resident(), "the request has most of the device"
    bench.engine.abort(RequestId("x"))
    bench.run()
    assert bench.engine.due_s < math.inf, "the next tick is awaited"
    bench.clock.wait_until(bench.engine.due_s)
    bench.run()
    assert set(bench.memory.resident()) == {"digest-a"}


def test_kv_that_is_not_kept_leaves_its_adapter_free_to_go() -> None:
    bench = Bench(blocks=12, preset=NO_KV)
    ask(bench, "first", [1, 2], "w", blocks=8)
    ask(bench, "second", [1, 2], "v", blocks=8)
    bench.engine.submit(request("x", words(0, 1), bench.clock.now(), adapter("a", 8), max_tokens=6))
    while not bench.tokens.get(RequestId("x")):
        bench.step()
    bench.engine.submit(bench.engine.export_request(RequestId("x")))
    bench.run()
    ask(bench, "last", [1, 2], "b", blocks=8)
    assert bench.finished()[RequestId("last")].reason is FinishReason.LENGTH


def test_adapter_is_freed_when_its_last_waiting_request_gives_up() -> None:
    bench = Bench(
        blocks=20,
        preset=PRESETS["chameleon:s-lora"],
        limits=SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=64),
    )
    bench.engine.submit(request("runs", [1, 2], 0.0, adapter("a", 2), max_tokens=3))
    bench.engine.submit(request("after", [1, 2], 0.0, adapter("b", 2), max_tokens=20))
    bench.engine.submit(request("waits", [1, 2], 0.0, adapter("a", 2)))
    while RequestId("runs") not in bench.finished():
        bench.step()
    for _ in range(3):
        bench.step()
    assert AdapterDigest("digest-a") in bench.memory.resident()
    bench.engine.abort(RequestId("waits"))
    bench.step()
    assert AdapterDigest("digest-a") not in bench.memory.resident()
    bench.run()


def test_queue_prefetch_leaves_kv_of_preempted_requests_in_place() -> None:
    """Adapters that nobody wants make room for it, never others."""
    bench = Bench(
        blocks=20,
        preset=PRESETS["chameleon:no-scheduler"],
        limits=SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64),
    )
    bench.engine.submit(request("gives way", words(0, 8), max_tokens=20))
    while not bench.tokens.get(RequestId("gives way")):
        bench.step()
    bench.engine.export_request(RequestId("gives way"))
    kept = bench.memory.keys_of(None, words(0, 8))
    ask(bench, "idle", [1, 2], "idle", blocks=4)
    bench.engine.submit(request("runs", [1, 2, 3], 0.0, max_tokens=30))
    for name in ("a", "b"):
        bench.engine.submit(request(name, [1, 2], 0.0, adapter(name, 8)))
    for _ in range(4):
        bench.step()
    assert len(bench.memory.tree.match(kept)) == 8
    assert bench.memory.counts().inflight == 8, "the idle one has made room for one of the two"


def test_shortage_of_free_blocks_clears_the_device_at_the_next_tick() -> None:
    bench = Bench(blocks=100, host_blocks=200, preset=ELORA)
    for index, blocks in enumerate((15, 15, 15, 15, 15, 15, 7)):
        ask(bench, f"r{index}", words(1000 * index, blocks))
    bench.clock.advance(1.0)
    bench.step()
    assert bench.memory.evictor.unused() == 3, "full is another thing"
    ask(bench, "last", words(9000, 7))
    bench.clock.advance(1.0)
    bench.step()
    assert bench.memory.evictor.unused() == 5


def test_expected_adapter_is_prefetched_in_time_without_events() -> None:
    bench = Bench(blocks=12, host_blocks=60, preset=PRESETS["chameleon:prefetch"])
    for index in range(13):
        ask(bench, f"r{index}", [1, 2], "a", blocks=4)
        ask(bench, f"o{index}", [1, 2], f"b{index % 2}", blocks=8)
        bench.clock.advance(10.0)
    assert AdapterDigest("digest-a") not in bench.memory.resident()
    assert bench.engine.due_s < math.inf
    bench.memory.evictor.evict_until_free(8, bench.clock.now(), 8)
    bench.clock.wait_until(bench.engine.due_s)
    bench.run()
    assert AdapterDigest("digest-a") in bench.memory.resident()


def test_failed_prefetch_is_not_used_by_a_later_load() -> None:
    bench = Bench(
        blocks=20, host_blocks=20, preset=ELORA, fails=lambda each: each.target is Tier.DEVICE and not each.demand
    )
    bench.engine.register_adapters((adapter("a", 2),))
    fill_host(bench)
    for _ in range(3):
        bench.clock.advance(0.1)
        bench.step()
    assert bench.engine.memory_stats().prefetched == 1
    ask(bench, "x", [1, 2], "a")
    assert bench.engine.memory_stats().prefetched_used == 0


def test_request_without_room_offers_only_evictable_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is tried at every step, and may have found thousands of blocks."""
    bench = Bench(blocks=80, limits=SchedulerLimits(8, 400, 400))
    ask(bench, "first", words(0, 40))
    memory, now = bench.memory, bench.clock.now()
    taken = memory.try_admit(None, [], 30 * BLOCK_TOKENS, now)
    assert isinstance(taken, SequenceLease)
    offered: list[int] = []
    offer = memory.evictor.offer
    monkeypatch.setattr(memory.evictor, "offer", lambda node: (offered.append(node), offer(node)))
    keys = memory.keys_of(None, words(0, 40))
    assert memory.try_admit(None, keys, 60 * BLOCK_TOKENS, now) is WaitReason.KV_BLOCKS
    assert [memory.tree.depth[node] for node in offered] == [40], "what all others are above"
    memory.release(taken, now)


def test_adapter_larger_than_its_share_is_reported_with_the_sizes() -> None:
    memory = Memory(10, 0, 4, 1024, lambda ref: AdapterSize(ref.max_rank, 0), options=MemoryOptions(adapter_share=0.2))
    reason = memory.why_impossible(adapter("a", 3), 8)
    assert reason is not None
    assert "3 blocks of adapter" in reason
    assert "2 for adapters" in reason


def test_kv_on_the_device_without_its_adapter_counts_as_miss() -> None:
    bench = Bench(blocks=30, host_blocks=30, preset=PRESETS["vllm-static"])
    ask(bench, "x", words(0, 3), "a", blocks=5)
    ask(bench, "y", [1, 2], "b", blocks=5)
    assert AdapterDigest("digest-a") not in bench.memory.resident(), "one slot, and another has it"
    before = bench.engine.memory_stats()
    ask(bench, "again", words(0, 3), "a", blocks=5)
    after = bench.engine.memory_stats()
    assert after.kv_hits_tokens == before.kv_hits_tokens
    assert cached_tokens(bench)["again"] == 12, "it is used nevertheless, once the adapter has come"


# --- What is known of a route between the tiers -------------------------------------------------


def test_failed_transfers_do_not_change_block_times() -> None:
    totals = RouteTotals()
    totals.note(4, TransferDone(0, None, 0.2))
    totals.note(1000, TransferDone(1, "no such folder", 0.001))
    assert totals == RouteTotals(transfers=2, blocks=4, failed=1, busy_s=0.2)


# --- policies ---------------------------------------------------------------------------------------


def test_policy_may_keep_functions_of_its_view_in_its_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    class Keeping(Lru):
        def __init__(self, view: MemoryView) -> None:
            super().__init__(view)
            self.load_s, self.load_kv_s, self.prefill_s = view.load_s, view.load_kv_s, view.prefill_s
            self.kv_reuse, self.resident_adapters = view.kv_reuse, view.resident_adapters
            self.delay_per_lost_second = view.delay_per_lost_second

    policies: list[Keeping] = []

    def create(view: MemoryView) -> Keeping:
        policies.append(Keeping(view))
        return policies[-1]

    monkeypatch.setitem(EVICTION.own, "keeping", create)  # type: ignore[arg-type]
    bench = Bench(blocks=12, host_blocks=30, preset=Preset(eviction="keeping"))
    for round_number in range(3):
        for name, first in (("a", 0), ("b", 100), ("c", 200)):
            ask(bench, f"{name}{round_number}", words(first, 3), name)
    (policy,) = policies
    nodes = np.asarray(bench.memory.tree.adapters_on_host())
    assert policy.resident_adapters() == len(bench.memory.resident()) > 0
    assert (policy.load_s(nodes) > 0).all()
    assert policy.load_kv_s(1) > 0
    assert policy.prefill_s(1) > 0
    assert policy.delay_per_lost_second(0) == 0, "no request is there"
    assert (policy.kv_reuse(nodes) < 1).all()


def test_host_tier_drops_copies_of_what_the_device_keeps_before_kv_that_is_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(swapper, "PREFETCH_BELOW", 0.0)
    preset = Preset(host_kv=HostKv.AHEAD, swap_interval_s=1e-6)
    bench = Bench(blocks=48, host_blocks=21, preset=preset)
    texts = {name: words(1000 * place, 10) for place, name in enumerate("abcdef")}
    for name in "abcbdebfb":
        ask(bench, f"{name} at {bench.clock.now()}", texts[name])
    ask(bench, "a again", texts["a"])
    assert cached_tokens(bench)["a again"] >= 9 * BLOCK_TOKENS, "the copy of b, which is in use, made room for c"
