"""serve.6: the engine process is killed with fifty streams in flight."""

import asyncio
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.accept.disturbed import chat_body, compare, what_is_wrong
from benchmarks.accept.lines import Result, line
from benchmarks.accept.models import SAMPLES, default_model
from benchmarks.accept.runs import ROOT, StoredRuns
from benchmarks.accept.server import RunningServer, running_server
from benchmarks.accept.streams import Stream, stream_chat, together, wait_until_idle

STREAMS = 50
TOKENS = 48
BEGUN_TOKENS = 4
TIES = 2


@line(
    "serve.6",
    title=f"The engine killed with {STREAMS} streams in flight",
    bound=f"restarted, every stream complete, none lost or repeated, tokens of the undisturbed run (ties ≤ {TIES})",
)
def run(runs: StoredRuns) -> Result:
    """The same streams twice, each time on a fresh server; the second time its engine is killed."""
    measured = runs.get("kill", _measure)
    figure, problems = measured["figure"], measured["problems"]
    problems += [
        *([f"{figure['differing']} streams differ"] if figure["differing"] else []),
        *([f"{figure['ties']} ties"] if figure["ties"] > TIES else []),
        *(["the engine was not restarted exactly once"] if figure["restarts"] != 1 else []),
        *(["a stream had ended before the engine was killed"] if figure["in_flight_when_killed"] < STREAMS else []),
        *(["blocks are still referenced afterwards"] if not measured["idle"] else []),
    ]
    return Result(
        figure=figure,
        passed=not problems,
        cause="; ".join(problems[:5]),
        notes=f"SmolLM2-135M-Instruct in fp32, greedy, {TOKENS} tokens each, base and sample adapters, kill -9 once "
        f"every stream has {BEGUN_TOKENS} tokens; compared token by token with its log probability; longest_gap_s: the "
        "longest that a client saw no token, the restart included",
    )


def _measure() -> dict[str, Any]:
    calm, killed = _streams(kill=False), _streams(kill=True)
    differing, ties = compare(calm["streams"], killed["streams"])
    return {
        "figure": {
            "complete": sum(not problem for problem in killed["problems"]),
            "in_flight_when_killed": killed["in_flight"],
            "tokens_before": killed["tokens_before"],
            "tokens": sum(len(stream.tokens) for stream in killed["streams"]),
            "restarts": killed["restarts"],
            "differing": differing,
            "ties": ties,
            "longest_gap_s": killed["longest_gap_s"],
        },
        "problems": [problem for problem in (*calm["problems"], *killed["problems"]) if problem],
        "idle": killed["idle"],
    }


def _streams(*, kill: bool) -> dict[str, Any]:
    adapters = sorted(file.parent.name for file in (ROOT / SAMPLES).glob("*/adapter_config.json"))
    names = [default_model().name, *adapters]
    flags = [flag for adapter in adapters for flag in ("--lora-modules", f"{adapter}={SAMPLES / adapter}")]
    flags += ["--dtype", "float32", "--max-num-seqs", str(STREAMS)]
    with (
        tempfile.TemporaryDirectory(prefix="lorikeet-serve6-") as scratch,
        running_server([*flags, "--store-dir", f"{scratch}/store"], Path(scratch) / "serve.log") as server,
    ):
        killer = _Killer(server, armed=kill)
        bodies = [chat_body(names[index % len(names)], index, TOKENS) for index in range(STREAMS)]
        streams = asyncio.run(
            together(server.url, [partial(stream_chat, body=body, on_chunk=killer.saw) for body in bodies])
        )
        gauges, _ = wait_until_idle(server.url)
    return {
        "streams": streams,
        "problems": [what_is_wrong(stream, TOKENS) for stream in streams],
        "in_flight": killer.in_flight,
        "tokens_before": killer.tokens_before,
        "longest_gap_s": killer.longest_gap_s,
        "restarts": gauges.restarts,
        "idle": gauges.idle,
    }


class _Killer:
    """Watches all streams and kills the engine as soon as each of them has begun."""

    def __init__(self, server: RunningServer, *, armed: bool) -> None:
        self._server = server
        self._armed = armed
        self._seen: dict[int, Stream] = {}
        self._last_s: dict[int, float] = {}
        self.in_flight = 0
        self.tokens_before = 0
        self.longest_gap_s = 0.0

    def saw(self, stream: Stream) -> None:
        """A chunk came."""
        now_s = time.monotonic()
        self.longest_gap_s = max(self.longest_gap_s, now_s - self._last_s.get(id(stream), now_s))
        self._last_s[id(stream)] = now_s
        self._seen[id(stream)] = stream
        begun = len(self._seen) == STREAMS and all(len(s.tokens) >= BEGUN_TOKENS for s in self._seen.values())
        if self._armed and begun:
            self._armed = False
            _engine(self._server.process.pid).kill()
            self.in_flight = sum(s.finish_reason is None for s in self._seen.values())
            self.tokens_before = sum(len(s.tokens) for s in self._seen.values())


def _engine(server_pid: int) -> psutil.Process:
    children = psutil.Process(server_pid).children()
    return next(child for child in children if "lorikeet.engine.process" in child.cmdline())
