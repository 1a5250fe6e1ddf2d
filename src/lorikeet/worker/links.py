"""Models the transfer link: computes the end of each transfer from the times of its parts.

Each direction (:class:`lorikeet.costs.transfer_model.LinkDirection`) carries one transfer at a time, the most urgent
first: demanded transfers, then prefetches, each in the order of their start. A more urgent transfer preempts the
running one, which continues afterwards. (Real copies are preempted only between groups of blocks, modelled transfers at
any time.) The directions are independent of each other.
"""

import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from lorikeet.core.plan import Transfer, TransferDone
from lorikeet.costs.transfer_model import LinkDirection, TransferLeg, TransferPath


class TransferLink(Protocol):
    """Runs transfers in the background while steps are computed."""

    def begin(self, transfer: Transfer, now: float) -> None:
        """Start a transfer."""
        ...

    def promote(self, transfer_ids: Collection[int], now: float) -> None:
        """Mark transfers as demanded; ids of ended transfers are ignored."""
        ...

    def next_s(self) -> float | None:
        """Return the time in seconds at which the next transfer ends if nothing else starts. None without transfers."""
        ...

    def take_done(self, now: float) -> list[TransferDone]:
        """Return the transfers that have ended by ``now`` and were not returned before, in the order of their ends."""
        ...

    def group_ends_s(self, transfer_id: int, now: float) -> Sequence[float]:
        """Return the time at which each group of a transfer's blocks arrives if nothing else starts.

        The transfer must have been started and not yet returned by :meth:`take_done`.
        """
        ...


class ModelledTransferLink:
    """Computes the ends of transfers with a cost model.

    Implements ``TransferLink``.

    Args:
        course: function that returns the parts of a transfer, with the times of each.
        on_done: function called on another thread when a transfer has ended, if the clock is real.
    """

    def __init__(self, course: Callable[[Transfer], TransferPath], on_done: Callable[[], None] | None = None) -> None:
        self._course = course
        self._lanes = _Lanes()
        self._ended: deque[tuple[float, TransferDone]] = deque()
        self._next_s: float | None = None
        self._is_next_known = True
        self._alarm = None if on_done is None else _Alarm(on_done)

    def begin(self, transfer: Transfer, now: float) -> None:
        """Start a transfer.

        Raises:
            ProfileError: the profile lacks the times of this transfer.
        """
        self._settle(now)
        self._lanes.begin(transfer, self._course(transfer), now)
        self._schedule_changed(now)

    def promote(self, transfer_ids: Collection[int], now: float) -> None:
        """Mark transfers as demanded; ids of ended transfers are ignored."""
        self._settle(now)
        self._lanes.promote(frozenset(transfer_ids), now)
        self._schedule_changed(now)

    def next_s(self) -> float | None:
        """Return the time at which the next transfer ends.

        None without transfers; a past time if a transfer has ended and was not taken.
        """
        if self._ended:
            return self._ended[0][0]
        if not self._is_next_known:
            self._next_s = self._lanes.next_done_s()
            self._is_next_known = True
        return self._next_s

    def take_done(self, now: float) -> list[TransferDone]:
        """Return the transfers that have ended by ``now`` and were not returned before."""
        self._settle(now)
        done = []
        while self._ended and self._ended[0][0] <= now:
            done.append(self._ended.popleft()[1])
            self._lanes.forget(done[-1].transfer_id)
        self._set_alarm(now)
        return done

    def group_ends_s(self, transfer_id: int, now: float) -> Sequence[float]:
        """Return the time at which each group of a transfer arrives if nothing else starts."""
        self._settle(now)
        return self._lanes.group_ends_s(transfer_id)

    def _settle(self, now: float) -> None:
        """Process all ends of parts up to ``now``."""
        while (end_s := self._lanes.next_end_s()) is not None and end_s <= now:
            done = self._lanes.end_next()
            if done is not None:
                self._ended.append((end_s, done))
                self._is_next_known = False

    def _schedule_changed(self, now: float) -> None:
        self._is_next_known = False
        self._set_alarm(now)

    def _set_alarm(self, now: float) -> None:
        if self._alarm is not None:
            self._alarm.set(self.next_s(), now)


class _Job(NamedTuple):
    """A part of a transfer.

    The first three fields are its sort key, most urgent first.

    Attributes:
        is_prefetch: whether no request waits for the transfer.
        transfer_id, part: the transfer's id, and the part's number within it.
        legs: the remaining legs. The first leg has its remaining seconds.
        alone_s: seconds that the whole transfer takes on an idle link.
    """

    is_prefetch: bool
    transfer_id: int
    part: int
    legs: tuple[TransferLeg, ...]
    alone_s: float


