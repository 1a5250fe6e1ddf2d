"""Copies of blocks between host and device, beside the steps."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from lorikeet.core.process_tuning import lower_priority
from lorikeet.worker.threads import use_one_thread
from lorikeet.worker.transfer.device import BlockCopy, Stream, StreamEvent
from lorikeet.worker.transfer.finished import TransferCounts, TransferWork

GROUP_BYTES = 16 * 2**20
"""So much is copied at once, so that others have the link within a step's time, and a large adapter takes few wakings:
on a CPU the step beside it waits for each."""

_FIRST = 2
"""Groups that are begun by whoever asks: they take longer than a thread needs to wake while others run."""

Job = TypeVar("Job")


class CopyGroup(NamedTuple, Generic[Job]):
    """Blocks to be copied at once.

    Attributes:
        job: what they belong to.
        after: they are copied once the work before this mark is done.
        copy: from where to where.
    """

    job: Job
    after: StreamEvent
    copy: BlockCopy


class _Begun(NamedTuple, Generic[Job]):
    group: CopyGroup[Job]
    due_s: float
    """When its share of the link's time is over; of a link that is not declared, in the past."""
    mark: StreamEvent | None
    """None if the device has failed."""
    error: str | None


class Copier(Generic[Job]):
    """A thread that copies in one direction, a few blocks at a time; it asks each time, so that the urgent go first.

    Over a declared link each group takes its share of the link's time, and is done when that is over; until then its
    copying gives way to others. The times of groups that follow each other add up, however late the thread wakes.

    Args:
        name: of the thread.
        stream: copies; nobody else uses it.
        ahead: groups that are given to it before the first of them is done; 1 if it copies as it is called.
        take: returns the next group, None if there is none now.
        on_turn: called with each group when those before it are done, and before any of it is copied.
        on_done: called after each group, with why it failed, None if it did not.
        link_bytes_per_s: of the declared link, 0 for none.
        counts: where copies of blocks are counted.
    """

    def __init__(
        self,
        name: str,
        stream: Stream,
        ahead: int,
        take: Callable[[], CopyGroup[Job] | None],
        on_turn: Callable[[CopyGroup[Job]], None],
        on_done: Callable[[CopyGroup[Job], str | None], None],
        link_bytes_per_s: float,
        counts: TransferCounts,
    ) -> None:
        self._stream = stream
        self._ahead = ahead
        self._take = take
        self._on_turn = on_turn
        self._on_done = on_done
        self._link_bytes_per_s = link_bytes_per_s
        self._counts = counts
        self._woken = threading.Event()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._begun: deque[_Begun[Job]] = deque()
        self._link_free_s = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Ask: there may be something to copy now."""
        self._woken.set()

    def begin(self) -> None:
        """Begin to copy on the calling thread, where that is no more than to give groups to a stream that has none.

        The copier's own waits for the interpreter until all of a step has been launched. It was woken before.
        """
        if self._ahead > 1 and not self._begun:
            while len(self._begun) < _FIRST and self._give():
                pass

    def close(self) -> None:
        """Wait for what is being copied; nothing else begins."""
        self._closing.set()
        self._woken.set()
        self._thread.join()

    def _run(self) -> None:
        use_one_thread()
        lower_priority()
        while self._begun or not self._closing.is_set():
            self._woken.clear()
            if self._give():
                continue
            if self._begun:
                self._end(self._begun[0])
                with self._lock:
                    self._begun.popleft()
                    if self._begun:
                        self._on_turn(self._begun[0].group)
            elif not self._closing.is_set():
                self._woken.wait()

    def _give(self) -> bool:
        """Give the next group to the stream, if there is one and room for it."""
        with self._lock:
            has_room = len(self._begun) < self._ahead and not self._closing.is_set()
            group = self._take() if has_room else None
            if group is None:
                if not self._begun:
                    self._link_free_s = 0.0
                return False
            if not self._begun:
                self._on_turn(group)
            self._begun.append(self._begin(group, self._link_free_s or time.monotonic()))
            self._link_free_s = self._begun[-1].due_s
            return True

    def _begin(self, group: CopyGroup[Job], link_free_s: float) -> _Begun[Job]:
        self._counts.note(TransferWork.COPY, group.copy.blocks)
        due_s = link_free_s + group.copy.size_bytes / self._link_bytes_per_s if self._link_bytes_per_s else 0.0
        mark, error = None, None
        try:
            self._stream.follow(group.after)
            self._stream.copy_blocks(group.copy, due_s)
        except RuntimeError as failure:  # a device may refuse; its transfer fails, and no other
            error = str(failure)
        try:
            mark = self._stream.mark()  # some of the copies may have begun all the same
        except RuntimeError as failure:
            error = error or str(failure)
        return _Begun(group, due_s, mark, error)

    def _end(self, begun: _Begun[Job]) -> None:
        """See a group to its end."""
        group, due_s, mark, error = begun
        try:
            if mark is not None:
                mark.wait()
        except RuntimeError as failure:
            error = str(failure)
        if due_s:
            self._closing.wait(max(0.0, due_s - time.monotonic()))
        self._on_done(group, error)
