"""Publishes events of KV over ZeroMQ like vLLM: new batches on a PUB socket, and missed batches on a ROUTER socket.

A message has three frames: topic, sequence number (8 bytes, big endian), batch. A batch is a msgpack array of the time,
the events as maps, and the number of the replica. A subscriber that missed batches sends the first missing number to
the replay socket. The answer is ``number, batch`` for each missing batch, and finally the number -1 with an empty
batch.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from queue import Queue

import msgspec
import structlog
import zmq

from lorikeet.config import ConfigError, KvEventSettings
from lorikeet.memory.kv_events import KvChange, KvEvent

_END = (-1).to_bytes(8, "big", signed=True)


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The events of one turn of the engine's loop.

    Attributes:
        ts: Unix time in seconds.
        events: the events, oldest first.
        data_parallel_rank: number of the replica.
    """

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int


class KvPublisher:
    """Publishes batches, and keeps the latest batches for subscribers that missed some.

    A thread makes the events, encodes and sends them, so that an engine's step waits for none of this.

    Args:
        settings: addresses, topic and sizes.
        block_size: tokens in a block.
        rank: number of the replica, which is added to the ports.

    Raises:
        ConfigError: an address is not valid, or in use.
    """

    def __init__(self, settings: KvEventSettings, block_size: int, rank: int = 0) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._block_size = block_size
        self._rank = rank
        self._changes = Queue[tuple[float, Sequence[KvChange]] | None]()
        self._topic = settings.topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=settings.buffer_steps)
        self._lock = threading.Lock()
        self._socket = context.socket(zmq.PUB)
        self._socket.set_hwm(settings.hwm)
        self._replay: zmq.Socket[bytes] | None = None
        _open(self._socket, settings.endpoint, rank)
        if settings.replay_endpoint:
            self._replay = context.socket(zmq.ROUTER)
            _open(self._replay, settings.replay_endpoint, rank)
            threading.Thread(target=self._serve_replays, name="kv-replay", daemon=True).start()
        self._thread = threading.Thread(target=self._send_batches, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, changes: Sequence[KvChange]) -> None:
        """Publish changes as one batch, soon. A subscriber that does not read loses the oldest batches."""
        if changes:
            self._changes.put((time.time(), changes))

    def flush(self) -> None:
        """Wait until all changes are published."""
        self._changes.join()

    def close(self) -> None:
        """Publish what is left, and close the sockets; both take at most a second."""
        self._changes.put(None)
        self._thread.join(timeout=1)

    def _send_batches(self) -> None:
        """Run the thread that makes and sends batches, the only one that uses the socket."""
        while (item := self._changes.get()) is not None:
            ts, changes = item
            events = [event for change in changes for event in change.events(self._block_size)]
            payload = self._encoder.encode(EventBatch(ts, events, self._rank))
            with self._lock:
                self._kept.append((self._number, payload))
            self._socket.send_multipart((self._topic, self._number.to_bytes(8, "big"), payload))
            self._number += 1
            self._changes.task_done()
        self._socket.close(linger=1000)

    def _serve_replays(self) -> None:
        assert self._replay is not None
        while True:
            try:
                sender, *_, first = self._replay.recv_multipart()
            except zmq.ZMQError:  # The process ends.
                return
            if len(first) != 8:
                structlog.get_logger("lorikeet").warning("a request for events of KV was not a number of 8 bytes")
                continue
            with self._lock:
                batches = [(number, batch) for number, batch in self._kept if number >= int.from_bytes(first, "big")]
            for number, batch in batches:
                self._replay.send_multipart((sender, b"", number.to_bytes(8, "big"), batch))
            self._replay.send_multipart((sender, b"", _END, b""))


def _open(socket: "zmq.Socket[bytes]", endpoint: str, rank: int) -> None:
    """Bind a socket to a local or wildcard address, or connect it to any other address, like vLLM."""
    address = _of_replica(endpoint, rank)
    is_bound = "*" in address or "::" in address or address.startswith(("ipc://", "inproc://"))
    try:
        (socket.bind if is_bound else socket.connect)(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(f"kv_events: {address}: {error.strerror}") from error


def _of_replica(endpoint: str, rank: int) -> str:
    """Return a replica's address: the replica's number is added to the port, or appended if there is no port."""
    if not rank:
        return endpoint
    before, colon, port = endpoint.rpartition(":")
    return f"{before}{colon}{int(port) + rank}" if port.isdecimal() else f"{endpoint}_dp{rank}"
