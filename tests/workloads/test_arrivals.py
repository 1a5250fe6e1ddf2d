import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.workloads.arrivals import ARRIVALS, Rates, arrival_times, arrivals_until, at_rate
from lorikeet.workloads.conversations import scale_blocks, scale_lengths, scaled_block_tokens
from lorikeet.workloads.workload import OptionError, Range, WorkloadRequest


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(st.sampled_from(ARRIVALS), st.integers(0, 50), st.floats(0.01, 1000), st.floats(0.2, 4), st.integers(0, 9))
def test_arrivals_are_as_many_as_asked_in_order_and_the_same_for_a_seed(
    kind: str, count: int, rate: float, variation: float, seed: int
) -> None:
    times_s = arrival_times(kind, count, Rates.constant(rate), generator(seed), variation)
    assert len(times_s) == count
    assert times_s == sorted(times_s)
    assert all(time_s >= 0 for time_s in times_s)
    assert times_s == arrival_times(kind, count, Rates.constant(rate), generator(seed), variation)


def test_uniform_arrivals_have_equal_gaps() -> None:
    assert arrival_times("uniform", 4, Rates.constant(2), generator()) == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize(("kind", "variation"), [("poisson", 1.0), ("gamma", 2.0), ("gamma", 0.5)])
def test_random_gaps_have_their_mean_and_variation(kind: str, variation: float) -> None:
    gaps_s = np.diff(arrival_times(kind, 50_000, Rates.constant(5), generator(), variation))
    assert gaps_s.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(variation, rel=0.05)


def test_arrivals_follow_a_rate_that_rises() -> None:
    times_s = np.array(arrivals_until("poisson", 100, Rates.parse("0:0,100:200"), generator()))
    assert times_s.max() < 100
    assert len(times_s) == pytest.approx(10_000, rel=0.05)
    assert (times_s < 50).mean() == pytest.approx(0.25, abs=0.02)


def test_arrivals_of_a_duration_are_those_of_a_count_that_come_before() -> None:
    assert arrivals_until("uniform", 2.1, Rates.constant(2), generator()) == [0.5, 1.0, 1.5, 2.0]
    with pytest.raises(OptionError, match="'now' have no duration"):
        arrivals_until("now", 1, Rates.constant(1), generator())


@pytest.mark.parametrize(("kind", "variation"), [("often", 1), ("gamma", 0)])
def test_arrivals_without_a_meaning_are_refused(kind: str, variation: float) -> None:
    with pytest.raises(OptionError):
        arrival_times(kind, 3, Rates.constant(1), generator(), variation)


def test_a_range_includes_both_ends() -> None:
    assert set(Range.parse("2-4").draw(200, generator())) == {2, 3, 4}
    assert Range.parse("7").draw(3, generator()) == [7, 7, 7]


@pytest.mark.parametrize("text", ["", "x", "4-2", "-3", "1-2-3"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="64-256"):
        Range.parse(text)


@given(st.lists(st.floats(0, 1000), min_size=2, max_size=20), st.floats(0.1, 100))
def test_a_workload_at_another_rate_keeps_its_shape(times_s: list[float], rate: float) -> None:
    requests = [WorkloadRequest(time_s, None, 1, 1) for time_s in times_s]
    span_s = max(times_s) - min(times_s)
    if span_s < 1e-6:
        return
    scaled_s = [request.arrival_s for request in at_rate(requests, Rates.constant(rate))]
    assert max(scaled_s) == pytest.approx((len(times_s) - 1) / rate)
    wanted_s = [(time_s - min(times_s)) / span_s * max(scaled_s) for time_s in times_s]
    assert scaled_s == pytest.approx(wanted_s, abs=1e-6)


def test_a_workload_that_arrives_at_once_cannot_be_given_a_rate() -> None:
    assert at_rate([], Rates.constant(1)) == []
    with pytest.raises(OptionError, match="at the same time"):
        at_rate([WorkloadRequest(3.0, None, 1, 1)] * 2, Rates.constant(1))


def test_scaled_lengths_are_at_least_one_token() -> None:
    (scaled,) = scale_lengths([WorkloadRequest(0.0, "a", 1000, 3)], 0.1)
    assert scaled == WorkloadRequest(0.0, "a", 100, 1)


def test_the_first_request_of_mooncakes_trace_keeps_its_fourteen_blocks() -> None:
    (scaled,) = scale_blocks([WorkloadRequest(0.0, None, 6758, 500, tuple(range(14)))], 1 / 16, 512)
    assert (scaled.input_tokens, scaled.output_tokens) == (13 * 32 + 6, 31)


@given(st.integers(1, 20_000), st.sampled_from([1 / 256, 1 / 16, 1 / 8, 0.5, 1.0, 2.0]))
def test_scaling_keeps_full_blocks_full_and_begun_blocks_begun(tokens: int, factor: float) -> None:
    (scaled,) = scale_blocks([WorkloadRequest(0.0, None, tokens, 1)], factor, 512)
    block_size = scaled_block_tokens(512, factor)
    assert scaled.input_tokens // block_size == tokens // 512
    assert -(-scaled.input_tokens // block_size) == -(-tokens // 512)


@pytest.mark.parametrize("factor", [1 / 3, 1 / 512, 0.1])
def test_a_scale_that_cuts_blocks_is_refused(factor: float) -> None:
    with pytest.raises(OptionError, match="length scale of 0"):
        scale_blocks([], factor, 512)


# ---  -------------------------------------------------------------------------------------------

POINTS = st.lists(st.tuples(st.floats(0.1, 100), st.floats(0, 50)), max_size=5)


def test_a_rate_is_a_number_or_points_joined_by_lines() -> None:
    assert Rates.parse("4") == Rates.constant(4) == Rates((0.0,), (4.0,))
    assert Rates.parse("0:2,400:2,900:8") == Rates((0.0, 400.0, 900.0), (2.0, 2.0, 8.0))


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "nan", "inf", "0:1,5", "1:2", "0:1,0:2", "0:-1,5:1", "0:1,5:0"])
def test_a_rate_without_a_meaning_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="rate"):
        Rates.parse(text)


def test_the_area_under_a_rising_rate_is_that_of_a_trapezium() -> None:
    """2 per second for 400 s, then on average 5 for 500 s, then 8."""
    rates = Rates.parse("0:2,400:2,900:8")
    assert [rates.expected(until_s) for until_s in (400, 650, 900, 1000)] == [800, 800 + 875, 3300, 4100]
    assert rates.stretch(np.array([800, 1675, 3300, 4100])).tolist() == pytest.approx([400, 650, 900, 1000])


def test_nothing_arrives_while_the_rate_is_zero() -> None:
    rates = Rates.parse("0:1,10:1,10.5:0,20:0,20.5:1")
    assert rates.stretch(np.array([10.25, 10.251]))[0] == pytest.approx(10.5)
    assert rates.stretch(np.array([10.251]))[0] > 20


@given(POINTS, st.floats(0.1, 50), st.lists(st.floats(0, 1000), min_size=1, max_size=9))
def test_stretching_undoes_the_area(points: list[tuple[float, float]], last: float, units: list[float]) -> None:
    times_s = tuple(np.cumsum([0.0, *(length_s for length_s, _ in points)]).tolist())
    rates = Rates(times_s, (*(rate for _, rate in points), last))
    stretched_s = rates.stretch(np.array(units))
    assert [rates.expected(at_s) for at_s in stretched_s.tolist()] == pytest.approx(units, rel=1e-6, abs=1e-6)
    assert stretched_s[np.argsort(units)].tolist() == sorted(stretched_s.tolist())
