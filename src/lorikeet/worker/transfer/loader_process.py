"""The body of a loader process: reads adapters from their files, checks them and packs them into host blocks.

It is a process of its own so that reading takes neither the interpreter nor, at its low priority, much of the cores
from the steps, and so that a file that breaks under its reader ends nothing else.

Started as ``python -m lorikeet.worker.transfer.loader_process FD``, an inherited connection. Over that come a
:class:`LoaderSetup`, the file descriptor of the host arena, and then reads. The process ends when the connection does,
which is when whoever started it has ended, however that was.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from queue import SimpleQueue

import msgspec
import numpy as np

from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.numbers import KEPT_AS
from lorikeet.adapters.weights import ModuleWeights, load_weights
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import BlockId
from lorikeet.core.process_tuning import NICE
from lorikeet.memory.host_arena import HostArena
from lorikeet.memory.packing import packing_for, write_pieces
from lorikeet.worker.transfer.finished import TransferCounts, TransferWork


class LoaderSetup(msgspec.Struct, frozen=True):
    """To the loader, first of all.

    Attributes:
        geometry: sizes of the rank's share of the model.
        rank, size: which share of how many.
        elements: of a block.
        dtype: of an element, as in ``adapters.numbers.KEPT_AS``.
        readers: adapters that are read at once.
        told_blocks: blocks of which it tells at once, unless it has to wait for room before.
    """

    geometry: ModelGeometry
    rank: int
    size: int
    elements: int
    dtype: str
    readers: int
    told_blocks: int


class ReadAdapter(msgspec.Struct, frozen=True, tag=True):
    """To the loader: read an adapter.

    Attributes:
        transfer_id: which transfer it is for.
        reader: who reads it; each reads one after the other.
        adapter: what is read.
        blocks: where to, in packing order. A block that occurs again is written when the earlier content was taken.
        room: how many blocks may be filled before any is taken.
    """

    transfer_id: int
    reader: int
    adapter: AdapterRef
    blocks: tuple[BlockId, ...]
    room: int


class BlocksFreed(msgspec.Struct, frozen=True, tag=True):
    """To the loader: so many more blocks of what ``reader`` reads have been copied and can be used again."""

    reader: int
    blocks: int


class LoaderReady(msgspec.Struct, frozen=True, tag=True):
    """From the loader: it is ready to read."""


class BlocksFilled(msgspec.Struct, frozen=True, tag=True):
    """From the loader: the first ``blocks`` blocks of a transfer are complete."""

    transfer_id: int
    blocks: int


class ReadEnded(msgspec.Struct, frozen=True, tag=True):
    """From the loader: it has read an adapter to the end, or has given up.

    Attributes:
        transfer_id: which transfer it was for.
        error: what was wrong, None if nothing.
        trace: where in the code, if nobody expected that.
        counts: (work, thread, how often), of this and whatever else was done meanwhile.
    """

    transfer_id: int
    error: str | None
    trace: str
    counts: tuple[tuple[TransferWork, int, int], ...]


ToLoader = ReadAdapter | BlocksFreed
FromLoader = LoaderReady | BlocksFilled | ReadEnded
FROM_LOADER = msgspec.msgpack.Decoder(FromLoader)
_TO_LOADER = msgspec.msgpack.Decoder(ToLoader)


class _Loader:
    """Readers and what they share."""

    def __init__(self, connection: Connection, arena_fd: int, setup: LoaderSetup) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._setup = setup
        kept_as = np.dtype(KEPT_AS[setup.dtype])
        self._blocks = HostArena.attached(arena_fd, setup.elements * kept_as.itemsize).bytes.view(kept_as)
        self._counts = TransferCounts()
        self._reads: list[SimpleQueue[ReadAdapter]] = [SimpleQueue() for _ in range(setup.readers)]
        self._room = [threading.Semaphore(0) for _ in range(setup.readers)]
        for reader in range(setup.readers):
            threading.Thread(target=self._read_all, args=(reader,), name=f"reader-{reader}", daemon=True).start()
        self._send(LoaderReady())

    def begin(self, read: ReadAdapter) -> None:
        self._room[read.reader] = threading.Semaphore(read.room)  # here, before any word that some was taken
        self._reads[read.reader].put(read)

    def give_room(self, reader: int, blocks: int) -> None:
        self._room[reader].release(blocks)

    def _send(self, message: FromLoader) -> None:
        with self._sending:
            try:
                self._connection.send_bytes(msgspec.msgpack.encode(message))
            except OSError:  # nobody is left to hear it
                os._exit(0)

    def _read_all(self, reader: int) -> None:
        while True:
            read = self._reads[reader].get()
            error, trace = None, ""
            try:
                self._read(read)
            except Exception as problem:  # whatever is wrong with one adapter must not end the loader
                error = str(problem) or type(problem).__name__
                trace = "" if isinstance(problem, AdapterError) else traceback.format_exc()
            counts = tuple((work, thread, count) for (work, thread), count in self._counts.take().items())
            self._send(ReadEnded(read.transfer_id, error, trace, counts))

    def _read(self, read: ReadAdapter) -> None:
        setup, ref, room = self._setup, read.adapter, self._room[read.reader]
        packing = packing_for(ref, setup.geometry, setup.elements, len(read.blocks))
        weights = load_weights(ref, setup.geometry, setup.dtype, setup.rank, setup.size)
        told = 0
        for filled in write_pieces(self._counted(weights), packing, read.blocks, self._blocks):
            has_room = room.acquire(blocking=False)
            if filled - told >= setup.told_blocks or not has_room:
                self._send(BlocksFilled(read.transfer_id, filled))
                told = filled
            if not has_room:
                room.acquire()
        self._counts.note(TransferWork.PACK, packing.blocks)

    def _counted(self, weights: Iterator[ModuleWeights]) -> Iterator[ModuleWeights]:
        for module in weights:
            self._counts.note(TransferWork.READ)
            yield module


def main() -> None:
    """Do what the connection says until it ends."""
    # Whoever started this process decides when it ends; service managers signal every process of a service.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICE)
    connection = Connection(int(sys.argv[1]))
    try:
        setup = msgspec.msgpack.decode(connection.recv_bytes(), type=LoaderSetup)
        loader = _Loader(connection, recv_handle(connection), setup)
        while True:
            match _TO_LOADER.decode(connection.recv_bytes()):
                case ReadAdapter() as read:
                    loader.begin(read)
                case BlocksFreed(reader, blocks):
                    loader.give_room(reader, blocks)
    except (EOFError, ConnectionError):
        os._exit(0)  # readers may be anywhere, and have nothing to put in order


if __name__ == "__main__":
    main()
