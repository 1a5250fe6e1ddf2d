"""Chooses a backend for each request and loads the request's adapter there. Owns the router's dispatcher.

Backends that failed a request, or could not load its adapter, are excluded while others may serve it.

Backends read adapters from their source, not from each other. So the dispatcher's fetches and provisions both become
calls to load an adapter, and its deletes become calls to unload one.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lorikeet.cluster.adapters.pool import Fetch
from lorikeet.cluster.controller.dispatcher import Actions, Dispatcher, Provision
from lorikeet.cluster.routing.base import AdapterPlaces, Choice, RoutingPolicy, least_loaded
from lorikeet.cluster.routing.fleet import Fleet, Indices, ReplicaGauges, ReplicaInfo
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.cluster.tables import RoutingTable
from lorikeet.cluster.tasks import BackgroundTasks
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId
from lorikeet.http.errors import ApiError, hide_paths
from lorikeet.http.logs import log
from lorikeet.router.adapters import RoutedAdapter
from lorikeet.router.backends import Backend, BackendRefused
from lorikeet.router.connections import BackendConnectionError, ConnectFailed, plain_reason
from lorikeet.router.kv_index import KvIndex
from lorikeet.router.kv_subscriber import KvSubscriber
from lorikeet.router.proxied_request import ProxiedRequest, routing_request
from lorikeet.router.records import Placement, RouteDecision

EXCLUDED_S = 60.0
"""Seconds for which a backend that could not load an adapter gets no requests for it."""


class _Refusal(NamedTuple):
    at_s: float
    error: BackendRefused


class ExclusionPolicy(RoutingPolicy):
    """Routes by a policy, but avoids backends that failed the request or recently failed to load its adapter.

    If the policy chooses such a backend, the request goes to the least loaded of the others, preferably one with the
    adapter. If all backends that can load the adapter have failed the request, one of them gets it again. If none could
    load it, the policy's choice stands.

    Args:
        policy: the policy, which ignores failures.
        failed_at: returns the backends that have failed a request.

    Attributes:
        on_choice: function that is called with each choice and what it was made of.
    """

    def __init__(self, policy: RoutingPolicy, failed_at: Callable[[RequestId], Set[ReplicaId]]) -> None:
        self._policy = policy
        self._failed_at = failed_at
        self.wants_keys = policy.wants_keys
        self.on_choice: Callable[[RequestId, RouteDecision], object] = lambda request_id, decision: None
        self._refusals: dict[AdapterDigest, dict[ReplicaId, _Refusal]] = {}
        self._full: dict[ReplicaId, float] = {}
        """Times until which backends have no room."""

    def on_full(self, replica: ReplicaId, until_s: float) -> None:
        """Avoid a backend until a time, because it has refused a request for lack of room."""
        self._full[replica] = until_s

    def on_refused(self, adapter: AdapterDigest, replica: ReplicaId, error: BackendRefused, now: float) -> None:
        """Exclude a backend for an adapter that it could not load."""
        self._refusals.setdefault(adapter, {})[replica] = _Refusal(now, error)

    def on_loaded(self, adapter: AdapterDigest, replica: ReplicaId) -> None:
        """Include a backend again that has loaded an adapter."""
        self._refusals.get(adapter, {}).pop(replica, None)

    def on_backend_up(self, replica: ReplicaId) -> None:
        """Forget the refusals of a backend that has come up again, since it may have restarted with other options."""
        self._full.pop(replica, None)
        for refusals in self._refusals.values():
            refusals.pop(replica, None)

    def forget(self, adapter: AdapterDigest) -> None:
        """Forget an adapter that requests no longer name."""
        self._refusals.pop(adapter, None)

    def last_refusal(self, adapter: AdapterDigest) -> BackendRefused | None:
        """Return the newest error of a backend that could not load an adapter; None without an error."""
        refusals = self._refusals.get(adapter)
        return max(refusals.values(), key=lambda refusal: refusal.at_s).error if refusals else None

    def can_be_loaded(self, adapter: AdapterDigest, fleet: Fleet, now: float) -> bool:
        """Return whether an open backend may load an adapter."""
        return len(_others(self._refused(adapter, now), fleet)) > 0

    def is_excluded(self, adapter: AdapterDigest, replica: ReplicaId, fleet: Fleet, now: float) -> bool:
        """Return whether a backend is excluded for an adapter while another one is not."""
        return replica in self._refused(adapter, now) and self.can_be_loaded(adapter, fleet, now)

    def has_other(self, adapter: AdapterDigest | None, failed: Set[ReplicaId], fleet: Fleet, now: float) -> bool:
        """Return whether an open backend has neither failed a request nor refused its adapter."""
        return len(_others(self._refused(adapter, now) | failed, fleet)) > 0

    def route(self, request: RoutingRequest, fleet: Fleet, places: AdapterPlaces, now: float) -> Choice | None:
        """Return the policy's choice, or else the least loaded backend that is not excluded."""
        choice = self._policy.route(request, fleet, places, now)
        if choice is None:
            return None
        all_avoided = frozenset[ReplicaId]()
        chosen = choice
        for avoided in self._avoided(request, now):
            all_avoided |= avoided
            if choice.replica not in avoided:
                break
            if len(others := _others(avoided, fleet)):
                chosen = Choice(fleet.info(least_loaded(others, fleet, ~fleet.is_warm(request.adapter))).replica)
                break
        self.on_choice(request.request_id, RouteDecision.of(choice, all_avoided, request, fleet))
        return chosen

    def _avoided(self, request: RoutingRequest, now: float) -> Iterator[Set[ReplicaId]]:
        """Yield sets of backends to avoid: that refused, failed or are full; without the full ones; that refused."""
        refused = self._refused(request.adapter, now)
        self._full = {replica: until_s for replica, until_s in self._full.items() if now < until_s}
        if self._full:
            yield refused | self._full.keys() | self._failed_at(request.request_id)
        if failed := self._failed_at(request.request_id):
            yield refused | failed
        yield refused

    def _refused(self, adapter: AdapterDigest | None, now: float) -> set[ReplicaId]:
        refusals = {} if adapter is None else self._refusals.get(adapter, {})
        return {replica for replica, refusal in refusals.items() if now < refusal.at_s + EXCLUDED_S}


