"""cluster.7: what ``lorikeet route`` adds to the time of the first token, idle."""

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.accept.lines import Result, line
from benchmarks.accept.models import default_model
from benchmarks.accept.runs import StoredRuns
from benchmarks.accept.server import LORIKEET, running_server
from lorikeet.bench.adapters import write_random_adapter
from lorikeet.bench.statistics import median_interval
from lorikeet.models.config import read_model_config

PAIRS, WARM_UP, PROMPT_TOKENS = 200, 20, 16
BOUND_S = 0.002
ROWS = ("lorikeet:plain", "loraserve:random")
"""The default, which compares prompts, and routing by a table."""
BARE_PROXY = (sys.executable, "-m", "benchmarks.accept.bare_proxy")


@line(
    "cluster.7",
    title="What lorikeet route adds to the time of the first token of an idle replica",
    bound=f"≤ {BOUND_S * 1e3:g} ms at the median of {PAIRS} pairs, one token each, for each of {', '.join(ROWS)}",
)
def run(runs: StoredRuns) -> Result:
    """Ask the replica directly, through the gateway and through a proxy that only passes on, by turns."""
    found = {row: runs.get(row.replace(":", "-"), lambda row=row: _measure(row)) for row in ROWS}  # type: ignore[misc]
    figure: dict[str, Any] = {}
    failures = []
    for row, times in found.items():
        routed_s, bare_s, direct_s = (statistics.median(times[side]) for side in ("routed", "bare", "direct"))
        low_s, high_s = median_interval(_differences(times))
        figure[row] = {
            "added_ms": 1e3 * (routed_s - direct_s),
            "interval_of_the_median_difference_ms": [1e3 * low_s, 1e3 * high_s],
            "added_by_a_bare_proxy_ms": 1e3 * (bare_s - direct_s),
            "routed_p50_ms": 1e3 * routed_s,
            "direct_p50_ms": 1e3 * direct_s,
        }
        if routed_s - direct_s > BOUND_S:
            failures.append(
                f"{row}: {1e3 * (routed_s - direct_s):.2f} ms, of which the same libraries take "
                f"{1e3 * (bare_s - direct_s):.2f} ms on this machine if they only pass on"
            )
    interval = median_interval(_differences(found[ROWS[0]]))
    return Result(
        figure=figure,
        interval=(1e3 * interval[0], 1e3 * interval[1]),
        passed=not failures,
        cause="; ".join(failures),
        notes=f"SmolLM2-135M-Instruct in bf16, one replica, streamed completions of one token under an adapter that is "
        f"loaded, {PROMPT_TOKENS} tokens of prompt that no other request has, connections kept; A B C, C B A; from "
        f"sending to the first event, by one client; {WARM_UP} pairs before; interval of the median difference of "
        f"pairs, ms; a bare proxy: uvicorn, Starlette and aiohttp's client, which know of no adapters, no other "
        f"backends and no faults",
        details=found,
    )


def _differences(times: dict[str, Any]) -> list[float]:
    return [routed_s - direct_s for routed_s, direct_s in zip(times["routed"], times["direct"], strict=True)]


def _measure(row: str) -> dict[str, Any]:
    model = default_model()
    draw = random.Random(0)
    times: dict[str, list[float]] = {"direct": [], "routed": [], "bare": []}
    with tempfile.TemporaryDirectory(prefix="lorikeet-cluster7-") as text, ExitStack() as stack:
        scratch = Path(text)
        write_random_adapter(scratch / "one", read_model_config(model).geometry(2), 16)
        flags = [str(model), "--adapter-dir", str(scratch), "--store-dir", str(scratch / "store")]
        replica = stack.enter_context(running_server(flags, scratch / "serve.log"))
        router = stack.enter_context(
            running_server(
                ["--backend", replica.url, "--lora-modules", f"one={scratch / 'one'}", "--preset", row],
                scratch / "route.log",
                command=(str(LORIKEET), "route"),
            )
        )
        bare = stack.enter_context(running_server([replica.url], scratch / "bare.log", command=BARE_PROXY))
        servers = {"direct": replica, "routed": router, "bare": bare}
        clients = {side: stack.enter_context(_client(server.url)) for side, server in servers.items()}
        _first_event_s(clients["routed"], draw)  # which loads the adapter
        for pair in range(-WARM_UP, PAIRS):
            for side in list(times) if pair % 2 else reversed(times):
                seconds = _first_event_s(clients[side], draw)
                if pair >= 0:
                    times[side].append(seconds)
    return times


@contextmanager
def _client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as http:
        yield http


def _first_event_s(http: httpx.Client, draw: random.Random) -> float:
    """Return seconds from sending to the first bytes of the answer; the rest is read too, and checked."""
    prompt = [draw.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]
    body = {"model": "one", "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "stream": True}
    began_s = time.perf_counter()
    with http.stream("POST", "/v1/completions", json=body) as response:
        pieces = response.iter_raw()
        first = next(pieces)
        seconds = time.perf_counter() - began_s
        rest = first + b"".join(pieces)
    if response.status_code != 200 or not rest.rstrip().endswith(b"data: [DONE]"):
        raise RuntimeError(f"{response.status_code}: {rest[:300]!r}")
    return seconds
