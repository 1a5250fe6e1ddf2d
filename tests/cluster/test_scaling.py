"""The number of replicas for a load."""

import pytest

from lorikeet.cluster.placement.operating_points import OperatingPoints
from lorikeet.cluster.placement.scaling import ScalingPolicy, load_of
from tests.support.placement import demand_of


def test_the_load_is_counted_in_replicas_at_each_adapters_own_rank() -> None:
    demands = [demand_of("small", 8, 500), demand_of("large", 128, 500)]
    assert load_of(demands, OperatingPoints({8: 1000.0, 128: 500.0})) == 1.5


def test_scales_up_at_once_and_down_after_three_periods_to_their_maximum() -> None:
    scaling = ScalingPolicy(1, 8)
    assert scaling.wanted(0.8, 1) == 1
    assert scaling.wanted(2.5, 1) == 4
    assert [scaling.wanted(load, 4) for load in (1.5, 0.7)] == [4, 4]
    assert scaling.wanted(0.7, 4) == 2, "1.5 was among the last three"
    assert scaling.wanted(0.7, 2) == 1


def test_it_keeps_within_its_limits() -> None:
    scaling = ScalingPolicy(2, 3)
    assert scaling.wanted(100.0, 2) == 3
    assert [scaling.wanted(0.0, 3) for _ in range(3)] == [3, 3, 2]
    with pytest.raises(ValueError, match="from 3 to 2"):
        ScalingPolicy(3, 2)
