"""serve.4: prefix reuse stays within one adapter version, whatever is replaced, unloaded or loaded meanwhile."""

import asyncio
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.accept.lines import Result, line
from benchmarks.accept.models import default_model
from benchmarks.accept.runs import StoredRuns
from benchmarks.accept.server import RunningServer, running_server
from benchmarks.accept.streams import Stream, read_gauges, stream_chat, together, wait_until_idle
from lorikeet.bench.adapters import write_random_adapter
from lorikeet.models.config import read_model_config

RANKS = {"c0": 8, "c1": 16, "c2": 32, "c3": 64}
"""Contents of adapters: random ones, each with a rank of its own."""

TOKENS = 16
LONG_TOKENS = 32
TURNS = 4
WORKERS, REQUESTS = 4, 10
_PROMPT = "Here are my notes. " + " ".join(f"Item {i}: the lorikeet {i * 37 % 101} flew home." for i in range(12))

_BLIND = """\
from pathlib import Path
from lorikeet.memory import tree
keyed = tree.block_keys
tree.block_keys = lambda digest, *more: keyed(None, *more)
Path(__file__).with_name("blinded").touch()
"""
"""A defect on purpose: all adapters share one tree of KV, keyed by tokens alone."""

Answers = dict[str, list[str]]


@line(
    "serve.4",
    title="Prefix reuse across adapters and versions: side by side, replaced in mid traffic, racing unload and reload",
    bound="no wrong answer; with reuse made blind to adapters the same check finds wrong ones",
)
def run(runs: StoredRuns) -> Result:
    """Everything over HTTP on the default model in fp32; the oracle answers one request at a time, without reuse."""
    alone: Answers = runs.get("alone", _alone)
    side = runs.get("side_by_side", lambda: _side_by_side(alone, {}))
    blind = runs.get("blind", lambda: _blind(alone))
    replaced = runs.get("replaced", lambda: _replaced(alone))
    raced = runs.get("raced", lambda: _raced(alone))
    parts = {"side_by_side": side, "replaced": replaced, "raced": raced}
    problems = [
        *(f"{name}: {problem}" for name, part in parts.items() for problem in part["problems"]),
        *(f"{name}: nothing was found in cached KV" for name, part in parts.items() if not part["reused_tokens"]),
        *(f"{name}: blocks are still referenced" for name, part in parts.items() if not part["idle"]),
        *([] if len({tuple(tokens[:TOKENS]) for tokens in alone.values()}) == 1 + len(RANKS) else ["answers coincide"]),
        *([] if blind["problems"] else ["the check does not notice reuse across adapters"]),
        *([] if raced["versions_seen"] > 2 else ["the race answered under too few versions"]),
    ]
    return Result(
        figure={
            "answers": sum(part["answers"] for part in parts.values()),
            "wrong": sum(len(part["problems"]) for part in parts.values()),
            "wrong_when_blind": len(blind["problems"]),
            "answers_when_blind": blind["answers"],
            "replacements": TURNS,
            "race_refused_404": raced["refused"],
            "race_changes": raced["changes"],
            "reused_tokens": sum(part["reused_tokens"] for part in parts.values()),
        },
        passed=not problems,
        cause="; ".join(problems[:5]),
        notes=f"SmolLM2-135M-Instruct in fp32, greedy, one prompt for all, random adapters of ranks "
        f"{sorted(RANKS.values())} with B not zero; oracle: one request at a time with reuse switched off; blind: "
        "the same check on a server whose tree of KV ignores the adapter",
    )


# --- servers and requests -------------------------------------------------------------------------


