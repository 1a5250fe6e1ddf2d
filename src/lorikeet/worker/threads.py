"""Sets the number of a rank's threads, and pins them to cores."""

import contextlib
import ctypes
import logging
import math
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import msgspec
import torch

from lorikeet.core.machine import busy_core_s, core_limit, process_core_s, usable_cores
from lorikeet.core.plan import KernelForm, StepPlan
from lorikeet.kernels.interface import Kernels

_LOG = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
"""Interval at which a rank renews its file and counts the files of other ranks."""

BUSY_WITHIN_S = 2.0
"""A rank whose file is older than this is idle or has ended."""

_STALE_AFTER_S = 3600.0
"""Files older than this are deleted."""


_TAKEN_FROM = 0.6
"""Part of a core's time from which other processes have taken the core.

A process that always computes gets two thirds of a core or more beside two threads on two cores.
"""


class _RankCores(msgspec.Struct, frozen=True):
    """The content of a rank's file: the rank's cores, and its fixed number of threads (0 for a fair share)."""

    cores: list[int]
    threads: int


class CpuBudget:
    """One rank's share of the machine's cores.

    The busy ranks of a user's processes publish files in a common folder. They divide the cores fairly, up to a control
    group's limit, without the cores that other processes take (``docs/decisions/threads.md``).

    Args:
        threads: fixed number of threads. 0 takes a fair share.
        folder: folder of the files. The default is one folder per user.

    Attributes:
        all: the cores on which the rank may run.
    """

    def __init__(self, threads: int = 0, folder: Path | None = None) -> None:
        self._fixed = threads
        self.all = sorted(usable_cores())
        self._folder = folder or Path(tempfile.gettempdir()) / f"lorikeet-cores-{os.getuid()}"
        self._path = self._folder / f"{os.getpid()}-{uuid.uuid4().hex}"
        self._content = msgspec.json.encode(_RankCores(self.all, threads))
        self._due_s = float("-inf")
        self._limit = core_limit()
        self._threads = threads or max(1, math.floor(min(len(self.all), self._limit)))
        self._measured_s = math.inf
        self._busy_s = 0.0
        self._ranks_s: dict[int, float] = {}
        self._warned = False

    def threads(self, now: float) -> int:
        """Return the number of threads to compute with.

        The rank calls this before every step.

        Args:
            now: the time in seconds of a monotonic clock.
        """
        if now >= self._due_s:
            try:
                self._update(now)
            except OSError as error:  # The disk may be full, for example. The engine must run on.
                if not self._warned:
                    _LOG.warning("the ranks on this machine cannot share its cores: %s", error)
                self._warned = True
            self._due_s = now + HEARTBEAT_S
        return self._threads

    def _update(self, now: float) -> None:
        """Renew this rank's file and recompute its share."""
        try:
            os.utime(self._path)
        except FileNotFoundError:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path.write_bytes(self._content)  # Writing a file again can take milliseconds.
        if not self._fixed:
            self._threads = self._fair_threads(now)

    def close(self) -> None:
        """Delete this rank's file, so that other ranks get its cores."""
        self._path.unlink(missing_ok=True)

    def _fair_threads(self, now: float) -> int:
        """Return the cores that others leave, divided by the number of ranks with a fair share."""
        ranks = self._busy_others()
        left = len(self.all) - self._taken_cores(now, {os.getpid(), *(process for process, _ in ranks)})
        sharing = 1
        for _, rank in ranks:
            if not set(rank.cores).isdisjoint(self.all):
                left -= rank.threads
                sharing += rank.threads == 0
        return max(1, math.floor(min(left, self._limit)) // sharing)

    def _taken_cores(self, now: float, ranks: set[int]) -> int:
        """Return the number of cores that processes other than ranks have taken since the last call.

        Args:
            now: the time in seconds of a monotonic clock.
            ranks: process ids of all busy ranks.
        """
        busy_s = busy_core_s(self.all)
        ranks_s = {process: process_core_s(process) for process in ranks}
        used_s = busy_s - self._busy_s
        used_s -= sum(max(0.0, ranks_s[process] - self._ranks_s.get(process, math.inf)) for process in ranks)
        passed_s = now - self._measured_s
        self._measured_s = now
        self._busy_s = busy_s
        self._ranks_s = ranks_s
        return max(0, math.floor(used_s / passed_s + 1 - _TAKEN_FROM)) if passed_s > 0 else 0

    def _busy_others(self) -> list[tuple[int, _RankCores]]:
        """Return process id and content of the file of each other busy rank."""
        ranks = []
        for path in self._folder.iterdir():
            # Another rank may be writing or deleting its file at the same time.
            with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                age_s = time.time() - path.stat().st_mtime
                if path != self._path and age_s < BUSY_WITHIN_S:
                    content = msgspec.json.decode(path.read_bytes(), type=_RankCores)
                    ranks.append((int(path.name.partition("-")[0]), content))
                elif age_s > _STALE_AFTER_S:
                    path.unlink()
        return ranks


def requested_threads(setting: int) -> int:
    """Return a rank's fixed number of threads: the setting, else ``OMP_NUM_THREADS``, else 0 for a fair share."""
    omp_threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return setting or (int(omp_threads) if omp_threads.isdecimal() else 0)


def use_one_thread() -> None:
    """Make torch compute with one thread in the calling thread from now on.

    Each thread that computes in parallel gets its own OpenMP team. Once a process has more threads in teams than cores,
    libgomp's threads hardly spin while they wait for work, and every step of the engine becomes a third slower.
    """
    torch.get_num_threads()  # A thread copies torch's setting on first use, so the first use must come before.
    omp_set_num_threads = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if omp_set_num_threads is not None:
        omp_set_num_threads(1)


PAUSE_S = 0.03
"""Threads are pinned only after the rank was idle for this long, since pinning takes time."""


class ThreadPinning:
    """Sets the number of a rank's compute threads, and pins them to cores after a pause.

    Linux tends to wake threads that have slept for a while on one core, where they stay until a step is over. So a rank
    that has all cores pins each thread to a core while the first plan after a pause runs
    (``docs/decisions/threads.md``). The threads do not stay pinned, since processes started later would inherit one
    core.

    Args:
        kernels: the kernel backend whose threads are set.
        cores: the rank's share of the cores.
        clock: a monotonic clock in seconds.
    """

    def __init__(self, kernels: Kernels, cores: CpuBudget, clock: Callable[[], float] = time.monotonic) -> None:
        self._kernels = kernels
        self._cores = cores
        self._clock = clock
        self._computed_s = clock()

    def resize(self) -> None:
        """Set the number of threads to the rank's share of the cores. The rank calls this before every plan."""
        threads = self._cores.threads(self._clock())
        if threads != self._kernels.threads:
            self._kernels.threads = threads

    @contextmanager
    def pinned(self, plan: StepPlan) -> Iterator[None]:
        """Pin the threads to cores while the steps of a plan run, if this is worth its time."""
        paused = self._clock() - self._computed_s > PAUSE_S
        with self._kernels.pin_threads(self._cores.all) if paused and self._has_all_for(plan) else nullcontext():
            yield
        if plan.sequences:
            self._computed_s = self._clock()

    def _has_all_for(self, plan: StepPlan) -> bool:
        """Return whether there is a thread for each core and the plan uses all threads.

        Einsums run in torch, which may use fewer threads, and new threads would inherit the core of the thread that
        starts them.
        """
        every_core = 1 < self._kernels.threads == len(self._cores.all)
        return every_core and bool(plan.sequences) and plan.kernel_form is not KernelForm.EINSUM
