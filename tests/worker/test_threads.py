"""Ranks on one machine share its cores."""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lorikeet.worker import threads
from lorikeet.worker.threads import HEARTBEAT_S, CpuBudget, requested_threads, use_one_thread


class Machine:
    """Eight cores that other processes and ranks use as a test says."""

    def __init__(self) -> None:
        self.busy_s = 1000.0
        self.processes_s = {os.getpid(): 100.0}
        self.limit = math.inf

    def run(self, seconds: float, others: float, own: float = 0.0) -> None:
        """Let time pass in which other processes use so many cores, and this process so many."""
        self.busy_s += seconds * (others + own)
        self.processes_s[os.getpid()] += seconds * own


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(threads, "usable_cores", lambda: set(range(8)))
    monkeypatch.setattr(threads, "core_limit", lambda: machine.limit)
    monkeypatch.setattr(threads, "busy_core_s", lambda cores: machine.busy_s)
    monkeypatch.setattr(threads, "process_core_s", lambda process: machine.processes_s.get(process, 0.0))
    return machine


def test_a_rank_alone_takes_all_cores_and_a_second_busy_one_half_of_them(tmp_path: Path) -> None:
    first = CpuBudget(folder=tmp_path)
    second = CpuBudget(folder=tmp_path)
    assert first.threads(0.0) == 8
    assert second.threads(0.0) == 4
    assert first.threads(HEARTBEAT_S / 2) == 8  # counted a moment ago
    assert first.threads(HEARTBEAT_S) == 4
    second.close()
    assert first.threads(2 * HEARTBEAT_S) == 8


def test_ranks_with_fixed_threads_count_with_these(tmp_path: Path) -> None:
    insistent = CpuBudget(3, tmp_path)
    first = CpuBudget(folder=tmp_path)
    second = CpuBudget(folder=tmp_path)
    assert [share.threads(0.0) for share in (insistent, first, second)] == [3, 5, 2]
    assert first.threads(1.0) == 2
    assert CpuBudget(8, tmp_path).threads(0.0) == 8
    assert first.threads(2.0) == 1


def test_ranks_that_idle_or_run_on_other_cores_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = CpuBudget(folder=tmp_path)
    first = CpuBudget(folder=tmp_path)
    idle.threads(0.0)
    for path in tmp_path.iterdir():
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - threads.BUSY_WITHIN_S))
    assert first.threads(0.0) == 8
    monkeypatch.setattr(threads, "usable_cores", lambda: {8, 9})
    elsewhere = CpuBudget(folder=tmp_path)
    assert elsewhere.threads(0.0) == 2
    assert first.threads(1.0) == 8


def test_a_rank_leaves_the_cores_that_other_processes_take(tmp_path: Path, machine: Machine) -> None:
    rank = CpuBudget(folder=tmp_path)
    found = []
    for at, others in enumerate((0.0, 0.5, 0.7, 1.0, 2.0, 9.0, 0.0), 1):
        found.append(rank.threads(at - 1.0))
        machine.run(1.0, others, own=8.0 - min(8.0, others))
    assert [*found, rank.threads(7.0)] == [8, 8, 8, 7, 7, 6, 1, 8]


def test_another_rank_is_counted_by_its_file_and_not_by_its_load(tmp_path: Path, machine: Machine) -> None:
    first = CpuBudget(folder=tmp_path)
    second = CpuBudget(folder=tmp_path)
    other = os.getpid() + 1
    second._path = tmp_path / f"{other}-second"
    machine.processes_s[other] = 500.0
    assert [first.threads(0.0), second.threads(0.0)] == [8, 4]
    for at in (1.0, 2.0):
        machine.busy_s += 8.0
        machine.processes_s[os.getpid()] += 4.0
        machine.processes_s[other] += 4.0
        found = first.threads(at)
    assert found == 4
    second.close()
    assert first.threads(3.0) == 8


def test_a_limit_of_the_control_group_bounds_the_threads(tmp_path: Path, machine: Machine) -> None:
    machine.limit = 3.5
    assert CpuBudget(folder=tmp_path / "a").threads(0.0) == 3
    machine.limit = 0.5
    assert CpuBudget(folder=tmp_path / "b").threads(0.0) == 1
    assert CpuBudget(5, tmp_path / "b").threads(0.0) == 5


def test_the_setting_of_openmp_counts_without_ours(monkeypatch: pytest.MonkeyPatch) -> None:
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
