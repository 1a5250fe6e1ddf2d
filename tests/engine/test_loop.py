"""The engine's loop on the scripted executor, which itself refuses plans that mix anything up."""

import math

import msgspec
import pytest

from lorikeet.core.events import (
    AdapterArrived,
    AdapterEvicted,
    AdapterLoaded,
    Admitted,
    FinishReason,
    Preempted,
)
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.presets import ColdStart, KvAfterFinish, Preset
from lorikeet.scheduling.state import SchedulerLimits
from tests.support.scripted import Bench, adapter, request
from tests.support.scripted_executor import TokenScript


def expected_tokens(prompt: int, count: int, seed: int = 0) -> list[int]:
    """What ``token_by_seed`` gives."""
    return [(seed * 1_000_003 + position * 7_919 + 12_345) % 1000 for position in range(prompt, prompt + count)]


def test_requests_of_several_adapters_and_of_none_share_one_step() -> None:
    bench = Bench()
    for name, ref in (("x", adapter("a")), ("y", adapter("b", 2)), ("z", None)):
        bench.engine.submit(request(name, [1, 2, 3], adapter=ref, max_tokens=20))
    bench.run()
    together = max(bench.plans, key=lambda plan: len(plan.sequences))
    assert len(together.sequences) == 3
    assert together.adapters == ("digest-a", "digest-b")
    assert [s.request_id for s in together.sequences] == ["z", "x", "y"], "rows of one adapter lie side by side"
    assert bench.tokens == {RequestId(name): expected_tokens(3, 20) for name in "xyz"}


def test_a_long_prompt_is_prefilled_in_chunks_beside_decodes() -> None:
    bench = Bench(limits=SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=8, max_model_len=64))
    bench.engine.submit(request("short", [1, 2], max_tokens=12))
    bench.step()
    bench.engine.submit(request("long", list(range(20)), max_tokens=2))
    bench.run()
    mixed = [plan for plan in bench.plans if len(plan.sequences) == 2]
    shares = [{s.request_id: s.tokens for s in plan.sequences} for plan in mixed]
    assert shares[:3] == [{"short": 1, "long": 7}, {"short": 1, "long": 7}, {"short": 1, "long": 6}]
    assert bench.tokens[RequestId("long")] == expected_tokens(20, 2)


def test_every_step_is_counted_by_its_tokens() -> None:
    bench = Bench(limits=SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=16, max_model_len=64))
    bench.engine.submit(request("r", list(range(20)), max_tokens=9))
    bench.run()
    stats = bench.engine.stats()
    assert stats.steps == 10
    assert stats.steps_by_tokens[:4] == (8, 1, 1, 0), "decodes of one token, and prefills of 4 and of 16"
    assert sum(stats.steps_by_tokens) == 10
    assert stats.computed_tokens == 28


def test_request_waiting_for_its_adapter_does_not_block_another() -> None:
    bench = Bench()
    bench.engine.submit(request("cold", [1, 2, 3], 0.0, adapter("a")))
    bench.engine.submit(request("base", [1, 2, 3], 1.0))
    bench.step()
    assert [s.request_id for s in bench.plans[0].sequences] == ["base"]
    assert len(bench.plans[0].transfers) == 1
    bench.run()
    waited = [event.waits_for_adapter for event in bench.events if isinstance(event, Admitted)]
    assert waited == [True, False]
    assert [event.request_id for event in bench.events if isinstance(event, AdapterArrived)] == ["cold"]
    assert [type(event) for event in bench.adapter_events] == [AdapterLoaded]


def test_block_cold_start_runs_nothing_during_a_transfer() -> None:
    bench = Bench(preset=Preset(cold_start=ColdStart.BLOCK))
    bench.engine.submit(request("base", [1, 2, 3], max_tokens=30))
    bench.step()
    bench.engine.submit(request("cold", [1, 2, 3], 1.0, adapter("a")))
    before_s = bench.clock.now()
    for _ in range(3):
        bench.step()
    assert bench.clock.now() - before_s == pytest.approx(0.06), "the load, and one step"
    assert [len(plan.sequences) for plan in bench.plans[-2:]] == [0, 2]


