"""Transfers without bytes: when each ends, by the time that its parts take.

In each direction (:class:`lorikeet.costs.transfers.LinkDirection`) one transfer goes at a time, the most urgent: those
that somebody waits for in the order in which they began, then the others. A more urgent one that comes is let through,
and the rest of what it interrupts goes on afterwards. Live copies give way between blocks; here they do at any time. No
direction waits for another.
"""

import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from lorikeet.core.plan import Transfer, TransferDone
from lorikeet.costs.transfers import LinkDirection, TransferLeg, TransferPath


class TransferLink(Protocol):
    """Transfers that go on beside the steps."""

    def begin(self, transfer: Transfer, now: float) -> None:
        """Take a transfer on."""
        ...

    def promote(self, transfer_ids: Collection[int], now: float) -> None:
        """Treat transfers as demanded from now on; those that have ended are ignored."""
        ...

    def next_s(self) -> float | None:
        """Return when the next of its transfers ends, as things stand; None if it has none."""
        ...

    def take_done(self, now: float) -> list[TransferDone]:
        """Return the transfers that have ended since the last call, in the order of their ends."""
        ...

    def group_ends_s(self, transfer_id: int, now: float) -> Sequence[float]:
        """Return when each group of a transfer's blocks has ended or will end, as things stand.

        The transfer has begun, and nobody has taken its end.
        """
        ...


class ModelledTransferLink:
    """See the module.

    Args:
        course: how a transfer goes.
        on_done: on the real clock called, on another thread, when a transfer has ended.
    """

    def __init__(self, course: Callable[[Transfer], TransferPath], on_done: Callable[[], None] | None = None) -> None:
        self._course = course
        self._lanes = _Lanes()
        self._ended: deque[tuple[float, TransferDone]] = deque()
        self._next_s: float | None = None
        self._is_next_known = True
        self._alarm = None if on_done is None else _Alarm(on_done)

    def begin(self, transfer: Transfer, now: float) -> None:
        """See ``TransferLink``.

        Raises:
            ProfileError: nobody knows how long it takes.
        """
        self._settle(now)
        self._lanes.begin(transfer, self._course(transfer), now)
        self._expect_another_end(now)

    def promote(self, transfer_ids: Collection[int], now: float) -> None:
        """See ``TransferLink``."""
        self._settle(now)
        self._lanes.promote(frozenset(transfer_ids), now)
        self._expect_another_end(now)

    def next_s(self) -> float | None:
        """See ``TransferLink``. The time is past if a transfer has ended that nobody has taken."""
        if self._ended:
            return self._ended[0][0]
        if not self._is_next_known:
            self._next_s, self._is_next_known = self._lanes.next_done_s(), True
        return self._next_s

    def take_done(self, now: float) -> list[TransferDone]:
        """See ``TransferLink``."""
        self._settle(now)
        done = []
        while self._ended and self._ended[0][0] <= now:
            done.append(self._ended.popleft()[1])
            self._lanes.forget(done[-1].transfer_id)
        self._set_alarm(now)
        return done

    def group_ends_s(self, transfer_id: int, now: float) -> Sequence[float]:
        """See ``TransferLink``."""
        self._settle(now)
        return self._lanes.group_ends_s(transfer_id)

    def _settle(self, now: float) -> None:
        """Let everything end that has ended by ``now``."""
        while (end_s := self._lanes.next_end_s()) is not None and end_s <= now:
            done = self._lanes.end_next()
            if done is not None:
                self._ended.append((end_s, done))
                self._is_next_known = False

    def _expect_another_end(self, now: float) -> None:
        self._is_next_known = False
        self._set_alarm(now)

    def _set_alarm(self, now: float) -> None:
        if self._alarm is not None:
            self._alarm.set(self.next_s(), now)


class _Job(NamedTuple):
    """A part of a transfer. The least by the first three is the most urgent.

    Attributes:
        is_prefetch: whether nobody waits for it.
        transfer_id, part: which.
        legs: those it has still to go, the seconds of the first as they are left.
        alone_s: seconds of its transfer.
    """

    is_prefetch: bool
    transfer_id: int
    part: int
    legs: tuple[TransferLeg, ...]
    alone_s: float


