"""Hostile clients beside well-behaved ones; the tables ``hostile`` and ``soak`` of :mod:`benchmarks.faults`.

The server has the paced executor, so that the machine's cores are left to the API process and its helpers. Well-behaved
and hostile clients are processes of their own.
"""

import asyncio
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil

from benchmarks.harness import (
    RunningServer,
    chat_body,
    default_model,
    print_table,
    running_server,
    sample_adapters,
    sample_flags,
)
from lorikeet.core.geometry import LORA_MODULES
from lorikeet.core.plan import KernelForm
from lorikeet.costs.profile import Constant, CostProfile, Curve, Link, LoraCosts, StepCosts, Transfers, encode_profile
from lorikeet.models.config import read_model_config

STREAMS, HOSTILE, SLOW, GOOD = 8, 64, 2_000, 50
STEP_S = 0.01
GAP_AIM, GROWTH_AIM = "0.1 at P99.9, 0.5 at most", "300"
TOKENS = 200
ATTEMPT_EVERY_S = 0.5
"""Pause of a hostile client between two requests: it is to exhaust the server, not the machine."""
ENGINE_DIES_EVERY_S = 60.0
_SETTLE_S = 10.0
_MB = 1e6
_SPAWN = multiprocessing.get_context("spawn")


# --- the server --------------------------------------------------------------------------------------


def paced_profile() -> CostProfile:
    """Return a profile of the default model whose steps take ``STEP_S`` and a little for each token."""

    def seconds(value: float) -> Constant:
        return Constant(value, "s")

    config = read_model_config(default_model())
    link = Link(seconds(0.001), Constant(10e9, "bytes/s"))
    zero = seconds(0.0)
    return CostProfile(
        name="paced",
        device="none",
        model="SmolLM2-135M",
        tensor_parallel=1,
        origin="made up",
        made="2026-11-29",
        geometry=config.geometry(2),
        vocabulary=config.vocab_size,
        max_model_len=config.context_tokens,
        pool_bytes=512 * 2**20,
        lora_modules=LORA_MODULES,
        step=StepCosts(
            Curve("tokens", ((1, STEP_S), (512, 5 * STEP_S))),
            Curve("rows", ((1, 0.0),)),
            zero,
            zero,
            zero,
            zero,
            zero,
            zero,
        ),
        lora={KernelForm.UNPADDED: LoraCosts(zero, zero, zero, zero)},
        transfers=Transfers(link, link, link, link),
    )


@contextmanager
def paced_server(scratch: Path, *flags: str) -> Iterator[RunningServer]:
    """Start a server with the paced executor and the sample adapters."""
    (scratch / "profile.toml").write_text(encode_profile(paced_profile()))
    paced = ["--executor", "paced", "--profile", str(scratch / "profile.toml")]
    store = ["--store-dir", str(scratch / "store"), "--adapter-dir", str(scratch / "adapters")]
    one_by_one = {"LORIKEET_ENGINE__NUM_SCHEDULER_STEPS": "1"}
    command = [*paced, *store, *sample_flags(), *flags]
    with running_server(command, scratch / "serve.log", environment=one_by_one) as server:
        yield server


class Memory:
    """Samples the memory of the server's processes until it is closed."""

    def __init__(self, server: RunningServer) -> None:
        self._process = psutil.Process(server.process.pid)
        self._over = threading.Event()
        self.samples: list[tuple[float, int, int]] = []
        """(when, bytes of the API process, bytes of all)."""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._over.set()
        self._thread.join()

    def most_bytes(self) -> int:
        """Return the most that all processes had together."""
        return max(total for _, _, total in self.samples)

    def _run(self) -> None:
        while not self._over.wait(0.2):
            own, total = self._process.memory_info().rss, 0
            for process in [self._process, *self._process.children(recursive=True)]:
                with suppress(psutil.Error):
                    total += process.memory_info().rss
            self.samples.append((time.monotonic(), own, total))


# --- well-behaved clients ----------------------------------------------------------------------------


class Received(NamedTuple):
    """What well-behaved clients received: gaps within their streams, and how many streams were whole, and were not."""

    gaps_s: list[float]
    whole: int
    broken: list[str]


