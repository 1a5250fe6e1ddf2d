"""Engines that say hello and forget adapters, for what a head does beside serving."""

import asyncio
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from lorikeet.core.events import AdapterEvicted
from lorikeet.core.messages import (
    DropAdapter,
    EngineInput,
    EngineReady,
    FromEngine,
    MessageCodec,
    Shutdown,
    StepOutputs,
    ToEngine,
)
from tests.adapters.builders import geometry

HELLO = EngineReady("fake", geometry(), 100, 16, 1024, 512, 50, "none", "boot", 0.0)


class FakeEngine:
    """An engine process that computes nothing; an :class:`~lorikeet.client.supervisor.EngineProcess`.

    Attributes:
        heard: messages so far.
    """

    pid = 1

    def __init__(self, address: str, key: str = "") -> None:
        self.heard: list[ToEngine] = []
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._codec = MessageCodec[FromEngine, ToEngine](ToEngine)
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        if key:
            self._socket.curve_serverkey = key.encode()
            self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.connect(address)
        self._say(HELLO)
        self._listening = asyncio.ensure_future(self._listen())

    def kill(self) -> None:
        self._end(-9)

    async def wait(self) -> int | None:
        await self._ended.wait()
        return self.returncode

    def heard_of(self, kind: type[Any]) -> list[Any]:
        """Return the messages of a kind."""
        return [message for message in self.heard if isinstance(message, kind)]

    def _say(self, message: FromEngine) -> None:
        self._socket.send(self._codec.encode(message))

    def _end(self, code: int) -> None:
        if self.returncode is None:
            self.returncode = code
            self._listening.cancel()
            self._socket.close(linger=0)
            self._ended.set()

    async def _listen(self) -> None:
        while True:
            message = self._codec.decode(await self._socket.recv())
            assert message is not None
            self.heard.append(message)
            if isinstance(message, DropAdapter):
                self._say(StepOutputs((), (), (AdapterEvicted(message.digest, 0.0, 10, dropped=True),)))
            elif isinstance(message, Shutdown):
                self._end(0)
                return


class FakeHost:
    """A machine with such engines; an :class:`~lorikeet.client.supervisor.EngineHost`.

    Attributes:
        engines: started so far.
        may_start: the next start waits for this.
        error: why nothing can be started, None if it can.
        is_closed: nobody wants it any longer.
    """

    address = "nowhere"

    def __init__(self) -> None:
        self.engines: list[FakeEngine] = []
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.error: OSError | None = None
        self.is_closed = False

    def bind_address(self) -> str:
        return "tcp://127.0.0.1:*"

    async def start(self, address: str, settings: bytes) -> FakeEngine:
        await self.may_start.wait()
        if self.error is not None:
            raise self.error
        self.engines.append(FakeEngine(address, msgspec.json.decode(settings, type=EngineInput).channel_key))
        return self.engines[-1]

    def close(self) -> None:
        self.is_closed = True
