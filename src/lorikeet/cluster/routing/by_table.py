"""Routes by the shares of the routing table (LoRAServe, section IV-B)."""

from random import Random

from lorikeet.cluster.routing.base import Router, least_loaded
from lorikeet.cluster.routing.fleet import Fleet
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.core.ids import ReplicaId


class ByTable(Router):
    """Draws a replica with the probability of its share of the adapter.

    If the drawn replica is not open, it draws among the open ones in proportion to their shares. Requests of the base
    model, of an adapter that is not in the table, and of one without an open replica go to the least loaded replica.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def route(self, request: RoutingRequest, fleet: Fleet, now: float) -> ReplicaId | None:
        """Draw a replica."""
        shares = () if self.table is None or request.adapter is None else self.table.shares.get(request.adapter, ())
        if self.table is not None and request.adapter is not None and shares:
            drawn = self.table.draw(request.adapter, self._random.random())
            if drawn in fleet.open_index:
                return drawn
        there = [share for share in shares if share.replica in fleet.open_index]
        if there:
            return self._random.choices(there, [share.share for share in there])[0].replica
        return fleet.info(least_loaded(fleet.open, fleet)).replica if len(fleet.open) else None
