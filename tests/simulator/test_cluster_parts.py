"""The parts of a simulated cluster: the order of events, and levels over time."""

import math

import pytest

from lorikeet.simulator.cluster import Agenda, EventKind
from lorikeet.simulator.run import TimeWeightedLevel


def test_events_at_one_time_are_ordered_by_kind_then_number() -> None:
    done: list[str] = []
    agenda = Agenda()
    for name, at_s, kind in (
        ("turn", 1.0, EventKind.TURN),
        ("review", 1.0, EventKind.REVIEW),
        ("later", 2.0, EventKind.TURN_END),
        ("heard", 1.0, EventKind.TURN_END),
        ("copied", 1.0, EventKind.COPIED),
        ("another turn", 1.0, EventKind.TURN),
        ("period", 1.0, EventKind.PERIOD),
    ):
        agenda.add(at_s, kind, lambda now, name=name: done.append(f"{name} {now:g}"))  # type: ignore[misc]
    while (event := agenda.pop_before(math.inf)) is not None:
        event.act(event.at_s)
    assert done == ["heard 1", "copied 1", "period 1", "review 1", "turn 1", "another turn 1", "later 2"]


def test_arrival_follows_outputs_and_precedes_turns() -> None:
    agenda = Agenda()
    for kind in (EventKind.TURN, EventKind.COPIED):
        agenda.add(1.0, kind, lambda now: None)
    event = agenda.pop_before(1.0)
    assert event is not None
    assert event.kind is EventKind.COPIED
    assert agenda.pop_before(1.0) is None
    assert (agenda.engine_s, agenda.other_s) == (1.0, math.inf)


def test_a_level_weighs_values_by_their_time() -> None:
    level = TimeWeightedLevel(10.0)
    assert level.mean(10.0) == 0
    level.add(4, 10.0)
    level.add(-3, 12.0)
    assert (level.value, level.most) == (1, 4)
    assert level.mean(20.0) == pytest.approx((4 * 2 + 1 * 8) / 10)
