"""Submits requests to one engine, collects their tokens, and resumes them after the engine has died.

The cluster's client has the same interface.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

import msgspec
import zmq.asyncio

from lorikeet.client.local_host import LocalHost
from lorikeet.client.state import ClusterState, ReplicaView, replica_state
from lorikeet.client.supervisor import EngineError, EngineSupervisor, EngineTimeouts
from lorikeet.config import Settings, for_engines
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import (
    AdapterEvent,
    AdapterEvicted,
    Decided,
    Finished,
    FinishReason,
    Mechanism,
    Queued,
    RequestEvent,
    RequestTimings,
)
from lorikeet.core.ids import AdapterDigest, AdapterName, ReplicaId, RequestId
from lorikeet.core.messages import Abort, EngineReady, EngineStats, Progress, StepOutputs, Submit, TokenOutput
from lorikeet.core.plan import PromptToken, Token
from lorikeet.core.request import Request

DEATHS_PER_REQUEST = 3
"""Deaths of engines after which a request in flight ends with an error, because it may be their cause."""


class RequestOutput(NamedTuple):
    """The tokens of one request from one turn of the engine loop, and its end if it has ended."""

    tokens: tuple[Token, ...]
    finished: Finished | None


class RequestHandle:
    """One request in an engine, as seen from the API process.

    Its outputs go to a function (:meth:`listen`); the last one has ``finished``.

    Args:
        request: the request as submitted.
        abort: called by :meth:`abort` with this handle and ``is_complete``.

    Attributes:
        request: the request as submitted.
        timings: times of the request's events, filled as they arrive.
        token_ids: all tokens received so far, including tokens of earlier attempts.
        prompt_logprobs: log probabilities of the prompt's tokens by position, if requested; complete at the first
            token.
        pooled: the vector of a request with ``pooling`` (see ``core.plan.Pooled``); None until it arrives.
        deaths: number of engines that died while they ran the request.
        attempt: number of the newest attempt; before the first attempt, one less than the request's number. Outputs of
            other attempts are stale.
        is_queued: whether the newest attempt has reached its engine.
        replica: the replica that runs the request; None while it runs nowhere.
        sent_s: time of sending to that replica of a cluster, on this process's clock.
        left: the replica of a cluster to which the request was sent before, in words, with what became of it.
    """

    def __init__(self, request: Request, abort: Callable[["RequestHandle", bool], None]) -> None:
        self.request = request
        self.timings = RequestTimings(request.arrival_s)
        self.token_ids = list(request.output_token_ids)
        self.prompt_logprobs: dict[int, PromptToken] = {}
        self.pooled: bytes | None = None
        self.deaths = 0
        self.attempt = request.attempt - 1
        self.is_queued = False
        self.replica: ReplicaId | None = None
        self.sent_s = 0.0
        self.left = ""
        self._abort = abort
        self._unheard: list[RequestOutput | EngineError] = []
        """Outputs that arrived before there was a listener."""
        self._listener: OutputListener = self._unheard.append

    def abort(self, *, is_complete: bool = False) -> None:
        """Abort the request. Its blocks are freed at the engine's next step. A second call does nothing.

        Args:
            is_complete: whether the answer is complete, as after a stop string. Otherwise it was cut short.
        """
        self._abort(self, is_complete)

    def listen(self, listener: "OutputListener") -> None:
        """Pass outputs to a function as they arrive, beginning with earlier ones.

        An ``EngineError`` means that the engine has ended and will not be restarted. The function may abort the
        request, and must not raise.
        """
        self._listener = listener
        for output in self._unheard:
            listener(output)
        self._unheard.clear()

    def put(self, output: RequestOutput | EngineError) -> None:
        """Pass an output on."""
        self._listener(output)

    @property
    def known_tokens(self) -> int:
        """The number of tokens of the prompt and of the answer so far."""
        return len(self.request.prompt_token_ids) + len(self.token_ids)

    def salt(self, salt: str) -> None:
        """Separate the KV of later attempts from that of all earlier ones."""
        self.request = msgspec.structs.replace(self.request, cache_salt=f"{salt}\0{self.request.cache_salt}")

    def goes_on(self, why: str) -> None:
        """Record where and why the request goes on, for ``lorikeet why``."""
        why = f"{why}; it goes on after {len(self.token_ids)} tokens of the answer"
        self.timings.apply(Decided(self.request.request_id, time.monotonic(), Mechanism.PLACEMENT, 0.0, why))

    def next_attempt(self) -> Request:
        """Begin the next attempt: return the request for an engine, with all tokens that have arrived."""
        self.attempt += 1
        self.is_queued = False
        return msgspec.structs.replace(self.request, attempt=self.attempt, output_token_ids=list(self.token_ids))


OutputListener = Callable[[RequestOutput | EngineError], None]
"""Receives the outputs of one request."""


class Streams:
    """Holds all requests in flight."""

    def __init__(self) -> None:
        self._handles: dict[RequestId, RequestHandle] = {}

    def __iter__(self) -> Iterator[RequestHandle]:
        """Yield the requests in flight, oldest arrival first."""
        return iter(sorted(self._handles.values(), key=lambda handle: handle.request.arrival_s))

    def __getitem__(self, request_id: RequestId) -> RequestHandle:
        """Return the handle of a request.

        Raises:
            KeyError: the request is not in flight.
        """
        return self._handles[request_id]

    def __contains__(self, request_id: RequestId) -> bool:
        """Return whether a request is in flight."""
        return request_id in self._handles

    def at(self, replica: ReplicaId) -> list[RequestHandle]:
        """Return the requests at a replica, oldest first."""
        return [handle for handle in self._handles.values() if handle.replica == replica]

    def open(self, request: Request, abort: Callable[[RequestHandle, bool], None]) -> RequestHandle:
        """Open the stream of a request.

        Args:
            request: the request that the caller sends (:meth:`RequestHandle.next_attempt`).
            abort: called when the client wants no more tokens (:meth:`RequestHandle.abort`).

        Raises:
            ValueError: the id is in use.
        """
        if request.request_id in self._handles:
            raise ValueError(f"request id {request.request_id!r} is in use")
        handle = self._handles[request.request_id] = RequestHandle(request, abort)
        return handle

    def without_stale(self, replica: ReplicaId, outputs: StepOutputs) -> StepOutputs:
        """Return a replica's outputs without stale outputs of ended or moved requests and of old attempts.

        A request may have moved away and back: the end of its earlier attempt there is not its end. The ``Queued``
        events give the attempt that a replica runs, so every output of a replica must pass here once, in order.
        """
        events = tuple([event for event in outputs.events if self._is_current(replica, event)])
        tokens = tuple([token for token in outputs.tokens if self._is_token_current(replica, token)])
        return msgspec.structs.replace(outputs, tokens=tokens, events=events)

    def apply(self, outputs: StepOutputs) -> list[tuple[RequestHandle, Finished]]:
        """Pass current outputs (:meth:`without_stale`) to their streams; return the requests that ended."""
        for scored in outputs.prompt_logprobs:
            if scored.request_id in self._handles:
                self._handles[scored.request_id].prompt_logprobs |= dict(enumerate(scored.tokens, scored.position))
        for vector in outputs.pooled:
            if vector.request_id in self._handles:
                self._handles[vector.request_id].pooled = vector.data
        received: dict[RequestId, tuple[Token, ...]] = {}
        for sampled in outputs.tokens:
            handle = self._handles[sampled.request_id]
            assert sampled.index == len(handle.token_ids), f"token {sampled.index} of {sampled.request_id} came early"
            handle.token_ids += [token.token_id for token in sampled.tokens]
            received[sampled.request_id] = sampled.tokens
        ended: dict[RequestId, Finished] = {}
        for event in outputs.events:
            self._handles[event.request_id].timings.apply(event)
            if isinstance(event, Finished):
                ended[event.request_id] = event
        handles = {request_id: self._handles[request_id] for request_id in received | ended}
        for request_id, handle in handles.items():
            output = RequestOutput(received.get(request_id, ()), ended.get(request_id))
            if output.finished is None:
                handle.put(output)
            else:
                self.end(handle, output)
        return [(handles[request_id], finished) for request_id, finished in ended.items()]

    def _is_current(self, replica: ReplicaId, event: RequestEvent) -> bool:
        """Return whether an event belongs to the newest attempt, whose events begin with ``Queued``."""
        handle = self._handles.get(event.request_id)
        if handle is None or handle.replica != replica:
            return False
        if isinstance(event, Queued):
            handle.is_queued = event.attempt == handle.attempt
        return handle.is_queued

    def _is_token_current(self, replica: ReplicaId, sampled: TokenOutput) -> bool:
        handle = self._handles.get(sampled.request_id)
        return handle is not None and handle.replica == replica and handle.attempt == sampled.attempt

    def count_death(self, handle: RequestHandle, code: int | None) -> bool:
        """Count the death of the engine that ran a request.

        Returns:
            Whether the request continues. After ``DEATHS_PER_REQUEST`` deaths the request ends with an error.
        """
        handle.deaths += 1
        handle.replica = None
        if handle.deaths < DEATHS_PER_REQUEST:
            return True
        reason = f"the engine died {handle.deaths} times while it ran, last with code {code}"
        self.finish(handle, FinishReason.ERROR, reason)
        return False

    def finish(self, handle: RequestHandle, reason: FinishReason, error: str | None = None) -> None:
        """End a stream for a reason in this process, such as an abort or too many deaths."""
        self.end(handle, RequestOutput((), Finished(handle.request.request_id, time.monotonic(), reason, error=error)))

    def end(self, handle: RequestHandle, output: RequestOutput) -> None:
        """End a stream with its last output."""
        del self._handles[handle.request.request_id]
        handle.put(output)

    def fail(self, failure: EngineError) -> None:
        """End all streams with an exception: no engine will be restarted."""
        for handle in self._handles.values():
            handle.put(failure)
        self._handles.clear()


ONLY_REPLICA = ReplicaId("0")
"""Id of the replica of a server with one engine."""

_ONE_ENGINE = "this server has one engine of its own; start it with --replicas to add or remove replicas"


class Engines(Protocol):
    """Interface of the engines that run a server's requests: one engine process, or the replicas of a cluster."""

    @property
    def engine_info(self) -> EngineReady:
        """Sizes of one replica, which are the same for all replicas."""
        ...

    @property
    def alive(self) -> bool:
        """Whether any replica is ready."""
        ...

    @property
    def is_asleep(self) -> bool:
        """Whether the engines were put to sleep."""
        ...

    @property
    def views(self) -> Mapping[ReplicaId, ReplicaView]:
        """The replicas by id."""
        ...

    async def start(self, on_progress: Callable[[Progress], None]) -> EngineReady:
        """Start the engines and wait until requests can be served.

        Args:
            on_progress: called while an engine starts.

        Raises:
            EngineError: no engine can be started; the message is for the user.
        """
        ...

    def submit(self, request: Request) -> RequestHandle:
        """Submit a request. While no engine is ready, it waits.

        Raises:
            EngineError: the engines have failed or are closed.
            ValueError: the request id is in use.
        """
        ...

    def register_adapters(self, refs: Iterable[AdapterRef]) -> None:
        """Announce adapter versions, which engines may prefetch. Requests may use a version until its drop."""
        ...

    def pin_adapters(self, digests: Iterable[AdapterDigest]) -> None:
        """Replace the pinned versions, which all present and later engines evict last."""
        ...

    def name_adapters(self, names: Mapping[AdapterName, AdapterDigest], epoch: str) -> None:
        """Send the names of all adapter versions to all present and later engines, which use the names in KV events."""
        ...

    async def drop_adapter(self, digest: AdapterDigest) -> int:
        """Free a version once no request uses it. Return the bytes freed on all tiers, including its KV.

        Raises:
            EngineError: the engines have failed or are closed.
        """
        ...

    def set_paused(self, paused: bool) -> None:
        """Pause or resume the engines. During a pause, requests wait and their streams stay open."""
        ...

    def recompute(self, salt: str) -> None:
        """Compute the KV of all requests in flight again, from the tokens that they have.

        Args:
            salt: separates the new KV from the present KV.
        """
        ...

    async def sleep(self) -> None:
        """End the engine processes, which frees all their memory, until :meth:`wake`. Requests wait meanwhile."""
        ...

    async def wake(self, *, pool: bool = True) -> None:
        """Start the engines again, and wait until they are ready; requests go on with the tokens that they have.

        Args:
            pool: whether the engines allocate their pools. Otherwise they only load their weights.

        Raises:
            EngineError: an engine cannot be started any more.
        """
        ...

    def on_adapter_event(self, callback: Callable[[AdapterEvent], None]) -> None:
        """Call ``callback`` with every load and eviction of an adapter."""
        ...

    def describe(self) -> ClusterState:
        """Return the state of all replicas, for ``/v1/cluster``."""
        ...

    async def add_replica(self) -> ReplicaId:
        """Start one more replica and route requests to it.

        Raises:
            EngineError: the replica cannot be started.
        """
        ...

    async def remove_replica(self, replica_id: ReplicaId, drain_s: float = 0.0) -> None:
        """Drain and stop a replica.

        It gets no new requests. Its requests move to other replicas, if possible with their KV.

        Args:
            replica_id: id of the replica.
            drain_s: seconds for which requests whose KV cannot move may continue on the replica, before other replicas
                recompute them.

        Raises:
            KeyError: the replica does not exist.
            EngineError: the replica is the only one, or became the only one while it drained. It then stays.
        """
        ...

    async def close(self) -> None:
        """Stop all engines; unfinished requests end with an error."""
        ...


