"""Starts an engine process, connects to it, and starts another when it dies."""

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import count, islice
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import RemoteClock, boot_id
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.core.messages import (
    DropAdapter,
    EngineReady,
    EngineStats,
    Fatal,
    FromEngine,
    Progress,
    RegisterAdapters,
    Shutdown,
    StepOutputs,
    Submit,
    ToEngine,
)

DRAIN_TIMEOUT_S = 0.2
"""How long messages of a dead engine are waited for."""


class EngineError(RuntimeError):
    """The engine cannot be started, or is gone for good."""


class EngineProcess(Protocol):
    """An engine process, wherever it runs."""

    @property
    def pid(self) -> int:
        """Its process id on its machine."""
        ...

    @property
    def returncode(self) -> int | None:
        """None while it runs, as far as is known here."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...

    async def wait(self) -> int | None:
        """Wait until it has ended; return its code, None if it is lost and nobody knows."""
        ...


class EngineHost(Protocol):
    """Where engine processes are started."""

    @property
    def address(self) -> str:
        """Name or network address of the machine."""
        ...

    def bind_address(self) -> str:
        """Return an address to listen on for the next engine; its port may be ``*``."""
        ...

    async def start(self, address: str, settings: bytes) -> EngineProcess:
        """Start ``lorikeet.engine.process`` with an address to connect to.

        Args:
            address: where the channel listens.
            settings: a line for its standard input, which stays open as long as the starter lives.

        Raises:
            OSError: it cannot be started.
        """
        ...

    def close(self) -> None:
        """Release what the starts have left behind."""
        ...


class LocalHost:
    """This machine: engines are child processes, and end with this one."""

    address = "localhost"

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lorikeet-")
        self._numbers = count(1)

    def bind_address(self) -> str:
        """Return the address of a new socket file."""
        return f"ipc://{self._folder.name}/engine-{next(self._numbers)}"

    async def start(self, address: str, settings: bytes) -> EngineProcess:
        """See ``EngineHost``."""
        # A session of its own: a Ctrl-C at the terminal is for the API process, which drains.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lorikeet.engine.process", address),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(settings + b"\n")
        return process

    def close(self) -> None:
        """Remove the socket files."""
        self._folder.cleanup()


class Connection:
    """A running engine process and the socket to it. Made by :func:`connect`.

    All times on this side are those of this machine's clock, wherever the engine runs.

    Args:
        process: runs the engine.
        socket: bound to the address that the engine connects to.

    Attributes:
        process: see above.
        engine_info: what it said when it was ready.
    """

    engine_info: EngineReady

    def __init__(self, process: EngineProcess, socket: zmq.asyncio.Socket) -> None:
        self.process = process
        self._socket = socket
        self._encoder = msgspec.msgpack.Encoder()
        self._messages = self._receive()
        self._clock: RemoteClock | None = None

    def on_ready(self, engine_info: EngineReady) -> None:
        """The engine is ready."""
        self.engine_info = engine_info
        if engine_info.boot_id != boot_id():
            self._clock = RemoteClock(engine_info.at_s, time.monotonic())

    def send(self, message: ToEngine) -> None:
        """Queue a message to the engine."""
        if self._clock is not None and isinstance(message, Submit):
            message = Submit(self._clock.theirs(message.request))
        self._socket.send(self._encoder.encode(message))

    def messages(self) -> AsyncIterator[FromEngine]:
        """Return what comes, until the process has ended and its last words are read; there is one such stream."""
        return self._messages

    def close(self) -> None:
        """Close the socket; what is queued is dropped."""
        self._socket.close()

    async def _receive(self) -> AsyncIterator[FromEngine]:
        decoder = msgspec.msgpack.Decoder(FromEngine)
        exited = asyncio.ensure_future(self.process.wait())
        receiving = None
        try:
            while True:
                receiving = receiving or asyncio.ensure_future(self._socket.recv())
                if exited.done():
                    await asyncio.wait({receiving}, timeout=DRAIN_TIMEOUT_S)
                else:
                    await asyncio.wait({receiving, exited}, return_when=asyncio.FIRST_COMPLETED)
                if receiving.done():
                    message = decoder.decode(receiving.result())
                    if self._clock is not None and isinstance(message, StepOutputs):
                        message = self._clock.ours(message, time.monotonic())
                    yield message
                    receiving = None
                elif exited.done():
                    return
        finally:
            exited.cancel()
            if receiving is not None:
                receiving.cancel()


async def connect(
    host: EngineHost, context: zmq.asyncio.Context, settings: bytes, on_progress: Callable[[Progress], None]
) -> Connection:
    """Start an engine process and wait until it is ready.

    Args:
        host: where.
        context: of the socket.
        settings: all, as JSON.
        on_progress: called while it starts.

    Raises:
        EngineError: it cannot be started; the message is for the user.
    """
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 0)
    process, address = None, host.bind_address()
    try:
        socket.bind(address)
        address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        process = await host.start(address, settings)
        connection = Connection(process, socket)
        async for message in connection.messages():
            if isinstance(message, Progress):
                on_progress(message)
            elif isinstance(message, Fatal):
                raise EngineError(message.message)
            elif isinstance(message, EngineReady):
                connection.on_ready(message)
                return connection
        raise EngineError(f"the engine process ended with code {process.returncode} before it was ready")
    except BaseException as error:
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
        socket.close()
        if isinstance(error, (OSError, zmq.ZMQError)):
            raise EngineError(f"the engine process at {address} cannot be started: {error}") from error
        raise


FAILED_STARTS = 3
"""After so many starts in a row that came to nothing the engine is given up."""

MAX_ADAPTERS_PER_MESSAGE = 500
"""Most adapters in one message, so that none of them is large."""

_STOPS_WITHIN_S = 5.0


class EngineListener(Protocol):
    """Hears of an engine."""

    def on_outputs(self, supervisor: "EngineSupervisor", outputs: StepOutputs) -> None:
        """It said what a turn of its loop brought."""
        ...

    def on_exit(self, supervisor: "EngineSupervisor", code: int | None) -> None:
        """It is gone with all that it knew; another is about to be started."""
        ...

    def on_restart(self, supervisor: "EngineSupervisor") -> None:
        """Another is ready, and knows nothing yet."""
        ...

    def on_failed(self, supervisor: "EngineSupervisor", failure: EngineError) -> None:
        """There will be none any more."""
        ...


class EngineSupervisor:
    """See the module.

    Args:
        replica: whom its owner knows it as.
        host: where it runs.
        context: of its socket.
        settings: all, as JSON.
        owner: hears of it.

    Attributes:
        replica, host: see above.
        engine_info: sizes of the running engine; set by :meth:`start`.
        stats: the newest gauges, None before the first.
        alive: whether an engine is ready right now.
        restarts: how often it had to be started again.
    """

    engine_info: EngineReady

    def __init__(
        self, replica: ReplicaId, host: EngineHost, context: zmq.asyncio.Context, settings: bytes, owner: EngineListener
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

    async def start(self, on_progress: Callable[[Progress], None]) -> EngineReady:
        """Start the engine and wait until it is ready.

        Raises:
            EngineError: it cannot be started; the message is for the user.
        """
        connection = await self._connect(on_progress)
        self._supervisor = asyncio.create_task(self._supervise(connection))
        return self.engine_info

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
        while piece := tuple(islice(left, MAX_ADAPTERS_PER_MESSAGE)):
            self.send(RegisterAdapters(piece))

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
        self.engine_info, self.alive = self._connection.engine_info, True
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
                    self._owner.on_outputs(self, message)
            self.alive, self._connection, self.stats = False, None, None
            connection.close()
            if self._closing:
                return
            self._owner.on_exit(self, connection.process.returncode)
            again = await self._connect_again()
            if again is None:
                return
            connection = again
            self._owner.on_restart(self)

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
        self._owner.on_failed(self, failure)
