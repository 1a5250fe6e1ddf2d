"""Measures the effect on clients when processes die under load: ``python -m benchmarks.faults``.

A server answers many concurrent greedy streaming chats, once undisturbed and once for each fault. All answers are
compared token by token with those of the undisturbed run: a missing token is *lost*, a token that arrives twice is
*repeated*, and an answer with another text or log probability *differs* (a *tie*: the two likeliest tokens are as good
as equally likely there). The longest gap is the longest time for which a client received no token. The model is
SmolLM2-135M-Instruct in fp32, under the base and all sample adapters.

Faults: ``engine`` kills the engine process, ``loader`` the process that reads adapters (three times, while twenty of
them are asked for the first time), ``replica`` one engine of two behind ``--replicas 2`` (Ray), ``orchestrator`` the
actor that places adapters; ``slow`` stops one of two engines again and again, ``hang-up`` has a third of the clients
leave.

Two more tables have the paced executor. ``hostile``: the longest gap of running streams, and the growth of memory,
beside 64 hostile clients (endless heads, bodies of millions of lists, tokenize, adapters that are all header); and the
effect of 2,000 slow connections on 50 clients. ``soak``: all of these together, while engines die and adapters are
loaded and unloaded.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from benchmarks.harness import (
    RunningServer,
    chat_body,
    default_model,
    print_setup,
    print_table,
    running_server,
    sample_adapters,
    sample_flags,
)
from lorikeet.models.config import read_model_config
from lorikeet.workloads.random_adapters import write_random_adapter
from tests.support.hostile_clients import measure_hostile, soak

LOGPROBS = {"logprobs": True, "top_logprobs": 2}
BEGUN_TOKENS = 2
"""A fault happens once every stream has so many tokens."""
TIE = 1e-4
SAME_LOGPROB = 1e-3
LATE_ADAPTERS = 20
LOADER_KILLS = 3
USED = ("kv", "adapter", "inflight")
"""Uses of blocks that a running request has."""
STOPPED_S = 3.0
LET_GO_S = 0.5
BACK_WITHIN_S = 120.0
ORCHESTRATED = "lorikeet:plain,placement=random,routing=table,placement_period_s=2"
"""A preset whose requests depend on the orchestrator: every adapter has one home, by its table."""


class Fault(NamedTuple):
    """Describes a fault.

    Attributes:
        act: does it, given the scene, on a thread of its own; returns a note.
        flags: flags of the server.
        late_adapters: whether the requests are the first for their adapters.
        at_once: whether the fault happens when the requests are sent, instead of when all have begun.
    """

    act: "Callable[[Scene], str]"
    flags: tuple[str, ...] = ()
    late_adapters: bool = False
    at_once: bool = False


class Scene(NamedTuple):
    """Holds the server and the streams of a fault; ``is_over`` is set when all requests have ended."""

    server: RunningServer
    is_over: threading.Event


@dataclass
class Stream:
    """Holds the tokens that a client received.

    Each token has its log probability and its margin over the second likeliest token.
    """

    tokens: list[tuple[str, float]] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    is_done: bool = False
    hung_up: bool = False
    error: str = ""
    last_s: float = 0.0
    longest_gap_s: float = 0.0

    def take(self, data: str) -> None:
        """Note one event of the stream."""
        if data == "[DONE]":
            self.is_done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = str(event["error"])
            return
        for choice in event["choices"]:
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            for token in (choice.get("logprobs") or {}).get("content", ()):
                self._token(token)

    def _token(self, token: dict[str, Any]) -> None:
        self.tokens.append((token["token"], token["logprob"]))
        top = sorted((entry["logprob"] for entry in token["top_logprobs"]), reverse=True)
        self.margins.append(top[0] - top[1] if len(top) > 1 else 0.0)
        now_s = time.monotonic()
        if self.last_s:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self.last_s)
        self.last_s = now_s


class Outcome(NamedTuple):
    """Holds the streams of a run, the number in flight at the fault, a note, and the accounts afterwards."""

    streams: list[Stream]
    in_flight: int
    note: str
    blocks_in_use: int


def main() -> None:
    """Run the faults, or the hostile clients, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("what", nargs="?", default="deaths", choices=["deaths", "hostile", "soak"])
    parser.add_argument("--seconds", type=float, default=20.0, help="hostile: of each row")
    parser.add_argument("--minutes", type=float, default=15.0, help="soak: how long")
    parser.add_argument("--faults", default=",".join(FAULTS), help="some of: " + ", ".join(FAULTS))
    parser.add_argument("--requests", type=int, default=50, help="in flight")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    options = parser.parse_args()
    print_setup()
    if options.what != "deaths":
        with tempfile.TemporaryDirectory(prefix="lorikeet-faults-") as scratch:
            if options.what == "hostile":
                measure_hostile(Path(scratch), options.seconds)
            else:
                soak(Path(scratch), options.minutes)
        return
    table = []
    calm = dict[tuple[tuple[str, ...], bool], Outcome]()
    for name in options.faults.split(","):
        fault = FAULTS[name]
        kind = (fault.flags, fault.late_adapters)
        if kind not in calm:
            calm[kind] = run(fault._replace(act=lambda scene: ""), options.requests, options.tokens)
        table.append(row(name, calm[kind], run(fault, options.requests, options.tokens), options.tokens))
    headings = ["fault", "in flight", "whole", "lost", "repeated", "differ", "ties", "longest gap, s", "then"]
    print_table(f"{options.requests} chats of {options.tokens} tokens, greedy, fp32", headings, table)