def test_a_step_is_held_for_a_transfer_but_not_for_long() -> None:
    bench = Bench(preset=Preset(step_hold=True))
    bench.engine.submit(request("base", [1, 2, 3], max_tokens=30))
    bench.step()
    bench.engine.submit(request("cold", [1, 2, 3], 1.0, adapter("a")))
    before_s = bench.clock.now()
    for _ in range(3):
        bench.step()
    assert [len(plan.sequences) for plan in bench.plans[-2:]] == [0, 1], "nothing is known of loads yet"
    assert bench.clock.now() - before_s == pytest.approx(0.015), "half a step, and a step"
    while bench.memory.transfers_in_flight:
        bench.step()
    bench.engine.submit(request("other", [1, 2, 3], 2.0, adapter("b")))
    bench.step()
    assert len(bench.plans[-1].sequences) == 2, "a load takes five steps"
    bench.run()


def test_under_block_others_resume_when_the_waiting_request_has_left() -> None:
    bench = Bench(preset=Preset(cold_start=ColdStart.BLOCK))
    bench.engine.submit(request("base", [1, 2, 3], max_tokens=30))
    bench.step()
    bench.engine.submit(request("cold", [1, 2, 3], 1.0, adapter("a")))
    bench.engine.step()
    bench.engine.step()
    assert not bench.engine.is_busy
    assert bench.engine.due_s == math.inf, "nothing but a message or the transfer's end lets it go on"
    bench.engine.abort(RequestId("cold"))
    bench.step()
    assert bench.engine.has_transfers
    assert [len(plan.sequences) for plan in bench.plans[-2:]] == [0, 1]
    bench.run()


def test_kv_of_finished_request_serves_only_the_same_adapter_version() -> None:
    bench = Bench()
    prompt = list(range(12))
    for name, ref in (("first", adapter("a")), ("same", adapter("a")), ("other", adapter("b")), ("base", None)):
        bench.engine.submit(request(name, prompt, adapter=ref))
        bench.run()
    cached = {e.request_id: e.cached_tokens for e in bench.events if isinstance(e, Admitted)}
    assert cached == {"first": 0, "same": 8, "other": 0, "base": 0}, "two whole blocks, the last token recomputed"


def test_kv_is_only_reused_by_requests_with_the_same_salt() -> None:
    bench = Bench()
    for name, salt, tokens in (("a", "one", 12), ("b", "two", 12), ("c", "", 12), ("d", "one", 12), ("e", "two", 40)):
        asked = request(name, list(range(12)), adapter=adapter("a"), max_tokens=tokens)
        bench.engine.submit(msgspec.structs.replace(asked, cache_salt=salt))
        bench.run()
    cached = {e.request_id: e.cached_tokens for e in bench.events if isinstance(e, Admitted)}
    assert cached == {"a": 0, "b": 0, "c": 0, "d": 8, "e": 8}


def test_salt_also_marks_the_blocks_that_an_answer_fills() -> None:
    bench = Bench()
    for name, salt in (("first", "one"), ("other", "two"), ("same", "one")):
        asked = request(name, [7], max_tokens=20)  # less than a block: no key is known when it is admitted
        prompt = [7] if name == "first" else [7, *bench.tokens[RequestId("first")]]
        bench.engine.submit(msgspec.structs.replace(asked, cache_salt=salt, prompt_token_ids=prompt))
        bench.run()
    assert [e.cached_tokens for e in bench.events if isinstance(e, Admitted)] == [0, 0, 20]


def test_without_reuse_nothing_stays_cached() -> None:
    bench = Bench(preset=Preset(kv_after_finish=KvAfterFinish.DROPPED))
    for name in ("first", "again"):
        bench.engine.submit(request(name, list(range(12))))
        bench.run()
    assert [e.cached_tokens for e in bench.events if isinstance(e, Admitted)] == [0, 0]
    assert bench.memory.counts().free == bench.blocks


