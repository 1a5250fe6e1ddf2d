"""Routing around backends that have failed a request, or would not load an adapter, while others may."""

from collections.abc import Callable, Iterator, Set
from typing import NamedTuple

import numpy as np

from lorikeet.cluster.asked import Asked
from lorikeet.cluster.fleet import Fleet
from lorikeet.cluster.loads import Indices
from lorikeet.cluster.routing.base import Router, least_loaded
from lorikeet.cluster.tables import RoutingTable
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId
from lorikeet.gateway.backends import Refused

REFUSED_S = 60.0
"""So long a backend that would not load an adapter gets no requests for it; then the reason may be gone."""


class _Refusal(NamedTuple):
    at_s: float
    error: Refused


class AroundRefusals(Router):
    """Routes by a policy, unless the backend that it chooses failed the request, or refused the adapter a moment ago.

    Then the request goes to another, of these to one that has the adapter, of these to the least loaded. Where all that
    would load the adapter have failed the request, one of them gets it again; where all have refused, the policy's
    choice is asked again.

    Args:
        policy: see above. It hears of none of this.
        failed_at: returns the backends that have failed a request.
    """

    def __init__(self, policy: Router, failed_at: Callable[[RequestId], Set[ReplicaId]]) -> None:
        self._policy = policy
        self._failed_at = failed_at
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

    def may_be_had(self, adapter: AdapterDigest, fleet: Fleet, now: float) -> bool:
        """Whether an open backend may load an adapter."""
        return len(_others(self._refused(adapter, now), fleet)) > 0

    def avoids(self, adapter: AdapterDigest, replica: ReplicaId, fleet: Fleet, now: float) -> bool:
        """Whether a backend would not load an adapter, while another may."""
        return replica in self._refused(adapter, now) and self.may_be_had(adapter, fleet, now)

    def route(self, asked: Asked, fleet: Fleet, now: float) -> ReplicaId | None:
        """See the class."""
        chosen = self._policy.route(asked, fleet, now)
        if chosen is None:
            return None
        for avoided in self._avoided(asked, now):
            if chosen not in avoided:
                break
            if len(others := _others(avoided, fleet)):
                return fleet.info(least_loaded(others, fleet, ~fleet.is_warm(asked.adapter))).replica
        return chosen

    def _avoided(self, asked: Asked, now: float) -> Iterator[Set[ReplicaId]]:
        """Yield the backends that a request should not go to, and those that it should not go to all the same."""
        refused = self._refused(asked.adapter, now)
        if failed := self._failed_at(asked.request_id):
            yield refused | failed
        yield refused

    def _refused(self, adapter: AdapterDigest | None, now: float) -> set[ReplicaId]:
        refusals = {} if adapter is None else self._refusals.get(adapter, {})
        return {replica for replica, refusal in refusals.items() if now < refusal.at_s + REFUSED_S}


def _others(avoided: Set[ReplicaId], fleet: Fleet) -> Indices:
    """Return the open backends but for some, ascending."""
    return np.array([index for replica, index in fleet.open_index.items() if replica not in avoided], np.intp)
