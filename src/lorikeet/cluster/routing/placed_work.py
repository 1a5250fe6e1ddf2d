"""Routing by work that is slowed down by the largest rank, among the replicas of the table."""

import numpy as np

from lorikeet.cluster.routing.base import AdapterPlaces, Choice, LeastCost, least
from lorikeet.cluster.routing.fleet import Fleet, Numbers
from lorikeet.cluster.routing.request import RoutingRequest

RANK_SLOWDOWN = 0.015977
"""Slowdown of a prefilled token per rank: at rank 128 it takes 2.7 times as long as at rank 8 (section III)."""

OVERFLOW = 1.5
"""Multiple of the cheapest replica's cost above which a request leaves the replicas that the table names."""


class LeastWork(LeastCost):
    """Chooses the least work including the request, slowed down by the largest rank; the first among equals.

    With the request, a replica with largest rank R and T tokens to compute needs ``m(max(R, r)) * (T + t)``, where
    ``m(r) = 1 + c * r``.

    Args:
        rank_slowdown: c.
    """

    def __init__(self, rank_slowdown: float = RANK_SLOWDOWN) -> None:
        self._rank_slowdown = rank_slowdown

    def costs(self, request: RoutingRequest, fleet: Fleet) -> Numbers:
        """Return the work with the request, in tokens at the speed of rank 0."""
        loads = fleet.loads
        tokens = loads.pending_tokens + request.known_tokens + request.expected_tokens
        return (1 + self._rank_slowdown * np.maximum(loads.largest_rank, request.rank)) * tokens


class PlacedWork(LeastWork):
    """Chooses the least work among the replicas of the table, unless it exceeds ``OVERFLOW`` times the least of all.

    The shares that LoRAServe draws by ignore the queues. A placement holds for a period and is made from expected
    demand; if much more arrives for the replicas of an adapter than for others, the others take some of it.
    """

    may_leave_table = True

    def route(self, request: RoutingRequest, fleet: Fleet, places: AdapterPlaces, now: float) -> Choice | None:
        """Choose among the replicas of the table, unless another one has far less work."""
        candidates = self.candidates(request, fleet, places.table)
        if not len(candidates):
            return None
        costs = self.costs(request, fleet)
        named = least(candidates, costs)
        best = least(fleet.open, costs)
        return Choice(fleet.info(best if costs[named] > OVERFLOW * costs[best] else named).replica)
