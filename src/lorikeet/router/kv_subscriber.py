"""Reads the events of KV that a backend publishes over ZeroMQ, in vLLM's format."""

import asyncio

import zmq
import zmq.asyncio

from lorikeet.core.ids import ReplicaId
from lorikeet.http.logs import log
from lorikeet.router.kv_index import KvIndex

REPLAY_S = 5.0
"""Seconds for which a replay may pause; then the next message is awaited."""


class KvSubscriber:
    """Applies one backend's events to the index, in order.

    Missed batches are requested from the replay address: at the start all that the publisher keeps, later those of a
    gap in the numbers. A number that falls means a new publisher, whose backend has none of the known blocks.

    Args:
        index: the index.
        replica: the backend.
        events: address of the publisher's PUB socket.
        replay: address of its ROUTER socket; empty without one.
    """

    def __init__(self, index: KvIndex, replica: ReplicaId, events: str, replay: str) -> None:
        self._index = index
        self._replica = replica
        self._events = events
        self._replay = replay
        self._next = 0

    async def run(self) -> None:
        """Read events until cancelled."""
        context = zmq.asyncio.Context.instance()
        with context.socket(zmq.SUB) as socket:
            socket.linger = 0
            socket.set_hwm(0)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(self._events)
            await self._catch_up(context)
            last = -1  # A replay may run ahead of what waits at this socket.
            while True:
                _, number, batch = await socket.recv_multipart()
                at = int.from_bytes(number, "big")
                if at <= last:
                    self._index.clear(self._replica)
                    self._next = 0
                last = at
                if at > self._next:
                    await self._catch_up(context)
                if at >= self._next:
                    self._apply(at, batch)

    async def _catch_up(self, context: zmq.asyncio.Context) -> None:
        """Apply the batches from the next number on that the publisher has kept."""
        if not self._replay:
            return
        with context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self._replay)
            await socket.send_multipart([b"", self._next.to_bytes(8, "big")])
            while await socket.poll(REPLAY_S * 1000):
                *_, number, batch = await socket.recv_multipart()
                if not batch or int.from_bytes(number, "big", signed=True) < 0:
                    return
                self._apply(int.from_bytes(number, "big"), batch)
                await asyncio.sleep(0)

    def _apply(self, at: int, batch: bytes) -> None:
        if at < self._next:
            return
        self._next = at + 1
        try:
            self._index.apply(self._replica, batch)
        except ValueError as error:
            log.warning("events of KV were not understood", backend=self._replica, reason=str(error))
