"""Provides shared parts of the benchmarks: the model, engines in this process, servers, interleaved runs, tables."""

import math
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeVar
from unittest import mock

import numpy as np
import psutil
import torch

from lorikeet.bench.statistics import median_interval
from lorikeet.config import EngineSettings, ModelSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import MonotonicClock
from lorikeet.core.events import Finished, FinishReason
from lorikeet.core.ids import RequestId
from lorikeet.core.machine import cpu_model
from lorikeet.core.plan import Token
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.build import Replica, build_replica
from lorikeet.engine.driver import wait_for_work
from lorikeet.kernels.backends import choose_kernels
from lorikeet.kernels.interface import Kernels
from lorikeet.kernels.native import supported_instruction_sets
from lorikeet.models.default import default_cache_dir, prepare_default_model

ROOT = Path(__file__).resolve().parents[1]
LORIKEET = str(Path(sys.executable).with_name("lorikeet"))
"""The command of this environment."""
THREADS = len(os.sched_getaffinity(0))
"""All cores that this process may use."""

_TOKEN_IDS = (300, 10_000)
"""Ordinary token ids of the default model."""
_POLL_S = 0.05
_STOP_S = 60.0

T = TypeVar("T")


# --- what is measured, and where -----------------------------------------------------------------------


def default_model() -> Path:
    """Return the folder of SmolLM2-135M-Instruct. The first call converts it."""
    return prepare_default_model(default_cache_dir())


def sample_adapters() -> dict[str, Path]:
    """Return the folders of the sample adapters by name."""
    return {file.parent.name: file.parent for file in sorted(ROOT.glob("examples/adapters/*/adapter_config.json"))}


def machine() -> str:
    """Return processor, cores, memory and versions in one line."""
    instructions = (*supported_instruction_sets(), "no native kernels")[0]
    memory_gib = psutil.virtual_memory().total / 2**30
    return (
        f"{cpu_model()} ({instructions}), {THREADS} cores, {memory_gib:.0f} GiB, {platform.system()} "
        f"{platform.release()}, Python {platform.python_version()}, torch {version('torch')}"
    )


def revision() -> str:
    """Return the commit that is checked out, with ``-dirty`` if tracked files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown revision"


def print_setup() -> None:
    """Print the command, revision, date and machine, which every figure in the docs must name."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    command = ["python", "-m", module.name] if module else ["python", sys.argv[0]]
    words = " ".join([*command, *sys.argv[1:]])
    print(f"{words}\nrevision {revision()}; {time.strftime('%Y-%m-%d')}; {machine()}\n", flush=True)


# --- tables ------------------------------------------------------------------------------------------


def print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under headings. The first column is aligned to the left, the others to the right."""
    cells = [list(headings), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(title)
    for number, row in enumerate(cells):
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  " + "  ".join([first.strip().ljust(widths[0]), *others]).rstrip())
        if number == 0:
            print("  " + "  ".join("-" * width for width in widths))
    print(flush=True)


def with_interval(values: Sequence[float], form: str = ".3g") -> str:
    """Return the median of the values with its 95 % bootstrap interval."""
    low, high = median_interval(values)
    return f"{statistics.median(values):{form}} ({low:{form}} to {high:{form}})"


def median_p95(seconds: Sequence[float], unit_s: float, form: str = ".1f") -> tuple[str, str]:
    """Return the median and the 95th percentile of times in a unit of ``unit_s`` seconds."""
    return f"{statistics.median(seconds) / unit_s:{form}}", f"{np.quantile(seconds, 0.95) / unit_s:{form}}"


# --- runs in turns -----------------------------------------------------------------------------------


def in_turns(sides: Mapping[str, Callable[[int], T]], rounds: int, warm_up: int = 1) -> dict[str, list[T]]:
    """Run all sides once per round, in an order that is reversed from round to round (A B C, C B A, ...).

    A machine that others share becomes faster and slower within minutes. In turns, that affects all sides alike.

    Args:
        sides: functions that are called with the number of the round.
        rounds: number of results that are kept for each side.
        warm_up: number of earlier rounds whose results are dropped.
    """
    found: dict[str, list[T]] = {name: [] for name in sides}
    for number in range(warm_up + rounds):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            result = sides[name](number)
            if number >= warm_up:
                found[name].append(result)
    return found


def ratios(some: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratio of each pair. Ratios within a round do not drift with the machine."""
    return [one / other for one, other in zip(some, others, strict=True)]


# --- an engine in this process -----------------------------------------------------------------------


@contextmanager
def replica(model: Path, dtype: str = "bfloat16", quantization: str = "auto", **engine: object) -> Iterator[Replica]:
    """Build an engine in this process and close it at the end; ``engine`` are engine settings.

    By default it has no drafts, so that a decode step has one row for each sequence.
    """
    engine.setdefault("draft_tokens", 0)
    of_model = ModelSettings(model=str(model), dtype=dtype, quantization=quantization)
    settings = Settings(of_model, EngineSettings(**engine))  # type: ignore[arg-type]
    built = build_replica(settings)
    try:
        yield built
    finally:
        built.engine.close()


