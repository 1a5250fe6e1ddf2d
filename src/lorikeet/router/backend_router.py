"""Finds a backend for each request, and has adapters loaded where they must be. Owns the router's dispatcher.

Backends that failed a request, or would not load its adapter, are excluded while others may serve it.

To a dispatcher a copy is a copy: a backend reads an adapter from its source, whichever other backend has it, so fetches
from a peer and provisions are both a call to load, and deletes a call to unload.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from lorikeet.api.errors import ApiError, hide_paths
from lorikeet.api.logs import log
from lorikeet.cluster.adapters.pool import Fetch
from lorikeet.cluster.controller.dispatcher import Actions, Dispatcher, Provision
from lorikeet.cluster.routing.base import Router, least_loaded
from lorikeet.cluster.routing.fleet import Fleet, Indices, ReplicaGauges, ReplicaInfo
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.cluster.tables import RoutingTable
from lorikeet.cluster.tasks import BackgroundTasks
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId
from lorikeet.router.adapters import RoutedAdapter
from lorikeet.router.backends import Backend, BackendRefused
from lorikeet.router.connections import NotConnected, ServerLost, plain_reason
from lorikeet.router.proxied_request import ProxiedRequest, routing_request

REFUSED_S = 60.0
"""So long a backend that would not load an adapter gets no requests for it; then the reason may be gone."""


class _Refusal(NamedTuple):
    at_s: float
    error: BackendRefused


class ExclusionRouter(Router):
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

    def refused(self, adapter: AdapterDigest, replica: ReplicaId, error: BackendRefused, now: float) -> None:
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

    def why(self, adapter: AdapterDigest) -> BackendRefused | None:
        """Return what was said last by one that would not load an adapter; None if nobody said so."""
        refusals = self._refusals.get(adapter)
        return max(refusals.values(), key=lambda refusal: refusal.at_s).error if refusals else None

    def may_be_had(self, adapter: AdapterDigest, fleet: Fleet, now: float) -> bool:
        """Whether an open backend may load an adapter."""
        return len(_others(self._refused(adapter, now), fleet)) > 0

    def avoids(self, adapter: AdapterDigest, replica: ReplicaId, fleet: Fleet, now: float) -> bool:
        """Whether a backend would not load an adapter, while another may."""
        return replica in self._refused(adapter, now) and self.may_be_had(adapter, fleet, now)

    def route(self, asked: RoutingRequest, fleet: Fleet, now: float) -> ReplicaId | None:
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

    def _avoided(self, asked: RoutingRequest, now: float) -> Iterator[Set[ReplicaId]]:
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


WAIT_S = 300.0
"""A request waits at most so long for a backend that has its adapter."""


class BackendRouter:
    """See the module. All methods run in one event loop.

    Args:
        backends: none of them up.
        dispatcher: fresh; its router is the policy.

    Attributes:
        backends: by replica.
        dispatcher: to read.
        versions: adapters that requests may ask for, and those that a request or a backend has still; to read.
        on_change: called when a backend has come or gone, takes no more requests, or takes them again.
    """

    def __init__(self, backends: Sequence[Backend], dispatcher: Dispatcher) -> None:
        self.backends = {backend.replica: backend for backend in backends}
        self.dispatcher = dispatcher
        self.on_change: Callable[[], object] = lambda: None
        self.versions: dict[AdapterDigest, RoutedAdapter] = {}
        self._dropped: set[AdapterDigest] = set()
        """Of the versions those that are forgotten as soon as nobody has them."""
        self._requests: dict[RequestId, ProxiedRequest] = {}
        self._router = dispatcher.router = ExclusionRouter(
            dispatcher.router, lambda each: self._requests[each].failed_at
        )
        self._tasks = BackgroundTasks()
        self._copying: dict[ReplicaId, set[asyncio.Task[Any]]] = {replica: set() for replica in self.backends}
        self._gauge = 0

    async def close(self) -> None:
        """End what backends are loading and unloading, and all connections to them."""
        await self._tasks.close()
        for backend in self.backends.values():
            await backend.close()

    # --- adapters and placement ----------------------------------------------------------------------

    def know(self, adapter: RoutedAdapter) -> None:
        """Requests may come for an adapter."""
        self.versions[adapter.digest] = adapter
        self._dropped.discard(adapter.digest)
        self.dispatcher.register(adapter.digest)

    def retire(self, adapter: RoutedAdapter) -> None:
        """No more requests come for an adapter: backends unload it when those that there are have ended."""
        self._do(self.dispatcher.retire(adapter.digest))

    def drop(self, adapter: RoutedAdapter) -> None:
        """A retired adapter is in no placement any longer. It is forgotten here, or later if somebody has it still."""
        self._dropped.add(adapter.digest)
        held = {digest for backend in self.backends.values() for digest in backend.adapters.values()}
        for digest in self._dropped - held:
            if not self.dispatcher.uses(digest):
                self._dropped.discard(digest)
                del self.versions[digest]
                self._router.forget(digest)

    def swap(self, table: RoutingTable) -> None:
        """Take a placement, unless it is the one that counts."""
        if table is not self.dispatcher.router.table:
            self._do(self.dispatcher.swap(table, time.monotonic()))

    # --- requests ------------------------------------------------------------------------------------

    async def place(self, request: ProxiedRequest) -> Backend:
        """Return a backend for a request that is nowhere; its adapter has been loaded there.

        Raises:
            ApiError: no backend can load the adapter, or none has been there for long.
        """
        request.begin()
        self._requests[request.request_id] = request
        self._arrive(request)
        try:
            async with asyncio.timeout(WAIT_S):
                request.backend = await request.placed
        except BaseException as error:
            why = self._why_waiting(request)
            self.release(request)
            if isinstance(error, TimeoutError):
                raise ApiError(503, f"{why} for {WAIT_S:g} s{self.troubles()}.") from None
            raise
        return request.backend

    def _why_waiting(self, request: ProxiedRequest) -> str:
        if not self.dispatcher.fleet.open_index:
            return "No backend has been there"
        if self.dispatcher.fleet.where(request.request_id) is None:
            return "No backend has had room for this request"
        return "This request has waited for a backend to load its adapter"

    def started(self, request: ProxiedRequest) -> None:
        """A request's backend has given its first token."""
        if not request.is_started:
            request.is_started = True
            if request.is_known and request.backend is not None:
                replica = request.backend.replica
                self.dispatcher.on_tokens(replica, request.request_id, 1)
                self.dispatcher.on_admitted(replica, request.request_id, time.monotonic())

    def finished(self, request: ProxiedRequest, output_tokens: int) -> None:
        """A request has its whole answer, of so many tokens over all backends."""
        if request.is_known and request.backend is not None:
            rest = max(0, output_tokens - request.output_tokens - request.is_started)
            self.dispatcher.on_tokens(request.backend.replica, request.request_id, rest)
            self._do(self.dispatcher.ended(request.request_id, time.monotonic(), is_complete=True))
        self._forget(request)

    def release(self, request: ProxiedRequest) -> None:
        """A request is at its backend no longer, and has no whole answer. A second call does nothing."""
        if request.is_known:
            self._forget(request)
            self._do(self.dispatcher.ended(request.request_id, time.monotonic(), is_complete=False))
        self._forget(request)

    def refused(self, request: ProxiedRequest, error: BackendRefused) -> bool:
        """A request's backend has lost its adapter and would not load it again; return whether another may."""
        assert request.adapter is not None
        assert request.backend is not None
        self._router.refused(request.adapter.digest, request.backend.replica, error, time.monotonic())
        return self._may_be_had(request.adapter)

    def _may_be_had(self, adapter: RoutedAdapter) -> bool:
        """Whether an open backend may load an adapter."""
        return self._router.may_be_had(adapter.digest, self.dispatcher.fleet, time.monotonic())

    def _forget(self, request: ProxiedRequest) -> None:
        request.is_known = False
        self._requests.pop(request.request_id, None)

    def _arrive(self, request: ProxiedRequest) -> None:
        now, router = time.monotonic(), self.dispatcher.router
        request.is_known = True
        if request.adapter is not None and request.adapter.digest not in self.versions:
            # It was dropped while this request was on its way from one backend to another.
            self.versions[request.adapter.digest] = request.adapter
            self._dropped.add(request.adapter.digest)
        body = routing_request(
            request.request_id,
            request.body,
            request.adapter,
            request.prompt_tokens,
            request.output_tokens,
            self.dispatcher.fleet.averages,
            wants_keys=router.wants_keys,
        )
        self._do(self.dispatcher.arrive(body, now))

    # --- backends ------------------------------------------------------------------------------------

    def troubles(self) -> str:
        """Return why backends are not there, to follow a sentence that says so; empty where that is not known."""
        known = [f"{backend.replica}: {backend.trouble}" for backend in self.backends.values() if backend.trouble]
        return f" ({'; '.join(known)})" if known else ""

    def down(self, backend: Backend, why: str) -> None:
        """A backend is gone, with all that was there. Its requests go on elsewhere."""
        if not backend.is_up:
            return
        log.warning("backend down", backend=backend.url, reason=why)
        backend.left()
        for task in self._copying[backend.replica] - {asyncio.current_task()}:
            task.cancel()
        actions, homeless = self.dispatcher.leave(backend.replica)
        rides = [self._requests[request_id] for request_id in homeless]
        for request in rides:
            request.is_known = False
        self._do(actions)
        for request in rides:
            if request.placed.done():
                request.lose()  # its own task places it again
                continue
            try:
                request.count_loss()
            except ApiError as error:
                del self._requests[request.request_id]
                request.placed.set_exception(error)
            else:
                self._arrive(request)
        self.on_change()

    def up(self, backend: Backend, adapters: Iterable[RoutedAdapter]) -> None:
        """A backend has come, or come back; it lists its models already.

        Args:
            backend: which.
            adapters: those that it need not load again if it lists them.
        """
        backend.joined()
        self._router.came(backend.replica)
        held = [adapter.digest for adapter in adapters if backend.adopt(adapter)]
        log.info("backend up", backend=backend.url, adapters=len(held))
        now = time.monotonic()
        self._do(self.dispatcher.join(ReplicaInfo(backend.replica, backend.epoch), now, held))
        for digest in held:
            self.dispatcher.on_adapter_loaded(backend.replica, digest)
        if (table := self.dispatcher.router.table) is not None:
            self._do(self.dispatcher.swap(table, now))  # where copies are made unasked, what it has lost is made anew
        self.on_change()

    def drain(self, backend: Backend) -> None:
        """A backend takes no more requests, and finishes those that it has."""
        log.warning("backend drains", backend=backend.url)
        backend.is_open = False
        self.dispatcher.drain(backend.replica)
        self.on_change()

    def reopen(self, backend: Backend) -> None:
        """A backend takes requests again, and still has those that it had."""
        log.info("backend open again", backend=backend.url)
        backend.reopened()
        self._do(self.dispatcher.reopen(backend.replica, time.monotonic()))
        self.on_change()

    def gauge(self, backend: Backend, requests: int) -> None:
        """A backend tells how many requests it has, whoever sent them."""
        self._gauge += 1
        self._do(
            self.dispatcher.gauges(
                ReplicaGauges(backend.replica, backend.epoch, self._gauge, requests), time.monotonic()
            )
        )

    # --- what the dispatcher asks for ----------------------------------------------------------------

    def _do(self, actions: Actions) -> None:
        for request_id, replica in actions.sends:
            request = self._requests.get(request_id)
            if request is not None and not request.placed.done():
                request.placed.set_result(self.backends[replica])
        for fetch in actions.fetches:
            self._copy(self._fetch(fetch, self.versions[fetch.adapter]), fetch.destination)
        for provision in actions.provisions:
            self._copy(self._provide(provision, self.versions[provision.adapter]), provision.replica)
        for digest, replica in actions.deletes:
            self._copy(self._delete(self.versions[digest], replica), replica)
        for request_id in actions.failed:
            self._fail(request_id)

    def _fail(self, request_id: RequestId) -> None:
        """A backend would not load a request's adapter: the next is asked, until none is left."""
        request = self._requests.get(request_id)
        if request is None or request.adapter is None:
            return
        request.is_known = False
        if self._may_be_had(request.adapter):
            self._arrive(request)
            return
        del self._requests[request_id]
        refusal = self._router.why(request.adapter.digest)
        status = 400 if refusal is not None and refusal.status < 500 else 502
        if not request.placed.done():
            why = hide_paths(str(refusal or "No backend could load the adapter."))
            request.placed.set_exception(ApiError(status, why))

    async def _fetch(self, fetch: Fetch, adapter: RoutedAdapter) -> None:
        done = await self._load(adapter, fetch.destination)
        self._do(self.dispatcher.fetched(fetch) if done else self.dispatcher.fetch_failed(fetch))

    async def _provide(self, provision: Provision, adapter: RoutedAdapter) -> None:
        if await self._load(adapter, provision.replica):
            self._do(self.dispatcher.provided(provision))
        else:
            self._do(self.dispatcher.provision_failed(provision, time.monotonic()))

    async def _load(self, adapter: RoutedAdapter, replica: ReplicaId) -> bool:
        backend = self.backends[replica]
        if not backend.is_up or self._router.avoids(adapter.digest, replica, self.dispatcher.fleet, time.monotonic()):
            return False  # a placement counts on it nevertheless; who waits goes elsewhere
        try:
            await backend.load(adapter)
        except (BackendRefused, NotConnected) as error:
            if isinstance(error, BackendRefused):  # which has counted it
                refusal = error
            else:
                backend.failed("unreachable", str(error))
                refusal = BackendRefused(503, f"{replica}: {plain_reason(error)}")
            self._router.refused(adapter.digest, replica, refusal, time.monotonic())
            return False
        except ServerLost as error:
            self.down(backend, f"while it loaded an adapter: {error}")
            return False
        self._router.accepted(adapter.digest, replica)
        self.dispatcher.on_adapter_loaded(replica, adapter.digest)
        return True

    async def _delete(self, adapter: RoutedAdapter, replica: ReplicaId) -> None:
        backend = self.backends[replica]
        try:
            await backend.unload(adapter)
        except (BackendRefused, ServerLost) as error:
            log.warning("adapter not unloaded", backend=backend.url, reason=str(error))
            return
        self.dispatcher.on_adapter_evicted(replica, adapter.digest)

    def _copy(self, work: Coroutine[Any, Any, None], replica: ReplicaId) -> None:
        """Begin what a backend is to do with an adapter; it is given up when the backend is gone."""
        task, copying = self._tasks.run(work), self._copying[replica]
        copying.add(task)
        task.add_done_callback(copying.discard)
