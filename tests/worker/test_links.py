"""The ends of transfers: order, urgency, interruption, and independent directions."""

import threading
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.core.clock import MonotonicClock
from lorikeet.core.plan import Tier, Transfer, TransferDone
from lorikeet.costs.transfer_model import LinkDirection, TransferLeg, TransferPath
from lorikeet.worker.links import ModelledTransferLink

IN = LinkDirection.IN
OUT = LinkDirection.OUT
READ = LinkDirection.READ


class Line:
    """A link whose transfers are given by the way they go."""

    def __init__(self) -> None:
        self._courses: dict[int, TransferPath] = {}
        self.link = ModelledTransferLink(lambda transfer: self._courses[transfer.transfer_id])

    def begin(
        self, number: int, *legs: tuple[LinkDirection, float], at: float = 0.0, parts: int = 1, demand: bool = True
    ) -> None:
        self._courses[number] = TransferPath(tuple(TransferLeg(*leg) for leg in legs), parts)
        self.link.begin(Transfer(number, Tier.HOST, Tier.DEVICE, demand=demand), at)

    def begin_groups(self, number: int, *seconds: float, at: float = 0.0, demand: bool = True) -> None:
        self._courses[number] = TransferPath((TransferLeg(IN, sum(seconds)),), groups_s=seconds)
        self.link.begin(Transfer(number, Tier.HOST, Tier.DEVICE, demand=demand), at)

    def prefetch(self, number: int, *legs: tuple[LinkDirection, float], at: float = 0.0) -> None:
        self.begin(number, *legs, at=at, demand=False)

    def ends(self) -> dict[int, float]:
        """Let everything end; return when each did, in that order."""
        found: dict[int, float] = {}
        while (end_s := self.link.next_s()) is not None:
            done = self.link.take_done(end_s)
            assert done, "nothing ended when something was to end"
            found |= {each.transfer_id: end_s for each in done}
        return found


def test_transfers_of_a_direction_follow_one_another_as_they_began() -> None:
    line = Line()
    for number, seconds in ((1, 3.0), (2, 2.0), (3, 1.0)):
        line.begin(number, (IN, seconds))
    assert list(line.ends().items()) == [(1, 3.0), (2, 5.0), (3, 6.0)]


def test_an_idle_direction_starts_a_transfer_at_once() -> None:
    line = Line()
    line.begin(1, (IN, 1.0))
    line.begin(2, (IN, 1.0), at=7.0)
    assert line.ends() == {1: 1.0, 2: 8.0}


def test_directions_do_not_wait_for_each_other() -> None:
    line = Line()
    for number, way in enumerate(LinkDirection):
        line.begin(number, (way, 3.0))
    assert line.ends() == {0: 3.0, 1: 3.0, 2: 3.0}


def test_awaited_transfer_goes_before_waiting_prefetches() -> None:
    line = Line()
    line.begin(1, (IN, 3.0))
    line.prefetch(2, (IN, 2.0))
    line.begin(3, (IN, 1.0), at=1.0)
    assert line.ends() == {1: 3.0, 3: 4.0, 2: 6.0}


def test_the_rest_of_a_prefetch_waits_for_a_demand_and_is_not_done_again() -> None:
    line = Line()
    line.prefetch(1, (IN, 10.0))
    line.prefetch(2, (IN, 1.0))
    line.begin(3, (IN, 2.0), at=4.0)
    line.begin(4, (IN, 1.0), at=5.0)
    assert line.ends() == {3: 6.0, 4: 7.0, 1: 13.0, 2: 14.0}


def test_a_demand_does_not_interrupt_another() -> None:
    line = Line()
    line.begin(1, (OUT, 10.0))
    line.begin(2, (OUT, 1.0), at=4.0)
    assert line.ends() == {1: 10.0, 2: 11.0}


def test_awaited_prefetch_goes_before_later_demands() -> None:
    line = Line()
    line.begin(1, (IN, 5.0))
    line.prefetch(2, (IN, 1.0))
    line.prefetch(3, (IN, 1.0))
    line.begin(4, (IN, 1.0), at=1.0)
    line.link.promote([3], 2.0)
    assert line.ends() == {1: 5.0, 3: 6.0, 4: 7.0, 2: 8.0}


def test_a_promoted_prefetch_interrupts_the_one_that_is_carried() -> None:
    line = Line()
    line.prefetch(1, (IN, 5.0))
    line.prefetch(2, (IN, 1.0))
    line.link.promote([2], 2.0)
    assert line.ends() == {2: 3.0, 1: 6.0}


def test_a_carried_prefetch_is_not_interrupted_any_more_once_it_is_waited_for() -> None:
    line = Line()
    line.prefetch(1, (IN, 5.0))
    line.link.promote([1], 1.0)
    line.begin(2, (IN, 1.0), at=2.0)
    assert line.ends() == {1: 5.0, 2: 6.0}


