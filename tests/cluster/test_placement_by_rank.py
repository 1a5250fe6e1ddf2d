"""LoRAServe's Algorithm 1: the worked examples of its spec, and what must hold of any placement."""

import random
from itertools import permutations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet.cluster.placement.by_rank import (
    RANK_GROUPS,
    LoadPacking,
    PackingParams,
    PlacementByRank,
    RankPlacementParams,
    budgets,
    floored,
    groups_of,
    least_movement,
    utilisations,
)
from lorikeet.cluster.placement.demand import AdapterDemand
from lorikeet.cluster.placement.operating_points import OperatingPoints
from lorikeet.cluster.tables import AdapterTable, ReplicaShare, RoutingTable
from lorikeet.core.ids import AdapterDigest, ReplicaId
from tests.support.placement import (
    DEMANDS_A,
    DEMANDS_B,
    DEMANDS_C,
    LEVEL,
    POINTS_A,
    POINTS_B,
    demand_of,
    demands_of,
    digest,
    packing_of,
    replicas_of,
)
from tests.support.step_counts import examples

NO_HYSTERESIS = msgspec.structs.replace(RANK_GROUPS, hysteresis=None)


def bins_of(packing: LoadPacking) -> list[dict[str, float]]:
    return [{str(adapter): round(part, 4) for adapter, part in content.items()} for content in packing.bins]


def test_example_a_splits_an_adapter_and_merges_a_leftover_with_its_other_part() -> None:
    packing = packing_of(DEMANDS_A, 4, POINTS_A)
    assert packing.target == pytest.approx(0.75)
    assert packing.budgets == {8: 2, 32: 1, 128: 1}
    assert bins_of(packing) == [
        {"c1": 1.0, "c2": 1.0, "c3": 1.0},
        {"b1": 1.0, "b2": 1.0},
        {"a1": 0.8333},
        {"a1": 0.1667, "a2": 1.0},
    ]
    assert packing.utilisations == pytest.approx([1.0, 0.60, 0.75, 0.65])


def test_example_b_trims_the_rank_that_gained_most_from_rounding() -> None:
    packing = packing_of(DEMANDS_B, 4, POINTS_B)
    assert packing.target == pytest.approx(0.91206, abs=1e-5)
    assert packing.budgets == {8: 0, 16: 1, 32: 1, 64: 1, 128: 1}
    assert packing.utilisations == pytest.approx([1.0, 0.9, 0.9333, 0.8842], abs=1e-4)
    homes = {str(adapter): number for number, content in enumerate(packing.bins) for adapter in content}
    assert [homes[f"8.{number}"] for number in range(5)] == [1, 2, 2, 3, 3]
    assert packing.bins[0][digest("128.4")] == pytest.approx(1)


def test_example_c_fills_spare_replicas_with_leftovers() -> None:
    packing = packing_of(DEMANDS_C, 4, LEVEL)
    assert packing.target == pytest.approx(1.0)
    assert packing.budgets == {128: 1, 64: 1, 32: 0, 16: 0, 8: 0}
    assert bins_of(packing) == [
        {"p": 1.0, "q": 0.4286},
        {"s": 0.7143},
        {"q": 0.5714, "s": 0.2857, "z": 1.0},
        {"x": 1.0, "y": 1.0},
    ]
    assert packing.utilisations == pytest.approx([1.0, 1.0, 1.2, 0.8])


def test_example_d_moves_two_of_five_adapters() -> None:
    replicas = replicas_of(3)
    names = [("A", "B"), ("C",), ("D", "E")]
    before = RoutingTable(
        1,
        {
            digest(name): (ReplicaShare(replica, 1.0),)
            for replica, held in zip(replicas, names, strict=True)
            for name in held
        },
    )
    bins = [{digest(name): 1.0 for name in held} for held in (("C", "D"), ("A",), ("E", "B"))]
    sizes_bytes = dict.fromkeys(before.shares, 1 << 24)
    places = least_movement(bins, replicas, before.replicas, before.shares, sizes_bytes)
    assert places == [replicas[1], replicas[0], replicas[2]]
    assert moved(bins, places, before) == 2
    assert moved(bins, replicas, before) == 4


