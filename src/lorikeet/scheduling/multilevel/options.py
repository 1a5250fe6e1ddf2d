"""What the paper leaves open about the queue, and what the queue tells about itself."""

from dataclasses import dataclass
from enum import StrEnum

from lorikeet.core.messages import QueueStats
from lorikeet.scheduling.multilevel.quotas import OverloadRule, SurplusShare
from lorikeet.scheduling.multilevel.size_classes import PAPER_WEIGHTS, KRule, SizeWeights

REFRESH_S = 300.0
"""T_refresh, given as an example in the paper."""
LEAST_SAMPLES = 100


class AdapterCharge(StrEnum):
    """Which requests pay for their adapter with tokens (A9 of the spec)."""

    PER_REQUEST = "per-request"
    IF_ABSENT = "if-absent"
    """Those whose adapter is not on the device."""
    SHARED = "shared"
    """Those under whose adapter nobody runs."""


@dataclass(frozen=True)
class ChameleonOptions:
    """What the paper leaves open; see the spec's sections 5 to 7 for each."""

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
    """Who joins others under an adapter saves its room; those come first whose adapter is at least so large, as a
    multiple of their own tokens."""


class QueueFigures(QueueStats, frozen=True):
    """All that the queue tells about itself, since the start.

    Attributes:
        boundaries: of the classes as they are now.
        infeasible_refreshes: how often the least quotas of all classes did not fit beside each other.
        admitted: requests.
        longest_gap_s: by class number, the longest time in which nobody of a class with waiters was admitted.
        longest_run_s: by class number, the longest time from admission to the end.
    """

    boundaries: tuple[float, ...]
    infeasible_refreshes: int
    admitted: int
    longest_gap_s: dict[int, float]
    longest_run_s: dict[int, float]
