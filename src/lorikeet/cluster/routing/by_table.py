"""By the shares of the routing table (LoRAServe, section IV-B)."""

from random import Random

from lorikeet.cluster.routing.base import Router, least_loaded
from lorikeet.cluster.routing.fleet import Fleet
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.core.ids import ReplicaId


class ByTable(Router):
    """Draws a replica with the probability that is its share of the adapter.

    Where the drawn one is not open, it draws among those that are, in proportion to their shares. Requests of the base
    model, of an adapter that is not in the table, and of one that has no open replica, go to the least loaded.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def route(self, asked: RoutingRequest, fleet: Fleet, now: float) -> ReplicaId | None:
        """Draw."""
        shares = () if self.table is None or asked.adapter is None else self.table.shares.get(asked.adapter, ())
        if self.table is not None and asked.adapter is not None and shares:
            drawn = self.table.draw(asked.adapter, self._random.random())
            if drawn in fleet.open_index:
                return drawn
        there = [share for share in shares if share.replica in fleet.open_index]
        if there:
            return self._random.choices(there, [share.share for share in there])[0].replica
        return fleet.info(least_loaded(fleet.open, fleet)).replica if len(fleet.open) else None
