"""Estimates of demand from arrivals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.cluster.placement.demand import DemandEstimator, certainty, expected, extrapolate
from tests.support.placement import digest

A, B = digest("a"), digest("b")


def estimator_of(now: float = 0.0) -> DemandEstimator:
    estimator = DemandEstimator(now)
    estimator.register(A, 8, 16)
    estimator.register(B, 128, 256)
    return estimator


def tokens_per_s(estimator: DemandEstimator) -> list[float]:
    return [demand.tokens_per_s for demand in estimator.demands(0.0)]


@pytest.mark.parametrize(
    ("history", "ahead"),
    [
        ([100, 120, 140], 160),
        ([300, 200, 50], 0),  # the line says -66.7
        ([0, 0, 0, 0, 1000], 800),
        ([50, 150, 100, 200, 150], 205),
        ([70], 70),
        ([9999, 50, 150, 100, 200, 150], 205),  # only the last five count
        ([1, 100, 1], 34),
        ([0, 100], 200),
        ([0, 0, 100], 133 + 1 / 3),
        ([0, 0], 0),
    ],
)
def test_demand_extrapolation_table(history: list[float], ahead: float) -> None:
    assert extrapolate(history) == pytest.approx(ahead)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9))
def test_extrapolation_stays_between_nothing_and_twice_the_largest(history: list[float]) -> None:
    assert 0 <= extrapolate(history) <= 2 * max(history[-5:]) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("history", "sure", "ahead"),
    [
        ([100, 120, 140], 1.0, 160),  # on a line
        ([0, 0, 0, 0, 1000], 2 / 3, 600),  # error 115 of a slope of 200
        ([50, 150, 100, 200, 150], 0.64, 178),  # error 15 of 25
        ([100, 120], 0.0, 110),  # any two are on a line
        ([1, 100, 1], 0.0, 34),  # no slope
        ([90, 110, 90, 110, 90], 0.0, 98),
        ([300, 200, 50], 1 - (125 / 3) / 3125, 183 + 1 / 3 - (1 - (125 / 3) / 3125) * (183 + 1 / 3)),  # the line: 0
        ([70], 0.0, 70),
        ([], 0.0, 0),
        ([0, 0, 0], 0.0, 0),
    ],
)
def test_forecast_follows_the_trend_as_far_as_it_is_certain(history: list[float], sure: float, ahead: float) -> None:
    assert certainty(history) == pytest.approx(sure)
    assert expected(history) == pytest.approx(ahead)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9))
def test_forecast_lies_between_mean_and_trend(history: list[float]) -> None:
    low, high = sorted((sum(history[-5:]) / len(history[-5:]), extrapolate(history)))
    assert low * (1 - 1e-9) - 1e-6 <= expected(history) <= high * (1 + 1e-9) + 1e-6


def test_adapters_are_scaled_to_their_ranks_forecast() -> None:
    """One has ever more, the other as much less: together they have no trend, and each has the part that it had."""
    estimator = estimator_of()
    estimator.register(digest("c"), 8, 16)
    for period, (first, second) in enumerate(((10, 50), (20, 40), (30, 30)), start=1):
        estimator.arrived(A, first)
        estimator.arrived(digest("c"), second)
        estimator.close(float(period))
    assert tokens_per_s(estimator) == pytest.approx([20, 0, 40])
    for period in range(4, 9):
        estimator.arrived(A, 10 * period)
        estimator.close(float(period))
    assert tokens_per_s(estimator) == pytest.approx([90, 0, 0]), "the other has not been heard of for five periods"


def test_an_adapter_that_comes_to_a_rank_counts_from_its_first_period() -> None:
    estimator = estimator_of()
    for period in (1.0, 2.0):
        estimator.arrived(A, 10)
        estimator.close(period)
    estimator.register(digest("late"), 8, 16)
    estimator.arrived(A, 10)
    estimator.arrived(digest("late"), 30)
    estimator.close(3.0)
    assert tokens_per_s(estimator) == [10.0, 0.0, 30.0], "it is no trend of its rank"


def test_trend_ignores_time_before_the_first_request() -> None:
    estimator = estimator_of()
    for period in (1.0, 2.0, 3.0):
        estimator.close(period)
        assert tokens_per_s(estimator) == [0.0, 0.0]
    estimator.arrived(A, 10)
    estimator.close(4.0)
    assert tokens_per_s(estimator) == [10.0, 0.0]
    estimator.close(5.0)
    assert tokens_per_s(estimator) == [5.0, 0.0], "later silence is"


def test_the_first_period_with_requests_is_known_before_it_has_ended() -> None:
    estimator = estimator_of()
    estimator.close(10.0)
    estimator.arrived(A, 30)
    assert [demand.tokens_per_s for demand in estimator.demands(12.0)] == [15.0, 0.0]
    estimator.finished(A, 20)
    assert [demand.tokens_per_s for demand in estimator.demands(12.0)] == [25.0, 0.0]
    estimator.close(20.0)
    estimator.arrived(B, 1000)
    assert [demand.tokens_per_s for demand in estimator.demands(22.0)] == [5.0, 0.0], "later ones are not"


def test_the_slope_of_next_to_nothing_is_none() -> None:
    assert certainty([0.0, 0.0, 1e-200]) == 0.0


def test_nothing_cannot_be_extrapolated() -> None:
    with pytest.raises(ValueError, match="Nothing"):
        extrapolate([])


def test_adapters_have_equal_demand_before_the_first_request() -> None:
    estimator = estimator_of()
    assert tokens_per_s(estimator) == [1.0, 1.0]
    alike = estimator.demands(0.0)
    assert [(each.adapter, each.rank, each.size_bytes) for each in alike] == [(A, 8, 16), (B, 128, 256)]


def test_demand_is_arrived_tokens_over_elapsed_time() -> None:
    estimator = estimator_of(now=100.0)
    estimator.arrived(A, 300)
    estimator.arrived(A, 100)
    estimator.close(110.0)
    assert tokens_per_s(estimator) == [40.0, 0.0]
    estimator.arrived(B, 100)
    estimator.close(115.0)
    assert tokens_per_s(estimator) == [20.0, 10.0]  # means of 40 and 0, and of 0 and 20


def test_answers_count_with_the_clusters_mean_until_an_adapter_has_its_own() -> None:
    estimator = estimator_of()
    for _ in range(4):
        estimator.finished(A, 50)
    estimator.finished(B, 100)
    estimator.arrived(A, 10)
    estimator.arrived(B, 10)
    estimator.close(1.0)
    assert tokens_per_s(estimator) == pytest.approx([70, 70])  # 10 and the mean of 50, 50, 50, 50, 100


def test_an_adapters_own_mean_forgets() -> None:
    estimator = estimator_of()
    for output_tokens in (50, 50, 50, 50, 100):
        estimator.finished(A, output_tokens)
    estimator.arrived(A, 10)
    estimator.close(1.0)
    assert tokens_per_s(estimator)[0] == pytest.approx(10 + 0.8 * 50 + 0.2 * 100)


def test_later_adapter_has_no_demand_until_its_first_period_ends() -> None:
    estimator = estimator_of()
    estimator.arrived(A, 10)
    estimator.close(1.0)
    estimator.register(digest("late"), 8, 16)
    assert tokens_per_s(estimator) == [10, 0, 0]
    estimator.drop(B)
    estimator.finished(B, 5)  # its last answer
    assert [demand.adapter for demand in estimator.demands(0.0)] == [A, "late"]


def test_knowing_an_adapter_twice_changes_nothing() -> None:
    estimator = estimator_of()
    estimator.arrived(A, 10)
    estimator.register(A, 8, 16)
    estimator.close(1.0)
    assert tokens_per_s(estimator)[0] == 10


def test_arrivals_of_an_interrupted_period_are_forgotten() -> None:
    before, after = estimator_of(), estimator_of()
    before.arrived(A, 10)
    before.close(1.0)
    before.arrived(A, 1000)
    after.resume(before.state(), 100.0)
    after.arrived(A, 20)
    after.close(101.0)
    assert tokens_per_s(after)[0] == 15.0


def test_a_period_takes_time() -> None:
    with pytest.raises(ValueError, match="period"):
        estimator_of(now=5.0).close(5.0)
