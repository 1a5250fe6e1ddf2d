"""Routing by work at the pace of ranks: for LoRAServe, and for TOPPINGS as it compares itself with it (section V-A).

The paper calls TOPPINGS rank-agnostic in one place (that is ``FewestTokens``) and rank-aware in another. Both send each
request to the replica that is best for it in the whole cluster, given what runs and waits there; every adapter is on
every replica.
"""

import numpy as np

from lorikeet.cluster.asked import Asked
from lorikeet.cluster.fleet import Fleet
from lorikeet.cluster.loads import Numbers
from lorikeet.cluster.routing.base import Router, least
from lorikeet.core.ids import ReplicaId

COST_OF_RANK = 0.015977
"""By which a prefilled token takes longer per rank: rank 128 then takes 2.7 times as long as rank 8 (section III)."""


class LeastWork(Router):
    """The least work, the request's included, where it goes at the pace of the largest rank; of equals the first.

    With the request, a replica with largest rank R and T tokens to compute needs ``m(max(R, r)) * (T + t)``, with
    ``m(r) = 1 + c * r``. It is what a placement's replicas of an adapter are chosen between by: the shares that
    LoRAServe draws by have no regard to what queues.

    Args:
        cost_of_rank: c.
    """

    def __init__(self, cost_of_rank: float = COST_OF_RANK) -> None:
        self._cost_of_rank = cost_of_rank

    def route(self, asked: Asked, fleet: Fleet, now: float) -> ReplicaId | None:
        """Take the least."""
        candidates = self.candidates(asked, fleet)
        if not len(candidates):
            return None
        return fleet.info(least(candidates, work_with(asked, fleet, self._cost_of_rank))).replica


class LeastAddedLatency(Router):
    """The least latency added to all requests, where work goes at the pace of the largest rank; of equals the first.

    A replica with largest rank R and T tokens to compute needs ``m(R) * T`` with ``m(r) = 1 + c * r``. With the request
    it needs ``m(max(R, r)) * (T + t)``. The request itself waits for all of that, and each of those that are there for
    what has been added.

    Args:
        cost_of_rank: c.
    """

    def __init__(self, cost_of_rank: float = COST_OF_RANK) -> None:
        self._cost_of_rank = cost_of_rank

    def route(self, asked: Asked, fleet: Fleet, now: float) -> ReplicaId | None:
        """Take the least."""
        candidates = self.candidates(asked, fleet)
        if not len(candidates):
            return None
        loads = fleet.loads
        before = (1 + self._cost_of_rank * loads.largest_rank) * loads.pending_tokens
        after = work_with(asked, fleet, self._cost_of_rank)
        added = after + loads.requests * (after - before)
        return fleet.info(least(candidates, added)).replica


def work_with(asked: Asked, fleet: Fleet, cost_of_rank: float) -> Numbers:
    """Return the work of every replica with a request, in tokens at the pace of rank 0."""
    loads = fleet.loads
    tokens = loads.pending_tokens + asked.known_tokens + asked.expected_tokens
    return (1 + cost_of_rank * np.maximum(loads.largest_rank, asked.rank)) * tokens
