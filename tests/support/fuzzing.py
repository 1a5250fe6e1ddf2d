"""Limits of every case of a fuzz test, and how many cases there are: a few in the suite, more with ``--fuzz N``."""

import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import hypothesis
import psutil

GROWTH_BYTES = 500 * 10**6
"""By how much no process may grow."""
CASE_S = 2.0
"""CPU time that no case may take in this process."""
CHILD_S = CASE_S + 1.0
"""CPU time that no case may take in a process that it starts, which ends by itself after ``CASE_S`` of work."""
_ADDRESS_SPACE_BYTES = 4 * 2**30
"""More than this process has: a case that wants more fails, and the machine goes on."""


@dataclass
class Fuzzing:
    """Runs and measures the cases of one test.

    Args:
        cases: of the option; 0 for as many as the suite has time for.

    Attributes:
        counts: of what the test wants to tell.
        longest_s, growth_bytes: the most that a case took of CPU time, and a process of memory.
    """

    cases: int
    counts: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    growth_bytes: int = 0
    _peaks: dict[int, int] = field(default_factory=dict)

    def settings(self, few: int) -> hypothesis.settings:
        """Return the settings of ``@given``: the same few cases on every run, or many others."""
        return hypothesis.settings(
            max_examples=self.cases or few,
            derandomize=not self.cases,
            database=None,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            print_blob=True,
        )

    @contextmanager
    def case(self, *kind: str) -> Iterator[None]:
        """Run a case, and check what it takes.

        Raises:
            AssertionError: it takes too much.
        """
        self.counts["cases"] += 1
        self._reset_own_peak()
        children = psutil.Process().children(recursive=True)
        before_s, before_of_children_s = time.process_time(), _cpu_s(children)
        try:
            yield
        finally:
            took_s = time.process_time() - before_s
            children = psutil.Process().children(recursive=True)
            child_s = _cpu_s(children) - before_of_children_s
            self.longest_s = max(self.longest_s, took_s, child_s)
            self._note_memory([os.getpid(), *(child.pid for child in children)])
        assert took_s < CASE_S, f"{kind}: took {took_s:.1f} s"
        assert child_s < CHILD_S, f"{kind}: took {child_s:.1f} s in a process of its own"
        assert self.growth_bytes < GROWTH_BYTES, f"{kind}: a process grew by {self.growth_bytes / 1e6:.0f} MB"

    def __str__(self) -> str:
        told = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        return f"{told}; longest {self.longest_s:.2f} s, growth {self.growth_bytes / 1e6:.0f} MB"

    def _reset_own_peak(self) -> None:
        """Count the growth of this process from here: hypothesis keeps 60 KB of each case."""
        with suppress(OSError):
            with open("/proc/self/clear_refs", "w") as peaks:
                peaks.write("5")
            self._peaks[os.getpid()] = _peak_bytes(os.getpid())

    def _note_memory(self, processes: list[int]) -> None:
        for pid in processes:
            with suppress(OSError):
                peak = _peak_bytes(pid)
                self.growth_bytes = max(self.growth_bytes, peak - self._peaks.setdefault(pid, peak))


@contextmanager
def watched(cases: int) -> Iterator[Fuzzing]:
    """Run a fuzz test within a limit of memory, and print what it took."""
    fuzzing = Fuzzing(cases)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + _ADDRESS_SPACE_BYTES, hard))
    try:
        yield fuzzing
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    print(f"\n{fuzzing}")  # noqa: T201 - the option -rP shows it


def _peak_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        peak = next((line for line in status if line.startswith("VmHWM:")), "")
    if not peak:
        raise ProcessLookupError(f"process {pid} has just ended")
    return int(peak.split()[1]) * 1024


def _cpu_s(processes: list[psutil.Process]) -> float:
    """Return the CPU time of processes, and of those that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = used.ru_utime + used.ru_stime
    for process in processes:
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total
