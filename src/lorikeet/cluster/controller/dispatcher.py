"""Routes the requests of a cluster, and copies a request's adapter to the replica before the request is sent there.

The dispatcher does no I/O. Every call returns :class:`Actions`. The caller (a live client, the router or the simulator)
carries them out.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import NamedTuple

import numpy as np

from lorikeet.cluster.adapters.pool import AdapterPool, Fetch, PoolActions
from lorikeet.cluster.routing.base import AdapterPlaces, Choice, RoutingPolicy, least_loaded
from lorikeet.cluster.routing.fleet import Fleet, ReplicaGauges, ReplicaInfo, RequestAverages, apply_outputs
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.cluster.tables import RoutingTable
from lorikeet.core.events import Finished
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId
from lorikeet.core.messages import StepOutputs


class Send(NamedTuple):
    """Sends a request to a replica that has the files of the request's adapter."""

    request_id: RequestId
    replica: ReplicaId


class Provision(NamedTuple):
    """Copies an adapter from its source files to a replica, because no replica holds the adapter.

    Attributes:
        number: number of the provision, by which the caller reports the outcome.
        adapter: version to copy.
        replica: destination.
    """

    number: int
    adapter: AdapterDigest
    replica: ReplicaId


class Saving(NamedTuple):
    """Records the seconds that a routing choice saves, compared with the mean of the open replicas.

    If the adapter must be copied first, the request is sent later.
    """

    request_id: RequestId
    choice: Choice


class Actions(NamedTuple):
    """Lists the actions that the caller must carry out after a call.

    Attributes:
        sends: requests to send, in order.
        fetches: copies to make from one replica to another.
        provisions: copies to make from an adapter's source files.
        deletes: copies to delete.
        failed: requests whose adapter cannot be copied from any source. The dispatcher no longer tracks these requests.
        savings: choices that save seconds, for the statistics.
    """

    sends: tuple[Send, ...] = ()
    fetches: tuple[Fetch, ...] = ()
    provisions: tuple[Provision, ...] = ()
    deletes: tuple[tuple[AdapterDigest, ReplicaId], ...] = ()
    failed: tuple[RequestId, ...] = ()
    savings: tuple[Saving, ...] = ()


@dataclass
class ActionsBuilder:
    """Collects the actions of a call."""

    sends: list[Send] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    provisions: list[Provision] = field(default_factory=list)
    deletes: list[tuple[AdapterDigest, ReplicaId]] = field(default_factory=list)
    failed: list[RequestId] = field(default_factory=list)
    savings: list[Saving] = field(default_factory=list)

    def actions(self) -> Actions:
        """Return the actions collected so far."""
        return Actions(
            sends=tuple(self.sends),
            fetches=tuple(self.fetches),
            provisions=tuple(self.provisions),
            deletes=tuple(self.deletes),
            failed=tuple(self.failed),
            savings=tuple(self.savings),
        )


MAX_RETIRED = 10_000
"""Number of retired adapters that are remembered; the oldest are forgotten.

A copy of a retired adapter may still appear, on a replica that returns or for a request that continues. Such a copy is
deleted.
"""


MAX_SESSIONS = 1 << 16
"""Number of sessions that are remembered, the latest used ones."""


REST_S = 60.0
"""Seconds for which a replica that could not store an adapter gets no other adapters, because its disk is probably
full."""


@dataclass
class _RequestState:
    """Tracks a request from its arrival to its end. ``in_pool`` is true while the adapter pool counts the request."""

    request: RoutingRequest
    in_pool: bool = False


@dataclass
class _Provisioning:
    """Holds a running provision and the requests that wait for it.

    The requests may belong to any replica. ``tried`` names the replicas where the provision has failed.
    """

    provision: Provision
    waiting: dict[RequestId, None] = field(default_factory=dict)
    tried: set[ReplicaId] = field(default_factory=set)


