from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.bench.peak import find_peak, probe_requests
from lorikeet.core.request import Slo


def knee(at: float, seen: list[float] | None = None) -> Callable[[float], float]:
    """A server that meets the SLO up to a rate."""

    def probe(rate: float) -> float:
        if seen is not None:
            seen.append(rate)
        return 1.0 if rate <= at else 0.3

    return probe


def test_the_search_doubles_and_then_takes_geometric_means() -> None:
    seen: list[float] = []
    peak = find_peak(knee(5.0, seen), 0.9, start=1.0, precision=0.2)
    assert seen == pytest.approx([1, 2, 4, 8, 32**0.5, (4 * 32**0.5) ** 0.5])
    assert peak.rate == pytest.approx(4.757, abs=1e-3)
    assert peak.missed_rate == pytest.approx(5.657, abs=1e-3)
    assert [probe.rate for probe in peak.probes] == seen


@given(st.floats(0.05, 5000), st.floats(0.05, 5000), st.floats(0.02, 0.5))
def test_the_peak_lies_within_the_precision_of_the_knee(at: float, start: float, precision: float) -> None:
    peak = find_peak(knee(at), 0.9, start, precision=precision, max_probes=60)
    assert peak.rate is not None
    assert peak.missed_rate is not None
    assert peak.rate <= at < peak.missed_rate <= peak.rate * (1 + precision) * (1 + 1e-9)


def test_a_server_that_never_meets_the_slo_has_no_peak() -> None:
    peak = find_peak(lambda rate: 0.0, 0.9, start=1.0, lowest=0.2)
    assert (peak.rate, peak.missed_rate) == (None, 0.25)
    assert [probe.rate for probe in peak.probes] == [1.0, 0.5, 0.25]


def test_a_server_that_always_meets_it_ends_the_search_by_its_number_of_probes() -> None:
    peak = find_peak(lambda rate: 1.0, 0.9, start=1.0, max_probes=4)
    assert (peak.rate, peak.missed_rate, len(peak.probes)) == (8.0, None, 4)


def test_nothing_is_tried_beyond_the_bounds() -> None:
    assert [probe.rate for probe in find_peak(knee(9.0), 0.9, start=1.0, highest=5.0).probes] == [1.0, 2.0, 4.0]
    assert find_peak(knee(9.0), 0.9, start=1.0, highest=5.0).missed_rate is None
    assert find_peak(knee(3.0), 0.9, start=1.0, highest=5.0) == find_peak(knee(3.0), 0.9, start=1.0)


def test_reaching_the_target_exactly_is_meeting_it() -> None:
    assert find_peak(lambda rate: 0.9, 0.9, start=1.0, max_probes=1).rate == 1.0


@pytest.mark.parametrize(
    ("rate", "slo", "requests"),
    [
        (5.0, Slo(ttft_s=2.0), 100),  # ten limits of two seconds
        (50.0, Slo(ttft_s=2.0), 1000),
        (50.0, Slo(ttft_s=2.0, e2e_s=3.0), 1500),
        (5000.0, Slo(ttft_s=2.0), 2000),  # the most
        (50.0, Slo(tpot_s=0.1), 100),
    ],
)
def test_a_probe_is_long_beside_the_limit(rate: float, slo: Slo, requests: int) -> None:
    assert probe_requests(rate, slo, 100, 10.0) == requests
