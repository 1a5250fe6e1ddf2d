"""A real server in a process of its own, and what is asked of it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.accept.runs import ROOT

LORIKEET = Path(sys.executable).with_name("lorikeet")

_POLL_S = 0.05
_STOP_S = 60.0


class ServerError(RuntimeError):
    """The server did not come up or went down; the message holds the end of its log."""


@dataclass(frozen=True)
class RunningServer:
    """A server that answers.

    Attributes:
        url: where.
        process: its API process.
        ready_s: seconds from the start of the process until it was ready.
        log: what it printed.
    """

    url: str
    process: "subprocess.Popen[bytes]"
    ready_s: float
    log: Path

    def complete(self, model: str, prompt: str, **parameters: Any) -> str:
        """Return the text of one completion.

        Raises:
            httpx.HTTPStatusError: the server refused.
        """
        body = {"model": model, "prompt": prompt, **parameters}
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=600)
        response.raise_for_status()
        return str(response.json()["choices"][0]["text"])

    def chat(self, model: str, content: str, **parameters: Any) -> str:
        """Return the text of one answer.

        Raises:
            httpx.HTTPStatusError: the server refused.
        """
        body = {"model": model, "messages": [{"role": "user", "content": content}], **parameters}
        response = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=600)
        response.raise_for_status()
        return str(response.json()["choices"][0]["message"]["content"])


def free_port() -> int:
    """Return a port that nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def running_server(
    flags: Sequence[str],
    log: Path,
    *,
    command: Sequence[str] = (str(LORIKEET), "serve"),
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
    ready_within_s: float = 300.0,
) -> Iterator[RunningServer]:
    """Start a server, wait until it is ready, and end it with its children.

    Args:
        flags: of ``lorikeet serve``, without ``--port``.
        log: file for all that it prints.
        command: what starts it, for servers that are started otherwise.
        cwd: folder that it runs in.
        environment: all of its environment variables; this process's if left out.
        port: where it listens; a free one is passed as ``--port`` if left out.
        ready_within_s: limit for coming up.

    Raises:
        ServerError: it ended or was not ready in time.
    """
    listen = free_port() if port is None else port
    arguments = [*command, *flags, *(["--port", str(listen)] if port is None else [])]
    start_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments,
            cwd=cwd,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{listen}"
        _wait_until_ready(url, process, log, start_s + ready_within_s)
        yield RunningServer(url, process, time.monotonic() - start_s, log)
    finally:
        stop(process)


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End a process politely, and its whole group if that does not help."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path, until_s: float) -> None:
    while time.monotonic() < until_s:
        if process.poll() is not None:
            raise ServerError(f"the server ended with code {process.returncode}:\n{_tail(log)}")
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(_POLL_S)
    raise ServerError(f"the server was not ready in time:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]
