"""What comes to a size class, by what arrived and ended lately."""

import numpy as np
from numpy.typing import NDArray

from lorikeet.scheduling.multilevel.quotas import ClassLoad
from lorikeet.scheduling.pace import Pace

SLO_FACTOR = 5.0
"""Limit of a class's time from arrival to end, as a multiple of what its mean request takes alone."""


def class_load(
    arrived: NDArray[np.float64], ran_s: NDArray[np.float64], over_s: float, pace: Pace, largest_percentile: float
) -> ClassLoad:
    """Return what comes to a class; if nobody has ended yet, its requests take as long as one alone.

    Args:
        arrived: ``[requests, 3]``, input, expected output and adapter of each that arrived, in tokens.
        ran_s: how long each ran that ended.
        over_s: for how long arrivals were counted.
        pace: of the engine's steps.
        largest_percentile: of the requests' tokens, that counts as the largest.
    """
    if not len(arrived):  # many samples are gathered in bins, and a boundary may lie inside one
        return ClassLoad(0.0, 0.0, 0.0, float("inf"))
    mean = arrived.mean(axis=0)
    alone_s = pace.alone_s(float(mean[0]), float(mean[1]))
    largest = np.percentile(arrived.sum(axis=1), largest_percentile)
    duration_s = float(ran_s.mean()) if len(ran_s) else alone_s
    slo_s = SLO_FACTOR * alone_s if alone_s else float("inf")
    return ClassLoad(float(largest), duration_s, len(arrived) / over_s, slo_s)
