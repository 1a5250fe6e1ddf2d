"""The conditions under which a rank's threads are pinned."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from lorikeet.core.ids import RequestId
from lorikeet.core.plan import KernelForm, SequenceStep, StepPlan
from lorikeet.kernels.reference import ReferenceKernels
from lorikeet.worker import threads
from lorikeet.worker.threads import PAUSE_S, CpuBudget, ThreadPinning


class Threads(ReferenceKernels):
    """A backend that only counts its threads, and writes down where they are kept."""

    threads = 1

    def __init__(self) -> None:
        self.kept: list[Sequence[int]] = []
        self.are_kept = False

    @contextmanager
    def pin_threads(self, cores: Sequence[int]) -> Iterator[None]:
        self.kept.append(cores)
        self.are_kept = True
        yield
        self.are_kept = False


class Rig:
    def __init__(self, folder: Path, asked: int) -> None:
        self.now_s = 100.0
        self.kernels = Threads()
        self.team = ThreadPinning(self.kernels, CpuBudget(asked, folder), lambda: self.now_s)

    def kept_apart(self, plan: StepPlan, after_s: float) -> bool:
        """Run a plan that takes a second, so long after the last."""
        self.now_s += after_s
        self.team.resize()
        with self.team.pinned(plan):
            kept = self.kernels.are_kept
            self.now_s += 1.0
        assert not self.kernels.are_kept
        return kept


STEP = SequenceStep(RequestId("a"), start=0, tokens=1, new_blocks=(), samples=True)
LATER_S = 2 * PAUSE_S
SOON_S = PAUSE_S / 2


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: {2, 3, 5, 7})
    monkeypatch.setattr(threads, "busy_core_s", lambda cores: 0.0)


def test_a_plan_after_a_pause_has_a_core_for_each_thread(tmp_path: Path) -> None:
    rig = Rig(tmp_path, asked=0)
    plan = StepPlan(1, sequences=(STEP,))
    assert [rig.kept_apart(plan, after_s) for after_s in (LATER_S, SOON_S, LATER_S)] == [True, False, True]
    assert rig.kernels.kept == [[2, 3, 5, 7]] * 2


def test_a_plan_that_computes_nothing_ends_no_pause(tmp_path: Path) -> None:
    rig = Rig(tmp_path, asked=0)
    assert not rig.kept_apart(StepPlan(1), LATER_S)
    assert rig.kept_apart(StepPlan(2, sequences=(STEP,)), SOON_S)


@pytest.mark.parametrize("asked", [1, 3])
def test_a_rank_with_fewer_threads_than_cores_leaves_them_to_the_system(tmp_path: Path, asked: int) -> None:
    assert not Rig(tmp_path, asked).kept_apart(StepPlan(1, sequences=(STEP,)), LATER_S)


def test_threads_that_may_end_within_the_plan_are_not_pinned(tmp_path: Path) -> None:
    plan = StepPlan(1, sequences=(STEP,), kernel_form=KernelForm.EINSUM)
    assert not Rig(tmp_path, asked=0).kept_apart(plan, LATER_S)
