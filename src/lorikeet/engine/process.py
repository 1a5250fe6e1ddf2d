"""The engine process, which runs one replica at the engine's end of the message channel.

Started as ``python -m lorikeet.engine ADDRESS``. The first line of standard input is an ``EngineInput`` with the
settings and the channel's key, which must not be on a command line. The input stays open while the API process lives.
Its end of file shows that the API process has ended, even if it was killed. On Ray a replica's actor holds the other
end of the input. A further line (``Reattach``) then moves the engine to another API process, with all its memory.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import structlog
import zmq

from lorikeet import __version__
from lorikeet.config import KvEventSettings, Settings
from lorikeet.core.clock import boot_id
from lorikeet.core.executor import ExecutorError
from lorikeet.core.ids import ReplicaId, RequestId
from lorikeet.core.logs import configure_logs
from lorikeet.core.messages import (
    HEARTBEAT_EVERY_S,
    Abort,
    AllocatePool,
    DropAdapter,
    EngineInput,
    EngineReady,
    ExportRequest,
    Fatal,
    FromEngine,
    Heartbeat,
    ImportKv,
    MessageCodec,
    MessagesLost,
    NameAdapters,
    Parked,
    PinAdapters,
    Progress,
    Reattach,
    RegisterAdapters,
    SetPaused,
    Shutdown,
    StepOutputs,
    Submit,
    ToEngine,
    WeightsLoaded,
)
from lorikeet.core.process_tuning import freeze_imports, frozen_gc
from lorikeet.core.request import Request
from lorikeet.engine.build import Replica, build_replica
from lorikeet.engine.kv_publisher import KvPublisher
from lorikeet.engine.loop import Engine
from lorikeet.memory.kv_events import KvEvents
from lorikeet.worker.grammars import GrammarCompiler

REST_S = 1.0
"""After so long without a request the tokenizer of grammars is read, for which no other code runs."""
STATS_EVERY_S = 0.1
"""Least interval between two sends of the gauges while the engine is busy."""

_log = structlog.get_logger("lorikeet")


class Channel:
    """The engine's end of the channel.

    Any thread may call ``wake`` and ``send``. Only one thread may call the other methods.

    A thread sends heartbeats, so that the API process can distinguish a long step from an engine that hangs.

    Args:
        address: ZeroMQ address to which the API process is bound.
        key: public key of the API process. Empty for a channel without encryption.

    Attributes:
        is_cut_off: whether the connection to the API process has ended.
    """

    def __init__(self, address: str, key: str = "") -> None:
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._using = threading.Lock()  # Several threads may use a socket, but not at the same time.
        self._offered: Reattach | None = None
        self._connect(address, key)
        # The value is None while the channel waits, and inf before the first turn.
        self._turn_began_s: float | None = math.inf
        self._is_closed = threading.Event()
        threading.Thread(target=self._send_heartbeats, name="heartbeats", daemon=True).start()

    def offer(self, next_channel: Reattach) -> None:
        """Let :meth:`switch` connect to another API process. Any thread may call it."""
        self._offered = next_channel
        self.wake()

    def switch(self) -> bool:
        """Connect to the API process that was offered, and return whether there was one.

        The connection to the former one is closed, so that only one API process drives the engine.
        """
        offered = self._offered
        if offered is None:
            return False
        self._offered = None
        with self._using:
            self._socket.close(linger=0)
            self._connect(offered.address, offered.channel_key)
        return True

    def _connect(self, address: str, key: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        if key:
            self._socket.curve_serverkey = key.encode()
            self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
            # The API process replaces an engine whose connection breaks, so connecting again would be useless.
            self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._codec = MessageCodec[FromEngine, ToEngine](ToEngine)
        self.is_cut_off = False

    def wake(self) -> None:
        """End a waiting :meth:`receive`, or else the next one."""
        os.eventfd_write(self._wake_fd, 1)

    def send(self, message: FromEngine) -> None:
        """Send a message. The message is queued while the API process does not read, and lost once it has ended."""
        with self._using:
            if not (self._is_closed.is_set() or self.is_cut_off):
                try:
                    self._socket.send(self._codec.encode(message), zmq.NOBLOCK)
                except zmq.Again:  # The connection has ended, and is not made again.
                    self.is_cut_off = True

    def receive(self, wait_s: float) -> list[ToEngine]:
        """Wait for a message, for :meth:`wake`, or for ``wait_s`` seconds.

        Return all messages that have arrived.

        A turn of the loop begins when the call returns. Heartbeats of the API process do not end it.

        Raises:
            MessagesLost: messages of the API process are missing.
        """
        self._turn_began_s = None
        until_s = time.monotonic() + wait_s
        while True:
            is_woken = self._poll(min(wait_s, HEARTBEAT_EVERY_S))
            messages = self._take()
            wait_s = max(0.0, until_s - time.monotonic())
            if messages or is_woken or not wait_s:
                break
            self.send(Heartbeat(0.0))
        self._turn_began_s = time.monotonic()
        return messages

    def wait_for_pool(self) -> None:
        """Report that the weights are loaded, and wait until the pool may be allocated.

        The next API process does not wait for it.

        Raises:
            SystemExit: the engine is shut down instead.
        """
        self.send(WeightsLoaded())
        messages: list[ToEngine] = []
        while not (messages or self._offered):
            messages = [each for each in self.receive(math.inf) if isinstance(each, AllocatePool | Shutdown)]
        if any(isinstance(each, Shutdown) for each in messages):
            self.close()
            sys.exit(0)
        self._turn_began_s = math.inf  # The start goes on.

    def close(self) -> None:
        """Close the channel once all sent messages are delivered, or after a second."""
        with self._using:
            self._is_closed.set()
            self._socket.close(linger=1000)

    def _poll(self, wait_s: float) -> bool:
        """Wait for a message or for :meth:`wake`, and return whether :meth:`wake` was called."""
        with self._using:
            if self._wake_fd not in dict(self._poller.poll(math.ceil(wait_s * 1000))):
                return False
        os.eventfd_read(self._wake_fd)
        return True

    def _take(self) -> list[ToEngine]:
        messages: list[ToEngine] = []
        with self._using:
            while self._socket.poll(0):
                message = self._codec.decode(self._socket.recv())
                if message is not None and not isinstance(message, Heartbeat):
                    messages.append(message)
        return messages

    def _send_heartbeats(self) -> None:
        """Send heartbeats before the first turn and during turns. Between turns, :meth:`receive` sends them."""
        while not self._is_closed.wait(HEARTBEAT_EVERY_S):
            began_s = self._turn_began_s
            if began_s is not None:
                self.send(Heartbeat(max(0.0, time.monotonic() - began_s)))


class Compiling:
    """Holds requests while their grammars compile, so that no step waits for a grammar.

    Args:
        grammars: the compiler of grammars; None lets every request pass.
        wake: function called on another thread when a request can go on.

    Attributes:
        due_s: next time, on the monotonic clock, at which :meth:`turn` may have work; ``inf`` for never.
    """

    def __init__(self, grammars: GrammarCompiler | None, wake: Callable[[], None]) -> None:
        self._grammars = grammars
        self._wake = wake
        self._held: dict[RequestId, tuple[Request, Future[Any]]] = {}
        self.due_s = math.inf if grammars is None else time.monotonic() + REST_S

    def turn(self, has_requests: bool) -> None:
        """Read the tokenizer once the engine has been idle for ``REST_S``, so that no grammar need wait for it."""
        if self.due_s == math.inf:
            return
        now = time.monotonic()
        if has_requests:
            self.due_s = now + REST_S
        elif now >= self.due_s:
            assert self._grammars is not None
            self._grammars.read_tokenizer()
            self.due_s = math.inf

    def holds(self, request: Request) -> bool:
        """Begin to compile a request's grammar, and return whether the request must wait for it."""
        if self._grammars is None or not request.sampling.grammar:
            return False
        compiled = self._grammars.compile(request.sampling.grammar)
        if compiled.done():
            return False
        self._held[request.request_id] = request, compiled
        compiled.add_done_callback(lambda _: self._wake())
        return True

    def take(self, request_id: RequestId | None = None) -> list[Request]:
        """Return the requests that can go on, and always the request with this id."""
        ready = [each for each, (_, compiled) in self._held.items() if compiled.done() or each == request_id]
        return [self._held.pop(each)[0] for each in ready]

    def take_all(self) -> list[Request]:
        """Return all requests that wait for their grammars, and forget them."""
        held = [request for request, _ in self._held.values()]
        self._held.clear()
        return held


