"""What the system says of memory, cores and their use."""

import math
import os
import time
from pathlib import Path

from lorikeet.core.machine import busy_core_s, core_limit, memory_limit_bytes, process_core_s, usable_cores


def test_the_memory_limit_is_the_lowest_of_the_control_groups(tmp_path: Path) -> None:
    own = tmp_path / "own"
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "memory.max").write_text("1000\n")
    (tmp_path / "a" / "b" / "memory.max").write_text("max\n")
    own.write_text("0::/a/b\n")
    assert memory_limit_bytes(tmp_path, own) == 1000
    (tmp_path / "memory" / "c").mkdir(parents=True)
    (tmp_path / "memory" / "c" / "memory.limit_in_bytes").write_text("500\n")
    own.write_text("9:cpu:/c\n8:memory:/c\n")
    assert memory_limit_bytes(tmp_path, own) == 500
    assert memory_limit_bytes(tmp_path, tmp_path / "nothing") > 1000


def test_the_limit_of_cores_is_the_lowest_of_the_control_groups(tmp_path: Path) -> None:
    own = tmp_path / "own"
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "a" / "b" / "cpu.max").write_text("max 100000\n")
    own.write_text("0::/a/b\n")
    assert core_limit(tmp_path, own) == 1.5
    (tmp_path / "cpu" / "c").mkdir(parents=True)
    (tmp_path / "cpu" / "c" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "c" / "cpu.cfs_period_us").write_text("100000\n")
    own.write_text("9:cpuacct,cpu:/c\n4:cpu:/c\n8:memory:/c\n")
    assert core_limit(tmp_path, own) == math.inf
    (tmp_path / "cpu" / "c" / "cpu.cfs_quota_us").write_text("50000\n")
    assert core_limit(tmp_path, own) == 0.5
    assert core_limit(tmp_path, tmp_path / "nothing") == math.inf


def test_time_of_cores_and_processes_is_read_from_the_system() -> None:
    cores = usable_cores()
    busy_s = busy_core_s([*cores, 10**6])
    own_s = process_core_s(os.getpid())
    assert 0 < own_s <= time.process_time() + 0.02
    while time.process_time() < own_s + 0.1:
        pass
    assert process_core_s(os.getpid()) > own_s
    assert busy_core_s(cores) > busy_s
    assert process_core_s(2**30) == 0.0
