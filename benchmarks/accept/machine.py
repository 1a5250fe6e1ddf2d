"""Where and on what a figure was measured."""

import os
import platform
import statistics
import time
from functools import cache
from importlib.metadata import version
from typing import Any

import psutil

from lorikeet.bench.machine import cpu_model
from lorikeet.kernels.library import supported_instruction_sets


def describe_machine() -> dict[str, str | int | float]:
    """Return the machine in plain words and numbers, and how fast Python is on it at the moment."""
    return _lasting() | {"python_additions_per_us": _additions_per_us()}


def _lasting() -> dict[str, str | int | float]:
    return {
        "cpu": cpu_model(),
        "instructions": (*supported_instruction_sets(), "none")[0],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def machine_words(machine: dict[str, Any]) -> str:
    """Return what ``describe_machine`` found, in words; not how fast Python is, which changes."""
    cpu = machine["cpu"] + (f" ({machine['instructions']})" if "instructions" in machine else "")
    hardware = f"{cpu}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    return f"{hardware}, {machine['os']}, Python {machine['python']}, torch {machine['torch']}"


@cache
def this_machine() -> str:
    """Return this one in words."""
    return machine_words(_lasting())


def _additions_per_us() -> float:
    """Return the median of five loops of a million additions: processors of one name differ, and what else they do."""

    def measure() -> float:
        began_s, total = time.perf_counter(), 0
        for number in range(10**6):
            total += number
        return 1 / (time.perf_counter() - began_s)

    return round(statistics.median(measure() for _ in range(5)), 1)
