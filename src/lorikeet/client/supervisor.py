"""Starts an engine process, connects to it, and replaces it when it dies."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import NamedTuple, Protocol

import msgspec
import structlog
import zmq
import zmq.asyncio

from lorikeet.client.backlog import Backlog
from lorikeet.config import EngineSettings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import RemoteClock, boot_id
from lorikeet.core.ids import AdapterDigest, AdapterName, ReplicaId
from lorikeet.core.messages import (
    AllocatePool,
    DropAdapter,
    EngineInput,
    EngineReady,
    EngineStats,
    Fatal,
    FromEngine,
    Heartbeat,
    MessageCodec,
    MessagesLost,
    NameAdapters,
    Parked,
    PinAdapters,
    Progress,
    RegisterAdapters,
    SetPaused,
    Shutdown,
    StepOutputs,
    Submit,
    ToEngine,
    WeightsLoaded,
)
from lorikeet.core.request import Request

MAX_FAILED_STARTS = 3
"""Failed starts in a row after which the supervisor gives up."""

MAX_ADAPTERS_PER_MESSAGE = 500
"""Most adapters in one ``RegisterAdapters``, which bounds the size of a message."""
REQUESTS_AT_ONCE = 16
"""Most requests whose tokens are passed on before the event loop has a turn, so that a new request waits little."""

DRAIN_TIMEOUT_S = 0.2
"""Seconds to wait for messages that an engine sent before it died."""

_SHUTDOWN_TIMEOUT_S = 5.0
"""Seconds after which an engine that was asked to stop is killed."""

_KILL_TIMEOUT_S = 5.0
"""Seconds after a kill until an engine counts as ended without a report: its machine may be lost."""

_FIRST_MESSAGE_TIMEOUT_S = 300.0
"""Least seconds to wait for the first message of an engine process, which imports its libraries first."""

LINK_PING_EVERY_S = 2.0
"""Seconds between two pings of ZeroMQ on a connection between machines."""

LINK_TIMEOUT_S = 5.0
"""Seconds without any message after a ping until a connection between machines is lost."""

_EXIT_REPORT_S = 1.0
"""Seconds to wait for the report of an engine's end after its connection was lost, which the end would explain."""

CHECK_EVERY_S = 1.0
"""Seconds between two checks for messages."""

_LATE_SHARE = 1 / 3
"""Share of a timeout after which an engine counts as not ready."""

_log = structlog.get_logger("lorikeet")


class EngineError(RuntimeError):
    """The engine cannot be started, or has ended and will not be restarted."""


class EngineTimeouts(NamedTuple):
    """Timeouts after which a running engine process is replaced; 0 for never. See ``EngineSettings``.

    Attributes:
        heartbeat_s: time without a message.
        step_s: time in the same step.
    """

    heartbeat_s: float = 30.0
    step_s: float = 300.0

    @classmethod
    def of(cls, settings: EngineSettings) -> "EngineTimeouts":
        """Return the timeouts of the settings."""
        return cls(settings.heartbeat_timeout_s, settings.step_timeout_s)


DEFAULT_TIMEOUTS = EngineTimeouts()


class EngineListener(Protocol):
    """Callbacks of an :class:`EngineSupervisor`."""

    def on_outputs(self, supervisor: "EngineSupervisor", outputs: StepOutputs) -> None:
        """Handle the outputs of one turn of the engine loop."""
        ...

    def on_exit(self, supervisor: "EngineSupervisor", code: int | None) -> None:
        """Handle the end of the engine process. All its state is lost, and another process is about to be started.

        If the supervisor was put to sleep, the end is no death, and the other process starts when it is woken.

        Args:
            supervisor: supervisor of the engine.
            code: exit code, negative for a signal; None if unknown.
        """
        ...

    def on_restart(self, supervisor: "EngineSupervisor") -> int:
        """Send a new engine, which is ready and has no state yet, its adapters and requests.

        Returns:
            Number of requests that the engine resumes.
        """
        ...

    def on_parked(self, supervisor: "EngineSupervisor", requests: tuple[Request, ...]) -> None:
        """Handle the requests that an adopted engine ran for its former API process."""
        ...

    def on_failed(self, supervisor: "EngineSupervisor", failure: EngineError) -> None:
        """Handle that the engine will not be restarted."""
        ...


