"""Reads memory, cores, processor and GPUs of this machine from the system, without device libraries."""

import os
import platform
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


def _limits(cgroups: Path, own_groups: Path) -> list[int]:
    """Return the limits of the process's control group and of all groups above it."""
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:  # The system is not Linux.
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # The entry is of version 2.
            root = cgroups
            file = "memory.max"
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            file = "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            try:
                limit = (folder / file).read_text().strip()
            except OSError:
                continue
            if limit.isdigit():  # The value is a number, not "max".
                found.append(int(limit))
    return found


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
