"""Batching modes and cold prefills inside the scheduler, on the scripted executor."""

from collections import Counter

import msgspec
import pytest

from lorikeet.core.events import AdapterArrived, Admitted, Finished, FinishReason, FirstToken, Preempted
from lorikeet.core.plan import Tier
from lorikeet.costs.assist_costs import AssistCosts
from lorikeet.presets import ColdStart, KvAfterFinish, Preset
from lorikeet.scheduling.batching.mode import BatchWork
from lorikeet.scheduling.state import SchedulerLimits
from tests.support.scripted import Bench, adapter, request

WIDE = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)


def merging(mode: str) -> Preset:
    return Preset(batching=mode, kv_after_finish=KvAfterFinish.DROPPED)


def answers(bench: Bench, requests: list[tuple[str, str]]) -> dict[str, list[int]]:
    for index, (name, kind) in enumerate(requests):
        ref = None if kind == "base" else adapter(kind)
        prompt = list(range(index, index + 5))
        bench.engine.submit(request(name, prompt, float(index), adapter=ref, max_tokens=9, seed=index))
    bench.run()
    assert all(ended.reason is FinishReason.LENGTH for ended in bench.finished().values())
    return {str(name): tokens for name, tokens in bench.tokens.items()}


MIX = [("a1", "a"), ("a2", "a"), ("b1", "b"), ("a3", "a"), ("x", "base"), ("a4", "a"), ("a5", "a"), ("b2", "b")]


@pytest.mark.parametrize("mode", ["dlora", "merge-turns", "merged-only", "one-adapter", "whole-models"])
def test_answers_are_the_same_under_every_batching_mode(mode: str) -> None:
    assert answers(Bench(preset=merging(mode), limits=WIDE, switch_s=0.02), MIX) == answers(Bench(limits=WIDE), MIX)


def test_merged_only_runs_one_adapter_at_a_time_to_its_end() -> None:
    bench = Bench(preset=merging("merged-only"), limits=WIDE)
    answers(bench, MIX)
    merged = [plan.merged for plan in bench.plans if plan.sequences]
    runs = [kind for kind, before in zip(merged, [object(), *merged], strict=False) if kind != before]
    assert runs == ["digest-a", "digest-b", None], "oldest first, each until none is left"
    stats = bench.engine.stats().modes
    assert (stats.merged, stats.switches) == (None, 3)
    assert stats.merged_steps == sum(plan.repeat for plan in bench.plans if plan.sequences and plan.merged)


def test_one_adapter_at_a_time_without_merging() -> None:
    bench = Bench(preset=merging("one-adapter"), limits=WIDE)
    answers(bench, MIX)
    assert all(plan.merged is None and len(plan.adapters) <= 1 for plan in bench.plans)


def test_dlora_merges_most_wanted_adapter_and_serves_the_others() -> None:
    bench = Bench(preset=merging("dlora"), limits=WIDE)
    answers(bench, [(f"a{i}", "a") for i in range(12)] + [("x", "base")])
    modes = Counter(plan.merged for plan in bench.plans if plan.sequences)
    assert modes["digest-a"] > modes[None] > 0
    assert bench.finished().keys() == {*(f"a{i}" for i in range(12)), "x"}


def test_sequence_not_chosen_is_preempted_for_a_chosen_one() -> None:
    bench = Bench(blocks=12, preset=merging("dlora"), limits=WIDE)
    bench.engine.submit(request("b", list(range(20)), 0.0, adapter=adapter("b"), max_tokens=20))
    for _ in range(4):
        bench.step()
    for index in range(6):
        bench.engine.submit(request(f"a{index}", list(range(9)), 1.0 + index, adapter=adapter("a"), max_tokens=9))
    bench.run()
    assert "b" in {event.request_id for event in bench.events if isinstance(event, Preempted)}
    assert all(ended.reason is FinishReason.LENGTH for ended in bench.finished().values())
    assert len(bench.tokens["b"]) == 20  # type: ignore[index]


def test_a_slot_is_taken_from_one_that_may_not_run_now() -> None:
    limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64)
    bench = Bench(preset=merging("dlora"), limits=limits)
    for index, kind in enumerate("bcaaaaaa"):
        bench.engine.submit(request(f"{index}", [1, 2, 3], float(index), adapter=adapter(kind), max_tokens=12))
    bench.run()
    assert all(len(plan.sequences) <= 2 for plan in bench.plans)
    assert any(plan.merged == "digest-a" for plan in bench.plans)
    assert all(ended.reason is FinishReason.LENGTH for ended in bench.finished().values())