def row(name: str, calm: Outcome, disturbed: Outcome, tokens: int) -> list[object]:
    """Return the table row of a fault."""
    streams = [stream for stream in disturbed.streams if not stream.hung_up]
    differ, ties = compare(calm.streams, disturbed.streams)
    whole = sum(each.is_done and not each.error and len(each.tokens) == tokens for each in streams)
    lost = sum(max(0, tokens - len(each.tokens)) for each in streams)
    repeated = sum(max(0, len(each.tokens) - tokens) for each in streams)
    gap_s = max(stream.longest_gap_s for stream in disturbed.streams)
    note = f"{disturbed.note}; {disturbed.blocks_in_use} blocks in use".removeprefix("; ")
    errors = sorted({stream.error for stream in streams if stream.error})
    note += f"; first error: {errors[0][:80]}" if errors else ""
    counts = [disturbed.in_flight, f"{whole} of {len(streams)}", lost, repeated, differ, ties]
    return [name, *counts, f"{gap_s:.1f}", note]


def compare(calm: Sequence[Stream], disturbed: Sequence[Stream]) -> tuple[int, int]:
    """Return the number of streams that differ, and the number that diverge at a tie.

    After a tie, streams cannot be compared.
    """
    differ = ties = 0
    for before, after in zip(calm, disturbed, strict=True):
        for (text, logprob), (other, its), margin in zip(before.tokens, after.tokens, before.margins, strict=False):
            if text != other or abs(logprob - its) > SAME_LOGPROB:
                ties += margin < TIE
                differ += margin >= TIE
                break
    return differ, ties


