"""Copies of blocks between host and device, beside the steps."""

import threading
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from lorikeet.engine.cores import compute_alone
from lorikeet.engine.transfer_counts import TransferCounts, Work

GROUP_BYTES = 2 * 2**20
"""So much is copied at once: a small part of a step's time on any link, and few wakings for a large adapter."""

Job = TypeVar("Job")


class Group(NamedTuple, Generic[Job]):
    """Blocks to be copied at once.

    Attributes:
        job: what they belong to.
        sources, targets: ``[elements]`` each, blocks of an arena.
    """

    job: Job
    sources: list[Tensor]
    targets: list[Tensor]


class Copier(Generic[Job]):
    """A thread that copies in one direction, a few blocks at a time; it asks each time, so that the urgent go first.

    Over a declared link each group takes its share of the link's time: it is copied at once, and done when its time is
    over. The time of groups that follow each other adds up exactly, however late the thread wakes.

    Args:
        name: of the thread.
        take: returns the next group, None if there is none now.
        on_done: called after each group, with why it failed, None if it did not.
        link_bytes_per_s: of the declared link, 0 for none.
        counts: where copies of blocks are counted.
    """

    def __init__(
        self,
        name: str,
        take: Callable[[], Group[Job] | None],
        on_done: Callable[[Group[Job], str | None], None],
        link_bytes_per_s: float,
        counts: TransferCounts,
    ) -> None:
        self._take = take
        self._on_done = on_done
        self._link_bytes_per_s = link_bytes_per_s
        self._counts = counts
        self._woken = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Ask: there may be something to copy now."""
        self._woken.set()

    def close(self) -> None:
        """Wait for what is being copied; nothing else begins."""
        self._closing.set()
        self._woken.set()
        self._thread.join()

    def _run(self) -> None:
        compute_alone()
        link_free_s: float | None = None
        while not self._closing.is_set():
            self._woken.clear()
            group = self._take()
            if group is None:
                self._woken.wait()
                link_free_s = None
                continue
            began_s = time.monotonic()
            error = self._copy(group)
            if self._link_bytes_per_s:
                begins_s = began_s if link_free_s is None else link_free_s
                link_free_s = begins_s + sum(block.nbytes for block in group.sources) / self._link_bytes_per_s
                self._closing.wait(max(0.0, link_free_s - time.monotonic()))
            self._on_done(group, error)

    def _copy(self, group: Group[Job]) -> str | None:
        self._counts.note(Work.COPY, len(group.sources))
        try:
            for source, target in zip(group.sources, group.targets, strict=True):
                target.copy_(source)
        except RuntimeError as error:  # a device may refuse; its transfer fails, and no other
            return str(error)
        return None
