"""First fit (TOPPINGS, section 7.5)."""

from lorikeet.cluster.routing.base import AdapterPlaces, Choice, RoutingPolicy, with_capacity
from lorikeet.cluster.routing.fleet import Fleet
from lorikeet.cluster.routing.request import RoutingRequest


class FirstFit(RoutingPolicy):
    """The first with a free place in its batch and memory for the request's KV and adapter.

    Without one, the request waits.

    Source: the baseline of TOPPINGS (section 7.5), as Punica schedules.
    """

    def route(self, request: RoutingRequest, fleet: Fleet, places: AdapterPlaces, now: float) -> Choice | None:
        """Take the first candidate that fits."""
        candidates = self.candidates(request, fleet, places.table)
        has_place = fleet.loads.requests < fleet.loads.max_batch
        fitting = with_capacity(request, fleet, candidates[has_place[candidates]])
        return Choice(fleet.info(int(fitting[0])).replica) if len(fitting) else None
