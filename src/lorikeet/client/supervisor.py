"""Starts an engine process, connects to it, and starts another when it dies."""

import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import count, islice
from typing import Protocol

import structlog
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
    MessageCodec,
    MessagesLost,
    Progress,
    RegisterAdapters,
    Shutdown,
    StepOutputs,
    Submit,
    ToEngine,
)

MAX_FAILED_STARTS = 3
"""The supervisor gives up after this many failed starts in a row."""

MAX_ADAPTERS_PER_MESSAGE = 500
"""Most adapters in one ``RegisterAdapters``, which bounds the size of a message."""

DRAIN_TIMEOUT_S = 0.2
"""How long to wait for messages that a dead engine sent before it ended."""

_SHUTDOWN_TIMEOUT_S = 5.0
"""An engine that has not stopped after this time is killed."""

_log = structlog.get_logger("lorikeet")


class EngineError(RuntimeError):
    """The engine cannot be started, or has ended and will not be restarted."""


class EngineListener(Protocol):
    """Callbacks of an :class:`EngineSupervisor`."""

    def on_outputs(self, supervisor: "EngineSupervisor", outputs: StepOutputs) -> None:
        """Handle the outputs of one turn of the engine loop."""
        ...

    def on_exit(self, supervisor: "EngineSupervisor", code: int | None) -> None:
        """Handle the end of the engine process. All its state is lost, and another process is about to be started.

        Args:
            supervisor: of the engine.
            code: exit code, negative for a signal; None if it is not known.
        """
        ...

    def on_restart(self, supervisor: "EngineSupervisor") -> int:
        """Send a new engine, which is ready and has no state yet, its adapters and requests.

        Returns:
            How many requests it was sent to resume.
        """
        ...

    def on_failed(self, supervisor: "EngineSupervisor", failure: EngineError) -> None:
        """Handle that the engine will not be restarted."""
        ...


class EngineSupervisor:
    """Keeps one engine process running: starts it, passes its messages on, and restarts it when it dies.

    Args:
        replica: id of the engine, for the listener and the log.
        host: starts the processes.
        context: of the ZeroMQ sockets.
        settings: all settings as JSON.
        listener: its callbacks are called on the event loop.

    Attributes:
        replica, host: see above.
        engine_info: sizes of the running engine; set by :meth:`start`.
        stats: the newest gauges, None before the first.
        alive: whether an engine is ready now.
        restarts: how often the engine was restarted.
    """

    engine_info: EngineReady

    def __init__(
        self,
        replica: ReplicaId,
        host: "EngineHost",
        context: zmq.asyncio.Context,
        settings: bytes,
        listener: EngineListener,
    ) -> None:
        self.replica = replica
        self.host = host
        self.stats: EngineStats | None = None
        self.alive = False
        self.restarts = 0
        self._context = context
        self._settings = settings
        self._listener = listener
        self._connection: Connection | None = None
        self._started_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    async def start(self, on_progress: Callable[[Progress], None]) -> EngineReady:
        """Start the engine and wait until it is ready.

        Raises:
            EngineError: it cannot be started; the message is for the user.
        """
        connection = await self._connect(on_progress)
        self._task = asyncio.create_task(self._supervise(connection))
        return self.engine_info

    @property
    def process_id(self) -> int | None:
        """Process id of the running engine on its machine; None while there is none."""
        return None if self._connection is None else self._connection.process.pid

    @property
    def address(self) -> str:
        """Name or network address of the engine's machine."""
        return self.host.address

    def send(self, message: ToEngine) -> None:
        """Queue a message to the engine. Without a running engine it is dropped, and ``on_restart`` resends state."""
        if self._connection is not None:
            self._connection.send(message)

    def register_adapters(self, refs: Iterable[AdapterRef]) -> None:
        """Send the engine, if one is running, adapter versions for which requests may arrive."""
        remaining = iter(refs)
        while batch := tuple(islice(remaining, MAX_ADAPTERS_PER_MESSAGE)):
            self.send(RegisterAdapters(batch))

    def drop_adapter(self, digest: AdapterDigest) -> None:
        """Ask the engine, if one is running, to free a version once no request uses it."""
        self.send(DropAdapter(digest))

    async def close(self) -> None:
        """Stop the engine and do not restart it."""
        self._closing = True
        if self._connection is not None and self._connection.process.returncode is None:
            self.send(Shutdown())
            try:
                await asyncio.wait_for(self._connection.process.wait(), timeout=_SHUTDOWN_TIMEOUT_S)
            except TimeoutError:
                self._connection.process.kill()
        elif self._task is not None:
            self._task.cancel()  # an engine that is being restarted is no longer needed
        if self._task is not None:
            await asyncio.wait({self._task})
        self.host.close()

    async def _connect(self, on_progress: Callable[[Progress], None]) -> "Connection":
        self._connection = await connect(self.host, self._context, self._settings, on_progress)
        self.engine_info, self.alive, self._started_s = self._connection.engine_info, True, time.monotonic()
        return self._connection

    async def _supervise(self, connection: "Connection") -> None:
        """Run :meth:`_watch`; if it fails, tell the listener, so that no stream waits forever."""
        try:
            await self._watch(connection)
        except Exception as error:
            self._give_up(EngineError(f"cannot read the engine's messages: {error!r}"))
            raise

    async def _watch(self, connection: "Connection") -> None:
        """Pass messages to the listener; when the engine dies, restart it."""
        while True:
            async for message in connection.messages():
                if isinstance(message, StepOutputs):
                    if message.stats is not None:
                        self.stats = message.stats
                    self._listener.on_outputs(self, message)
            self.alive, self._connection, self.stats = False, None, None
            connection.close()
            if self._closing:
                return
            died_s, code = time.monotonic(), connection.process.returncode
            uptime_s = round(died_s - self._started_s, 1)
            _log.warning("engine died", replica=self.replica, exit=describe_exit(code), uptime_s=uptime_s)
            self._listener.on_exit(self, code)
            restarted = await self._restart()
            if restarted is None:
                return
            connection = restarted
            requests = self._listener.on_restart(self)
            _log.info(
                "engine restarted",
                replica=self.replica,
                seconds=round(time.monotonic() - died_s, 1),
                requests_resumed=requests,
            )

    async def _restart(self) -> "Connection | None":
        """Start the engine again; return None if the supervisor gave up or is closing."""
        for attempt in range(MAX_FAILED_STARTS):
            _log.info("restarting engine", replica=self.replica, attempt=attempt + 1, max_attempts=MAX_FAILED_STARTS)
            try:
                connection = await self._connect(lambda progress: None)
            except EngineError as error:
                failure = error
                _log.warning("engine did not start", replica=self.replica, attempt=attempt + 1, reason=str(error))
                await asyncio.sleep(2.0**attempt)
            else:
                self.restarts += 1
                return connection
            if self._closing:
                return None
        self._give_up(failure)
        return None

    def _give_up(self, failure: EngineError) -> None:
        self.alive = False
        _log.error("engine gave up", replica=self.replica, reason=str(failure))
        self._listener.on_failed(self, failure)


