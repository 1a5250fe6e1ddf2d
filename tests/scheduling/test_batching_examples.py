"""dLoRA's algorithms: the worked examples of the spec, one test each."""

import pytest

from lorikeet.core.ids import AdapterDigest
from lorikeet.scheduling.batching.dlora import CreditParams, Credits, DLora, credit_transfers
from lorikeet.scheduling.batching.dynamic import Decision, decide
from lorikeet.scheduling.batching.mode import BatchWork, Unmerged
from lorikeet.scheduling.batching.mode_times import Iteration, ModeBatch, ThresholdParams, Thresholds, throughput
from lorikeet.scheduling.batching.one_adapter import OneAdapter
from tests.support.batching import A, B, C, batch_of, ids, live_of, run, setup_of

EVERY = frozenset((A, B, C))


def test_ex_2b_one_adapter_at_a_time_takes_two_rounds_where_unmerged_takes_one() -> None:
    live = live_of("ABB")
    alone = OneAdapter(setup_of(max_batch=3), merged=False)
    first = batch_of(alone.choose(live), live)
    second = batch_of(alone.choose(live[1:]), live[1:])
    assert (ids(first), ids(second)) == (["A1"], ["B1", "B2"]), "3 of 6 slots in two rounds"
    assert batch_of(Unmerged(setup_of(max_batch=3)).choose(live), live) == live


# --- Algorithm 1 -------------------------------------------------------------------------------------


def decided(
    types: str,
    merged: AdapterDigest | None = None,
    legal: frozenset[AdapterDigest | None] = EVERY,
    beta: float = 0.65,
) -> Decision:
    return decide(live_of(types), merged, legal, max_batch=4, alpha=0.8, beta=beta)


def test_ex_3a_a_ratio_above_alpha_merges() -> None:
    decision = decided("ABACAAA")
    assert decision.merged == A
    assert ids(decision.batch) == ["A1", "A2", "A3", "A4"]


def test_ex_3b_a_ratio_below_alpha_stays_unmerged() -> None:
    decision = decided("ABCDA")
    assert (decision.merged, decision.candidate) == (None, A)
    assert ids(decision.batch) == ["A1", "B1", "C1", "D1"]


def test_ex_3c_a_ratio_above_beta_stays_merged_and_the_batch_is_not_filled_up() -> None:
    decision = decided("BAACB", A, beta=0.4)
    assert decision.merged == A
    assert ids(decision.batch) == ["A1", "A2"]


def test_ex_3d_a_ratio_below_beta_unmerges() -> None:
    decision = decided("BAACB", A, beta=0.6)
    assert decision.merged is None
    assert ids(decision.batch) == ["B1", "A1", "A2", "C1"]


def test_ex_3e_a_ratio_equal_to_beta_stays_merged() -> None:
    assert decided("BAACB", A, beta=0.5).merged == A


def test_ex_3f_an_adapter_that_is_no_longer_legal_is_unmerged() -> None:
    decision = decided("BAACB", A, legal=frozenset((B, C)), beta=0.4)
    assert decision.merged is None
    assert ids(decision.batch) == ["B1", "A1", "A2", "C1"]


def test_ex_3g_an_adapter_without_requests_is_unmerged() -> None:
    assert decided("BCB", A).merged is None


def test_a_ratio_equal_to_alpha_does_not_merge() -> None:
    assert decide(live_of("AAAB"), None, EVERY, max_batch=4, alpha=0.75, beta=0.4).merged is None
    assert decide(live_of("AAAB"), None, EVERY, max_batch=4, alpha=0.74, beta=0.4).merged == A


def test_requests_of_the_base_model_count_but_never_merge() -> None:
    assert decided("----").merged is None
    assert decided("-AAAA").merged == A
    assert decided("---A").candidate == A


def test_without_a_legal_adapter_the_oldest_run() -> None:
    decision = decided("AAAAB", legal=frozenset())
    assert (decision.merged, decision.candidate, ids(decision.batch)) == (None, None, ["A1", "A2", "A3", "A4"])


def test_candidate_among_equal_loads_is_the_adapter_of_the_oldest_request() -> None:
    assert decided("BAAB").candidate == B


# --- Algorithm 2 -------------------------------------------------------------------------------------