class KvReports:
    """Publishes the changes of the cached KV after each turn.

    Args:
        events: finds the changes.
        settings: address and topic.
        replica: id of the replica, whose number is added to the ports.

    Raises:
        ConfigError: an address is not valid, or in use.
    """

    def __init__(self, events: KvEvents, settings: KvEventSettings, replica: ReplicaId) -> None:
        self._events = events
        number = replica.rpartition("-")[2]
        self._publisher = KvPublisher(settings, events.block_size, int(number) if number.isdecimal() else 0)

    def receive(self, message: ToEngine) -> None:
        """Take names of adapters and tokens of requests from a message."""
        if isinstance(message, NameAdapters):
            self._events.set_names(message.names, message.epoch)
        elif isinstance(message, Submit):
            self._events.learn(message.request)

    def publish(self) -> None:
        """Publish what has changed since the last call."""
        self._publisher.publish(self._events.take())

    def close(self) -> None:
        """Close the sockets."""
        self._publisher.close()


def serve(
    channel: Channel,
    engine: Engine,
    compiling: Compiling,
    kv_reports: KvReports | None = None,
    ready: Callable[[], EngineReady] | None = None,
) -> None:
    """Receive messages, run a step and send its outputs, until ``Shutdown`` arrives.

    Args:
        channel: the engine's end of the channel.
        engine: the engine.
        compiling: holds requests while their grammars compile.
        kv_reports: publishes changes of the cached KV; None without events.
        ready: returns the first message to an API process that takes the engine over; None if none can.

    Raises:
        ExecutorError: a step failed. The supervisor starts another engine.
        MessagesLost: messages of the API process are missing. The supervisor starts another engine.
    """
    stats_due_s = 0.0
    is_paused = False
    parked: list[Request] = []
    while True:
        wait_s = 0.0 if engine.is_busy else max(0.0, min(engine.due_s, compiling.due_s) - time.monotonic())
        messages = channel.receive(math.inf if is_paused else wait_s)
        if ready is not None and channel.switch():
            messages = []  # They are of the former API process, which must not drive the engine any more.
            parked += _park(engine, compiling)
            channel.send(ready())
            channel.send(Parked(tuple(parked)))
            parked.clear()
            is_paused = False
            stats_due_s = 0.0
        elif channel.is_cut_off:
            parked += _park(engine, compiling)
        for message in messages:
            if isinstance(message, Shutdown):
                return
            if kv_reports is not None:
                kv_reports.receive(message)
            if isinstance(message, SetPaused):
                is_paused = message.paused
            else:
                handle(message, engine, compiling)
        for request in compiling.take():
            engine.submit(request)
        compiling.turn(engine.has_requests)
        if is_paused:
            continue
        outputs = engine.step()
        for switch in engine.take_switches():
            _log.info(str(switch))
        now = time.monotonic()
        if now >= stats_due_s or not engine.is_busy:
            outputs = msgspec.structs.replace(outputs, stats=engine.stats())
            stats_due_s = now + STATS_EVERY_S
        if outputs != StepOutputs((), (), ()):
            channel.send(outputs)
        if kv_reports is not None:
            kv_reports.publish()