def run(fault: Fault, requests: int, tokens: int) -> Outcome:
    """Send all requests together to a new server, and cause the fault."""
    with tempfile.TemporaryDirectory(prefix="lorikeet-faults-") as text:
        scratch = Path(text)
        flags = [*fault.flags, *sample_flags(), "--dtype", "float32", "--max-num-seqs", str(requests)]
        flags += ["--store-dir", str(scratch / "store")]
        names = [default_model().name, *sample_adapters()]
        if fault.late_adapters:
            late = write_late_adapters(scratch)
            flags += [flag for name, folder in late.items() for flag in ("--lora-modules", f"{name}={folder}")]
            names = list(late)
        with running_server(flags, scratch / "serve.log") as server:
            scene = Scene(server, threading.Event())
            watch = _Watch(fault, scene, requests)
            bodies = [
                chat_body(names[i % len(names)], f"Tell me about the number {i}.", tokens, **LOGPROBS)
                for i in range(requests)
            ]
            leaving = set(random.Random(5).sample(range(requests), requests // 3)) if fault.act is hang_up else set()
            streams = asyncio.run(_stream_all(server.url, bodies, watch, leaving))
            scene.is_over.set()
            note = watch.outcome()
            return Outcome(streams, watch.in_flight, note, blocks_in_use(server.url))


def write_late_adapters(scratch: Path) -> dict[str, Path]:
    """Write adapters of rank 64 and return their folders by name."""
    geometry = read_model_config(default_model()).geometry(4)
    folders = {f"late-{number}": scratch / f"late-{number}" for number in range(LATE_ADAPTERS)}
    return {name: write_random_adapter(path, geometry, 64, seed=i) for i, (name, path) in enumerate(folders.items())}


async def _stream_all(url: str, bodies: Sequence[dict[str, Any]], watch: "_Watch", leaving: set[int]) -> list[Stream]:
    """Stream all answers concurrently, each on a separate connection. Clients that hang up do so after a few tokens."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:

        async def one(number: int) -> Stream:
            stream = watch.streams[number]
            stays = number not in leaving
            with suppress(httpx.HTTPError):
                async with http.stream("POST", "/v1/chat/completions", json=bodies[number]) as response:
                    if response.status_code != 200:
                        stream.error = f"status {response.status_code}"
                        return stream
                    async for line in response.aiter_lines():
                        if line.startswith("data: "):
                            stream.take(line.removeprefix("data: "))
                            watch.saw()
                        if not stays and len(stream.tokens) > number % 10:
                            stream.hung_up = True
                            return stream
            if not stream.is_done and not stream.error:
                stream.error = "the connection ended early"
            return stream

        watch.sent()
        return list(await asyncio.gather(*(one(number) for number in range(len(bodies)))))


class _Watch:
    """Observes all streams, and causes the fault once, on a thread."""

    def __init__(self, fault: Fault, scene: Scene, requests: int) -> None:
        self._fault = fault
        self._scene = scene
        self.streams = [Stream() for _ in range(requests)]
        self._thread: threading.Thread | None = None
        self._note = ""
        self.in_flight = 0

    def sent(self) -> None:
        """Note that all requests are being sent."""
        if self._fault.at_once:
            self._begin()

    def saw(self) -> None:
        """Note that an event has arrived."""
        if self._thread is None and all(len(each.tokens) >= BEGUN_TOKENS for each in self.streams):
            self._begin()

    def outcome(self) -> str:
        """Return the note when it is over."""
        if self._thread is None:
            return "streams had ended before all had begun"
        self._thread.join()
        return self._note

    def _begin(self) -> None:
        self.in_flight = sum(each.finish_reason is None for each in self.streams)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._note = self._fault.act(self._scene)
        except Exception as error:  # the table shows the error
            self._note = repr(error)


def blocks_in_use(url: str, within_s: float = 60.0) -> int:
    """Return the number of blocks that are still in use after all requests have ended."""
    until_s = time.monotonic() + within_s
    while True:
        used = 0.0
        for line in httpx.get(f"{url}/metrics", timeout=60).text.splitlines():
            if line.startswith("lorikeet:blocks{") and any(f'use="{use}"' in line for use in USED):
                used += float(line.rpartition(" ")[2])
        if not used or time.monotonic() > until_s:
            return int(used)
        time.sleep(0.05)


# --- what goes wrong ---------------------------------------------------------------------------------


def kill_engine(scene: Scene) -> str:
    """Kill the engine process."""
    _child(scene, "lorikeet.engine").kill()
    return ""


def kill_loader(scene: Scene) -> str:
    """Kill the process that reads adapters whenever there is one."""
    killed = set[int]()
    while len(killed) < LOADER_KILLS and not scene.is_over.is_set():
        with suppress(StopIteration, psutil.Error):
            loader = _child(scene, "lorikeet.worker.transfer.loader_process")
            if loader.pid not in killed:
                loader.kill()
                killed.add(loader.pid)
        time.sleep(0.05)
    return f"killed {len(killed)} times"


def kill_replica(scene: Scene) -> str:
    """Kill the engine of the first replica."""
    os.kill(_cluster(scene)["replicas"][0]["pid"], signal.SIGKILL)
    return _back(scene, lambda state: state["replicas"][0]["restarts"] == 1)


def kill_orchestrator(scene: Scene) -> str:
    """Kill the actor that places adapters. Afterwards its state must be complete."""
    before = _cluster(scene)["shares"]
    workers = [each for each in psutil.process_iter() if any("OrchestratorActor" in word for word in _words(each))]
    for worker in workers:
        worker.kill()
    scene.is_over.wait()
    return f"{len(workers)} killed, " + _back(scene, lambda state: state["shares"].keys() >= before.keys())


def slow_replica(scene: Scene) -> str:
    """Stop one engine most of the time."""
    pid = _cluster(scene)["replicas"][1]["pid"]
    stops = 0
    while not scene.is_over.is_set():
        os.kill(pid, signal.SIGSTOP)
        scene.is_over.wait(STOPPED_S)
        os.kill(pid, signal.SIGCONT)
        stops += 1
        scene.is_over.wait(LET_GO_S)
    return f"stopped {stops} times for {STOPPED_S:g} s"


def hang_up(scene: Scene) -> str:
    """Do nothing, because the clients hang up."""
    return "a third left"


def _child(scene: Scene, module: str) -> psutil.Process:
    children = psutil.Process(scene.server.process.pid).children(recursive=True)
    return next(child for child in children if module in _words(child))


def _cluster(scene: Scene) -> dict[str, Any]:
    response = httpx.get(f"{scene.server.url}/v1/cluster", timeout=60)
    response.raise_for_status()
    return dict(response.json())


def _back(scene: Scene, holds: Callable[[dict[str, Any]], bool]) -> str:
    """Wait until a condition holds in the cluster, and return the waiting time as text."""
    began_s = time.monotonic()
    while not holds(_cluster(scene)):
        if time.monotonic() - began_s > BACK_WITHIN_S:
            return f"not back after {BACK_WITHIN_S:.0f} s"
        time.sleep(0.1)
    return f"back after {time.monotonic() - began_s:.1f} s"


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


_TWO = ("--replicas", "2")
FAULTS = {
    "engine": Fault(kill_engine),
    "loader": Fault(kill_loader, late_adapters=True, at_once=True),
    "hang-up": Fault(hang_up, at_once=True),
    "replica": Fault(kill_replica, _TWO),
    "slow": Fault(slow_replica, _TWO),
    "orchestrator": Fault(kill_orchestrator, (*_TWO, "--preset", ORCHESTRATED)),
}


if __name__ == "__main__":
    main()