class FixedTimes:
    """The examples' milliseconds: 50 merged, 100 unmerged, 100 for a switch."""

    is_known = True

    def batch_s(self, batch: ModeBatch) -> float:
        return 100.0 if batch.lora else 50.0

    def switch_s(self, to_merged: bool) -> float:
        return 100.0


def after(
    steps: int, merged: AdapterDigest | None, sizes: tuple[int, int], alpha: float = 0.8, beta: float = 0.65
) -> Thresholds:
    """Return the thresholds after a period in which so many requests would run merged, or unmerged, in each step."""
    thresholds = Thresholds(FixedTimes(), ThresholdParams(alpha, beta, period_steps=steps, from_even=False))
    thresholds.start_iteration(merged, A)
    thresholds.note(Iteration(ModeBatch(sizes[0]), ModeBatch(sizes[1], lora=8.0)), steps)
    return thresholds


@pytest.mark.parametrize(("steps", "stay", "switch"), [(3, 300, 250), (2, 200, 200), (1, 100, 150)])
def test_ex_4a_the_switch_is_spread_over_the_iterations(steps: int, stay: float, switch: float) -> None:
    merged, unmerged = [(ModeBatch(4), steps)], [(ModeBatch(4, lora=8.0), steps)]
    assert throughput(unmerged, FixedTimes()) == pytest.approx(4 * steps / stay)
    assert throughput(merged, FixedTimes(), 100.0) == pytest.approx(4 * steps / switch)


@pytest.mark.parametrize(("steps", "alpha"), [(3, 0.85), (2, 0.99), (1, 0.99)])
def test_ex_4b_alpha_falls_where_merging_would_have_served_more(steps: int, alpha: float) -> None:
    assert after(steps, None, (4, 4), alpha=0.9).alpha == pytest.approx(alpha)


@pytest.mark.parametrize(("size", "beta"), [(1, 0.55), (4, 0.5 / 1.1)])
def test_ex_4c_beta_rises_where_unmerging_would_have_served_more(size: int, beta: float) -> None:
    assert after(3, A, (size, 4), beta=0.5).beta == pytest.approx(beta)


def test_alpha_stays_within_its_limits_and_pushes_beta_down() -> None:
    low = after(3, None, (4, 4), alpha=0.22, beta=0.17)
    assert (low.alpha, low.beta) == pytest.approx((0.2, 0.15))
    assert after(1, None, (4, 4), alpha=1.15).alpha == pytest.approx(1.2)


def test_beta_stays_within_its_limits_and_pushes_alpha_up() -> None:
    high = after(3, A, (1, 4), alpha=0.7, beta=0.65)
    assert (high.alpha, high.beta) == pytest.approx((0.75, 0.7))
    assert after(3, A, (4, 4), beta=0.052).beta == pytest.approx(0.05)
    most = after(3, A, (1, 4), alpha=1.19, beta=1.14)
    assert (most.alpha, most.beta) == pytest.approx((1.2, 1.15))


def test_period_ends_with_a_switch_a_new_candidate_or_its_longest_time() -> None:
    thresholds = Thresholds(FixedTimes(), ThresholdParams(alpha=0.9, period_steps=32, from_even=False))
    iteration = Iteration(ModeBatch(4), ModeBatch(4, lora=8.0))

    def note(merged: AdapterDigest | None, candidate: AdapterDigest, steps: int) -> float:
        thresholds.start_iteration(merged, candidate)
        thresholds.note(iteration, steps)
        return thresholds.alpha

    assert note(None, A, 3) == pytest.approx(0.9)
    assert note(None, A, 3) == pytest.approx(0.9), "the same period goes on"
    assert note(None, B, 1) == pytest.approx(0.85), "another candidate: six iterations of A were worth a switch"
    assert note(B, B, 3) == pytest.approx(0.935), "a switch: one iteration of B was not"
    assert thresholds.steps_left == 29
    beta = thresholds.beta
    assert note(B, B, 29) == pytest.approx(0.935)
    assert thresholds.beta == pytest.approx(beta / 1.1), "the longest period"
    assert thresholds.steps_left == 32


class LateTimes(FixedTimes):
    is_known = False


def test_as_long_as_the_modes_cannot_be_compared_the_thresholds_stay() -> None:
    thresholds = Thresholds(LateTimes())
    thresholds.start_iteration(None, A)
    thresholds.note(Iteration(ModeBatch(4), ModeBatch(4, lora=8.0)), 32)
    assert (thresholds.alpha, thresholds.beta) == (0.8, 0.65)