class EngineSupervisor:
    """Keeps one engine process running: starts it, passes on its messages, and replaces it when it dies or hangs.

    Args:
        replica: id of the engine, for the listener and the log.
        host: starts the processes.
        context: context of the ZeroMQ sockets.
        settings: all settings as JSON.
        listener: its callbacks are called on the event loop.
        timeouts: timeouts after which the process counts as hung.

    Attributes:
        replica, host: the arguments.
        engine_info: sizes of the running engine; set by :meth:`start`.
        stats: the newest gauges, None before the first.
        is_connected: whether an engine is ready, so that messages reach it. A connected engine may still be late to
            answer.
        restarts: number of restarts of the engine.
        trouble: the reason why the engine is not ready, if known.
    """

    engine_info: EngineReady

    def __init__(
        self,
        replica: ReplicaId,
        host: "EngineHost",
        context: zmq.asyncio.Context,
        settings: bytes,
        listener: EngineListener,
        timeouts: EngineTimeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        self.replica = replica
        self.host = host
        self.stats: EngineStats | None = None
        self.is_paused = False
        self.is_connected = False
        self.restarts = 0
        self.trouble = "it is being started"
        self._context = context
        self._settings = settings
        self._listener = listener
        self._timeouts = timeouts
        self._connection: Connection | None = None
        self._backlog = Backlog()
        self._failure: EngineError | None = None
        self._started_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._awake = asyncio.Event()
        self._awake.set()
        self._has_pool = True
        """Whether an engine that starts allocates its pool, or waits with its weights alone."""
        self._waiting: Connection | None = None
        """An engine that has its weights alone."""
        self._settled = asyncio.Condition()

    async def start(self, on_progress: Callable[[Progress], None]) -> EngineReady:
        """Start the engine and wait until it is ready.

        Raises:
            EngineError: the engine cannot be started; the message is for the user.
        """
        connection = await self._connect(on_progress)
        self._task = asyncio.create_task(self._supervise(connection))
        return self.engine_info

    @property
    def alive(self) -> bool:
        """Whether an engine is ready and answers."""
        return self.is_connected and self._connection is not None and not self._connection.is_late

    @property
    def process_id(self) -> int | None:
        """The process id of the running engine on its machine; None while there is none."""
        running = self._connection or self._waiting
        return None if running is None else running.process.pid

    @property
    def address(self) -> str:
        """Name or network address of the engine's machine."""
        return self.host.address

    def send(self, message: ToEngine) -> None:
        """Queue a message to the engine. Without an engine, it is dropped, and ``on_restart`` resends the state."""
        if self._connection is not None:
            self._connection.send(message)

    def register_adapters(self, refs: Iterable[AdapterRef]) -> None:
        """Send a running engine the adapter versions for which requests may arrive."""
        remaining = iter(refs)
        while batch := tuple(islice(remaining, MAX_ADAPTERS_PER_MESSAGE)):
            self.send(RegisterAdapters(batch))

    def pin_adapters(self, digests: Iterable[AdapterDigest]) -> None:
        """Send a running engine all versions to evict last."""
        self.send(PinAdapters(tuple(digests)))

    def name_adapters(self, names: Mapping[AdapterName, AdapterDigest], epoch: str) -> None:
        """Send the names of all adapter versions, for events of KV."""
        self.send(NameAdapters(dict(names), epoch))

    def drop_adapter(self, digest: AdapterDigest) -> None:
        """Send a running engine a version to free once no request uses it."""
        self.send(DropAdapter(digest))

    def set_paused(self, paused: bool) -> None:
        """Pause or resume the engine and its successors."""
        self.is_paused = paused
        self.send(SetPaused(paused))

    @property
    def is_asleep(self) -> bool:
        """Whether the engine was ended to free its memory, or waits without its pool, until it is woken."""
        return not (self._awake.is_set() and self._has_pool)

    async def sleep(self) -> None:
        """End the engine, which frees its weights and its pool on all tiers, until :meth:`wake`."""
        self._awake.clear()
        self.trouble = "it is asleep"
        ending = self._connection or self._waiting
        if ending is not None:
            ending.shut_down()
            killing = asyncio.get_running_loop().call_later(_SHUTDOWN_TIMEOUT_S, ending.process.kill)
            try:
                async with self._settled:
                    await self._settled.wait_for(
                        lambda: ending not in (self._connection, self._waiting) or self._awake.is_set()
                    )
            finally:
                killing.cancel()

    async def wake(self, *, pool: bool = True) -> None:
        """Start the engine again, and wait until it is ready.

        Args:
            pool: whether the engine allocates its pool. Otherwise it loads its weights, still counts as asleep, and
                waits for the next call.

        Raises:
            EngineError: the engine cannot be started any more.
        """
        if self.is_asleep:
            self.trouble = "it is being started" if pool else "it is asleep"
        elif not pool:
            return
        self._has_pool = pool
        if pool and self._waiting is not None:
            self._waiting.send(AllocatePool())
            self._waiting = None
        self._awake.set()
        async with self._settled:
            await self._settled.wait_for(
                lambda: (self.is_connected if pool else self._waiting is not None) or self._failure is not None
            )
        if self._failure is not None:
            raise self._failure

    async def _on_weights(self, connection: "Connection") -> None:
        """Keep an engine that has its weights, or let it allocate its pool if it was woken meanwhile."""
        if self._has_pool:
            connection.send(AllocatePool())
        else:
            self._waiting = connection
            _log.info("engine has its weights and waits for its pool", replica=self.replica)
        await self._settle()

    async def close(self) -> None:
        """Stop the engine and do not restart it."""
        self._closing = True
        if self._connection is not None and self._connection.process.returncode is None:
            self._connection.shut_down()
            try:
                await asyncio.wait_for(self._connection.process.wait(), timeout=_SHUTDOWN_TIMEOUT_S)
            except TimeoutError:
                self._connection.process.kill()
        elif self._task is not None:
            self._task.cancel()  # An engine that is being restarted is no longer needed.
        if self._task is not None:
            await asyncio.wait({self._task})
        self.host.close()

    async def detach(self) -> None:
        """Close the channel to the engine, which another API process may adopt. The engine is not stopped."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self.is_connected = False
        if self._connection is not None:
            self._connection.close()

    async def _connect(self, on_progress: Callable[[Progress], None]) -> "Connection":
        try:
            self._connection = await connect(
                self.host,
                self._context,
                self._settings,
                on_progress,
                self._timeouts,
                self.replica,
                on_weights=None if self._has_pool else self._on_weights,
            )
        finally:
            self._waiting = None
        self.engine_info = self._connection.engine_info
        self.is_connected = True
        self._started_s = time.monotonic()
        self.trouble = "it does not answer"  # The reason is shown only if the engine becomes late.
        return self._connection

    async def _supervise(self, connection: "Connection") -> None:
        """Run :meth:`_watch`; if it fails, fail the engine, so that no stream waits forever."""
        try:
            await self._watch(connection)
        except Exception as error:
            self._give_up(EngineError(f"cannot read the engine's messages: {error!r}"))
            raise

    async def _watch(self, connection: "Connection") -> None:
        """Pass messages to the listener, and restart the engine when it dies."""
        while True:
            async for message in connection.messages():
                if isinstance(message, StepOutputs):
                    if message.stats is not None:
                        self.stats = message.stats
                    if self._backlog or len(message.tokens) > REQUESTS_AT_ONCE:
                        self._add_to_backlog(message)
                    else:
                        self._listener.on_outputs(self, message)
                elif isinstance(message, Parked):
                    self._listener.on_parked(self, message.requests)
            while self._backlog:
                self._pass_on()
            self.is_connected = False
            self._connection = None
            self.stats = None
            connection.close()
            if self._closing:
                return
            died_s = time.monotonic()
            code = connection.process.returncode
            woken = self.is_asleep
            if woken:
                _log.info("engine sleeps", replica=self.replica)
                self._listener.on_exit(self, code)
                await self._settle()
                await self._awake.wait()
                died_s = time.monotonic()
            else:
                uptime_s = round(died_s - self._started_s, 1)
                self.trouble = connection.hung or f"its engine died ({describe_exit(code)})"
                _log.warning("engine died", replica=self.replica, exit=describe_exit(code), uptime_s=uptime_s)
                self._listener.on_exit(self, code)
            restarted = await self._restart(is_death=not woken)
            if restarted is None:
                await self._settle()
                return
            connection = restarted
            if self.is_asleep:  # It was put to sleep while it started.
                connection.shut_down()
                continue
            if self.is_paused:
                self.send(SetPaused(True))
            requests = self._listener.on_restart(self)
            _log.info(
                "engine restarted",
                replica=self.replica,
                seconds=round(time.monotonic() - died_s, 1),
                requests_resumed=requests,
            )
            await self._settle()

    async def _settle(self) -> None:
        """Wake the tasks that wait for the engine to start or end."""
        async with self._settled:
            self._settled.notify_all()

    def _add_to_backlog(self, outputs: StepOutputs) -> None:
        """Pass outputs on in parts, with a turn of the event loop between two parts.

        Outputs with events, such as a first token or an end, are passed on without waiting for a turn.
        """
        is_behind = bool(self._backlog)
        self._backlog.add(outputs)
        if not is_behind or outputs.events:
            self._pass_on()
        if not is_behind:
            asyncio.get_running_loop().call_soon(self._pass_on_in_turns)

    def _pass_on_in_turns(self) -> None:
        if not self._backlog:
            return
        try:
            self._pass_on()
        except Exception as error:
            self._give_up(EngineError(f"cannot pass the engine's outputs on: {error!r}"))
            assert self._task is not None
            self._task.cancel()
            raise
        asyncio.get_running_loop().call_soon(self._pass_on_in_turns)

    def _pass_on(self) -> None:
        self._listener.on_outputs(self, self._backlog.take(REQUESTS_AT_ONCE))

    async def _restart(self, *, is_death: bool) -> "Connection | None":
        """Start the engine again. Return None if the supervisor has given up or is closing.

        Args:
            is_death: whether the start counts as a restart; the start of a woken engine does not.
        """
        attempt = 0
        while attempt < MAX_FAILED_STARTS:
            _log.info("restarting engine", replica=self.replica, attempt=attempt + 1, max_attempts=MAX_FAILED_STARTS)
            try:
                connection = await self._connect(lambda progress: None)
            except EngineError as error:
                failure = error
                if not self._awake.is_set():  # It was put to sleep before it had its pool.
                    await self._settle()
                    await self._awake.wait()
                    attempt = 0
                    continue
                _log.warning("engine did not start", replica=self.replica, attempt=attempt + 1, reason=str(error))
                await asyncio.sleep(2.0**attempt)
                attempt += 1
            else:
                self.restarts += is_death
                return connection
            if self._closing:
                return None
        self._give_up(failure)
        return None

    def _give_up(self, failure: EngineError) -> None:
        self._failure = failure
        self.is_connected = False
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
        """The process id on its machine."""
        ...

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None until the end is reported."""
        ...

    def kill(self) -> None:
        """Kill the process."""
        ...

    async def wait(self) -> int | None:
        """Wait until the process has ended, and return its exit code; None if unknown."""
        ...


class EngineHost(Protocol):
    """A machine on which engine processes are started."""

    @property
    def address(self) -> str:
        """Name or network address of the machine."""
        ...

    def bind_address(self) -> str:
        """Return an address to listen on for the next engine; its port may be ``*``."""
        ...

    async def start(self, address: str, settings: bytes) -> EngineProcess:
        """Start ``lorikeet.engine`` with an address to connect to.

        Args:
            address: address at which the channel listens.
            settings: a line for its standard input (``EngineInput``), which stays open as long as the starting process
                lives. It holds a key, and must not be written anywhere else.

        Raises:
            OSError: the process cannot be started.
        """
        ...

    def close(self) -> None:
        """Release files and other resources of earlier starts."""
        ...


class Connection:
    """A running engine process and the socket to it. Made by :func:`connect`.

    All times in messages on this side are on this machine's clock, wherever the engine runs.

    Args:
        process: the engine's process.
        socket: socket that is bound to the address for the engine.
        timeouts: timeouts after which a running process is killed.
        replica, address: replica and address for the log.

    Attributes:
        process: the engine's process.
        engine_info: sizes of the engine; set by :meth:`on_ready`.
        is_late: whether the engine has been silent for a while.
        hung: the reason why the process was killed; empty if it was not killed.
    """

    engine_info: EngineReady

    def __init__(
        self,
        process: EngineProcess,
        socket: zmq.asyncio.Socket,
        timeouts: EngineTimeouts,
        replica: ReplicaId | None,
        address: str = "",
    ) -> None:
        self.process = process
        self.is_late = False
        self.hung = ""
        self._is_ending = False
        self._timeouts = timeouts
        self._replica = replica
        self._address = address
        self._messages_received = 0
        self._turn_s = 0.0
        self._exited = asyncio.ensure_future(process.wait())
        self._watching = asyncio.create_task(self._watch())
        self._socket = socket
        self._codec = MessageCodec[ToEngine, FromEngine](FromEngine)
        self._messages = self._receive()
        self._clock: RemoteClock | None = None

    def on_ready(self, engine_info: EngineReady) -> None:
        """Keep the engine's sizes. If the engine runs on another machine, convert times from now on."""
        self.engine_info = engine_info
        if engine_info.boot_id != boot_id():
            self._clock = RemoteClock(engine_info.at_s, time.monotonic())

    def send(self, message: ToEngine) -> None:
        """Queue a message to the engine."""
        if self._clock is not None and isinstance(message, Submit):
            message = Submit(self._clock.to_remote(message.request))
        self._socket.send(self._codec.encode(message))

    def messages(self) -> AsyncIterator[FromEngine]:
        """Return the stream of messages without heartbeats; every call returns the same stream.

        It ends after the process has ended and all messages were read. If messages are lost, the process is killed, so
        that another process replaces it.
        """
        return self._messages

    def shut_down(self) -> None:
        """Send the engine the message to stop."""
        self._is_ending = True
        self.send(Shutdown())

    def close(self) -> None:
        """Close the socket and drop queued messages."""
        self._watching.cancel()
        self._socket.close()

    async def _receive(self) -> AsyncIterator[FromEngine]:
        exited = self._exited
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
                        _log.error("messages of an engine were lost", replica=self._replica, reason=str(error))
                        self.hung = "messages were lost"
                        await self._kill()
                        return
                    self._messages_received += 1
                    receiving = None
                    if message is None:
                        continue
                    if isinstance(message, Heartbeat):
                        self._turn_s = message.turn_s
                        continue
                    self._turn_s = 0.0
                    if self._clock is not None and isinstance(message, StepOutputs):
                        message = self._clock.to_local(message, time.monotonic())
                    yield message
                elif exited.done():
                    return
        finally:
            exited.cancel()
            if receiving is not None:
                receiving.cancel()

    async def _watch(self) -> None:
        """Record when the engine is late, and kill it when it hangs.

        Send heartbeats, too. Silence is counted in checks of this process, not in seconds: if this process was
        suspended, messages may wait to be read.
        """
        received = 0
        silent_s = 0.0
        while not self.hung:
            await asyncio.sleep(CHECK_EVERY_S)
            if self._messages_received:  # The socket may have no peer before this message.
                self.send(Heartbeat(0.0))
            silent_s = silent_s + CHECK_EVERY_S if self._messages_received == received else 0.0
            received = self._messages_received
            if received and not (self._is_ending or self._has_peer):
                return await self._replace_cut_off()
            limit_s = self._timeouts.heartbeat_s
            if not received:
                limit_s = limit_s and max(limit_s, _FIRST_MESSAGE_TIMEOUT_S)
            silent = _share(silent_s, limit_s)
            stuck = _share(self._turn_s, self._timeouts.step_s)
            reason = f"no message for {silent_s:.3g} s" if silent > stuck else f"one step for {self._turn_s:.3g} s"
            if max(silent, stuck) >= 1:
                self.hung = reason
                _log.error("engine hangs and is killed", replica=self._replica, address=self._address, reason=reason)
            elif self.is_late != (max(silent, stuck) >= _LATE_SHARE):
                self.is_late = not self.is_late
                if self.is_late:
                    _log.warning("engine does not answer", replica=self._replica, address=self._address, reason=reason)
                else:
                    _log.info("engine answers again", replica=self._replica)
        await self._kill()

    async def _kill(self) -> None:
        """Kill the process, and wait for a limited time until its end is reported."""
        self.is_late = True
        with suppress(ProcessLookupError):  # The process has just ended.
            self.process.kill()
        await asyncio.wait({self._exited}, timeout=_KILL_TIMEOUT_S)
        self._exited.cancel()  # A second kill does nothing if the process has ended.

    @property
    def _has_peer(self) -> bool:
        """Return whether the engine is connected. A PAIR socket without a peer cannot send."""
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLOUT)

    async def _replace_cut_off(self) -> None:
        """End the messages of an engine whose connection is lost, unless the end of its process is reported."""
        await asyncio.wait({self._exited}, timeout=_EXIT_REPORT_S)
        if not self._exited.done():
            self.is_late = True
            self.hung = "the connection to its machine is lost"
            _log.error("engine is cut off and replaced", replica=self._replica, address=self._address)
            self.process.kill()  # The kill takes effect when the machine can be reached again.
            self._exited.cancel()


