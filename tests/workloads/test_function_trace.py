from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

from lorikeet.workloads.function_trace import (
    calls_of_minutes,
    log_normal_of_rates,
    map_functions,
    popularity,
    read_function_trace,
    unit_calls,
)
from lorikeet.workloads.workload import OptionError, WorkloadError

HEADER = "HashOwner,HashApp,HashFunction,Trigger,1,2,3\n"


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_the_distribution_of_rates_has_the_printed_shares() -> None:
    """45 % at most one call an hour, 81 % at most one a minute; and it nearly says the third printed figure."""
    mu, sigma = log_normal_of_rates()
    assert (mu, sigma) == (pytest.approx(-3.58, abs=0.01), pytest.approx(4.08, abs=0.01))
    of_log_rate = NormalDist(mu, sigma)
    assert of_log_rate.cdf(np.log(1 / 60)) == pytest.approx(0.45)
    assert of_log_rate.cdf(0) == pytest.approx(0.81)
    share_of_calls = NormalDist(mu + sigma**2, sigma)
    assert 1 - share_of_calls.cdf(0) == pytest.approx(0.996, abs=0.005)


def test_popular_functions_follow_a_power_law_of_exponent_1_2() -> None:
    shares = popularity(100)
    assert shares.sum() == pytest.approx(1)
    assert all(np.diff(shares) < 0)
    slope = np.polyfit(np.log(np.arange(1, 101)), np.log(shares), 1)[0]
    assert slope == pytest.approx(-1.2, abs=0.05)


def test_dealing_functions_out_in_turn_evens_adapters_less_the_larger_the_chunk() -> None:
    spreads = [popularity(8, 1000, chunk).max() for chunk in (1, 10, 100)]
    assert spreads == sorted(spreads)
    assert popularity(8, 1000, 1).min() > 0


def test_functions_are_mapped_in_the_order_of_their_calls() -> None:
    calls = np.array([[1, 0], [5, 5], [3, 0]])
    assert map_functions(calls, 2).tolist() == [[5, 5], [3, 0]]


def test_functions_are_dealt_out_in_chunks() -> None:
    """Chunks of 10 over 3 adapters: functions 0 to 9 to the first, …, 30 to 39 to the first again."""
    calls = np.arange(40, 0, -1)[:, None]
    mapped = map_functions(calls, 3, chunk=10)[:, 0]
    assert mapped.tolist() == [calls[:10].sum() + calls[30:].sum(), calls[10:20].sum(), calls[20:30].sum()]


def test_what_cannot_be_mapped_is_refused() -> None:
    with pytest.raises(OptionError, match="2 functions are fewer than 3 adapters"):
        map_functions(np.ones((2, 1)), 3)
    with pytest.raises(OptionError, match="2 functions are fewer than 3 adapters"):
        popularity(3, functions=2)
    with pytest.raises(OptionError, match="chunk of 0"):
        map_functions(np.ones((2, 1)), 1, chunk=0)


def test_a_day_of_the_public_trace_is_read(tmp_path: Path) -> None:
    file = tmp_path / "invocations_per_function_md.anon.d01.csv"
    file.write_text(HEADER + "o,a,f,http,1,0,2\no,a,g,timer,0,0,7\no,b,h,queue,0,0,0\n")
    assert read_function_trace(file).tolist() == [[1, 0, 2], [0, 0, 7]]
    assert read_function_trace(file, slice(0, 2)).tolist() == [[1, 0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n", "line 1: expected the columns HashOwner"),
        (HEADER + "o,a,f,http,1,0\n", "line 2: expected 3 counts"),
        (HEADER + "o,a,f,http,1,0,x\n", "line 2"),
        (HEADER + "o,a,f,http,1,0,-2\n", "line 2: expected 3 counts"),
        (HEADER, "has no calls"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(WorkloadError, match=message):
        read_function_trace(tmp_path / "t.csv")


def test_calls_lie_in_their_minutes() -> None:
    calls = calls_of_minutes(np.array([[2, 0, 1], [0, 3, 0]]), generator())
    assert [call.at_s for call in calls] == sorted(call.at_s for call in calls)
    assert sorted((call.adapter, int(call.at_s // 60)) for call in calls) == [(0, 0), (0, 0), (0, 2)] + [(1, 1)] * 3


def test_independent_calls_have_their_shares_and_a_rate_of_one() -> None:
    calls = unit_calls([0.7, 0.2, 0.1], 1.0, generator(), count=20_000)
    assert [calls[i].at_s <= calls[i + 1].at_s for i in range(len(calls) - 1)].count(False) == 0
    assert calls[-1].at_s == pytest.approx(20_000, rel=0.05)
    counts = np.bincount([call.adapter for call in calls]) / len(calls)
    assert counts == pytest.approx([0.7, 0.2, 0.1], abs=0.02)


def test_gaps_of_an_adapter_have_the_variation() -> None:
    times = np.array([call.at_s for call in unit_calls([1.0], 3.0, generator(), count=50_000)])
    assert np.diff(times).std() / np.diff(times).mean() == pytest.approx(3, rel=0.05)


def test_adapters_do_not_burst_together_at_the_start() -> None:
    """The number of calls in the first hundredth of the time is as in any other, on average over many adapters."""
    calls = unit_calls([0.001] * 1000, 4.0, generator(), until=2000)
    first = sum(call.at_s < 200 for call in calls)
    assert first == pytest.approx(200, rel=0.5)


def test_another_adapter_leaves_the_first_ones_calls_as_they_are() -> None:
    one, two = (unit_calls([0.5] * adapters, 1.0, generator(), until=50) for adapters in (1, 2))
    assert one == [call for call in two if call.adapter == 0]