class Worker:
    """Clients in a process of their own, from now until :meth:`stop`.

    Args:
        run: a function of this module, called with the arguments, an event that ends it, and a queue. It puts None into
            the queue when it begins, and its result when it ends.
        arguments: of it.
    """

    def __init__(self, run: Callable[..., None], *arguments: object) -> None:
        self._stop: Event = _SPAWN.Event()
        self._result: Queue[object] = _SPAWN.Queue()
        # It ends with this process, whatever happens.
        self._process = _SPAWN.Process(target=run, args=(*arguments, self._stop, self._result), daemon=True)
        self._process.start()
        self._result.get(timeout=300)  # it has begun

    def stop(self) -> object:
        """End it and return its result."""
        self._stop.set()
        result = self._result.get(timeout=300)
        self._process.join()
        return result


def stream_until(url: str, models: Sequence[str], clients: int, stop: Event, result: "Queue[object]") -> None:
    """Stream one answer after the other with so many clients."""
    received = Received([], 0, [])

    async def one(http: httpx.AsyncClient, number: int) -> tuple[int, str]:
        body = chat_body(models[number % len(models)], f"Tell me about {number}.", TOKENS)
        tokens, last_s, done = 0, 0.0, False
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                now_s = time.monotonic()
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: ") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                    if last_s:
                        received.gaps_s.append(now_s - last_s)
                    tokens, last_s = tokens + 1, now_s
                elif line.startswith('data: {"error"'):
                    return tokens, line[:200]
        return tokens, "" if done else f"status {response.status_code} and {tokens} tokens"

    async def client(http: httpx.AsyncClient, number: int) -> int:
        whole = 0
        while not stop.is_set():
            try:
                _, error = await one(http, number)
            except httpx.HTTPError as failure:
                error = repr(failure)
            whole += not error
            if error:
                received.broken.append(error)
                await asyncio.sleep(0.1)
        return whole

    async def all_clients() -> int:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
            return sum(await asyncio.gather(*(client(http, number) for number in range(clients))))

    result.put(None)
    whole = asyncio.run(all_clients())
    result.put(received._replace(whole=whole))


# --- hostile clients ---------------------------------------------------------------------------------


def write_files(folder: Path) -> None:
    """Write adapters: the samples, and two that nobody should read: all header, and with a pattern of 10^9 repeats."""
    for name, sample in sample_adapters().items():
        shutil.copytree(sample, folder / name)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
    for name, target in (("header", ["q_proj"]), ("pattern", "((a{1000}){1000}){1000}")):
        (folder / name).mkdir(parents=True)
        (folder / name / "adapter_config.json").write_text(json.dumps(config | {"target_modules": target}))
        count = 1_500_000 if name == "header" else 1
        tensors = ",".join(
            f'"model.layers.{number}.x":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for number in range(count)
        )
        text = f"{{{tensors}}}".encode()
        (folder / name / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)


def _heads(folder: str) -> list[bytes]:
    many = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a:b\r\n" * (6 * 2**20)
    return [many, b"GET /health HTTP/1.1\r\nHost: localhost\r\nx: " + b"a" * (64 * 2**20)]


def _bodies(folder: str) -> list[bytes]:
    message, chat = '{"role":"user","content":""}', "/v1/chat/completions"
    messages = ",".join([message] * 280_000)
    keys = ",".join(f'"k{number}":{number}' for number in range(450_000))
    return [
        _post("/v1/completions", b'{"prompt":[' + b",".join([b"[1]"] * 2_000_000) + b"]}"),
        _post(chat, f'{{"messages":[{messages}]}}'.encode()),
        _post(chat, f'{{"messages":[{message}],{keys}}}'.encode()),
        _post("/v1/completions", b'{"prompt":"hello","x":' + b"[" * 4_000_000 + b"]" * 4_000_000 + b"}"),
    ]


def _tokenize(folder: str) -> list[bytes]:
    text = "".join(random.Random(1).choices("abcdefghij klmnop", k=8_000_000))
    return [_post("/tokenize", json.dumps({"prompt": text}).encode())]


def _files(folder: str) -> list[bytes]:
    return [
        _post("/v1/adapters", json.dumps({"name": f"{name}-{number}", "source": f"{folder}/{name}"}).encode())
        for number in range(HOSTILE)
        for name in ("header", "pattern")
    ]


def _post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


