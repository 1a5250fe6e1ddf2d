"""The API process's end of the channel to one engine process, from its start to its end."""

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from itertools import count
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from lorikeet.core.messages import Fatal, FromEngine, Hello, Progress, StepOutputs, Submit, ToEngine
from lorikeet.engine.clocks import RemoteClock, boot_id

LAST_WORDS_S = 0.2
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
        hello: what it said when it was ready.
    """

    hello: Hello

    def __init__(self, process: EngineProcess, socket: zmq.asyncio.Socket) -> None:
        self.process = process
        self._socket = socket
        self._encoder = msgspec.msgpack.Encoder()
        self._messages = self._receive()
        self._clock: RemoteClock | None = None

    def greet(self, hello: Hello) -> None:
        """The engine is ready."""
        self.hello = hello
        if hello.boot_id != boot_id():
            self._clock = RemoteClock(hello.at_s, time.monotonic())

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
                    await asyncio.wait({receiving}, timeout=LAST_WORDS_S)
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
            elif isinstance(message, Hello):
                connection.greet(message)
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