def test_when_blocks_run_out_the_newest_request_gives_way_and_loses_nothing() -> None:
    bench = Bench(blocks=8)
    for index in range(3):
        bench.engine.submit(request(f"r{index}", [index] * 6, float(index), max_tokens=18, seed=index))
    bench.run()
    preempted = {event.request_id for event in bench.events if isinstance(event, Preempted)}
    assert preempted
    assert "r0" not in preempted, "the oldest never gives way"
    for index in range(3):
        assert bench.tokens[RequestId(f"r{index}")] == expected_tokens(6, 18, seed=index)
    counts = bench.memory.counts()
    assert counts.free + counts.cached == bench.blocks


def test_lone_sequence_with_duplicate_blocks_is_preempted_once() -> None:
    bench = Bench(blocks=10, limits=SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64))
    bench.engine.submit(request("short", list(range(17)), max_tokens=2))
    bench.engine.submit(request("long", list(range(17)), max_tokens=20))
    bench.run()
    assert bench.tokens[RequestId("long")] == expected_tokens(17, 20)
    assert [event.request_id for event in bench.events if isinstance(event, Preempted)] == ["long"]


def test_requests_that_never_need_an_eviction_leave_no_trace_in_memory() -> None:
    bench = Bench(blocks=8)
    for count in range(200):
        bench.engine.submit(request(f"r{count}", [1, 2], adapter=adapter("a"), max_tokens=1))
        bench.run()
    assert len(bench.memory.tree) == 1, "the adapter"
    assert sum(len(victims._heap) for victims in bench.memory.evictor._device_queues._queues.values()) <= 2


def test_a_stop_token_ends_a_request_but_not_before_min_tokens() -> None:
    bench = Bench(script=lambda start, position: 7)
    bench.engine.submit(request("soon", [1, 2], stop_token_ids=(7,)))
    bench.engine.submit(request("later", [1, 2], stop_token_ids=(7,), min_tokens=3, max_tokens=9))
    bench.run()
    assert {name: len(tokens) for name, tokens in bench.tokens.items()} == {"soon": 1, "later": 4}
    assert all(e.reason is FinishReason.STOP and e.stop_token_id == 7 for e in bench.finished().values())


def stop_at(last: int) -> TokenScript:
    """Return a script whose token at one position is 9, and everywhere else 1."""
    return lambda start, position: 9 if position == last else 1


def test_identical_decode_steps_are_one_plan_that_ends_at_a_stop_token() -> None:
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=16, max_model_len=64, num_scheduler_steps=16)
    bench = Bench(script=stop_at(10), limits=limits)
    bench.engine.submit(request("x", [1, 2], stop_token_ids=(9,), max_tokens=40))
    bench.engine.submit(request("y", [1, 2], max_tokens=20))
    bench.run()
    assert bench.plans[1].repeat == 16
    assert bench.tokens[RequestId("x")] == [1] * 8 + [9]
    assert len(bench.tokens[RequestId("y")]) == 20
    assert len(bench.plans) < 8


def test_decodes_repeat_while_others_wait_for_the_end_of_one_of_them() -> None:
    limits = SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=64, num_scheduler_steps=16)
    bench = Bench(script=stop_at(6), limits=limits)
    bench.engine.submit(request("x", [1, 2], stop_token_ids=(9,), max_tokens=40))
    bench.engine.submit(request("y", [1, 2], max_tokens=3))
    bench.run()
    ran = [([step.request_id for step in plan.sequences], plan.repeat) for plan in bench.plans if plan.sequences]
    assert ran == [(["x"], 1), (["x"], 16), (["y"], 1), (["y"], 2)]
    assert bench.tokens[RequestId("x")] == [1] * 4 + [9]


def test_an_aborted_request_frees_its_blocks_at_once() -> None:
    bench = Bench()
    bench.engine.submit(request("x", list(range(20)), max_tokens=30))
    bench.step()
    bench.engine.abort(RequestId("x"))
    counts = bench.memory.counts()
    assert counts.kv == 0
    bench.run()
    assert bench.finished()[RequestId("x")].reason is FinishReason.ABORT
    bench.engine.abort(RequestId("x"))


def test_an_exported_request_goes_on_in_another_engine() -> None:
    here, there = Bench(), Bench()
    here.engine.submit(request("x", [1, 2, 3], max_tokens=10, seed=5))
    for _ in range(4):
        here.step()
    moved = here.engine.export_request(RequestId("x"))
    assert (moved.exports, moved.output_token_ids) == (1, here.tokens[RequestId("x")])
    there.tokens[RequestId("x")] = list(moved.output_token_ids)
    there.engine.submit(moved)
    there.run()
    assert there.tokens[RequestId("x")] == expected_tokens(3, 10, seed=5)
    here.run()


