"""Merged turns of starving adapters: our extension of dLoRA's batching."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.papers.dlora.merge_turns import CreditParams, MergeTurns, TurnCredits
from lorikeet.papers.dlora.mode_times import (
    BREAK_EVEN,
    BreakEvenThresholds,
    ModeBatch,
    ModeIteration,
)
from lorikeet.scheduling.batching.mode import BatchWork, LiveRequest
from tests.support.batching import A, B, C, batch_of, ids, live_of, run, setup_of, work_of


class FixedTimes:
    """Milliseconds: 50 merged, 100 unmerged, 100 for a switch."""

    is_known = True

    def batch_s(self, batch: ModeBatch) -> float:
        return 100.0 if batch.lora else 50.0

    def switch_s(self, to_merged: bool) -> float:
        return 100.0


class LateTimes(FixedTimes):
    is_known = False


def test_thresholds_start_at_the_break_even_of_merging_once_known() -> None:
    times = LateTimes()
    thresholds = BreakEvenThresholds(times)
    thresholds.start_iteration(A, A)
    assert thresholds.iterations_left == 32, "merged iterations tell nothing of the other mode"
    thresholds.note(ModeIteration(ModeBatch(1), ModeBatch(2, lora=8.0)), 2)
    thresholds.start_iteration(None, A)
    assert thresholds.iterations_left == 1
    times.is_known = True
    thresholds.note(ModeIteration(ModeBatch(1), ModeBatch(2, lora=8.0)), 1)
    even = 50 / 100 + 100 / 32 / 100  # the longest period has 32 iterations, and each bears its share of a switch
    assert (thresholds.alpha, thresholds.beta) == pytest.approx((even * 1.1, even * 1.1 - 0.15))
    assert thresholds.iterations_left == 32
    thresholds.note(ModeIteration(ModeBatch(4), ModeBatch(4, lora=8.0)), 32)
    assert thresholds.alpha == pytest.approx(even * 1.1 - 0.05), "from then on it moves"
    thresholds.recalibrate()
    thresholds.note(ModeIteration(ModeBatch(4), ModeBatch(4, lora=8.0)), 1)
    assert thresholds.alpha == pytest.approx(even * 1.1), "until it is to be set anew"


def test_repayment_is_at_most_the_credit_owed() -> None:
    credits = TurnCredits(CreditParams(initial=10, starves_above=14, normal_below=12, price=3))
    credits.update_types([A, B, C, None])
    credits.apply({A: -8, B: 6, C: 2}, 1)
    assert credits.repayments(live_of("AABBC-")) == {B: -6, C: -2, A: 8}
    assert credits.repayments(live_of("ABC")) == {B: -3, C: -2, A: 5}
    assert credits.repayments(live_of("BC")) == {}, "nobody among them owes anything"


def test_request_beside_many_short_lived_types_starves_no_longer() -> None:
    credits = TurnCredits(CreditParams(initial=8, starves_above=10, normal_below=9, turn_ends_below=4))
    for other in (B, C) * 4:
        credits.update_types((A, other))
        credits.apply({A: 5, other: -5}, 1)
        assert A in credits.starving()
        credits.update_types((A,))
        assert credits[A] == 8
        assert A not in credits.starving()


def test_adapter_is_merged_at_once_when_the_previous_one_has_no_requests() -> None:
    mode = MergeTurns(setup_of(max_batch=4))
    assert [run(mode, live_of(types)).merged for types in ("AA", "BB", "AABA")] == [A, B, None]


def starving_mode(types: str, lora_s: float, switch_s: float = 0.0) -> MergeTurns:
    """Return a mode that knows how long steps and switches take, and in which B is about to starve beside a hot A."""
    mode = MergeTurns(
        setup_of(max_batch=4),
        threshold_params=BREAK_EVEN._replace(alpha=0.4, beta=0.1, decrement=0.0, factor=1.0, from_even=False),
        credit_params=CreditParams(initial=6, starves_above=8, normal_below=7, turn_ends_below=3),
    )
    mode.times.note(8, BatchWork(0, 0, 4, {}), 0.01)
    mode.times.note(8, BatchWork(0, 0, 4, {A: 2, B: 2}), lora_s)
    mode.times.note_switch(True, switch_s)
    live = live_of(types)
    while mode.credits[B] <= 8:
        assert run(mode, live, step_s=0.01).merged == A
    return mode


def test_starving_adapter_runs_merged_until_it_owes_time() -> None:
    mode, live = starving_mode("AAAB", lora_s=0.04), live_of("AAAB")
    seen = []
    for _ in range(4):
        choice = run(mode, live, step_s=0.01)
        seen.append((choice.merged, ids(batch_of(choice, live)), mode.credits[B]))
    hot = ["A1", "A2", "A3"]
    assert seen == [(B, ["B1"], 6), (B, ["B1"], 3), (B, ["B1"], 0), (A, hot, 1)], "and then A is merged at once"


@pytest.mark.parametrize(
    ("types", "lora_s", "switch_s"),
    [("AAAB", 0.012, 0.0), ("AACB", 0.022, 0.0), ("AAAB", 0.04, 0.1)],
    ids=["adapters cost little", "three adapters' turns", "switches cost more"],
)
def test_all_run_unmerged_on_a_turn_where_that_is_the_faster_way(types: str, lora_s: float, switch_s: float) -> None:
    mode, live = starving_mode(types, lora_s, switch_s), live_of(types)
    choice = run(mode, live)
    assert (choice.merged, len(batch_of(choice, live))) == (None, 4)
    assert mode.credits[B] == 7, "it pays two for an iteration of its request in which nobody is passed over"


def test_two_adapters_alternate_merged_where_that_takes_less_time() -> None:
    mode, live = starving_mode("AAAB", lora_s=0.022), live_of("AAAB")
    assert run(mode, live).merged == B


@dataclass
class Machine:
    """A replica with 16 requests at any time, each of 40 tokens; whoever ends is followed by another.

    Attributes:
        lora_s, lora_row_s: what LoRA adds to a step, and for each preset.
    """

    lora_s: float
    lora_row_s: float
    switch_s: float = 0.05

    def run(self, mode: MergeTurns, hot: float, steps: int) -> tuple[float, float]:
        """Run, and return the share of merged steps and tokens per second in the second half."""
        chance, number = random.Random(5), 0
        merged: AdapterDigest | None = None
        live: list[LiveRequest] = []
        left: dict[RequestId, int] = {}
        elapsed_s, tokens, merged_steps = 0.0, 0, 0
        for step in range(steps):
            if step == steps // 2:
                elapsed_s, tokens, merged_steps = 0.0, 0, 0
            while len(live) < 16:
                adapter = A if chance.random() < hot else AdapterDigest(f"other-{chance.randrange(8)}")
                live.append(LiveRequest(RequestId(str(number)), adapter, True, 10))
                left[live[-1].request_id] = chance.randrange(20, 61)
                number += 1
            choice = mode.choose(live)
            work = work_of(choice, live)
            rows = sum(work.rows.values())
            step_s = 0.01 + 0.0005 * work.decodes + (self.lora_s + self.lora_row_s * rows) * bool(rows)
            switch_s = self.switch_s * (choice.merged != merged)
            merged = choice.merged
            mode.ran(1, work, step_s * chance.uniform(0.97, 1.03), switch_s)
            elapsed_s, tokens = elapsed_s + step_s + switch_s, tokens + work.decodes
            merged_steps += merged is not None
            for request in batch_of(choice, live):
                left[request.request_id] -= 1
            live = [request for request in live if left[request.request_id]]
        return merged_steps / (steps - steps // 2), tokens / elapsed_s


DEAR, FREE = Machine(lora_s=0.01, lora_row_s=0.002), Machine(lora_s=0.0, lora_row_s=0.0)


@pytest.mark.slow
def test_where_merging_pays_alpha_falls_and_it_merges() -> None:
    mode = MergeTurns(setup_of(max_batch=256))
    share, tokens_per_s = DEAR.run(mode, hot=0.95, steps=4000)
    assert mode.thresholds.alpha < 0.8
    assert share > 0.5
    never = BREAK_EVEN._replace(alpha=2.0, least_alpha=2.0, most_alpha=2.0, from_even=False)
    unmerged = MergeTurns(setup_of(max_batch=256), threshold_params=never)
    assert tokens_per_s > 1.15 * DEAR.run(unmerged, hot=0.95, steps=4000)[1]


@pytest.mark.slow
@pytest.mark.parametrize("hot", [0.7, 0.95])
def test_alpha_rises_and_mode_stays_unmerged_without_gain(hot: float) -> None:
    mode = MergeTurns(setup_of(max_batch=256))
    share, tokens_per_s = FREE.run(mode, hot, steps=4000)
    assert mode.thresholds.alpha > 0.8
    assert share < 0.1
    assert tokens_per_s > 0.95 * 16 / (0.01 + 16 * 0.0005)


@pytest.mark.slow
def test_break_even_of_merging_is_measured_again() -> None:
    mode = MergeTurns(setup_of(max_batch=256))
    FREE.run(mode, hot=0.95, steps=2000)
    assert mode.thresholds.alpha > 1.0
    share, _ = DEAR.run(mode, hot=0.95, steps=4000)
    assert share > 0.5


def serve_one_by_one(mode: MergeTurns, steps: int, held_up_s: Mapping[int, float]) -> float:
    """Run requests that come when the last has gone, where LoRA costs 2 ms of 12 and a switch 50.

    Args:
        mode: that decides.
        steps: how many.
        held_up_s: what some unmerged steps take besides, by their number.

    Returns:
        The share of merged steps in the last quarter.
    """
    merged: AdapterDigest | None = None
    unmerged_steps, merged_steps = 0, 0
    for step in range(steps):
        number = step // 16
        live = [LiveRequest(RequestId(str(number)), AdapterDigest(f"adapter-{number % 7}"), True, 10)]
        choice = mode.choose(live)
        work = work_of(choice, live)
        step_s = 0.01 if not work.rows else 0.012 + held_up_s.get(unmerged_steps, 0.0)
        mode.ran(1, work, step_s, 0.05 * (choice.merged != merged))
        merged = choice.merged
        unmerged_steps += bool(work.rows)
        merged_steps += step >= 3 * steps // 4 and merged is not None
    return merged_steps / (steps // 4)


@pytest.mark.slow
@pytest.mark.parametrize("held_up_s", [{}, {0: 1.0}, {3: 1.0}, {8: 3.0}], ids=["none", "first", "fourth", "ninth"])
def test_delayed_step_does_not_make_merging_pay_forever(held_up_s: Mapping[int, float]) -> None:
    assert serve_one_by_one(MergeTurns(setup_of(max_batch=256)), 4000, held_up_s) < 0.2


def test_due_trial_does_not_shorten_plans_of_a_merged_adapter() -> None:
    mode, live = MergeTurns(setup_of()), live_of("AAAA")
    for _ in range(10):
        run(mode, live)
    assert mode.times.lora_steps_due == 8
    assert mode.choose(live).merged == A
    assert mode.steps_until_review() == mode.thresholds.iterations_left == 22
    run(mode, live_of("BB"))
    assert mode.choose(live_of("BB")).merged is None, "nobody is left for whom A is merged"
    assert mode.steps_until_review() <= mode.times.lora_steps_due


def test_starving_adapters_pay_nothing_for_turns_they_could_not_take() -> None:
    mode = MergeTurns(setup_of(), credit_params=CreditParams(16, starves_above=20, normal_below=18))
    live = live_of("BAAA", illegal="B")
    run(mode, live)
    mode.credits.apply({A: -8, B: 8}, 1)
    choice = mode.choose(live)
    assert ids(batch_of(choice, live)) == ["B1", "A1", "A2", "A3"]
    mode.ran(1, BatchWork(0, 0, 3, {A: 3}, {A}), 0.05, 0.0)
    assert mode.credits[B] == 24, "its adapter is on its way"
    run(mode, live)
    assert mode.credits[B] == 22


@pytest.mark.parametrize(("together_s", "merged"), [(0.03, None), (0.2, A)])
def test_cost_of_mixed_steps_is_measured_before_turns_are_charged(
    together_s: float, merged: AdapterDigest | None
) -> None:
    """One adapter alone adds 20 ms a preset, so that eight seem to cost 170 ms; in turns they take 80."""
    mode = MergeTurns(setup_of(max_batch=16))
    for index in range(16):
        mode.times.note(1, BatchWork(0, 0, 1, {B: 1} if index % 2 else {}), 0.03 if index % 2 else 0.01)
    live = live_of("ACDEFGHI")
    mode.choose(live)
    mode.credits.apply({A: 40, C: -40}, 1)
    for _ in range(8):
        choice = mode.choose(live)
        assert (choice.merged, choice.requests) == (None, None)
        mode.times.note(1, work_of(choice, live), together_s)
    assert mode.choose(live).merged == merged


def test_base_model_need_not_be_measured_together_with_adapters() -> None:
    mode, live = MergeTurns(setup_of()), live_of("A-")
    for index in range(16):
        mode.times.note(1, BatchWork(0, 0, 1, {A: 1} if index % 2 else {}), 0.1 if index % 2 else 0.01)
    mode.choose(live)
    mode.credits.apply({A: 40, None: -40}, 1)
    assert mode.choose(live).merged == A


def test_assisted_step_does_not_change_estimated_step_times() -> None:
    mode, live = MergeTurns(setup_of()), live_of("AAAA")
    mode.choose(live)
    mode.ran(1, BatchWork(4, 40, 0, {A: 40}, {A}, is_assisted=True), 5.0, 0.0)
    assert mode.times._seen == [0, 0]
