"""Routing around backends that would not load an adapter, while others may: their disks and settings can differ."""

from typing import NamedTuple

import numpy as np

from lorikeet.cluster.asked import Asked
from lorikeet.cluster.fleet import Fleet
from lorikeet.cluster.loads import Indices
from lorikeet.cluster.routing.base import Router, least_loaded
from lorikeet.cluster.tables import RoutingTable
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.gateway.backends import Refused

REFUSED_S = 60.0
"""So long a backend that would not load an adapter gets no requests for it; then the reason may be gone."""


class _Refusal(NamedTuple):
    at_s: float
    error: Refused


class AroundRefusals(Router):
    """Routes by a policy, unless the backend that it chooses would not load the adapter a moment ago.

    Then the request goes to another that may, of these to one that has the adapter, of these to the least loaded. Where
    all have refused, the policy's choice is asked again.

    Args:
        policy: see above. It hears of none of this.
    """

    def __init__(self, policy: Router) -> None:
        self._policy = policy
        self.wants_keys = policy.wants_keys
        self._refusals: dict[AdapterDigest, dict[ReplicaId, _Refusal]] = {}

    @property
    def table(self) -> RoutingTable | None:
        """The policy's."""
        return self._policy.table

    @table.setter
    def table(self, table: RoutingTable | None) -> None:
        self._policy.table = table

    def refused(self, adapter: AdapterDigest, replica: ReplicaId, error: Refused, now: float) -> None:
        """A backend would not load an adapter."""
        self._refusals.setdefault(adapter, {})[replica] = _Refusal(now, error)

    def accepted(self, adapter: AdapterDigest, replica: ReplicaId) -> None:
        """It has loaded it."""
        self._refusals.get(adapter, {}).pop(replica, None)

    def came(self, replica: ReplicaId) -> None:
        """A backend has been started, perhaps otherwise than before."""
        for refusals in self._refusals.values():
            refusals.pop(replica, None)

    def forget(self, adapter: AdapterDigest) -> None:
        """No request asks for an adapter any longer."""
        self._refusals.pop(adapter, None)

    def why(self, adapter: AdapterDigest) -> Refused | None:
        """Return what was said last by one that would not load an adapter; None if nobody said so."""
        refusals = self._refusals.get(adapter)
        return max(refusals.values(), key=lambda refusal: refusal.at_s).error if refusals else None

    def willing(self, adapter: AdapterDigest, fleet: Fleet, now: float) -> Indices:
        """Return the open backends that may load an adapter, ascending."""
        refused = self._refused(adapter, now)
        return np.array([index for replica, index in fleet.open_index.items() if replica not in refused], np.intp)

    def avoids(self, adapter: AdapterDigest, replica: ReplicaId, fleet: Fleet, now: float) -> bool:
        """Whether a backend would not load an adapter, while another may."""
        return replica in self._refused(adapter, now) and len(self.willing(adapter, fleet, now)) > 0

    def route(self, asked: Asked, fleet: Fleet, now: float) -> ReplicaId | None:
        """See the class."""
        chosen, adapter = self._policy.route(asked, fleet, now), asked.adapter
        if chosen is None or adapter is None or not self.avoids(adapter, chosen, fleet, now):
            return chosen
        willing = self.willing(adapter, fleet, now)
        return fleet.info(least_loaded(willing, fleet, ~fleet.is_warm(adapter))).replica

    def _refused(self, adapter: AdapterDigest, now: float) -> set[ReplicaId]:
        refusals = self._refusals.get(adapter, {})
        return {replica for replica, refusal in refusals.items() if now < refusal.at_s + REFUSED_S}