KINDS: dict[str, Callable[[str], list[bytes]]] = {
    "heads": _heads,
    "bodies": _bodies,
    "tokenize": _tokenize,
    "files": _files,
}


def attack_until(
    url: str, kinds: Sequence[str], folder: str, clients: int, stop: Event, result: "Queue[object]"
) -> None:
    """Send hostile requests with so many clients; the result counts the answers."""
    os.nice(10)  # the clients are not what is measured
    address = urlsplit(url)
    requests = [request for kind in kinds for request in KINDS[kind](folder)]
    answers: Counter[str] = Counter()

    async def once(request: bytes) -> str:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            with suppress(ConnectionError):
                for start in range(0, len(request), 2**18):
                    writer.write(request[start : start + 2**18])
                    await writer.drain()
                    if reader.at_eof():
                        break
            async with asyncio.timeout(120):
                return (await reader.readline())[9:12].decode() or "closed"
        except ConnectionError:
            return "closed"
        except TimeoutError:
            return "no answer in 120 s"
        finally:
            writer.close()

    async def client(number: int) -> None:
        chosen = random.Random(number)
        while not stop.is_set():
            try:
                answers[await once(chosen.choice(requests))] += 1
            except OSError as error:
                answers[type(error).__name__] += 1
            await asyncio.sleep(ATTEMPT_EVERY_S)

    async def all_clients() -> None:
        await asyncio.gather(*(client(number) for number in range(clients)))

    result.put(None)
    asyncio.run(all_clients())
    result.put(dict(answers))


class Slow(NamedTuple):
    """What became of slow connections: the most that were open, those that are at the end, and how they ended."""

    most: int
    left: int
    ends: dict[str, int]


def dawdle_until(url: str, connections: int, again: bool, stop: Event, result: "Queue[object]") -> None:
    """Hold slow connections: idle, with half a head, with a head or a body that comes byte by byte.

    Those that were closed come ``again``, or do not.
    """
    os.nice(10)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    address = urlsplit(url)
    open_now, most, ends = 0, 0, Counter[str]()
    starts = [
        b"",
        b"GET /health HTTP/1.1\r\nHost: local",
        b"GET /health HTTP/1.1\r\n",
        _post("/tokenize", b"x" * 500)[:-490],
    ]

    async def one(number: int) -> None:
        nonlocal open_now, most
        await asyncio.sleep(number / connections * 5)
        try:
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
        except OSError as error:
            ends[type(error).__name__] += 1
            return
        open_now += 1
        most = max(most, open_now)
        kind = number % len(starts)
        answer = asyncio.ensure_future(reader.readline())
        try:
            writer.write(starts[kind])
            while not stop.is_set():
                done, _ = await asyncio.wait({answer}, timeout=2.0)
                if done:
                    ends[(answer.result()[9:12].decode() or "closed")] += 1
                    break
                if kind >= 2:
                    writer.write(b"x")
        except OSError:
            ends["closed"] += 1
        finally:
            answer.cancel()
            open_now -= not stop.is_set()
            writer.close()

    async def repeated(number: int) -> None:
        await one(number)
        while again and not stop.is_set():
            await one(number)

    async def all_connections() -> None:
        await asyncio.gather(*(repeated(number) for number in range(connections)), return_exceptions=True)
        while not stop.is_set():
            await asyncio.sleep(0.1)

    result.put(None)
    asyncio.run(all_connections())
    result.put(Slow(most, open_now, dict(ends)))


# --- the tables --------------------------------------------------------------------------------------


def measure_hostile(scratch: Path, seconds: float) -> None:
    """Print what eight streams notice of each kind of hostile client, in turns with undisturbed runs."""
    write_files(scratch / "adapters")
    table: list[list[object]] = []
    with paced_server(scratch) as server:
        for kind in (*KINDS, "all"):
            table.append(_gaps_row("undisturbed", server, seconds, lambda: None))
            kinds = list(KINDS) if kind == "all" else [kind]
            start = lambda kinds=kinds: Worker(  # noqa: E731
                attack_until, server.url, kinds, str(scratch / "adapters"), HOSTILE
            )
            table.append(_gaps_row(kind, server, seconds, start))
    table.append(["aim", "", "", *GAP_AIM.split(", "), GROWTH_AIM, "all"])
    headings = ["hostile clients", "answers", "gap median, s", "gap P99.9, s", "longest gap, s", "growth, MB", "whole"]
    print_table(f"{STREAMS} streams beside {HOSTILE} hostile clients, {seconds:g} s each", headings, table)
    with paced_server(scratch, "--store-dir", str(scratch / "store-2")) as server:
        print_slow(server, max(seconds, 40.0))


