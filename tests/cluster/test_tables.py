"""Shares and draws of the routing table, and holders in the adapter table."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.cluster.placement.operating_points import OperatingPoints
from lorikeet.cluster.tables import AdapterTable, ReplicaShare, RoutingTable
from lorikeet.core.ids import ReplicaId
from tests.support.placement import digest

A3 = digest("A3")
S1, S2, S3 = (ReplicaId(name) for name in ("S1", "S2", "S3"))


def table_of(*shares: tuple[ReplicaId, float]) -> RoutingTable:
    return RoutingTable(1, {A3: tuple(ReplicaShare(*share) for share in shares)})


def test_example_e_intervals_are_half_open() -> None:
    table = table_of((S1, 0.7), (S2, 0.3))
    assert [table.draw(A3, u) for u in (0.0, 0.65, 0.70, 0.95)] == [S1, S1, S2, S2]


def test_example_e_draws_follow_the_shares() -> None:
    table = table_of((S1, 0.7), (S2, 0.3))
    chance = random.Random(1)
    drawn = Counter(table.draw(A3, chance.random()) for _ in range(10_000))
    assert drawn[S1] / 10_000 == pytest.approx(0.70, abs=0.015)
    assert drawn.total() == drawn[S1] + drawn[S2]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=64))
def test_a_draw_always_finds_a_replica(parts: list[int]) -> None:
    shares = [(ReplicaId(f"S{number}"), part / sum(parts)) for number, part in enumerate(parts)]
    table = table_of(*shares)
    assert table.draw(A3, 0.0) == "S0"
    assert table.draw(A3, 1 - 2**-53) == shares[-1][0]


@pytest.mark.parametrize(
    "shares",
    [[], [(S1, 0.7)], [(S1, 0.7), (S2, 0.4)], [(S1, 1.0), (S2, 0.0)], [(S1, 1.5), (S2, -0.5)], [(S1, 0.5), (S1, 0.5)]],
)
def test_impossible_shares_are_refused(shares: list[tuple[ReplicaId, float]]) -> None:
    with pytest.raises(ValueError, match="A3"):
        table_of(*shares)


def test_unknown_adapter_has_no_replica() -> None:
    table = table_of((S1, 1.0))
    assert table.replicas(digest("other")) == set()
    with pytest.raises(KeyError):
        table.draw(digest("other"), 0.5)


def test_shown_table_is_computed_once() -> None:
    table = table_of((S1, 0.7), (S2, 0.3))
    assert table.shown == {A3: {S1: 0.7, S2: 0.3}}
    assert table.shown is table.shown


def test_the_last_copy_is_not_removed() -> None:
    table = AdapterTable()
    table.add(A3, S1)
    table.add(A3, S2)
    table.remove(A3, S1)
    with pytest.raises(ValueError, match="last copy"):
        table.remove(A3, S2)
    assert table.holders(A3) == {S2}
    assert table.held_by(S2) == {A3}
    assert not table.holds(S1, A3)


def test_a_replica_that_leaves_takes_its_copies() -> None:
    table = AdapterTable()
    for adapter, replica in (("a", S1), ("b", S1), ("b", S2), ("c", S2)):
        table.add(digest(adapter), replica)
    assert table.leave(S1) == ["a"]
    assert {adapter: table.holders(adapter) for adapter in table} == {"b": {S2}, "c": {S2}}


def test_between_two_ranks_the_time_per_token_lies_on_a_line() -> None:
    points = OperatingPoints({8: 1000.0, 128: 500.0})
    assert points[8] == pytest.approx(1000)
    assert points[68] == pytest.approx(666.667, abs=1e-3)
    assert points[128] == pytest.approx(500)
    assert points[4] == pytest.approx(1000)
    assert points[248] == pytest.approx(1000 / 3)


def test_a_larger_rank_is_never_faster() -> None:
    points = OperatingPoints({64: 700.0, 8: 1000.0, 16: 900.0, 32: 940.0})
    assert [points[rank] for rank in (8, 16, 32, 64)] == pytest.approx([1000, 920, 920, 700])


def test_single_operating_point_holds_for_all_ranks() -> None:
    assert [OperatingPoints({16: 800.0})[rank] for rank in (8, 16, 256)] == pytest.approx([800] * 3)


@pytest.mark.parametrize("loads", [{}, {8: 0.0}, {8: 5.0, 16: -1.0}])
def test_operating_points_must_be_positive(loads: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="Operating points"):
        OperatingPoints(loads)
