"""Collects finished transfers of all ranks for the engine loop, and counts transfer work by thread, without torch."""

import threading
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from lorikeet.core.plan import TransferDone


class TransferWork(StrEnum):
    """Kinds of work that must not run on the engine loop's thread."""

    READ = "read"
    """One module of an adapter was read from files and checked."""
    PACK = "pack"
    """One block was filled with weights."""
    COPY = "copy"
    """One block was copied between host and device."""


class TransferThread(NamedTuple):
    """A kind of work and the native id of the thread that did it. The id is unique among all processes."""

    work: TransferWork
    thread: int


class TransferCounts:
    """Counts transfer work by thread. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[TransferThread] = Counter()

    def note(self, work: TransferWork, times: int = 1) -> None:
        """Count work of the calling thread."""
        self.add({TransferThread(work, threading.get_native_id()): times})

    def add(self, counts: dict[TransferThread, int]) -> None:
        """Add the counts of another process."""
        with self._lock:
            self._counts.update(counts)

    def take(self) -> dict[TransferThread, int]:
        """Return the counts so far, and reset them to 0."""
        with self._lock:
            counts = dict(self._counts)
            self._counts = Counter()
            return counts

    def by_thread(self) -> dict[TransferThread, int]:
        """Return the counts so far."""
        with self._lock:
            return dict(self._counts)


class FinishedTransfers:
    """Collects the reports of ranks, and returns transfers that every rank has finished.

    Thread-safe.

    Args:
        ranks: number of ranks that report each transfer.
        on_done: function called on the reporting thread when a transfer is done, and by :meth:`break_off`.
    """

    def __init__(self, ranks: int, on_done: Callable[[], None]) -> None:
        self._ranks = ranks
        self._on_done = on_done
        self._changed = threading.Condition()
        self._reports: dict[int, list[TransferDone]] = {}
        self._done: list[TransferDone] = []
        self._broken = False

    def report(self, done: TransferDone) -> None:
        """Add a rank's report. The transfer's result has the first error and the longest duration of all reports."""
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
        """Wake waiting callers, since a rank has died and no more reports will come."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()
        self._on_done()

    def take(self) -> list[TransferDone]:
        """Return the transfers that have been done since the last call."""
        with self._changed:
            done = self._done
            self._done = []
            return done

    def wait(self, timeout_s: float | None) -> None:
        """Block until a transfer is done, :meth:`break_off` is called, or ``timeout_s`` is over (None: no limit)."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._done) or self._broken, timeout_s)
