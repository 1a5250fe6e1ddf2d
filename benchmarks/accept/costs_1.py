"""costs.1: live runs, recorded by the server itself, come out plan by plan the same when they are replayed."""

import asyncio
import itertools
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.accept.lines import Result, line
from benchmarks.accept.models import SAMPLES, default_model
from benchmarks.accept.runs import ROOT, StoredRuns
from benchmarks.accept.server import RunningServer, running_server
from benchmarks.accept.streams import Stream, stream_chat
from benchmarks.accept.traces import MOONCAKE_CONVERSATION, unpacked
from lorikeet.bench.adapters import write_random_adapter
from lorikeet.bench.choices import Range
from lorikeet.bench.load_client import Target, drive
from lorikeet.bench.prompts import DEFAULT_IDS, Prompts
from lorikeet.bench.rates import Rates
from lorikeet.bench.recipe import Recipe
from lorikeet.bench.workload import read_any
from lorikeet.core.events import AdapterEvicted, Finished, FinishReason, Preempted
from lorikeet.core.messages import Submit
from lorikeet.engine.recording import FileRecorder, Recording
from lorikeet.engine.records import Received, Told
from lorikeet.engine.replay import replay
from lorikeet.models.config import read_model_config

MEMORY = "80MiB"
"""So little that adapters and KV push each other out."""
MADE_RANKS = (16, 32, 64, 64)
RATE, SECONDS = 3.0, 30.0
CLIENTS, REPLACED = 90, "pirate"
_TOPICS = ("birds", "the sea", "old trains", "bread", "mountains", "music", "a lost key", "rain", "chess", "the moon")
_BLOCK_TOKENS = 16