def _gaps_row(name: str, server: RunningServer, seconds: float, start: Callable[[], Worker | None]) -> list[object]:
    """Run streams beside hostile clients, and return what stands in the table."""
    good = Worker(stream_until, server.url, [default_model().name, *sample_adapters()], STREAMS)
    time.sleep(3.0)  # they have begun
    memory = Memory(server)
    time.sleep(1.0)
    before_bytes = memory.most_bytes()
    hostile = start()
    time.sleep(seconds)
    answers = hostile.stop() if hostile is not None else {}
    received = good.stop()
    memory.close()
    assert isinstance(received, Received)
    assert isinstance(answers, dict)
    told = ", ".join(f"{count} {answer}" for answer, count in sorted(answers.items()))
    growth = f"{(memory.most_bytes() - before_bytes) / _MB:.0f}"
    return [name, told, *_gap_cells(received.gaps_s), growth, _whole(received)]


def print_slow(server: RunningServer, seconds: float) -> None:
    """Print what good clients notice of slow connections."""
    models = [default_model().name, *sample_adapters()]
    calm = Worker(stream_until, server.url, models, GOOD)
    time.sleep(10.0)
    undisturbed = calm.stop()
    slow = Worker(dawdle_until, server.url, SLOW, False)
    good = Worker(stream_until, server.url, models, GOOD)
    time.sleep(seconds)
    received, held = good.stop(), slow.stop()
    assert isinstance(undisturbed, Received)
    assert isinstance(received, Received)
    assert isinstance(held, Slow)
    ends = ", ".join(f"{count} {end}" for end, count in sorted(held.ends.items()))
    table: list[list[object]] = [
        ["undisturbed", "", "", "", *_gap_cells(undisturbed.gaps_s), _whole(undisturbed)],
        [f"{SLOW} slow", held.most, held.left, ends, *_gap_cells(received.gaps_s), _whole(received)],
        ["aim", "", 0, "", "", "", "", "all"],
    ]
    headings = [
        "connections",
        "open at most",
        "left",
        "ends",
        "gap median, s",
        "gap P99.9, s",
        "longest gap, s",
        "whole",
    ]
    print_table(f"{GOOD} good clients beside slow connections, {seconds:.0f} s", headings, table)


def _gap_cells(gaps_s: Sequence[float]) -> list[str]:
    return [f"{value:.3f}" for value in (*np.quantile(gaps_s, (0.5, 0.999)), max(gaps_s))] if gaps_s else ["", "", ""]


def _whole(received: Received) -> str:
    broken = f"; first broken: {received.broken[0]}" if received.broken else ""
    return f"{received.whole} of {received.whole + len(received.broken)}{broken}"


# --- soak --------------------------------------------------------------------------------------------


