import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.bench.arrivals import Rates
from lorikeet.bench.workload import OptionError

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
