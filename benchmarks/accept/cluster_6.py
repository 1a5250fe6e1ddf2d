"""cluster.6: two servers of vLLM's CPU build behind ``lorikeet route``, one of them killed and started again."""

import asyncio
import json
import os
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from benchmarks.accept.lines import Result, line
from benchmarks.accept.models import default_model
from benchmarks.accept.runs import StoredRuns
from benchmarks.accept.server import LORIKEET, RunningServer, free_port, running_server
from benchmarks.vllm_environment import STEPS, vllm_python
from lorikeet.bench.adapters import write_random_adapter
from lorikeet.models.config import read_model_config

RANKS = {"a8": 8, "b16": 16, "c32": 32, "d64": 64}
REQUESTS, AT_ONCE, TOKENS = 100, 8, 48
KILL_AFTER, AFTER_RETURN = 20, 30
"""The backend is killed when so many answers are complete; so many requests wait until it is back."""
ROWS = {"one home": "loraserve:random", "everywhere": "lorikeet:round-robin"}
SEAM_TOKENS = 2
"""By so many a whole text's own tokens may differ from those that were generated: at its seam text is split anew."""

_READY_S = 900.0
_GAP_S = 0.02
_UNDER_WAY = AT_ONCE * 3 // 4
"""The kill waits until so many streams have some of their tokens and not all: as a rule some are the backend's."""
_SUBJECTS = ("the tide", "a lorikeet", "bread", "the moon", "a bicycle", "copper", "the north wind", "a violin")


@line(
    "cluster.6",
    title="Two vLLM servers behind lorikeet route, one killed and started again among 100 requests",
    bound=f"adapters are loaded where they are placed and nowhere else; all {REQUESTS} greedy streams are whole: end "
    f"mark, {TOKENS} tokens by the servers' counts, and a text of as many (± {SEAM_TOKENS} at its seam); cut streams "
    "went on, and the server that came back loads its adapters and answers again",
)
def run(runs: StoredRuns) -> Result:
    """Placement first, then the same requests three times: twice undisturbed, then with the kill."""
    done = runs.get("all", _measure)
    whole, placed = done["killed"], done["placed"]
    failures = [
        *(f"{name} is at {where}, and belongs to {placed['shares'][name]}" for name, where in placed["wrong"].items()),
        *(f"request {number}: {problem}" for number, problem in whole["problems"].items()),
        *([] if whole["continued"] else ["no stream was cut"]),
        *([] if whole["answers_after_return"] else ["nothing was answered by the server that came back"]),
        *(f"undisturbed request {number}: {problem}" for number, problem in done["problems"].items()),
    ]
    return Result(
        figure={
            "requests": REQUESTS,
            "whole": REQUESTS - len(whole["problems"]),
            "streams_that_went_on": whole["continued"],
            "back_after_s": whole["back_after_s"],
            "answers_of_the_server_that_came_back": whole["answers_after_return"],
            "adapters_where_placed": f"{len(RANKS) - len(placed['wrong'])} of {len(RANKS)}",
            "equal_to_undisturbed": whole["equal"],
            "undisturbed_equal_to_undisturbed": done["equal"],
        },
        passed=not failures,
        cause="; ".join(failures[:5]),
        notes=f"{STEPS[1][0]}, fp32, greedy, SmolLM2-135M-Instruct, a core each; random adapters of ranks "
        f"{', '.join(map(str, RANKS.values()))}, {AT_ONCE} requests at once, chat and completions by turns; equal: the "
        "same text as in a run without a kill; vLLM itself says other things in other batches, as the second such run "
        "shows",
        details=done,
    )