def test_the_oldest_demanded_transfer_goes_first() -> None:
    line = Line()
    line.prefetch(1, (IN, 2.0))
    line.begin(2, (IN, 5.0))
    line.link.promote([1], 3.0)
    assert line.ends() == {1: 5.0, 2: 7.0}


def test_demanding_ended_or_demanded_transfers_changes_nothing() -> None:
    line = Line()
    line.begin(1, (IN, 1.0))
    line.begin(2, (IN, 2.0))
    line.begin(3, (IN, 1.0))
    line.link.promote([1, 3], 1.5)
    assert line.ends() == {1: 1.0, 2: 3.0, 3: 4.0}


def test_through_the_host_a_transfer_is_read_and_then_copied() -> None:
    line = Line()
    line.begin(1, (READ, 3.0), (IN, 2.0))
    line.begin(2, (READ, 3.0), (IN, 2.0))
    line.begin(3, (IN, 4.0))
    # 3 is copied until 3, 1 until 5, the rest of 3 until 6; 2 is read until 6 and copied until 8.
    assert line.ends() == {1: 5.0, 3: 6.0, 2: 8.0}


def test_one_part_is_copied_while_the_next_is_read() -> None:
    line = Line()
    line.begin(1, (READ, 2.0), (IN, 1.0), parts=3)
    line.begin(2, (READ, 1.0), (IN, 4.0), parts=2, at=0.5)
    line.prefetch(3, (IN, 3.0))
    # 1 is read until 2, 4 and 6, and copied from then until 3, 5 and 7; 2 is read until 7 and 8, and copied from 7 to
    # 15; in between 3 is copied from 0 to 2 and from 3 to 4.
    assert line.ends() == {3: 4.0, 1: 7.0, 2: 15.0}


def test_a_lone_transfer_takes_its_stated_time() -> None:
    line = Line()
    line.begin(1, (READ, 2.0), (IN, 3.0), parts=4, at=1.0)
    (done,) = line.link.take_done(15.0)
    assert line.link.next_s() is None
    assert done.duration_s == 14.0


def test_the_copy_after_a_read_interrupts_a_prefetch() -> None:
    line = Line()
    line.begin(1, (READ, 3.0), (IN, 2.0))
    line.prefetch(2, (IN, 10.0))
    assert line.link.next_s() == 5.0  # neither the end of the read, nor that of the copy as it is carried now
    assert line.ends() == {1: 5.0, 2: 12.0}


def test_a_read_that_is_promoted_is_copied_as_a_demand() -> None:
    line = Line()
    line.prefetch(1, (READ, 3.0), (IN, 2.0))
    line.prefetch(2, (IN, 10.0))
    line.link.promote([1], 1.0)
    assert line.ends() == {1: 5.0, 2: 12.0}


def test_durations_leave_out_all_waiting() -> None:
    line = Line()
    line.prefetch(1, (READ, 3.0), (IN, 2.0))
    line.begin(2, (READ, 4.0), at=1.0)
    # 2 is read from 1 to 5; the rest of 1 until 7, and copied until 9.
    assert line.link.take_done(5.0) == [TransferDone(2, None, 4.0)]
    assert line.link.take_done(9.0) == [TransferDone(1, None, 5.0)]


def test_late_poll_returns_all_ended_transfers_in_order() -> None:
    line = Line()
    line.begin(1, (READ, 1.0), (IN, 2.0))
    line.begin(2, (OUT, 2.0))
    line.begin(3, (IN, 9.0), at=20.0)
    assert line.link.next_s() == 2.0, "it is past and not taken"
    assert [done.transfer_id for done in line.link.take_done(21.0)] == [2, 1]
    assert line.link.next_s() == 29.0
    assert line.link.take_done(28.9) == []


def test_without_transfers_nothing_ends() -> None:
    line = Line()
    assert line.link.next_s() is None
    assert line.link.take_done(1.0) == []


# --- beside a slow reference --------------------------------------------------------------------------


class Asked(NamedTuple):
    """A transfer of the property test; times are whole."""

    legs: tuple[tuple[LinkDirection, int], ...]
    parts: int
    at: int
    demand: bool
    promoted_after: int | None


def second_by_second(asked: list[Asked]) -> dict[int, int]:
    """Return when each transfer ends on a link that looks at everything every second."""
    left: dict[tuple[int, int], list[tuple[LinkDirection, int]]] = {}
    ends: dict[int, int] = {}
    now = 0
    while len(ends) < len(asked):
        for number, each in enumerate(asked):
            if each.at == now:
                left |= {(number, part): list(each.legs) for part in range(each.parts)}
        prefetches = {number for number, each in enumerate(asked) if not (each.demand or is_promoted(each, now))}
        for way in LinkDirection:
            there = [part for part in left if left[part] and left[part][0][0] is way]
            if there:
                first = min(there, key=lambda part: (part[0] in prefetches, part))
                left[first][0] = (way, left[first][0][1] - 1)
        now += 1
        left = {part: legs if legs[0][1] else legs[1:] for part, legs in left.items() if legs != [(legs[0][0], 0)]}
        under_way = {number for number, _ in left}
        ended = (n for n, each in enumerate(asked) if each.at < now and n not in under_way and n not in ends)
        ends |= dict.fromkeys(ended, now)
    return ends


