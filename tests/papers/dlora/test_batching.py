"""dLoRA's algorithms: the worked examples of the spec, one test each."""

from collections.abc import Sequence
from math import inf

import pytest

from lorikeet.core.ids import AdapterDigest
from lorikeet.costs.iteration_costs import IterationCosts
from lorikeet.papers.dlora.batching import DLora
from lorikeet.papers.dlora.credits import Credits, credit_transfers
from lorikeet.papers.dlora.dynamic import Decision, decide
from lorikeet.papers.dlora.one_adapter import OneAdapter
from lorikeet.papers.dlora.thresholds import Iteration, ThresholdParams, Thresholds
from lorikeet.scheduling.batching.mode import LiveRequest, Unmerged
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

    def merged_s(self, batch: Sequence[LiveRequest]) -> float:
        return 50.0

    def unmerged_s(self, batch: Sequence[LiveRequest]) -> float:
        return 100.0

    def switch_s(self, to_merged: bool) -> float:
        return 100.0


def after(
    iterations: int, merged: AdapterDigest | None, sizes: tuple[int, int], alpha: float = 0.8, beta: float = 0.65
) -> Thresholds:
    """Return the thresholds after a period in which so many requests would run merged, or unmerged, each time."""
    thresholds = Thresholds(FixedTimes(), ThresholdParams(alpha, beta, period_iterations=iterations))
    thresholds.start_iteration(merged, A)
    thresholds.note(Iteration(sizes[0], 50.0, sizes[1], 100.0), iterations)
    return thresholds


@pytest.mark.parametrize(("iterations", "alpha"), [(3, 0.85), (2, 0.99), (1, 0.99)])
def test_ex_4b_alpha_falls_where_merging_would_have_served_more(iterations: int, alpha: float) -> None:
    assert after(iterations, None, (4, 4), alpha=0.9).alpha == pytest.approx(alpha)


@pytest.mark.parametrize(("size", "beta"), [(1, 0.55), (4, 0.5 / 1.1)])
def test_ex_4c_beta_rises_where_unmerging_would_have_served_more(size: int, beta: float) -> None:
    assert after(3, A, (size, 4), beta=0.5).beta == pytest.approx(beta)


def test_thresholds_stay_within_their_limits() -> None:
    low = after(3, None, (4, 4), alpha=0.22, beta=0.17)
    assert (low.alpha, low.beta) == pytest.approx((0.2, 0.15))
    assert after(1, None, (4, 4), alpha=1.9).alpha == pytest.approx(2.0)
    assert after(3, A, (1, 4), alpha=0.7, beta=0.65).beta == pytest.approx(0.65), "below alpha by the gap"
    assert after(3, A, (4, 4), beta=0.052).beta == pytest.approx(0.05)


def test_period_ends_with_a_switch_a_new_candidate_or_its_longest_time() -> None:
    thresholds = Thresholds(FixedTimes(), ThresholdParams(alpha=0.9))

    def note(merged: AdapterDigest | None, candidate: AdapterDigest, iterations: int) -> float:
        thresholds.start_iteration(merged, candidate)
        thresholds.note(Iteration(4, 50.0, 4, 100.0), iterations)
        return thresholds.alpha

    assert note(None, A, 3) == pytest.approx(0.9)
    assert note(None, A, 3) == pytest.approx(0.9), "the same period goes on"
    assert note(None, B, 1) == pytest.approx(0.85), "another candidate: six iterations of A were worth a switch"
    assert note(B, B, 3) == pytest.approx(0.935), "a switch: one iteration of B was not"
    assert thresholds.iterations_left == 29
    beta = thresholds.beta
    assert note(B, B, 29) == pytest.approx(0.935)
    assert thresholds.beta == pytest.approx(beta / 1.1), "the longest period"
    assert thresholds.iterations_left == 32


COSTS = IterationCosts(
    requests_s=((1, 0.01), (4, 0.013)),
    context_token_s=1e-5,
    lora_s=0.004,
    lora_row_s=1e-4,
    lora_work_s=1e-6,
    lora_adapter_s=1e-3,
    merge_s=0.006,
    unmerge_s=0.005,
)


def test_iterations_take_as_long_as_the_profile_says() -> None:
    times = DLora(setup_of()._replace(iterations=COSTS)).times
    assert times.is_known
    live = live_of("AAB-", tokens=100)
    assert times.merged_s(live) == pytest.approx(0.013 + 400e-5)
    assert times.unmerged_s(live) == pytest.approx(0.017 + 0.004 + 3e-4 + 3 * 8e-6 + 2e-3)
    assert times.unmerged_s(live[3:]) == pytest.approx(0.01 + 100e-5), "the base model alone"
    assert (times.switch_s(to_merged=True), times.switch_s(to_merged=False)) == (0.006, 0.005)


