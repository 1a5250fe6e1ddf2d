"""One host worker's place, seen from the rank: who sits there, and who comes next when that one ends."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle

import msgspec

from lorikeet.engine.executor import ExecutorError
from lorikeet.engine.host_lora.worker_process import Begin, Setup

_LOG = logging.getLogger(__name__)

STARTS_IN_A_ROW = 3
"""So often a worker is started that then ends without having been through a step."""

REST_S = 10.0
"""After that the place stays empty for so long, lest starts keep the cores busy."""


class WorkerProcess:
    """A worker process that has been started and will compute once it is set up.

    Attributes:
        process: it ends when the connection is closed.
        connection: to it.
        is_up: set once it can compute.
        is_gone: set once it has ended, and writes to no memory any more.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", connection: Connection) -> None:
        self.process = process
        self.connection = connection
        self.is_up = threading.Event()
        self.is_gone = threading.Event()

    def end(self) -> int:
        """End it and return its exit status."""
        self.process.kill()
        status = self.process.wait()
        self.is_gone.set()
        return status

    @property
    def can_compute(self) -> bool:
        """Whether it is up and has not ended."""
        return self.is_up.is_set() and not self.is_gone.is_set()

    def send(self, message: Setup | Begin) -> None:
        """Send a message; a process that has ended gets none, and whoever listens to it is about to find out."""
        with suppress(OSError):
            self.connection.send_bytes(msgspec.msgpack.encode(message))


def start_worker_process() -> WorkerProcess:
    """Start a worker process; it takes a few seconds until it can compute, in which the caller may go on.

    Raises:
        ExecutorError: the system refuses.
    """
    ours, theirs = Pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "lorikeet.engine.host_lora.worker_process", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )
    except OSError as error:
        ours.close()
        raise ExecutorError(f"a host worker cannot be started: {error}") from error
    finally:
        theirs.close()
    return WorkerProcess(process, ours)


class Seat:
    """Sets a worker process up, and starts another when it ends unasked.

    Args:
        process: the first one; owned by this object from now on.
        setup: what it must know.
        fds: file descriptors that it is given after that.

    Attributes:
        lost: how many have ended unasked.
    """

    def __init__(self, process: WorkerProcess, setup: Setup, fds: Sequence[int]) -> None:
        self.lost = 0
        self._setup = setup
        self._fds = tuple(fds)
        self._changed = threading.Condition()
        self._worker: WorkerProcess | None = None
        self._listener: threading.Thread | None = None
        self._is_closing = False
        self._ended_in_a_row = 0
        self._reason = ""
        self._rests_until_s = float("-inf")
        with self._changed:
            self._set_up(process)

    @property
    def number(self) -> int:
        """Of the worker."""
        return self._setup.number

    @property
    def worker(self) -> WorkerProcess | None:
        """Whoever can compute now, None if nobody can; in that case one is on its way or will be."""
        with self._changed:
            if self._worker is None and not self._is_closing and time.monotonic() >= self._rests_until_s:
                self._start()
            worker = self._worker
        return worker if worker is not None and worker.can_compute else None

    def wait_until_ready(self) -> None:
        """Block until somebody can compute.

        Raises:
            ExecutorError: nobody could be started.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._worker is None or self._worker.can_compute)
            if self._worker is None:
                raise ExecutorError(self._reason)

    def worked(self) -> None:
        """Note that the worker has been through a step."""
        with self._changed:
            self._ended_in_a_row = 0

    def close(self) -> None:
        """End the worker."""
        with self._changed:
            self._is_closing = True
            if self._worker is not None:
                self._worker.end()
        if self._listener is not None:
            self._listener.join()

    def _start(self) -> None:
        """Start a process. Under the lock."""
        try:
            self._set_up(start_worker_process())
        except ExecutorError as error:
            self._rest(str(error))

    def _set_up(self, worker: WorkerProcess) -> None:
        """Tell a process what it must know, and listen to it from now on. Under the lock."""
        self._worker = worker
        worker.send(self._setup)
        with suppress(OSError):  # as in send
            for fd in self._fds:
                send_handle(worker.connection, fd, worker.process.pid)
        self._listener = threading.Thread(target=self._listen, args=(worker,), name="host-worker-listener", daemon=True)
        self._listener.start()

    def _listen(self, worker: WorkerProcess) -> None:
        with suppress(EOFError, OSError):
            worker.connection.recv_bytes()  # that it is up, the only thing that it ever says
            with self._changed:
                worker.is_up.set()
                self._changed.notify_all()
            worker.connection.recv_bytes()
        self._replace(worker)

    def _replace(self, worker: WorkerProcess) -> None:
        """Start another process in place of one that has ended."""
        status = worker.end()
        reason = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        reason = f"host worker {self.number} {reason}"
        with self._changed:
            worker.connection.close()
            self._worker = None
            if self._is_closing:
                return
            self.lost += 1
            self._ended_in_a_row += 1
            if self._ended_in_a_row < STARTS_IN_A_ROW:
                self._start()
            else:
                self._rest(f"{reason}, {self._ended_in_a_row} times in a row")
            self._changed.notify_all()
        _LOG.error("%s", reason)

    def _rest(self, reason: str) -> None:
        self._reason = reason
        self._rests_until_s = time.monotonic() + REST_S
