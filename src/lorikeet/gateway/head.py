"""The owner of a gateway's dispatcher: finds a backend for each request, and has adapters loaded where they must be.

To a dispatcher a copy is a copy: a backend reads an adapter from its source, whoever else has it, so fetches from a
peer and provisions are both a call to load, and deletes a call to unload.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from lorikeet.cluster.actions import Actions, Provision
from lorikeet.cluster.dispatcher import Dispatcher
from lorikeet.cluster.entries import ReplicaInfo
from lorikeet.cluster.gauges import Gauges
from lorikeet.cluster.pool import Fetch
from lorikeet.cluster.tables import RoutingTable
from lorikeet.cluster.tasks import Tasks
from lorikeet.core.events import AdapterEvent, AdapterEvicted, AdapterLoaded, Admitted, Finished, FinishReason
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId
from lorikeet.core.messages import StepOutputs, TokenOutput
from lorikeet.core.plan import Token
from lorikeet.gateway.adapters import KnownAdapter
from lorikeet.gateway.backends import Backend, Refused
from lorikeet.gateway.connections import NotConnected, ServerLost
from lorikeet.gateway.questions import asked
from lorikeet.gateway.refusals import AroundRefusals
from lorikeet.gateway.rides import Ride
from lorikeet.server.errors import ApiError
from lorikeet.server.logs import log

WAIT_S = 300.0
"""A request waits at most so long for a backend that has its adapter."""

_ANY_TOKEN = Token(0)


class Head:
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
        self.versions: dict[AdapterDigest, KnownAdapter] = {}
        self._dropped: set[AdapterDigest] = set()
        """Of the versions those that are forgotten as soon as nobody has them."""
        self._rides: dict[RequestId, Ride] = {}
        self._router = dispatcher.router = AroundRefusals(dispatcher.router, lambda each: self._rides[each].failed_at)
        self._tasks = Tasks()
        self._copying: dict[ReplicaId, set[asyncio.Task[Any]]] = {replica: set() for replica in self.backends}
        self._gauge = 0

    async def close(self) -> None:
        """End what backends are loading and unloading, and all connections to them."""
        await self._tasks.close()
        for backend in self.backends.values():
            await backend.close()

    # --- adapters and placement ----------------------------------------------------------------------

    def know(self, adapter: KnownAdapter) -> None:
        """Requests may come for an adapter."""
        self.versions[adapter.digest] = adapter
        self._dropped.discard(adapter.digest)
        self.dispatcher.know(adapter.digest)

    def retire(self, adapter: KnownAdapter) -> None:
        """No more requests come for an adapter: backends unload it when those that there are have ended."""
        self._do(self.dispatcher.retire(adapter.digest))

    def drop(self, adapter: KnownAdapter) -> None:
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

    async def place(self, ride: Ride) -> Backend:
        """Return a backend for a request that is nowhere; its adapter has been loaded there.

        Raises:
            ApiError: no backend can load the adapter, or none has been there for long.
        """
        ride.begin()
        self._rides[ride.request_id] = ride
        self._arrive(ride)
        try:
            async with asyncio.timeout(WAIT_S):
                ride.backend = await ride.placed
        except BaseException as error:
            why = self._why_waiting(ride)
            self.release(ride)
            if isinstance(error, TimeoutError):
                raise ApiError(503, f"{why} for {WAIT_S:g} s{self.troubles()}.") from None
            raise
        return ride.backend

    def _why_waiting(self, ride: Ride) -> str:
        if not self.dispatcher.fleet.open_index:
            return "No backend has been there"
        if self.dispatcher.fleet.where(ride.request_id) is None:
            return "No backend has had room for this request"
        return "This request has waited for a backend to load its adapter"

    def started(self, ride: Ride) -> None:
        """A request's backend has given its first token."""
        if not ride.is_started:
            ride.is_started = True
            self._tell(ride, 1, Admitted(ride.request_id, time.monotonic(), 0))

    def finished(self, ride: Ride, output_tokens: int) -> None:
        """A request has its whole answer, of so many tokens over all backends."""
        end = Finished(ride.request_id, time.monotonic(), FinishReason.STOP)
        self._tell(ride, max(0, output_tokens - ride.output_tokens - ride.is_started), end)
        self._forget(ride)

    def release(self, ride: Ride) -> None:
        """A request is at its backend no longer, and has no whole answer. A second call does nothing."""
        if ride.is_known:
            self._forget(ride)
            self._do(self.dispatcher.ended(ride.request_id, time.monotonic(), is_complete=False))
        self._forget(ride)

    def refused(self, ride: Ride, error: Refused) -> bool:
        """A request's backend has lost its adapter and would not load it again; return whether another may."""
        assert ride.adapter is not None
        assert ride.backend is not None
        self._router.refused(ride.adapter.digest, ride.backend.replica, error, time.monotonic())
        return self._may_be_had(ride.adapter)

    def _may_be_had(self, adapter: KnownAdapter) -> bool:
        """Whether an open backend may load an adapter."""
        return self._router.may_be_had(adapter.digest, self.dispatcher.fleet, time.monotonic())

    def _forget(self, ride: Ride) -> None:
        ride.is_known = False
        self._rides.pop(ride.request_id, None)

    def _arrive(self, ride: Ride) -> None:
        now, router = time.monotonic(), self.dispatcher.router
        ride.is_known = True
        if ride.adapter is not None and ride.adapter.digest not in self.versions:
            # It was dropped while this request was on its way from one backend to another.
            self.versions[ride.adapter.digest] = ride.adapter
            self._dropped.add(ride.adapter.digest)
        question = asked(
            ride.request_id,
            ride.question,
            ride.adapter,
            ride.prompt_tokens,
            ride.output_tokens,
            self.dispatcher.fleet.averages,
            wants_keys=router.wants_keys,
        )
        self._do(self.dispatcher.arrive(question, now))

    def _tell(self, ride: Ride, tokens: int, event: Admitted | Finished) -> None:
        """Pass on what an engine of one's own would have told of a request."""
        if ride.is_known and ride.backend is not None:
            generated = (TokenOutput(ride.request_id, 0, 0, (_ANY_TOKEN,) * tokens),) if tokens else ()
            outputs = StepOutputs(generated, (event,), ())
            self._do(self.dispatcher.hear(ride.backend.replica, outputs, time.monotonic()))

    # --- backends ------------------------------------------------------------------------------------

    def troubles(self) -> str:
        """Return why backends are not there, to follow a sentence that says so; empty where that is not known."""
        known = [f"{backend.url}: {backend.trouble}" for backend in self.backends.values() if backend.trouble]
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
        rides = [self._rides[request_id] for request_id in homeless]
        for ride in rides:
            ride.is_known = False
        self._do(actions)
        for ride in rides:
            if ride.placed.done():
                ride.lose()  # its own task places it again
                continue
            try:
                ride.count_loss()
            except ApiError as error:
                del self._rides[ride.request_id]
                ride.placed.set_exception(error)
            else:
                self._arrive(ride)
        self.on_change()

    def up(self, backend: Backend, adapters: Iterable[KnownAdapter]) -> None:
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
        self._tell_adapters(backend, *(AdapterLoaded(digest, now, 0.0) for digest in held))
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
            self.dispatcher.gauges(Gauges(backend.replica, backend.epoch, self._gauge, requests), time.monotonic())
        )

    def _tell_adapters(self, backend: Backend, *events: AdapterEvent) -> None:
        """Pass on what an engine of one's own would have told of adapters."""
        self._do(self.dispatcher.hear(backend.replica, StepOutputs((), (), events), time.monotonic()))

    # --- what the dispatcher asks for ----------------------------------------------------------------

    def _do(self, actions: Actions) -> None:
        for request_id, replica in actions.sends:
            ride = self._rides.get(request_id)
            if ride is not None and not ride.placed.done():
                ride.placed.set_result(self.backends[replica])
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
        ride = self._rides.get(request_id)
        if ride is None or ride.adapter is None:
            return
        ride.is_known = False
        if self._may_be_had(ride.adapter):
            self._arrive(ride)
            return
        del self._rides[request_id]
        refusal = self._router.why(ride.adapter.digest)
        status = 400 if refusal is not None and refusal.status < 500 else 502
        if not ride.placed.done():
            ride.placed.set_exception(ApiError(status, str(refusal or "No backend could load the adapter.")))

    async def _fetch(self, fetch: Fetch, adapter: KnownAdapter) -> None:
        done = await self._load(adapter, fetch.destination)
        self._do(self.dispatcher.fetched(fetch) if done else self.dispatcher.fetch_failed(fetch))

    async def _provide(self, provision: Provision, adapter: KnownAdapter) -> None:
        if await self._load(adapter, provision.replica):
            self._do(self.dispatcher.provided(provision))
        else:
            self._do(self.dispatcher.provision_failed(provision, time.monotonic()))

    async def _load(self, adapter: KnownAdapter, replica: ReplicaId) -> bool:
        backend, began_s = self.backends[replica], time.monotonic()
        if not backend.is_up or self._router.avoids(adapter.digest, replica, self.dispatcher.fleet, began_s):
            return False  # a placement counts on it nevertheless; who waits goes elsewhere
        try:
            await backend.load(adapter)
        except (Refused, NotConnected) as error:
            log.warning("adapter not loaded", backend=backend.url, reason=str(error))
            refusal = error if isinstance(error, Refused) else Refused(503, f"{backend.url}: {error}")
            self._router.refused(adapter.digest, replica, refusal, time.monotonic())
            return False
        except ServerLost as error:
            self.down(backend, f"while it loaded an adapter: {error}")
            return False
        now = time.monotonic()
        self._router.accepted(adapter.digest, replica)
        self._tell_adapters(backend, AdapterLoaded(adapter.digest, now, now - began_s))
        return True

    async def _delete(self, adapter: KnownAdapter, replica: ReplicaId) -> None:
        backend = self.backends[replica]
        try:
            await backend.unload(adapter)
        except (Refused, ServerLost) as error:
            log.warning("adapter not unloaded", backend=backend.url, reason=str(error))
            return
        self._tell_adapters(backend, AdapterEvicted(adapter.digest, time.monotonic(), 0))

    def _copy(self, work: Coroutine[Any, Any, None], replica: ReplicaId) -> None:
        """Begin what a backend is to do with an adapter; it is given up when the backend is gone."""
        task, copying = self._tasks.run(work), self._copying[replica]
        copying.add(task)
        task.add_done_callback(copying.discard)
