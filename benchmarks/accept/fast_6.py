"""fast.6: a decode step's time outside of the kernels."""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.accept.inprocess import THREADS, default_kernels, kernels_as, make_requests, replica
from benchmarks.accept.lines import Result, line
from benchmarks.accept.models import default_model
from benchmarks.accept.offline import interval_words
from benchmarks.accept.runs import StoredRuns
from benchmarks.accept.stopwatch import AT_ONCE, Stopwatch
from lorikeet.bench.statistics import median_interval
from lorikeet.core.ids import BlockId
from lorikeet.core.plan import StepPlan, StepResult, TransferDone
from lorikeet.engine.build import Replica
from lorikeet.engine.executor import EngineSizes, Executor
from lorikeet.models.config import read_model_config

PAIRS = 5
ROWS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 128, 64
BOUND = 0.10


class Recorder:
    """Runs plans with another executor and remembers plans and results."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.steps: list[tuple[StepPlan, StepResult]] = []

    def execute(self, plan: StepPlan) -> StepResult:
        """Run it and note it down."""
        result = self._inner.execute(plan)
        self.steps.append((plan, result))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class NoOpExecutor:
    """Gives the results of a recorded run at once; see ``engine.executor.Executor``."""

    def __init__(self) -> None:
        self.recorded: Iterator[tuple[StepPlan, StepResult]] = iter(())
        self.plans: list[tuple[StepPlan, StepPlan]] = []

    def execute(self, plan: StepPlan) -> StepResult:
        """Return what the recorded run returned."""
        recorded, result = next(self.recorded)
        self.plans.append((plan, recorded))
        return result

    def assist_counters(self) -> None:
        """Return nothing: there are no host workers."""

    def completed_transfers(self) -> list[TransferDone]:
        """Return none: the base model needs no adapters."""
        return []

    def wait_for_transfer(self, timeout_s: float | None) -> None:
        """Nothing is in transfer."""

    def read_host(self, blocks: Sequence[BlockId]) -> tuple[bytes, ...]:
        """Blocks hold nothing."""
        return (b"",) * len(blocks)

    def write_host(self, blocks: Sequence[BlockId], contents: Sequence[bytes]) -> None:
        """Blocks hold nothing."""

    def close(self) -> None:
        """Nothing is held."""


@line(
    "fast.6",
    title=f"Time outside of kernels in a decode step of {ROWS}",
    bound=f"≤ {BOUND:.0%} of a real step: the same plans on a no-op executor, and all that is not a call of a kernel",
)
def run(runs: StoredRuns) -> Result:
    """Record real batches and replay each at once."""
    found = runs.get("steps", _measure)
    shares = [noop / real for noop, real in zip(found["noop_s"], found["real_s"], strict=True)]
    share = statistics.median(shares)
    outside = [1 - kernels / real for kernels, real in zip(found["kernels_s"], found["real_s"], strict=True)]
    share_outside = statistics.median(outside)
    failures = [
        *([f"the step without arithmetic takes {share:.1%} of a real one"] if share > BOUND else []),
        *([f"{share_outside:.1%} of a real step is not in kernels"] if share_outside > BOUND else []),
    ]
    return Result(
        figure={
            "share_with_noop_executor": share,
            "noop_step_ms": statistics.median(found["noop_s"]) * 1e3,
            "real_step_ms": statistics.median(found["real_s"]) * 1e3,
            "share_outside_kernel_calls": share_outside,
            "outside_kernel_calls_interval": interval_words(median_interval(outside)),
        },
        interval=median_interval(shares),
        passed=not failures,
        cause="; ".join(failures),
        notes=f"{PAIRS} batches of {ROWS} × ({PROMPT_TOKENS} + {OUTPUT_TOKENS}) on the base, each replayed right after "
        f"it ran, plans compared one by one ({found['plans']} in all), {found['steps']} decode steps each; "
        "share_outside_kernel_calls also counts what the real executor does around its calls of kernels: batches, "
        "calls, embedding, sampling's bookkeeping; interval of the first share",
    )


def _measure() -> dict[str, Any]:
    model = default_model()
    watch = Stopwatch(default_kernels(), timed=AT_ONCE)
    found: dict[str, Any] = {"noop_s": [], "real_s": [], "kernels_s": [], "plans": 0, "steps": 0}
    with kernels_as(watch), _recorded(model) as (real, recorder):
        noop = NoOpExecutor()
        with _executor_is(noop, real.sizes, model), replica(model, "bfloat16", threads=THREADS) as empty:
            for batch in range(PAIRS + 1):
                recorder.steps.clear()
                watch.steps.clear()
                noop.plans.clear()
                real_s = _turns_s(real, batch)
                noop.recorded = iter(recorder.steps)
                noop_s = _turns_s(empty, batch)
                _compare(noop.plans, len(recorder.steps))
                turns = [i for i, (plan, _) in enumerate(recorder.steps) if _decodes_all(plan)]
                steps = sum(recorder.steps[i][1].steps_run for i in turns)
                if batch:  # the first one warms up
                    found["real_s"].append(sum(real_s[i] for i in turns) / steps)
                    found["noop_s"].append(sum(noop_s[i] for i in turns) / steps)
                    found["kernels_s"].append(
                        statistics.mean(sum(times.in_kernels_s.values()) for _, times in watch.decode_steps(ROWS))
                    )
                    found["plans"] += len(recorder.steps)
                    found["steps"] = steps
    return found


@contextmanager
def _recorded(model: Path) -> Iterator[tuple[Replica, Recorder]]:
    """A replica whose executor is recorded."""
    with replica(model, "bfloat16", threads=THREADS) as built:
        recorder = Recorder(built.engine._executor)
        with mock.patch.object(built.engine, "_executor", recorder):
            yield built, recorder


@contextmanager
def _executor_is(executor: Executor, sizes: EngineSizes, model: Path) -> Iterator[None]:
    """Let replicas that are built meanwhile be the same but for their executor."""
    made = (executor, read_model_config(model), sizes)
    with mock.patch("lorikeet.engine.build.build_torch_executor", return_value=made):
        yield


def _turns_s(built: Replica, batch: int) -> list[float]:
    """Run a batch and return the seconds of each turn that ran a plan."""
    engine, seconds = built.engine, []
    for request in make_requests(f"{batch}", ROWS, PROMPT_TOKENS, OUTPUT_TOKENS, seed=batch):
        engine.submit(request)
    while engine.has_requests or engine.is_busy:
        start_s = time.perf_counter()
        engine.step()
        taken_s = time.perf_counter() - start_s
        if engine.is_busy:
            seconds.append(taken_s)
    return seconds


def _decodes_all(plan: StepPlan) -> bool:
    return len(plan.sequences) == ROWS and all(step.tokens == 1 and step.samples for step in plan.sequences)


def _compare(plans: list[tuple[StepPlan, StepPlan]], recorded: int) -> None:
    different = sum(replayed != real for replayed, real in plans)
    if different or len(plans) != recorded:
        raise RuntimeError(f"{different} of {recorded} plans differ, {len(plans)} were replayed")
