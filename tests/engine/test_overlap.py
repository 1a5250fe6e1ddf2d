"""Tokens are told while the next step runs; it is planned anew when somebody has said something, or a plan is over."""

from itertools import chain, pairwise
from typing import Any

import msgspec
import pytest

from lorikeet.core.events import FinishReason
from lorikeet.core.executor import ExecutorError
from lorikeet.core.ids import RequestId
from lorikeet.core.plan import SequenceStep, StepPlan
from lorikeet.engine.build import memory_options
from lorikeet.presets import resolve_preset
from lorikeet.scheduling.state import SchedulerLimits
from tests.support.scripted import Bench, TokenScript, adapter, request, token_by_seed

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
LIMITS = SchedulerLimits(
    max_num_seqs=8, max_num_batched_tokens=16, max_model_len=64, num_scheduler_steps=6, async_scheduling=True
)


def bench(blocks: int = 64, script: TokenScript = token_by_seed, **limits: Any) -> Bench:
    return Bench(blocks=blocks, script=script, limits=msgspec.structs.replace(LIMITS, **limits))


def rows(plan: StepPlan) -> list[RequestId]:
    return [step.request_id for step in plan.sequences]


def test_every_step_tells_its_token_and_plans_are_made_less_often_than_without() -> None:
    told: dict[bool, list[tuple[int, ...]]] = {}
    anew: dict[bool, int] = {}
    for async_scheduling in (False, True):
        made = bench(async_scheduling=async_scheduling)
        made.engine.submit(request("a", [1, 2, 3], max_tokens=14))
        told[async_scheduling] = []
        while made.engine.has_requests:
            outputs = made.engine.step()
            told[async_scheduling] += [tuple(token.token_id for token in output.tokens) for output in outputs.tokens]
        anew[async_scheduling] = sum(bool(plan.sequences) and not plan.continues for plan in made.plans)
    assert [len(tokens) for tokens in told[False]] == [1, 6, 6, 1]
    assert [len(tokens) for tokens in told[True]] == [1] * 14
    assert [*chain(*told[True])] == [*chain(*told[False])]
    assert anew == {False: 4, True: 2}


def test_arriving_request_waits_only_for_the_running_step() -> None:
    made = bench()
    made.engine.submit(request("a", [1, 2], max_tokens=30))
    for _ in range(3):
        made.step()
    made.engine.submit(request("b", [3, 4], max_tokens=2))
    made.step()
    made.step()
    steps = [(rows(plan), plan.repeat, plan.continues) for plan in made.plans]
    assert steps == [([A], 1, False), ([A], 29, False), ([A], 28, True), ([A], 1, True), ([A, B], 1, False)]
    made.run()
    assert {name: len(tokens) for name, tokens in made.tokens.items()} == {A: 30, B: 2}


def test_request_arriving_behind_others_ends_no_plan() -> None:
    made = bench(max_num_seqs=1)
    for name, output_tokens in (("a", 13), ("b", 2), ("c", 2)):
        made.engine.submit(request(name, [1, 2], max_tokens=output_tokens))
        for _ in range(3):
            made.step()
    made.run()
    whole = [(6, False), (5, True), (4, True), (3, True), (2, True), (1, True)]
    of_a = [(plan.repeat, plan.continues) for plan in made.plans if rows(plan) == [A]]
    assert of_a == [(1, False), (12, False), (11, True), (1, True), *whole, (3, False), *whole[4:]]


def test_steps_overlap_a_load_and_its_request_joins_after_the_running_step() -> None:
    made = bench(num_scheduler_steps=20, multi_step_limit_s=1.0)
    made.engine.submit(request("a", [1, 2], max_tokens=30))
    made.step()
    made.engine.submit(request("b", [1, 2], adapter=adapter("x"), max_tokens=2))
    while B not in rows(made.plans[-1]):
        made.step()
    began = next(at for at, plan in enumerate(made.plans) if plan.transfers)
    beside = made.plans[began:-1]
    assert [plan.continues for plan in beside] == [False] + 5 * [True], "a load takes five steps, and one runs by then"
    made.run()
    assert {name: len(tokens) for name, tokens in made.tokens.items()} == {A: 30, B: 2}


def test_ended_request_is_left_out_and_others_keep_the_running_step() -> None:
    made = bench()
    for name in "abc":
        made.engine.submit(request(name, [1, 2], adapter=adapter("x") if name == "b" else None, max_tokens=30))
    while len(made.plans) < 2 or not made.plans[-1].continues or len(made.plans[-1].sequences) < 3:
        made.step()
    assert made.plans[-1].adapters
    made.engine.abort(B)
    made.step()
    plan = made.plans[-1]
    assert (set(rows(plan)), plan.repeat, plan.continues, plan.adapters) == ({A, C}, 1, True, ())
    made.step()
    assert not made.plans[-1].continues
    assert made.plans[-1].drops == (B,)
    made.run()
    assert (len(made.tokens[A]), len(made.tokens[C])) == (30, 30)