def test_a_failed_load_ends_the_requests_that_waited_for_it_and_no_other() -> None:
    bench = Bench(failing=frozenset({AdapterDigest("digest-bad")}))
    bench.engine.submit(request("doomed", [1], adapter=adapter("bad", 3)))
    bench.engine.submit(request("fine", [1], adapter=adapter("good")))
    bench.run()
    finished = bench.finished()
    assert finished[RequestId("doomed")].error == "scripted failure"
    assert finished[RequestId("fine")].reason is FinishReason.LENGTH


def test_a_request_without_finite_output_fails_alone_and_its_kv_is_not_kept() -> None:
    bench = Bench(sick=frozenset({RequestId("sick")}))
    bench.engine.submit(request("sick", list(range(12))))
    bench.engine.submit(request("fine", [7] * 5, max_tokens=2))
    bench.run()
    finished = bench.finished()
    assert finished[RequestId("sick")].error == "the model's output is not finite"
    assert finished[RequestId("fine")].reason is FinishReason.LENGTH
    assert bench.memory.counts().cached == 1, "the block of the other one"


def test_a_dropped_adapter_is_freed_after_its_last_request_with_its_kv() -> None:
    bench = Bench()
    bench.engine.submit(request("x", list(range(9)), adapter=adapter("a", 2)))
    bench.step()
    bench.engine.drop_adapter(AdapterDigest("digest-a"))
    bench.run()
    evicted = [event for event in bench.adapter_events if isinstance(event, AdapterEvicted)]
    assert [(event.digest, event.freed_bytes) for event in evicted] == [("digest-a", (2 + 3) * 1024)]
    assert bench.memory.counts().free == bench.blocks
    bench.engine.drop_adapter(AdapterDigest("digest-a"))
    bench.step()
    assert bench.adapter_events[-1] == AdapterEvicted(AdapterDigest("digest-a"), bench.clock.now(), 0, dropped=True)


def test_requests_accepted_before_a_drop_are_served_first() -> None:
    bench = Bench()
    bench.engine.drop_adapter(AdapterDigest("digest-a"))
    bench.engine.submit(request("x", [1], adapter=adapter("a")))
    bench.run()
    assert bench.finished()[RequestId("x")].reason is FinishReason.LENGTH
    assert bench.memory.resident() == {}
    assert [type(event) for event in bench.adapter_events] == [AdapterLoaded, AdapterEvicted]


def test_adapters_and_kv_share_the_pool_and_the_least_recent_leaves_first() -> None:
    bench = Bench(blocks=8)
    for name in ("a", "b", "c", "d"):
        bench.engine.submit(request(name, [1, 2], adapter=adapter(name, 3)))
        bench.run()
    assert set(bench.memory.resident()) == {"digest-c", "digest-d"}


@pytest.mark.parametrize(
    ("prompt", "ref", "complaint"),
    [
        ([], None, "no tokens"),
        (list(range(64)), None, "context of 64"),
        ([1], adapter("huge", 64), "there are 64"),
    ],
)
def test_what_can_never_run_ends_with_a_reason(prompt: list[int], ref: object, complaint: str) -> None:
    bench = Bench()
    bench.engine.submit(request("x", prompt, adapter=ref))  # type: ignore[arg-type]
    bench.run()
    finished = bench.finished()[RequestId("x")]
    assert finished.reason is FinishReason.ERROR
    assert complaint in (finished.error or "")


def test_an_id_in_use_is_refused_and_the_first_request_goes_on() -> None:
    bench = Bench()
    bench.engine.submit(request("x", [1, 2], max_tokens=3))
    bench.engine.step()
    bench.engine.submit(request("x", [5], max_tokens=3))
    outputs = bench.engine.step()
    assert [e.error for e in outputs.events if getattr(e, "error", None)] == ["the id is in use"]
    assert [t.index for t in outputs.tokens] == [1]
