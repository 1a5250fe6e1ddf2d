"""What the paper leaves open about the queue, and what the queue tells about itself."""

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from lorikeet.scheduling.multilevel.classes import KRule
from lorikeet.scheduling.multilevel.quotas import Overload, Share
from lorikeet.scheduling.multilevel.sizes import PRINTED, Weights

REFRESH_S = 300.0
"""T_refresh, given as an example in the paper."""
LEAST_SAMPLES = 100


class Charge(StrEnum):
    """Which requests pay for their adapter with tokens (A9 of the spec)."""

    PER_REQUEST = "per-request"
    IF_ABSENT = "if-absent"
    """Those whose adapter is not on the device."""
    SHARED = "shared"
    """Those under whose adapter nobody runs."""


@dataclass(frozen=True)
class Options:
    """What the paper leaves open; see the spec's sections 5 to 7 for each."""

    weights: Weights = PRINTED
    overcommit: float = 1.0
    overload: Overload = Overload.PROPORTIONAL
    k_rule: KRule = KRule.ELBOW
    floor: bool = True
    share: Share = Share.LEAST
    largest_percentile: float = 100.0
    charge: Charge = Charge.PER_REQUEST
    lazy_squash: bool = False
    bypass: bool = True
    refresh_s: float = REFRESH_S
    least_samples: int = LEAST_SAMPLES


class QueueFigures(msgspec.Struct, frozen=True):
    """What the queue tells about itself, since the start.

    Attributes:
        boundaries, quotas: of the classes as they are now.
        refreshes, infeasible_refreshes: how often classes were found anew, and how often the least quotas of all
            classes did not fit beside each other.
        admitted, bypassed, squashed: requests; squashed ones were sent back since they had not ended in time.
        longest_gap_s: by class number, the longest time in which nobody of a class with waiters was admitted.
        longest_run_s: by class number, the longest time from admission to the end.
    """

    boundaries: tuple[float, ...]
    quotas: tuple[int, ...]
    refreshes: int
    infeasible_refreshes: int
    admitted: int
    bypassed: int
    squashed: int
    longest_gap_s: dict[int, float]
    longest_run_s: dict[int, float]
