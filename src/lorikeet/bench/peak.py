"""Searches the peak load, the highest request rate that still meets the SLO."""

from collections.abc import Callable
from math import ceil, inf
from typing import NamedTuple

from lorikeet.core.request import Slo

LEAST_PROBE_REQUESTS = 10
"""Smallest number of requests in a probe. Fewer requests are too few to judge."""
_PROBE_LIMITS = 10.0
"""Length of a probe in multiples of the limit on delays."""
_MOST_TIMES = 20
"""Largest number of requests in a probe, as a multiple of the smallest, because an SLO may be so loose that no load
breaks it."""


class Probe(NamedTuple):
    """Holds a measurement: the offered requests per second, and the share of requests that met the SLO."""

    rate: float
    attainment: float


class Peak(NamedTuple):
    """Holds the result of a search.

    Attributes:
        rate: highest rate that met the target; None if no rate did.
        missed_rate: lowest rate that missed the target; None if no rate did.
        probes: all measurements, in order.
    """

    rate: float | None
    missed_rate: float | None
    probes: tuple[Probe, ...]


def min_probe_s(slo: Slo, limits: float = _PROBE_LIMITS) -> float:
    """Return the seconds that a probe needs to show whether a rate can be sustained; 0 without limits on delays.

    An overload delays requests by the excess share of the probe. So in a probe that is not much longer than the limit
    on a delay (TTFT or E2E), no request misses the limit.

    Args:
        slo: the limits, at least one of them on a delay.
        limits: length of the probe in multiples of the longest limit.
    """
    return limits * max(slo.ttft_s or 0.0, slo.e2e_s or 0.0)


def probe_requests(rate: float, slo: Slo, fewest: int, limits: float = _PROBE_LIMITS) -> int:
    """Return the number of requests that a probe of a search needs.

    Args:
        rate: requests per second.
        slo, limits: see :func:`min_probe_s`.
        fewest: smallest number of requests in a probe. No probe has more than 20 times this number.
    """
    return min(max(fewest, ceil(rate * min_probe_s(slo, limits))), _MOST_TIMES * fewest)


def find_peak(
    probe: Callable[[float], float],
    target: float,
    start: float,
    *,
    lowest: float = 0.0,
    highest: float = inf,
    precision: float = 0.1,
    max_probes: int = 20,
) -> Peak:
    """Double (or halve) the rate until it misses (or meets) the target, then bisect.

    Args:
        probe: measures the attainment at a rate.
        target: attainment to reach.
        start: first rate.
        lowest, highest: lowest and highest rate to try.
        precision: relative distance between the met and the missed rate at which the search ends.
        max_probes: largest number of probes.
    """
    probes: list[Probe] = []
    met: float | None = None
    missed: float | None = None
    rate = start
    while len(probes) < max_probes and lowest <= rate <= highest:
        probes.append(Probe(rate, probe(rate)))
        if probes[-1].attainment >= target:
            met = rate
        else:
            missed = rate
        if missed is None:
            rate *= 2
        elif met is None:
            rate /= 2
        elif missed / met <= 1 + precision:
            break
        else:
            # The geometric mean halves the relative distance.
            rate = (met * missed) ** 0.5
    return Peak(met, missed, tuple(probes))
