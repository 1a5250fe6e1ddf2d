"""Defines the interface of a routing policy, and the comparisons of load that the policies share."""

from abc import ABC, abstractmethod
from collections.abc import Set
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from lorikeet.cluster.routing.fleet import Fleet, Indices, Numbers
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.cluster.setup import PolicySetup
from lorikeet.cluster.tables import RoutingTable
from lorikeet.core.ids import ReplicaId
from lorikeet.core.replica_costs import ReplicaCosts


class Choice(NamedTuple):
    """Holds the replica that a policy chose for a request.

    Attributes:
        replica: an open replica.
        saved_s: seconds that the choice saves over all requests, compared with the mean of the open replicas. 0 if the
            policy does not compare seconds.
        scores: numbers by replica that the policy compared, the lowest first; None if it compared none.
        scored_by: the scores, in words.
    """

    replica: ReplicaId
    saved_s: float = 0.0
    scores: npt.NDArray[Any] | None = None
    scored_by: str = ""


class AdapterPlaces(NamedTuple):
    """Holds the replicas that should have a request's adapter and the replicas that have it.

    Attributes:
        table: the routing table to follow; None if any replica may serve any adapter.
        holders: replicas whose machine has a copy of the adapter; None if all machines have one.
    """

    table: RoutingTable | None = None
    holders: Set[ReplicaId] | None = None


ANYWHERE = AdapterPlaces()
"""Any replica may serve the request, and every machine has its adapter."""


class RoutingPolicy(ABC):
    """Chooses the replica of each request.

    The caller sends the request to the chosen replica and informs the fleet (``Fleet.dispatched``), so that the next
    choice counts the request. A policy may remember its choices, and assumes that callers follow them.

    Attributes:
        wants_keys: whether ``RoutingRequest.keys`` must be filled.
        may_leave_table: whether it may choose a replica that the table does not name.
        needs: names of inputs that the cluster must measure for the policy: ``learned_costs``, the costs of replicas in
            a simulation.
    """

    wants_keys: bool = False
    may_leave_table: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()
    _homes: "_Homes | None" = None

    @classmethod
    def build(cls, setup: PolicySetup, **parameters: Any) -> Self:
        """Create the policy for a cluster. Policies read everything except their parameters from ``setup``.

        Args:
            setup: the facts about the cluster.
            parameters: keyword-only arguments of the constructor that the preset sets.

        Raises:
            ConfigError: profile and options lack a value that the policy needs.
        """
        return cls(**parameters)

    @abstractmethod
    def route(self, request: RoutingRequest, fleet: Fleet, places: AdapterPlaces, now: float) -> Choice | None:
        """Choose a replica for a request.

        Args:
            request: the request to route.
            fleet: state of all replicas.
            places: desired and actual replicas of the request's adapter.
            now: seconds on the caller's clock.

        Returns:
            The choice; None if the request should wait. A waiting request is routed again when a request ends or a
            replica joins.
        """

    def learn(self, costs: ReplicaCosts) -> None:  # noqa: B027  # optional
        """Update the costs of a replica. Policies that do not compare costs ignore them."""

    def candidates(self, request: RoutingRequest, fleet: Fleet, table: RoutingTable | None) -> Indices:
        """Return the indices of the open replicas that may serve a request, ascending.

        The table names the replicas for the request's adapter. If none of these replicas is open, or if the request is
        for the base model, any open replica may serve the request.
        """
        if table is None or request.adapter is None or request.adapter not in table.shares:
            return fleet.open
        if self._homes is None or self._homes.table is not table or self._homes.changes != fleet.changes:
            self._homes = _Homes(table, fleet.changes, {})
        # The cache is by tuple, because all adapters share one tuple under full replication.
        shares = table.shares[request.adapter]
        homes = self._homes.by_shares.get(id(shares))
        if homes is None:
            open_index = fleet.open_index
            there = sorted(open_index[share.replica] for share in shares if share.replica in open_index)
            homes = np.array(there, np.intp) if there else fleet.open
            self._homes.by_shares[id(shares)] = homes
        return homes


class _Homes(NamedTuple):
    """Caches the candidates of adapters for one table and an unchanged fleet, by the id of their shares."""

    table: RoutingTable
    changes: int
    by_shares: dict[int, Indices]


class LeastCost(RoutingPolicy):
    """Chooses the replica with the lowest cost, or the first among equals. Subclasses define the cost."""

    @abstractmethod
    def costs(self, request: RoutingRequest, fleet: Fleet) -> Numbers:
        """Return the cost of a request at each replica."""

    def route(self, request: RoutingRequest, fleet: Fleet, places: AdapterPlaces, now: float) -> Choice | None:
        """Choose the replica with the lowest cost."""
        candidates = self.candidates(request, fleet, places.table)
        if not len(candidates):
            return None
        costs = self.costs(request, fleet)
        return Choice(fleet.info(least(candidates, costs)).replica, scores=costs, scored_by="cost of the request there")


def least(candidates: Indices, *keys: npt.NDArray[np.generic]) -> int:
    """Return the candidate with the smallest first key. Ties are decided by the next key, then by order.

    Args:
        candidates: indices, at least one, ascending.
        keys: arrays by replica.
    """
    for key in keys:
        values = key[candidates]
        candidates = candidates[values == values[values.argmin()]]
        if len(candidates) == 1:
            break
    return int(candidates[0])


def least_loaded(candidates: Indices, fleet: Fleet, *before: npt.NDArray[np.generic]) -> int:
    """Return the candidate with the fewest requests; among equals, the one with the fewest tokens to compute.

    Args:
        candidates: indices, at least one, ascending.
        fleet: state of all replicas.
        before: keys by replica that are compared first.
    """
    return least(candidates, *before, fleet.loads.requests, fleet.loads.pending_tokens)


def with_capacity(request: RoutingRequest, fleet: Fleet, candidates: Indices) -> Indices:
    """Return the candidates that have enough free memory for one more request.

    If the request would not fit even an empty candidate, waiting does not help. In that case all candidates are
    returned, and the chosen engine rejects the request with a reason.
    """
    loads = fleet.loads
    needed_tokens = fleet.needed_tokens(request, fleet.is_warm(request.adapter))
    fitting = candidates[(needed_tokens <= loads.free_tokens)[candidates]]
    if len(fitting) or (needed_tokens <= loads.total_tokens)[candidates].any():
        return fitting
    return candidates
