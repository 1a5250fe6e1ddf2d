"""The loader process: reads adapters from their files, checks them and packs them into host blocks.

The reader is a separate process for three reasons. Reading does not hold the engine's interpreter lock. A process of
low priority takes little of the cores. If a file changes while it is read, only this process crashes.

Started as ``python -m lorikeet.worker.transfer.loader_process FD``, where FD is an inherited connection. The process
receives a :class:`LoaderSetup`, the file descriptor of the host arena, and then :class:`ReadAdapter` messages. It ends
when the connection is closed, which also happens when its parent is killed.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from queue import SimpleQueue

import msgspec
import numpy as np

from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.numbers import KEPT_AS
from lorikeet.adapters.weights import ModuleWeights, load_extras, load_weights
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import BlockId
from lorikeet.core.messages import HEARTBEAT_EVERY_S
from lorikeet.core.process_tuning import NICE
from lorikeet.memory.host_arena import HostArena
from lorikeet.memory.packing import packing_for, write_pieces
from lorikeet.worker.transfer.finished import TransferCounts, TransferWork


class LoaderSetup(msgspec.Struct, frozen=True):
    """The first message to the loader process.

    Attributes:
        geometry: sizes of the rank's share of the model.
        whole: sizes of the model.
        rank, size: the tensor-parallel rank, and the number of ranks.
        elements: elements of a block.
        dtype: dtype of an element, a key of ``adapters.numbers.KEPT_AS``.
        readers: number of reader threads.
        report_blocks: number of blocks after which a reader reports progress. A reader also reports when it must wait
            for free blocks.
    """

    geometry: ModelGeometry
    whole: ModelGeometry
    rank: int
    size: int
    elements: int
    dtype: str
    readers: int
    report_blocks: int


class ReadAdapter(msgspec.Struct, frozen=True, tag=True):
    """A message to the loader process: read an adapter.

    Attributes:
        transfer_id: id of the transfer.
        reader: number of the reader, which reads one adapter at a time.
        adapter: the adapter.
        blocks: target blocks, in packing order. Staging blocks occur several times, since they are reused once they
            have been copied.
        free_blocks: number of blocks that may be filled before any block is copied.
    """

    transfer_id: int
    reader: int
    adapter: AdapterRef
    blocks: tuple[BlockId, ...]
    free_blocks: int


class BlocksFreed(msgspec.Struct, frozen=True, tag=True):
    """A message to the loader process: ``blocks`` more blocks of ``reader`` were copied and can be filled again."""

    reader: int
    blocks: int


class LoaderReady(msgspec.Struct, frozen=True, tag=True):
    """A message from a loader process that is ready to read."""


class LoaderAlive(msgspec.Struct, frozen=True, tag=True):
    """A heartbeat from the loader process."""


class BlocksFilled(msgspec.Struct, frozen=True, tag=True):
    """A message from the loader process: the first ``blocks`` blocks of a transfer have been filled."""

    transfer_id: int
    blocks: int


class ReadEnded(msgspec.Struct, frozen=True, tag=True):
    """A message from the loader process: a read has ended or failed.

    Attributes:
        transfer_id: id of the transfer.
        error: why the read failed; None if it succeeded.
        trace: traceback of an unexpected error; otherwise empty.
        counts: (work, thread, count) of all readers since the last message of this kind.
    """

    transfer_id: int
    error: str | None
    trace: str
    counts: tuple[tuple[TransferWork, int, int], ...]


ToLoader = ReadAdapter | BlocksFreed
FromLoader = LoaderReady | LoaderAlive | BlocksFilled | ReadEnded
FROM_LOADER = msgspec.msgpack.Decoder(FromLoader)
_TO_LOADER = msgspec.msgpack.Decoder(ToLoader)


class _Loader:
    """The reader threads and their shared state."""

    def __init__(self, connection: Connection, arena_fd: int, setup: LoaderSetup) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._setup = setup
        kept_as = np.dtype(KEPT_AS[setup.dtype])
        self._blocks = HostArena.attached(arena_fd, setup.elements * kept_as.itemsize).bytes.view(kept_as)
        self._counts = TransferCounts()
        self._reads: list[SimpleQueue[ReadAdapter]] = [SimpleQueue() for _ in range(setup.readers)]
        self._free = [threading.Semaphore(0) for _ in range(setup.readers)]
        for reader in range(setup.readers):
            threading.Thread(target=self._read_all, args=(reader,), name=f"reader-{reader}", daemon=True).start()
        self._send(LoaderReady())
        threading.Thread(target=self._send_heartbeats, name="heartbeats", daemon=True).start()

    def begin(self, read: ReadAdapter) -> None:
        # The count is set here, before any BlocksFreed message arrives.
        self._free[read.reader] = threading.Semaphore(read.free_blocks)
        self._reads[read.reader].put(read)

    def free_blocks(self, reader: int, blocks: int) -> None:
        self._free[reader].release(blocks)

    def _send(self, message: FromLoader) -> None:
        with self._sending:
            try:
                self._connection.send_bytes(msgspec.msgpack.encode(message))
            except OSError:  # The rank has ended.
                os._exit(0)

    def _send_heartbeats(self) -> None:
        while True:
            time.sleep(HEARTBEAT_EVERY_S)
            self._send(LoaderAlive())

    def _read_all(self, reader: int) -> None:
        while True:
            read = self._reads[reader].get()
            error = None
            trace = ""
            try:
                self._read(read)
            except Exception as problem:  # An error in one adapter must not end the loader process.
                error = str(problem) or type(problem).__name__
                trace = "" if isinstance(problem, AdapterError) else traceback.format_exc()
            counts = tuple((work, thread, count) for (work, thread), count in self._counts.take().items())
            self._send(ReadEnded(read.transfer_id, error, trace, counts))

    def _read(self, read: ReadAdapter) -> None:
        setup = self._setup
        ref = read.adapter
        free = self._free[read.reader]
        packing = packing_for(ref, setup.geometry, setup.elements, len(read.blocks))
        weights = load_weights(ref, setup.geometry, setup.dtype, setup.rank, setup.size, setup.whole)
        reported = 0
        extras = load_extras(ref, setup.whole, setup.dtype)
        for filled in write_pieces(self._counted(weights), packing, read.blocks, self._blocks, extras):
            has_free = free.acquire(blocking=False)
            if filled - reported >= setup.report_blocks or not has_free:
                self._send(BlocksFilled(read.transfer_id, filled))
                reported = filled
            if not has_free:
                free.acquire()
        self._counts.note(TransferWork.PACK, packing.blocks)

    def _counted(self, weights: Iterator[ModuleWeights]) -> Iterator[ModuleWeights]:
        for module in weights:
            self._counts.note(TransferWork.READ)
            yield module


def main() -> None:
    """Read adapters until the connection is closed."""
    # The rank decides when this process ends; service managers signal every process of a service.
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
                    loader.free_blocks(reader, blocks)
    except (EOFError, ConnectionError):
        os._exit(0)  # Readers may still be running, but have nothing to clean up.


if __name__ == "__main__":
    main()
