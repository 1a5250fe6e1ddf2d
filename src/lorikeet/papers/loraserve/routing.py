"""Implements LoRAServe's two descriptions of TOPPINGS (section V-A): rank-agnostic in one, rank-aware in the other.

Both policies send each request to the best replica of the whole cluster, given its running and waiting requests. Every
adapter is on every replica.
"""

from lorikeet.cluster.routing.base import LeastCost
from lorikeet.cluster.routing.fleet import Fleet, Numbers
from lorikeet.cluster.routing.placed_work import LeastWork
from lorikeet.cluster.routing.request import RoutingRequest


class FewestTokens(LeastCost):
    """Chooses the replica with the fewest tokens to prefill and to decode. Ranks are ignored."""

    def costs(self, request: RoutingRequest, fleet: Fleet) -> Numbers:
        """Return the number of tokens to prefill and to decode."""
        return fleet.loads.pending_tokens


class LeastAddedLatency(LeastWork):
    """Chooses the replica with the least latency added to all requests, slowed down by the largest rank.

    The new request waits for all work of the replica, including the new work. Each request that is already at the
    replica waits for the new work.
    """

    def costs(self, request: RoutingRequest, fleet: Fleet) -> Numbers:
        """Return the added latency, in tokens at the speed of rank 0."""
        loads, after = fleet.loads, super().costs(request, fleet)
        before = (1 + self._rank_slowdown * loads.largest_rank) * loads.pending_tokens
        return after + loads.requests * (after - before)
