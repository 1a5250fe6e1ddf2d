"""Decides how many replicas a load needs.

Source: operating points and utilisation are LoRAServe's (section IV-A). The paper leaves the number of servers open, so
the rule is ours.
"""

from collections import deque
from collections.abc import Iterable
from math import ceil

from lorikeet.cluster.placement.demand import AdapterDemand
from lorikeet.cluster.placement.operating_points import Points

TARGET = 0.8
"""Target load per replica; at 1 the SLO is just met."""

PATIENCE = 3
"""Periods in a row in which fewer replicas must be enough before one is removed, because a start takes long."""


def load_of(demands: Iterable[AdapterDemand], points: Points) -> float:
    """Return the number of replicas that the demand fills.

    Each replica is filled up to its operating point at the demand's rank.
    """
    return sum(demand.tokens_per_s / points[demand.rank] for demand in demands)


class ScalingPolicy:
    """Scales up immediately and down slowly.

    Args:
        minimum, maximum: smallest and largest number of replicas.

    Raises:
        ValueError: ``minimum`` is below 1 or above ``maximum``.
    """

    def __init__(self, minimum: int, maximum: int) -> None:
        if not 1 <= minimum <= maximum:
            raise ValueError(f"Cannot scale from {minimum} to {maximum} replicas")
        self._minimum = minimum
        self._maximum = maximum
        self._enough = deque[int](maxlen=PATIENCE)

    def wanted(self, load: float, replicas: int) -> int:
        """Return the number of replicas that should run. Call this method once a period.

        Args:
            load: load as a number of replicas; see :func:`load_of`.
            replicas: number of replicas, including those that are being started.
        """
        enough = min(max(ceil(load / TARGET), self._minimum), self._maximum)
        self._enough.append(enough)
        if enough >= replicas:
            return enough
        recently = max(self._enough) if len(self._enough) == PATIENCE else replicas
        return min(replicas, max(recently, self._minimum))
