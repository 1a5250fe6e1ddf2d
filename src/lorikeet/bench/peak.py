"""Peak load: the highest request rate that still meets the SLO."""

from collections.abc import Callable
from math import inf
from typing import NamedTuple


class Probe(NamedTuple):
    """One measurement: requests per second offered, and the share of requests that met the SLO."""

    rate: float
    attainment: float


class Peak(NamedTuple):
    """The result of a search.

    Attributes:
        rate: the highest rate that met the target; None if none did.
        missed_rate: the lowest rate that missed it; None if none did.
        probes: all measurements, in their order.
    """

    rate: float | None
    missed_rate: float | None
    probes: tuple[Probe, ...]


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
        target: attainment that must be reached.
        start: first rate.
        lowest, highest: rates below and above which nothing is tried.
        precision: the search ends when met and missed rates are closer than this, relative to the met one.
        max_probes: it also ends after so many.
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
