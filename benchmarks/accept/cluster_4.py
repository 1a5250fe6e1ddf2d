"""cluster.4: what goes wrong in a cluster, with a hundred requests in flight each time."""

import asyncio
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from benchmarks.accept.disturbed import chat_body, compare, what_is_wrong
from benchmarks.accept.lines import Result, line
from benchmarks.accept.models import SAMPLES, default_model
from benchmarks.accept.runs import ROOT, StoredRuns
from benchmarks.accept.server import RunningServer, running_server
from benchmarks.accept.streams import Stream, stream_chat, together, wait_until_idle
from lorikeet.bench.adapters import write_random_adapter
from lorikeet.models.config import read_model_config
from tests.support.postgres import PostgresServer, postgres_server

REQUESTS, TOKENS, BEGUN_TOKENS = 100, 32, 2
TIES = 4
GONE_S = 60.0
STOPPED_S, LET_GO_S = 3.0, 0.5
LARGE, LARGE_RANK = 4, 256
"""Adapters large enough to be caught on their way, beside the samples."""
LATE = "late"
"""An adapter that is registered while the server runs."""

_PLACED = "lorikeet:plain,placement=random,routing=table,placement_period_s=2"
"""A row whose requests depend on the orchestrator: every adapter has one home, by its table."""


class _Fault(NamedTuple):
    """What goes wrong.

    Attributes:
        name: in words.
        row: of the server.
        act: does it, given the server, as soon as all requests are in flight, and returns what it saw; while the
            requests run, on a thread of its own.
        with_postgres: the registry is on a PostgreSQL server, which ``act`` may stop.
        early: it acts when the first copies are under way, instead of when all streams have begun.
    """

    name: str
    row: str
    act: "Callable[[_Scene], dict[str, Any]]"
    with_postgres: bool = False
    early: bool = False


class _Scene(NamedTuple):
    """Where it goes wrong; ``is_over`` is set when all requests have ended."""

    server: RunningServer
    scratch: Path
    postgres: PostgresServer | None
    is_over: threading.Event


@line(
    "cluster.4",
    title=f"Faults of a cluster, each with {REQUESTS} requests in flight",
    bound=f"0 lost, 0 repeated, greedy fp32 tokens of the undisturbed run (ties ≤ {TIES} of {REQUESTS})",
)
def run(runs: StoredRuns) -> Result:
    """The same requests on fresh clusters of two replicas: undisturbed, and once for each fault."""
    measured = {fault.name: runs.get(fault.name, partial(_measure, fault)) for fault in FAULTS}
    problems = [f"{name}: {problem}" for name, each in measured.items() for problem in each["problems"]]
    problems += [f"{name}: {each['ties']} ties" for name, each in measured.items() if each["ties"] > TIES]
    return Result(
        figure={
            "lost": sum(each["lost"] for each in measured.values()),
            "repeated": sum(each["repeated"] for each in measured.values()),
            "differing": sum(each["differing"] for each in measured.values()),
            "ties": sum(each["ties"] for each in measured.values()),
            **{name: each["words"] for name, each in measured.items()},
        },
        passed=not problems,
        cause="; ".join(problems[:5]),
        notes=f"`lorikeet serve --replicas 2` on Ray, SmolLM2-135M-Instruct in fp32, greedy, {TOKENS} tokens each over "
        f"base, sample adapters and {LARGE} of rank {LARGE_RANK}; every token compared by text and log probability",
    )


def _measure(fault: _Fault) -> dict[str, Any]:
    calm, _, _ = _streams(fault._replace(act=lambda scene: {}, early=False))
    disturbed, saw, idle = _streams(fault)
    differing, ties = compare(calm, disturbed)
    wrong = [each for each in (what_is_wrong(stream, TOKENS) for stream in (*calm, *disturbed)) if each]
    in_flight = saw.get("in_flight", 0)
    problems = [
        *wrong[:3],
        *([f"{in_flight} requests were in flight"] if in_flight < REQUESTS else []),
        *([f"{differing} streams differ"] if differing else []),
        *([] if idle else ["blocks are still referenced afterwards"]),
        *saw.pop("problems", []),
    ]
    return {
        "lost": sum(len(stream.tokens) < TOKENS for stream in disturbed),
        "repeated": sum(len(stream.tokens) > TOKENS for stream in disturbed),
        "differing": differing,
        "ties": ties,
        "problems": problems,
        "words": ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in saw.items()),
    }


