"""Measures the time of the engine loop beside its steps (scheduling, memory and commits) on the real executor."""

import time
from collections.abc import Callable, Sequence

from lorikeet.config import Settings
from lorikeet.core.clock import MonotonicClock
from lorikeet.core.executor import Executor
from lorikeet.core.ids import BlockId, RequestId
from lorikeet.core.messages import AssistCounters
from lorikeet.core.plan import StepPlan, StepResult, TransferDone
from lorikeet.core.request import Request, SamplingParams
from lorikeet.costs.engine_sizes import EngineSizes
from lorikeet.costs.fit import fit_line
from lorikeet.costs.profile import Constant
from lorikeet.engine.build import assemble
from lorikeet.engine.loop import Engine

BATCHES = 4
"""Number of batch sizes that are run, from one sequence to the engine's limit."""

_PROMPT_TOKENS = 8


class _Timed:
    """Runs steps, and records the duration of the last step."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.last_s = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._inner.execute(plan)
        self.last_s = result.duration_s
        return result

    def assist_counters(self) -> AssistCounters | None:
        return self._inner.assist_counters()

    def completed_transfers(self) -> list[TransferDone]:
        return self._inner.completed_transfers()

    def wait_for_transfer(self, timeout_s: float | None) -> None:
        self._inner.wait_for_transfer(timeout_s)

    def read_host(self, blocks: Sequence[BlockId]) -> tuple[bytes, ...]:
        return self._inner.read_host(blocks)

    def write_host(self, blocks: Sequence[BlockId], contents: Sequence[bytes]) -> None:
        self._inner.write_host(blocks, contents)

    def close(self) -> None:
        self._inner.close()


def measure_loop(
    executor: Executor, sizes: EngineSizes, settings: Settings, tokens: int, tick: Callable[[], None]
) -> tuple[Constant, Constant]:
    """Run closed batches of several sizes. Return the fixed time of the loop, and its time per sequence.

    Args:
        executor: executor without sequences and adapters. No other caller may drive it at the same time.
        sizes: the executor's sizes.
        settings: the engine's settings.
        tokens: number of tokens that each request generates.
        tick: called once for each batch.
    """
    timed = _Timed(executor)
    # Async scheduling is off, because loop work that overlaps the next step would seem to take no time.
    engine = assemble(settings, timed, sizes._replace(async_scheduling=False), MonotonicClock()).engine
    most = settings.engine.max_num_seqs
    counts = [max(1, most * i // (BATCHES - 1)) for i in range(BATCHES)]
    samples = []
    for count in counts:
        samples.append(_batch(engine, timed, count, tokens))
        tick()
    found = fit_line(counts, samples)
    return found.constant(0, "s"), found.constant(1, "s/sequence")


def _batch(engine: Engine, timed: _Timed, count: int, tokens: int) -> list[float]:
    """Return the seconds of the loop in each turn."""
    for i in range(count):
        prompt = [(i + position) % 64 for position in range(_PROMPT_TOKENS)]
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
        engine.submit(Request(RequestId(f"loop-{i}"), prompt, sampling, 0.0))
    seconds = []
    while engine.has_requests:
        started_s = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started_s - timed.last_s)
    return seconds
