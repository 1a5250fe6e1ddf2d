"""Keeps one engine running: starts it, passes on what it says, and starts another when it dies."""

import asyncio
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol

import zmq.asyncio

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.core.messages import (
    DropAdapter,
    EngineStats,
    Hello,
    KnowAdapters,
    Progress,
    Shutdown,
    StepOutputs,
    ToEngine,
)
from lorikeet.engine.connection import Connection, EngineError, EngineHost, connect

FAILED_STARTS = 3
"""After so many starts in a row that came to nothing the engine is given up."""

KNOWN_AT_ONCE = 500
"""Most adapters in one message, so that none of them is large."""

_STOPS_WITHIN_S = 5.0


class Owner(Protocol):
    """Hears of an engine."""

    def engine_told(self, keeper: "EngineKeeper", outputs: StepOutputs) -> None:
        """It said what a turn of its loop brought."""
        ...

    def engine_died(self, keeper: "EngineKeeper", code: int | None) -> None:
        """It is gone with all that it knew; another is about to be started."""
        ...

    def engine_back(self, keeper: "EngineKeeper") -> None:
        """Another is ready, and knows nothing yet."""
        ...

    def engine_lost(self, keeper: "EngineKeeper", failure: EngineError) -> None:
        """There will be none any more."""
        ...


class EngineKeeper:
    """See the module.

    Args:
        replica: whom its owner knows it as.
        host: where it runs.
        context: of its socket.
        settings: all, as JSON.
        owner: hears of it.

    Attributes:
        replica, host: see above.
        hello: sizes of the running engine; set by :meth:`start`.
        stats: the newest gauges, None before the first.
        alive: whether an engine is ready right now.
        restarts: how often it had to be started again.
    """

    hello: Hello

    def __init__(
        self, replica: ReplicaId, host: EngineHost, context: zmq.asyncio.Context, settings: bytes, owner: Owner
    ) -> None:
        self.replica = replica
        self.host = host
        self.stats: EngineStats | None = None
        self.alive = False
        self.restarts = 0
        self._context = context
        self._settings = settings
        self._owner = owner
        self._connection: Connection | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._closing = False

    async def start(self, on_progress: Callable[[Progress], None]) -> Hello:
        """Start the engine and wait until it is ready.

        Raises:
            EngineError: it cannot be started; the message is for the user.
        """
        connection = await self._connect(on_progress)
        self._supervisor = asyncio.create_task(self._supervise(connection))
        return self.hello

    @property
    def process_id(self) -> int | None:
        """Process id of the running engine, on its machine."""
        return None if self._connection is None else self._connection.process.pid

    @property
    def address(self) -> str:
        """Machine on which it runs."""
        return self.host.address

    def send(self, message: ToEngine) -> None:
        """Queue a message to the engine, if there is one; the next one is told by its owner."""
        if self._connection is not None:
            self._connection.send(message)

    def know(self, refs: Iterable[AdapterRef]) -> None:
        """Tell the engine, if there is one, of versions that requests may come for."""
        left = iter(refs)
        while piece := tuple(islice(left, KNOWN_AT_ONCE)):
            self.send(KnowAdapters(piece))

    def drop(self, digest: AdapterDigest) -> None:
        """Tell the engine, if there is one, to free a version once no request uses it."""
        self.send(DropAdapter(digest))

    async def close(self) -> None:
        """Stop the engine for good."""
        self._closing = True
        if self._connection is not None and self._connection.process.returncode is None:
            self.send(Shutdown())
            try:
                await asyncio.wait_for(self._connection.process.wait(), timeout=_STOPS_WITHIN_S)
            except TimeoutError:
                self._connection.process.kill()
        elif self._supervisor is not None:
            self._supervisor.cancel()  # between two engines: the next one is not wanted any more
        if self._supervisor is not None:
            await asyncio.wait({self._supervisor})
        self.host.close()

    async def _connect(self, on_progress: Callable[[Progress], None]) -> Connection:
        self._connection = await connect(self.host, self._context, self._settings, on_progress)
        self.hello, self.alive = self._connection.hello, True
        return self._connection

    async def _supervise(self, connection: Connection) -> None:
        """Watch one engine after the other; a failure in here must not leave the streams waiting for ever."""
        try:
            await self._watch(connection)
        except Exception as error:
            self._lose(EngineError(f"the engine's messages cannot be followed: {error!r}"))
            raise

    async def _watch(self, connection: Connection) -> None:
        """Pass messages on; when the engine dies, start another."""
        while True:
            async for message in connection.messages():
                if isinstance(message, StepOutputs):
                    if message.stats is not None:
                        self.stats = message.stats
                    self._owner.engine_told(self, message)
            self.alive, self._connection, self.stats = False, None, None
            connection.close()
            if self._closing:
                return
            self._owner.engine_died(self, connection.process.returncode)
            again = await self._connect_again()
            if again is None:
                return
            connection = again
            self._owner.engine_back(self)

    async def _connect_again(self) -> Connection | None:
        for failed in range(FAILED_STARTS):
            try:
                connection = await self._connect(lambda progress: None)
            except EngineError as error:
                failure = error
                await asyncio.sleep(2.0**failed)
            else:
                self.restarts += 1
                return connection
            if self._closing:
                return None
        self._lose(failure)
        return None

    def _lose(self, failure: EngineError) -> None:
        self.alive = False
        self._owner.engine_lost(self, failure)
