"""Helper processes of a rank: starts them, sets them up, replaces them when they die, and stops them."""

import logging
import math
import os
import signal
import socket
import struct
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

from lorikeet.core.executor import ExecutorError

_LOG = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
"""Number of processes in a row that die without finishing any work, after which the next start is delayed."""

RESTART_DELAY_S = 10.0
"""The delay, so that starts do not keep the cores busy."""

START_TIMEOUT_S = 300.0
"""A process that is not ready after this time is killed."""
REPLY_TIMEOUT_S = 60.0
"""A process whose reply is overdue by this time is killed: it may wait for a file system that does not answer, while
other work waits for it.
"""

CHECK_EVERY_S = 1.0
"""Interval of checks for overdue replies."""

SEND_TIMEOUT_S = 5.0
"""A process that does not read for this time, while the send buffer is full, is killed."""


class HelperProcess:
    """A started helper process and its connection.

    The process ends when the connection is closed.

    Args:
        module: the Python module that the process runs.
        process: the process.
        connection: connection to the process.

    Attributes:
        ready_s: time at which the process became ready, in seconds of the monotonic clock; ``inf`` until then.
        has_ended: set once the process has ended and cannot write to shared memory any more.
    """

    def __init__(self, module: str, process: "subprocess.Popen[bytes]", connection: Connection) -> None:
        self.module = module
        self.process = process
        self.ready_s = math.inf
        self.has_ended = threading.Event()
        self._connection = connection
        self._sending = threading.Lock()

    @property
    def is_ready(self) -> bool:
        """Whether the process is ready and has not ended."""
        return self.ready_s < math.inf and not self.has_ended.is_set()

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send a message and file descriptors.

        A process that has ended or does not read is killed, and the listener thread handles its end.
        """
        with self._sending:
            try:
                self._connection.send_bytes(msgspec.msgpack.encode(message))
                for fd in fds:
                    send_handle(self._connection, fd, self.process.pid)
            except OSError:
                self.process.kill()

    def is_silent(self, for_s: float) -> bool:
        """Wait at most ``for_s`` seconds for a message or the process's end; return whether neither happened."""
        with suppress(EOFError, OSError):
            return not self._connection.poll(for_s)
        return False

    def receive(self) -> bytes | None:
        """Wait for the next message; return None if the process has ended."""
        with suppress(EOFError, OSError):
            return self._connection.recv_bytes()
        return None

    def end(self) -> int:
        """Kill the process, wait for its end and return its exit status."""
        self.process.kill()
        status = self.process.wait()
        self.has_ended.set()
        return status

    def disconnect(self) -> None:
        """Close the connection. A send in progress ends first, since the file descriptor may be reused immediately."""
        with self._sending:
            self._connection.close()


def start_helper_process(module: str, name: str) -> HelperProcess:
    """Start ``python -m module FD``, where FD is the process's end of a connection.

    The process becomes ready in the background.

    Args:
        module: the Python module.
        name: name of the helper, for the error message.

    Raises:
        ExecutorError: the process cannot be started.
    """
    ours, theirs = Pipe()
    with socket.fromfd(ours.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
        seconds, rest = divmod(SEND_TIMEOUT_S, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6)))
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            # Otherwise the libraries of the process start a thread per core.
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )
    except OSError as error:
        ours.close()
        raise ExecutorError(f"{name} cannot be started: {error}") from error
    finally:
        theirs.close()
    return HelperProcess(module, process, ours)