@pytest.mark.slow
@pytest.mark.parametrize("admission", ["fair", "chameleon", "size-aware", "s-lora", "priority", "sjf(gamma=10)"])
@pytest.mark.parametrize("mode", ["dlora", "merge-turns", "merged-only", "whole-models"])
def test_every_admission_policy_goes_with_every_batching_mode(mode: str, admission: str) -> None:
    limits = SchedulerLimits(max_num_seqs=3, max_num_batched_tokens=64, max_model_len=60)
    bench = Bench(
        blocks=24,
        preset=Preset(batching=mode, kv_after_finish=KvAfterFinish.DROPPED, admission=admission),
        limits=limits,
    )
    for index in range(12):
        prompt = list(range(1, 5 + (index * 7) % 13))
        ref = adapter("abc"[index * index % 3])
        bench.engine.submit(
            request(f"{index}", prompt, 0.1 * index, adapter=ref, max_tokens=20 + index % 7, seed=index)
        )
        bench.step()
        bench.step()
    bench.run(3_000)
    assert all(ended.reason is FinishReason.LENGTH for ended in bench.finished().values())


def test_selecting_mode_considers_requests_by_priority() -> None:
    preset = Preset(batching="dlora", kv_after_finish=KvAfterFinish.DROPPED, admission="priority")
    bench = Bench(preset=preset, limits=SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64))
    for index in range(8):
        asked = request(f"{index}", [1, 2, 3], float(index), adapter=adapter("ab"[index % 2]), max_tokens=20)
        bench.engine.submit(msgspec.structs.replace(asked, priority=5))
    for _ in range(3):
        bench.step()
    bench.engine.submit(request("urgent", [1, 2, 3], 9.0, adapter=adapter("a"), max_tokens=4))
    bench.run()
    ended = list(bench.finished())
    assert ended[0] == "urgent"


def test_requests_are_admitted_while_unneeded_adapters_are_read() -> None:
    preset = Preset(batching="dlora", kv_after_finish=KvAfterFinish.DROPPED, admission="chameleon")
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=60)
    bench = Bench(blocks=16, host_blocks=400, preset=preset, limits=limits)
    bench.engine.submit(request("b", list(range(20)), 0.0, adapter=adapter("b"), max_tokens=30))
    for _ in range(4):
        bench.step()
    bench.engine.register_adapters(tuple(adapter(f"known{index}", 3) for index in range(100)))
    for index in range(6):
        bench.engine.submit(request(f"a{index}", list(range(9)), 1.0 + index, adapter=adapter("a"), max_tokens=9))
    bench.plans.clear()
    while bench.engine.has_requests:
        bench.step()
    assert bench.engine.host_fill_pending, "they were served while adapters were read"
    assert all(plan.sequences or plan.transfers or plan.drops for plan in bench.plans)


@pytest.mark.slow
def test_preemption_during_admission_keeps_every_queue_consistent() -> None:
    preset = Preset(batching="dlora", kv_after_finish=KvAfterFinish.DROPPED, admission="chameleon")
    bench = Bench(
        blocks=24, preset=preset, limits=SchedulerLimits(max_num_seqs=3, max_num_batched_tokens=64, max_model_len=60)
    )
    for index in range(260):  # as many as Chameleon's first refresh needs
        ref = adapter("ab"[index % 5 == 0])
        bench.engine.submit(request(f"{index}", [1, 2, 3], 0.01 * index, adapter=ref, max_tokens=3, seed=index))
    bench.run(5_000)
    assert len(bench.finished()) == 260


# --- cold prefills ---------------------------------------------------------------------------------


def costs(host_token_rank_s: float = 1e-6) -> AssistCosts:
    """Costs by which assistance adds ``host_token_rank_s`` for a token and a rank on each of two layers."""
    return AssistCosts(
        layers=2,
        row_bytes={"q": 64, "k": 64, "v": 64},
        device_layer=((1, 1e-3),),
        qkv_share=0.0,
        host_fixed_s=0.0,
        host_token_s=0.0,
        host_token_rank_s=host_token_rank_s,
        load_fixed_s=0.0,
        load_bandwidth=1e4,
        workers=1,
        worker_tokens=16,
    )


