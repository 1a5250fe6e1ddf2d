"""How many threads a rank computes with.

Threads of several processes on the same cores cost far more than they bring: each waits, spinning, for partners
that are not running. So every rank that computes keeps a file fresh in a folder that all ranks of this machine see,
and takes its part of the cores: alone all of them, half beside a second. A rank that idles lets its file grow old.
"""

import contextlib
import ctypes
import logging
import os
import tempfile
import time
import uuid
from pathlib import Path

import msgspec
import torch

_LOG = logging.getLogger(__name__)

REFRESH_S = 0.25
"""How old a rank's own sign of life, and its count of the others, may be."""

BUSY_WITHIN_S = 2.0
"""A rank whose file is older than this idles, or has ended."""

_FORGOTTEN_S = 3600.0


class _Team(msgspec.Struct, frozen=True):
    """The cores that a rank may run on, and its threads if it insists on them, else 0."""

    cores: list[int]
    threads: int


class CoreShare:
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
        self._announcement = msgspec.json.encode(_Team(self.all, asked))
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

    def _busy_others(self) -> list[_Team]:
        teams = []
        for path in self._folder.iterdir():
            # Others come and go, and a file may be read while it is written.
            with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                age_s = time.time() - path.stat().st_mtime
                if path != self._path and age_s < BUSY_WITHIN_S:
                    teams.append(msgspec.json.decode(path.read_bytes(), type=_Team))
                elif age_s > _FORGOTTEN_S:
                    path.unlink()
        return teams


def asked_threads(setting: int) -> int:
    """Return the threads that a rank insists on, 0 for none: the setting, else what OpenMP was told."""
    told = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return setting or (int(told) if told.isdecimal() else 0)


def compute_alone() -> None:
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