class Helper:
    """Keeps one helper process running: sets up the process, and replaces it when it dies.

    The first message of a process reports that it is ready. Subclasses override :meth:`_on_message` to handle further
    messages, :meth:`_is_reply_overdue` to detect a process that does not reply and must be killed, and
    :meth:`_on_death` to clean up. The helper calls all three on its own thread.

    Args:
        process: the first process; owned by this object.
        name: name of the helper, for messages.
        setup: the first message to every process.
        fds: file descriptors that are sent after the setup.

    Attributes:
        lost: number of processes that died.
        silence_timeout_s: seconds without a message after which a ready process is killed, for helpers with heartbeats.
    """

    silence_timeout_s = math.inf

    def __init__(self, process: HelperProcess, name: str, setup: msgspec.Struct, fds: Sequence[int]) -> None:
        self.lost = 0
        self._module = process.module
        self._name = name
        self._setup = setup
        self._fds = tuple(fds)
        self._changed = threading.Condition()
        self._running: HelperProcess | None = None
        self._listener: threading.Thread | None = None
        self._is_closing = False
        self._failed_starts = 0
        self._reason = ""
        self._next_start_s = float("-inf")
        with self._changed:
            self._set_up(process)

    @property
    def ready(self) -> HelperProcess | None:
        """The process if it is ready, else None.

        If there is no process and the restart delay is over, one is started.
        """
        with self._changed:
            running = self._ensure_started()
        return running if running is not None and running.is_ready else None

    def wait_until_ready(self) -> None:
        """Block until a process is ready.

        Raises:
            ExecutorError: no process could be started.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._running is None or self._running.is_ready)
            if self._running is None:
                raise ExecutorError(self._reason)

    def note_success(self) -> None:
        """Record that the process has finished some work, and reset the count of failed starts."""
        with self._changed:
            self._failed_starts = 0

    def close(self) -> None:
        """Stop the process."""
        with self._changed:
            self._is_closing = True
            if self._running is not None:
                self._running.end()
        if self._listener is not None:
            self._listener.join()

    def _on_message(self, content: bytes) -> None:
        """Handle a message of a ready process."""

    def _is_reply_overdue(self, process: HelperProcess, since_s: float) -> bool:
        """Return whether a ready process should have replied to a message that was sent at ``since_s`` or earlier."""
        return False

    def _on_death(self, process: HelperProcess, reason: str) -> None:
        """Handle the death of a process. Its replacement may have been started already."""
        _LOG.error("%s", reason)

    def _ensure_started(self) -> HelperProcess | None:
        """Return the process if it is ready, else None.

        If there is no process and the restart delay is over, start one.
        """
        if self._running is None and not self._is_closing and time.monotonic() >= self._next_start_s:
            self._start()
        return self._running

    def _start(self) -> None:
        """Start a process. The caller holds the lock."""
        try:
            self._set_up(start_helper_process(self._module, self._name))
        except ExecutorError as error:
            self._delay_start(str(error))

    def _set_up(self, process: HelperProcess) -> None:
        """Send a process its setup and start its listener thread. The caller holds the lock."""
        self._running = process
        process.send(self._setup, self._fds)
        self._listener = threading.Thread(target=self._listen, args=(process,), name="helper-listener", daemon=True)
        self._listener.start()

    def _listen(self, process: HelperProcess) -> None:
        if self._next(process) is not None:
            with self._changed:
                process.ready_s = time.monotonic()
                self._changed.notify_all()
        while (content := self._next(process)) is not None:
            self._on_message(content)
        self._replace(process)

    def _next(self, process: HelperProcess) -> bytes | None:
        """Return the next message of a process; None if it has ended or is to be killed."""
        is_ready = process.ready_s < math.inf
        timeout_s = REPLY_TIMEOUT_S if is_ready else START_TIMEOUT_S
        began_s = time.monotonic()
        silent_s = 0.0
        while process.is_silent(0.0):  # No message is left to read, so an overdue reply is really missing.
            since_s = time.monotonic() - timeout_s
            is_overdue = process.ready_s <= since_s and self._is_reply_overdue(process, since_s)
            if is_overdue or (not is_ready and began_s <= since_s):
                _LOG.error("%s has not replied for %g s", self._name, timeout_s)
                return None
            if is_ready and silent_s >= self.silence_timeout_s:
                _LOG.error("%s has sent no heartbeat for %g s", self._name, silent_s)
                return None
            process.is_silent(CHECK_EVERY_S)
            # The silence is counted in checks, not seconds, since the engine's process may have been suspended too.
            silent_s += CHECK_EVERY_S
        return process.receive()

    def _replace(self, process: HelperProcess) -> None:
        """End a process and start its replacement."""
        status = process.end()
        reason = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        reason = f"{self._name} {reason}"
        with self._changed:
            process.disconnect()
            self._running = None
            self._changed.notify_all()
            if self._is_closing:
                return
            self.lost += 1
            self._failed_starts += 1
            if self._failed_starts < MAX_FAILED_STARTS:
                self._start()
            else:
                self._delay_start(f"{reason}, {self._failed_starts} times in a row")
        self._on_death(process, reason)

    def _delay_start(self, reason: str) -> None:
        """Forbid new processes until ``RESTART_DELAY_S`` is over."""
        self._reason = reason
        self._next_start_s = time.monotonic() + RESTART_DELAY_S
