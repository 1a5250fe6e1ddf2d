"""Ways to watch the steps of an engine: kernel by kernel, with and without adapters, and beside loads of adapters."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import msgspec
from torch import Tensor

from benchmarks.harness import make_requests
from benchmarks.memory_bench import fill_host
from lorikeet.config import Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.executor import Executor
from lorikeet.core.ids import RequestId
from lorikeet.core.plan import StepPlan, StepResult
from lorikeet.engine.build import Replica, build_replica
from lorikeet.kernels.interface import Kernels, Layers, LayersShape, LayerWeights
from lorikeet.kernels.sampling import SamplingTensors

# --- by kernel ---------------------------------------------------------------------------------------

KERNELS = ("linear", "logits", "add_norm", "rotary_store", "attention", "silu_mul", "gelu_mul", "choose")
"""All of a step, one by one."""
AT_ONCE = ("layers", "add_norm", "linear", "logits", "choose")
"""All of a step whose layers are one call."""


class StepTimes(NamedTuple):
    """One forward pass, from the previous sampling of tokens to its own.

    Attributes:
        end_s: monotonic time of its end.
        rows: sequences that got a token.
        in_kernels_s: kernel → seconds, of those that are timed.
    """

    end_s: float
    rows: int
    in_kernels_s: dict[str, float]


class Stopwatch:
    """Wraps a kernel backend and appends to ``steps`` after each sampling of tokens.

    Args:
        inner: computes.
        timed: kernels to time; if there are any, but ``layers`` is not among them, all kernels are called
            one by one, which takes longer.
    """

    def __init__(self, inner: Kernels, timed: Collection[str] = ()) -> None:
        self._inner = inner
        self._in_kernels_s: dict[str, float] = defaultdict(float)
        self.steps: list[StepTimes] = []
        self._choose = inner.choose
        self.layers_in_one_call = inner.layers_in_one_call
        if timed and "layers" not in timed:
            self.layers_in_one_call = lambda weights, shape: None
        for name in timed:
            if name == "layers":
                self.layers_in_one_call = self._timed_layers
            else:
                setattr(self, "_choose" if name == "choose" else name, self._timed(name, getattr(inner, name)))

    @property
    def threads(self) -> int:
        """The wrapped backend's."""
        return self._inner.threads

    @threads.setter
    def threads(self, threads: int) -> None:
        self._inner.threads = threads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def choose(self, logits: Tensor, parameters: SamplingTensors) -> Tensor:
        """Sample, and end a step."""
        token_ids = self._choose(logits, parameters)
        self.steps.append(StepTimes(time.monotonic(), len(logits), dict(self._in_kernels_s)))
        self._in_kernels_s.clear()
        return token_ids

    def decode_steps(self, rows: int) -> list[tuple[float, StepTimes]]:
        """Return seconds and times of the steps that decoded ``rows`` sequences and did nothing else.

        In the step before, all of them had got a token too, so that none was still at its prompt.
        """
        return [
            (after.end_s - before.end_s, after)
            for before, after in pairwise(self.steps)
            if before.rows == after.rows == rows
        ]

    def _timed_layers(self, weights: Sequence[LayerWeights], shape: LayersShape) -> Layers | None:
        layers = self._inner.layers_in_one_call(weights, shape)
        return None if layers is None else self._timed("layers", layers)

    def _timed(self, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start_s = time.perf_counter()
            result = kernel(*arguments)
            self._in_kernels_s[name] += time.perf_counter() - start_s
            return result

        return timed


# --- with and without adapters -----------------------------------------------------------------------

MOST_REPEATS = 4
"""Steps of a run: as in service, the host's work for repeated steps counts once, not for each of them."""


class Pair(NamedTuple):
    """The two runs of a step, of repeated ones on average."""

    adapters_s: float
    base_s: float


class TwinExecutor:
    """Runs each plan with its adapters and for the base model, and times both; which runs first alternates.

    The base model runs twins: sequences of the same length in the same blocks. Both runs write their keys and values
    there, so the generated tokens mean nothing. Of repeated steps only a few are run.

    Args:
        inner: runs the plans.
    """

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._twins: set[RequestId] = set()
        self.decodes: list[Pair] = []
        """Of steps in which every sequence decodes."""
        self.prefills: list[Pair] = []
        """Of steps in which every sequence begins."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run both and return the result of the plan itself."""
        repeat = min(plan.repeat, MOST_REPEATS)
        plan = msgspec.structs.replace(plan, repeat=repeat, max_duration_s=math.inf, overlapped=False)
        base = self._base_of(plan)
        seconds = dict[bool, float]()
        results = dict[bool, StepResult]()
        pairs = self._pairs_of(plan)
        base_first = len(pairs) % 2 == 0
        for is_base in (base_first, not base_first):
            start_s = time.perf_counter()
            results[is_base] = self._inner.execute(base if is_base else plan)
            seconds[is_base] = (time.perf_counter() - start_s) / repeat
            if results[is_base].steps_run != repeat:
                raise RuntimeError(f"{results[is_base].steps_run} of {repeat} steps ran")
        pairs.append(Pair(adapters_s=seconds[False], base_s=seconds[True]))
        return results[False]

    def drop_twins(self) -> None:
        """Forget the twins that no plan has dropped yet."""
        self._inner.execute(StepPlan(step=0, drops=tuple(self._twins)))
        self._twins.clear()

    def _pairs_of(self, plan: StepPlan) -> list[Pair]:
        """Return the list for a plan's pair; a new one if it does not count."""
        if plan.sequences and all(step.tokens == 1 and step.start > 0 for step in plan.sequences):
            return self.decodes
        begins = plan.sequences and all(step.tokens > 1 and step.start == 0 for step in plan.sequences)
        return self.prefills if begins else []

    def _base_of(self, plan: StepPlan) -> StepPlan:
        """Return the plan for the twins, without adapters and without transfers."""
        replace = msgspec.structs.replace
        dropped = {_twin_of(request_id) for request_id in plan.drops} & self._twins
        starts = tuple(replace(start, request_id=_twin_of(start.request_id), adapter=None) for start in plan.starts)
        self._twins = (self._twins - dropped) | {start.request_id for start in starts}
        return StepPlan(
            step=plan.step,
            sequences=tuple(replace(step, request_id=_twin_of(step.request_id)) for step in plan.sequences),
            starts=starts,
            drops=tuple(dropped),
            repeat=plan.repeat,
            max_duration_s=plan.max_duration_s,
        )


@contextmanager
def twins(built: Replica) -> Iterator[TwinExecutor]:
    """Let the engine run every step twice; requests must start and finish within the context."""
    executor = TwinExecutor(built.engine._executor)
    with mock.patch.object(built.engine, "_executor", executor):
        yield executor
    executor.drop_twins()


def _twin_of(request_id: RequestId) -> RequestId:
    return RequestId(f"{request_id}, base")


# --- beside loads of adapters ------------------------------------------------------------------------

DECODES = 8
EVERY_S = 1.0
LONGEST_TOKENS = 1536
_PROMPT_TOKENS = 32
_LEAST_STEPS = 12


class Span(NamedTuple):
    """Start and end of something, by the monotonic clock."""

    began_s: float
    ended_s: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended_s - self.began_s


class LoadTimes(NamedTuple):
    """Times of adapter loads, of decode steps during a load, and of all other decode steps."""

    loads_s: list[float]
    beside_s: list[float]
    others_s: list[float]


class _Timed:
    """Runs plans and records when each began, whether all sequences decoded, and when transfers began."""

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


def measure_loads(settings: Settings, refs: Sequence[AdapterRef]) -> LoadTimes:
    """Load an adapter a second beside eight decodes, and return the times.

    A load counts from the beginning of the plan that asks for it until its end is reported, a step from its beginning
    to the next one's. The first load warms up and does not count.

    Args:
        settings: of an engine with a host tier for all adapters and sequences of ``LONGEST_TOKENS``.
        refs: adapters that are not loaded yet; one is requested each second.
    """
    ends_s: list[float] = []
    built = build_replica(settings, on_load_done=lambda: ends_s.append(time.monotonic()))
    with closing(built.engine):
        fill_host(built.engine, tuple(refs))
        timed = _Timed(built.engine._executor)
        ends_s.clear()
        with mock.patch.object(built.engine, "_executor", timed):
            _decode_and_load(built, refs)
    loads = [Span(*each) for each in zip(timed.load_begins_s, ends_s, strict=False)][1:]
    steps = [Span(began_s, next_s) for (began_s, decodes), (next_s, _) in pairwise(timed.turns) if decodes]
    beside = {step for step in steps for load in loads if _overlap(step, load)}
    return LoadTimes(
        [load.seconds for load in loads],
        [step.seconds for step in steps if step in beside],
        [step.seconds for step in steps if step not in beside],
    )


def _decode_and_load(built: Replica, refs: Sequence[AdapterRef]) -> None:
    engine = built.engine
    for request in make_requests("decode", DECODES, _PROMPT_TOKENS, LONGEST_TOKENS - _PROMPT_TOKENS):
        engine.submit(request)
    waiting = make_requests("load", len(refs), 4, 1, refs, seed=100)
    due_s = time.monotonic() + EVERY_S
    steps = 0
    while waiting or time.monotonic() < due_s or steps < _LEAST_STEPS:
        if waiting and time.monotonic() >= due_s:
            engine.submit(waiting.pop(0))
            due_s += EVERY_S
        engine.step()
        steps += 1
    for number in range(DECODES):
        engine.abort(RequestId(f"decode-{number}"))
    while engine.has_requests or engine.is_busy:
        engine.step()


def _overlap(step: Span, load: Span) -> bool:
    return step.began_s < load.ended_s and load.began_s < step.ended_s