def _streams(fault: _Fault) -> tuple[list[Stream], dict[str, Any], bool]:
    with (
        tempfile.TemporaryDirectory(prefix="lorikeet-cluster4-") as scratch,
        _postgres(fault) as postgres,
        running_server(_flags(fault, Path(scratch), postgres), Path(scratch) / "serve.log") as server,
    ):
        names = [default_model().name, *_adapters(Path(scratch))]
        bodies = [chat_body(names[index % len(names)], index, TOKENS) for index in range(REQUESTS)]
        scene = _Scene(server, Path(scratch), postgres, threading.Event())
        watch = _Watch(partial(fault.act, scene), None if fault.early else REQUESTS)
        calls = [partial(stream_chat, body=body, on_chunk=watch.saw) for body in bodies]
        if fault.early:
            watch.begin()
        streams = asyncio.run(together(server.url, calls))
        scene.is_over.set()
        saw = watch.outcome()
        gauges, _ = wait_until_idle(server.url)
    return streams, saw, gauges.idle


def _adapters(scratch: Path) -> dict[str, Path]:
    """Write the large adapters where they are missing; return all by name."""
    samples = {file.parent.name: file.parent for file in sorted((ROOT / SAMPLES).glob("*/adapter_config.json"))}
    geometry = read_model_config(default_model()).geometry(2)
    large = {f"large-{number}": scratch / f"large-{number}" for number in range(LARGE)}
    for number, folder in enumerate((*large.values(), scratch / LATE)):
        if not folder.exists():
            write_random_adapter(folder, geometry, 8 if folder.name == LATE else LARGE_RANK, seed=number)
    return samples | large


def _flags(fault: _Fault, scratch: Path, postgres: PostgresServer | None) -> list[str]:
    adapters = [flag for name, folder in _adapters(scratch).items() for flag in ("--lora-modules", f"{name}={folder}")]
    registry = [] if postgres is None else ["--registry-url", postgres.url]
    return [
        *("--replicas", "2", "--row", fault.row, "--dtype", "float32", "--max-num-seqs", str(REQUESTS)),
        *("--store-dir", f"{scratch}/store", "--adapter-dir", str(scratch), *registry, *adapters),
    ]


def _postgres(fault: _Fault) -> AbstractContextManager[PostgresServer | None]:
    return postgres_server() if fault.with_postgres else nullcontext()


class _Watch:
    """Sees all streams, and lets the fault happen once, on a thread, when so many have begun."""

    def __init__(self, act: Callable[[], dict[str, Any]], begins_at: int | None) -> None:
        self._act = act
        self._begins_at = begins_at
        self._begun: set[int] = set()
        self._saw: dict[str, Any] = {}
        self._thread: threading.Thread | None = None
        self._streams: dict[int, Stream] = {}

    def saw(self, stream: Stream) -> None:
        """A chunk came."""
        self._streams[id(stream)] = stream
        if len(stream.tokens) >= BEGUN_TOKENS:
            self._begun.add(id(stream))
        if self._thread is None and len(self._begun) == self._begins_at:
            in_flight = sum(each.finish_reason is None for each in self._streams.values())
            self._saw = {"in_flight": in_flight}
            self.begin()

    def begin(self) -> None:
        """Let it happen."""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def outcome(self) -> dict[str, Any]:
        """Return what was seen, when it is over."""
        if self._thread is None:
            return {"problems": ["streams had ended before all had begun"]}
        self._thread.join()
        return self._saw

    def _run(self) -> None:
        try:
            self._saw |= self._act()
        except Exception as error:  # in this thread nobody else would hear of it, and nothing would have gone wrong
            self._saw["problems"] = [repr(error)]


# --- what goes wrong ----------------------------------------------------------------------------------


def _kill_replica(scene: _Scene) -> dict[str, Any]:
    _signal(_cluster(scene)["replicas"][0]["pid"], signal.SIGKILL)
    return _after(scene, lambda state: state["replicas"][0]["restarts"] == 1, "the replica did not come back")