def default_kernels() -> Kernels:
    """Return the kernels that an engine chooses on this machine for bfloat16."""
    return choose_kernels("auto", torch.bfloat16, torch.device("cpu"))


@contextmanager
def kernels_as(kernels: object) -> Iterator[None]:
    """Run engines that are built within the context with ``kernels``, a wrapper of real kernels."""
    with mock.patch("lorikeet.worker.rank_setup.choose_kernels", return_value=kernels):
        yield


def make_requests(
    name: str, count: int, prompt_tokens: int, output_tokens: int, refs: Sequence[AdapterRef] = (), seed: int = 0
) -> list[Request]:
    """Return greedy requests with different prompts.

    Adapters are used in turns; without adapters, the base model is used.
    """
    prompts = np.random.default_rng(seed).integers(*_TOKEN_IDS, (count, prompt_tokens)).tolist()
    sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0)
    return [
        Request(RequestId(f"{name}-{i}"), prompt, sampling, 0.0, refs[i % len(refs)] if refs else None)
        for i, prompt in enumerate(prompts)
    ]


def run_all(built: Replica, requests: Iterable[Request]) -> dict[RequestId, list[Token]]:
    """Submit all requests together, run them to their end and return their tokens.

    Raises:
        RuntimeError: a request failed.
    """
    engine = built.engine
    tokens = dict[RequestId, list[Token]]()
    for request in requests:
        tokens[request.request_id] = []
        engine.submit(request)
    while engine.has_requests:
        outputs = engine.step()
        for output in outputs.tokens:
            tokens[output.request_id] += output.tokens
        for event in outputs.events:
            if isinstance(event, Finished) and event.reason is FinishReason.ERROR:
                raise RuntimeError(f"{event.request_id}: {event.error}")
        if not engine.is_busy and engine.has_requests:
            wait_for_work(engine, MonotonicClock(), math.inf)
    return tokens


# --- a server in a process of its own ----------------------------------------------------------------


class RunningServer(NamedTuple):
    """A server at ``url``; ``process`` is its API process."""

    url: str
    process: "subprocess.Popen[bytes]"


@contextmanager
def running_server(
    flags: Sequence[str],
    log: Path,
    *,
    command: Sequence[str] = (LORIKEET, "serve"),
    environment: Mapping[str, str] | None = None,
    ready_within_s: float = 300.0,
    port: int = 0,
    health: str = "/health",
) -> Iterator[RunningServer]:
    """Start a server on a free port, wait until it is ready, and stop it with its children.

    From then on SIGTERM ends this program by ``SystemExit``, so that its servers are also stopped.

    Args:
        flags: flags of the command, without ``--port``.
        log: file for the server's output.
        command: command that starts the server.
        environment: environment variables in addition to those of this process.
        ready_within_s: limit of the start time in seconds.
        port: port of the server; 0 for a free port.
        health: path that answers 200 once the server is ready.

    Raises:
        RuntimeError: the server ended or was not ready in time. The message contains the end of its log.
    """
    if threading.current_thread() is threading.main_thread():  # handlers can be set only in the main thread
        signal.signal(signal.SIGTERM, _exit)
    if not port:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = int(listener.getsockname()[1])
    variables = {**os.environ, **(environment or {})}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)  # like an installed package, which has its bytecode
    arguments = [*command, *flags, "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    server = RunningServer(f"http://127.0.0.1:{port}", process)
    try:
        _wait_until_ready(server, log, time.monotonic() + ready_within_s, health)
        yield server
    finally:
        _stop(process)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def sample_flags() -> list[str]:
    """Return flags of ``lorikeet serve`` that load the sample adapters."""
    return [flag for name, folder in sample_adapters().items() for flag in ("--lora-modules", f"{name}={folder}")]


def chat_body(model: str, content: str, tokens: int, **parameters: object) -> dict[str, Any]:
    """Return a greedy streaming chat whose answer has exactly the given number of tokens."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        **parameters,
    }


def _wait_until_ready(server: RunningServer, log: Path, until_s: float, health: str) -> None:
    while time.monotonic() < until_s:
        if server.process.poll() is not None:
            break
        with suppress(OSError), closing(HTTPConnection(server.url.removeprefix("http://"), timeout=5)) as http:
            http.request("GET", health)  # httpx would take 30 ms of a core for each call, which the server needs
            if http.getresponse().status == 200:
                return
        time.sleep(_POLL_S)
    code = server.process.poll()
    what = "was not ready in time" if code is None else f"ended with code {code}"
    raise RuntimeError(f"the server {what}:\n{log.read_text(errors='replace')[-2000:]}")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Terminate a process, and kill its whole group if it does not exit in time."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