def is_promoted(asked: Asked, now: int) -> bool:
    return asked.promoted_after is not None and asked.at + asked.promoted_after <= now


SECONDS = st.integers(1, 5)
ROUTES = st.one_of(
    *(st.tuples(st.tuples(st.just(way), SECONDS)) for way in LinkDirection),
    st.tuples(st.tuples(st.just(READ), SECONDS), st.tuples(st.just(IN), SECONDS)),
)
ASKED = st.builds(
    Asked,
    ROUTES,
    parts=st.integers(1, 3),
    at=st.integers(0, 12),
    demand=st.booleans(),
    promoted_after=st.none() | st.integers(1, 15),
)


@pytest.mark.slow
@given(st.lists(ASKED, max_size=10), st.sets(st.integers(0, 40)))
def test_transfers_end_as_they_do_second_by_second_however_often_one_looks(asked: list[Asked], looks: set[int]) -> None:
    asked.sort(key=lambda each: each.at)
    line = Line()
    found: dict[int, float] = {}
    for now in range(30):
        promoted = [n for n, each in enumerate(asked) if each.promoted_after and each.at + each.promoted_after == now]
        if promoted:
            line.link.promote(promoted, now)
        for number, each in enumerate(asked):
            if each.at == now:
                line.begin(number, *each.legs, at=now, parts=each.parts, demand=each.demand)
        while now in looks and (end_s := line.link.next_s()) is not None and end_s <= now:
            found |= {done.transfer_id: end_s for done in line.link.take_done(end_s)}
    assert found | line.ends() == second_by_second(asked)


# --- on the real clock --------------------------------------------------------------------------------


def test_callback_called_too_early_is_called_again() -> None:
    called = threading.Semaphore(0)
    clock = MonotonicClock()
    link = ModelledTransferLink(lambda transfer: TransferPath((TransferLeg(IN, 0.001),)), called.release)
    link.begin(Transfer(1, Tier.HOST, Tier.DEVICE), clock.now() + 0.02)  # so its end lies behind the first call
    while not link.take_done(clock.now()):
        assert called.acquire(timeout=10.0)


def test_callback_is_called_for_every_ended_transfer() -> None:
    called = threading.Semaphore(0)
    clock = MonotonicClock()
    now = clock.now()
    ended = []
    link = ModelledTransferLink(
        lambda transfer: TransferPath((TransferLeg(IN, 0.002 * transfer.transfer_id),)), called.release
    )
    for number, demand in ((3, False), (1, True), (2, True)):
        link.begin(Transfer(number, Tier.HOST, Tier.DEVICE, demand=demand), now)
    while len(ended) < 3:
        assert called.acquire(timeout=60.0)
        ended += [done.transfer_id for done in link.take_done(clock.now())]
    assert ended == [1, 2, 3]


# --- groups -------------------------------------------------------------------------------------------


def test_groups_of_a_copy_end_in_order() -> None:
    line = Line()
    line.begin_groups(1, 3.0, 1.0, 2.0)
    assert line.link.group_ends_s(1, 0.0) == (3.0, 4.0, 6.0)
    assert line.ends() == {1: 6.0}


def test_groups_wait_for_earlier_groups_but_not_for_other_directions() -> None:
    line = Line()
    line.begin(1, (IN, 2.0))
    line.begin(2, (OUT, 50.0))
    line.begin_groups(3, 3.0, 1.0)
    assert line.link.group_ends_s(3, 0.0) == (5.0, 6.0)


def test_ended_groups_stay_and_later_groups_are_delayed() -> None:
    line = Line()
    line.begin_groups(1, 3.0, 4.0, 2.0, demand=False)
    line.begin(2, (IN, 10.0), at=5.0)
    # The second group has gone for two seconds of four.
    assert line.link.group_ends_s(1, 5.0) == (3.0, 17.0, 19.0)
    assert line.ends() == {2: 15.0, 1: 19.0}


def test_looking_ahead_changes_nothing_and_sees_untaken_ends() -> None:
    line = Line()
    line.begin_groups(1, 1.0, 1.0)
    line.begin_groups(2, 5.0, 5.0)
    assert line.link.group_ends_s(2, 0.0) == (7.0, 12.0)
    assert line.link.group_ends_s(1, 3.0) == (1.0, 2.0)
    assert line.ends() == {1: 2.0, 2: 12.0}
