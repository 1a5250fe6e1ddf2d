"""When requests arrive: plain numbers from a seeded generator."""

from collections.abc import Sequence

import msgspec
import numpy as np

from lorikeet.bench.choices import ChoiceError
from lorikeet.bench.rates import Rates
from lorikeet.bench.workload import WorkloadRequest

ARRIVALS = ("poisson", "gamma", "uniform", "now")


def arrival_times(
    kind: str, count: int, rates: Rates, generator: np.random.Generator, variation: float = 1.0
) -> list[float]:
    """Return when each of ``count`` requests arrives, in seconds, in order.

    Args:
        kind: ``now`` all at 0; ``uniform`` equal gaps; ``poisson`` exponential gaps; ``gamma`` gamma gaps.
        count: of requests.
        rates: without effect on ``now``.
        generator: of the gaps.
        variation: of gamma gaps: standard deviation / mean, above 1 bursts, 1 Poisson, below 1 more even.

    Raises:
        ChoiceError: an unknown kind, or a variation that is not positive.
    """
    gaps = unit_gaps(kind, count, generator, variation)
    return [0.0] * count if kind == "now" else rates.stretch(np.cumsum(gaps)).tolist()


def arrivals_until(
    kind: str, duration_s: float, rates: Rates, generator: np.random.Generator, variation: float = 1.0
) -> list[float]:
    """Return all arrivals before ``duration_s``; see ``arrival_times``.

    Raises:
        ChoiceError: the kind is unknown or has no duration, or a variation is not positive.
    """
    if kind == "now":
        raise ChoiceError("arrivals 'now' have no duration; give a count")
    last = rates.expected(duration_s)
    units = np.zeros(0)
    while not len(units) or units[-1] < last:
        gaps = unit_gaps(kind, int(last) + 100, generator, variation)
        units = np.concatenate([units, (units[-1] if len(units) else 0.0) + np.cumsum(gaps)])
    return rates.stretch(units[units < last]).tolist()


def unit_gaps(kind: str, count: int, generator: np.random.Generator, variation: float = 1.0) -> np.ndarray:
    """Return ``count`` gaps between arrivals of mean 1; see ``arrival_times``.

    Raises:
        ChoiceError: an unknown kind, or a variation that is not positive.
    """
    if not variation > 0:
        raise ChoiceError(f"a variation of {variation} is not positive")
    match kind:
        case "now":
            return np.zeros(count)
        case "uniform":
            return np.ones(count)
        case "poisson":
            return generator.exponential(1.0, count)
        case "gamma":
            # A gamma distribution of shape k and scale 1 / k has mean 1 and variation 1 / sqrt(k).
            return generator.gamma(variation**-2, variation**2, count)
    raise ChoiceError(f"arrivals {kind!r} are none of {', '.join(ARRIVALS)}")


def at_rate(requests: Sequence[WorkloadRequest], rates: Rates) -> list[WorkloadRequest]:
    """Return ``requests`` with their times stretched, so that they arrive at ``rates`` on average.

    Args:
        requests: of any order; the first is put at 0.
        rates: constant ones stretch all times alike.

    Raises:
        ChoiceError: they arrive all at once, which no stretching changes.
    """
    if not requests:
        return []
    times_s = np.array([request.arrival_s for request in requests])
    span_s = times_s.max() - times_s.min()
    if not span_s > 0:
        raise ChoiceError("the requests of the workload arrive all at once and cannot be given a rate")
    # n requests have n - 1 gaps between them.
    units = (times_s - times_s.min()) * ((len(requests) - 1) / span_s)
    stretched_s = rates.stretch(units).tolist()
    return [msgspec.structs.replace(request, arrival_s=at) for request, at in zip(requests, stretched_s, strict=True)]