def _others(avoided: Set[ReplicaId], fleet: Fleet) -> Indices:
    """Return the indices of open backends that are not in ``avoided``, ascending."""
    return np.array([index for replica, index in fleet.open_index.items() if replica not in avoided], np.intp)


def _cached_as(request: ProxiedRequest) -> tuple[str, str]:
    """Return the adapter's name and the salt under which a request's KV is cached."""
    return "" if request.adapter is None else request.adapter.name, request.body.cache_salt


WAIT_S = 300.0
"""Longest time, in seconds, that a request waits for a backend with its adapter."""


class BackendRouter:
    """Places requests on backends and tracks which backend has which adapter. All methods run in one event loop.

    Args:
        backends: the backends, none of which is up.
        routing: chooses the backend of each request.
        prefetch: whether adapters are loaded as soon as a placement includes them, instead of with the first request.

    Attributes:
        backends: backends by replica id.
        dispatcher: the dispatcher, for reading only.
        versions: adapter versions that requests may name, or that a request or a backend still has; for reading only.
        kv: the blocks that backends report as cached.
        has_come: event that is set once a backend has come up.
        on_change: function that is called when a backend comes up, goes down, or starts or stops to take requests.
    """

    def __init__(self, backends: Sequence[Backend], routing: RoutingPolicy, *, prefetch: bool = False) -> None:
        self.backends = {backend.replica: backend for backend in backends}
        self.has_come = asyncio.Event()
        self.on_change: Callable[[], object] = lambda: None
        self.kv = KvIndex()
        self._subscriptions: dict[ReplicaId, asyncio.Task[Any]] = {}
        self.versions: dict[AdapterDigest, RoutedAdapter] = {}
        self._dropped: set[AdapterDigest] = set()
        """Versions to forget once no request and no backend uses them."""
        self._requests: dict[RequestId, ProxiedRequest] = {}
        self._routing = ExclusionPolicy(routing, lambda each: self._requests[each].failed_at)
        self._routing.on_choice = self._on_choice
        self.dispatcher = Dispatcher(self._routing, prefetch=prefetch)
        self._tasks = BackgroundTasks()
        self._copies: dict[ReplicaId, set[asyncio.Task[Any]]] = {replica: set() for replica in self.backends}
        self._load_reports = 0
        self._kept = Counter[tuple[ReplicaId, str]]()
        """Batches that need an adapter at a backend, by backend and name."""
        for backend in backends:
            self._connect(backend)

    async def close(self) -> None:
        """Cancel running loads and unloads, and close all connections."""
        await self._tasks.close()
        for backend in self.backends.values():
            await backend.close()

    # --- adapters and placement ----------------------------------------------------------------------

    def add_adapter(self, adapter: RoutedAdapter) -> None:
        """Accept requests for an adapter."""
        self.versions[adapter.digest] = adapter
        self._dropped.discard(adapter.digest)
        self.dispatcher.register(adapter.digest, size_bytes=adapter.size_bytes)

    def retire_adapter(self, adapter: RoutedAdapter) -> None:
        """Unload an adapter from all backends after its running requests have ended."""
        self._apply(self.dispatcher.retire(adapter.digest))

    def drop_adapter(self, adapter: RoutedAdapter) -> None:
        """Forget a retired adapter now, or after the last backend has unloaded it."""
        self._dropped.add(adapter.digest)
        held = {digest for backend in self.backends.values() for digest in backend.adapters.values()}
        for digest in self._dropped - held:
            if not self.dispatcher.uses(digest):
                self._dropped.discard(digest)
                del self.versions[digest]
                self._routing.forget(digest)

    def set_placement(self, table: RoutingTable) -> None:
        """Replace the placement. An equal placement changes nothing."""
        if table is not self.dispatcher.table:
            self._apply(self.dispatcher.swap(table, time.monotonic()))

    # --- requests ------------------------------------------------------------------------------------

    async def place(self, request: ProxiedRequest) -> Backend:
        """Choose a backend for a request, load the adapter there, and return the backend.

        Raises:
            ApiError: no backend can load the adapter, or none was available in time.
        """
        request.begin()
        self._requests[request.request_id] = request
        if self.kv and request.token_ids is None:
            request.token_ids = await self._token_ids(request)
        self._dispatch(request)
        try:
            async with asyncio.timeout(WAIT_S):
                request.backend = await request.placed
        except BaseException as error:
            why = self._why_waiting(request)
            self.release(request)
            if isinstance(error, TimeoutError):
                raise ApiError(503, f"{why} for {WAIT_S:g} s{self.backend_errors()}.") from None
            raise
        for adapter in request.adapters:
            request.backend.note_use(adapter)
        if request.token_ids:
            self.kv.expect(request.backend.replica, *_cached_as(request), request.token_ids)
        return request.backend

    async def _token_ids(self, request: ProxiedRequest) -> list[int]:
        """Return the token ids of a prompt. A backend that publishes events tokenizes a long text."""
        if (given := request.body.token_ids) is not None:
            return given
        fields = request.body.to_tokenize
        able = [each for each in self.backends.values() if each.is_open and self.kv.blocks(each.replica)]
        if not fields or not able:
            return []
        adapter = request.adapter
        backend = next((each for each in able if adapter is not None and each.holds(adapter)), able[0])
        name = adapter.name if adapter is not None and backend.holds(adapter) else backend.base
        return await backend.prompt_tokens({"model": name, **fields})

    def _on_choice(self, request_id: RequestId, decision: RouteDecision) -> None:
        self._requests[request_id].decision = decision

    def _why_waiting(self, request: ProxiedRequest) -> str:
        if not self.dispatcher.fleet.open_index:
            return "No backend has been available"
        if self.dispatcher.fleet.where(request.request_id) is None:
            return "No backend has had room for this request"
        return "This request has waited for a backend to load its adapter"

    def on_full(self, backend: Backend, until_s: float) -> None:
        """Send requests to other backends, while there are any, until a time on the monotonic clock."""
        self._routing.on_full(backend.replica, until_s)

    def has_other(self, request: ProxiedRequest) -> bool:
        """Return whether an open backend that has not failed a request may answer it."""
        digest = None if request.adapter is None else request.adapter.digest
        return self._routing.has_other(digest, request.failed_at, self.dispatcher.fleet, time.monotonic())

    def on_first_token(self, request: ProxiedRequest) -> None:
        """Record that a request's backend has sent the first token."""
        if not request.is_started:
            request.is_started = True
            if request.is_dispatched and request.backend is not None:
                replica = request.backend.replica
                self.dispatcher.on_first_token(replica, request.request_id, time.monotonic())

    def on_finished(self, request: ProxiedRequest, output_tokens: int) -> None:
        """Record that a request's answer is complete, with ``output_tokens`` tokens from all backends."""
        if request.is_dispatched and request.backend is not None:
            rest = max(0, output_tokens - request.output_tokens - request.is_started)
            self.dispatcher.on_tokens(request.backend.replica, request.request_id, rest)
            self._apply(self.dispatcher.ended(request.request_id, time.monotonic(), is_complete=True))
        self._forget(request)

    def release(self, request: ProxiedRequest) -> None:
        """Remove a request from its backend before its answer is complete. A second call does nothing."""
        if request.is_dispatched:
            self._forget(request)
            self._apply(self.dispatcher.ended(request.request_id, time.monotonic(), is_complete=False))
        self._forget(request)

    def on_adapter_refused(self, backend: Backend, adapter: RoutedAdapter, error: BackendRefused) -> bool:
        """Record that a backend could not load an adapter of a request. Return whether another one may."""
        self._routing.on_refused(adapter.digest, backend.replica, error, time.monotonic())
        return self._can_be_loaded(adapter)

    def last_refusal(self, adapter: RoutedAdapter) -> str | None:
        """Return the error of the last backend that could not load an adapter; None without an error."""
        refusal = self._routing.last_refusal(adapter.digest)
        return None if refusal is None else hide_paths(str(refusal))

    def _can_be_loaded(self, adapter: RoutedAdapter) -> bool:
        """Return whether an open backend may load an adapter."""
        return self._routing.can_be_loaded(adapter.digest, self.dispatcher.fleet, time.monotonic())

    def _forget(self, request: ProxiedRequest) -> None:
        request.is_dispatched = False
        self._requests.pop(request.request_id, None)

    def _dispatch(self, request: ProxiedRequest) -> None:
        request.is_dispatched = True
        if request.adapter is not None and request.adapter.digest not in self.versions:
            # The adapter was dropped while this request moved from one backend to another.
            self.versions[request.adapter.digest] = request.adapter
            self._dropped.add(request.adapter.digest)
        body = routing_request(
            request.request_id,
            request.body,
            request.adapter,
            request.prompt_tokens,
            request.output_tokens,
            self.dispatcher.fleet.averages,
            wants_keys=self._routing.wants_keys,
            session=request.session,
            cached_tokens=self.kv.cached_tokens(*_cached_as(request), request.token_ids) if request.token_ids else None,
        )
        self._apply(self.dispatcher.arrive(body, time.monotonic()))

    # --- backends ------------------------------------------------------------------------------------

    def add_backend(self, backend: Backend) -> None:
        """Add a backend, which is not up yet."""
        self.backends[backend.replica] = backend
        self._copies[backend.replica] = set()
        self._connect(backend)

    def _connect(self, backend: Backend) -> None:
        backend.uses = partial(self._uses, backend)
        backend.on_evicted = partial(self.dispatcher.on_adapter_evicted, backend.replica)

    def _uses(self, backend: Backend, name: str) -> bool:
        """Return whether a backend has a request, or a batch, for an adapter."""
        if self._kept[backend.replica, name]:
            return True
        there = (each for each in self._requests.values() if each.backend is backend and each.is_dispatched)
        return any(adapter.name == name for each in there for adapter in each.adapters)

    def has_requests(self, backend: Backend) -> bool:
        """Return whether a backend has a request."""
        return any(request.backend is backend and request.is_dispatched for request in self._requests.values())

    async def remove_backend(self, backend: Backend) -> None:
        """Remove a backend."""
        self.on_backend_down(backend, "it is no longer found")
        log.info("backend removed", backend=backend.url)
        del self.backends[backend.replica]
        self._copies.pop(backend.replica)
        self.on_change()
        await backend.close()

    def backend_errors(self) -> str:
        """Return the last errors of backends in parentheses, to append to a message; empty without errors."""
        known = [f"{backend.replica}: {backend.last_error}" for backend in self.backends.values() if backend.last_error]
        return f" ({'; '.join(known)})" if known else ""

    def on_backend_down(self, backend: Backend, why: str) -> None:
        """Move the requests of a lost backend to other backends. Its adapters and KV are lost, too."""
        if not backend.is_up:
            return
        log.warning("backend down", backend=backend.url, reason=why)
        backend.on_down()
        if (reading := self._subscriptions.pop(backend.replica, None)) is not None:
            reading.cancel()
        self.kv.clear(backend.replica)
        for task in self._copies[backend.replica] - {asyncio.current_task()}:
            task.cancel()
        actions, orphans = self.dispatcher.leave(backend.replica)
        requests = [self._requests[request_id] for request_id in orphans]
        for request in requests:
            request.is_dispatched = False
        self._apply(actions)
        for request in requests:
            if request.placed.done():
                request.mark_lost()  # The request's proxy task places it again.
                continue
            try:
                request.count_loss()
            except ApiError as error:
                del self._requests[request.request_id]
                request.placed.set_exception(error)
            else:
                self._dispatch(request)
        self.on_change()

    def on_backend_up(self, backend: Backend, adapters: Iterable[RoutedAdapter]) -> None:
        """Send requests to a backend that has come up, for the first time or again, and whose models are known.

        Args:
            backend: the backend.
            adapters: the adapters, which are not loaded again if the backend lists them.
        """
        backend.on_up()
        self.has_come.set()
        events, replay = backend.kv_addresses
        if events:
            subscriber = KvSubscriber(self.kv, backend.replica, events, replay)
            self._subscriptions[backend.replica] = self._tasks.run(subscriber.run())
        self._routing.on_backend_up(backend.replica)
        held = [adapter.digest for adapter in adapters if backend.adopt_listed(adapter)]
        log.info("backend up", backend=backend.url, adapters=len(held))
        now = time.monotonic()
        self._apply(self.dispatcher.join(ReplicaInfo(backend.replica, backend.epoch, name=backend.url), now, held))
        for digest in held:
            self.dispatcher.on_adapter_loaded(backend.replica, digest)
        if (table := self.dispatcher.table) is not None:
            # With pool_prefetch, this loads the adapters that the backend has lost.
            self._apply(self.dispatcher.swap(table, now))
        self.on_change()

    def on_backend_draining(self, backend: Backend) -> None:
        """Stop sending requests to a backend, which finishes its running requests."""
        log.warning("backend draining", backend=backend.url)
        backend.is_open = False
        self.dispatcher.drain(backend.replica)
        self.on_change()

    def on_backend_reopened(self, backend: Backend) -> None:
        """Send requests again to a backend that has not restarted."""
        log.info("backend open again", backend=backend.url)
        backend.on_reopened()
        self._apply(self.dispatcher.reopen(backend.replica, time.monotonic()))
        self.on_change()

    def on_backend_load(self, backend: Backend, requests: int) -> None:
        """Record a backend's number of requests, including those of other clients."""
        self._load_reports += 1
        self._apply(
            self.dispatcher.gauges(
                ReplicaGauges(backend.replica, backend.epoch, self._load_reports, requests), time.monotonic()
            )
        )

    # --- batches -------------------------------------------------------------------------------------

    def keep_loaded(self, backend: Backend, adapters: Iterable[RoutedAdapter]) -> None:
        """Keep adapters at a backend, for a batch that runs there, until they are removed from the router."""
        self._kept.update((backend.replica, adapter.name) for adapter in adapters)

    def keep_no_longer(self, backend: Backend, adapters: Iterable[RoutedAdapter]) -> None:
        """Undo :meth:`keep_loaded` for the same adapters."""
        self._kept -= Counter((backend.replica, adapter.name) for adapter in adapters)

    async def load(self, backend: Backend, adapter: RoutedAdapter) -> None:
        """Load an adapter at a backend, unless it is there.

        Raises:
            BackendRefused: the backend cannot load it.
            BackendConnectionError: the connection failed.
        """
        await backend.load(adapter)
        self._routing.on_loaded(adapter.digest, backend.replica)
        self.dispatcher.on_adapter_loaded(backend.replica, adapter.digest)

    def loads(self) -> dict[ReplicaId, float]:
        """Return the number of requests at each open backend."""
        fleet = self.dispatcher.fleet
        return {replica: float(fleet.loads.requests[index]) for replica, index in fleet.open_index.items()}

    # --- actions of the dispatcher -------------------------------------------------------------------

    def _apply(self, actions: Actions) -> None:
        for request_id, replica in actions.sends:
            request = self._requests.get(request_id)
            if request is not None and not request.placed.done():
                if request.record is not None:
                    request.record.placements.append(Placement(time.monotonic(), replica, request.decision))
                request.decision = None
                request.placed.set_result(self.backends[replica])
        for fetch in actions.fetches:
            self._start_copy(self._fetch(fetch, self.versions[fetch.adapter]), fetch.destination)
        for provision in actions.provisions:
            self._start_copy(self._provide(provision, self.versions[provision.adapter]), provision.replica)
        for digest, replica in actions.deletes:
            self._start_copy(self._delete(self.versions[digest], replica), replica)
        for request_id in actions.failed:
            self._on_adapter_unavailable(request_id)

    def _on_adapter_unavailable(self, request_id: RequestId) -> None:
        """Try the next backend for a request whose adapter could not be loaded; fail the request if none is left."""
        request = self._requests.get(request_id)
        if request is None or request.adapter is None:
            return
        request.is_dispatched = False
        if self._can_be_loaded(request.adapter):
            self._dispatch(request)
            return
        del self._requests[request_id]
        refusal = self._routing.last_refusal(request.adapter.digest)
        status = 400 if refusal is not None and refusal.status < 500 else 502
        if not request.placed.done():
            why = hide_paths(str(refusal or "No backend could load the adapter."))
            request.placed.set_exception(ApiError(status, why))

    async def _fetch(self, fetch: Fetch, adapter: RoutedAdapter) -> None:
        done = await self._load(adapter, fetch.destination)
        self._apply(self.dispatcher.fetched(fetch) if done else self.dispatcher.fetch_failed(fetch))

    async def _provide(self, provision: Provision, adapter: RoutedAdapter) -> None:
        if await self._load(adapter, provision.replica):
            self._apply(self.dispatcher.provided(provision))
        else:
            self._apply(self.dispatcher.provision_failed(provision, time.monotonic()))

    async def _load(self, adapter: RoutedAdapter, replica: ReplicaId) -> bool:
        backend = self.backends[replica]
        if not backend.is_up or self._routing.is_excluded(
            adapter.digest, replica, self.dispatcher.fleet, time.monotonic()
        ):
            return False  # The placement still names this backend; waiting requests go to others.
        try:
            await backend.load(adapter)
        except (BackendRefused, ConnectFailed) as error:
            if isinstance(error, BackendRefused):  # ``Backend.load`` has already counted the failure.
                refusal = error
            else:
                backend.failed("unreachable", str(error))
                refusal = BackendRefused(503, f"{replica}: {plain_reason(error)}")
            self._routing.on_refused(adapter.digest, replica, refusal, time.monotonic())
            return False
        except BackendConnectionError as error:
            self.on_backend_down(backend, f"while it loaded an adapter: {error}")
            return False
        self._routing.on_loaded(adapter.digest, replica)
        self.dispatcher.on_adapter_loaded(replica, adapter.digest)
        return True

    async def _delete(self, adapter: RoutedAdapter, replica: ReplicaId) -> None:
        backend = self.backends[replica]
        if self._kept[replica, adapter.name] and adapter.digest not in self._dropped:
            return  # A batch needs it there, although a placement has moved it.
        try:
            await backend.unload(adapter)
        except (BackendRefused, BackendConnectionError) as error:
            log.warning("adapter not unloaded", backend=backend.url, reason=str(error))
            return
        self.dispatcher.on_adapter_evicted(replica, adapter.digest)

    def _start_copy(self, work: Coroutine[Any, Any, None], replica: ReplicaId) -> None:
        """Run a load or unload in the background, until it ends or the backend goes down."""
        task = self._tasks.run(work)
        copies = self._copies[replica]
        copies.add(task)
        task.add_done_callback(copies.discard)
