"""A thread that copies blocks between host and device while steps run."""

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
"""Size of a group of blocks.

It is small enough that a more urgent transfer gets the link within a step's time, and
large enough that the copy thread wakes rarely: on a CPU each waking delays the step."""

_GROUPS_BY_CALLER = 2
"""Groups that :meth:`Copier.begin` starts on the calling thread; enough work until the copy thread wakes."""

Job = TypeVar("Job")


class CopyGroup(NamedTuple, Generic[Job]):
    """Blocks of one transfer that are copied together.

    Attributes:
        job: the transfer.
        after: the event after which the copy starts.
        copy: the source and the target of the copy.
    """

    job: Job
    after: StreamEvent
    copy: BlockCopy


class _Begun(NamedTuple, Generic[Job]):
    group: CopyGroup[Job]
    due_s: float
    """Time at which the declared link has carried the group; 0 without a declared link."""
    event: StreamEvent | None
    """The event after the group's copies; None if the device has failed."""
    error: str | None


class Copier(Generic[Job]):
    """A thread that copies in one direction, one group of blocks at a time, the most urgent first.

    With a declared link, each group takes at least its bytes divided by the link's bandwidth. Its copy yields to other
    threads during this time. The times of consecutive groups add up exactly, even if the thread wakes late.

    Args:
        name: the thread's name.
        stream: the stream of the copies. Only this object uses it.
        ahead: maximum number of groups that are queued in the stream. 1 for a synchronous stream.
        take: function that returns the next group, None if there is none now.
        on_turn: function called with each group once all earlier groups are done, before the thread waits for the
            group.
        on_done: function called after each group with the group's error, None if the copy succeeded.
        link_bytes_per_s: bandwidth of the declared link; 0 without one.
        counts: the counters of copied blocks.
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
        """Wake the thread, since there may be blocks to copy."""
        self._woken.set()

    def begin(self) -> None:
        """Start copies on the calling thread, if the stream is asynchronous and idle.

        The copy thread would get the interpreter lock only after all kernels of the step have been launched.
        """
        if self._ahead > 1 and not self._begun:
            while len(self._begun) < _GROUPS_BY_CALLER and self._start_next():
                pass

    def close(self) -> None:
        """Wait for the copies that have begun, and stop."""
        self._closing.set()
        self._woken.set()
        self._thread.join()

    def _run(self) -> None:
        use_one_thread()
        lower_priority()
        while self._begun or not self._closing.is_set():
            self._woken.clear()
            if self._start_next():
                continue
            if self._begun:
                self._end(self._begun[0])
                with self._lock:
                    self._begun.popleft()
                    if self._begun:
                        self._on_turn(self._begun[0].group)
            elif not self._closing.is_set():
                self._woken.wait()

    def _start_next(self) -> bool:
        """Queue the next group in the stream if there is one and the stream has room.

        Return whether a group was queued.
        """
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
        event = None
        error = None
        try:
            self._stream.wait_event(group.after)
            self._stream.copy_blocks(group.copy, due_s)
        except RuntimeError as failure:  # The error fails only this transfer.
            error = str(failure)
        try:
            # The event is needed after an error too, since some copies may have begun.
            event = self._stream.record_event()
        except RuntimeError as failure:
            error = error or str(failure)
        return _Begun(group, due_s, event, error)

    def _end(self, begun: _Begun[Job]) -> None:
        """Wait for a group and report its end."""
        group, due_s, event, error = begun
        try:
            if event is not None:
                event.wait()
        except RuntimeError as failure:
            error = str(failure)
        if due_s:
            self._closing.wait(max(0.0, due_s - time.monotonic()))
        self._on_done(group, error)
