"""Computes bootstrap intervals for comparisons of paired runs."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


def median_interval(
    values: Sequence[float], confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Return the bootstrap percentile interval of the median of ``values``."""
    generator = np.random.default_rng(seed)
    sample = np.asarray(values, dtype=np.float64)
    medians = np.median(sample[generator.integers(0, len(sample), (resamples, len(sample)))], axis=1)
    return _interval(medians, confidence)


class Ratio(NamedTuple):
    """Holds a ratio with the ends of its interval."""

    value: float
    low: float
    high: float


def ratio_over_requests(
    ours: Sequence[Sequence[float]],
    theirs: Sequence[Sequence[float]],
    reduce: Callable[[np.ndarray], np.ndarray],
    confidence: float = 0.95,
    resamples: int = 4_000,
    seed: int = 0,
) -> Ratio:
    """Return ours ÷ theirs with the bootstrap percentile interval over requests.

    A resampled request contributes its values of all repeats and of both sides. So a cause that makes a request long on
    both sides does not widen the interval.

    Args:
        ours, theirs: values of the same requests in the same order, by repeat.
        reduce: function such as ``mean_of`` that turns values of shape (repeats, resamples, requests) into one value
            per resample.
        confidence: probability that the interval covers the ratio.
        resamples: number of resamples.
        seed: seed of the resampling.
    """
    a = np.asarray(ours, np.float64)[:, None, :]
    b = np.asarray(theirs, np.float64)[:, None, :]
    places = np.random.default_rng(seed).integers(0, a.shape[2], (resamples, a.shape[2]))
    ratios = reduce(a[:, 0, places]) / reduce(b[:, 0, places])
    return Ratio(float(reduce(a)[0] / reduce(b)[0]), *_interval(ratios, confidence))


def _interval(values: np.ndarray, confidence: float) -> tuple[float, float]:
    tail = (1 - confidence) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def mean_of(values: np.ndarray) -> np.ndarray:
    """Return the means over repeats and requests; see ``ratio_over_requests``."""
    return values.mean(axis=(0, 2))
