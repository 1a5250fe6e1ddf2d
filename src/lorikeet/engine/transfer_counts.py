"""Who did the work of transfers."""

import threading
from collections import Counter
from enum import StrEnum
from typing import NamedTuple


class Work(StrEnum):
    """A kind of work that must not run on the loop's thread."""

    READ = "read"
    """A module of an adapter read from its files and checked."""
    PACK = "pack"
    """A block filled with weights."""
    COPY = "copy"
    """A block copied between host and device."""


class Worker(NamedTuple):
    """A thread that has done work, by the system's number for it, which is unique over all processes."""

    work: Work
    thread: int


class TransferCounts:
    """Counts work by the thread that did it. Each piece of work is noted where it is done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Worker] = Counter()

    def note(self, work: Work, times: int = 1) -> None:
        """Count work of the calling thread."""
        self.add({Worker(work, threading.get_native_id()): times})

    def add(self, counts: dict[Worker, int]) -> None:
        """Count what another process has counted."""
        with self._lock:
            self._counts.update(counts)

    def take(self) -> dict[Worker, int]:
        """Return the counts and begin anew."""
        with self._lock:
            counts, self._counts = dict(self._counts), Counter()
            return counts

    def by_thread(self) -> dict[Worker, int]:
        """Return the counts so far."""
        with self._lock:
            return dict(self._counts)
