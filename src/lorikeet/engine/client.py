"""The API process's side of the channel to one engine: it starts it, watches it, and owns the clients' streams.

When the engine process dies, another is started and every unfinished request is resumed from the tokens that have
arrived here. No torch is imported here.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import msgspec
import zmq.asyncio

from lorikeet.config import Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import AdapterEvent, AdapterEvicted, FinishReason
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.core.messages import Abort, EngineStats, Hello, Progress, StepOutputs, Submit
from lorikeet.core.request import Request
from lorikeet.engine.connection import EngineError, LocalHost
from lorikeet.engine.drops import Drops
from lorikeet.engine.keeper import EngineKeeper
from lorikeet.engine.streams import RequestHandle, Streams
from lorikeet.engine.views import ClusterState, EngineView, replica_state

ONLY = ReplicaId("0")
"""The replica of a server that has one."""


_ONE_ENGINE = "this server was started with one engine of its own; --replicas gives it several"


class Engines(Protocol):
    """Whatever runs the requests of a server: one engine, or many."""

    @property
    def hello(self) -> Hello:
        """Sizes of one replica; they are the same on all."""
        ...

    @property
    def alive(self) -> bool:
        """Whether any is ready right now."""
        ...

    @property
    def views(self) -> Mapping[ReplicaId, EngineView]:
        """Every replica by its id."""
        ...

    async def start(self, on_progress: Callable[[Progress], None]) -> Hello:
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

    def know_adapters(self, refs: Iterable[AdapterRef]) -> None:
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
        self._keeper = EngineKeeper(ONLY, LocalHost(), self._context, msgspec.json.encode(settings), self)
        self._failure: EngineError | None = None
        self._streams = Streams()
        self._drops = Drops()
        self._known: dict[AdapterDigest, AdapterRef] = {}
        self._on_adapter_event: list[Callable[[AdapterEvent], None]] = []
        self._on_stats: list[Callable[[ReplicaId, EngineStats], None]] = []

    @property
    def hello(self) -> Hello:
        """Sizes of the running engine."""
        return self._keeper.hello

    @property
    def stats(self) -> EngineStats | None:
        """The newest gauges, None before the first."""
        return self._keeper.stats

    @property
    def alive(self) -> bool:
        """Whether an engine is ready right now."""
        return self._keeper.alive

    @property
    def restarts(self) -> int:
        """How often it had to be started again."""
        return self._keeper.restarts

    @property
    def process_id(self) -> int | None:
        """Process id of the running engine."""
        return self._keeper.process_id

    @property
    def views(self) -> Mapping[ReplicaId, EngineView]:
        """The one engine."""
        return {ONLY: self._keeper}

    async def start(self, on_progress: Callable[[Progress], None]) -> Hello:
        """See ``Engines``."""
        return await self._keeper.start(on_progress)

    def submit(self, request: Request) -> RequestHandle:
        """See ``Engines``."""
        if self._failure is not None:
            raise self._failure
        handle = self._streams.open(request, self._abort)
        handle.replica = ONLY
        if self._keeper.alive:  # else it is sent when there is an engine again
            self._keeper.send(Submit(handle.next_attempt()))
        return handle

    def know_adapters(self, refs: Iterable[AdapterRef]) -> None:
        """See ``Engines``; engines that come after this one are told, too."""
        new = {ref.digest: ref for ref in refs}
        self._known |= new
        self._keeper.know(new.values())

    async def drop_adapter(self, digest: AdapterDigest) -> int:
        """See ``Engines``."""
        if self._failure is not None:
            raise self._failure
        self._known.pop(digest, None)
        freed = self._drops.begin(digest)
        self._keeper.drop(digest)
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
        return ClusterState((replica_state(ONLY, self._keeper, held=len(self._known), held_bytes=held_bytes),))

    async def add_replica(self) -> ReplicaId:
        """Refuse: see ``Engines``."""
        raise EngineError(_ONE_ENGINE)

    async def remove_replica(self, replica_id: ReplicaId, drain_s: float = 0.0) -> None:
        """Refuse: see ``Engines``."""
        raise EngineError(_ONE_ENGINE)

    async def close(self) -> None:
        """See ``Engines``."""
        await self._keeper.close()
        self._give_up(EngineError("the server is shutting down"))
        self._context.destroy(linger=0)

    # --- what the keeper tells -----------------------------------------------------------------------

    def engine_told(self, keeper: EngineKeeper, outputs: StepOutputs) -> None:
        """Hand tokens and events on."""
        self._streams.take(self._streams.current(ONLY, outputs))
        for event in outputs.adapter_events:
            if isinstance(event, AdapterEvicted) and event.dropped:
                self._drops.ended(event.digest, event.freed_bytes)
                if event.digest in self._known:  # made known again while the drop was under way
                    self._keeper.know((self._known[event.digest],))
            for on_event in self._on_adapter_event:
                on_event(event)
        if outputs.stats is not None:
            for on_stats in self._on_stats:
                on_stats(ONLY, outputs.stats)

    def engine_died(self, keeper: EngineKeeper, code: int | None) -> None:
        """Account for a death: requests that saw too many of them end."""
        for handle in self._streams:
            self._streams.died(handle, code)

    def engine_back(self, keeper: EngineKeeper) -> None:
        """Tell the new engine all that the last one knew."""
        self._keeper.know(self._known.values())
        for handle in self._streams:
            handle.replica = ONLY
            self._keeper.send(Submit(handle.next_attempt()))
        for digest in self._drops:  # after the requests, which may still run under them
            self._keeper.drop(digest)

    def engine_lost(self, keeper: EngineKeeper, failure: EngineError) -> None:
        """Nobody will answer any more."""
        self._give_up(failure)

    def _give_up(self, failure: EngineError) -> None:
        self._failure = failure
        self._streams.fail(failure)
        self._drops.fail(failure)

    def _abort(self, handle: RequestHandle, is_complete: bool) -> None:
        request_id = handle.request.request_id
        if request_id in self._streams and self._streams[request_id] is handle:
            self._keeper.send(Abort(request_id))
            self._streams.finish(handle, FinishReason.ABORT)
