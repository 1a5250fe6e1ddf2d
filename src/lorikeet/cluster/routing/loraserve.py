"""TOPPINGS as LoRAServe compares itself with it (section V-A), in its second reading.

The paper calls it rank-agnostic in one place (that is ``FewestTokens``) and rank-aware in another. Both send each
request to the replica that is best for it in the whole cluster, given what runs and waits there; every adapter is on
every replica.
"""

import numpy as np

from lorikeet.cluster.asked import Asked
from lorikeet.cluster.fleet import Fleet
from lorikeet.cluster.routing.base import Router, least
from lorikeet.core.ids import ReplicaId

COST_OF_RANK = 0.015977
"""By which a prefilled token takes longer per rank: rank 128 then takes 2.7 times as long as rank 8 (section III)."""


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
        tokens, ranks = loads.pending_tokens, loads.largest_rank
        own_tokens = asked.known_tokens + asked.expected_tokens
        before = (1 + self._cost_of_rank * ranks) * tokens
        after = (1 + self._cost_of_rank * np.maximum(ranks, asked.rank)) * (tokens + own_tokens)
        added = after + loads.requests * (after - before)
        return fleet.info(least(candidates, added)).replica