def moved(bins: list[dict[AdapterDigest, float]], places: list[ReplicaId], before: RoutingTable) -> int:
    """Return how many adapters come to replicas to which they were not routed."""
    return sum(
        replica not in before.replicas(adapter)
        for content, replica in zip(bins, places, strict=True)
        for adapter in content
    )


def test_bins_of_equal_bytes_go_where_more_requests_went() -> None:
    replicas = replicas_of(2)
    before = {digest("A"): (ReplicaShare(replicas[0], 0.3), ReplicaShare(replicas[1], 0.7))}
    bins = [{digest("A"): 0.7}, {digest("A"): 0.3}]
    places = least_movement(bins, replicas, lambda _: replicas, before, {digest("A"): 5})
    assert places == [replicas[1], replicas[0]]


@pytest.mark.parametrize(
    ("shares", "bins", "expected"),
    [
        ({8: 0.5, 16: 1.5}, 2, {8: 0, 16: 2}),  # half up gives 3; both gained as much, so the smaller rank gives
        ({8: 2.5, 16: 0.5}, 3, {8: 2, 16: 1}),
        ({8: 0.4, 16: 0.4, 32: 0.2}, 1, {8: 0, 16: 0, 32: 0}),
        ({8: 0.6, 16: 0.6, 32: 0.8}, 2, {8: 0, 16: 1, 32: 1}),
    ],
)
def test_shares_are_rounded_half_up_and_trimmed(shares: dict[int, float], bins: int, expected: dict[int, int]) -> None:
    assert budgets(shares, bins) == expected


def test_slivers_are_not_cut_off() -> None:
    # 1.005 bins of one adapter, then one that fits: a copy for half a percent is not worth it.
    packing = packing_of(demands_of({8: {"hot": 1005, "rest": 995}}), 2, LEVEL)
    assert bins_of(packing) == [{"hot": 1.0}, {"rest": 1.0}]
    exact = LoadPacking(demands_of({8: {"hot": 1005, "rest": 995}}), 2, LEVEL, PackingParams())
    assert bins_of(exact) == [{"hot": 0.995}, {"hot": 0.005, "rest": 1.0}]


def test_replicas_of_a_rank_share_its_adapters_but_for_small_ones() -> None:
    packing = LoadPacking(
        demands_of({8: {"hot": 1900, "warm": 1000, "cold": 60, "cool": 40}}), 3, LEVEL, RANK_GROUPS.packing
    )
    third = pytest.approx(1 / 3)
    assert packing.bins == [
        {"hot": third, "warm": third, "cold": 1.0},
        {"hot": third, "warm": third, "cool": 1.0},
        {"hot": third, "warm": third},
    ]


def test_groups_are_few_and_as_large_as_each_other() -> None:
    assert [list(group) for group in groups_of(range(2, 9), 3)] == [[2, 3], [4, 5], [6, 7, 8]]
    assert list(groups_of(range(5, 5), 3)) == []
    packing = LoadPacking(
        demands_of({8: {"hot": 3000, "warm": 1000}}), 4, LEVEL, PackingParams(group=2, whole_below=0.1)
    )
    assert bins_of(packing) == [{"hot": 0.3333}, {"hot": 0.3333}, *[{"hot": 0.1667, "warm": 0.5}] * 2]


def test_an_adapter_that_needs_hundreds_of_replicas_gets_them() -> None:
    packing = packing_of(demands_of({8: {"hot": 1000.0}}), 300, LEVEL)
    assert packing.utilisations == pytest.approx([packing.target] * 300)


def test_silent_adapters_count_for_a_part_of_the_mean() -> None:
    demands = demands_of({8: {"a": 100, "b": 0, "c": 2}})
    assert [each.tokens_per_s for each in floored(demands, 0.05)] == pytest.approx([100, 1.7, 2])


