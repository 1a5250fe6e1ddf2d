"""memory.8: steps that run while an adapter is copied over the link take as long as the others."""

import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.accept.disturbance import disturbance_words, undisturbed
from benchmarks.accept.inprocess import THREADS, make_requests
from benchmarks.accept.lines import Result, line
from benchmarks.accept.memory_common import LINK_BYTES_PER_S
from benchmarks.accept.models import default_model
from benchmarks.accept.runs import StoredRuns
from lorikeet.adapters.store import reference
from lorikeet.bench.adapters import write_random_adapter
from lorikeet.bench.memory_bench import fill_host
from lorikeet.bench.statistics import median_interval
from lorikeet.config import EngineSettings, ModelSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.plan import StepPlan, StepResult
from lorikeet.engine.build import build_replica
from lorikeet.engine.device import BlockCopy
from lorikeet.engine.devices import Cpu
from lorikeet.engine.executor import Executor
from lorikeet.engine.torch_executor import TorchExecutor
from lorikeet.engine.transfer_counts import Work
from lorikeet.models.config import read_model_config

RANK, DECODES, ROUNDS, LOADS, EVERY_S = 64, 8, 3, 12, 1.0
ADAPTERS = ROUNDS * LOADS
PROMPT_TOKENS, LONGEST_TOKENS = 32, 1536
_LEAST_STEPS = 12
"""Of a round, however long a step takes."""
BOUND = 1.15
_HOST_BYTES, _DEVICE_BYTES = 2**30, 300 * 2**20
"""The device holds the decodes and a few adapters, so that every one is loaded anew."""


class Step(NamedTuple):
    """A step in which all decode and nothing else happens, from its start to the next one's."""

    began_s: float
    ended_s: float


class Load(NamedTuple):
    """A copy to the device, from when the plan with it began to when it was reported."""

    began_s: float
    ended_s: float


class Timed:
    """Runs plans and notes when each began, which were decodes of all, and when transfers began."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.turns: list[tuple[float, bool]] = []
        self.load_begins_s: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run it."""
        decodes = len(plan.sequences) == DECODES and all(s.tokens == 1 and s.samples for s in plan.sequences)
        now = time.monotonic()
        self.turns.append((now, decodes))
        self.load_begins_s += [now] * len(plan.transfers)
        return self._inner.execute(plan)


class TimedCopies:
    """Copies of blocks, with the processor's time that each takes of its thread."""

    def __init__(self) -> None:
        self.cpu_s: list[float] = []

    def patch(self) -> Any:
        """Return a context in which copies are timed."""
        copy_blocks = Cpu.copy_blocks

        def timed(device: Cpu, copy: BlockCopy, until_s: float) -> None:
            began_s = time.thread_time()
            copy_blocks(device, copy, until_s)
            self.cpu_s.append(time.thread_time() - began_s)

        return mock.patch.object(Cpu, "copy_blocks", timed)


@line(
    "memory.8",
    title=f"One load of rank {RANK} per second over a link of {LINK_BYTES_PER_S / 1e9:g} GB/s beside {DECODES} decodes",
    bound=f"median of the steps that overlap a copy ≤ {BOUND:g} × the others', of all steps and of the pairs; no read, "
    "check or copy on the loop's thread",
)
def run(runs: StoredRuns) -> Result:
    """Time every step of decodes and sort them by whether a copy ran meanwhile."""
    found = runs.get("steps", partial(undisturbed, _measure))
    overlapping, others = found["overlapping_s"], found["others_s"]
    ratio = statistics.median(overlapping) / statistics.median(others)
    pairs = found["pairs"]
    paired = statistics.median(pairs)
    work, copying_s = found["work"], found["copying_s"]
    share = f"the copy itself takes {copying_s * 1e3:.1f} ms of one of the {THREADS} cores that steps use"
    failures = [
        *([f"steps beside a copy take {ratio:.2f} × as long; {share}"] if ratio > BOUND else []),
        *([f"within half a second of each other {paired:.2f} × as long"] if paired > BOUND else []),
        *([f"only {len(pairs)} loads have steps beside them"] if len(pairs) < 10 else []),
        *([f"the loop's thread did {found['on_loop']}"] if any(found["on_loop"].values()) else []),
        *([f"no {kind} was counted at all" for kind, count in work.items() if not count]),
    ]
    return Result(
        figure={
            "overlapping ÷ others": ratio,
            "median of pairs": paired,
            "overlapping_ms": statistics.median(overlapping) * 1e3,
            "others_ms": statistics.median(others) * 1e3,
            "steps": f"{len(overlapping)} and {len(others)}",
            "load_ms": statistics.median(found["loads_s"]) * 1e3,
            "copying_ms": copying_s * 1e3,
            "pieces of work on the loop's thread": sum(found["on_loop"].values()),
            "on others": work,
        },
        interval=median_interval(pairs),
        passed=not failures,
        cause="; ".join(failures),
        notes=f"SmolLM2-135M-Instruct, bfloat16, {THREADS} threads; {ROUNDS} rounds of {LOADS} loads from the host "
        f"tier, each asked for by a request of its own; a step is a plan with {DECODES} decodes and nothing else, from "
        "its start to the next one's; a pair is a load: the median of the steps beside it by that of the others within "
        "half a second of it; interval of the median of pairs; copying is the processor's time that a load's bytes "
        "take of the thread that copies; work is counted where it is done: modules read and checked, blocks packed, "
        f"blocks copied; {disturbance_words(found['stolen'])}",
    )