def _park(engine: Engine, compiling: Compiling) -> list[Request]:
    """Remove and return all requests: nobody receives their tokens until another API process submits them again."""
    return [*compiling.take_all(), *engine.export_all()]


def handle(message: ToEngine, engine: Engine, compiling: Compiling) -> None:
    """Pass a message other than ``Shutdown`` and ``SetPaused`` to the engine."""
    if isinstance(message, Abort | ExportRequest):
        for request in compiling.take(message.request_id):
            engine.submit(request)
    match message:
        case Submit(request):
            if not compiling.holds(request):
                engine.submit(request)
        case Abort(request_id):
            engine.abort(request_id)
        case ExportRequest(request_id):
            engine.export_with_kv(request_id)
        case ImportKv():
            engine.import_kv(message)
        case RegisterAdapters(adapters):
            engine.register_adapters(adapters)
        case PinAdapters(digests):
            engine.pin_adapters(digests)
        case DropAdapter(digest):
            engine.drop_adapter(digest)


def main() -> None:
    """Build the replica, send ``EngineReady``, and serve."""
    # The API process decides when to stop; service managers signal every process of a service.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    freeze_imports()
    line = sys.stdin.buffer.readline()
    if not line:  # The process was started early and is not needed.
        return
    given = msgspec.json.decode(line, type=EngineInput)
    settings = msgspec.json.decode(given.settings, type=Settings)
    configure_logs(settings.server.log_level, as_json=settings.server.log_json)
    channel = Channel(sys.argv[1], given.channel_key)
    threading.Thread(target=_watch_input, args=(channel,), daemon=True).start()
    channel.send(Heartbeat(0.0))  # The client is connected, and loading may take long.
    try:
        replica = build_replica(
            settings,
            lambda stage, done, total: channel.send(Progress(stage, done, total)),
            channel.wake,
            before_pool=channel.wait_for_pool if given.waits_for_pool else lambda: None,
        )
        kv_reports = None
        if replica.kv_events is not None:
            kv_reports = KvReports(replica.kv_events, settings.kv_events, given.replica)
    except (ValueError, OSError, ExecutorError) as error:
        channel.send(Fatal(str(error)))
        channel.close()
        sys.exit(1)
    channel.send(_engine_ready(replica))
    # This way gauges exist before the first request.
    channel.send(StepOutputs((), (), (), stats=replica.engine.stats()))
    try:
        with frozen_gc():
            compiling = Compiling(replica.grammars, channel.wake)
            serve(channel, replica.engine, compiling, kv_reports, lambda: _engine_ready(replica))
    except MessagesLost as error:
        _log.error("engine ends: messages of the API process were lost", reason=str(error))
        sys.exit(1)
    finally:
        replica.engine.close()
        if kv_reports is not None:
            kv_reports.close()
        channel.close()


def _engine_ready(replica: Replica) -> EngineReady:
    sizes = replica.sizes
    return EngineReady(
        version=__version__,
        geometry=sizes.geometry,
        total_blocks=sizes.total_blocks,
        block_size=sizes.block_size,
        block_bytes=sizes.block_bytes,
        max_model_len=sizes.max_model_len,
        max_adapter_blocks=sizes.max_adapter_blocks,
        kernels=sizes.kernels,
        boot_id=boot_id(),
        at_s=time.monotonic(),
        notes=replica.notes,
        weights=sizes.weights,
        base=sizes.base,
        local_geometry=sizes.local_geometry,
    )


def _watch_input(channel: Channel) -> None:
    """End the process when standard input ends with the process at its other end; offer the channels that it names."""
    rest = b""
    while data := os.read(sys.stdin.fileno(), 4096):  # The buffered reader's lock would be held at exit.
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            channel.offer(msgspec.json.decode(line, type=Reattach))
    os._exit(0)
