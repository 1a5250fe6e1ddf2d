"""The interface through which the API process uses engines, and its implementation for one engine process."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import msgspec
import zmq.asyncio

from lorikeet.client.state import ClusterState, ReplicaView, replica_state
from lorikeet.client.streams import RequestHandle, Streams
from lorikeet.client.supervisor import EngineError, EngineSupervisor, LocalHost
from lorikeet.config import Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import AdapterEvent, AdapterEvicted, FinishReason
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.core.messages import Abort, EngineReady, EngineStats, Progress, StepOutputs, Submit
from lorikeet.core.request import Request

ONLY_REPLICA = ReplicaId("0")
"""Id of the replica of a server with one engine."""

_ONE_ENGINE = "this server has one engine of its own; start it with --replicas to add or remove replicas"


class Engines(Protocol):
    """The engines that run the requests of a server: one engine process, or the replicas of a cluster."""

    @property
    def engine_info(self) -> EngineReady:
        """Sizes of one replica; they are the same on all."""
        ...

    @property
    def alive(self) -> bool:
        """Whether any replica is ready now."""
        ...

    @property
    def views(self) -> Mapping[ReplicaId, ReplicaView]:
        """Every replica by its id."""
        ...

    async def start(self, on_progress: Callable[[Progress], None]) -> EngineReady:
        """Start and wait until requests can be served.

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
        """Announce versions for which requests may arrive, so that they can be prefetched, until they are dropped."""
        ...

    async def drop_adapter(self, digest: AdapterDigest) -> int:
        """Free a version once no request uses it; return the bytes freed on all tiers, its KV's included.

        Raises:
            EngineError: the engines have failed or are closed.
        """
        ...

    def on_adapter_event(self, callback: Callable[[AdapterEvent], None]) -> None:
        """Call ``callback`` with every load and eviction of an adapter."""
        ...

    def on_stats(self, callback: Callable[[ReplicaId, EngineStats], None]) -> None:
        """Call ``callback`` whenever a replica sends its gauges."""
        ...

    def describe(self) -> ClusterState:
        """Return the state of all replicas, for ``/v1/cluster``."""
        ...

    async def add_replica(self) -> ReplicaId:
        """Start one more replica and route requests to it.

        Raises:
            EngineError: it cannot be started.
        """
        ...

    async def remove_replica(self, replica_id: ReplicaId, drain_s: float = 0.0) -> None:
        """Drain and stop a replica. It gets no new requests; unfinished ones move to other replicas.

        Args:
            replica_id: which.
            drain_s: how long its requests may go on there before they move, in seconds.

        Raises:
            KeyError: there is no such replica.
            EngineError: it is the only one, or became the only one while it drained; then it stays.
        """
        ...

    async def close(self) -> None:
        """Stop all engines; unfinished requests end with an error."""
        ...


