"""Adapter versions that engines were told to drop, and who waits for that."""

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


class PendingDrops:
    """Drops under way at one engine."""

    def __init__(self) -> None:
        self._waiting: dict[AdapterDigest, list[asyncio.Future[int]]] = {}

    def __iter__(self) -> Iterator[AdapterDigest]:
        """Yield the versions that are being dropped."""
        return iter(tuple(self._waiting))

    def __contains__(self, digest: AdapterDigest) -> bool:
        """Whether a version is being dropped."""
        return digest in self._waiting

    def begin(self, digest: AdapterDigest) -> "asyncio.Future[int]":
        """Return what will be the bytes that were freed."""
        freed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(digest, []).append(freed)
        return freed

    def ended(self, digest: AdapterDigest, freed_bytes: int) -> None:
        """A version has been dropped."""
        for freed in self._waiting.pop(digest, ()):
            if not freed.done():
                freed.set_result(freed_bytes)

    def fail(self, failure: EngineError) -> None:
        """Nothing will be dropped any more."""
        for waiting in self._waiting.values():
            for freed in waiting:
                if not freed.done():
                    freed.set_exception(failure)
        self._waiting.clear()


ONLY_REPLICA = ReplicaId("0")
"""The replica of a server that has one."""


_ONE_ENGINE = "this server was started with one engine of its own; --replicas gives it several"


class Engines(Protocol):
    """Whatever runs the requests of a server: one engine, or many."""

    @property
    def engine_info(self) -> EngineReady:
        """Sizes of one replica; they are the same on all."""
        ...

    @property
    def alive(self) -> bool:
        """Whether any is ready right now."""
        ...

    @property
    def views(self) -> Mapping[ReplicaId, ReplicaView]:
        """Every replica by its id."""
        ...

    async def start(self, on_progress: Callable[[Progress], None]) -> EngineReady:
        """Start and wait until requests can be served.

        Raises:
            EngineError: that will not be; the message is for the user.
        """
        ...

    def submit(self, request: Request) -> RequestHandle:
        """Hand a request over. While no engine can take it, it waits.

        Raises:
            EngineError: there will be none.
            ValueError: the id is in use.
        """
        ...

    def register_adapters(self, refs: Iterable[AdapterRef]) -> None:
        """Tell of versions that requests may come for, until they are dropped."""
        ...

    async def drop_adapter(self, digest: AdapterDigest) -> int:
        """Free a version once no request uses it; return the bytes freed on all tiers, its KV's included.

        Raises:
            EngineError: there is no engine any more.
        """
        ...

    def on_adapter_event(self, callback: Callable[[AdapterEvent], None]) -> None:
        """Call ``callback`` with every adapter that is loaded or evicted."""
        ...

    def on_stats(self, callback: Callable[[ReplicaId, EngineStats], None]) -> None:
        """Call ``callback`` with all gauges that come."""
        ...

    def describe(self) -> ClusterState:
        """Return what there is, for people to see."""
        ...

    async def add_replica(self) -> ReplicaId:
        """Start one more replica and send it requests.

        Raises:
            EngineError: it cannot be started.
        """
        ...

    async def remove_replica(self, replica_id: ReplicaId, drain_s: float = 0.0) -> None:
        """Take a replica out: it gets no new requests, and those that have not ended in time go on at others.

        Args:
            replica_id: which.
            drain_s: how long its requests may go on there.

        Raises:
            KeyError: it is not there.
            EngineError: it is the only one, or has become that while it drained; then it stays.
        """
        ...

    async def close(self) -> None:
        """Stop; unfinished requests end with an error."""
        ...


