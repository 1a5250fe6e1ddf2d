"""Rates of arrivals that may change over time."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lorikeet.bench.choices import ChoiceError


class Rates(NamedTuple):
    """Requests per second over time: straight lines between points, constant before the first and after the last.

    Arrivals at such a rate come from arrivals at one per second by stretching time: the n-th arrives when the area
    under the rate has reached its unit time (Cinlar's method for Poisson, which keeps other gaps' variation, too).

    Attributes:
        times_s: of the points, rising, the first 0.
        per_s: the rate at each of them.
    """

    times_s: tuple[float, ...]
    per_s: tuple[float, ...]

    @classmethod
    def constant(cls, rate: float) -> "Rates":
        """Return one rate for all time.

        Raises:
            ChoiceError: it is not positive.
        """
        return cls.checked((0.0,), (rate,), f"rate {rate}")

    @classmethod
    def parse(cls, text: str) -> "Rates":
        """Read ``4``, or ``0:2,400:2,900:8`` (seconds:rate): 2 until 400 s, then rising to 8 at 900 s.

        Raises:
            ChoiceError: it is neither.
        """
        where = f"rate {text!r}"
        try:
            if ":" not in text:
                return cls.checked((0.0,), (float(text),), where)
            points = [part.split(":") for part in text.split(",")]
            return cls.checked(tuple(float(at) for at, _ in points), tuple(float(rate) for _, rate in points), where)
        except ChoiceError:
            raise
        except ValueError:
            raise ChoiceError(f"{where} is neither a number nor points such as 0:2,400:2,900:8") from None

    @classmethod
    def checked(cls, times_s: tuple[float, ...], per_s: tuple[float, ...], where: str) -> "Rates":
        """Return the rates if they have a meaning.

        Raises:
            ChoiceError: times do not start at 0 and rise, a rate is negative or no number, or the last is 0.
        """
        rising = times_s[0] == 0 and all(a < b for a, b in pairwise(times_s))
        if not rising or not np.isfinite([*times_s, *per_s]).all() or min(per_s) < 0 or not per_s[-1] > 0:
            raise ChoiceError(f"{where}: times rise from 0, rates are not negative and the last is positive")
        return cls(times_s, per_s)

    def expected(self, until_s: float) -> float:
        """Return how many requests arrive until ``until_s`` on average: the area under the rate."""
        times_s = np.array([*[at for at in self.times_s if at < until_s], until_s])
        per_s = np.interp(times_s, self.times_s, self.per_s)
        return float(np.sum((per_s[1:] + per_s[:-1]) / 2 * np.diff(times_s)))

    def stretch(self, units: np.ndarray) -> np.ndarray:
        """Return the seconds at which the area under the rate reaches each of ``units`` (not negative)."""
        times_s, per_s = np.array(self.times_s), np.array(self.per_s)
        lengths_s = np.diff(times_s)
        starts = np.concatenate([[0.0], np.cumsum(lengths_s * (per_s[:-1] + per_s[1:]) / 2)])
        # Side "left": an arrival due as a stretch without any ends has come before it.
        line = np.maximum(np.searchsorted(starts, units, side="left") - 1, 0)
        slopes = np.append(np.diff(per_s) / lengths_s, 0.0)[line]
        area, rate = units - starts[line], per_s[line]
        # The root of rate · s + slope · s² / 2 = area, in the form that is exact for slope 0.
        root = rate + np.sqrt(np.maximum(rate**2 + 2 * slopes * area, 0.0))
        return times_s[line] + 2 * area / np.where(root > 0, root, 1.0)