def soak(scratch: Path, minutes: float) -> None:
    """Let all of it happen at once, and print what is left of it."""
    write_files(scratch / "adapters")
    folder, models = str(scratch / "adapters"), [default_model().name, *sample_adapters()]
    with paced_server(scratch, "--host-memory", "256MiB") as server:
        descriptors = psutil.Process(server.process.pid).num_fds()
        memory = Memory(server)
        good = Worker(stream_until, server.url, models, STREAMS)
        others = [
            Worker(attack_until, server.url, list(KINDS), folder, HOSTILE // 4),
            Worker(dawdle_until, server.url, SLOW // 4, True),
            Worker(come_and_go_until, server.url, models, folder),
        ]
        until_s, kills = time.monotonic() + 60 * minutes, 0
        while time.monotonic() + ENGINE_DIES_EVERY_S < until_s:
            time.sleep(ENGINE_DIES_EVERY_S)
            kills += _kill_engine(server)
        time.sleep(max(0.0, until_s - time.monotonic()))
        received, told = good.stop(), [other.stop() for other in others]
        time.sleep(_SETTLE_S)
        memory.close()
        counters = in_use(server.url)
        left = psutil.Process(server.process.pid).num_fds() - descriptors
    assert isinstance(received, Received)
    tracebacks = (scratch / "serve.log").read_text(errors="replace").count("Traceback (most recent call last)")
    rows: list[list[object]] = [
        ["streams that were whole", _whole(received), "all"],
        ["longest gap (the engine's restarts included), s", f"{max(received.gaps_s):.1f}", ""],
        ["engine killed", kills, ""],
        ["answers to hostile clients", str(told[0]), "no 5xx but 503"],
        ["slow connections", str(told[1]), ""],
        ["answers to those that come and go", str(told[2]), "no 5xx but 503"],
        ["requests and blocks in use afterwards", str(counters), "{}"],
        ["growth after the first minute, MB: API process, all", growth(memory.samples), "flat"],
        ["descriptors more than before any helper process", left, "10 at most"],
        ["tracebacks in the log", tracebacks, 0],
    ]
    print_table(f"{minutes:g} minutes of all of it at once", ["what", "found", "aim"], rows)


def come_and_go_until(url: str, models: Sequence[str], folder: str, stop: Event, result: "Queue[object]") -> None:
    """Ask, hang up, and load and unload adapters; the result counts the answers."""
    os.nice(5)
    answers: Counter[str] = Counter()
    folders = [f"{folder}/{name}" for name in sample_adapters()]

    async def one(http: httpx.AsyncClient, chosen: random.Random, number: int) -> str:
        if chosen.random() < 0.2:
            name = f"loaded-{number}"
            body = {"lora_name": name, "lora_path": chosen.choice(folders), "load_inplace": True}
            loaded = await http.post("/v1/load_lora_adapter", json=body)
            await http.post("/v1/unload_lora_adapter", json={"lora_name": name})
            return f"load {loaded.status_code}"
        body = chat_body(chosen.choice(models), "Tell me " * chosen.randint(1, 300), chosen.randint(1, TOKENS))
        leaves_after = chosen.choice((None, None, chosen.randint(1, 50)))
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = 0
            async for _ in response.aiter_lines():
                lines += 1
                if leaves_after is not None and lines > leaves_after:
                    return "left"
        return str(response.status_code)

    async def client(http: httpx.AsyncClient, number: int) -> None:
        chosen = random.Random(number)
        while not stop.is_set():
            try:
                answers[await one(http, chosen, number)] += 1
            except httpx.HTTPError as error:
                answers[type(error).__name__] += 1
            await asyncio.sleep(chosen.uniform(0.0, 0.5))

    async def all_clients() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)) as http:
            await asyncio.gather(*(client(http, number) for number in range(8)))

    result.put(None)
    asyncio.run(all_clients())
    result.put(dict(answers))


def in_use(url: str, within_s: float = 60.0) -> dict[str, float]:
    """Return requests and blocks that are in use although nothing should be: all that is not 0 after a while."""
    pattern = re.compile(r'(vllm:num_requests_(?:running|waiting)\{|lorikeet:blocks\{.*use="(?:kv|adapter|inflight)")')
    until_s = time.monotonic() + within_s
    while True:
        lines = [line for line in httpx.get(f"{url}/metrics", timeout=60).text.splitlines() if pattern.match(line)]
        used = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
        found = {name: value for name, value in used.items() if value}
        if not found or time.monotonic() > until_s:
            return found
        time.sleep(0.5)


def growth(samples: Sequence[tuple[float, int, int]]) -> str:
    """Return by how much the processes grew: medians of the second minute, or second half, and of the last seconds."""
    began_s, ended_s = samples[0][0], samples[-1][0]
    first_s = min(60.0, (ended_s - began_s) / 2)
    window_s = min(60.0, (ended_s - began_s - first_s) / 2)
    early = [each for each in samples if first_s <= each[0] - began_s <= first_s + window_s]
    late = [each for each in samples if ended_s - each[0] <= window_s]
    grown = [
        float(np.median([each[part] for each in late]) - np.median([each[part] for each in early])) for part in (1, 2)
    ]
    return ", ".join(f"{each / _MB:+.0f}" for each in grown)


def _kill_engine(server: RunningServer) -> int:
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with suppress(psutil.Error):
            if "lorikeet.engine" in child.cmdline():
                child.send_signal(signal.SIGKILL)
                return 1
    return 0
