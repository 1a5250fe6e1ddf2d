"""TOPPINGS as LoRAServe sees it (section V-A): rank-agnostic in one place, rank-aware in another.

Both send each request to the best replica of the whole cluster, given what runs and waits there; every adapter is on
every replica.
"""

from lorikeet.cluster.routing.base import LeastCost
from lorikeet.cluster.routing.fleet import Fleet, Numbers
from lorikeet.cluster.routing.placed_work import LeastWork
from lorikeet.cluster.routing.request import RoutingRequest


class FewestTokens(LeastCost):
    """The fewest tokens to prefill and to decode, the first among equals. Ignores ranks."""

    def costs(self, request: RoutingRequest, fleet: Fleet) -> Numbers:
        """Return the tokens to prefill and to decode."""
        return fleet.loads.pending_tokens


class LeastAddedLatency(LeastWork):
    """The least latency added to all requests, slowed down by the largest rank; the first among equals.

    The request itself waits for all work including its own. Each request that is there already waits for the added
    work.
    """

    def costs(self, request: RoutingRequest, fleet: Fleet) -> Numbers:
        """Return the added latency, in tokens at the speed of rank 0."""
        loads, after = fleet.loads, super().costs(request, fleet)
        before = (1 + self._rank_slowdown * loads.largest_rank) * loads.pending_tokens
        return after + loads.requests * (after - before)