@pytest.mark.parametrize("params", [RANK_GROUPS, RankPlacementParams()])
def test_without_any_demand_the_placement_stays(params: RankPlacementParams) -> None:
    placement = PlacementByRank(POINTS_A, params)
    silent = [demand._replace(tokens_per_s=0.0) for demand in DEMANDS_A]
    first = placement.place(silent, replicas_of(4), 0.0)  # nothing to keep: as if all asked for the same
    assert first.shares == PlacementByRank(POINTS_A, params).place(equal(DEMANDS_A), replicas_of(4), 0.0).shares
    second = placement.place(DEMANDS_A, replicas_of(4), 1.0)
    assert second.epoch == first.epoch + 1
    assert placement.place(silent, replicas_of(4), 2.0) is second


def equal(demands: list[AdapterDemand]) -> list[AdapterDemand]:
    return [demand._replace(tokens_per_s=8.0) for demand in demands]


def test_adapters_without_demand_are_placed() -> None:
    demands = demands_of({8: {"a": 100, "silent": 0}, 16: {"never": 0}})
    table = PlacementByRank(LEVEL).place(demands, replicas_of(2), 0.0)
    assert table.shares.keys() == {"a", "silent", "never"}


def test_hysteresis_keeps_a_placement_that_is_nearly_as_good() -> None:
    placement = PlacementByRank(POINTS_A, RANK_GROUPS)
    first = placement.place(DEMANDS_A, replicas_of(4), 0.0)
    drifted = [demand._replace(tokens_per_s=demand.tokens_per_s * 1.05) for demand in DEMANDS_A[:2]] + DEMANDS_A[2:]
    assert placement.place(drifted, replicas_of(4), 1.0) is first
    surged = [*DEMANDS_A[:-1], DEMANDS_A[-1]._replace(tokens_per_s=1000.0)]
    assert placement.place(surged, replicas_of(4), 2.0) is not first


def test_hysteresis_keeps_no_replica_idle_that_has_joined() -> None:
    demands = [demand_of(f"a{number:02}", 8, 100) for number in range(60)]
    placement = PlacementByRank(LEVEL, RANK_GROUPS)
    first = placement.place(demands, replicas_of(12), 0.0)
    silent = [demand._replace(tokens_per_s=0.0) for demand in demands]
    assert placement.place(silent, replicas_of(13), 1.0) is first
    second = placement.place(demands, replicas_of(13), 2.0)
    assert {replica for _, replica in second.pairs()} == {*replicas_of(13)}
    drifted = [demands[0]._replace(tokens_per_s=104.0), *demands[1:]]
    assert placement.place(drifted, replicas_of(13), 3.0) is second, "it counts again"

    later = PlacementByRank(LEVEL, RANK_GROUPS)
    later.resume(second)
    assert {replica for _, replica in later.place(demands, replicas_of(14), 4.0).pairs()} == {*replicas_of(14)}, (
        "while nobody looked"
    )
    again = PlacementByRank(LEVEL, RANK_GROUPS)
    again.resume(second)
    assert again.place(drifted, replicas_of(13), 4.0) is second


def test_an_adapter_that_comes_or_goes_moves_no_other() -> None:
    placement = PlacementByRank(POINTS_A, RANK_GROUPS)
    first = placement.place(DEMANDS_A, replicas_of(4), 0.0)
    more = placement.place([*DEMANDS_A, demand_of("b3", 32, 30)], replicas_of(4), 1.0)
    assert more.shares == {**first.shares, digest("b3"): more.shares[digest("b3")]}
    (home,) = more.shares[digest("b3")]
    full = utilisations(more, [*DEMANDS_A, demand_of("b3", 32, 30)], POINTS_A)
    assert full[home.replica] == pytest.approx(0.6 + 30 / 800), "the emptiest, beside others of its rank"
    fewer = placement.place([each for each in DEMANDS_A if each.adapter != "c3"], replicas_of(4), 2.0)
    assert fewer.shares == {adapter: where for adapter, where in first.shares.items() if adapter != "c3"}
    surge = demand_of("b4", 32, 3000)
    assert (
        placement.place([*DEMANDS_A, surge], replicas_of(4), 3.0).shares.items() & first.shares.items()
        != first.shares.items()
    )


