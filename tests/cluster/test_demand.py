"""Demand from arrivals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.cluster.demand import DemandEstimator, extrapolate
from tests.support.placement import digest

A, B = digest("a"), digest("b")


def estimator_of(now: float = 0.0) -> DemandEstimator:
    estimator = DemandEstimator(now)
    estimator.know(A, 8, 16)
    estimator.know(B, 128, 256)
    return estimator


def tokens_per_s(estimator: DemandEstimator) -> list[float]:
    return [demand.tokens_per_s for demand in estimator.demands()]


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


def test_nothing_cannot_be_extrapolated() -> None:
    with pytest.raises(ValueError, match="Nothing"):
        extrapolate([])


def test_before_the_first_period_has_ended_all_are_alike() -> None:
    estimator = estimator_of()
    estimator.arrived(A, 100)
    assert tokens_per_s(estimator) == [1.0, 1.0]
    assert [(each.adapter, each.rank, each.size_bytes) for each in estimator.demands()] == [(A, 8, 16), (B, 128, 256)]


def test_prompts_count_when_they_arrive_over_the_time_that_has_passed() -> None:
    estimator = estimator_of(now=100.0)
    estimator.arrived(A, 300)
    estimator.arrived(A, 100)
    estimator.close(110.0)
    assert tokens_per_s(estimator) == [40.0, 0.0]
    estimator.arrived(B, 100)
    estimator.close(115.0)
    assert tokens_per_s(estimator) == [0.0, 40.0]  # a line through 40 and 0, and one through 0 and 20


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


def test_an_adapter_that_comes_later_has_no_demand_before_its_first_period_has_ended() -> None:
    estimator = estimator_of()
    estimator.arrived(A, 10)
    estimator.close(1.0)
    estimator.know(digest("late"), 8, 16)
    assert tokens_per_s(estimator) == [10, 0, 0]
    estimator.drop(B)
    estimator.finished(B, 5)  # its last answer
    assert [demand.adapter for demand in estimator.demands()] == [A, "late"]


def test_knowing_an_adapter_twice_changes_nothing() -> None:
    estimator = estimator_of()
    estimator.arrived(A, 10)
    estimator.know(A, 8, 16)
    estimator.close(1.0)
    assert tokens_per_s(estimator)[0] == 10


def test_a_period_takes_time() -> None:
    with pytest.raises(ValueError, match="period"):
        estimator_of(now=5.0).close(5.0)