def describe_exit(code: int | None) -> str:
    """Return an exit code in words, such as ``code 1``, ``SIGKILL`` for -9, or ``unknown`` for None."""
    if code is None:
        return "unknown"
    if code >= 0:
        return f"code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


class EngineProcess(Protocol):
    """An engine process on this or another machine."""

    @property
    def pid(self) -> int:
        """Its process id on its machine."""
        ...

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs, as far as is known here."""
        ...

    def kill(self) -> None:
        """Kill it immediately."""
        ...

    async def wait(self) -> int | None:
        """Wait until it has ended; return its exit code, None if that cannot be known."""
        ...


class EngineHost(Protocol):
    """A place where engine processes are started."""

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
            settings: a line for its standard input, which stays open as long as the starting process lives.

        Raises:
            OSError: it cannot be started.
        """
        ...

    def close(self) -> None:
        """Release files and other resources of earlier starts."""
        ...


class LocalHost:
    """This machine. Engines are child processes and end with this process."""

    address = "localhost"

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lorikeet-")
        self._numbers = count(1)

    def bind_address(self) -> str:
        """Return the address of a new socket file."""
        return f"ipc://{self._folder.name}/engine-{next(self._numbers)}"

    async def start(self, address: str, settings: bytes) -> EngineProcess:
        """Start the process with this interpreter (``EngineHost.start``)."""
        # In its own session, so that a Ctrl-C at the terminal reaches only the API process, which drains first.
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

    All times in messages on this side are on this machine's clock, wherever the engine runs.

    Args:
        process: runs the engine.
        socket: bound to the address that the engine connects to.

    Attributes:
        process: see above.
        engine_info: sizes of the engine; set by :meth:`on_ready`.
    """

    engine_info: EngineReady

    def __init__(self, process: EngineProcess, socket: zmq.asyncio.Socket) -> None:
        self.process = process
        self._socket = socket
        self._codec = MessageCodec[ToEngine, FromEngine](FromEngine)
        self._messages = self._receive()
        self._clock: RemoteClock | None = None

    def on_ready(self, engine_info: EngineReady) -> None:
        """Keep the engine's sizes; if it runs on another machine, convert times from now on."""
        self.engine_info = engine_info
        if engine_info.boot_id != boot_id():
            self._clock = RemoteClock(engine_info.at_s, time.monotonic())

    def send(self, message: ToEngine) -> None:
        """Queue a message to the engine."""
        if self._clock is not None and isinstance(message, Submit):
            message = Submit(self._clock.to_remote(message.request))
        self._socket.send(self._codec.encode(message))

    def messages(self) -> AsyncIterator[FromEngine]:
        """Return the stream of messages, always the same one. It ends once the process has ended and all is read.

        If messages are lost the process is killed, so that another one takes its place, and the stream ends.
        """
        return self._messages

    def close(self) -> None:
        """Close the socket; queued messages are dropped."""
        self._socket.close()

    async def _receive(self) -> AsyncIterator[FromEngine]:
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
                    try:
                        message = self._codec.decode(receiving.result())
                    except MessagesLost as error:
                        _log.error("messages of an engine were lost, so it is replaced", reason=str(error))
                        self.process.kill()
                        await exited
                        return
                    receiving = None
                    if message is None:
                        continue
                    if self._clock is not None and isinstance(message, StepOutputs):
                        message = self._clock.to_local(message, time.monotonic())
                    yield message
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
        host: starts the process.
        context: of the socket.
        settings: all settings as JSON.
        on_progress: called while the engine starts.

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
        raise EngineError(f"the engine process ended before it was ready (exit: {describe_exit(process.returncode)})")
    except BaseException as error:
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
        socket.close()
        if isinstance(error, (OSError, zmq.ZMQError)):
            raise EngineError(f"the engine process at {address} cannot be started: {error}") from error
        raise
