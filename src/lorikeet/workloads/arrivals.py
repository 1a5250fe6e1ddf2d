"""Draws arrival times of requests at rates that may change over time."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from lorikeet.workloads.workload import OptionError, WorkloadRequest


class Rates(NamedTuple):
    """Holds requests per second over time: linear between points, constant before the first and after the last.

    Arrivals are made by stretching arrivals at one per second: the n-th request arrives when the area under the rate
    reaches its unit time (Cinlar's method for Poisson arrivals, which also keeps the variation of other gaps).

    Attributes:
        times_s: times of the points, ascending; the first is 0.
        per_s: the rate at each point.
    """

    times_s: tuple[float, ...]
    per_s: tuple[float, ...]

    @classmethod
    def constant(cls, rate: float) -> "Rates":
        """Return a constant rate.

        Raises:
            OptionError: the rate is not positive.
        """
        return cls.checked((0.0,), (rate,), f"rate {rate}")

    @classmethod
    def parse(cls, text: str) -> "Rates":
        """Parse ``4``, or ``0:2,400:2,900:8`` (seconds:rate): 2 until 400 s, then rising to 8 at 900 s.

        Raises:
            OptionError: the text has neither form.
        """
        where = f"rate {text!r}"
        try:
            if ":" not in text:
                return cls.checked((0.0,), (float(text),), where)
            points = [part.split(":") for part in text.split(",")]
            return cls.checked(tuple(float(at) for at, _ in points), tuple(float(rate) for _, rate in points), where)
        except OptionError:
            raise
        except ValueError:
            raise OptionError(f"{where} is neither a number nor points such as 0:2,400:2,900:8") from None

    @classmethod
    def checked(cls, times_s: tuple[float, ...], per_s: tuple[float, ...], where: str) -> "Rates":
        """Return valid rates.

        Raises:
            OptionError: times do not ascend from 0, a rate is negative or not finite, or the last is 0.
        """
        rising = times_s[0] == 0 and all(a < b for a, b in pairwise(times_s))
        if not rising or not np.isfinite([*times_s, *per_s]).all() or min(per_s) < 0 or not per_s[-1] > 0:
            raise OptionError(
                f"{where}: times must ascend from 0, rates must not be negative, and the last must be positive"
            )
        return cls(times_s, per_s)

    def expected(self, until_s: float) -> float:
        """Return the mean number of requests that arrive before ``until_s``, which is the area under the rate."""
        times_s = np.array([*[at for at in self.times_s if at < until_s], until_s])
        per_s = np.interp(times_s, self.times_s, self.per_s)
        return float(np.sum((per_s[1:] + per_s[:-1]) / 2 * np.diff(times_s)))

    def stretch(self, units: np.ndarray) -> np.ndarray:
        """Return the seconds at which the area under the rate reaches each of ``units`` (not negative)."""
        times_s = np.array(self.times_s)
        per_s = np.array(self.per_s)
        lengths_s = np.diff(times_s)
        starts = np.concatenate([[0.0], np.cumsum(lengths_s * (per_s[:-1] + per_s[1:]) / 2)])
        # With side "left", an arrival at the end of a stretch with rate 0 comes before that stretch.
        line = np.maximum(np.searchsorted(starts, units, side="left") - 1, 0)
        slopes = np.append(np.diff(per_s) / lengths_s, 0.0)[line]
        area = units - starts[line]
        rate = per_s[line]
        # This is the root of rate · s + slope · s² / 2 = area, in the form that is exact for slope 0.
        root = rate + np.sqrt(np.maximum(rate**2 + 2 * slopes * area, 0.0))
        return times_s[line] + 2 * area / np.where(root > 0, root, 1.0)


ARRIVALS = ("poisson", "gamma", "uniform", "now")


def arrival_times(
    kind: str, count: int, rates: Rates, generator: np.random.Generator, variation: float = 1.0
) -> list[float]:
    """Return the arrival times of ``count`` requests, in seconds, in order.

    Args:
        kind: ``now`` all at 0; ``uniform`` equal gaps; ``poisson`` exponential gaps; ``gamma`` gamma gaps.
        count: number of requests.
        rates: rates of arrivals; ignored by ``now``.
        generator: source of the gaps.
        variation: standard deviation / mean of gamma gaps. Arrivals are bursty above 1, Poisson at 1, and more even
            below 1.

    Raises:
        OptionError: unknown kind, or a variation that is not positive.
    """
    gaps = unit_gaps(kind, count, generator, variation)
    return [0.0] * count if kind == "now" else rates.stretch(np.cumsum(gaps)).tolist()


def arrivals_until(
    kind: str, duration_s: float, rates: Rates, generator: np.random.Generator, variation: float = 1.0
) -> list[float]:
    """Return all arrivals before ``duration_s``; see ``arrival_times``.

    Raises:
        OptionError: the kind is unknown or has no duration, or a variation is not positive.
    """
    if kind == "now":
        raise OptionError("arrivals 'now' have no duration; give a count")
    last = rates.expected(duration_s)
    units = np.zeros(0)
    while not len(units) or units[-1] < last:
        gaps = unit_gaps(kind, int(last) + 100, generator, variation)
        units = np.concatenate([units, (units[-1] if len(units) else 0.0) + np.cumsum(gaps)])
    return rates.stretch(units[units < last]).tolist()


def unit_gaps(kind: str, count: int, generator: np.random.Generator, variation: float = 1.0) -> np.ndarray:
    """Return ``count`` gaps between arrivals of mean 1; see ``arrival_times``.

    Raises:
        OptionError: unknown kind, or a variation that is not positive.
    """
    if not variation > 0:
        raise OptionError(f"a variation of {variation} is not positive")
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
    raise OptionError(f"arrivals {kind!r} are none of {', '.join(ARRIVALS)}")


def at_rate(requests: Sequence[WorkloadRequest], rates: Rates) -> list[WorkloadRequest]:
    """Return ``requests`` with stretched times, so that they arrive at ``rates`` on average.

    Args:
        requests: the requests in any order; the first is moved to 0.
        rates: constant rates stretch all times alike.

    Raises:
        OptionError: all requests arrive at the same time.
    """
    if not requests:
        return []
    times_s = np.array([request.arrival_s for request in requests])
    span_s = times_s.max() - times_s.min()
    if not span_s > 0:
        raise OptionError("all requests of the workload arrive at the same time and cannot be given a rate")
    # n requests have n - 1 gaps between them.
    units = (times_s - times_s.min()) * ((len(requests) - 1) / span_s)
    stretched_s = rates.stretch(units).tolist()
    return [msgspec.structs.replace(request, arrival_s=at) for request, at in zip(requests, stretched_s, strict=True)]
