"""When a rank's threads are kept apart."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lorikeet.core.ids import RequestId
from lorikeet.core.plan import KernelForm, SequenceStep, StepPlan
from lorikeet.kernels.reference import ReferenceKernels
from lorikeet.worker import threads
from lorikeet.worker.threads import HEARTBEAT_S, PAUSE_S, CpuBudget, ThreadPinning, requested_threads, use_one_thread


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
LATER_S, SOON_S = 2 * PAUSE_S, PAUSE_S / 2


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: {2, 3, 5, 7})


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


def test_threads_that_may_end_within_the_plan_are_not_kept_apart(tmp_path: Path) -> None:
    plan = StepPlan(1, sequences=(STEP,), kernel_form=KernelForm.EINSUM)
    assert not Rig(tmp_path, asked=0).kept_apart(plan, LATER_S)


# --- Ranks on one machine share its cores -------------------------------------------------------


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: set(range(8)))


def test_a_rank_alone_takes_all_cores_and_a_second_busy_one_half_of_them(tmp_path: Path) -> None:
    first, second = CpuBudget(folder=tmp_path), CpuBudget(folder=tmp_path)
    assert first.threads(0.0) == 8
    assert second.threads(0.0) == 4
    assert first.threads(HEARTBEAT_S / 2) == 8  # counted a moment ago
    assert first.threads(HEARTBEAT_S) == 4
    second.close()
    assert first.threads(2 * HEARTBEAT_S) == 8


def test_ranks_that_insist_are_counted_with_what_they_take(tmp_path: Path) -> None:
    insistent, first, second = CpuBudget(3, tmp_path), CpuBudget(folder=tmp_path), CpuBudget(folder=tmp_path)
    assert [share.threads(0.0) for share in (insistent, first, second)] == [3, 5, 2]
    assert first.threads(1.0) == 2
    assert CpuBudget(8, tmp_path).threads(0.0) == 8
    assert first.threads(2.0) == 1


def test_ranks_that_idle_or_run_on_other_cores_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    idle, first = CpuBudget(folder=tmp_path), CpuBudget(folder=tmp_path)
    idle.threads(0.0)
    for path in tmp_path.iterdir():
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - threads.BUSY_WITHIN_S))
    assert first.threads(0.0) == 8
    monkeypatch.setattr(threads, "usable_cores", lambda: {8, 9})
    elsewhere = CpuBudget(folder=tmp_path)
    assert elsewhere.threads(0.0) == 2
    assert first.threads(1.0) == 8


def test_openmps_own_setting_counts_where_ours_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    assert (requested_threads(0), requested_threads(5)) == (3, 5)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert requested_threads(0) == 0


def test_a_thread_that_computes_alone_leaves_the_others_theirs() -> None:
    def threads_of_a_thread() -> int:
        use_one_thread()
        return torch.get_num_threads()

    torch.set_num_threads(2)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(threads_of_a_thread).result() == 1
    assert torch.get_num_threads() == 2


def test_files_left_behind_are_cleared_away(tmp_path: Path) -> None:
    left = tmp_path / "1-left"
    left.write_text("{")
    os.utime(left, (0, 0))
    assert CpuBudget(folder=tmp_path).threads(0.0) == 8
    assert not left.exists()


def test_a_disk_that_takes_no_files_costs_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shut = tmp_path / "shut"
    share = CpuBudget(folder=shut / "cores")
    shut.write_text("")  # not a folder, as if it were full
    assert [share.threads(now) for now in (0.0, 1.0)] == [8, 8]
    assert len(caplog.records) == 1
    shut.unlink()
    assert share.threads(2.0) == 8
    assert CpuBudget(folder=shut / "cores").threads(0.0) == 4
    share.close()