def test_unneeded_step_is_dropped_and_its_blocks_are_reused() -> None:
    made = bench(blocks=16)
    made.engine.submit(request("a", list(range(40)), max_tokens=20))
    while not (made.plans and made.plans[-1].continues):
        made.step()
    made.engine.abort(A)
    made.engine.submit(request("b", list(range(50, 90)), max_tokens=20))
    made.step()
    assert rows(made.plans[-1]) == [B]
    assert not made.plans[-1].continues
    made.run()
    assert len(made.tokens[B]) == 20


def test_new_request_with_reused_id_starts_from_its_prompt() -> None:
    made = bench()
    made.engine.submit(request("a", [1, 2], max_tokens=20))
    while not (made.plans and made.plans[-1].continues):
        made.step()
    made.engine.abort(A)
    made.engine.submit(request("a", [5, 6, 7], max_tokens=2))
    made.tokens.clear()
    made.run()
    assert len(made.tokens[A]) == 2


def test_what_runs_beyond_a_stop_token_is_taken_for_the_others() -> None:
    def script(start: object, position: int) -> int:
        return 9 if position == 6 else 1

    made = bench(script=script)
    made.engine.submit(request("a", [1, 2], max_tokens=20, stop_token_ids=(9,)))
    made.engine.submit(request("b", [1, 2], max_tokens=20))
    made.run()
    assert made.finished()[A].reason is FinishReason.STOP
    assert made.tokens[A] == [1] * 4 + [9]
    assert len(made.tokens[B]) == 20
    beyond = next(plan for plan in made.plans if rows(plan) == [B])
    assert beyond.continues


def test_request_removed_between_steps_resumes_without_the_token_in_flight() -> None:
    here, there = bench(), bench()
    here.engine.submit(request("a", [1, 2], max_tokens=20))
    while not (here.plans and here.plans[-1].continues):
        here.step()
    exported = here.engine.export_request(A)
    assert exported.output_token_ids == here.tokens[A]
    here.run()
    there.tokens[A] = list(exported.output_token_ids)
    there.engine.submit(exported)
    there.run()
    alone = bench(async_scheduling=False)
    alone.engine.submit(request("a", [1, 2], max_tokens=20))
    alone.run()
    assert there.tokens == alone.tokens


def test_plan_ends_at_its_time_limit_while_requests_wait() -> None:
    made = bench(num_scheduler_steps=50, multi_step_limit_s=0.035, max_num_seqs=1)
    for name in "ab":
        made.engine.submit(request(name, [1, 2], max_tokens=22))
    while A not in made.finished():
        made.step()
    anew = [at for at, plan in enumerate(made.plans) if plan.sequences and not plan.continues]
    assert {after - before for before, after in pairwise(anew[1:])} == {5}, "0.04 s, and one begun"


def test_a_plan_ends_when_the_memory_has_something_to_do() -> None:
    made = Bench(preset=resolve_preset("elora")[1], limits=LIMITS)
    made.engine.submit(request("a", [1, 2], max_tokens=30))
    made.run()
    ends_s = {plan.max_duration_s for plan in made.plans if plan.repeat > 1}
    assert LIMITS.multi_step_limit_s < max(ends_s) <= memory_options(made.preset).tick_s


def test_with_little_room_blocks_are_leased_for_fewer_steps() -> None:
    made = bench(blocks=10, num_scheduler_steps=8)
    for name in "ab":
        made.engine.submit(request(name, [1] * 8, max_tokens=24))
    made.run()
    of_both = [plan.repeat for plan in made.plans if len(plan.sequences) == 2 and not plan.continues]
    assert max(of_both) == 8


def test_engine_told_to_plan_after_each_step_does_so() -> None:
    made = bench(num_scheduler_steps=1)
    made.engine.submit(request("a", [1, 2], max_tokens=9))
    made.run()
    assert not any(plan.overlapped or plan.repeat > 1 for plan in made.plans)


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        ({"sequences": (SequenceStep(A, 9, 1, (), True),), "continues": True}, "goes on with"),
        ({"sequences": (SequenceStep(A, 2, 1, (), True),), "continues": True, "drops": (B,)}, "changes something"),
        ({"sequences": (SequenceStep(A, 2, 1, (), True),), "continues": True, "repeat": 2}, "sequences have left"),
    ],
)
def test_scripted_executor_continues_only_the_running_step(plan: dict[str, object], complaint: str) -> None:
    made = bench()
    for name in "ab":
        made.engine.submit(request(name, [1], max_tokens=20))
    while not (made.plans and made.plans[-1].overlapped):
        made.step()
    assert {step.start for step in made.plans[-1].sequences} == {1}
    with pytest.raises(ExecutorError, match=complaint):
        made.executor.execute(StepPlan(9, **plan))  # type: ignore[arg-type]