class _Lane:
    """One direction of the link.

    Attributes:
        running: the running job; None if the lane is idle.
        end_s: time at which the running job's leg ends.
        waiting: the other jobs, most urgent first.
    """

    __slots__ = ("end_s", "running", "waiting")

    def __init__(self) -> None:
        self.running: _Job | None = None
        self.end_s = 0.0
        self.waiting: list[_Job] = []

    def copy(self) -> "_Lane":
        copied = _Lane()
        copied.running = self.running
        copied.end_s = self.end_s
        copied.waiting = self.waiting.copy()
        return copied

    def add(self, job: _Job, now: float) -> None:
        """Add a job, which preempts the running job if it is more urgent."""
        running = self.running
        if running is None:
            self._run(job, now)
        elif job < running:
            rest = running.legs[0]._replace(seconds=self.end_s - now)
            insort(self.waiting, running._replace(legs=(rest, *running.legs[1:])))
            self._run(job, now)
        else:
            insort(self.waiting, job)

    def end(self) -> _Job:
        """End the leg of the running job and start the next job."""
        ended = self.running
        self.running = None
        assert ended is not None
        if self.waiting:
            self._run(self.waiting.pop(0), self.end_s)
        return ended

    def promote(self, transfer_ids: frozenset[int], now: float) -> None:
        """Mark the jobs of these transfers as demanded."""
        if self.running is not None and self.running.transfer_id in transfer_ids:
            self.running = self.running._replace(is_prefetch=False)
        waiting = self.waiting
        self.waiting = []
        for job in waiting:
            is_demanded = job.transfer_id in transfer_ids
            self.add(job._replace(is_prefetch=False) if is_demanded else job, now)

    def _run(self, job: _Job, now: float) -> None:
        self.running = job
        self.end_s = now + job.legs[0].seconds


class _Lanes:
    """All directions, the number of unfinished parts of each transfer, and the ends of groups."""

    def __init__(self) -> None:
        self._lanes = {way: _Lane() for way in LinkDirection}
        self._parts: dict[int, int] = {}
        self._group_ends_s: dict[int, tuple[float, ...]] = {}

    def begin(self, transfer: Transfer, course: TransferPath, now: float) -> None:
        """Start the first leg of each part of a transfer."""
        way = course.legs[0].direction
        number = transfer.transfer_id
        parts: list[tuple[TransferLeg, ...]] = [(TransferLeg(way, seconds),) for seconds in course.groups_s]
        parts = parts or [course.legs] * course.parts
        self._parts[number] = len(parts)
        if course.groups_s:
            self._group_ends_s[number] = ()
        for part, legs in enumerate(parts):
            self._lanes[way].add(_Job(not transfer.demand, number, part, legs, course.alone_s), now)

    def promote(self, transfer_ids: frozenset[int], now: float) -> None:
        """Mark transfers as demanded in all lanes."""
        for lane in self._lanes.values():
            lane.promote(transfer_ids, now)

    def next_end_s(self) -> float | None:
        """Return the time at which the next leg ends, None if all lanes are idle."""
        lane = self._next()
        return None if lane is None else lane.end_s

    def end_next(self) -> TransferDone | None:
        """End the leg that ends next. If it was its transfer's last leg, return the completion of the transfer."""
        lane = self._next()
        assert lane is not None
        end_s = lane.end_s
        job = lane.end()
        if len(job.legs) > 1:
            self._lanes[job.legs[1].direction].add(job._replace(legs=job.legs[1:]), end_s)
            return None
        if job.transfer_id in self._group_ends_s:
            self._group_ends_s[job.transfer_id] += (end_s,)
        self._parts[job.transfer_id] -= 1
        if self._parts[job.transfer_id]:
            return None
        del self._parts[job.transfer_id]
        return TransferDone(job.transfer_id, duration_s=job.alone_s)

    def next_done_s(self) -> float | None:
        """Return the time at which the next transfer ends if nothing else starts, None without transfers."""
        ahead = self._copy()
        while (end_s := ahead.next_end_s()) is not None:
            if ahead.end_next() is not None:
                return end_s
        return None

    def group_ends_s(self, transfer_id: int) -> tuple[float, ...]:
        """Return the time at which each group of a transfer ends if nothing else starts."""
        ahead = self._copy()
        while transfer_id in ahead._parts:
            ahead.end_next()
        return ahead._group_ends_s[transfer_id]

    def forget(self, transfer_id: int) -> None:
        """Forget a transfer whose completion was taken."""
        self._group_ends_s.pop(transfer_id, None)

    def _next(self) -> _Lane | None:
        """Return the lane whose leg ends first.

        Copies win ties, so that a read that ends now does not preempt a copy.
        """
        first: _Lane | None = None
        for lane in self._lanes.values():
            if lane.running is not None and (first is None or lane.end_s < first.end_s):
                first = lane
        return first

    def _copy(self) -> "_Lanes":
        copied = _Lanes()
        copied._lanes = {way: lane.copy() for way, lane in self._lanes.items()}
        copied._parts = self._parts.copy()
        copied._group_ends_s = self._group_ends_s.copy()
        return copied


class _Alarm:
    """Calls a function at a set time, which can be changed."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._timer: threading.Timer | None = None
        self._due_s: float | None = None

    def set(self, due_s: float | None, now: float) -> None:
        """Set the time of the call to ``due_s``, or cancel the call if it is None."""
        if due_s == self._due_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = due_s
        if due_s is not None:
            self._timer = threading.Timer(max(0.0, due_s - now), self._ring)
            self._timer.daemon = True
            self._timer.start()

    def _ring(self) -> None:
        self._due_s = None  # The time is cleared before the call, which may set the same time again.
        self._call()
