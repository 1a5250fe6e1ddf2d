"""Implements first-fit routing (TOPPINGS, section 7.5)."""

from lorikeet.cluster.routing.base import AdapterPlaces, Choice, RoutingPolicy, with_capacity
from lorikeet.cluster.routing.fleet import Fleet
from lorikeet.cluster.routing.request import RoutingRequest


class FirstFit(RoutingPolicy):
    """Chooses the first replica with a free place in its batch and enough memory for the request's KV and adapter.

    If no replica fits, the request waits.

    Source: the baseline of TOPPINGS (section 7.5), as Punica schedules.
    """

    def route(self, request: RoutingRequest, fleet: Fleet, places: AdapterPlaces, now: float) -> Choice | None:
        """Choose the first candidate that fits."""
        candidates = self.candidates(request, fleet, places.table)
        has_place = fleet.loads.requests < fleet.loads.max_batch
        fitting = with_capacity(request, fleet, candidates[has_place[candidates]])
        return Choice(fleet.info(int(fitting[0])).replica) if len(fitting) else None
