"""Reads memory, cores, processor and GPUs of this machine from the system, without device libraries."""

import math
import os
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_PROCESSORS = Path("/proc/cpuinfo")
_GPUS = Path("/proc/driver/nvidia/gpus")


def memory_limit_bytes(cgroups: Path = _CGROUPS, own_groups: Path = Path("/proc/self/cgroup")) -> int:
    """Return the bytes of memory that this process may use: the machine's, or a control group's limit if it is lower.

    Args:
        cgroups: folder where control groups are mounted.
        own_groups: file that names this process's control groups.
    """
    return min([int(psutil.virtual_memory().total), *_limits(cgroups, own_groups)])


def free_memory_bytes() -> int:
    """Return the bytes of free memory of this machine, up to the limit of this process."""
    return min(int(psutil.virtual_memory().available), memory_limit_bytes())


def usable_cores() -> set[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))  # macOS has no affinity.


def core_limit(cgroups: Path = _CGROUPS, own_groups: Path = Path("/proc/self/cgroup")) -> float:
    """Return the cores' worth of time that control groups let this process use, such as a pod's CPU limit.

    Args:
        cgroups: folder where control groups are mounted.
        own_groups: file that names this process's control groups.

    Returns:
        The lowest quota divided by its period, which may be a fraction; infinity without a limit.
    """
    limit = math.inf
    for group, version in _groups("cpu", cgroups, own_groups):
        if version == 2:
            quota, _, period = _read(group / "cpu.max").partition(" ")
        else:
            quota = _read(group / "cpu.cfs_quota_us")
            period = _read(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():  # A group without a limit says "max" or -1.
            limit = min(limit, int(quota) / int(period))
    return limit


def busy_core_s(cores: Iterable[int]) -> float:
    """Return the core-seconds for which some cores have been busy since the machine started.

    Time of processes with a lower priority (``nice``) does not count, since they leave a core to others. Time that a
    hypervisor took away does.
    """
    times = psutil.cpu_times(percpu=True)
    return float(
        sum(
            sum(getattr(times[core], kind, 0.0) for kind in ("user", "system", "irq", "softirq", "steal"))
            for core in cores
            if core < len(times)
        )
    )


def process_core_s(process_id: int) -> float:
    """Return the core-seconds that a process has used; 0 if it has ended."""
    try:
        times = psutil.Process(process_id).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _limits(cgroups: Path, own_groups: Path) -> list[int]:
    """Return the memory limits of the process's control group and of all groups above it."""
    files = {2: "memory.max", 1: "memory.limit_in_bytes"}
    values = (_read(group / files[version]) for group, version in _groups("memory", cgroups, own_groups))
    return [int(value) for value in values if value.isdigit()]  # A group without a limit says "max".


def _groups(controller: str, cgroups: Path, own_groups: Path) -> Iterator[tuple[Path, int]]:
    """Yield the process's control group for a controller and the groups above it, each with its version, 1 or 2."""
    for line in _read(own_groups).splitlines():  # The file is missing where the system is not Linux.
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root = cgroups
            version = 2
        elif controller in controllers.split(","):
            root = cgroups / controller
            version = 1
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            yield folder, version


def _read(file: Path) -> str:
    """Return a file's text without space around it; empty if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def cpu_model() -> str:
    """Return the name of the processor."""
    named = _named(_PROCESSORS, "model name")
    return named or platform.processor() or platform.machine()


def gpu_models() -> list[str]:
    """Return the names of the GPUs that NVIDIA's driver lists; none without the driver."""
    if not _GPUS.is_dir():
        return []
    return [name for folder in sorted(_GPUS.iterdir()) if (name := _named(folder / "information", "Model"))]


def _named(file: Path, field: str) -> str:
    """Return the first value of a field in a file of ``field : value`` lines; empty if the field is missing."""
    if file.is_file():
        for row in file.read_text().splitlines():
            name, _, value = row.partition(":")
            if name.strip() == field:
                return value.strip()
    return ""
