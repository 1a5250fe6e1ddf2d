"""Comparing paired runs."""

from collections.abc import Sequence

import numpy as np


def median_interval(
    values: Sequence[float], confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Return the bootstrap percentile interval of the median of ``values``."""
    generator = np.random.default_rng(seed)
    sample = np.asarray(values, dtype=np.float64)
    medians = np.median(sample[generator.integers(0, len(sample), (resamples, len(sample)))], axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    return float(low), float(high)
