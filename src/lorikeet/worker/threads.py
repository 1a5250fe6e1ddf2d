"""How many threads a rank computes with, and on which cores they run."""

import contextlib
import ctypes
import logging
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import msgspec
import torch

from lorikeet.core.plan import KernelForm, StepPlan
from lorikeet.kernels.base import Kernels

_LOG = logging.getLogger(__name__)

REFRESH_S = 0.25
"""How old a rank's own sign of life, and its count of the others, may be."""

BUSY_WITHIN_S = 2.0
"""A rank whose file is older than this idles, or has ended."""

_FORGOTTEN_S = 3600.0


class _RankCores(msgspec.Struct, frozen=True):
    """The cores that a rank may run on, and its threads if it insists on them, else 0."""

    cores: list[int]
    threads: int


class CpuBudget:
    """One rank's part of the cores.

    Args:
        asked: threads to insist on; 0 takes a fair part.
        folder: where ranks meet; the default is one per user.

    Attributes:
        all: the cores that the rank may run on.
    """

    def __init__(self, asked: int = 0, folder: Path | None = None) -> None:
        self._asked = asked
        self.all = sorted(usable_cores())
        self._folder = folder or Path(tempfile.gettempdir()) / f"lorikeet-cores-{os.getuid()}"
        self._path = self._folder / f"{os.getpid()}-{uuid.uuid4().hex}"
        self._announcement = msgspec.json.encode(_RankCores(self.all, asked))
        self._due_s = float("-inf")
        self._threads = asked or len(self.all)
        self._told = False

    def threads(self, now: float) -> int:
        """Return how many threads to compute with; to be asked before every step.

        Args:
            now: seconds of a monotonic clock.
        """
        if now >= self._due_s:
            try:
                self._meet()
            except OSError as error:  # a disk that is full, perhaps: it costs time and must not cost the engine
                if not self._told:
                    _LOG.warning("ranks on this machine cannot share its cores: %s", error)
                self._told = True
            self._due_s = now + REFRESH_S
        return self._threads

    def _meet(self) -> None:
        """Give a sign of life, and count the others'."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path.write_bytes(self._announcement)
        if not self._asked:
            self._threads = self._fair_threads()

    def close(self) -> None:
        """Leave the cores to the others."""
        self._path.unlink(missing_ok=True)

    def _fair_threads(self) -> int:
        """Divide what is left by those that insist on nothing, this rank included."""
        left, sharing = len(self.all), 1
        for team in self._busy_others():
            if not set(team.cores).isdisjoint(self.all):
                left -= team.threads
                sharing += team.threads == 0
        return max(1, left // sharing)

    def _busy_others(self) -> list[_RankCores]:
        teams = []
        for path in self._folder.iterdir():
            # Others come and go, and a file may be read while it is written.
            with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                age_s = time.time() - path.stat().st_mtime
                if path != self._path and age_s < BUSY_WITHIN_S:
                    teams.append(msgspec.json.decode(path.read_bytes(), type=_RankCores))
                elif age_s > _FORGOTTEN_S:
                    path.unlink()
        return teams


def requested_threads(setting: int) -> int:
    """Return the threads that a rank insists on, 0 for none: the setting, else what OpenMP was told."""
    told = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return setting or (int(told) if told.isdecimal() else 0)


def use_one_thread() -> None:
    """Let torch use no further threads in the calling thread, from now on.

    Each thread that computes in parallel gets an OpenMP team of its own. Once a process has more threads in teams than
    cores, libgomp's wait for work hardly spins any more, and every step of the engine's own team gets slower by
    a third.
    """
    torch.get_num_threads()  # a thread takes over torch's setting when it first asks, and must not do so later
    omp_set_num_threads = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if omp_set_num_threads is not None:
        omp_set_num_threads(1)


def usable_cores() -> set[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


PAUSE_S = 0.03
"""How long a rank must have computed nothing for its threads to be told where to run; telling takes time, too."""


class ThreadPinning:
    """One rank's threads, which are those of its kernels.

    Linux tends to wake threads that have slept for a while on one core, where they stay until a step is over. So a
    rank that has every core gives each thread one of them while the first plan after a pause runs
    (``docs/decisions/threads.md``). It does not keep them there: processes started later would be held to one core.

    Args:
        kernels: whose threads they are.
        cores: the rank's part of the machine's.
        clock: monotonic, in seconds.
    """

    def __init__(self, kernels: Kernels, cores: CpuBudget, clock: Callable[[], float] = time.monotonic) -> None:
        self._kernels = kernels
        self._cores = cores
        self._clock = clock
        self._computed_s = clock()

    def resize(self) -> None:
        """Take the rank's part of the cores; to be called before every plan."""
        threads = self._cores.threads(self._clock())
        if threads != self._kernels.threads:
            self._kernels.threads = threads

    @contextmanager
    def at_work(self, plan: StepPlan) -> Iterator[None]:
        """Place the threads while the steps of a plan run."""
        paused = self._clock() - self._computed_s > PAUSE_S
        with self._kernels.apart(self._cores.all) if paused and self._has_all_for(plan) else nullcontext():
            yield
        if plan.sequences:
            self._computed_s = self._clock()

    def _has_all_for(self, plan: StepPlan) -> bool:
        """Return whether each core has a thread, which the plan needs and which lives as long.

        Torch's own products may take fewer threads; new ones would begin on the core of the thread that makes them.
        """
        every_core = 1 < self._kernels.threads == len(self._cores.all)
        return every_core and bool(plan.sequences) and plan.kernel_form is not KernelForm.EINSUM