class Dispatcher:
    """Assigns requests to replicas and keeps their adapters available there.

    Requests that no replica can accept wait in the dispatcher, and are routed again in the order of their arrival.

    Args:
        routing: chooses the replica of each request.
        prefetch: whether copies are made as soon as a routing table requires them, instead of at the first request.
        averages: averages over finished requests.
        held_share: limit of the bytes of all copies, as a share of the bytes that every adapter on every replica
            would need.

    Attributes:
        fleet: state of the replicas; callers only read it.
        pool: copies of adapters at each replica; callers only read it.
        routing: the routing policy.
        table: the last routing table; None before the first :meth:`swap`.
    """

    def __init__(
        self,
        routing: RoutingPolicy,
        *,
        prefetch: bool = False,
        averages: RequestAverages | None = None,
        held_share: float = 1.0,
    ) -> None:
        self.routing = routing
        self.table: RoutingTable | None = None
        self.fleet = Fleet(averages)
        self._held_share = held_share
        self.pool = AdapterPool(RoutingTable(0, {}), prefetch, self._may_get_copies, self._most_bytes)
        self._prefetch = prefetch
        self._requests: dict[RequestId, _RequestState] = {}
        self._requests_by_adapter = Counter[AdapterDigest | None]()  # number of requests by adapter
        self._waiting: dict[RequestId, None] = {}
        self._provisioning: dict[AdapterDigest, _Provisioning] = {}
        self._retired: dict[AdapterDigest, None] = {}  # in the order of their retirement
        self._rests_until_s: dict[
            ReplicaId, float
        ] = {}  # time until which each replica that could not store an adapter gets no other adapters
        self._numbers = count()
        self._sessions: OrderedDict[str, ReplicaId] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a replica."""
        return len(self._waiting)

    def uses(self, adapter: AdapterDigest) -> bool:
        """Return whether a request uses an adapter, or a replica holds or fetches the adapter."""
        return (
            adapter in self._requests_by_adapter
            or adapter in self._provisioning
            or bool(self.pool.table.holders(adapter))
        )

    # --- replicas ------------------------------------------------------------------------------------

    def join(self, info: ReplicaInfo, now: float, adapters: Iterable[AdapterDigest] = ()) -> Actions:
        """Add a replica, with the adapters that are already in its folder.

        Raises:
            ValueError: the replica is present; its earlier incarnation must :meth:`leave` first.
        """
        self.fleet.join(info)
        held = set(adapters)
        for adapter in held:
            self.pool.seed(adapter, info.replica)
        collected = ActionsBuilder()
        self._try_waiting(collected, now)
        for adapter in sorted(
            held & self._retired.keys()
        ):  # a returning replica's copy does not undo the retirement of its adapter
            self._take(self.pool.retire(adapter), collected)
        return collected.actions()

    def leave(self, replica: ReplicaId) -> tuple[Actions, list[RequestId]]:
        """Remove a replica that is gone, and return its requests.

        The dispatcher does not track the returned requests until they arrive again.

        Raises:
            KeyError: unknown replica.
        """
        collected = ActionsBuilder()
        self._rests_until_s.pop(replica, None)
        orphaned = self.fleet.leave(replica)
        for each in orphaned:
            self._remove(each)
        pool_actions, _ = self.pool.leave(
            replica
        )  # adapters that only this replica held are provided again when a request needs them
        self._take(pool_actions, collected)
        for provisioning in list(self._provisioning.values()):
            for each in orphaned:
                provisioning.waiting.pop(each, None)
            if provisioning.provision.replica == replica:
                del self._provisioning[provisioning.provision.adapter]
                self._begin_all(provisioning.waiting, collected)
        return collected.actions(), orphaned

    def drain(self, replica: ReplicaId) -> None:
        """Stop sending requests to a replica; its running requests continue."""
        self.fleet.drain(replica)

    def reopen(self, replica: ReplicaId, now: float) -> Actions:
        """Undo :meth:`drain`: send waiting requests to the replica, and make the copies that the table requires.

        Raises:
            KeyError: unknown replica.
        """
        self.fleet.reopen(replica)
        return self.swap(self.table or RoutingTable(0, {}), now)

    def apply_outputs(self, replica: ReplicaId, outputs: StepOutputs, now: float) -> Actions:
        """Apply the events that an engine reported, except its gauges. Finished requests are forgotten."""
        finished = [
            event
            for event in outputs.events
            if isinstance(event, Finished) and self.fleet.where(event.request_id) == replica
        ]
        apply_outputs(self.fleet, replica, outputs)
        collected = ActionsBuilder()
        for event in finished:
            self._forget(event.request_id, collected)
        if finished:
            self._try_waiting(collected, now)
        return collected.actions()

    def on_first_token(self, replica: ReplicaId, request_id: RequestId, now: float) -> None:
        """Record that a replica runs a request and has generated its first token.

        Callers that receive no engine outputs use this method and the next three.
        """
        self.fleet.started(replica, request_id, now)

    def on_tokens(self, replica: ReplicaId, request_id: RequestId, tokens: int) -> None:
        """Record that a replica has generated ``tokens`` more tokens for a request."""
        self.fleet.generated(replica, request_id, tokens)

    def on_adapter_loaded(self, replica: ReplicaId, adapter: AdapterDigest) -> None:
        """Record that a replica has loaded an adapter to its device."""
        self.fleet.loaded(replica, adapter)

    def on_adapter_evicted(self, replica: ReplicaId, adapter: AdapterDigest) -> None:
        """Record that a replica has evicted an adapter from its device."""
        self.fleet.evicted(replica, adapter)

    def gauges(self, gauges: ReplicaGauges, now: float) -> Actions:
        """Apply the gauges of a replica."""
        collected = ActionsBuilder()
        if self.fleet.gauges(gauges):
            self._try_waiting(collected, now)
        return collected.actions()

    # --- requests ------------------------------------------------------------------------------------

    def arrive(self, request: RoutingRequest, now: float, home: ReplicaId | None = None) -> Actions:
        """Route a request that is new, or that continues after its replica has left.

        Args:
            request: the request.
            now: current time, seconds.
            home: replica that gets the request if it is open.

        Raises:
            ValueError: the request is known already.
        """
        if request.request_id in self._requests:
            raise ValueError(f"Request {request.request_id} is known already")
        self._requests[request.request_id] = _RequestState(request)
        self._requests_by_adapter[request.adapter] += 1
        collected = ActionsBuilder()
        if home is not None and home in self.fleet.open_index:
            self.fleet.dispatched(request, home)
            self._begin(self._requests[request.request_id], home, collected)
        else:
            self._waiting[request.request_id] = None
        self._try_waiting(collected, now)
        return collected.actions()

    def move(self, request: RoutingRequest, target: ReplicaId | None, now: float) -> Actions:
        """Move a request to another replica. The caller has taken it back from its old replica.

        Args:
            request: the request, with the tokens that it has generated.
            target: destination; if it has left, or is None, the request is routed again.
            now: current time, seconds.

        Raises:
            KeyError: unknown request.
        """
        known = self._requests[request.request_id]
        if request.adapter in self._provisioning:
            self._provisioning[request.adapter].waiting.pop(request.request_id, None)
        collected = ActionsBuilder()
        self._leave_pool(known, collected)
        known.request = request
        if target is not None and target in self.fleet:
            self.fleet.dispatched(request, target)
            self._begin(known, target, collected)
        else:
            self.fleet.withdraw(request.request_id)
            self._waiting[request.request_id] = None
        self._try_waiting(collected, now)
        return collected.actions()

    def ended(self, request_id: RequestId, now: float, *, is_complete: bool) -> Actions:
        """Record that a request has ended without an engine event, for example by an abort.

        Unknown requests are ignored.

        Args:
            request_id: id of the request.
            now: current time, seconds.
            is_complete: whether the client has the whole answer.
        """
        collected = ActionsBuilder()
        if request_id in self._requests:
            replica = self.fleet.where(request_id)
            if replica is not None:
                self.fleet.ended(replica, request_id, now, is_complete=is_complete)
            self._forget(request_id, collected)
            self._try_waiting(collected, now)
        return collected.actions()

    # --- adapters ------------------------------------------------------------------------------------

    def fetched(self, fetch: Fetch) -> Actions:
        """Record that a fetch has succeeded."""
        return self._done(self.pool.fetched(fetch))

    def fetch_failed(self, fetch: Fetch, *, is_storable: bool = True) -> Actions:
        """Record that a fetch has failed. The dispatcher tries the next holder, and finally the adapter's source files.

        Args:
            fetch: the failed fetch.
            is_storable: false if the destination cannot store the copy, so that another source would not help.
        """
        return self._done(self.pool.fetch_failed(fetch, may_retry=is_storable))

    def provided(self, provision: Provision) -> Actions:
        """Record that a provision has succeeded. If its replica has left, the provision is ignored."""
        collected = ActionsBuilder()
        provisioning = self._provisioning.get(provision.adapter)
        if provisioning is not None and provisioning.provision == provision:
            del self._provisioning[provision.adapter]
            self.pool.seed(provision.adapter, provision.replica)
            self._begin_all(provisioning.waiting, collected)
            self._take(self.pool.fetch_missing(provision.adapter), collected)
            if provision.adapter in self._retired:
                self._take(self.pool.retire(provision.adapter), collected)
        return collected.actions()

    def rest(self, replica: ReplicaId, now: float) -> bool:
        """Record that a replica could not store an adapter.

        For ``REST_S`` seconds the replica gets no other adapter if another replica can store it.

        Returns:
            True unless the replica was already resting.
        """
        is_new = self._rests_until_s.get(replica, now) <= now
        if replica in self.fleet:
            self._rests_until_s[replica] = now + REST_S
        return is_new

    def provision_failed(self, provision: Provision, now: float, *, is_storable: bool = True) -> Actions:
        """Record that a provision has failed.

        If an open replica has the adapter by now, the waiting requests are sent there. Otherwise the provision is tried
        at another replica where a request waits for the adapter. If all these replicas have failed, the requests fail.

        Args:
            provision: the failed provision.
            now: current time, seconds.
            is_storable: false if the replica cannot store the adapter. In that case every other open replica is tried
                too.
        """
        provisioning = self._provisioning.get(provision.adapter)
        if provisioning is None or provisioning.provision != provision:
            return Actions()
        collected = ActionsBuilder()
        if holders := self.pool.table.holders(provision.adapter) & self.fleet.open_index.keys():
            del self._provisioning[provision.adapter]
            for request_id in provisioning.waiting:
                known = self._requests[request_id]
                least = min(holders, key=lambda each: (self.fleet.loads.requests[self.fleet.open_index[each]], each))
                self.fleet.dispatched(known.request, least)
                self._begin(known, least, collected)
            self._try_waiting(collected, now)
            return collected.actions()
        provisioning.tried.add(provision.replica)
        where = {request_id: self._where(request_id) for request_id in provisioning.waiting}
        elsewhere = next((each for each in where.values() if each not in provisioning.tried), None)
        if not is_storable and where:
            if elsewhere is None:
                elsewhere = self._with_room(self._requests[next(iter(where))].request, provisioning.tried, now)
            for request_id, replica in where.items():
                if elsewhere is not None and replica in provisioning.tried:
                    self.fleet.dispatched(self._requests[request_id].request, elsewhere)
        if elsewhere is not None:
            provisioning.provision = Provision(next(self._numbers), provision.adapter, elsewhere)
            return Actions(provisions=(provisioning.provision,))
        del self._provisioning[provision.adapter]
        for request_id, replica in where.items():
            self.fleet.ended(replica, request_id, now, is_complete=False)
            self._remove(request_id)
        collected.failed += where
        self._try_waiting(collected, now)
        return collected.actions()

    def register(self, adapter: AdapterDigest, holders: Iterable[ReplicaId] = (), size_bytes: int = 0) -> None:
        """Accept requests for an adapter, even if it was retired before.

        ``holders`` are the replicas that already have a copy.
        """
        self._retired.pop(adapter, None)
        self.pool.keep(adapter)
        self.pool.size(adapter, size_bytes)
        for replica in holders:
            self.pool.seed(adapter, replica)

    def retire(self, adapter: AdapterDigest) -> Actions:
        """Stop serving an adapter. Its copies are deleted as soon as no request uses them."""
        self._retired[adapter] = None
        if len(self._retired) > MAX_RETIRED:
            del self._retired[next(iter(self._retired))]
        return self._done(self.pool.retire(adapter))

    def swap(self, table: RoutingTable, now: float) -> Actions:
        """Replace the routing table.

        Requests stay where they were sent. Waiting requests are routed with the new table.
        """
        self.table = table
        collected = ActionsBuilder()
        self._take(self.pool.swap(table), collected)
        if self._prefetch:
            self._provide_missing(table, collected)
        self._try_waiting(collected, now)
        return collected.actions()

    # --- internal --------------------------------------------------------------------------------------

    def _route(self, request: RoutingRequest, collected: ActionsBuilder, now: float) -> bool:
        """Choose a replica for a request and begin the request there. Return False if the request must wait."""
        adapter = request.adapter
        places = AdapterPlaces(self.table, None if adapter is None else self.pool.table.holders(adapter))
        choice = self._home(request) if request.session else None
        if choice is None and len(self.fleet.open):
            choice = self.routing.route(request, self.fleet, places, now)
        if choice is None:
            return False
        is_there = adapter is None or self.pool.table.holds(choice.replica, adapter)
        if not is_there and self._rests(choice.replica, now):
            choice = Choice(self._with_room(request, (), now) or choice.replica)
        if choice.saved_s:
            collected.savings.append(Saving(request.request_id, choice))
        self.fleet.dispatched(request, choice.replica)
        if request.session:
            self._sessions[request.session] = choice.replica
            self._sessions.move_to_end(request.session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        self._begin(self._requests[request.request_id], choice.replica, collected)
        return True

    def _home(self, request: RoutingRequest) -> Choice | None:
        """Return the replica that the last request of a session went to; None if it is not open, or unknown.

        A table that names other replicas for the adapter goes first: it has moved meanwhile.
        """
        home = self._sessions.get(request.session)
        if home is None or home not in self.fleet.open_index:
            return None
        shares = () if self.table is None or request.adapter is None else self.table.shares.get(request.adapter, ())
        return Choice(home) if not shares or any(share.replica == home for share in shares) else None

    def _rests(self, replica: ReplicaId, now: float) -> bool:
        """Return whether a replica recently failed to store an adapter."""
        if (until_s := self._rests_until_s.get(replica)) is not None and until_s <= now:
            del self._rests_until_s[replica]
        return replica in self._rests_until_s

    def _most_bytes(self) -> float:
        if self._held_share >= 1:
            return inf
        return self._held_share * len(self.fleet) * self.pool.total_bytes

    def _may_get_copies(self, replica: ReplicaId) -> bool:
        return replica in self.fleet and replica not in self._rests_until_s

    def _with_room(self, request: RoutingRequest, tried: Collection[ReplicaId], now: float) -> ReplicaId | None:
        """Return another open replica for a request whose adapter the chosen replica cannot store.

        Replicas that do not rest come first, then replicas that hold the adapter, then the least loaded replica.

        Args:
            request: the request.
            tried: replicas to exclude.
            now: current time, seconds.
        """
        fleet = self.fleet
        adapter = request.adapter
        left = {replica: index for replica, index in fleet.open_index.items() if replica not in tried}
        if not left or adapter is None:
            return None
        holders = self.pool.table.holders(adapter)
        ready = [replica for replica in left if replica in holders or not self._rests(replica, now)] or list(left)
        indices = np.array([left[replica] for replica in ready], np.intp)
        lacking = np.array([info.replica not in holders for info in fleet.infos()])
        return fleet.info(least_loaded(indices, fleet, lacking)).replica

    def _try_waiting(self, collected: ActionsBuilder, now: float) -> None:
        """Route waiting requests, first come first served, until one of them must still wait."""
        while self._waiting:
            request_id = next(iter(self._waiting))
            if not self._route(self._requests[request_id].request, collected, now):
                return
            del self._waiting[request_id]

    def _begin(self, known: _RequestState, replica: ReplicaId, collected: ActionsBuilder) -> None:
        """Make the adapter of a dispatched request available at its replica.

        If the adapter is available already, send the request.
        """
        request = known.request
        if request.adapter is None:
            collected.sends.append(Send(request.request_id, replica))
        elif request.adapter in self._provisioning and not self.pool.table.holds(replica, request.adapter):
            self._provisioning[request.adapter].waiting[request.request_id] = None
        else:
            known.in_pool = True
            self._take(self.pool.begin(request.request_id, request.adapter, replica), collected)

    def _begin_all(self, waiting: Iterable[RequestId], collected: ActionsBuilder) -> None:
        for request_id in waiting:
            self._begin(self._requests[request_id], self._where(request_id), collected)

    def _where(self, request_id: RequestId) -> ReplicaId:
        """Return the replica of a request that has been dispatched."""
        replica = self.fleet.where(request_id)
        assert replica is not None  # The pool is called only after the request was dispatched.
        return replica

    def _take(self, todo: PoolActions, collected: ActionsBuilder) -> None:
        """Collect the actions of the pool. If the pool failed requests, copy their adapter from its source files."""
        collected.sends += [Send(request_id, self._where(request_id)) for request_id in todo.ready]
        collected.fetches += todo.fetches
        collected.deletes += todo.deletes
        for request_id in todo.failed:
            known = self._requests[request_id]
            known.in_pool = False
            adapter = known.request.adapter
            assert adapter is not None  # Requests of the base model never enter the pool.
            provisioning = self._provisioning.get(adapter)
            if provisioning is None:
                provisioning = self._provision(adapter, self._where(request_id))
                collected.provisions.append(provisioning.provision)
            provisioning.waiting[request_id] = None

    def _provide_missing(self, table: RoutingTable, collected: ActionsBuilder) -> None:
        """Make a first copy of every adapter that no replica holds. Other replicas fetch from this copy."""
        for adapter, shares in table.shares.items():
            replica = next((share.replica for share in shares if share.replica in self.fleet), None)
            is_had = adapter in self._provisioning or self.pool.table.holders(adapter)
            if replica is not None and not is_had:
                collected.provisions.append(self._provision(adapter, replica).provision)

    def _provision(self, adapter: AdapterDigest, replica: ReplicaId) -> _Provisioning:
        provisioning = _Provisioning(Provision(next(self._numbers), adapter, replica))
        self._provisioning[adapter] = provisioning
        return provisioning

    def _leave_pool(self, known: _RequestState, collected: ActionsBuilder) -> None:
        if known.in_pool:
            known.in_pool = False
            self._take(self.pool.end(known.request.request_id), collected)

    def _forget(self, request_id: RequestId, collected: ActionsBuilder) -> None:
        known = self._remove(request_id)
        self._waiting.pop(request_id, None)
        if known.request.adapter in self._provisioning:
            self._provisioning[known.request.adapter].waiting.pop(request_id, None)
        self._leave_pool(known, collected)

    def _remove(self, request_id: RequestId) -> _RequestState:
        known = self._requests.pop(request_id)
        self._requests_by_adapter[known.request.adapter] -= 1
        if not self._requests_by_adapter[known.request.adapter]:
            del self._requests_by_adapter[known.request.adapter]
        return known

    def _done(self, todo: PoolActions) -> Actions:
        collected = ActionsBuilder()
        self._take(todo, collected)
        return collected.actions()