def _share(seconds: float, limit_s: float) -> float:
    """Return the share of a limit that has passed; 0 without a limit."""
    return seconds / limit_s if limit_s else 0.0


def secure(socket: zmq.asyncio.Socket) -> str:
    """Encrypt a channel over TCP, notice if it breaks, and return the key that the engine needs to connect.

    Both ends authenticate by CurveZMQ with keys that are used once. The engine checks that this end has the secret of
    the key. This end need not know the engine's key: only the engine receives this end's key, and nobody can begin a
    connection without it. Sockets without the key are closed before they become the peer.
    """
    key, secret = zmq.curve_keypair()
    socket.curve_server = True
    socket.curve_secretkey = secret
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(LINK_PING_EVERY_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(LINK_TIMEOUT_S * 1000))
    socket.setsockopt(zmq.TCP_MAXRT, round(LINK_TIMEOUT_S * 1000))  # Pings wait behind messages that cannot be sent.
    return key.decode()


async def connect(
    host: EngineHost,
    context: zmq.asyncio.Context,
    settings: bytes,
    on_progress: Callable[[Progress], None],
    timeouts: EngineTimeouts = DEFAULT_TIMEOUTS,
    replica: ReplicaId | None = None,
    on_weights: "Callable[[Connection], Awaitable[None]] | None" = None,
) -> Connection:
    """Start an engine process and wait until it is ready.

    Args:
        host: starts the process.
        context: ZeroMQ context of the socket.
        settings: all settings as JSON.
        on_progress: function that is called while the engine starts.
        timeouts: timeouts after which the process counts as hung, now and later.
        replica: replica for the log.
        on_weights: function that is called when the engine has its weights. The engine then waits until it gets
            ``AllocatePool``. None for an engine that does not wait.

    Raises:
        EngineError: the engine cannot be started; the message is for the user.
    """
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 0)
    process = None
    connection = None
    address = host.bind_address()
    try:
        key = secure(socket) if address.startswith("tcp:") else ""
        socket.bind(address)
        address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        given = EngineInput(msgspec.Raw(settings), key, replica or ReplicaId("0"), on_weights is not None)
        process = await host.start(address, msgspec.json.encode(given))
        connection = Connection(process, socket, timeouts, replica, host.address)
        async for message in connection.messages():
            if isinstance(message, Progress):
                on_progress(message)
            elif isinstance(message, Fatal):
                raise EngineError(f"on {host.address}: {message.message}" if key else message.message)
            elif isinstance(message, WeightsLoaded):
                assert on_weights is not None
                await on_weights(connection)
            elif isinstance(message, EngineReady):
                connection.on_ready(message)
                return connection
        exit_code = f"exit: {describe_exit(process.returncode)}"
        where = f" on {host.address}" if key else ""
        raise EngineError(f"the engine process{where} ended before it was ready ({connection.hung or exit_code})")
    except BaseException as error:
        if connection is not None:
            connection.close()
        if process is not None and process.returncode is None:
            process.kill()
            await asyncio.wait({asyncio.ensure_future(process.wait())}, timeout=_KILL_TIMEOUT_S)
        socket.close()
        if isinstance(error, (OSError, zmq.ZMQError)):
            raise EngineError(f"the engine process at {address} cannot be started: {error}") from error
        raise
