"""A rank's loader process, seen from the rank."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import NamedTuple

import msgspec

from lorikeet.engine.executor import ExecutorError
from lorikeet.engine.loader_process import FROM_LOADER, Filled, FromLoader, Read, ReadEnded, Setup, Taken, ToLoader, Up
from lorikeet.memory.host_arena import HostArena

_LOG = logging.getLogger(__name__)

STARTS_IN_A_ROW = 3
"""So often a loader is started that then ends without having read anything to the end."""

REST_S = 10.0
"""After that nothing is read for so long, lest a file that breaks every loader keeps the cores busy with starts."""


class LoaderError(RuntimeError):
    """There is no loader process; the message says why."""


class LoaderProcess(NamedTuple):
    """A process that has been started and will read once it is set up; it ends when the connection is closed."""

    process: "subprocess.Popen[bytes]"
    connection: Connection

    def end(self) -> int:
        """End it and return its exit status."""
        self.process.kill()
        return self.process.wait()


def start_loader_process() -> LoaderProcess:
    """Start a loader process; that takes a fraction of a second, in which the caller may go on.

    Raises:
        ExecutorError: the system refuses.
    """
    ours, theirs = Pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "lorikeet.engine.loader_process", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # or numpy brings a thread for every core
        )
    except OSError as error:
        ours.close()
        raise ExecutorError(f"the loader process cannot be started: {error}") from error
    finally:
        theirs.close()
    return LoaderProcess(process, ours)


class Loader:
    """Sets a loader process up, sends it reads, and starts another when it ends unasked.

    What was being read then is reported as failed, once the process is gone and writes to no block any more.

    Args:
        process: the first one; owned by this object from now on.
        arena: where it writes.
        setup: what it must know.
        on_filled: called, on a thread of this object, when blocks have been filled.
        on_ended: called there when a read has ended, well or not.
    """

    def __init__(
        self,
        process: LoaderProcess,
        arena: HostArena,
        setup: Setup,
        on_filled: Callable[[Filled], None],
        on_ended: Callable[[ReadEnded], None],
    ) -> None:
        self._arena = arena
        self._setup = setup
        self._on_filled = on_filled
        self._on_ended = on_ended
        self._changed = threading.Condition()
        self._running: LoaderProcess | None = None
        self._listener: threading.Thread | None = None
        self._reading: set[int] = set()
        self._is_up = False
        self._is_closing = False
        self._ended_in_a_row = 0
        self._reason = ""
        self._rests_until_s = float("-inf")
        with self._changed:
            self._set_up(process)

    @property
    def process_id(self) -> int | None:
        """Process id of the loader, None while there is none."""
        running = self._running
        return None if running is None else running.process.pid

    def wait_until_ready(self) -> None:
        """Block until the process can read.

        Raises:
            ExecutorError: it could not be started.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_up or self._running is None)
            if not self._is_up:
                raise ExecutorError(self._reason)

    def read(self, read: Read) -> None:
        """Begin to read an adapter.

        Raises:
            LoaderError: there is no loader, and it is too early for another.
        """
        with self._changed:
            if self._running is None and not self._is_closing and time.monotonic() >= self._rests_until_s:
                self._start()
            if self._running is None:
                raise LoaderError(self._reason)
            self._reading.add(read.transfer_id)
            _send(self._running, read)

    def give_room(self, reader: int, blocks: int) -> None:
        """Say that so many blocks of what ``reader`` reads can be filled again."""
        with self._changed:
            if self._running is not None:
                _send(self._running, Taken(reader, blocks))

    def close(self) -> None:
        """End the process; what it was reading is not reported."""
        with self._changed:
            self._is_closing = True
            if self._running is not None:
                self._running.end()
        if self._listener is not None:
            self._listener.join()

    def _start(self) -> None:
        """Start a process. Under the lock."""
        try:
            self._set_up(start_loader_process())
        except ExecutorError as error:
            self._rest(str(error))

    def _set_up(self, process: LoaderProcess) -> None:
        """Tell a process what it must know, and listen to it from now on. Under the lock."""
        self._running = process
        _send(process, self._setup)
        with suppress(OSError):  # as in _send
            send_handle(process.connection, self._arena.fd, process.process.pid)
        self._listener = threading.Thread(target=self._listen, args=(process,), name="loader-listener", daemon=True)
        self._listener.start()

    def _listen(self, process: LoaderProcess) -> None:
        while (message := _receive(process)) is not None:
            match message:
                case Up():
                    with self._changed:
                        self._is_up = True
                        self._changed.notify_all()
                case Filled():
                    self._on_filled(message)
                case ReadEnded():
                    with self._changed:
                        self._reading.discard(message.transfer_id)
                        self._ended_in_a_row = 0
                    self._on_ended(message)
        self._replace(process)

    def _replace(self, process: LoaderProcess) -> None:
        """Start another process in place of one that has ended, and report what that one was reading."""
        status = process.end()
        reason = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        reason = f"the loader process {reason}"
        with self._changed:
            process.connection.close()
            self._running = None
            self._is_up = False
            if self._is_closing:
                return
            lost, self._reading = sorted(self._reading), set()
            self._ended_in_a_row += 1
            if self._ended_in_a_row < STARTS_IN_A_ROW:
                self._start()
            else:
                self._rest(f"{reason}, {self._ended_in_a_row} times in a row")
            self._changed.notify_all()
        _LOG.error("%s while it read %d adapters", reason, len(lost))
        for transfer_id in lost:
            self._on_ended(ReadEnded(transfer_id, reason, "", ()))

    def _rest(self, reason: str) -> None:
        self._reason = reason
        self._rests_until_s = time.monotonic() + REST_S


def _send(process: LoaderProcess, message: ToLoader | Setup) -> None:
    with suppress(OSError):  # the process has ended, and its listener is about to find out
        process.connection.send_bytes(msgspec.msgpack.encode(message))


def _receive(process: LoaderProcess) -> FromLoader | None:
    """Return the next message, None if the process has ended."""
    try:
        return FROM_LOADER.decode(process.connection.recv_bytes())
    except (EOFError, OSError):
        return None
