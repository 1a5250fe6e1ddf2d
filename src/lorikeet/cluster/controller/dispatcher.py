"""The data path of a cluster: which replica each request goes to, and which adapter must be there before it is sent.

The dispatcher does no I/O. Every call returns :class:`Actions`, which its owner carries out: a live client, the router
or the simulator.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from lorikeet.cluster.adapters.pool import AdapterPool, Fetch, PoolActions
from lorikeet.cluster.routing.base import Router
from lorikeet.cluster.routing.fleet import Fleet, ReplicaGauges, ReplicaInfo, RequestAverages, apply_outputs
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.cluster.tables import RoutingTable
from lorikeet.core.events import Finished
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId
from lorikeet.core.messages import StepOutputs


class Send(NamedTuple):
    """A request to hand to a replica; its adapter's files are there."""

    request_id: RequestId
    replica: ReplicaId


class Provision(NamedTuple):
    """A copy to make from an adapter's own files, since no replica holds it.

    Attributes:
        number: names it; its end is reported with it.
        adapter: what.
        replica: where to.
    """

    number: int
    adapter: AdapterDigest
    replica: ReplicaId


class Actions(NamedTuple):
    """What follows from a call.

    Attributes:
        sends: requests to hand over, in order.
        fetches: copies to make from one replica to another.
        provisions: copies to make from an adapter's own files.
        deletes: copies to delete.
        failed: requests whose adapter can be had from nowhere; they are forgotten here.
    """

    sends: tuple[Send, ...] = ()
    fetches: tuple[Fetch, ...] = ()
    provisions: tuple[Provision, ...] = ()
    deletes: tuple[tuple[AdapterDigest, ReplicaId], ...] = ()
    failed: tuple[RequestId, ...] = ()


@dataclass
class ActionsBuilder:
    """Actions while a call is under way."""

    sends: list[Send] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    provisions: list[Provision] = field(default_factory=list)
    deletes: list[tuple[AdapterDigest, ReplicaId]] = field(default_factory=list)
    failed: list[RequestId] = field(default_factory=list)

    def actions(self) -> Actions:
        """Return them."""
        return Actions(
            tuple(self.sends), tuple(self.fetches), tuple(self.provisions), tuple(self.deletes), tuple(self.failed)
        )


RETIRED_KNOWN = 10_000
"""So many retired adapters are remembered, the last ones: a copy of theirs may still turn up, with a replica that comes
back or for a request that goes on, and is not to stay."""


@dataclass
class _Known:
    """A request from its arrival to its end; ``in_pool`` from when its adapter is held for it or fetched."""

    asked: RoutingRequest
    in_pool: bool = False


@dataclass
class _Provisioning:
    """A provision under way, with those who wait for it, wherever they are to run; and where it has failed."""

    provision: Provision
    waiting: dict[RequestId, None] = field(default_factory=dict)
    tried: set[ReplicaId] = field(default_factory=set)