def cold_bench(host_token_rank_s: float = 1e-6, **given: object) -> Bench:
    """A bench whose adapter ``a`` of 30 blocks lies on the host: its transfer takes three steps."""
    made = {"preset": Preset(cold_start=ColdStart.ASSIST), "host_blocks": 64, "limits": WIDE, **given}
    bench = Bench(assist=costs(host_token_rank_s), **made)  # type: ignore[arg-type]
    bench.engine.register_adapters((adapter("a", 30),))
    while bench.memory.tree.adapter("digest-a") is None or not on_host(bench):  # type: ignore[arg-type]
        bench.step()
    bench.plans.clear()
    return bench


def test_batching_mode_receives_work_and_assistance_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    preset = Preset(cold_start=ColdStart.ASSIST, batching="dlora", kv_after_finish=KvAfterFinish.DROPPED)
    bench, works = cold_bench(preset=preset), list[BatchWork]()
    ran = bench.scheduler.selector._mode.ran

    def noted(steps: int, work: BatchWork, step_s: float, switch_s: float) -> None:
        works.append(work)
        ran(steps, work, step_s, switch_s)

    monkeypatch.setattr(bench.scheduler.selector._mode, "ran", noted)
    bench.engine.submit(request("cold", [1, 2, 3], adapter=adapter("a", 30)))
    bench.engine.submit(request("base", [1, 2, 3]))
    bench.run()
    assert works[0].is_assisted
    assert {*works[0].types, *works[1].types} == {"digest-a", None}
    assert not works[-1].is_assisted


def on_host(bench: Bench) -> bool:
    node = bench.memory.tree.adapter("digest-a")  # type: ignore[arg-type]
    assert node is not None
    return bool(bench.memory.tree.on_host[node])


def test_a_cold_request_has_its_first_token_before_its_adapter_is_there() -> None:
    bench = cold_bench()
    bench.engine.submit(request("cold", [1, 2, 3], adapter=adapter("a", 30)))
    bench.run()
    kinds = [type(event) for event in bench.events if event.request_id == "cold"]
    assert not any(event.waits_for_adapter for event in bench.events if isinstance(event, Admitted))
    assert kinds.index(FirstToken) < kinds.index(AdapterArrived) < kinds.index(Finished)
    first = bench.plans[0]
    assert first.assisted == ("digest-a",)
    [transfer] = first.transfers
    assert (transfer.source, transfer.target, transfer.groups) == (Tier.HOST, Tier.DEVICE, ((1, 30), (0, 1)))
    assert all(not plan.assisted for plan in bench.plans[1:])
    warm = Bench(preset=Preset(), host_blocks=64, limits=WIDE)
    warm.engine.submit(request("cold", [1, 2, 3], adapter=adapter("a", 30)))
    warm.run()
    assert bench.tokens == warm.tokens


def test_a_cold_prefill_under_way_counts_as_running() -> None:
    bench = cold_bench(limits=SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64))
    bench.engine.submit(request("cold", list(range(30)), adapter=adapter("a", 30)))
    bench.step()
    stats = bench.engine.stats()
    assert (stats.running, stats.waiting, stats.waiting_for_adapter) == (1, 0, 0)
    bench.step()
    stats = bench.engine.stats()
    assert (stats.running, stats.waiting, stats.waiting_for_adapter, stats.ahead_of_adapter) == (0, 1, 1, 1)
    bench.run()


def test_the_last_token_of_a_cold_prefill_is_assisted_too() -> None:
    bench = cold_bench(limits=SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64))
    bench.engine.submit(request("cold", list(range(17)), adapter=adapter("a", 30)))
    bench.step()
    bench.step()
    assert [[step.tokens for step in plan.sequences] for plan in bench.plans] == [[16], [1]]
    assert [plan.assisted for plan in bench.plans] == [("digest-a",)] * 2
    bench.run()


def test_decodes_go_on_while_a_sequence_is_ahead_of_its_adapter() -> None:
    bench = cold_bench()
    bench.engine.submit(request("warm", [1, 2], max_tokens=12))
    bench.step()
    bench.engine.submit(request("cold", [1, 2, 3], 1.0, adapter=adapter("a", 30), max_tokens=8))
    bench.step()
    bench.step()
    assert (bench.engine.stats().ahead_of_adapter, bench.engine.stats().modes.assisted_steps) == (1, 1)
    assert [step.request_id for step in bench.plans[-1].sequences] == ["warm"]
    bench.run()
    assert {str(name): len(tokens) for name, tokens in bench.tokens.items()} == {"warm": 12, "cold": 8}


