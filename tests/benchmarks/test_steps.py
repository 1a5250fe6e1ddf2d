"""How benchmarks watch the steps of an engine: twice, with and without adapters, and by kernel."""

import math
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest
import torch

from benchmarks.steps import AT_ONCE, MOST_REPEATS, Stopwatch, TwinExecutor
from lorikeet.core.ids import AdapterDigest, BlockId, RequestId
from lorikeet.core.plan import SequenceStart, SequenceStep, StepPlan, StepResult
from lorikeet.core.request import SamplingParams

A, TWIN, ADAPTER = RequestId("a"), RequestId("a, base"), AdapterDigest("digest")


class Recorder:
    """Remembers plans."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return StepResult(plan.step, (), plan.repeat, 0.0, failed=tuple(step.request_id for step in plan.sequences))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def twins(recorder: Recorder) -> TwinExecutor:
    return TwinExecutor(cast(Any, recorder))


def prefill() -> StepPlan:
    start = SequenceStart(A, [1, 2], 2, SamplingParams(max_tokens=9), ADAPTER)
    return StepPlan(0, (SequenceStep(A, 0, 2, (BlockId(3),), True),), (start,), adapters=(ADAPTER,))


def decode(step: int) -> StepPlan:
    return StepPlan(step, (SequenceStep(A, 1 + step, 1, (), True),), adapters=(ADAPTER,), repeat=8, overlapped=True)


def test_a_twin_does_the_same_work_on_the_same_blocks_without_an_adapter(
    twins: TwinExecutor, recorder: Recorder
) -> None:
    assert twins.execute(prefill()).failed == (A,)
    base, adapted = recorder.plans
    assert adapted == msgspec.structs.replace(prefill(), max_duration_s=math.inf)
    assert (base.starts[0].request_id, base.starts[0].adapter, base.adapters) == (TWIN, None, ())
    assert base.sequences == (SequenceStep(TWIN, 0, 2, (BlockId(3),), True),)
    assert not twins.decodes


def test_decode_steps_run_a_few_times_each_and_change_sides(twins: TwinExecutor, recorder: Recorder) -> None:
    twins.execute(prefill())
    recorder.plans.clear()
    for step in (1, 2):
        twins.execute(decode(step))
    assert [plan.sequences[0].request_id for plan in recorder.plans] == [TWIN, A, A, TWIN]
    assert all(plan.repeat == MOST_REPEATS and not plan.overlapped for plan in recorder.plans)
    assert len(twins.decodes) == 2


def test_only_twins_that_began_are_dropped(twins: TwinExecutor, recorder: Recorder) -> None:
    twins.execute(StepPlan(0, drops=(RequestId("earlier"),)))
    twins.execute(prefill())
    twins.drop_twins()
    assert [plan.drops for plan in recorder.plans if plan.drops] == [(RequestId("earlier"),), (TWIN,)]


class OneByOne:
    """Kernels of which only two are called here."""

    threads = 1

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def choose(self, logits: torch.Tensor, parameters: object) -> torch.Tensor:
        return logits

    def layers_in_one_call(self, weights: object, shape: object) -> Callable[[torch.Tensor], torch.Tensor]:
        return self.linear


def test_a_stopwatch_tells_decode_steps_from_those_that_finish_a_prompt() -> None:
    watch = Stopwatch(cast(Any, OneByOne()), timed=("linear", "choose"))
    for rows in (1, 2, 2, 2, 1):
        watch.linear(torch.zeros(1))
        watch.choose(torch.zeros(rows, 3), cast(Any, None))
    decoded = watch.decode_steps(2)
    assert [times for _, times in decoded] == watch.steps[2:4]
    assert all(times.in_kernels_s.keys() == {"linear", "choose"} for _, times in decoded)
    watch.threads = 3
    assert watch.threads == 3


def test_a_stopwatch_calls_all_layers_at_once_unless_single_kernels_are_timed() -> None:
    nothing = cast(Any, None)
    assert Stopwatch(cast(Any, OneByOne()), timed=("linear", "choose")).layers_in_one_call(nothing, nothing) is None
    assert Stopwatch(cast(Any, OneByOne())).layers_in_one_call(nothing, nothing) is not None
    watch = Stopwatch(cast(Any, OneByOne()), timed=AT_ONCE[:1])
    layers = cast(Any, watch.layers_in_one_call(nothing, nothing))
    layers(torch.zeros(1))
    watch.choose(torch.zeros(1, 3), nothing)
    assert watch.steps[0].in_kernels_s.keys() == {"layers"}
