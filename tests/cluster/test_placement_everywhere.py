"""Full replication, and the placements that need a replica."""

import pytest

from lorikeet.cluster.placement.everywhere import FullReplication
from lorikeet.cluster.placement.orchestrator import Orchestrator
from tests.support.placement import DEMANDS_B, replicas_of


def test_full_replication_has_everything_everywhere() -> None:
    placement = FullReplication()
    table = placement.place(DEMANDS_B, replicas_of(4), 0.0)
    assert all([share for _, share in shares] == [0.25] * 4 for shares in table.shares.values())
    assert placement.place(DEMANDS_B, replicas_of(4), 1.0) is table
    assert len(list(placement.place(DEMANDS_B, replicas_of(5), 2.0).pairs())) == 125


def test_a_placement_needs_a_replica() -> None:
    with pytest.raises(ValueError, match="needs a replica"):
        Orchestrator(FullReplication(), [], 0.0)


def test_full_replication_shares_one_tuple_with_the_placements_before() -> None:
    placement = FullReplication()
    first = placement.place(DEMANDS_B[:2], replicas_of(3), 0.0)
    second = placement.place(DEMANDS_B, replicas_of(3), 1.0)
    assert second.epoch > first.epoch
    assert len({id(shares) for table in (first, second) for shares in table.shares.values()}) == 1
    assert {
        each.share for shares in placement.place(DEMANDS_B, replicas_of(2), 2.0).shares.values() for each in shares
    } == {0.5}
