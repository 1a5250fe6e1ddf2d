"""Helper processes of a rank: how they are started, set up, replaced when they end unasked, and ended."""

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

STARTS_IN_A_ROW = 3
"""So often a process is started that then ends without having done anything to the end."""

REST_S = 10.0
"""After that none is started for so long, lest starts keep the cores busy."""

START_S, SILENCE_S = 300.0, 60.0
"""A process that is not up after the one, or that has owed something for the other, whatever else it says, is ended: it
may wait for a disk or a file system that does not answer, and others' work waits for it.
"""

SEND_S = 5.0
"""A process that has taken in nothing for so long, though there is more than the system holds for it, is ended."""


class HelperProcess:
    """A process that has been started and will work once it is set up; it ends when the connection is closed.

    Args:
        module: what it runs.
        process: the process.
        connection: to it.

    Attributes:
        module, process: as given.
        up_s: since when it can work, by the monotonic clock; ``inf`` until then.
        is_gone: set once it has ended, and writes to no memory any more.
    """

    def __init__(self, module: str, process: "subprocess.Popen[bytes]", connection: Connection) -> None:
        self.module = module
        self.process = process
        self.up_s = math.inf
        self.is_gone = threading.Event()
        self._connection = connection
        self._sending = threading.Lock()

    @property
    def can_work(self) -> bool:
        """Whether it is up and has not ended."""
        return self.up_s < math.inf and not self.is_gone.is_set()

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send a message and file descriptors.

        A process that has ended gets none, and one that does not take them is ended. Whoever listens to it is about to
        find out.
        """
        with self._sending:
            try:
                self._connection.send_bytes(msgspec.msgpack.encode(message))
                for fd in fds:
                    send_handle(self._connection, fd, self.process.pid)
            except OSError:
                self.process.kill()

    def is_silent(self, for_s: float) -> bool:
        """Wait until it says something or has ended, but no longer than that; return whether it has done neither."""
        with suppress(EOFError, OSError):
            return not self._connection.poll(for_s)
        return False

    def receive(self) -> bytes | None:
        """Wait for what it says next and return that, None if it has ended."""
        with suppress(EOFError, OSError):
            return self._connection.recv_bytes()
        return None

    def end(self) -> int:
        """End it and return its exit status."""
        self.process.kill()
        status = self.process.wait()
        self.is_gone.set()
        return status

    def hang_up(self) -> None:
        """Close the connection, but not under a message: its number may be that of the next one at once."""
        with self._sending:
            self._connection.close()


def start_helper_process(module: str, name: str) -> HelperProcess:
    """Start ``python -m module FD``, where FD is its end of a connection; it becomes ready beside the caller.

    Args:
        module: what it runs.
        name: of the helper, for the error.

    Raises:
        ExecutorError: the system refuses.
    """
    ours, theirs = Pipe()
    with socket.fromfd(ours.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
        seconds, rest = divmod(SEND_S, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6)))
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            # Or its libraries bring a thread for every core.
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )
    except OSError as error:
        ours.close()
        raise ExecutorError(f"{name} cannot be started: {error}") from error
    finally:
        theirs.close()
    return HelperProcess(module, process, ours)


class Helper:
    """Sets a process up, and starts another when it ends unasked.

    The first thing that a process says is that it is up. Whoever wants to hear more, to have one ended that says
    nothing though it should, or to know what one that has ended has left behind, overrides :meth:`_heard`,
    :meth:`_owes` or :meth:`_gone`; all are called on a thread of this object.

    Args:
        process: the first one; owned by this object from now on.
        name: of the helper, in messages.
        setup: what every process must know.
        fds: file descriptors that it is given after that.

    Attributes:
        lost: how many have ended unasked.
    """

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
        self._ended_in_a_row = 0
        self._reason = ""
        self._rests_until_s = float("-inf")
        with self._changed:
            self._set_up(process)

    @property
    def ready(self) -> HelperProcess | None:
        """The process if it can work now, None if none can; in that case one is on its way or will be."""
        with self._changed:
            running = self._wake()
        return running if running is not None and running.can_work else None

    def wait_until_ready(self) -> None:
        """Block until a process can work.

        Raises:
            ExecutorError: none could be started.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._running is None or self._running.can_work)
            if self._running is None:
                raise ExecutorError(self._reason)

    def worked(self) -> None:
        """Note that the process has done something to the end."""
        with self._changed:
            self._ended_in_a_row = 0

    def close(self) -> None:
        """End the process."""
        with self._changed:
            self._is_closing = True
            if self._running is not None:
                self._running.end()
        if self._listener is not None:
            self._listener.join()

    def _heard(self, content: bytes) -> None:
        """Take what the process has said after it was up."""

    def _owes(self, process: HelperProcess, since_s: float) -> bool:
        """Whether a process that is up should have said something since a time."""
        return False

    def _gone(self, process: HelperProcess, reason: str) -> None:
        """Note that a process has ended unasked; another may have been started since."""
        _LOG.error("%s", reason)

    def _wake(self) -> HelperProcess | None:
        """Return the process, which may not be up yet; start one if there is none and the rest is over.

        Under the lock.
        """
        if self._running is None and not self._is_closing and time.monotonic() >= self._rests_until_s:
            self._start()
        return self._running

    def _start(self) -> None:
        """Start a process. Under the lock."""
        try:
            self._set_up(start_helper_process(self._module, self._name))
        except ExecutorError as error:
            self._rest(str(error))

    def _set_up(self, process: HelperProcess) -> None:
        """Tell a process what it must know, and listen to it from now on. Under the lock."""
        self._running = process
        process.send(self._setup, self._fds)
        self._listener = threading.Thread(target=self._listen, args=(process,), name="helper-listener", daemon=True)
        self._listener.start()

    def _listen(self, process: HelperProcess) -> None:
        if self._next(process) is not None:
            with self._changed:
                process.up_s = time.monotonic()
                self._changed.notify_all()
        while (content := self._next(process)) is not None:
            self._heard(content)
        self._replace(process)

    def _next(self, process: HelperProcess) -> bytes | None:
        """Return what a process says next; None if it has ended, or is to be ended."""
        is_up = process.up_s < math.inf
        patience_s = SILENCE_S if is_up else START_S
        while process.is_silent(0.0):  # all that it has said has been heard, be that of what it owes or of other things
            since_s = time.monotonic() - patience_s
            owes = process.up_s <= since_s and self._owes(process, since_s)
            if owes or (process.is_silent(patience_s) and not is_up):
                _LOG.error("%s has said nothing that it owes for %g s", self._name, patience_s)
                return None
        return process.receive()

    def _replace(self, process: HelperProcess) -> None:
        """Start another process in place of one that has ended."""
        status = process.end()
        reason = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        reason = f"{self._name} {reason}"
        with self._changed:
            process.hang_up()
            self._running = None
            self._changed.notify_all()
            if self._is_closing:
                return
            self.lost += 1
            self._ended_in_a_row += 1
            if self._ended_in_a_row < STARTS_IN_A_ROW:
                self._start()
            else:
                self._rest(f"{reason}, {self._ended_in_a_row} times in a row")
        self._gone(process, reason)

    def _rest(self, reason: str) -> None:
        self._reason = reason
        self._rests_until_s = time.monotonic() + REST_S