@dataclass
class _Stream:
    """What one client received."""

    text: str = ""
    tokens: int | None = None
    done: int = 0
    finish: str | None = None
    error: str | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether some has come, and not all."""
        return bool(self.text) and self.finish is None

    def problem(self, tokenizer: Tokenizer) -> str | None:
        """Return what is missing from a whole answer, None if nothing is."""
        if self.error is not None:
            return self.error
        if self.done != 1 or self.finish != "length":
            return f"{self.done} end marks, finish reason {self.finish}"
        if self.tokens != TOKENS:
            return f"{self.tokens} tokens counted"
        own = len(tokenizer.encode(self.text, add_special_tokens=False).ids)
        return None if abs(own - TOKENS) <= SEAM_TOKENS else f"a text of {own} tokens"


def _measure() -> dict[str, Any]:
    python, model = vllm_python(), default_model()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ports = (free_port(), free_port())
    with tempfile.TemporaryDirectory(prefix="lorikeet-cluster6-") as text, ExitStack() as stack:
        scratch = Path(text)
        geometry = read_model_config(model).geometry(4)
        for seed, (name, rank) in enumerate(RANKS.items()):
            write_random_adapter(scratch / name, geometry, rank, seed=seed, b_std=0.02, base_name=model.name)

        def start(number: int) -> RunningServer:
            return stack.enter_context(_vllm(python, model, ports[number], number, scratch / f"vllm-{number}.log"))

        backends = [start(number) for number in range(2)]
        with _router(backends, scratch, ROWS["one home"]) as router:
            placed = _placed(router, backends)
        with _router(backends, scratch, ROWS["everywhere"]) as router:
            texts = [_run(router, tokenizer, range(REQUESTS)) for _ in range(2)]
            killed = _with_a_kill(router, backends, tokenizer, start)
    problems = {str(number): each for run in texts for number, each in run["problems"].items()}
    killed["equal"] = _equal(texts[0]["texts"], killed.pop("texts"))
    equal = _equal(texts[0]["texts"], texts[1]["texts"])
    return {"placed": placed, "problems": problems, "equal": equal, "killed": killed}


def _equal(left: Sequence[str], right: Sequence[str]) -> int:
    return sum(one == other for one, other in zip(left, right, strict=True))


@contextmanager
def _vllm(python: Path, model: Path, port: int, core: int, log: Path) -> Iterator[RunningServer]:
    flags = (
        f"--model {model} --served-model-name {model.name} --port {port} --dtype float32 --enforce-eager "
        f"--max-model-len 1024 --max-num-seqs 16 --enable-lora --max-loras {len(RANKS)} --max-cpu-loras {len(RANKS)} "
        f"--max-lora-rank {max(RANKS.values())}"
    ).split()
    environment = {
        **os.environ,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "HF_HUB_OFFLINE": "1",
    }
    command = (str(python), "-m", "vllm.entrypoints.openai.api_server")
    with running_server(
        flags, log, command=command, environment=environment, port=port, ready_within_s=_READY_S
    ) as server:
        yield server


@contextmanager
def _router(backends: Sequence[RunningServer], scratch: Path, row: str) -> Iterator[RunningServer]:
    flags = [flag for backend in backends for flag in ("--backend", backend.url)]
    flags += [flag for name in RANKS for flag in ("--lora-modules", f"{name}={scratch / name}")]
    command = (str(LORIKEET), "route")
    with running_server([*flags, "--preset", row], scratch / "route.log", command=command) as router:
        yield router


def _cluster(router: RunningServer) -> dict[str, Any]:
    return dict(httpx.get(f"{router.url}/v1/cluster", timeout=60).json())


def _loaded(backend: RunningServer) -> set[str]:
    cards = httpx.get(f"{backend.url}/v1/models", timeout=60).json()["data"]
    return {card["id"] for card in cards if card["parent"] is not None}


def _placed(router: RunningServer, backends: Sequence[RunningServer]) -> dict[str, Any]:
    """Ask every adapter twice; return who belongs where, and who is elsewhere or nowhere."""
    for name in [*RANKS, *RANKS]:
        router.complete(name, "The lorikeet is", max_tokens=4, temperature=0)
    cluster = _cluster(router)
    url = {replica["id"]: replica["address"] for replica in cluster["replicas"]}
    shares = {name: sorted(url[replica] for replica in shares) for name, shares in cluster["shares"].items()}
    there = {name: sorted(each.url for each in backends if name in _loaded(each)) for name in RANKS}
    return {"shares": shares, "wrong": {name: there[name] for name in RANKS if there[name] != shares[name]}}


# --- requests ----------------------------------------------------------------------------------------


def _run(
    router: RunningServer,
    tokenizer: Tokenizer,
    numbers: Sequence[int],
    after_some: Callable[[Sequence[_Stream]], Awaitable[None]] | None = None,
) -> dict[str, Any]:
    """Send requests, so many at once; ``after_some`` is begun when ``KILL_AFTER`` answers are complete.

    It is given all streams.
    """
    streams = asyncio.run(_send(router.url, numbers, after_some))
    found = {number: stream.problem(tokenizer) for number, stream in zip(numbers, streams, strict=True)}
    problems = {str(number): problem for number, problem in found.items() if problem is not None}
    return {"texts": [stream.text for stream in streams], "problems": problems}


async def _send(
    url: str, numbers: Sequence[int], after_some: Callable[[Sequence[_Stream]], Awaitable[None]] | None
) -> list[_Stream]:
    gate, complete, some = asyncio.Semaphore(AT_ONCE), Counter[str](), asyncio.Event()
    streams = [_Stream() for _ in numbers]

    async def meanwhile() -> None:
        await some.wait()
        if after_some is not None:
            await after_some(streams)

    async with httpx.AsyncClient(base_url=url, timeout=600) as http:

        async def one(number: int, stream: _Stream) -> None:
            async with gate:
                await _ask(http, number, stream)
            complete["answers"] += 1
            if complete["answers"] == KILL_AFTER:
                some.set()

        beside = asyncio.create_task(meanwhile())
        await asyncio.gather(*map(one, numbers, streams))
        some.set()
        await asyncio.wait_for(beside, 60)  # what is awaited there never came
    return streams


async def _ask(http: httpx.AsyncClient, number: int, stream: _Stream) -> None:
    text = f"Tell me {number + 2} things about {_SUBJECTS[number % len(_SUBJECTS)]}."
    body: dict[str, Any] = {
        "model": list(RANKS)[number % len(RANKS)],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "skip_special_tokens": False,  # so that every token is in the text
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    is_chat = number % 8 < 4
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    body |= {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    try:
        async with http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                stream.error = f"{response.status_code}: {(await response.aread()).decode()[:300]}"
                return
            async for row in response.aiter_lines():
                if row.startswith("data: "):
                    _take(stream, row.removeprefix("data: "))
    except httpx.HTTPError as error:
        stream.error = f"{type(error).__name__}: {error}"


def _take(stream: _Stream, data: str) -> None:
    if data == "[DONE]":
        stream.done += 1
        return
    event = json.loads(data)
    if "error" in event:
        stream.error = str(event["error"])
        return
    if event.get("usage"):
        stream.tokens = event["usage"]["completion_tokens"]
    for choice in event["choices"]:
        stream.text += (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""
        stream.finish = choice.get("finish_reason") or stream.finish


# --- the kill ----------------------------------------------------------------------------------------


def _with_a_kill(
    router: RunningServer,
    backends: Sequence[RunningServer],
    tokenizer: Tokenizer,
    start: Callable[[int], RunningServer],
) -> dict[str, Any]:
    """Kill the first backend while it streams; send the last requests when it is back."""
    killed_s: list[float] = []

    async def kill(streams: Sequence[_Stream]) -> None:
        async with httpx.AsyncClient(base_url=router.url, timeout=60) as http:
            while True:
                replicas = (await http.get("/v1/cluster")).json()["replicas"]
                (first,) = [each for each in replicas if each["address"] == backends[0].url]
                under_way = sum(stream.is_under_way for stream in streams)
                if first["running"] + first["waiting"] >= AT_ONCE // 4 and under_way >= _UNDER_WAY:
                    break
                await asyncio.sleep(_GAP_S)
        os.killpg(backends[0].process.pid, signal.SIGKILL)
        killed_s.append(time.monotonic())

    before = _run(router, tokenizer, range(REQUESTS - AFTER_RETURN), kill)
    _wait_until_gone(backends[0].process)
    again = start(0)
    while not all(replica["is_open"] for replica in _cluster(router)["replicas"]):
        time.sleep(_GAP_S)
    back_after_s = time.monotonic() - killed_s[0]
    after = _run(router, tokenizer, range(REQUESTS - AFTER_RETURN, REQUESTS))
    return {
        "texts": before["texts"] + after["texts"],
        "problems": {**before["problems"], **after["problems"]},
        "continued": _metric(router.url, "lorikeet:route_continued_total"),
        "back_after_s": back_after_s,
        "answers_after_return": _metric(again.url, "vllm:request_success_total"),
        "loaded_after_return": sorted(_loaded(again)),
    }


def _wait_until_gone(process: "subprocess.Popen[bytes]") -> None:
    process.wait(60)


def _metric(url: str, name: str) -> int:
    """Return the sum of a counter over its labels."""
    rows = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return round(sum(float(row.rpartition(" ")[2]) for row in rows if row.startswith((f"{name} ", f"{name}{{"))))
