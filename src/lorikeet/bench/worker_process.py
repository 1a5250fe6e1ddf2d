"""A program in an environment of its own that answers JSON lines and stands still between its turns."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

_LOG_LINES = 15


class WorkerError(RuntimeError):
    """The program ended instead of answering; the message ends with what it last wrote to standard error."""


class WorkerProcess:
    """Sends one JSON line, reads one JSON line, and stops the program and all its children in between.

    Programs that poll, or whose OpenMP threads spin, would otherwise slow the side whose turn it is. The children are
    reached through the process group; it stays in this session, so the kernel ends a stopped group whose starter died.

    Args:
        command: and its arguments.
        environment: its whole environment.

    Attributes:
        pid: of the program and of its process group.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._name = command[-1]
        # Open as long as the program runs.
        self._log = tempfile.TemporaryFile("w+", prefix="lorikeet-worker-")  # noqa: SIM115
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=dict(environment),
            text=True,
            process_group=0,
        )
        self.pid = self._process.pid

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Let the program run until it has answered one line.

        Raises:
            WorkerError: it ended without an answer.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            os.killpg(self.pid, signal.SIGCONT)
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (BrokenPipeError, ProcessLookupError):
            line = ""
        if not line:
            raise WorkerError(f"{self._name} ended without an answer:\n{self._log_end()}")
        os.killpg(self.pid, signal.SIGSTOP)
        return dict(json.loads(line))

    def close(self) -> None:
        """End the program and its children."""
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(BrokenPipeError):  # what was never read is flushed once more
                if stream is not None:
                    stream.close()

    def _log_end(self) -> str:
        self._log.seek(0)
        return "".join(self._log.readlines()[-_LOG_LINES:])