class EngineClient:
    """The client of one engine process on this machine.

    Implements ``Engines``. The client keeps the state that a restarted engine needs: the streams of all requests, the
    registered adapters and the pending drops.

    Args:
        settings: all settings.
        host: starts the engine; None for a new :class:`LocalHost`. The client closes it.
    """

    def __init__(self, settings: Settings, host: LocalHost | None = None) -> None:
        self._context = zmq.asyncio.Context()
        self._supervisor = EngineSupervisor(
            ONLY_REPLICA,
            host or LocalHost(),
            self._context,
            msgspec.json.encode(for_engines(settings)),
            self,
            EngineTimeouts.of(settings.engine),
        )
        self._failure: EngineError | None = None
        self._streams = Streams()
        self._drops = PendingDrops()
        self._registered: dict[AdapterDigest, AdapterRef] = {}
        self._pinned: tuple[AdapterDigest, ...] = ()
        self._names: tuple[dict[AdapterName, AdapterDigest], str] | None = None
        self._on_adapter_event: list[Callable[[AdapterEvent], None]] = []

    @property
    def engine_info(self) -> EngineReady:
        """Sizes of the engine."""
        return self._supervisor.engine_info

    @property
    def stats(self) -> EngineStats | None:
        """The newest gauges; None before the first."""
        return self._supervisor.stats

    @property
    def alive(self) -> bool:
        """Whether the engine is ready and answers."""
        return self._supervisor.alive

    @property
    def is_asleep(self) -> bool:
        """Whether the engine was put to sleep."""
        return self._supervisor.is_asleep

    @property
    def restarts(self) -> int:
        """The number of restarts of the engine."""
        return self._supervisor.restarts

    @property
    def process_id(self) -> int | None:
        """The process id of the running engine; None while there is none."""
        return self._supervisor.process_id

    @property
    def views(self) -> Mapping[ReplicaId, ReplicaView]:
        """The engine as the only replica."""
        return {ONLY_REPLICA: self._supervisor}

    async def start(self, on_progress: Callable[[Progress], None]) -> EngineReady:
        """Start the engine and wait until it is ready."""
        return await self._supervisor.start(on_progress)

    def submit(self, request: Request) -> RequestHandle:
        """Open a stream for the request and send it to the engine."""
        if self._failure is not None:
            raise self._failure
        handle = self._streams.open(request, self._abort)
        handle.replica = ONLY_REPLICA
        if self._supervisor.is_connected:  # Without an engine, on_restart will send the request.
            self._supervisor.send(Submit(handle.next_attempt()))
        return handle

    def register_adapters(self, refs: Iterable[AdapterRef]) -> None:
        """Send versions to the engine, and keep them for its successors."""
        new = {ref.digest: ref for ref in refs}
        self._registered |= new
        self._supervisor.register_adapters(new.values())

    def pin_adapters(self, digests: Iterable[AdapterDigest]) -> None:
        """Send the pinned versions to the engine, and keep them for its successors."""
        self._pinned = tuple(digests)
        self._supervisor.pin_adapters(self._pinned)

    def name_adapters(self, names: Mapping[AdapterName, AdapterDigest], epoch: str) -> None:
        """Send the names of all versions to the engine, and keep them for an engine that replaces it."""
        self._names = dict(names), epoch
        self._supervisor.name_adapters(*self._names)

    async def drop_adapter(self, digest: AdapterDigest) -> int:
        """Drop a version from the engine. Return the bytes freed."""
        if self._failure is not None:
            raise self._failure
        self._registered.pop(digest, None)
        if self._supervisor.is_asleep and digest not in self._used():
            return 0
        freed = self._drops.begin(digest)
        self._supervisor.drop_adapter(digest)
        return await freed

    def set_paused(self, paused: bool) -> None:
        """Pause or resume the engine."""
        self._supervisor.set_paused(paused)

    def recompute(self, salt: str) -> None:
        """Send all requests in flight to the engine again, under a salt."""
        for handle in self._streams:
            handle.salt(salt)
            if self._supervisor.is_connected:  # Otherwise on_restart sends it.
                self._supervisor.send(Abort(handle.request.request_id))
                self._supervisor.send(Submit(handle.next_attempt()))

    async def sleep(self) -> None:
        """End the engine process until :meth:`wake`."""
        await self._supervisor.sleep()

    async def wake(self, *, pool: bool = True) -> None:
        """Start the engine again."""
        await self._supervisor.wake(pool=pool)

    def on_adapter_event(self, callback: Callable[[AdapterEvent], None]) -> None:
        """Call ``callback`` with every load and eviction of an adapter."""
        self._on_adapter_event.append(callback)

    def describe(self) -> ClusterState:
        """Return the state of the one replica."""
        held_bytes = sum(ref.weight_bytes for ref in self._registered.values())
        return ClusterState(
            (replica_state(ONLY_REPLICA, self._supervisor, held=len(self._registered), held_bytes=held_bytes),)
        )

    async def add_replica(self) -> ReplicaId:
        """Refuse: a server with one engine cannot add replicas."""
        raise EngineError(_ONE_ENGINE)

    async def remove_replica(self, replica_id: ReplicaId, drain_s: float = 0.0) -> None:
        """Refuse: a server with one engine cannot remove it."""
        raise EngineError(_ONE_ENGINE)

    async def close(self) -> None:
        """Stop the engine; unfinished requests end with an error."""
        await self._supervisor.close()
        self._fail(EngineError("the server is shutting down"))
        self._context.destroy(linger=0)

    # --- callbacks of the supervisor ---------------------------------------------------------------------

    def on_outputs(self, supervisor: EngineSupervisor, outputs: StepOutputs) -> None:
        """Pass tokens to the streams, and events and gauges to the callbacks."""
        self._streams.apply(self._streams.without_stale(ONLY_REPLICA, outputs))
        for event in outputs.adapter_events:
            if isinstance(event, AdapterEvicted) and event.dropped:
                self._drops.end(event.digest, event.freed_bytes)
                if event.digest in self._registered:  # The version was registered again before the drop ended.
                    self._supervisor.register_adapters((self._registered[event.digest],))
            for on_event in self._on_adapter_event:
                on_event(event)

    def on_exit(self, supervisor: EngineSupervisor, code: int | None) -> None:
        """Count the engine's death for every request. End requests that were in flight at too many deaths.

        An engine that sleeps holds no version, so pending drops have ended, except for versions of requests that go on
        when it wakes.
        """
        if supervisor.is_asleep:
            for handle in self._streams:
                handle.replica = None
            used = self._used()
            for digest in self._drops:
                if digest not in used:
                    self._drops.end(digest, 0)
            return
        for handle in self._streams:
            self._streams.count_death(handle, code)

    def on_restart(self, supervisor: EngineSupervisor) -> int:
        """Send the new engine all adapters, requests and drops. Return the number of requests."""
        self._supervisor.register_adapters(self._registered.values())
        if self._pinned:
            self._supervisor.pin_adapters(self._pinned)
        if self._names is not None:
            self._supervisor.name_adapters(*self._names)
        handles = list(self._streams)
        for handle in handles:
            if handle.deaths:
                handle.goes_on("the engine was started again")
            handle.replica = ONLY_REPLICA
            self._supervisor.send(Submit(handle.next_attempt()))
        for digest in self._drops:  # Drops follow the requests, which may still use their versions.
            self._supervisor.drop_adapter(digest)
        return len(handles)

    def on_parked(self, supervisor: EngineSupervisor, requests: tuple[Request, ...]) -> None:
        """Ignore requests of an earlier server: the only engine of a server is never adopted."""

    def on_failed(self, supervisor: EngineSupervisor, failure: EngineError) -> None:
        """End all requests and drops with an error."""
        self._fail(failure)

    def _used(self) -> set[AdapterDigest | None]:
        """Return the versions of the requests in flight."""
        return {handle.request.digest for handle in self._streams}

    def _fail(self, failure: EngineError) -> None:
        self._failure = failure
        self._streams.fail(failure)
        self._drops.fail(failure)

    def _abort(self, handle: RequestHandle, is_complete: bool) -> None:
        request_id = handle.request.request_id
        if request_id in self._streams and self._streams[request_id] is handle:
            self._supervisor.send(Abort(request_id))
            self._streams.finish(handle, FinishReason.ABORT)


class PendingDrops:
    """Holds the adapter versions that one engine is dropping, with the futures of the waiting callers."""

    def __init__(self) -> None:
        self._waiting: dict[AdapterDigest, list[asyncio.Future[int]]] = {}

    def __iter__(self) -> Iterator[AdapterDigest]:
        """Yield the versions that are being dropped."""
        return iter(tuple(self._waiting))

    def __contains__(self, digest: AdapterDigest) -> bool:
        """Return whether a version is being dropped."""
        return digest in self._waiting

    def begin(self, digest: AdapterDigest) -> "asyncio.Future[int]":
        """Begin a drop. Return a future of the number of bytes that it frees."""
        freed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(digest, []).append(freed)
        return freed

    def end(self, digest: AdapterDigest, freed_bytes: int) -> None:
        """Resolve the futures of a version that has been dropped."""
        for freed in self._waiting.pop(digest, ()):
            if not freed.done():
                freed.set_result(freed_bytes)

    def fail(self, failure: EngineError) -> None:
        """Fail all futures, because the engine has ended."""
        for waiting in self._waiting.values():
            for freed in waiting:
                if not freed.done():
                    freed.set_exception(failure)
        self._waiting.clear()
