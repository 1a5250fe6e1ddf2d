"""serve.5: two hundred streaming clients at once, a third of which hang up midway."""

import asyncio
import random
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.accept.lines import Result, line
from benchmarks.accept.models import SAMPLES, default_model
from benchmarks.accept.runs import ROOT, StoredRuns
from benchmarks.accept.server import running_server
from benchmarks.accept.streams import Stream, stream_chat, together, wait_until_idle

CLIENTS = 200
TOKENS = 32
_TOPICS = ("birds", "the sea", "old trains", "bread", "mountains", "music", "a lost key", "rain", "chess", "the moon")


@line(
    "serve.5",
    title=f"{CLIENTS} concurrent streams over base and adapters, a third hangs up midway",
    bound="every stream complete or cleanly ended, no engine restarted; "
    "then no block referenced and free + cached = total",
)
def run(runs: StoredRuns) -> Result:
    """One burst on the default model with the sample adapters, then the gauges of ``/metrics``."""
    figure = runs.get("burst", _burst)
    problems = [
        *figure.pop("problems"),
        *(["blocks are still referenced, or free + cached is not total"] if not figure["idle"] else []),
        *(["an engine was restarted"] if figure["engine_restarts"] else []),
        *(["fewer clients hung up than planned"] if figure["hung_up"] < CLIENTS // 3 else []),
    ]
    blocks = figure.pop("blocks")
    return Result(
        figure=figure | {"free": blocks["free"], "cached": blocks["cached"]},
        passed=not problems,
        cause="; ".join(problems[:5]),
        notes=f"SmolLM2-135M-Instruct, chats of {TOKENS} tokens each; clients hang up after up to 19 "
        "chunks, a fifth of them within 3 s, queued or not; idle_after_s: from the last stream's end to idle gauges",
    )


def _burst() -> dict[str, Any]:
    adapters = sorted(file.parent.name for file in (ROOT / SAMPLES).glob("*/adapter_config.json"))
    names = [default_model().name, *adapters]
    flags = [flag for adapter in adapters for flag in ("--lora-modules", f"{adapter}={SAMPLES / adapter}")]
    generator = random.Random(5)
    leaving = set(generator.sample(range(CLIENTS), -(-CLIENTS // 3)))
    with (
        tempfile.TemporaryDirectory(prefix="lorikeet-serve5-") as scratch,
        running_server([*flags, "--store-dir", f"{scratch}/store"], Path(scratch) / "serve.log") as server,
    ):
        calls = []
        for client in range(CLIENTS):
            topic = f"Tell me about {generator.choice(_TOPICS)}, number {client % 40}."
            body = {
                "model": names[client % len(names)],
                "messages": [{"role": "user", "content": topic}],
                "max_tokens": TOKENS,
                "ignore_eos": True,
                "seed": client,
            }
            calls.append(partial(stream_chat, body=body, **(_departure(generator) if client in leaving else {})))
        start_s = time.monotonic()
        streams = asyncio.run(together(server.url, calls))
        took_s = time.monotonic() - start_s
        gauges, idle_after_s = wait_until_idle(server.url)
    return {
        "complete": sum(stream.problem(TOKENS) is None for stream in streams),
        "hung_up": sum(stream.hung_up for stream in streams),
        "idle": gauges.idle,
        "referenced_blocks": gauges.referenced,
        "blocks": gauges.blocks,
        "total": gauges.total,
        "engine_restarts": gauges.restarts,
        "took_s": took_s,
        "idle_after_s": idle_after_s,
        "problems": _problems(streams),
    }


def _departure(generator: random.Random) -> dict[str, Any]:
    """When a client hangs up: mostly after some chunks, now and then while its request may still be queued."""
    if generator.random() < 0.2:
        return {"hang_up_after_s": generator.uniform(0.1, 3.0)}
    return {"hang_up_after": generator.randrange(20)}


def _problems(streams: list[Stream]) -> list[str]:
    """A client that stayed must have everything; one that left must not have been told of an error."""
    found = []
    for client, stream in enumerate(streams):
        problem = stream.error if stream.hung_up else stream.problem(TOKENS)
        if problem is not None:
            found.append(f"client {client}: {problem}")
    return found
