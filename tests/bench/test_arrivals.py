import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.bench.arrivals import (
    ARRIVALS,
    ChoiceError,
    Range,
    arrival_times,
    at_rate,
    choose_adapters,
    scale_lengths,
)
from lorikeet.bench.workload import WorkloadRequest


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(st.sampled_from(ARRIVALS), st.integers(0, 50), st.floats(0.01, 1000), st.floats(0.05, 20), st.integers(0, 9))
def test_arrivals_are_as_many_as_asked_in_order_and_the_same_for_a_seed(
    kind: str, count: int, rate: float, burstiness: float, seed: int
) -> None:
    times_s = arrival_times(kind, count, rate, generator(seed), burstiness)
    assert len(times_s) == count
    assert times_s == sorted(times_s)
    assert all(time_s >= 0 for time_s in times_s)
    assert times_s == arrival_times(kind, count, rate, generator(seed), burstiness)


def test_uniform_arrivals_have_equal_gaps() -> None:
    assert arrival_times("uniform", 4, 2.0, generator()) == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize(
    ("kind", "burstiness", "variation"), [("poisson", 1.0, 1.0), ("bursty", 0.25, 2.0), ("bursty", 4.0, 0.5)]
)
def test_random_gaps_have_their_mean_and_variation(kind: str, burstiness: float, variation: float) -> None:
    """The coefficient of variation of gamma gaps is 1 / sqrt(shape)."""
    gaps_s = np.diff(arrival_times(kind, 50_000, 5.0, generator(), burstiness))
    assert gaps_s.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(variation, rel=0.05)


@pytest.mark.parametrize(("kind", "rate", "burstiness"), [("often", 1, 1), ("poisson", 0, 1), ("bursty", 1, 0)])
def test_arrivals_without_a_meaning_are_refused(kind: str, rate: float, burstiness: float) -> None:
    with pytest.raises(ChoiceError):
        arrival_times(kind, 3, rate, generator(), burstiness)


def test_adapters_in_turn_and_each_once() -> None:
    assert choose_adapters("round-robin", "ab", 5, generator()) == ["a", "b", "a", "b", "a"]
    assert choose_adapters("distinct", "abc", 2, generator()) == ["a", "b"]
    with pytest.raises(ChoiceError, match="3 requests cannot have distinct adapters: there are 2"):
        choose_adapters("distinct", "ab", 3, generator())


@pytest.mark.parametrize(
    ("rule", "shares"), [("uniform", [1 / 3] * 3), ("zipf:1", [6 / 11, 3 / 11, 2 / 11]), ("zipf:0", [1 / 3] * 3)]
)
def test_random_adapters_have_their_shares(rule: str, shares: list[float]) -> None:
    chosen = choose_adapters(rule, "abc", 30_000, generator())
    assert [chosen.count(name) / len(chosen) for name in "abc"] == pytest.approx(shares, abs=0.01)


@pytest.mark.parametrize("rule", ["zipf", "zipf:x", "uniform:2", "favourite"])
def test_an_unknown_choice_of_adapters_is_refused(rule: str) -> None:
    with pytest.raises(ChoiceError):
        choose_adapters(rule, "abc", 3, generator())


def test_a_range_includes_both_ends() -> None:
    assert set(Range.parse("2-4").draw(200, generator())) == {2, 3, 4}
    assert Range.parse("7").draw(3, generator()) == [7, 7, 7]


@pytest.mark.parametrize("text", ["", "x", "4-2", "-3", "1-2-3"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ChoiceError, match="64-256"):
        Range.parse(text)


@given(st.lists(st.floats(0, 1000), min_size=2, max_size=20), st.floats(0.1, 100))
def test_a_workload_at_another_rate_keeps_its_shape(times_s: list[float], rate: float) -> None:
    requests = [WorkloadRequest(time_s, None, 1, 1) for time_s in times_s]
    span_s = max(times_s) - min(times_s)
    if span_s < 1e-6:
        return
    scaled_s = [request.arrival_s for request in at_rate(requests, rate)]
    assert max(scaled_s) == pytest.approx((len(times_s) - 1) / rate)
    wanted_s = [(time_s - min(times_s)) / span_s * max(scaled_s) for time_s in times_s]
    assert scaled_s == pytest.approx(wanted_s, abs=1e-6)


def test_a_workload_that_arrives_at_once_cannot_be_given_a_rate() -> None:
    assert at_rate([], 1.0) == []
    with pytest.raises(ChoiceError, match="all at once"):
        at_rate([WorkloadRequest(3.0, None, 1, 1)] * 2, 1.0)


def test_scaled_lengths_are_at_least_one_token() -> None:
    (scaled,) = scale_lengths([WorkloadRequest(0.0, "a", 1000, 3)], 0.1)
    assert scaled == WorkloadRequest(0.0, "a", 100, 1)
