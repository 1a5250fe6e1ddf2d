"""Defines the options of a multi-level queue, and its statistics for tests and debugging."""

from dataclasses import dataclass

from lorikeet.core.messages import QueueStats
from lorikeet.papers.chameleon.quotas import SurplusShare
from lorikeet.papers.chameleon.size_classes import PAPER_WEIGHTS, KRule, SizeWeights

REFRESH_S = 300.0
"""T_refresh in seconds, an example value in the paper."""
LEAST_SAMPLES = 100


@dataclass(frozen=True)
class MultilevelOptions:
    """Options for computing sizes, classes and quotas.

    The defaults are the values that the Chameleon paper prints (§4.2).

    Attributes:
        weights: weights of input, output and adapter in the size of a request.
        maximum_percentile: percentile of recent inputs and outputs that counts as the largest value in the size.
        k_rule: rule for the number of classes.
        largest_percentile: percentile of the sizes of a class that counts as its largest request, S in the quota.
        floor: whether the quota of a class is never smaller than its largest request.
        share: rule for dividing the tokens beyond all least quotas.
        refresh_s: seconds between two computations of classes and quotas, and the window of recent requests.
        least_samples: number of recent requests that are needed to find classes.
    """

    weights: SizeWeights = PAPER_WEIGHTS
    maximum_percentile: float = 100.0
    k_rule: KRule = KRule.LEAST_SQUARES
    largest_percentile: float = 100.0
    floor: bool = False
    share: SurplusShare = SurplusShare.PRIORITY
    refresh_s: float = REFRESH_S
    least_samples: int = LEAST_SAMPLES


class QueueFigures(QueueStats, frozen=True):
    """Holds all statistics of the queue since the start.

    Attributes:
        boundaries: boundaries between the current classes.
        infeasible_refreshes: number of refreshes in which the least quotas of all classes exceeded the total.
        admitted: number of admitted requests.
    """

    boundaries: tuple[float, ...]
    infeasible_refreshes: int
    admitted: int