def test_a_cold_prefill_that_is_cheap_joins_the_decodes() -> None:
    bench = cold_bench(1e-9)
    bench.engine.submit(request("warm", [1, 2], max_tokens=12))
    bench.step()
    bench.step()
    bench.engine.submit(request("cold", [1, 2, 3], 1.0, adapter=adapter("a", 30)))
    bench.step()
    assert {step.request_id for step in bench.plans[-1].sequences} == {"warm", "cold"}
    assert bench.plans[-1].assisted == ("digest-a",)


def test_cold_prefill_that_delays_decodes_alternates_steps_with_them() -> None:
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=5, max_model_len=64)
    bench = cold_bench(1e-3)
    bench.scheduler._limits = limits
    bench.engine.submit(request("warm", [1, 2], max_tokens=12))
    bench.step()
    bench.step()
    bench.engine.submit(request("cold", list(range(12)), 1.0, adapter=adapter("a", 30)))
    for _ in range(4):
        bench.step()
    who = [{str(step.request_id) for step in plan.sequences} for plan in bench.plans[-4:]]
    assert who == [{"cold"}, {"warm"}, {"cold"}, {"warm"}]
    bench.run()
    assert len(bench.finished()) == 2


def test_coalesced_decodes_end_where_a_cold_prefill_has_its_turn() -> None:
    bench = cold_bench(1e-3)
    bench.scheduler._limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=5, max_model_len=64)
    bench.engine.submit(request("warm", [1, 2], max_tokens=40))
    bench.step()
    bench.step()
    bench.engine.submit(request("cold", list(range(12)), 1.0, adapter=adapter("a", 30)))
    for _ in range(3):
        bench.engine.step(until_s=float("inf"))
    who = [({str(step.request_id) for step in plan.sequences}, plan.repeat) for plan in bench.plans[-3:]]
    assert who == [({"cold"}, 1), ({"warm"}, 1), ({"cold"}, 1)]


def test_adapter_loaded_after_its_request_ended_is_freed_without_a_cache() -> None:
    preset = Preset(cold_start=ColdStart.ASSIST, keep_adapters=False)
    bench = cold_bench(preset=preset)
    bench.engine.submit(request("cold", [1, 2, 3], adapter=adapter("a", 30), max_tokens=1))
    bench.run()
    assert bench.finished()["cold"].reason is FinishReason.LENGTH  # type: ignore[index]
    assert bench.memory.resident() == {}


def test_kv_of_assisted_prefill_is_reusable_once_the_adapter_has_arrived() -> None:
    bench = cold_bench()
    prompt = list(range(9))
    bench.engine.submit(request("cold", prompt, adapter=adapter("a", 30)))
    bench.step()
    bench.engine.submit(request("twin", prompt, 1.0, adapter=adapter("a", 30)))
    bench.run()
    bench.engine.submit(request("later", prompt, 2.0, adapter=adapter("a", 30)))
    bench.run()
    assert bench.tokens["cold"] == bench.tokens["twin"] == bench.tokens["later"]  # type: ignore[index]
    assert bench.scheduler.prefix_hits_tokens == 8


def test_transfer_failing_after_an_assisted_prefill_fails_its_request() -> None:
    bench = cold_bench(fails=lambda transfer: bool(transfer.groups))
    bench.engine.submit(request("cold", list(range(9)), adapter=adapter("a", 30)))
    bench.run()
    ended = bench.finished()["cold"]  # type: ignore[index]
    assert ended.reason is FinishReason.ERROR
    assert ended.error == "scripted failure"
    assert len(bench.tokens["cold"]) == 1  # type: ignore[index]


def test_an_adapter_that_is_not_on_the_host_is_waited_for() -> None:
    bench = Bench(preset=Preset(cold_start=ColdStart.ASSIST), limits=WIDE, assist=costs())
    bench.engine.submit(request("cold", [1, 2, 3], adapter=adapter("a", 30)))
    bench.run()
    assert not any(plan.assisted for plan in bench.plans)
    assert bench.finished()["cold"].reason is FinishReason.LENGTH  # type: ignore[index]
