"""Starts engine processes on this machine.

The command starts one before its other imports, so this module imports little.
"""

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from itertools import count

from lorikeet.config import SECRET_VARIABLES


class ChildProcess:
    """An engine process on this machine; implements ``EngineProcess``. It can be started before a loop runs.

    Args:
        address: address at which the channel listens.
    """

    def __init__(self, address: str) -> None:
        # The engine has a separate session, so that a Ctrl-C at the terminal reaches only the API process, which drains
        # first.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lorikeet.engine", address],
            stdin=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES},
            start_new_session=True,
        )
        self.address = address

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self._process.poll()

    def tell(self, settings: bytes) -> None:
        """Write the line that the process waits for. Its standard input stays open, so it ends with this process."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # The process has died, which ``wait`` reports.
            self._process.stdin.write(settings + b"\n")
            self._process.stdin.flush()

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    async def wait(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        import asyncio  # A start does not need this module.

        if not hasattr(os, "pidfd_open"):  # macOS has no pidfd_open.
            return await asyncio.to_thread(self._process.wait)
        if self._process.poll() is None:
            loop = asyncio.get_running_loop()
            ended = asyncio.Event()
            ended_fd = os.pidfd_open(self.pid)  # The process is not reaped yet, so the id is still its own.
            try:
                loop.add_reader(ended_fd, ended.set)
                await ended.wait()
            finally:
                loop.remove_reader(ended_fd)
                os.close(ended_fd)
        return self._process.wait()


class LocalHost:
    """This machine as an ``EngineHost``. Engines are child processes and end with this process."""

    address = "localhost"

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lorikeet-")
        self._numbers = count(1)
        self._early: ChildProcess | None = None

    def start_early(self) -> None:
        """Start the next engine process early, so that it imports its libraries before its settings are known."""
        self._early = ChildProcess(self.bind_address())

    def bind_address(self) -> str:
        """Return the address of a new socket file."""
        if self._early is not None:
            return self._early.address
        return f"ipc://{self._folder.name}/engine-{next(self._numbers)}"

    async def start(self, address: str, settings: bytes) -> ChildProcess:
        """Start the process with this interpreter (``EngineHost.start``)."""
        process = self._early or ChildProcess(address)
        self._early = None
        process.tell(settings)
        return process

    def close(self) -> None:
        """Remove the socket files, and kill a process that was started early and not used."""
        if self._early is not None:
            self._early.kill()
        self._folder.cleanup()


_first: LocalHost | None = None


def start_first_host() -> None:
    """Start the engine process of :func:`first_host` before the settings show whether an engine is needed."""
    global _first
    _first = LocalHost()
    _first.start_early()


def first_host() -> LocalHost:
    """Return the host of :func:`start_first_host` once; otherwise a new one, whose engine process starts now."""
    global _first
    if _first is None:
        start_first_host()
    assert _first is not None
    host = _first
    _first = None
    return host


def close_first_host() -> None:
    """Close the host of :func:`start_first_host` if it was not used."""
    if _first is not None:
        _first.close()
