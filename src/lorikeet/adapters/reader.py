"""Reads adapter folders in reader processes, so that no content can block the calling process or use up its memory."""

import atexit
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path

import msgspec

from lorikeet.adapters.checkpoint import DescribeOptions
from lorikeet.adapters.description import AdapterDescription
from lorikeet.adapters.errors import AdapterError, AdapterStoreError
from lorikeet.adapters.reader_process import (
    FROM_READER,
    OUT_OF_MEMORY,
    Alive,
    Answer,
    Described,
    DescribeFolder,
    ListShards,
    Refused,
    Shards,
    Stage,
    ToReader,
    WriteFailed,
)

_MEMORY_BYTES = 384 * 2**20
"""Address space of a reader process besides its own code."""
_CPU_S = 2.0
"""CPU time for everything but the weights."""
_MAX_IDLE = 2
_SILENCE_S = 60.0
"""A reader process that reports nothing for so long is killed: its file system may not answer."""


def describe(folder: Path, options: DescribeOptions | None = None) -> AdapterDescription:
    """Read a PEFT LoRA folder, and check everything in it.

    Thread-safe.

    Raises:
        AdapterError: the adapter is not valid, does not fit, or takes too much time or memory to read.
        AdapterStoreError: merged weights cannot be written, or no reader process can be started.
    """
    answer = _ask(DescribeFolder(str(folder), options or DescribeOptions()))
    assert isinstance(answer, Described)
    return answer.description


def list_shards(folder: Path) -> list[str]:
    """Return the names of the files that the index of a sharded adapter lists. Errors are those of :func:`describe`."""
    answer = _ask(ListShards(str(folder)))
    assert isinstance(answer, Shards)
    return answer.names


class _Process:
    """A reader process, which answers one request at a time.

    Raises:
        AdapterStoreError: the process cannot be started.
    """

    def __init__(self) -> None:
        ours, theirs = Pipe()
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        module = "lorikeet.adapters.reader_process"
        fd = theirs.fileno()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(fd), str(_MEMORY_BYTES), str(_CPU_S)],
                stdin=subprocess.DEVNULL,
                pass_fds=(fd,),
                env={**os.environ, **threads},
            )
        except OSError as error:
            ours.close()
            raise AdapterStoreError(f"the process that reads adapters cannot be started: {error}") from error
        finally:
            theirs.close()
        self._connection = ours

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: ToReader) -> Answer:
        """Send a request, and return the process's answer.

        Raises:
            AdapterError: the process ended or took too long. It cannot be used again.
        """
        reading = "the adapter"
        with suppress(EOFError, OSError):
            self._connection.send_bytes(msgspec.msgpack.encode(request))
            while self._connection.poll(_SILENCE_S):
                message = FROM_READER.decode(self._connection.recv_bytes())
                if isinstance(message, Stage):
                    reading = message.name
                elif not isinstance(message, Alive):
                    return message
            self.end()
            raise AdapterError(f"reading {reading} has made no progress for {_SILENCE_S:g} s")
        status = self._process.wait()
        if status == -signal.SIGPROF:
            raise AdapterError(f"reading {reading} takes more than {_CPU_S:g} s of CPU time")
        if status == OUT_OF_MEMORY:
            raise AdapterError(f"reading {reading} takes more than {_MEMORY_BYTES >> 20} MiB of memory")
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        raise AdapterError(f"reading {reading} has failed: the process that read it {how}")

    def end(self) -> None:
        """Kill the process, and wait for its end."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


_idle: list[_Process] = []
"""For the next callers, at most ``_MAX_IDLE``. Several callers at once have a process each."""
_guard = threading.Lock()


def _ask(request: ToReader) -> Answer:
    with _guard:
        process = _idle.pop() if _idle else None
    if process is not None and not process.is_alive:
        process.end()
        process = None
    if process is None:
        process = _Process()
    try:
        answer = process.ask(request)
    except BaseException:
        process.end()
        raise
    with _guard:
        if len(_idle) < _MAX_IDLE:
            _idle.append(process)
            process = None
    if process is not None:
        process.end()
    match answer:
        case Refused(error):
            raise AdapterError(error)
        case WriteFailed(error):
            raise AdapterStoreError(f"the adapter store cannot be written: {error}")
    return answer


def _end_idle() -> None:
    with _guard:
        while _idle:
            _idle.pop().end()


atexit.register(_end_idle)
