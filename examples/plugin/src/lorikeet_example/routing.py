"""Routing by the name of the adapter."""

import zlib

from lorikeet.cluster.routing.base import AdapterPlaces, Choice, RoutingPolicy
from lorikeet.cluster.routing.fleet import Fleet
from lorikeet.cluster.routing.request import RoutingRequest


class ByName(RoutingPolicy):
    """Sends all requests of an adapter to the same replica, as long as the replicas stay the same."""

    def route(self, request: RoutingRequest, fleet: Fleet, places: AdapterPlaces, now: float) -> Choice | None:
        """Choose a candidate by a checksum of the adapter's digest."""
        candidates = self.candidates(request, fleet, places.table)
        if not len(candidates):
            return None
        number = zlib.crc32((request.adapter or "").encode())
        return Choice(fleet.info(int(candidates[number % len(candidates)])).replica)
