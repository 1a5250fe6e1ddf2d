"""modes.7: what batching modes and cold starts cost the loop: recorded live runs, decided again without arithmetic."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

from benchmarks.accept.inprocess import THREADS, replica
from benchmarks.accept.lines import Result, line
from benchmarks.accept.models import default_model
from benchmarks.accept.runs import StoredRuns
from lorikeet.adapters.store import reference
from lorikeet.bench.adapters import write_random_adapter
from lorikeet.bench.choices import Range
from lorikeet.bench.in_process import run_workload
from lorikeet.bench.memory_bench import fill_host
from lorikeet.bench.prompts import DEFAULT_IDS, Prompts
from lorikeet.bench.rates import Rates
from lorikeet.bench.recipe import Recipe
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import MonotonicClock
from lorikeet.core.geometry import ModelGeometry
from lorikeet.engine.recording import Recording
from lorikeet.engine.replay import replay, turns
from lorikeet.scheduling.coldstart.costs import AssistCosts
from lorikeet.scheduling.selection import Selection

BOUND = 0.03
ADAPTERS, RANKS, MODULES = 32, (8, 16, 32, 64), ("q", "k", "v")
REQUESTS, MEMORY, HOST, LINK_BYTES_PER_S = 160, 160 * 2**20, 2**30, 0.8e9
ROWS = {"dlora": "dlora,kernel_form=unpadded", "toppings:auto": "toppings:auto,kernel_form=unpadded"}
"""With kernels that take the least time, so that the share is the largest."""
CHOICE = {"dlora": "zipf:2", "toppings:auto": "zipf:1"}
"""One adapter is asked for often enough to be merged, and enough others to find cold ones."""
_PARTS: tuple[tuple[type, str], ...] = (
    *((Selection, name) for name in ("choose", "last_displaced", "merged_for", "note", "place_cold")),
    *((AssistCosts, name) for name in ("pays", "layer_groups")),
)


@line(
    "modes.7",
    title="Time that batching modes and cold starts take in the loop, on recorded plans without arithmetic",
    bound=f"≤ {BOUND:.0%} of a step",
)
def run(runs: StoredRuns) -> Result:
    """Record each row live under more requests than can run, and replay it."""
    found = {row: runs.get(row.replace(":", "-"), partial(_measure, row)) for row in ROWS}
    shares = {row: each["policy_s"] / each["steps_s"] for row, each in found.items()}
    failures = [
        *(f"{row}: {share:.1%} of a step" for row, share in shares.items() if share > BOUND),
        *(f"{row}: the replay left its recording" for row, each in found.items() if each["differs"]),
        *(["dlora never merged"] if not found["dlora"]["merged_steps"] else []),
        *(["no prefill was assisted"] if not found["toppings:auto"]["assisted_steps"] else []),
    ]
    return Result(
        figure={
            "share": max(shares.values()),
            **{
                row: f"{shares[row]:.2%}: {each['policy_s'] / each['turns'] * 1e3:.3f} ms of "
                f"{each['steps_s'] / each['turns'] * 1e3:.1f} ms"
                for row, each in found.items()
            },
        },
        passed=not failures,
        cause="; ".join(failures),
        notes=f"{REQUESTS} requests at once, {ADAPTERS} adapters; time in what the batching mode and cold "
        "starts do in the scheduler, listing the requests included; "
        + "; ".join(
            f"{row}: {each['turns']} plans, {each['merged_steps']} merged steps, {each['assisted_steps']} assisted, "
            f"{each['waiting_mean']:.0f} requests on average"
            for row, each in found.items()
        ),
    )


def _measure(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lorikeet-modes-") as scratch:
        file = Path(scratch) / "run"
        _record(name, file, Path(scratch) / "adapters")
        recording = Recording(file)
        ran = [turn for turn in turns(recording) if turn.ran is not None and turn.planned.plan.sequences]
        with _timed() as times:
            found = replay(recording)
    plans = [turn.planned.plan for turn in ran]
    return {
        "policy_s": sum(times.values()),
        "parts_s": times,
        "steps_s": sum(turn.ran.result.duration_s for turn in ran if turn.ran is not None),
        "turns": len(plans),
        "merged_steps": sum(turn.steps_run for turn in ran if turn.planned.plan.merged is not None),
        "assisted_steps": sum(bool(plan.assisted) for plan in plans),
        "waiting_mean": fmean(len(plan.sequences) for plan in plans),
        "differs": found.difference is not None,
    }


def _record(name: str, file: Path, folder: Path) -> None:
    names = tuple(f"a{i}" for i in range(ADAPTERS))
    recipe = Recipe(
        arrivals="now",
        rates=Rates.constant(1.0),
        count=REQUESTS,
        prompt_tokens=Range(32, 160),
        output_tokens=Range(16, 64),
        adapters=names,
        adapter_choice=CHOICE[name],
        seed=5,
    )
    engine = {
        "row": ROWS[name],
        "record": str(file),
        "memory_bytes": MEMORY,
        "host_memory_bytes": HOST,
        "threads": THREADS,
    }
    with replica(
        default_model(), "bfloat16", max_model_tokens=512, link_bytes_per_s=LINK_BYTES_PER_S, **engine
    ) as built:
        refs = {each: _adapter(folder, each, i, built.sizes.geometry) for i, each in enumerate(names)}
        fill_host(built.engine, tuple(refs.values()))
        run_workload(built.engine, MonotonicClock(), recipe.requests(), refs, Prompts(0, 0, DEFAULT_IDS, 16))


def _adapter(folder: Path, name: str, number: int, geometry: ModelGeometry) -> AdapterRef:
    rank = RANKS[number % len(RANKS)]
    written = write_random_adapter(folder / name, geometry, rank, modules=MODULES, seed=number)
    return reference(name, written, geometry)


@contextmanager
def _timed() -> Iterator[dict[str, float]]:
    """Yield the seconds that each part takes from now on, those within others twice; timing itself is taken off."""
    times = {name: 0.0 for _, name in _PARTS}
    cost_s = _clock_s()

    def timed(owner: type, name: str) -> Any:
        inner = getattr(owner, name)

        def call(*args: Any) -> Any:
            began_s = time.perf_counter()
            result = inner(*args)
            times[name] += max(0.0, time.perf_counter() - began_s - cost_s)
            return result

        return mock.patch.object(owner, name, call)

    with ExitStack() as patches:
        for owner, name in _PARTS:
            patches.enter_context(timed(owner, name))
        yield times


def _clock_s() -> float:
    """Return what looking at the clock twice takes."""
    began_s = time.perf_counter()
    for _ in range(100_000):
        time.perf_counter()
    return (time.perf_counter() - began_s) / 100_000
