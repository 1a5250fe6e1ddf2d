"""Every step runs twice: as planned, and as the base model would run it."""

import math
from typing import Any, cast

import msgspec
import pytest

from benchmarks.accept.twins import MOST_REPEATS, TwinExecutor
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
