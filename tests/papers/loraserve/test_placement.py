"""LoRAServe's placement with the paper's parameters, and its baselines, which place an adapter once."""

from collections import Counter

import pytest

from lorikeet.cluster.placement.by_rank import PlacementByRank, RankPlacementParams
from lorikeet.cluster.tables import RoutingTable
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.papers.loraserve.placement import ContiguousPlacement, LoRAServe, RandomPlacement
from tests.support.placement import DEMANDS_B, POINTS_B, demand_of, replicas_of


def homes(table: RoutingTable) -> dict[AdapterDigest, ReplicaId]:
    assert all(len(shares) == 1 for shares in table.shares.values())
    return {adapter: shares[0].replica for adapter, shares in table.shares.items()}


def groups(table: RoutingTable) -> list[list[int]]:
    """Return the ranks of each replica's adapters."""
    ranks = {demand.adapter: demand.rank for demand in DEMANDS_B}
    return [sorted(ranks[adapter] for adapter, home in homes(table).items() if home == each) for each in replicas_of(4)]


def test_contiguous_cuts_the_sorted_adapters_into_groups_of_equal_count() -> None:
    table = ContiguousPlacement().place(DEMANDS_B[::-1], replicas_of(4), 0.0)
    assert groups(table) == [[8] * 5 + [16] * 2, [16] * 3 + [32] * 3, [32] * 2 + [64] * 4, [64] + [128] * 5]


def test_a_later_adapter_joins_its_rank() -> None:
    placement = ContiguousPlacement()
    before = homes(placement.place(DEMANDS_B, replicas_of(4), 0.0))
    late = [demand_of("late-4", 4, 1), demand_of("late-128", 128, 1), demand_of("late-24", 24, 1)]
    after = homes(placement.place([*DEMANDS_B, *late], replicas_of(4), 1.0))
    s = replicas_of(4)
    assert after == before | {"late-4": s[0], "late-128": s[3], "late-24": s[1]}


def test_random_deals_as_many_to_each_and_depends_on_the_seed_alone() -> None:
    first, again, other = (homes(RandomPlacement(seed).place(DEMANDS_B, replicas_of(4), 0.0)) for seed in (3, 3, 4))
    assert sorted(Counter(first.values()).values()) == [6, 6, 6, 7]
    assert first == again == homes(RandomPlacement(3).place(DEMANDS_B[::-1], replicas_of(4), 0.0))
    assert first != other


def test_unbalanced_random_draws_for_each_adapter() -> None:
    demands = [demand_of(f"a{number}", 8, 1) for number in range(400)]
    counts = Counter(homes(RandomPlacement(1, balanced=False).place(demands, replicas_of(4), 0.0)).values())
    assert all(60 < count < 140 for count in counts.values())
    assert set(counts.values()) != {100}


@pytest.mark.parametrize("placement", [RandomPlacement(1), ContiguousPlacement()])
def test_homes_stay_whatever_the_demand_until_a_replica_leaves(
    placement: RandomPlacement | ContiguousPlacement,
) -> None:
    first = placement.place(DEMANDS_B, replicas_of(4), 0.0)
    assert placement.place([demand._replace(tokens_per_s=1.0) for demand in DEMANDS_B], replicas_of(4), 1.0) is first
    second = placement.place(DEMANDS_B, replicas_of(3), 2.0)
    gone = replicas_of(4)[3]
    assert second.epoch == first.epoch + 1
    assert {a: r for a, r in homes(first).items() if r != gone}.items() <= homes(second).items()
    assert gone not in homes(second).values()
    third = placement.place(DEMANDS_B[1:], replicas_of(3), 3.0)
    assert third.shares.keys() == {demand.adapter for demand in DEMANDS_B[1:]}


def test_loraserve_places_by_rank_with_the_parameters_of_the_paper() -> None:
    table = LoRAServe(POINTS_B).place(DEMANDS_B, replicas_of(4), 0.0)
    assert table.shares == PlacementByRank(POINTS_B, RankPlacementParams()).place(DEMANDS_B, replicas_of(4), 0.0).shares
    assert RankPlacementParams().hysteresis is None
