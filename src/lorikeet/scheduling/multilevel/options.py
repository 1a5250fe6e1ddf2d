"""Options of the queue that the Chameleon paper leaves open, and the queue's statistics."""

from dataclasses import dataclass
from enum import StrEnum

from lorikeet.core.messages import QueueStats
from lorikeet.scheduling.multilevel.quotas import OverloadRule, SurplusShare
from lorikeet.scheduling.multilevel.size_classes import PAPER_WEIGHTS, KRule, SizeWeights

REFRESH_S = 300.0
"""T_refresh, given as an example in the paper."""
LEAST_SAMPLES = 100


class AdapterCharge(StrEnum):
    """Which requests pay tokens for their adapter (spec, A9)."""

    PER_REQUEST = "per-request"
    """Every request."""
    IF_ABSENT = "if-absent"
    """Requests whose adapter is not on the device."""
    SHARED = "shared"
    """Requests whose adapter no running request uses."""


@dataclass(frozen=True)
class ChameleonOptions:
    """Choices that the paper leaves open; sections 5 to 7 of the spec discuss each.

    Attributes:
        weights: weights of input, output and adapter in the size of a request.
        overcommit: total of all quotas, as a multiple of the memory in tokens.
        overload: how tokens are divided if the least quotas exceed the total.
        k_rule: how the number of classes is chosen.
        floor: whether each class gets at least its largest request.
        share: how surplus tokens are divided.
        largest_percentile: percentile of the sizes of a class that counts as its largest request.
        charge: which requests pay for their adapter.
        lazy_squash: squash a request only if the bypassed one could then start.
        bypass: whether younger requests may be admitted before one whose adapter does not fit.
        refresh_s: seconds between two computations of classes and quotas, and the window of recent requests.
        least_samples: recent requests that are needed to find classes.
        join_from: a request may join running ones of its adapter before its turn if the adapter is at least this many
            times as large as the request's own tokens; infinite: never.
    """

    weights: SizeWeights = PAPER_WEIGHTS
    overcommit: float = 1.0
    overload: OverloadRule = OverloadRule.PROPORTIONAL
    k_rule: KRule = KRule.ELBOW
    floor: bool = True
    share: SurplusShare = SurplusShare.LEAST
    largest_percentile: float = 100.0
    charge: AdapterCharge = AdapterCharge.PER_REQUEST
    lazy_squash: bool = False
    bypass: bool = True
    refresh_s: float = REFRESH_S
    least_samples: int = LEAST_SAMPLES
    join_from: float = float("inf")


class QueueFigures(QueueStats, frozen=True):
    """All statistics of the queue since the start.

    Attributes:
        boundaries: boundaries between the present classes.
        infeasible_refreshes: number of refreshes in which the least quotas of all classes exceeded the total.
        admitted: number of admitted requests.
        longest_gap_s: by class, the longest time without an admission while requests waited, in seconds.
        longest_run_s: by class, the longest time from admission to the end, in seconds.
    """

    boundaries: tuple[float, ...]
    infeasible_refreshes: int
    admitted: int
    longest_gap_s: dict[int, float]
    longest_run_s: dict[int, float]