@line(
    "costs.1",
    title="Replay of recorded live runs: steady, bursty, with aborts and an adapter replaced",
    bound="every plan of every replay identical to the recorded one; with one request left out of a recording, not",
)
def run(runs: StoredRuns) -> Result:
    """Record each run on a server of its own, then replay it."""
    found = {name: runs.get(name, lambda traffic=traffic: _recorded(traffic)) for name, traffic in _TRAFFIC.items()}  # type: ignore[misc]
    aborting = found["aborts"]
    failures = [
        *(f"{name}: plan {run['identical']} differs" for name, run in found.items() if run["different"]),
        *(f"{name}: a request left out was not noticed" for name, run in found.items() if not run["control_differs"]),
        *(f"{name}: only {run['plans']} plans" for name, run in found.items() if run["plans"] < 100),
        *([f"{aborting['aborted']} requests were aborted"] if aborting["aborted"] < CLIENTS // 6 else []),
        *(["no adapter was replaced"] if not aborting["dropped"] else []),
    ]
    return Result(
        figure={f"{name}_plans": run["plans"] for name, run in found.items()}
        | {"different": sum(run["different"] for run in found.values())},
        passed=not failures,
        cause="; ".join(failures),
        notes="`lorikeet serve --record` with SmolLM2-135M-Instruct, the four sample adapters and four of ranks 16 to "
        f"64, {MEMORY} for adapters and KV; over HTTP; replayed by the modelled executor on a virtual clock. "
        + "; ".join(f"{name}: {_words(run)}" for name, run in found.items()),
        details=found,
    )


def _words(run: dict[str, Any]) -> str:
    keys = ("requests", "steps", "loads", "evictions", "preemptions", "aborted")
    return ", ".join(f"{run[key]} {key}" for key in keys) + f" in {run['seconds']:.0f} s"


def _recorded(traffic: Callable[[RunningServer, list[str]], None]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lorikeet-costs1-") as text:
        scratch = Path(text)
        sources = _sources(scratch / "sources")
        flags = [flag for name, source in sources.items() for flag in ("--lora-modules", f"{name}={source}")]
        flags += ["--memory", MEMORY, "--max-model-len", "1024", "--record", str(scratch / "run")]
        flags += ["--adapter-dir", text, "--store-dir", str(scratch / "store")]
        with running_server(flags, scratch / "serve.log") as server:
            traffic(server, [default_model().name, *sources])
        return _replayed(scratch / "run")


def _sources(folder: Path) -> dict[str, Path]:
    """The samples, and some larger ones with random weights."""
    geometry = read_model_config(default_model()).geometry(2)
    sources = {file.parent.name: file.parent for file in sorted((ROOT / SAMPLES).glob("*/adapter_config.json"))}
    for seed, rank in enumerate(MADE_RANKS):
        sources[f"made{seed}"] = write_random_adapter(folder / f"made{seed}", geometry, rank, seed=seed)
    # The replacement lies where the server may read.
    write_random_adapter(folder / "replacement", geometry, 24, seed=99)
    return sources


def _replayed(path: Path) -> dict[str, Any]:
    recording = Recording(path)
    found, control = replay(recording), replay(_without_a_request(recording, path.with_name("control")))
    events = [event for record in recording if isinstance(record, Told) for event in record.events]
    adapter_events = [event for record in recording if isinstance(record, Told) for event in record.adapter_events]
    counts = Counter(type(event) for event in [*events, *adapter_events])
    evictions = [event for event in adapter_events if isinstance(event, AdapterEvicted)]
    return {
        "plans": found.plans + (found.difference is not None),
        "identical": found.plans,
        "different": int(found.difference is not None),
        "control_differs": control.difference is not None,
        "steps": found.steps,
        "seconds": found.seconds,
        "bytes": path.stat().st_size,
        "requests": sum(isinstance(r, Received) and isinstance(r.message, Submit) for r in recording),
        "loads": counts.total() - len(events) - len(evictions),
        "evictions": sum(not event.dropped for event in evictions),
        "dropped": sum(event.dropped for event in evictions),
        "preemptions": counts[Preempted],
        "aborted": sum(isinstance(e, Finished) and e.reason is FinishReason.ABORT for e in events),
    }


def _without_a_request(recording: Recording, path: Path) -> Recording:
    """Write a recording that never received the tenth request."""
    recorder, submits = FileRecorder.create(path, recording.header), 0
    for record in recording:
        submits += (is_submit := isinstance(record, Received) and isinstance(record.message, Submit))
        if not (is_submit and submits == 10):
            recorder.note(record)
    recorder.close()
    return Recording(path)


# --- traffic -----------------------------------------------------------------------------------------


def _steady(server: RunningServer, models: list[str]) -> None:
    """Turns of conversations, evenly: prefixes come again."""
    with unpacked(MOONCAKE_CONVERSATION) as file:
        trace = tuple(read_any(file))
    recipe = Recipe(
        trace=trace,
        shape="chat",
        count=round(RATE * SECONDS),
        rates=Rates.constant(RATE),
        adapters=(None, *models[1:]),
        length_scale=1 / 32,
        most_tokens=800,
        seed=1,
    )
    _drive(server, models[0], recipe)


def _bursty(server: RunningServer, models: list[str]) -> None:
    """Gaps that vary four times as much as those of a Poisson process."""
    recipe = Recipe(
        arrivals="gamma",
        variation=4.0,
        rates=Rates.constant(RATE),
        duration_s=SECONDS,
        adapters=(None, *models[1:]),
        prompt_tokens=Range(16, 400),
        output_tokens=Range(8, 96),
        seed=2,
    )
    _drive(server, models[0], recipe)


def _drive(server: RunningServer, base: str, recipe: Recipe) -> None:
    """Send a workload; its answers are as long as they may be."""
    target = Target(server.url, base, temperature=1.0)
    done = drive(recipe.requests(), target, Prompts(recipe.seed, 0, DEFAULT_IDS, _BLOCK_TOKENS))
    failed = [exchange for exchange in done.exchanges if exchange.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0].error} {failed[0].message}")


def _aborts(server: RunningServer, models: list[str]) -> None:
    """Chats that end where the model ends them, or hang up; meanwhile a name gets the weights of another adapter."""
    streams = asyncio.run(_chats(server, models))
    failed = [stream.error for stream in streams if stream.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} chats failed: {failed[0]}")


async def _chats(server: RunningServer, models: list[str]) -> list[Stream]:
    generator = random.Random(3)
    arrivals_s = itertools.accumulate(generator.expovariate(RATE) for _ in range(CLIENTS))

    async def chat(http: httpx.AsyncClient, number: int, arrival_s: float, leaving: dict[str, Any]) -> Stream:
        # Every third asks for the adapter that is replaced, so that requests of it run and wait at that time.
        body = {
            "model": REPLACED if number % 3 == 0 else models[number % len(models)],
            "messages": [{"role": "user", "content": f"Tell me about {_TOPICS[number % 10]}, in a few sentences."}],
            "max_tokens": 64,
            "seed": number,
        }
        await asyncio.sleep(arrival_s)
        return await stream_chat(http, body, **leaving)

    async def replace(http: httpx.AsyncClient, after_s: float) -> None:
        await asyncio.sleep(after_s)
        source = server.log.parent / "sources" / "replacement"
        body = {"lora_name": REPLACED, "lora_path": str(source), "load_inplace": True}
        (await http.post("/v1/load_lora_adapter", json=body)).raise_for_status()

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as http, asyncio.TaskGroup() as group:
        group.create_task(replace(http, CLIENTS / RATE / 2))
        tasks = [
            group.create_task(chat(http, number, arrival_s, _departure(generator)))
            for number, arrival_s in enumerate(arrivals_s)
        ]
    return [task.result() for task in tasks]


def _departure(generator: random.Random) -> dict[str, Any]:
    """When a client hangs up, if it does: after some chunks, or after a time, queued or not."""
    return generator.choice([{}, {}, {}, {}, {"hang_up_after": 5}, {"hang_up_after_s": generator.uniform(0.05, 1.0)}])


_TRAFFIC = {"steady": _steady, "bursty": _bursty, "aborts": _aborts}
