"""Finished transfers on their way to the loop, and counts of the work behind them. Imports no torch."""

import threading
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from lorikeet.core.plan import TransferDone


class TransferWork(StrEnum):
    """A kind of work that must not run on the loop's thread."""

    READ = "read"
    """A module of an adapter read from its files and checked."""
    PACK = "pack"
    """A block filled with weights."""
    COPY = "copy"
    """A block copied between host and device."""


class TransferThread(NamedTuple):
    """A thread that has done work, by the system's number for it, which is unique over all processes."""

    work: TransferWork
    thread: int


class TransferCounts:
    """Counts work by the thread that did it. Each piece of work is noted where it is done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[TransferThread] = Counter()

    def note(self, work: TransferWork, times: int = 1) -> None:
        """Count work of the calling thread."""
        self.add({TransferThread(work, threading.get_native_id()): times})

    def add(self, counts: dict[TransferThread, int]) -> None:
        """Count what another process has counted."""
        with self._lock:
            self._counts.update(counts)

    def take(self) -> dict[TransferThread, int]:
        """Return the counts and begin anew."""
        with self._lock:
            counts, self._counts = dict(self._counts), Counter()
            return counts

    def by_thread(self) -> dict[TransferThread, int]:
        """Return the counts so far."""
        with self._lock:
            return dict(self._counts)


class FinishedTransfers:
    """Transfers that every rank has finished, handed from the threads that notice to the loop.

    Args:
        ranks: how many have to report a transfer before it counts as done.
        on_done: called, on the reporting thread, when there is something new.
    """

    def __init__(self, ranks: int, on_done: Callable[[], None]) -> None:
        self._ranks = ranks
        self._on_done = on_done
        self._changed = threading.Condition()
        self._reports: dict[int, list[TransferDone]] = {}
        self._done: list[TransferDone] = []
        self._broken = False

    def report(self, done: TransferDone) -> None:
        """Count one rank's report; the first error among them is the transfer's, and the longest time."""
        with self._changed:
            reports = self._reports.setdefault(done.transfer_id, [])
            reports.append(done)
            if len(reports) < self._ranks:
                return
            del self._reports[done.transfer_id]
            error = next((report.error for report in reports if report.error is not None), None)
            duration_s = max(report.duration_s for report in reports)
            self._done.append(TransferDone(done.transfer_id, error, duration_s))
            self._changed.notify_all()
        self._on_done()

    def break_off(self) -> None:
        """Nothing more will come: wake whoever waits."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()
        self._on_done()

    def take(self) -> list[TransferDone]:
        """Return what was done since the last call."""
        with self._changed:
            done, self._done = self._done, []
            return done

    def wait(self, timeout_s: float | None) -> None:
        """Block until there is something to take, or nothing more will come, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._done) or self._broken, timeout_s)