@contextmanager
def _server(*flags: str, environment: dict[str, str] | None = None) -> Iterator[tuple[RunningServer, Path]]:
    """A server that knows no adapters yet, and the folder that it may load them from.

    ``environment`` is added to this process's.
    """
    with tempfile.TemporaryDirectory(prefix="lorikeet-serve4-") as text:
        scratch = Path(text)
        geometry = read_model_config(default_model()).geometry(4)
        for seed, (content, rank) in enumerate(RANKS.items()):
            write_random_adapter(scratch / "sources" / content, geometry, rank, seed=seed, b_std=0.05)
        paths = ["--adapter-dir", f"{scratch}/sources", "--store-dir", f"{scratch}/store"]
        # One thread: what is measured here is no speed, and one does not suffer from others on the machine.
        with running_server(
            [*flags, *paths, "--dtype", "float32", "--threads", "1"],
            scratch / "serve.log",
            environment={**os.environ, **(environment or {})},
        ) as server:
            yield server, scratch / "sources"


def _body(model: str, tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": _PROMPT}]
    return {
        "model": model,
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
    }


def _load(server: RunningServer, name: str, source: Path, *, replace: bool = False) -> int:
    body = {"name": name, "source": str(source), "replace": replace}
    return httpx.post(f"{server.url}/v1/adapters", json=body, timeout=120).status_code


def _unload(server: RunningServer, name: str) -> int:
    return httpx.delete(f"{server.url}/v1/adapters/{name}", timeout=120).status_code


def _ask(server: RunningServer, models: list[str], tokens: int) -> list[Stream]:
    """Ask all at once."""
    return asyncio.run(together(server.url, [partial(stream_chat, body=_body(m, tokens)) for m in models]))


def _said(stream: Stream) -> list[str]:
    return [text for text, _ in stream.tokens]


def _wrong(stream: Stream, wanted: list[str], what: str, tokens: int) -> list[str]:
    """Return what is wrong with an answer, in a list."""
    problem = stream.problem(tokens)
    if problem is None and _said(stream) != wanted[:tokens]:
        problem = f"{''.join(_said(stream))!r} instead of {''.join(wanted[:tokens])!r}"
    return [] if problem is None else [f"{what}: {problem}"]


def _outcome(server: RunningServer, problems: list[str], answers: int, **more: Any) -> dict[str, Any]:
    gauges, _ = wait_until_idle(server.url)
    reused = {"idle": gauges.idle, "reused_tokens": gauges.prefix_hits_tokens}
    return {"problems": problems, "answers": answers, **reused, **more}


# --- the parts ------------------------------------------------------------------------------------


def _alone() -> Answers:
    """Every content's answer: one request at a time, nothing kept."""
    base = default_model().name
    with _server("--row", "lorikeet:plain-no-reuse") as (server, sources):
        for content in RANKS:
            _load(server, content, sources / content)
        answers = {model: _said(_ask(server, [model], LONG_TOKENS)[0]) for model in (base, *RANKS)}
        if read_gauges(server.url).prefix_hits_tokens:
            raise RuntimeError("the oracle reused KV")
    return answers


def _side_by_side(alone: Answers, environment: dict[str, str]) -> dict[str, Any]:
    """The same prompt under base and adapters, one after the other and together, several times."""
    problems: list[str] = []
    rounds = [[model] for model in alone] + [[*alone, *alone]] * 2
    with _server(environment=environment) as (server, sources):
        for content in RANKS:
            _load(server, content, sources / content)
        for models in rounds:
            for model, stream in zip(models, _ask(server, models, TOKENS), strict=True):
                problems += _wrong(stream, alone[model], model, TOKENS)
        return _outcome(server, problems, sum(map(len, rounds)))


def _blind(alone: Answers) -> dict[str, Any]:
    """The same on a server with the defect."""
    with tempfile.TemporaryDirectory(prefix="lorikeet-serve4-") as folder:
        (Path(folder) / "sitecustomize.py").write_text(_BLIND)
        outcome = _side_by_side(alone, {"PYTHONPATH": folder})
        # Python goes on where sitecustomize fails.
        if not (Path(folder) / "blinded").exists():
            raise RuntimeError("the defect on purpose is not in the server: what it changes has another name by now")
        return outcome


def _replaced(alone: Answers) -> dict[str, Any]:
    """One name gets new content while requests under it run: they finish on the old, new ones use the new."""
    contents = list(RANKS)
    problems: list[str] = []
    with _server() as (server, sources):
        _load(server, "name", sources / contents[0])
        for turn in range(TURNS):
            old, new = contents[turn % len(contents)], contents[(turn + 1) % len(contents)]
            running, fresh = asyncio.run(_replace(server, sources / new))
            for stream in running:
                problems += _wrong(stream, alone[old], f"turn {turn}, begun before", LONG_TOKENS)
            for stream in fresh:
                problems += _wrong(stream, alone[new], f"turn {turn}, begun after", TOKENS)
        return _outcome(server, problems, 6 * TURNS)


async def _replace(server: RunningServer, source: Path) -> tuple[list[Stream], list[Stream]]:
    begun: set[int] = set()
    all_begun = asyncio.Event()

    def saw(stream: Stream) -> None:
        begun.add(id(stream))
        if len(begun) == 3:
            all_begun.set()

    old = asyncio.create_task(
        together(server.url, [partial(stream_chat, body=_body("name", LONG_TOKENS), on_chunk=saw)] * 3)
    )
    await all_begun.wait()
    status = await asyncio.to_thread(_load, server, "name", source, replace=True)
    if status != 201 or old.done():
        raise RuntimeError(f"not replaced in mid traffic: status {status}, streams ended: {old.done()}")
    fresh = await together(server.url, [partial(stream_chat, body=_body("name", TOKENS))] * 3)
    return await old, fresh


def _raced(alone: Answers) -> dict[str, Any]:
    """Threads load, replace and unload two names while others ask, and now and then hang up."""
    with _server() as (server, sources):
        problems, answers, versions, refused, changes = asyncio.run(_race(server, sources, alone))
        return _outcome(server, problems, answers, versions_seen=versions, refused=refused, changes=changes)


async def _race(server: RunningServer, sources: Path, alone: Answers) -> tuple[list[str], int, int, int, int]:
    valid = {tuple(tokens[:TOKENS]): content for content, tokens in alone.items() if content in RANKS}
    problems: list[str] = []
    streams: list[Stream] = []
    statuses: list[int] = []
    asking = True

    async def ask(worker: int) -> None:
        chance = random.Random(worker)
        for _ in range(REQUESTS):
            leave = chance.randrange(1, 8) if chance.random() < 0.25 else None
            body = _body(chance.choice(("one", "two")), TOKENS)
            streams.extend(await together(server.url, [partial(stream_chat, body=body, hang_up_after=leave)]))

    async def change(worker: int) -> None:
        chance = random.Random(100 + worker)
        while asking:
            name = chance.choice(("one", "two"))
            if worker % 2:
                status = await asyncio.to_thread(_unload, server, name)
            else:
                source = sources / chance.choice(list(RANKS))
                status = await asyncio.to_thread(_load, server, name, source, replace=chance.random() < 0.5)
            statuses.append(status)
            # Names must be there for a while to be asked for.
            await asyncio.sleep(chance.uniform(0.0, 0.5 if worker % 2 else 0.05))

    changing = [asyncio.create_task(change(worker)) for worker in range(4)]
    await asyncio.gather(*map(ask, range(WORKERS)))
    asking = False
    await asyncio.gather(*changing)
    seen, refused = [], 0
    for stream in streams:
        if stream.status == 404:
            refused += 1
        elif stream.hung_up:
            problems += [stream.error] if stream.error else []
        elif stream.problem(TOKENS) or tuple(_said(stream)) not in valid:
            problems.append(stream.problem(TOKENS) or f"no version says {''.join(_said(stream))!r}")
        else:
            seen.append(valid[tuple(_said(stream))])
    odd = set(statuses) - {200, 201, 400, 404, 409}
    problems += [f"a change was answered with {status}" for status in odd]
    return problems, len(seen), len(set(seen)), refused, len(statuses)
