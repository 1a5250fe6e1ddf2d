"""Routes by the work at each replica of the table, slowed down by the largest rank."""

import numpy as np

from lorikeet.cluster.routing.base import AdapterPlaces, Choice, LeastCost, least
from lorikeet.cluster.routing.fleet import Fleet, Numbers
from lorikeet.cluster.routing.request import RoutingRequest

RANK_SLOWDOWN = 0.015977
"""Slowdown of a prefilled token per rank: at rank 128 it takes 2.7 times as long as at rank 8 (section III)."""

OVERFLOW = 1.5
"""Multiple of the cheapest replica's cost above which a request leaves the replicas that the table names."""


class LeastWork(LeastCost):
    """Chooses the replica with the least work including the request, slowed down by the largest rank.

    With the request, a replica with largest rank R and T tokens to compute needs ``m(max(R, r)) * (T + t)``, where
    ``m(r) = 1 + c * r``.

    Args:
        rank_slowdown: the factor c.
    """

    def __init__(self, rank_slowdown: float = RANK_SLOWDOWN) -> None:
        self._rank_slowdown = rank_slowdown

    def costs(self, request: RoutingRequest, fleet: Fleet) -> Numbers:
        """Return the work with the request, in tokens at the speed of rank 0."""
        loads = fleet.loads
        tokens = loads.pending_tokens + request.known_tokens + request.expected_tokens
        return (1 + self._rank_slowdown * np.maximum(loads.largest_rank, request.rank)) * tokens


class PlacedWork(LeastWork):
    """Chooses the table's replica with the least work, unless its work is too high.

    The limit is ``OVERFLOW`` times the least work of all replicas.

    LoRAServe draws replicas by shares, which ignore the queues. A placement is based on the expected demand of a
    period. If much more demand arrives for an adapter's replicas than for others, other replicas serve a part of it.
    """

    may_leave_table = True

    def route(self, request: RoutingRequest, fleet: Fleet, places: AdapterPlaces, now: float) -> Choice | None:
        """Choose a replica of the table, unless another replica has far less work."""
        candidates = self.candidates(request, fleet, places.table)
        if not len(candidates):
            return None
        costs = self.costs(request, fleet)
        named = least(candidates, costs)
        best = least(fleet.open, costs)
        return Choice(fleet.info(best if costs[named] > OVERFLOW * costs[best] else named).replica)
