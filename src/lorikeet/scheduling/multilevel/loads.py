"""What comes to each size class, by what arrived and ended lately."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lorikeet.scheduling.multilevel.classes import Classes
from lorikeet.scheduling.multilevel.quotas import ClassLoad
from lorikeet.scheduling.pace import Pace

SLO_FACTOR = 5.0
"""Limit of a class's time from arrival to end, as a multiple of what its mean request takes alone."""


class Came(NamedTuple):
    """What came lately.

    Attributes:
        classes: the size classes.
        arrived: ``[requests, 3]``, input, expected output and adapter of each, in tokens.
        sizes: the weighted sizes of these.
        ran_s: how long each ran that ended.
        ended_in: the class of each that ended.
        over_s: for how long arrivals were counted.
    """

    classes: Classes
    arrived: NDArray[np.float64]
    sizes: NDArray[np.float64]
    ran_s: NDArray[np.float64]
    ended_in: NDArray[np.int64]
    over_s: float


def class_loads(came: Came, pace: Pace, largest_percentile: float) -> list[ClassLoad]:
    """Return what comes to each class; one of which nobody has ended yet takes as long as a request alone.

    Args:
        came: what came lately.
        pace: of the engine's steps.
        largest_percentile: of the requests' tokens, that counts as the largest.
    """
    arrived_in = came.classes.of(came.sizes)
    loads = []
    for number in range(len(came.classes.centroids)):
        members, ran_s = came.arrived[arrived_in == number], came.ran_s[came.ended_in == number]
        if not len(members):  # many samples are gathered in bins, and a boundary may lie inside one
            loads.append(ClassLoad(0.0, 0.0, 0.0, float("inf")))
            continue
        mean = members.mean(axis=0)
        alone_s = pace.alone_s(float(mean[0]), float(mean[1]))
        largest = np.percentile(members.sum(axis=1), largest_percentile)
        duration_s = float(ran_s.mean()) if len(ran_s) else alone_s
        slo_s = SLO_FACTOR * alone_s if alone_s else float("inf")
        loads.append(ClassLoad(float(largest), duration_s, len(members) / came.over_s, slo_s))
    return loads
