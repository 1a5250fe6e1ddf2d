"""How many replicas there should be, by the load that the operating points give.

Source: operating points and utilisation are LoRAServe's (section IV-A); the paper leaves the number of servers to
others, so the rule is ours.
"""

from collections import deque
from collections.abc import Iterable
from math import ceil

from lorikeet.cluster.placement.demand import AdapterDemand
from lorikeet.cluster.placement.operating_points import OperatingPoints

TARGET = 0.8
"""Load per replica that is aimed at; 1 is what keeps the SLO with nothing to spare."""

PATIENCE = 3
"""So many periods in a row fewer replicas must have been enough before one leaves: starting one takes long."""


def load_of(demands: Iterable[AdapterDemand], points: OperatingPoints) -> float:
    """Return how many replicas the demand fills, each up to its operating point at the rank that is asked for."""
    return sum(demand.tokens_per_s / points[demand.rank] for demand in demands)


class ScalingPolicy:
    """Up at once, down slowly.

    Args:
        least, most: limits of the number of replicas.

    Raises:
        ValueError: limits that exclude each other, or no replica.
    """

    def __init__(self, least: int, most: int) -> None:
        if not 1 <= least <= most:
            raise ValueError(f"From {least} to {most} replicas")
        self._least, self._most = least, most
        self._enough = deque[int](maxlen=PATIENCE)

    def wanted(self, load: float, replicas: int) -> int:
        """Return how many replicas there should be; to be asked once a period.

        Args:
            load: see :func:`load_of`.
            replicas: that there are, those included that are being started.
        """
        enough = min(max(ceil(load / TARGET), self._least), self._most)
        self._enough.append(enough)
        if enough >= replicas:
            return enough
        recently = max(self._enough) if len(self._enough) == PATIENCE else replicas
        return min(replicas, max(recently, self._least))
