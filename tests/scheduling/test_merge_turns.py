"""Merged turns of starving adapters: our extension of dLoRA's batching."""

import pytest

from lorikeet.papers.dlora.merge_turns import CreditParams, MergeTurns, TurnCredits
from lorikeet.papers.dlora.mode_times import BreakEvenParams, BreakEvenThresholds, ModeBatch, ModeIteration
from lorikeet.scheduling.batching.mode import BatchWork
from tests.support.batching import A, B, C, batch_of, ids, live_of, run, setup_of


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
    assert thresholds.steps_left == 32, "merged iterations tell nothing of the other mode"
    thresholds.note(ModeIteration(ModeBatch(1), ModeBatch(2, lora=8.0)), 2)
    thresholds.start_iteration(None, A)
    assert thresholds.steps_left == 1
    times.is_known = True
    thresholds.note(ModeIteration(ModeBatch(1), ModeBatch(2, lora=8.0)), 1)
    even = 50 / 100 + 100 / 32 / 100  # the longest period has 32 iterations, and each bears its share of a switch
    assert (thresholds.alpha, thresholds.beta) == pytest.approx((even * 1.1, even * 1.1 - 0.15))
    assert thresholds.steps_left == 32
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
        threshold_params=BreakEvenParams(alpha=0.4, beta=0.1, decrement=0.0, factor=1.0, from_even=False),
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
