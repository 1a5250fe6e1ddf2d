"""S-LoRA's batching (reserved tokens, prefills apart, decodes between them), and squashed requests that restart."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.core.events import FinishReason, FirstToken
from lorikeet.core.plan import StepPlan
from lorikeet.core.request import Request, SamplingParams
from lorikeet.papers.rivals.s_lora import Reservation
from lorikeet.policies import ADMISSION
from lorikeet.presets import PRESETS, PrefillApart, Preset
from lorikeet.scheduling.state import SchedulerLimits
from tests.scheduling.worlds import Telling, World, admit
from tests.support.scripted import Bench, adapter, request


def ask(name: str, prompt: int, most: int, rank: int = 0) -> Request:
    """A request of so many tokens that answers with at most so many."""
    asked = request(name, [1] * prompt, adapter=adapter(f"rank{rank}", rank) if rank else None)
    return msgspec.structs.replace(asked, sampling=SamplingParams(max_tokens=most))


def test_the_most_tokens_are_needed_just_before_one_ends() -> None:
    # After 10 more steps: 30 + 10 and 50 + 10; after 40: 50 + 40.
    reserved = Reservation(World(), [(ask("short", 30, 10), 0), (ask("long", 50, 40), 0)])
    assert reserved.most_tokens() == 100
    reserved = Reservation(World(), [(ask("short", 5, 10), 0), (ask("long", 50, 40), 0)])
    assert reserved.most_tokens() == 90
    assert Reservation(World(), [(ask("half done", 50, 40), 20)]).most_tokens() == 90


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=8))
def test_reserved_tokens_are_the_largest_sum_over_all_later_steps(needs: list[tuple[int, int]]) -> None:
    world = World(max_model_len=10_000)
    reserved = Reservation(world, [(ask(f"{number}", *need), 0) for number, need in enumerate(needs)])
    after = [sum(prompt + step for prompt, most in needs if most >= step) for step in range(61)]
    assert reserved.most_tokens() == max(after)


def test_requests_are_admitted_in_order_while_their_longest_answers_fit() -> None:
    world = World(total_tokens=100)
    queue = ADMISSION["s-lora"](world)
    for each in (ask("a", 20, 20), ask("b", 20, 21), ask("c", 19, 20)):
        queue.add(each, 0.0)
    assert admit(queue, world) == ["a", "b"], "80 in the end, 119 with c"
    world.running_now.pop(ask("a", 1, 1).request_id)
    assert admit(queue, world) == ["c"]
    queue.add(ask("d", 60, 1), 0.0)
    queue.add(ask("e", 1, 1), 0.0)
    assert admit(queue, world) == [], "e does not pass d"


def test_adapters_count_once_and_one_request_alone_always_runs() -> None:
    world = World(total_tokens=100)
    queue = ADMISSION["s-lora"](world)
    for each in (ask("a", 20, 10, rank=10), ask("b", 10, 10, rank=10), ask("c", 5, 10, rank=10)):
        queue.add(each, 0.0)
    assert admit(queue, world) == ["a", "b"], "50 in the end, 65 with c, and 40 for the adapter"
    world = World(total_tokens=100)
    queue = ADMISSION["s-lora"](world)
    queue.add(ask("large", 60, 80), 0.0)
    assert admit(queue, world) == ["large"]


def kinds(plans: list[StepPlan]) -> str:
    """One letter a step: p for prefills, d for decodes, m for both."""
    letters = []
    for plan in plans:
        prefills = sum(step.tokens > 1 for step in plan.sequences)
        letters += ["p" if prefills == len(plan.sequences) else "m" if prefills else "d"] * plan.repeat
    return "".join(letters)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, "pdmmddd"),
        ({"prefill_apart": PrefillApart.ALWAYS}, "pdppdddd"),
        ({"prefill_apart": PrefillApart.ALWAYS, "decodes_between_prefills": 4}, "pddddppddd"),
    ],
)
def test_prefills_beside_decodes_or_apart_or_after_some_decodes(options: dict[str, int], steps: str) -> None:
    bench = Bench(preset=Preset(**options))  # type: ignore[arg-type]
    bench.engine.submit(request("first", [1, 2, 3], max_tokens=6))
    bench.step()
    bench.step()
    bench.engine.submit(request("second", [1] * 20, max_tokens=4))
    bench.run()
    assert kinds([plan for plan in bench.plans if plan.sequences]) == steps
    assert {name: len(made) for name, made in bench.tokens.items()} == {"first": 6, "second": 4}


def test_separate_prefill_has_whole_budget_and_idle_engine_runs_requests_at_once() -> None:
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=16, max_model_len=64)
    bench = Bench(preset=Preset(prefill_apart=PrefillApart.ALWAYS, decodes_between_prefills=10), limits=limits)
    bench.engine.submit(request("a", [1] * 16, max_tokens=2))
    bench.step()
    assert [step.tokens for step in bench.plans[-1].sequences] == [16]
    bench.step()
    bench.engine.submit(request("b", [2] * 16, max_tokens=2))
    bench.step()
    assert [step.tokens for step in bench.plans[-1].sequences] == [16], "a has ended, so nothing has to be waited for"


def test_a_squashed_request_is_executed_again_and_its_client_gets_each_token_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Restarting(Telling):
        restarts_squashed = True

    monkeypatch.setitem(ADMISSION.own, "telling", Restarting)
    tokens = {}
    for squashed in (False, True):
        bench = Bench(preset=Preset(admission="telling"))
        bench.engine.submit(request("x", [1, 2, 3], max_tokens=9))
        for _ in range(4):
            bench.step()
        if squashed:
            queue = bench.scheduler.queue
            assert isinstance(queue, Restarting)
            queue.back = {"x"}
        bench.run()
        tokens[squashed] = bench.tokens
        assert [ended.reason for ended in bench.finished().values()] == [FinishReason.LENGTH]
        assert sum(plan.repeat for plan in bench.plans if plan.sequences) == (9 + 4 if squashed else 9)
        assert sum(isinstance(event, FirstToken) for event in bench.events) == 1 + squashed
    assert tokens[True] == tokens[False]


def test_restarting_request_can_be_exported_before_it_has_caught_up() -> None:
    bench = Bench(preset=Preset())
    bench.engine.submit(request("x", [1, 2, 3], max_tokens=9))
    for _ in range(5):
        bench.step()
    known = list(bench.tokens[request("x", [1]).request_id])
    (sequence,) = bench.scheduler._running
    bench.scheduler._suspend(sequence, 0.0, restarts=True)
    bench.step()
    moved = bench.scheduler.export_request(sequence.request_id, 0.0)
    assert moved.output_token_ids == known, "all that the client has"


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.startswith("chameleon")])
def test_every_preset_of_the_paper_serves_what_is_asked(preset: str) -> None:
    bench = Bench(blocks=24, host_blocks=40, preset=PRESETS[preset])
    for index in range(12):
        ref = adapter("abc"[index % 3], 1 + index % 3)
        bench.engine.submit(request(f"{index}", [1] * (1 + index % 9), 0.1 * index, adapter=ref, max_tokens=5))
        bench.step()
    bench.run(2_000)
    assert all(ended.reason is FinishReason.LENGTH for ended in bench.finished().values())
    assert len(bench.finished()) == 12