def test_thresholds_start_at_the_break_even_of_merging_once_known() -> None:
    times = LateTimes()
    thresholds = Thresholds(times)
    thresholds.start_iteration(A, A)
    assert thresholds.steps_left == 32, "merged iterations tell nothing of the other mode"
    thresholds.note(Iteration(ModeBatch(1), ModeBatch(2, lora=8.0)), 2)
    thresholds.start_iteration(None, A)
    assert thresholds.steps_left == 1
    times.is_known = True
    thresholds.note(Iteration(ModeBatch(1), ModeBatch(2, lora=8.0)), 1)
    even = 50 / 100 + 100 / 32 / 100  # the longest period has 32 iterations, and each bears its share of a switch
    assert (thresholds.alpha, thresholds.beta) == pytest.approx((even * 1.1, even * 1.1 - 0.15))
    assert thresholds.steps_left == 32
    thresholds.note(Iteration(ModeBatch(4), ModeBatch(4, lora=8.0)), 32)
    assert thresholds.alpha == pytest.approx(even * 1.1 - 0.05), "from then on it moves"
    thresholds.recalibrate()
    thresholds.note(Iteration(ModeBatch(4), ModeBatch(4, lora=8.0)), 1)
    assert thresholds.alpha == pytest.approx(even * 1.1), "until it is to be set anew"


# --- Algorithm 3 -------------------------------------------------------------------------------------

QUEUE = "AAABAA"


def example(starves_above: int = 6, backfill: bool = False) -> DLora:
    return DLora(
        setup_of(max_batch=4),
        tuned=False,
        backfill=backfill,
        threshold_params=ThresholdParams(alpha=0.5, beta=0.1),
        credit_params=CreditParams(initial=4, starves_above=starves_above, normal_below=5),
    )


def test_ex_5_skipped_request_earns_credit_until_it_comes_first() -> None:
    mode, live = example(), live_of(QUEUE)
    seen = []
    for _ in range(5):
        choice = run(mode, live)
        seen.append((choice.merged, ids(batch_of(choice, live)), mode.credits[A], mode.credits[B]))
    hot = ["A1", "A2", "A3", "A4"]
    assert seen == [(A, hot, 3, 5), (A, hot, 2, 6), (A, hot, 1, 7), (None, ["B1"], 4, 4), (A, hot, 3, 5)]


def test_ex_5b_an_adapter_without_credit_is_not_merged() -> None:
    mode, live = example(starves_above=10), live_of(QUEUE)
    mode.credits.update_types([A, B])
    mode.credits.apply({A: -4, B: 4}, 1)
    choice = run(mode, live)
    assert (choice.merged, ids(batch_of(choice, live))) == (None, ["A1", "A2", "A3", "B1"])
    assert (mode.credits[A], mode.credits[B]) == (0, 8), "nobody was passed over"


def test_ex_5b_merged_adapter_out_of_credit_is_unmerged() -> None:
    mode, live = example(starves_above=10), live_of(QUEUE)
    assert [run(mode, live).merged for _ in range(4)] == [A] * 4
    assert (mode.credits[A], mode.credits[B]) == (0, 8)
    choice = run(mode, live)
    assert (choice.merged, ids(batch_of(choice, live))) == (None, ["A1", "A2", "A3", "B1"])
    assert (mode.credits[A], mode.credits[B]) == (0, 8)


def test_a_starving_batch_is_filled_up_only_by_backfill() -> None:
    mode, live = example(backfill=True), live_of(QUEUE)
    for _ in range(3):
        run(mode, live)
    choice = run(mode, live)
    assert (choice.merged, ids(batch_of(choice, live))) == (None, ["A1", "A2", "A3", "B1"])
    assert (mode.credits[A], mode.credits[B]) == (3, 5), "nobody was passed over, and B pays 2 of the 3 it was owed"


def test_repayment_is_at_most_the_credit_owed() -> None:
    credits = Credits(CreditParams(initial=10, starves_above=14, normal_below=12, price=3))
    credits.update_types([A, B, C, None])
    credits.apply({A: -8, B: 6, C: 2}, 1)
    assert credits.repayments(live_of("AABBC-")) == {B: -6, C: -2, A: 8}
    assert credits.repayments(live_of("ABC")) == {B: -3, C: -2, A: 5}
    assert credits.repayments(live_of("BC")) == {}, "nobody among them owes anything"