class EngineClient:
    """The client of one engine process on this machine. Implements ``Engines``.

    It keeps what a restarted engine needs: the streams of all requests, the registered adapters and the pending drops.
    """

    def __init__(self, settings: Settings) -> None:
        self._context = zmq.asyncio.Context()
        self._supervisor = EngineSupervisor(
            ONLY_REPLICA, LocalHost(), self._context, msgspec.json.encode(settings), self
        )
        self._failure: EngineError | None = None
        self._streams = Streams()
        self._drops = PendingDrops()
        self._registered: dict[AdapterDigest, AdapterRef] = {}
        self._on_adapter_event: list[Callable[[AdapterEvent], None]] = []
        self._on_stats: list[Callable[[ReplicaId, EngineStats], None]] = []

    @property
    def engine_info(self) -> EngineReady:
        """Sizes of the engine."""
        return self._supervisor.engine_info

    @property
    def stats(self) -> EngineStats | None:
        """The newest gauges, None before the first."""
        return self._supervisor.stats

    @property
    def alive(self) -> bool:
        """Whether the engine is ready now."""
        return self._supervisor.alive

    @property
    def restarts(self) -> int:
        """How often the engine was restarted."""
        return self._supervisor.restarts

    @property
    def process_id(self) -> int | None:
        """Process id of the running engine, None while there is none."""
        return self._supervisor.process_id

    @property
    def views(self) -> Mapping[ReplicaId, ReplicaView]:
        """The one engine."""
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
        if self._supervisor.alive:  # else on_restart sends it
            self._supervisor.send(Submit(handle.next_attempt()))
        return handle

    def register_adapters(self, refs: Iterable[AdapterRef]) -> None:
        """Send versions to the engine, and keep them for an engine that replaces it."""
        new = {ref.digest: ref for ref in refs}
        self._registered |= new
        self._supervisor.register_adapters(new.values())

    async def drop_adapter(self, digest: AdapterDigest) -> int:
        """Ask the engine to drop a version and wait until it has; return the bytes freed."""
        if self._failure is not None:
            raise self._failure
        self._registered.pop(digest, None)
        freed = self._drops.begin(digest)
        self._supervisor.drop_adapter(digest)
        return await freed

    def on_adapter_event(self, callback: Callable[[AdapterEvent], None]) -> None:
        """Call ``callback`` with every load and eviction of an adapter."""
        self._on_adapter_event.append(callback)

    def on_stats(self, callback: Callable[[ReplicaId, EngineStats], None]) -> None:
        """Call ``callback`` whenever the engine sends its gauges."""
        self._on_stats.append(callback)

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
                if event.digest in self._registered:  # it was registered again before the drop ended
                    self._supervisor.register_adapters((self._registered[event.digest],))
            for on_event in self._on_adapter_event:
                on_event(event)
        if outputs.stats is not None:
            for on_stats in self._on_stats:
                on_stats(ONLY_REPLICA, outputs.stats)

    def on_exit(self, supervisor: EngineSupervisor, code: int | None) -> None:
        """Count the death for every request; end those that were in flight at too many."""
        for handle in self._streams:
            self._streams.count_death(handle, code)

    def on_restart(self, supervisor: EngineSupervisor) -> int:
        """Send the new engine all adapters, requests and drops; return the number of requests."""
        self._supervisor.register_adapters(self._registered.values())
        handles = list(self._streams)
        for handle in handles:
            handle.replica = ONLY_REPLICA
            self._supervisor.send(Submit(handle.next_attempt()))
        for digest in self._drops:  # after the requests, which may still use a version that is being dropped
            self._supervisor.drop_adapter(digest)
        return len(handles)

    def on_failed(self, supervisor: EngineSupervisor, failure: EngineError) -> None:
        """End all requests and drops with an error."""
        self._fail(failure)

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
    """Adapter versions that one engine was asked to drop, and the futures of the callers that wait for that."""

    def __init__(self) -> None:
        self._waiting: dict[AdapterDigest, list[asyncio.Future[int]]] = {}

    def __iter__(self) -> Iterator[AdapterDigest]:
        """Yield the versions that are being dropped."""
        return iter(tuple(self._waiting))

    def __contains__(self, digest: AdapterDigest) -> bool:
        """Whether a version is being dropped."""
        return digest in self._waiting

    def begin(self, digest: AdapterDigest) -> "asyncio.Future[int]":
        """Return a future of the number of bytes that the drop will have freed."""
        freed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(digest, []).append(freed)
        return freed

    def end(self, digest: AdapterDigest, freed_bytes: int) -> None:
        """Resolve the futures of a version that has been dropped."""
        for freed in self._waiting.pop(digest, ()):
            if not freed.done():
                freed.set_result(freed_bytes)

    def fail(self, failure: EngineError) -> None:
        """Fail all futures: nothing more will be dropped."""
        for waiting in self._waiting.values():
            for freed in waiting:
                if not freed.done():
                    freed.set_exception(failure)
        self._waiting.clear()