def _measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lorikeet-memory8-") as scratch:
        engine = EngineSettings(
            row="lorikeet:plain-no-reuse",
            memory_bytes=_DEVICE_BYTES,
            host_memory_bytes=_HOST_BYTES,
            touch_memory=True,
            link_bytes_per_s=LINK_BYTES_PER_S,
            max_repeat=1,
            threads=THREADS,
        )
        model = default_model()
        refs = _adapters(Path(scratch), read_model_config(model).geometry(2))
        settings = ModelSettings(model=str(model), dtype="bfloat16", max_model_tokens=LONGEST_TOKENS)
        rounds = [refs[first : first + LOADS] for first in range(0, ADAPTERS, LOADS)]
        return measure_loads(Settings(settings, engine), rounds)


def measure_loads(settings: Settings, rounds: Sequence[Sequence[AdapterRef]]) -> dict[str, Any]:
    """Ask for adapters beside decodes, and return every step, load and round, as plain data.

    Args:
        settings: of an engine with a host tier for all adapters, which tells of every step, and ``LONGEST_TOKENS``.
        rounds: adapters that it does not know; those of one round are asked for one by one beside the same decodes.
            One that is asked for again is loaded again unless the device still holds it.
    """
    steps: list[Step] = []
    loads: list[Load] = []
    of_rounds: list[dict[str, float]] = []
    copies = TimedCopies()
    ends_s: list[float] = []
    built = build_replica(settings, on_load_done=lambda: ends_s.append(time.monotonic()))
    executor = built.engine._executor
    assert isinstance(executor, TorchExecutor)
    try:
        fill_host(built.engine, tuple({ref.digest: ref for refs in rounds for ref in refs}.values()))
        for number, refs in enumerate(rounds):
            timed = Timed(executor)
            ends_s.clear()
            with mock.patch.object(built.engine, "_executor", timed), copies.patch():
                _round(built.engine, number, refs)
            steps += _steps(timed.turns)
            loads += map(Load, timed.load_begins_s, ends_s)
            of_rounds.append({"tpot_s": _tpot_s(timed.turns), "loads": len(ends_s)})
        counts = executor.transfers.counts.by_thread()
    finally:
        built.engine.close()
    loop = threading.get_native_id()
    beside = {load: [step for step in steps if _overlap(step, load)] for load in loads}
    overlapping = {step for group in beside.values() for step in group}
    others = [step for step in steps if step not in overlapping]
    pairs = []
    for load, group in beside.items():
        near = [step for step in others if abs(step.began_s - load.began_s) < EVERY_S / 2]
        if group and near:
            pairs.append(_median_s(group) / _median_s(near))
    return {
        "overlapping_s": [step.ended_s - step.began_s for step in overlapping],
        "others_s": [step.ended_s - step.began_s for step in others],
        "loads_s": [load.ended_s - load.began_s for load in loads],
        "pairs": pairs,
        "rounds": of_rounds,
        "copying_s": sum(copies.cpu_s) / len(loads),
        "work": {kind: sum(n for worker, n in counts.items() if worker.work is kind) for kind in Work},
        "on_loop": {
            kind: sum(n for worker, n in counts.items() if worker.work is kind and worker.thread == loop)
            for kind in Work
        },
    }


def _adapters(folder: Path, geometry: Any) -> list[AdapterRef]:
    written = [write_random_adapter(folder / f"a{i}", geometry, RANK, seed=i) for i in range(ADAPTERS)]
    return [reference(each.name, each, geometry) for each in written]


def _round(engine: Any, number: int, refs: Sequence[AdapterRef]) -> None:
    """Decode, and ask for another adapter every second; end when all have been asked for and answered."""
    output_tokens = LONGEST_TOKENS - PROMPT_TOKENS
    for request in make_requests(f"decode{number}", DECODES, PROMPT_TOKENS, output_tokens, seed=number):
        engine.submit(request)
    asked = make_requests(f"load{number}", len(refs), 4, 1, refs, seed=100 + number)
    due_s = time.monotonic() + EVERY_S
    waiting, steps = list(asked), 0
    while waiting or time.monotonic() < due_s or steps < _LEAST_STEPS:
        if waiting and time.monotonic() >= due_s:
            engine.submit(waiting.pop(0))
            due_s += EVERY_S
        engine.step()
        steps += 1
    for i in range(DECODES):
        engine.abort(f"decode{number}-{i}")
    while engine.has_requests or engine.is_busy:
        engine.step()


def _steps(turns: list[tuple[float, bool]]) -> list[Step]:
    """Steps of decodes that are followed at once by another turn."""
    return [Step(began_s, next_s) for (began_s, decodes), (next_s, _) in pairwise(turns) if decodes]


def _tpot_s(turns: list[tuple[float, bool]]) -> float:
    """Seconds of a token of each decode, from the first step of decodes alone to the last; others count in full."""
    own = [i for i, (_, decodes) in enumerate(turns) if decodes]
    return (turns[own[-1]][0] - turns[own[0]][0]) / (own[-1] - own[0])


def _overlap(step: Step, load: Load) -> bool:
    return step.began_s < load.ended_s and load.began_s < step.ended_s


def _median_s(steps: list[Step]) -> float:
    return statistics.median(step.ended_s - step.began_s for step in steps)