class Dispatcher:
    """See the module. Requests that no replica can take wait here, and are tried again in the order of their arrival.

    Args:
        router: chooses replicas; its table is set by :meth:`swap`.
        prefetch: copies are made as soon as a table asks for them, instead of with the first request.
        averages: over finished requests.

    Attributes:
        fleet: what is known of the replicas; to read.
        pool: who holds which adapter; to read.
        router: see above.
    """

    def __init__(self, router: Router, *, prefetch: bool = False, averages: RequestAverages | None = None) -> None:
        self.router = router
        self.fleet = Fleet(averages)
        self.pool = AdapterPool(RoutingTable(0, {}), prefetch, lambda replica: replica in self.fleet)
        self._prefetch = prefetch
        self._requests: dict[RequestId, _Known] = {}
        self._asking = Counter[AdapterDigest | None]()  # requests by adapter
        self._waiting: dict[RequestId, None] = {}
        self._provisioning: dict[AdapterDigest, _Provisioning] = {}
        self._retired: dict[AdapterDigest, None] = {}  # in the order in which they were
        self._numbers = count()

    @property
    def waiting(self) -> int:
        """Requests that no replica has taken."""
        return len(self._waiting)

    def uses(self, adapter: AdapterDigest) -> bool:
        """Whether a request needs an adapter, or a replica holds it or soon will."""
        return adapter in self._asking or adapter in self._provisioning or bool(self.pool.table.holders(adapter))

    # --- replicas ------------------------------------------------------------------------------------

    def join(self, info: ReplicaInfo, now: float, adapters: Iterable[AdapterDigest] = ()) -> Actions:
        """Take a replica in, with the adapters that lie in its folder already.

        Raises:
            ValueError: it is there; an earlier incarnation has to :meth:`leave` first.
        """
        self.fleet.join(info)
        held = set(adapters)
        for adapter in held:
            self.pool.seed(adapter, info.replica)
        collected = ActionsBuilder()
        self._try_waiting(collected, now)
        for adapter in sorted(held & self._retired.keys()):  # coming back with a copy does not make it wanted again
            self._take(self.pool.retire(adapter), collected)
        return collected.actions()

    def leave(self, replica: ReplicaId) -> tuple[Actions, list[RequestId]]:
        """Drop a replica that is gone. Its requests are returned: they are unknown here until they arrive again.

        Raises:
            KeyError: it is not there.
        """
        collected = ActionsBuilder()
        homeless = self.fleet.leave(replica)
        for each in homeless:
            self._remove(each)
        todo, _ = self.pool.leave(replica)  # what it alone held is provided anew when it is asked for
        self._take(todo, collected)
        for provisioning in list(self._provisioning.values()):
            for each in homeless:
                provisioning.waiting.pop(each, None)
            if provisioning.provision.replica == replica:
                del self._provisioning[provisioning.provision.adapter]
                self._begin_all(provisioning.waiting, collected)
        return collected.actions(), homeless

    def drain(self, replica: ReplicaId) -> None:
        """Send a replica no more requests; those that are there go on."""
        self.fleet.drain(replica)

    def reopen(self, replica: ReplicaId, now: float) -> Actions:
        """Send a replica requests again after a :meth:`drain`: those that wait, and copies that it should have.

        Raises:
            KeyError: it is not there.
        """
        self.fleet.reopen(replica)
        return self.swap(self.router.table or RoutingTable(0, {}), now)

    def apply_outputs(self, replica: ReplicaId, outputs: StepOutputs, now: float) -> Actions:
        """Take in what an engine told, except its gauges; a request that it has finished is forgotten here."""
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

    def on_admitted(self, replica: ReplicaId, request_id: RequestId, now: float) -> None:
        """A replica has begun to run a request; for owners whose replicas send no engine outputs, as the next three."""
        self.fleet.admitted(replica, request_id, now)

    def on_tokens(self, replica: ReplicaId, request_id: RequestId, tokens: int) -> None:
        """A replica has generated ``tokens`` more tokens for a request."""
        self.fleet.generated(replica, request_id, tokens)

    def on_adapter_loaded(self, replica: ReplicaId, adapter: AdapterDigest) -> None:
        """A replica has an adapter on its device."""
        self.fleet.loaded(replica, adapter)

    def on_adapter_evicted(self, replica: ReplicaId, adapter: AdapterDigest) -> None:
        """A replica has an adapter on its device no longer."""
        self.fleet.evicted(replica, adapter)

    def gauges(self, gauges: ReplicaGauges, now: float) -> Actions:
        """Take in what a replica counts."""
        collected = ActionsBuilder()
        if self.fleet.gauges(gauges):
            self._try_waiting(collected, now)
        return collected.actions()

    # --- requests ------------------------------------------------------------------------------------

    def arrive(self, asked: RoutingRequest, now: float) -> Actions:
        """Route a request that is new, or goes on after its replica has left.

        Raises:
            ValueError: it is here.
        """
        if asked.request_id in self._requests:
            raise ValueError(f"Request {asked.request_id} is here")
        self._requests[asked.request_id] = _Known(asked)
        self._asking[asked.adapter] += 1
        collected = ActionsBuilder()
        self._waiting[asked.request_id] = None
        self._try_waiting(collected, now)
        return collected.actions()

    def move(self, asked: RoutingRequest, target: ReplicaId, now: float) -> Actions:
        """Send a request elsewhere. Its owner has taken it back from where it was.

        Args:
            asked: the request with what it has generated.
            target: where to; if it has left, the request is routed anew.
            now: the present time.

        Raises:
            KeyError: the request is not here.
        """
        known = self._requests[asked.request_id]
        if asked.adapter in self._provisioning:
            self._provisioning[asked.adapter].waiting.pop(asked.request_id, None)
        collected = ActionsBuilder()
        self._leave_pool(known, collected)
        known.asked = asked
        if target in self.fleet:
            self.fleet.dispatched(asked, target)
            self._begin(known, target, collected)
        else:
            self.fleet.withdraw(asked.request_id)
            self._waiting[asked.request_id] = None
        self._try_waiting(collected, now)
        return collected.actions()

    def ended(self, request_id: RequestId, now: float, *, is_complete: bool) -> Actions:
        """A request has ended otherwise than by what its engine told: its client left, say. Unknown ones are ignored.

        Args:
            request_id: which.
            now: the present time.
            is_complete: it has got its whole answer.
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
        """A fetch has ended well."""
        return self._done(self.pool.fetched(fetch))

    def fetch_failed(self, fetch: Fetch) -> Actions:
        """A fetch has ended badly; the next holder is tried, and at last the adapter's own files."""
        return self._done(self.pool.fetch_failed(fetch))

    def provided(self, provision: Provision) -> Actions:
        """A provision has ended well; one of a replica that has left is ignored."""
        collected = ActionsBuilder()
        provisioning = self._provisioning.get(provision.adapter)
        if provisioning is not None and provisioning.provision == provision:
            del self._provisioning[provision.adapter]
            self.pool.seed(provision.adapter, provision.replica)
            self._begin_all(provisioning.waiting, collected)
            self._take(self.pool.fill(provision.adapter), collected)
            if provision.adapter in self._retired:
                self._take(self.pool.retire(provision.adapter), collected)
        return collected.actions()

    def provision_failed(self, provision: Provision, now: float) -> Actions:
        """A provision has ended badly.

        Those who wait for it go to a replica that has the adapter from elsewhere, if there is one; else it is tried
        where else somebody waits, and at last all who wait for it have failed. Others may have their places.
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
                self.fleet.dispatched(known.asked, least)
                self._begin(known, least, collected)
            self._try_waiting(collected, now)
            return collected.actions()
        provisioning.tried.add(provision.replica)
        where = {request_id: self._where(request_id) for request_id in provisioning.waiting}
        elsewhere = next((each for each in where.values() if each not in provisioning.tried), None)
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

    def know(self, adapter: AdapterDigest, holders: Iterable[ReplicaId] = ()) -> None:
        """An adapter may be asked for, perhaps again after it was retired; these replicas have it from before."""
        self._retired.pop(adapter, None)
        self.pool.keep(adapter)
        for replica in holders:
            self.pool.seed(adapter, replica)

    def retire(self, adapter: AdapterDigest) -> Actions:
        """An adapter is not wanted any longer; its copies are deleted when no request uses them."""
        self._retired[adapter] = None
        if len(self._retired) > RETIRED_KNOWN:
            del self._retired[next(iter(self._retired))]
        return self._done(self.pool.retire(adapter))

    def swap(self, table: RoutingTable, now: float) -> Actions:
        """Take a placement. Requests stay where they were sent; those that wait are tried by it."""
        if table is not self.router.table:
            self.router.table = table
        collected = ActionsBuilder()
        self._take(self.pool.swap(table), collected)
        if self._prefetch:
            self._provide_missing(table, collected)
        self._try_waiting(collected, now)
        return collected.actions()

    # --- within --------------------------------------------------------------------------------------

    def _route(self, asked: RoutingRequest, collected: ActionsBuilder, now: float) -> bool:
        """Send a request, or have its adapter brought first; False if it must wait."""
        replica = self.router.route(asked, self.fleet, now) if len(self.fleet.open) else None
        if replica is None:
            return False
        self.fleet.dispatched(asked, replica)
        self._begin(self._requests[asked.request_id], replica, collected)
        return True

    def _try_waiting(self, collected: ActionsBuilder, now: float) -> None:
        """Route those that wait, first come first served: the first that must go on waiting ends it."""
        while self._waiting:
            request_id = next(iter(self._waiting))
            if not self._route(self._requests[request_id].asked, collected, now):
                return
            del self._waiting[request_id]

    def _begin(self, known: _Known, replica: ReplicaId, collected: ActionsBuilder) -> None:
        """See to the adapter of a request that has been given a replica."""
        asked = known.asked
        if asked.adapter is None:
            collected.sends.append(Send(asked.request_id, replica))
        elif asked.adapter in self._provisioning and not self.pool.table.holds(replica, asked.adapter):
            self._provisioning[asked.adapter].waiting[asked.request_id] = None
        else:
            known.in_pool = True
            self._take(self.pool.begin(asked.request_id, asked.adapter, replica), collected)

    def _begin_all(self, waiting: Iterable[RequestId], collected: ActionsBuilder) -> None:
        for request_id in waiting:
            self._begin(self._requests[request_id], self._where(request_id), collected)

    def _where(self, request_id: RequestId) -> ReplicaId:
        """Return where a request is to run that waits for its adapter, or has it."""
        replica = self.fleet.where(request_id)
        assert replica is not None  # it was dispatched before its adapter was asked for
        return replica

    def _take(self, todo: PoolActions, collected: ActionsBuilder) -> None:
        """Collect what the pool asks for. Whoever it has failed is provided for from the adapter's own files."""
        collected.sends += [Send(request_id, self._where(request_id)) for request_id in todo.ready]
        collected.fetches += todo.fetches
        collected.deletes += todo.deletes
        for request_id in todo.failed:
            known = self._requests[request_id]
            known.in_pool = False
            adapter = known.asked.adapter
            assert adapter is not None  # the base model is in no pool
            provisioning = self._provisioning.get(adapter)
            if provisioning is None:
                provisioning = self._provision(adapter, self._where(request_id))
                collected.provisions.append(provisioning.provision)
            provisioning.waiting[request_id] = None

    def _provide_missing(self, table: RoutingTable, collected: ActionsBuilder) -> None:
        """Have a first copy made of every adapter that nobody holds; the others are fetched from there."""
        for adapter, shares in table.shares.items():
            replica = next((share.replica for share in shares if share.replica in self.fleet), None)
            is_had = adapter in self._provisioning or self.pool.table.holders(adapter)
            if replica is not None and not is_had:
                collected.provisions.append(self._provision(adapter, replica).provision)

    def _provision(self, adapter: AdapterDigest, replica: ReplicaId) -> _Provisioning:
        provisioning = _Provisioning(Provision(next(self._numbers), adapter, replica))
        self._provisioning[adapter] = provisioning
        return provisioning

    def _leave_pool(self, known: _Known, collected: ActionsBuilder) -> None:
        if known.in_pool:
            known.in_pool = False
            self._take(self.pool.end(known.asked.request_id), collected)

    def _forget(self, request_id: RequestId, collected: ActionsBuilder) -> None:
        known = self._remove(request_id)
        self._waiting.pop(request_id, None)
        if known.asked.adapter in self._provisioning:
            self._provisioning[known.asked.adapter].waiting.pop(request_id, None)
        self._leave_pool(known, collected)

    def _remove(self, request_id: RequestId) -> _Known:
        known = self._requests.pop(request_id)
        self._asking[known.asked.adapter] -= 1
        if not self._asking[known.asked.adapter]:
            del self._asking[known.asked.adapter]
        return known

    def _done(self, todo: PoolActions) -> Actions:
        collected = ActionsBuilder()
        self._take(todo, collected)
        return collected.actions()
