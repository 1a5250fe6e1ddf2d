"""The reader process, which reads users' adapter folders under limits of memory and time.

Started by ``adapters.reader`` as ``python -m lorikeet.adapters.reader_process FD MEMORY_BYTES CPU_S``, where FD is an
inherited connection. The process answers requests in order, and ends when the connection is closed.
"""

import os
import resource
import signal
import sys
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from lorikeet.adapters.checkpoint import DescribeOptions, describe_folder, shard_names
from lorikeet.adapters.description import WEIGHTS_FILE, AdapterDescription
from lorikeet.adapters.errors import AdapterError
from lorikeet.core.process_tuning import NICE

OUT_OF_MEMORY = 3
"""Exit status after a request that needs too much memory."""

_ALIVE_EVERY_S = 1.0
_MAX_MESSAGE_CHARS = 1000


class DescribeFolder(msgspec.Struct, frozen=True, tag=True):
    """A message to the reader: describe an adapter's folder."""

    folder: str
    options: DescribeOptions


class ListShards(msgspec.Struct, frozen=True, tag=True):
    """A message to the reader: list the shards in the index of a folder."""

    folder: str


class Alive(msgspec.Struct, frozen=True, tag=True):
    """A message from the reader: it is ready, or has read more weights."""


class Stage(msgspec.Struct, frozen=True, tag=True):
    """A message from the reader: the name of the next part to read."""

    name: str


class Described(msgspec.Struct, frozen=True, tag=True):
    """The reader's answer to ``DescribeFolder``."""

    description: AdapterDescription


class Shards(msgspec.Struct, frozen=True, tag=True):
    """The reader's answer to ``ListShards``."""

    names: list[str]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A message from the reader: the adapter is not valid."""

    error: str


class WriteFailed(msgspec.Struct, frozen=True, tag=True):
    """A message from the reader: the weights could not be written."""

    error: str


ToReader = DescribeFolder | ListShards
Answer = Described | Shards | Refused | WriteFailed
FROM_READER: msgspec.msgpack.Decoder[Alive | Stage | Answer] = msgspec.msgpack.Decoder(Alive | Stage | Answer)
_TO_READER: msgspec.msgpack.Decoder[ToReader] = msgspec.msgpack.Decoder(ToReader)


class _Reader:
    def __init__(self, connection: Connection, cpu_s: float) -> None:
        self._connection = connection
        self._cpu_s = cpu_s
        self._sent_s = time.monotonic()
        self._left_s = 0.0

    def answer(self, request: ToReader) -> None:
        # The limit's signal ends the process, even during the match of a pattern.
        self._left_s = 0.0
        signal.setitimer(signal.ITIMER_PROF, self._cpu_s)
        reply = self._reply(request)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        self.send(reply)

    def send(self, message: Alive | Stage | Answer) -> None:
        self._sent_s = time.monotonic()
        self._connection.send_bytes(msgspec.msgpack.encode(message))

    def _reply(self, request: ToReader) -> Answer:
        try:
            folder = Path(request.folder)
            if isinstance(request, ListShards):
                return Shards(shard_names(folder))
            return Described(describe_folder(folder, request.options, self._on_stage, self._on_chunk))
        except AdapterError as error:
            return Refused(_clean(str(error)))
        except ConnectionError:
            raise
        except OSError as error:
            return WriteFailed(_clean(str(error)))

    def _on_stage(self, name: str) -> None:
        if name == WEIGHTS_FILE:  # The time is in proportion to the size, which has a separate limit.
            self._left_s, _ = signal.setitimer(signal.ITIMER_PROF, 0.0)
        elif self._left_s:
            signal.setitimer(signal.ITIMER_PROF, self._left_s)
            self._left_s = 0.0
        self.send(Stage(name))

    def _on_chunk(self) -> None:
        if time.monotonic() - self._sent_s > _ALIVE_EVERY_S:
            self.send(Alive())


def _clean(text: str) -> str:
    """Return a text shortened and made encodable, since it may quote names of tensors, keys or patterns."""
    return text[:_MAX_MESSAGE_CHARS].encode(errors="backslashreplace").decode()


def _limit_memory(growth_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit_bytes = pages * resource.getpagesize() + growth_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Answer requests until the connection is closed."""
    # The parent decides when this process ends; service managers signal every process of a service.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICE)
    warnings.simplefilter("ignore")  # This limits the patterns.
    connection = Connection(int(sys.argv[1]))
    if sys.platform == "linux":
        _limit_memory(int(sys.argv[2]))
    reader = _Reader(connection, float(sys.argv[3]))
    try:
        reader.send(Alive())
        while True:
            reader.answer(_TO_READER.decode(connection.recv_bytes()))
    except (EOFError, ConnectionError):
        return
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
