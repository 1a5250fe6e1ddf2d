"""What adapters add to a step: every step runs twice, with the adapters and without, one right after the other."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import msgspec

from lorikeet.core.ids import RequestId
from lorikeet.core.plan import StepPlan, StepResult
from lorikeet.engine.build import Replica
from lorikeet.engine.executor import Executor

MOST_REPEATS = 4
"""Steps of a run. What the host does once for repeated steps is not counted for each, as it is not where they serve."""


class Pair(NamedTuple):
    """The two runs of a step, of repeated ones on average."""

    adapters_s: float
    base_s: float


class TwinExecutor:
    """Runs each plan and, for the base model, its twin; of pairs, one has the base first and the next one second.

    Twins are sequences of the same length in the same blocks. Each run writes the keys and values of its own tokens
    there, so what is generated means nothing. Of repeated steps a few are run.

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
        """Run both and return what came of the plan itself."""
        repeat = min(plan.repeat, MOST_REPEATS)
        plan = msgspec.structs.replace(plan, repeat=repeat, max_duration_s=math.inf, overlapped=False)
        base = self._base_of(plan)
        seconds, results = dict[bool, float](), dict[bool, StepResult]()
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
        """Return where a plan's pair is kept, if it is."""
        if plan.sequences and all(step.tokens == 1 and step.start > 0 for step in plan.sequences):
            return self.decodes
        begins = plan.sequences and all(step.tokens > 1 and step.start == 0 for step in plan.sequences)
        return self.prefills if begins else []

    def _base_of(self, plan: StepPlan) -> StepPlan:
        """Return the plan for the twins: no adapters, and nothing that is done once."""
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
    """Let the engine run every step twice meanwhile; its requests begin and end here."""
    executor = TwinExecutor(built.engine._executor)
    with mock.patch.object(built.engine, "_executor", executor):
        yield executor
    executor.drop_twins()


def _twin_of(request_id: RequestId) -> RequestId:
    return RequestId(f"{request_id}, base")