def test_thresholds_stay_until_the_times_of_both_states_are_measured() -> None:
    mode, live = DLora(setup_of()), live_of("AAB")
    for _ in range(40):
        run(mode, live)
    assert (mode.thresholds.alpha, mode.thresholds.beta) == (0.8, 0.65), "there was no merged iteration"


# --- Algorithm 3 -------------------------------------------------------------------------------------

QUEUE = "AAABAA"


def example(patience: float = 2) -> DLora:
    """Return the examples' mode: T_starve is two credits above the initial ones."""
    mode = DLora(setup_of(max_batch=4), tuned=False, patience=patience)
    mode.thresholds.alpha, mode.thresholds.beta = 0.5, 0.1
    return mode


def test_ex_5_skipped_request_earns_credit_until_it_comes_first() -> None:
    mode, live = example(), live_of(QUEUE)
    initial, seen = mode.credits[C], []
    for _ in range(5):
        choice = run(mode, live)
        credits = mode.credits[A] - initial, mode.credits[B] - initial
        seen.append((choice.merged, ids(batch_of(choice, live)), *credits))
    hot = ["A1", "A2", "A3", "A4"]
    assert seen == [(A, hot, -1, 1), (A, hot, -2, 2), (A, hot, -3, 3), (None, ["B1"], 0, 0), (A, hot, -1, 1)]


def test_ex_5b_an_adapter_without_credit_is_not_merged() -> None:
    mode, live = example(patience=10), live_of(QUEUE)
    initial = mode.credits[A]
    mode.credits.apply({A: -int(initial)}, 1)
    choice = run(mode, live)
    assert (choice.merged, ids(batch_of(choice, live))) == (None, ["A1", "A2", "A3", "B1"])
    assert (mode.credits[A], mode.credits[B]) == (0, initial), "nobody was passed over"


def test_ex_5b_merged_adapter_out_of_credit_is_unmerged() -> None:
    mode, live = example(patience=10), live_of(QUEUE)
    mode.credits.apply({A: 2 - int(mode.credits[A])}, 1)
    assert [run(mode, live).merged for _ in range(3)] == [A, A, None]
    assert mode.credits[A] == 0


def test_between_two_merged_adapters_is_an_unmerged_iteration() -> None:
    mode = DLora(setup_of(max_batch=4))
    assert [run(mode, live_of(types)).merged for types in ("AA", "BB", "BB")] == [A, None, B]


def test_starving_requests_run_merged_if_all_use_the_merged_adapter() -> None:
    mode, live = example(), live_of("BAAAA")
    run(mode, live)
    mode.credits.apply({A: 5, B: -5}, 1)
    choice = run(mode, live)
    assert (choice.merged, ids(batch_of(choice, live))) == (A, ["A1", "A2", "A3", "A4"])


def test_requests_of_the_base_model_are_owed_like_any_other() -> None:
    mode, live = example(), live_of("AAA-AA")
    assert [run(mode, live).merged for _ in range(4)] == [A, A, A, None]


def test_an_adapter_can_pay_until_all_others_starve() -> None:
    credits = Credits(lambda: 3, patience=8, max_batch=4)
    assert credits[A] == 24
    credits.apply({A: -18, B: 9, C: 9}, 1)
    assert credits.starving((A, B, C)) == {B, C}
    assert credits[A] >= 4, "what a merged iteration costs at most"


def test_without_patience_for_an_end_no_type_starves() -> None:
    mode, live = example(patience=inf), live_of(QUEUE)
    assert {run(mode, live).merged for _ in range(100)} == {A}
    assert mode.steps_until_review() == inf


def test_types_running_instead_of_others_pay_in_proportion() -> None:
    live = live_of("ABCAABBB")
    chosen = [request for request in live if request.adapter != C]
    assert credit_transfers(chosen[:4], live[:4]) == {C: 1, A: -1}
    assert credit_transfers(chosen[4:], live[:4]) == {A: 2, B: 1 - 4, C: 1}
    assert credit_transfers(live[:1], live[:4]) == {A: 1 - 3, B: 1, C: 1}
    assert credit_transfers(live[:4], live[:4]) == {}
    assert credit_transfers(live_of("CCCAB")[3:], live_of("CCC")) == {C: 3, A: -1, B: -2}, "whole credits"
