"""The API process's connection to one engine process, from its start to its end."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
import zmq.asyncio

from lorikeet.core.messages import FromEngine

LAST_WORDS_S = 0.2
"""How long messages of a dead engine are waited for."""


@dataclass
class Connection:
    """One engine process and the socket to it.

    Attributes:
        process: runs the engine.
        socket: bound to the address that the engine connects to.
    """

    process: asyncio.subprocess.Process
    socket: zmq.asyncio.Socket

    async def messages(self) -> AsyncIterator[FromEngine]:
        """Yield messages until the process has ended and its last words are read."""
        decoder = msgspec.msgpack.Decoder(FromEngine)
        exited = asyncio.ensure_future(self.process.wait())
        receiving = None
        try:
            while True:
                receiving = receiving or asyncio.ensure_future(self.socket.recv())
                if exited.done():
                    await asyncio.wait({receiving}, timeout=LAST_WORDS_S)
                else:
                    await asyncio.wait({receiving, exited}, return_when=asyncio.FIRST_COMPLETED)
                if receiving.done():
                    yield decoder.decode(receiving.result())
                    receiving = None
                elif exited.done():
                    return
        finally:
            exited.cancel()
            if receiving is not None:
                receiving.cancel()