def test_the_starving_run_merged_if_all_are_of_the_merged_adapter() -> None:
    mode, live = example(), live_of("BAAAA")
    run(mode, live)
    mode.credits.apply({A: 5, B: -5}, 1)
    choice = run(mode, live)
    assert (choice.merged, ids(batch_of(choice, live))) == (A, ["A1", "A2", "A3", "A4"])


def test_requests_of_the_base_model_are_owed_like_any_other() -> None:
    mode, live = example(), live_of("AAA-AA")
    merged = [run(mode, live).merged for _ in range(4)]
    assert merged == [A, A, A, None]


def test_types_running_instead_of_others_pay_in_proportion() -> None:
    live = live_of("ABCAABBB")
    chosen = [request for request in live if request.adapter != C]
    assert credit_transfers(chosen[:4], live[:4]) == {C: 1, A: -1}
    assert credit_transfers(chosen[4:], live[:4]) == {A: 2, B: 1 - 4, C: 1}
    assert credit_transfers(live[:1], live[:4]) == {A: 1 - 3, B: 1, C: 1}
    assert credit_transfers(live[:4], live[:4]) == {}
    assert credit_transfers(live_of("CCCAB")[3:], live_of("CCC")) == {C: 3, A: -1, B: -2}, "whole credits"


def test_what_a_type_was_owed_goes_back_when_its_last_request_leaves() -> None:
    mode, live = example(starves_above=10), live_of(QUEUE)
    for _ in range(3):
        run(mode, live)
    assert (mode.credits[A], mode.credits[B]) == (1, 7)
    run(mode, live_of("AAAAA"))
    assert (mode.credits[A], len(mode.credits)) == (4, 1)


def test_debt_of_a_type_ends_with_its_last_request() -> None:
    mode = example(starves_above=10)
    for _ in range(3):
        run(mode, live_of(QUEUE))
    run(mode, live_of("B"))
    assert (mode.credits[B], len(mode.credits)) == (4, 1)
    mode.choose(live_of("AB"))
    assert mode.credits[A] == 4


def test_request_beside_many_short_lived_types_starves_no_longer() -> None:
    credits = Credits(CreditParams(initial=8, starves_above=10, normal_below=9, turn_ends_below=4))
    for other in (B, C) * 4:
        credits.update_types((A, other))
        credits.apply({A: 5, other: -5}, 1)
        assert A in credits.starving()
        credits.update_types((A,))
        assert credits[A] == 8
        assert A not in credits.starving()


def test_adapter_is_merged_at_once_when_the_previous_one_has_no_requests() -> None:
    mode = DLora(setup_of(max_batch=4))
    assert [run(mode, live_of(types)).merged for types in ("AA", "BB", "AABA")] == [A, B, None]


def test_no_request_starves_with_a_single_adapter() -> None:
    mode = example()
    run(mode, live_of("-B"))
    mode.credits.apply({None: -3, B: 3}, 1)
    assert run(mode, live_of("-B")).merged is None, "B starves, and its turn passes over another"
    assert run(mode, live_of("B")).merged == B


def starving_mode(types: str, lora_s: float, switch_s: float = 0.0) -> DLora:
    """Return a mode that knows how long steps and switches take, and in which B is about to starve beside a hot A."""
    mode = DLora(
        setup_of(max_batch=4),
        tuned=False,
        backfill=True,
        threshold_params=ThresholdParams(alpha=0.4, beta=0.1),
        credit_params=CreditParams(initial=6, starves_above=8, normal_below=7, turn_ends_below=3),
    )
    mode.times.note(8, BatchWork(0, 0, 4, {}), 0.01)
    mode.times.note(8, BatchWork(0, 0, 4, {A: 2, B: 2}), lora_s)
    mode.times.note_switch(True, switch_s)
    live = live_of(types)
    while mode.credits[B] <= 8:
        assert run(mode, live, step_s=0.01).merged == A
    return mode


def test_a_turn_of_a_starving_adapter_is_merged_and_lasts_until_it_owes() -> None:
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