def _kill_orchestrator(scene: _Scene) -> dict[str, Any]:
    """Its process is killed; afterwards it must know what it knew, and place what is new."""
    before = _cluster(scene)["shares"]
    _signal(_worker("OrchestratorActor").pid, signal.SIGKILL)
    scene.is_over.wait()
    body = {"name": LATE, "source": str(scene.scratch / LATE)}
    httpx.post(f"{scene.server.url}/v1/adapters", json=body, timeout=60).raise_for_status()
    seen = _after(scene, lambda state: LATE in state["shares"], "a new adapter is not placed")
    after = _cluster(scene)["shares"]
    kept = all(after.get(name) == homes for name, homes in before.items())
    problems = [*seen.pop("problems", []), *([] if kept else ["it forgot where adapters were"])]
    return {"adapters_placed_before": len(before), "problems": problems, **seen}


def _stop_registry(scene: _Scene) -> dict[str, Any]:
    assert scene.postgres is not None
    scene.postgres.stop()
    time.sleep(GONE_S)
    scene.postgres.start()
    seen = _after(scene, lambda state: all(each["is_open"] for each in state["replicas"]), "a replica is not open")
    return {"gone_s": GONE_S, **seen}


def _slow_replica(scene: _Scene) -> dict[str, Any]:
    """One engine is stopped most of the time."""
    pid, stops = _cluster(scene)["replicas"][1]["pid"], 0
    while not scene.is_over.is_set():
        _signal(pid, signal.SIGSTOP)
        scene.is_over.wait(STOPPED_S)
        _signal(pid, signal.SIGCONT)
        stops += 1
        scene.is_over.wait(LET_GO_S)
    return {"stops": stops, "stopped_s_each": STOPPED_S}


def _kill_source(scene: _Scene) -> dict[str, Any]:
    """The replica that has most adapters is killed with its actor, while all requests are there and copies go on."""
    while True:
        accepted = int(httpx.get(f"{scene.server.url}/load", timeout=60).json()["server_load"])
        state = _cluster(scene)
        copies, held = state["copies"], [replica["held"] for replica in state["replicas"]]
        if accepted == REQUESTS and copies["under_way"] and max(held):
            break
        if scene.is_over.is_set():
            return {"problems": [f"no copy was seen under way with {REQUESTS} requests there"]}
    source = held.index(max(held))
    pid = state["replicas"][source]["pid"]
    actor = psutil.Process(pid).parent()
    assert actor is not None  # it is Ray's
    actor.kill()

    def is_back(now: dict[str, Any]) -> bool:
        return now["replicas"][source]["pid"] not in (pid, None) and all(each["is_open"] for each in now["replicas"])

    seen = _after(scene, is_back, "the replica did not come back")
    failed = _cluster(scene)["copies"]["failed"]
    problems = [*seen.pop("problems", []), *([] if failed else ["no copy failed"])]
    return {
        "in_flight": accepted,
        "under_way": copies["under_way"],
        "copies_failed": failed,
        "problems": problems,
        **seen,
    }


FAULTS = (
    _Fault("a replica is killed", "auto", _kill_replica),
    _Fault("the orchestrator is killed", _PLACED, _kill_orchestrator),
    _Fault("the registry is gone for a minute", _PLACED, _stop_registry, with_postgres=True),
    _Fault("a replica is slow", "auto", _slow_replica),
    _Fault("a peer dies while an adapter is fetched", "lorikeet:round-robin", _kill_source, early=True),
)


def _cluster(scene: _Scene) -> dict[str, Any]:
    response = httpx.get(f"{scene.server.url}/v1/cluster", timeout=60)
    response.raise_for_status()
    return dict(response.json())


def _after(scene: _Scene, holds: Callable[[dict[str, Any]], bool], otherwise: str) -> dict[str, Any]:
    """Wait until something holds of the cluster; say how long it took, or what did not happen."""
    start_s = time.monotonic()
    while not holds(_cluster(scene)):
        if time.monotonic() - start_s > 120:
            return {"problems": [otherwise]}
        time.sleep(0.1)
    return {"again_after_s": round(time.monotonic() - start_s, 1)}


def _signal(pid: int, number: signal.Signals) -> None:
    os.kill(pid, number)


def _worker(name: str) -> psutil.Process:
    """Return the process of a Ray actor; its command line is the actor's name."""
    found = [each for each in psutil.process_iter() if any(name in word for word in _words(each))]
    if len(found) != 1:
        raise RuntimeError(f"{len(found)} processes are called {name}")
    return found[0]


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