class EngineClient:
    """One engine process on this machine; see ``Engines``."""

    def __init__(self, settings: Settings) -> None:
        self._context = zmq.asyncio.Context()
        self._supervisor = EngineSupervisor(
            ONLY_REPLICA, LocalHost(), self._context, msgspec.json.encode(settings), self
        )
        self._failure: EngineError | None = None
        self._streams = Streams()
        self._drops = PendingDrops()
        self._known: dict[AdapterDigest, AdapterRef] = {}
        self._on_adapter_event: list[Callable[[AdapterEvent], None]] = []
        self._on_stats: list[Callable[[ReplicaId, EngineStats], None]] = []

    @property
    def engine_info(self) -> EngineReady:
        """Sizes of the running engine."""
        return self._supervisor.engine_info

    @property
    def stats(self) -> EngineStats | None:
        """The newest gauges, None before the first."""
        return self._supervisor.stats

    @property
    def alive(self) -> bool:
        """Whether an engine is ready right now."""
        return self._supervisor.alive

    @property
    def restarts(self) -> int:
        """How often it had to be started again."""
        return self._supervisor.restarts

    @property
    def process_id(self) -> int | None:
        """Process id of the running engine."""
        return self._supervisor.process_id

    @property
    def views(self) -> Mapping[ReplicaId, ReplicaView]:
        """The one engine."""
        return {ONLY_REPLICA: self._supervisor}

    async def start(self, on_progress: Callable[[Progress], None]) -> EngineReady:
        """See ``Engines``."""
        return await self._supervisor.start(on_progress)

    def submit(self, request: Request) -> RequestHandle:
        """See ``Engines``."""
        if self._failure is not None:
            raise self._failure
        handle = self._streams.open(request, self._abort)
        handle.replica = ONLY_REPLICA
        if self._supervisor.alive:  # else it is sent when there is an engine again
            self._supervisor.send(Submit(handle.next_attempt()))
        return handle

    def register_adapters(self, refs: Iterable[AdapterRef]) -> None:
        """See ``Engines``; engines that come after this one are told, too."""
        new = {ref.digest: ref for ref in refs}
        self._known |= new
        self._supervisor.know(new.values())

    async def drop_adapter(self, digest: AdapterDigest) -> int:
        """See ``Engines``."""
        if self._failure is not None:
            raise self._failure
        self._known.pop(digest, None)
        freed = self._drops.begin(digest)
        self._supervisor.drop(digest)
        return await freed

    def on_adapter_event(self, callback: Callable[[AdapterEvent], None]) -> None:
        """See ``Engines``."""
        self._on_adapter_event.append(callback)

    def on_stats(self, callback: Callable[[ReplicaId, EngineStats], None]) -> None:
        """See ``Engines``."""
        self._on_stats.append(callback)

    def describe(self) -> ClusterState:
        """See ``Engines``."""
        held_bytes = sum(ref.weight_bytes for ref in self._known.values())
        return ClusterState(
            (replica_state(ONLY_REPLICA, self._supervisor, held=len(self._known), held_bytes=held_bytes),)
        )

    async def add_replica(self) -> ReplicaId:
        """Refuse: see ``Engines``."""
        raise EngineError(_ONE_ENGINE)

    async def remove_replica(self, replica_id: ReplicaId, drain_s: float = 0.0) -> None:
        """Refuse: see ``Engines``."""
        raise EngineError(_ONE_ENGINE)

    async def close(self) -> None:
        """See ``Engines``."""
        await self._supervisor.close()
        self._give_up(EngineError("the server is shutting down"))
        self._context.destroy(linger=0)

    # --- what the supervisor tells -----------------------------------------------------------------------

    def on_outputs(self, supervisor: EngineSupervisor, outputs: StepOutputs) -> None:
        """Hand tokens and events on."""
        self._streams.take(self._streams.current(ONLY_REPLICA, outputs))
        for event in outputs.adapter_events:
            if isinstance(event, AdapterEvicted) and event.dropped:
                self._drops.ended(event.digest, event.freed_bytes)
                if event.digest in self._known:  # made known again while the drop was under way
                    self._supervisor.know((self._known[event.digest],))
            for on_event in self._on_adapter_event:
                on_event(event)
        if outputs.stats is not None:
            for on_stats in self._on_stats:
                on_stats(ONLY_REPLICA, outputs.stats)

    def on_exit(self, supervisor: EngineSupervisor, code: int | None) -> None:
        """Account for a death: requests that saw too many of them end."""
        for handle in self._streams:
            self._streams.died(handle, code)

    def on_restart(self, supervisor: EngineSupervisor) -> None:
        """Tell the new engine all that the last one knew."""
        self._supervisor.know(self._known.values())
        for handle in self._streams:
            handle.replica = ONLY_REPLICA
            self._supervisor.send(Submit(handle.next_attempt()))
        for digest in self._drops:  # after the requests, which may still run under them
            self._supervisor.drop(digest)

    def on_failed(self, supervisor: EngineSupervisor, failure: EngineError) -> None:
        """Nobody will answer any more."""
        self._give_up(failure)

    def _give_up(self, failure: EngineError) -> None:
        self._failure = failure
        self._streams.fail(failure)
        self._drops.fail(failure)

    def _abort(self, handle: RequestHandle, is_complete: bool) -> None:
        request_id = handle.request.request_id
        if request_id in self._streams and self._streams[request_id] is handle:
            self._supervisor.send(Abort(request_id))
            self._streams.finish(handle, FinishReason.ABORT)
