"""The ring between a rank and its host workers, from both sides."""

import os

import msgspec
import numpy as np
import pytest

from lorikeet.worker.host_lora.ring import Ring, RingShape, RingSlice, SlotError

SHAPE = RingShape(
    slots=2, descriptors=6, rows=5, inputs=8, outputs=12, ranks=2, workers=3, cuts=3, slices=4, dtype="bfloat16"
)
SLICES = [RingSlice(0, 1, 0, 3), RingSlice(2, 0, 3, 2), RingSlice(-1, 1, 5, 1)]


def both() -> tuple[Ring, Ring]:
    """The rank's ring, and a worker's over the same memory."""
    ring = Ring.create(SHAPE)
    return ring, Ring.attached(os.dup(ring.fd), SHAPE)


def test_rank_and_worker_read_what_the_other_wrote() -> None:
    ours, theirs = both()
    assert ours.x.shape == (2, 5, 8)
    assert ours.y.shape == (2, 2, 5, 12)
    assert ours.x.dtype == np.uint16
    assert not theirs.has_x(1)
    ours.x[ours.slot(1)] = 7
    ours.write_cut(8, SLICES)
    ours.describe(1, 5, 29, 8)
    assert not theirs.has_x(1)
    ours.signal_x(1)
    assert theirs.has_x(1)
    assert theirs.description(1) == (29, 8)
    assert theirs.cut(8) == SLICES
    assert theirs.step(1) == 5
    assert (theirs.x[theirs.slot(1)] == 7).all()
    assert not theirs.x[theirs.slot(2)].any()
    theirs.y[theirs.slot(1), 1, 4] = 9
    assert not ours.has_y(1, 2)
    theirs.signal_y(1, 2, 100, 250)
    assert ours.has_y(1, 2)
    assert not ours.has_y(1, 0)
    assert ours.times_ns(1, 2) == (100, 250)
    assert ours.y[ours.slot(1)].sum() == 9 * 12
    assert not ours.has_error(1, 2)
    theirs.signal_error(1, 2)
    assert ours.has_error(1, 2)
    assert not ours.has_error(1, 1)


def test_ranks_hear_from_each_other() -> None:
    ours, theirs = both()
    assert theirs.turn(1) is None
    ours.signal_turn(1, 0)
    ours.signal_turn(2, 7)
    assert (theirs.turn(1), theirs.turn(2), theirs.turn(3)) == (0, 7, None)
    assert not theirs.has_all(7)
    ours.signal_collected(7)
    assert theirs.has_all(7)
    assert not theirs.has_all(8)
    assert ours.arrived(1, 3) == 0
    theirs.note_arrived(1, 3, 20)
    assert (ours.arrived(1, 3), ours.arrived(0, 3), ours.arrived(1, 4)) == (20, 0, 0)
    theirs.note_arrived(1, 3 + 64, 5)
    assert (ours.arrived(1, 3), ours.arrived(1, 3 + 64)) == (0, 5), "of older ones nothing is known"
    theirs.note_arrived(1, 3 + 64, -1)
    assert ours.arrived(1, 3 + 64) == -1


def test_nothing_that_is_written_touches_anything_else() -> None:
    ours, _ = both()
    ours.x[:] = 1
    ours.y[:] = 2
    for ticket in range(1, 7):
        ours.describe(ticket, 1, ticket, 10 + ticket)
    for cut in (1, 2, 3):
        ours.write_cut(cut, SLICES[:cut])
    assert [ours.description(ticket) for ticket in range(1, 7)] == [(ticket, 10 + ticket) for ticket in range(1, 7)]
    assert [ours.cut(cut) for cut in (1, 2, 3)] == [SLICES[:cut] for cut in (1, 2, 3)]
    assert not any(ours.has_x(ticket) for ticket in (1, 2))
    assert not any(ours.has_y(ticket, worker) for ticket in (1, 2) for worker in range(3))
    assert (ours.ended, ours.is_shut_down) == (0, False)
    ours.ended = 4
    ours.shut_down()
    assert (ours.ended, ours.is_shut_down) == (4, True)
    for worker in range(3):
        ours.signal_y(2, worker, 1, 2)
        ours.signal_error(2, worker)
    ours.signal_x(2)
    ours.free(2)
    for number in range(8):
        ours.signal_turn(number, number)
        ours.note_arrived(number % 2, number + 60, 9)
    ours.signal_collected(2)
    assert (ours.x == 1).all()
    assert (ours.y == 2).all()
    assert not ours.has_x(1)
    assert ours.description(6) == (6, 16)
    assert ours.cut(3) == SLICES


def test_flags_lie_on_cache_lines_of_their_own() -> None:
    ours, theirs = both()
    flags = np.flatnonzero
    lines: list[int] = []

    def changed(act: object) -> set[int]:
        before = ours._words.copy()
        assert callable(act)
        act()
        return set((flags(before != ours._words) // 8).tolist())

    for slot in (1, 2):
        lines += changed(lambda slot=slot: ours.signal_x(slot))
        lines += changed(lambda slot=slot: ours.free(slot))
        for worker in range(3):
            lines += changed(lambda slot=slot, worker=worker: theirs.signal_y(slot, worker, 5, 6))
    for worker in range(3):
        lines += changed(lambda worker=worker: theirs.signal_error(1, worker))
    lines += changed(ours.shut_down)
    assert len(lines) == len(set(lines)) == 2 * (2 + 3) + 3 + 1
    assert all(address % 64 == 0 for address in (ours._words.ctypes.data, ours.x.ctypes.data, ours.y.ctypes.data))


def test_a_ticket_is_never_taken_for_an_earlier_one_of_its_slot() -> None:
    ours, theirs = both()
    ours.describe(1, 1, 0, 1)
    ours.signal_x(1)
    theirs.signal_y(1, 0, 1, 2)
    assert not theirs.has_x(3)
    assert not ours.has_y(3, 0)
    ours.check_free(2)
    with pytest.raises(SlotError, match="ticket 3 needs the slot of ticket 1"):
        ours.check_free(3)
    ours.free(1)
    ours.check_free(3)
    for ticket in range(2, 8):
        ours.describe(ticket, 1, 0, 1)
    assert theirs.description(1) is None
    assert theirs.description(7) == (0, 1)


def test_a_cut_is_never_taken_for_another() -> None:
    ours, theirs = both()
    assert theirs.cut(1) is None
    ours.write_cut(1, SLICES)
    ours.write_cut(4, SLICES[:2])
    assert theirs.cut(1) is None
    assert theirs.cut(4) == SLICES[:2]


def test_too_many_slices_and_foreign_memory_are_refused() -> None:
    ours, _ = both()
    with pytest.raises(SlotError, match="5 slices, at most 4"):
        ours.write_cut(1, [SLICES[0]] * 5)
    with pytest.raises(ValueError, match="not a ring of this shape"):
        Ring.attached(os.dup(ours.fd), msgspec.structs.replace(SHAPE, workers=2))
    with pytest.raises(PermissionError):
        os.ftruncate(ours.fd, 0)
