"""Routing by work at the pace of ranks: for LoRAServe, and for TOPPINGS as it compares itself with it (section V-A).

The paper calls TOPPINGS rank-agnostic in one place (that is ``FewestTokens``) and rank-aware in another. Both send each
request to the replica that is best for it in the whole cluster, given what runs and waits there; every adapter is on
every replica.
"""

import numpy as np

from lorikeet.cluster.routing.base import LeastCost, least
from lorikeet.cluster.routing.fleet import Fleet, Numbers
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.core.ids import ReplicaId

COST_OF_RANK = 0.015977
"""By which a prefilled token takes longer per rank: rank 128 then takes 2.7 times as long as rank 8 (section III)."""

OVERFLOW = 1.5
"""A request leaves the replicas that are named for it where it would cost more than so many times the least of all."""


class LeastWork(LeastCost):
    """The least work, the request's included, where it goes at the pace of the largest rank; of equals the first.

    With the request, a replica with largest rank R and T tokens to compute needs ``m(max(R, r)) * (T + t)``, with
    ``m(r) = 1 + c * r``.

    Args:
        cost_of_rank: c.
    """

    def __init__(self, cost_of_rank: float = COST_OF_RANK) -> None:
        self._cost_of_rank = cost_of_rank

    def costs(self, asked: RoutingRequest, fleet: Fleet) -> Numbers:
        """Return the work with the request, in tokens at the pace of rank 0."""
        loads = fleet.loads
        tokens = loads.pending_tokens + asked.known_tokens + asked.expected_tokens
        return (1 + self._cost_of_rank * np.maximum(loads.largest_rank, asked.rank)) * tokens


class LeastAddedLatency(LeastWork):
    """The least latency added to all requests, where work goes at the pace of the largest rank; of equals the first.

    The request itself waits for all of the work with it, and each of those that are there for what has been added.
    """

    def costs(self, asked: RoutingRequest, fleet: Fleet) -> Numbers:
        """Return the added latency, in the same unit."""
        loads, after = fleet.loads, super().costs(asked, fleet)
        before = (1 + self._cost_of_rank * loads.largest_rank) * loads.pending_tokens
        return after + loads.requests * (after - before)


class PlacedWork(LeastWork):
    """The least work of the replicas that a placement names, unless it is more than ``OVERFLOW`` times that of others.

    The shares that LoRAServe draws by have no regard to what queues. A placement holds for a period and goes by what
    was expected; where much more comes to an adapter's replicas than to others, the others take some of it.
    """

    def route(self, asked: RoutingRequest, fleet: Fleet, now: float) -> ReplicaId | None:
        """Take the least of those that are named, unless the least of all is so much less."""
        candidates = self.candidates(asked, fleet)
        if not len(candidates):
            return None
        costs = self.costs(asked, fleet)
        named, best = least(candidates, costs), least(fleet.open, costs)
        return fleet.info(best if costs[named] > OVERFLOW * costs[best] else named).replica