def test_without_hysteresis_every_drift_is_followed() -> None:
    placement = PlacementByRank(POINTS_A, NO_HYSTERESIS)
    first = placement.place(DEMANDS_A, replicas_of(4), 0.0)
    assert placement.place(DEMANDS_A, replicas_of(4), 1.0) is first
    drifted = [demand._replace(tokens_per_s=demand.tokens_per_s * 1.05) for demand in DEMANDS_A[:2]] + DEMANDS_A[2:]
    assert placement.place(drifted, replicas_of(4), 2.0).epoch == first.epoch + 1


def test_replicas_and_adapters_come_and_go() -> None:
    placement = PlacementByRank(POINTS_A)
    placement.place(DEMANDS_A, replicas_of(4), 0.0)
    smaller = placement.place(DEMANDS_A, replicas_of(3), 1.0)
    assert {replica for _, replica in smaller.pairs()} == {*replicas_of(3)}
    larger = placement.place([*DEMANDS_A, demand_of("new", 32, 100)], replicas_of(6), 2.0)
    assert {replica for _, replica in larger.pairs()} == {*replicas_of(6)}
    assert "new" in larger.shares
    assert placement.place([], replicas_of(6), 3.0).shares == {}


def test_movement_may_be_counted_from_the_actual_holders() -> None:
    replicas = replicas_of(2)
    demands = demands_of({8: {"a": 500}, 128: {"b": 500}})
    held = AdapterTable()
    routed, actual = (PlacementByRank(LEVEL, NO_HYSTERESIS, each) for each in (None, held))
    assert routed.place(demands, replicas, 0.0).shares == actual.place(demands, replicas, 0.0).shares
    # Nobody asked yet: each is still at the replica that the other was given.
    held.add(digest("b"), replicas[1])
    held.add(digest("a"), replicas[0])
    demands = demands_of({8: {"a": 499}, 128: {"b": 501}})
    assert routed.place(demands, replicas, 1.0).replicas(digest("b")) == {replicas[0]}
    assert actual.place(demands, replicas, 1.0).replicas(digest("b")) == {replicas[1]}


RANKS = st.sampled_from([8, 16, 32, 64, 128])
LOADS = st.one_of(st.just(0.0), st.floats(0.01, 5000))
ADAPTERS = st.lists(st.tuples(RANKS, LOADS), min_size=1, max_size=30)
PARAMS = st.sampled_from([RANK_GROUPS, NO_HYSTERESIS, RankPlacementParams()])


def numbered(adapters: list[tuple[int, float]]) -> list[AdapterDemand]:
    return [demand_of(f"a{number:03}", *each) for number, each in enumerate(adapters)]


@pytest.mark.slow
@settings(max_examples=examples(300), deadline=None)
@given(st.lists(ADAPTERS, min_size=1, max_size=2), st.integers(1, 9), st.integers(1, 9), PARAMS)
def test_shares_add_up_to_one_and_every_adapter_has_a_home(
    periods: list[list[tuple[int, float]]], before: int, after: int, params: RankPlacementParams
) -> None:
    placement = PlacementByRank(POINTS_B, params)
    for adapters, count in zip(periods, (before, after), strict=False):
        demands = numbered(adapters)
        # The table itself refuses shares that are not positive or do not add up to 1.
        table = placement.place(demands, replicas_of(count), 0.0)
        assert table.shares.keys() == {demand.adapter for demand in demands}
        assert {replica for _, replica in table.pairs()} <= {*replicas_of(count)}
        for its_shares in table.shares.values():
            assert sum(share for _, share in its_shares) == pytest.approx(1, abs=1e-9)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(st.tuples(RANKS, st.floats(1, 100)), min_size=1, max_size=40),
    st.integers(1, 20),
    st.sampled_from([PackingParams(), RANK_GROUPS.packing, PackingParams(group=3)]),
)
def test_no_replica_has_more_than_twice_the_mean_if_all_ranks_cost_the_same(
    adapters: list[tuple[int, float]], bins: int, params: PackingParams
) -> None:
    packing = LoadPacking(numbered(adapters), bins, LEVEL, params)
    largest = max(load for _, load in adapters) / 1000
    if largest <= packing.target:  # then no leftover is larger either
        assert max(packing.utilisations) <= 2 * packing.target * (1 + 1e-9)
    assert sum(packing.utilisations) == pytest.approx(bins * packing.target)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 5))