class _Lane:
    """One direction.

    Attributes:
        carried: the job that it carries, None if there is none at all.
        end_s: when the leg of that one ends.
        waiting: the others, the most urgent first.
    """

    __slots__ = ("carried", "end_s", "waiting")

    def __init__(self) -> None:
        self.carried: _Job | None = None
        self.end_s = 0.0
        self.waiting: list[_Job] = []

    def copy(self) -> "_Lane":
        copied = _Lane()
        copied.carried, copied.end_s, copied.waiting = self.carried, self.end_s, self.waiting.copy()
        return copied

    def add(self, job: _Job, now: float) -> None:
        """Take a job, and let it through if it is more urgent than the one that is carried."""
        carried = self.carried
        if carried is None:
            self._carry(job, now)
        elif job < carried:
            rest = carried.legs[0]._replace(seconds=self.end_s - now)
            insort(self.waiting, carried._replace(legs=(rest, *carried.legs[1:])))
            self._carry(job, now)
        else:
            insort(self.waiting, job)

    def end(self) -> _Job:
        """End the leg of the carried job, and go on with the next one."""
        ended, self.carried = self.carried, None
        assert ended is not None
        if self.waiting:
            self._carry(self.waiting.pop(0), self.end_s)
        return ended

    def promote(self, transfer_ids: frozenset[int], now: float) -> None:
        """Treat jobs as demanded."""
        if self.carried is not None and self.carried.transfer_id in transfer_ids:
            self.carried = self.carried._replace(is_prefetch=False)
        waiting, self.waiting = self.waiting, []
        for job in waiting:
            is_demanded = job.transfer_id in transfer_ids
            self.add(job._replace(is_prefetch=False) if is_demanded else job, now)

    def _carry(self, job: _Job, now: float) -> None:
        self.carried, self.end_s = job, now + job.legs[0].seconds


class _Lanes:
    """All directions, how many parts of each transfer have not ended, and when those ended that are groups."""

    def __init__(self) -> None:
        self._lanes = {way: _Lane() for way in LinkDirection}
        self._parts: dict[int, int] = {}
        self._group_ends_s: dict[int, tuple[float, ...]] = {}

    def begin(self, transfer: Transfer, course: TransferPath, now: float) -> None:
        """Let the parts of a transfer go their first leg."""
        way, number = course.legs[0].direction, transfer.transfer_id
        parts: list[tuple[TransferLeg, ...]] = [(TransferLeg(way, seconds),) for seconds in course.groups_s]
        parts = parts or [course.legs] * course.parts
        self._parts[number] = len(parts)
        if course.groups_s:
            self._group_ends_s[number] = ()
        for part, legs in enumerate(parts):
            self._lanes[way].add(_Job(not transfer.demand, number, part, legs, course.alone_s), now)

    def promote(self, transfer_ids: frozenset[int], now: float) -> None:
        """Treat transfers as demanded, wherever their parts are."""
        for lane in self._lanes.values():
            lane.promote(transfer_ids, now)

    def next_end_s(self) -> float | None:
        """Return when the next leg ends."""
        lane = self._next()
        return None if lane is None else lane.end_s

    def end_next(self) -> TransferDone | None:
        """End the next leg; return the end of a transfer if it was its last one."""
        lane = self._next()
        assert lane is not None
        end_s, job = lane.end_s, lane.end()
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
        """Return when the next transfer ends if nothing else begins."""
        ahead = self._copy()
        while (end_s := ahead.next_end_s()) is not None:
            if ahead.end_next() is not None:
                return end_s
        return None

    def group_ends_s(self, transfer_id: int) -> tuple[float, ...]:
        """Return when each group of a transfer has ended, or ends if nothing else begins."""
        ahead = self._copy()
        while transfer_id in ahead._parts:
            ahead.end_next()
        return ahead._group_ends_s[transfer_id]

    def forget(self, transfer_id: int) -> None:
        """A transfer's end has been taken."""
        self._group_ends_s.pop(transfer_id, None)

    def _next(self) -> _Lane | None:
        """Return the lane whose leg ends first; of several a copy's, which a read that ends now must not interrupt."""
        busy = [lane for lane in self._lanes.values() if lane.carried is not None]
        return min(busy, key=lambda lane: lane.end_s, default=None)

    def _copy(self) -> "_Lanes":
        copied = _Lanes()
        copied._lanes = {way: lane.copy() for way, lane in self._lanes.items()}
        copied._parts = self._parts.copy()
        copied._group_ends_s = self._group_ends_s.copy()
        return copied


class _Alarm:
    """Calls somebody at a time that may still change."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._timer: threading.Timer | None = None
        self._due_s: float | None = None

    def set(self, due_s: float | None, now: float) -> None:
        """Call at ``due_s`` (None: not at all) instead of when it was told before."""
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
        self._due_s = None  # before the call: whoever is called may set the same time again
        self._call()
