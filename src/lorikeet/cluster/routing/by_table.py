"""Routes by the shares of the routing table (LoRAServe, section IV-B)."""

from random import Random
from typing import Any, Self

from lorikeet.cluster.routing.base import AdapterPlaces, Choice, RoutingPolicy, least_loaded
from lorikeet.cluster.routing.fleet import Fleet
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.cluster.setup import PolicySetup


class ByTable(RoutingPolicy):
    """Draws a replica with a probability equal to its share of the adapter.

    If the drawn replica is not open, it draws among the open ones in proportion to their shares. Requests of the base
    model, and of an adapter without an open replica in the table, go to the least loaded replica.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    @classmethod
    def build(cls, setup: PolicySetup, **parameters: Any) -> Self:
        """Create the policy with the seed from the options."""
        return cls(setup.options.seed, **parameters)

    def route(self, request: RoutingRequest, fleet: Fleet, places: AdapterPlaces, now: float) -> Choice | None:
        """Draw a replica."""
        table = places.table
        adapter = request.adapter
        if table is not None and adapter is not None and (shares := table.shares.get(adapter)):
            drawn = table.draw(adapter, self._random.random())
            if drawn in fleet.open_index:
                return Choice(drawn)
            there = [share for share in shares if share.replica in fleet.open_index]
            if there:
                return Choice(self._random.choices(there, [share.share for share in there])[0].replica)
        return Choice(fleet.info(least_loaded(fleet.open, fleet)).replica) if len(fleet.open) else None