def test_no_permutation_moves_fewer_bytes(seed: int, count: int) -> None:
    chance = random.Random(seed)
    adapters = {digest(f"a{number}"): chance.choice([1, 2, 3, 16]) << 20 for number in range(12)}
    replicas = replicas_of(count)
    before = {adapter: chance.sample(replicas, chance.randint(1, 2)) for adapter in adapters}
    bins: list[dict[AdapterDigest, float]] = [{} for _ in replicas]
    for adapter in adapters:
        chance.choice(bins)[adapter] = 1.0
    routed = {adapter: tuple(ReplicaShare(each, 1 / len(held)) for each in held) for adapter, held in before.items()}

    def bytes_moved(places: tuple[ReplicaId, ...]) -> int:
        return sum(
            size
            for content, replica in zip(bins, places, strict=True)
            for adapter, size in adapters.items()
            if adapter in content and replica not in before[adapter]
        )

    places = least_movement(bins, replicas, before.__getitem__, routed, adapters)
    assert sorted(places) == replicas
    assert bytes_moved(tuple(places)) == min(map(bytes_moved, permutations(replicas)))


@given(st.lists(st.floats(0.1, 2000), min_size=8, max_size=8), st.lists(st.floats(0.1, 2000), min_size=8, max_size=8))
def test_a_placement_kept_by_hysteresis_is_within_its_margin(first: list[float], second: list[float]) -> None:
    placement = PlacementByRank(LEVEL, msgspec.structs.replace(RANK_GROUPS, hysteresis=0.2))
    old = placement.place(
        [demand_of(f"a{number}", 8 << number % 3, load) for number, load in enumerate(first)], replicas_of(3), 0.0
    )
    demands = [demand_of(f"a{number}", 8 << number % 3, load) for number, load in enumerate(second)]
    new = placement.place(demands, replicas_of(3), 1.0)
    assert placement.packing is not None
    best = max(placement.packing.utilisations)
    kept = max(utilisations(old, floored(demands, 0.05), LEVEL).values()) <= 1.2 * best
    assert (new is old) == (kept or new.shares == old.shares)


def test_the_same_demands_in_another_order_make_the_same_placement() -> None:
    tables = [PlacementByRank(POINTS_B).place(demands, replicas_of(4), 0.0) for demands in (DEMANDS_B, DEMANDS_B[::-1])]
    assert tables[0].shares == tables[1].shares


def test_few_of_a_thousand_adapters_move_when_demand_drifts() -> None:
    chance = random.Random(5)
    points = OperatingPoints({8: 1000.0, 128: 500.0})
    adapters = [(chance.choice([8, 16, 32, 64, 128]), chance.uniform(10, 100)) for _ in range(1000)]
    placement = PlacementByRank(points, NO_HYSTERESIS)
    first = placement.place(numbered(adapters), replicas_of(100), 0.0)
    drifted = [(rank, load * chance.uniform(0.98, 1.02)) for rank, load in adapters]
    second = placement.place(numbered(drifted), replicas_of(100), 1.0)
    assert placement.packing is not None
    sizes_bytes = {demand.adapter: demand.size_bytes for demand in numbered(adapters)}
    unmoved = zip(placement.packing.bins, replicas_of(100), strict=True)
    by_identity = [
        adapter for content, replica in unmoved for adapter in content if replica not in first.replicas(adapter)
    ]
    by_placement = [adapter for adapter, _ in set(second.pairs()) - set(first.pairs())]
    assert sum(map(sizes_bytes.__getitem__, by_placement)) <= sum(map(sizes_bytes.__getitem__, by_identity))
    assert len(by_placement) < len(list(second.pairs())) / 4
