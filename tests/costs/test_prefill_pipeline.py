"""A prefill beside the transfer of its adapter: the worked example of TOPPINGS' specification, and what always holds.

In the example 8 layers take 3 on the host, 1 on the device and 2 over the link, and each group 1 more.
"""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.costs.prefill_pipeline import (
    ComputePlace,
    LayerGroup,
    LayerTimes,
    cut,
    dynamic,
    load_order,
    look_ahead_order,
    one_group,
    plan,
    static,
    walk,
)

EXAMPLE = LayerTimes(layers=8, host_s=3.0, device_s=1.0, load_s=2.0, group_s=1.0)


def _fixed(size: int) -> tuple[LayerGroup, ...]:
    return load_order(cut(8, size))


def test_loads_of_four_groups_end_at_5_10_15_and_group_1_last_at_20() -> None:
    order = _fixed(2)
    assert order == ((2, 4), (4, 6), (6, 8), (0, 2))
    assert EXAMPLE.load_ends_s(order) == [5, 10, 15, 20]


def test_dynamic_ends_at_16_with_placement_ccggcgcg() -> None:
    course = dynamic(EXAMPLE, _fixed(2))
    assert (course.first_token_s, course.placement) == (16, "CCGGCGCG")


def test_adapter_is_resident_at_20_after_the_first_token_at_16() -> None:
    course = dynamic(EXAMPLE, _fixed(2))
    assert course.first_token_s < course.resident_s == 20


def test_static_ends_at_17() -> None:
    course = static(EXAMPLE, _fixed(2))
    assert (course.first_token_s, course.placement) == (17, "CCGGGGGG")


def test_one_load_ends_at_17_and_its_prefill_at_20_with_placement_ccccccgg() -> None:
    course = one_group(EXAMPLE)
    assert (course.resident_s, course.first_token_s, course.placement) == (17, 20, "CCCCCCGG")


def test_static_with_one_load_is_all_on_the_host() -> None:
    assert one_group(EXAMPLE, is_static=True).first_token_s == 24


def test_all_on_the_host_ends_at_24() -> None:
    assert walk(EXAMPLE, [math.inf] * 8)[-1].end_s == 24


def test_load_then_prefill_ends_at_25() -> None:
    assert EXAMPLE.load_then_prefill_s == 25


def test_cached_ends_at_8() -> None:
    assert EXAMPLE.cached_s == 8


def test_with_loads_of_half_a_unit_dynamic_ends_at_12_with_placement_ccgggggg() -> None:
    course = dynamic(EXAMPLE._replace(load_s=0.5), _fixed(2))
    assert (course.first_token_s, course.placement) == (12, "CCGGGGGG")


def test_groups_of_one_end_at_22_in_fixed_order_with_placement_cgcccccc() -> None:
    course = dynamic(EXAMPLE, _fixed(1))
    assert (course.first_token_s, course.placement) == (22, "CGCCCCCC")


def test_groups_of_one_end_at_16_with_look_ahead_with_placement_cgcgcggc() -> None:
    course = dynamic(EXAMPLE, look_ahead_order(EXAMPLE, cut(8, 1)))
    assert (course.first_token_s, course.placement) == (16, "CGCGCGGC")
    assert [first for first, _ in course.groups] == [1, 3, 5, 6, 2, 4, 7, 0]


def test_groups_of_four_end_at_16_with_placement_ccccgggg_resident_at_18() -> None:
    for order in (_fixed(4), look_ahead_order(EXAMPLE, cut(8, 4))):
        course = dynamic(EXAMPLE, order)
        assert (course.first_token_s, course.placement, course.resident_s) == (16, "CCCCGGGG", 18)


def test_look_ahead_leaves_groups_of_two_unchanged() -> None:
    assert look_ahead_order(EXAMPLE, cut(8, 2)) == _fixed(2)


def test_balance_alone_misleads() -> None:
    """Groups of one balance exactly, and still end later than groups of two, as each pays for a load of its own."""
    balance = [abs(size * EXAMPLE.host_s - EXAMPLE.group_load_s((0, size))) for size in (1, 2)]
    assert balance == [0, 1]
    assert dynamic(EXAMPLE, _fixed(1)).first_token_s > dynamic(EXAMPLE, _fixed(2)).first_token_s


def test_planner_takes_groups_of_three_and_ends_at_14() -> None:
    course = plan(EXAMPLE)
    assert (course.first_token_s, course.placement) == (14, "CCCGGGGG")
    assert course.groups == ((3, 6), (6, 8), (0, 3))


def test_planner_breaks_ties_by_balance() -> None:
    times = EXAMPLE._replace(load_s=100.0)  # nothing arrives in time, and small groups are nearest to balance
    assert plan(times).first_token_s == times.layers * times.host_s
    assert len(plan(times).groups) == 8


def test_planner_breaks_ties_of_balance_by_fewer_groups() -> None:
    times = EXAMPLE._replace(load_s=3.0, group_s=100.0)  # nothing arrives in time, and all sizes are off by 100
    assert plan(times).groups == ((0, 8),)


def test_static_plans_are_made_for_static_courses() -> None:
    course = plan(EXAMPLE, is_static=True)
    assert course.first_token_s == min(static(EXAMPLE, _fixed(size)).first_token_s for size in range(1, 9))
    assert course.placement == "CCCGGGGG"


def test_wait_flag_waits_only_where_that_is_sooner_than_the_host() -> None:
    """Loads end at 4.75, 9.5 and 14.25. At 8 the host would need until 11, the load and the device until 10.5."""
    times = EXAMPLE._replace(load_s=1.875)
    greedy, waiting = dynamic(times, _fixed(2)), dynamic(times, _fixed(2), waits=True)
    assert (greedy.first_token_s, greedy.placement) == (16, "CCGGCGCG")
    assert (waiting.first_token_s, waiting.placement) == (15.5, "CCGGGGCG")


def test_wait_flag_does_not_wait_for_a_tie() -> None:
    assert dynamic(EXAMPLE, _fixed(2), waits=True) == dynamic(EXAMPLE, _fixed(2))


def test_layers_that_arrived_before_the_prefill_are_computed_on_the_device() -> None:
    steps = walk(EXAMPLE, [-1.0, 0.0, 2.0, 3.5, 9.0, 9.0, 9.0, 9.0])
    assert "".join(step.place for step in steps) == "GGGCCGGG"
    assert steps[-1].end_s == 12


def test_a_model_of_one_layer_has_one_group() -> None:
    assert plan(LayerTimes(1, 3.0, 1.0, 2.0, 1.0)).groups == ((0, 1),)


# Sixteenths add up exactly, so that equal times compare equal.
_SIXTEENTHS = st.integers(0, 80).map(lambda count: count / 16)


@st.composite
def _times(draw: st.DrawFn) -> LayerTimes:
    device_s = draw(_SIXTEENTHS)
    host_s = device_s + draw(_SIXTEENTHS)
    return LayerTimes(draw(st.integers(1, 14)), host_s, device_s, draw(_SIXTEENTHS), draw(_SIXTEENTHS))


def _orders(times: LayerTimes) -> list[tuple[LayerGroup, ...]]:
    cuts = [cut(times.layers, size) for size in range(1, times.layers + 1)]
    return [*map(load_order, cuts), *(look_ahead_order(times, groups) for groups in cuts)]


def _layers(groups: Sequence[LayerGroup]) -> list[int]:
    return sorted(layer for group in groups for layer in range(*group))


@given(_times())
def test_every_layer_is_loaded_once_and_the_first_group_last(times: LayerTimes) -> None:
    for order in _orders(times):
        assert _layers(order) == list(range(times.layers))
        assert order[-1][0] == 0


@pytest.mark.slow
@given(_times(), st.booleans())
def test_dynamic_is_never_later_than_the_host_alone_nor_earlier_than_cached(times: LayerTimes, waits: bool) -> None:
    for order in _orders(times):
        course = dynamic(times, order, waits=waits)
        assert len(course.places) == times.layers
        assert times.cached_s <= course.first_token_s <= times.layers * times.host_s
        if not waits:
            on_host = course.places.count(ComputePlace.HOST)
            assert course.first_token_s == times.cached_s + on_host * (times.host_s - times.device_s)


@pytest.mark.slow
@given(_times())
def test_with_the_wait_flag_never_later_than_without_or_than_static(times: LayerTimes) -> None:
    for order in _orders(times):
        waiting_s = dynamic(times, order, waits=True).first_token_s
        assert waiting_s <= dynamic(times, order).first_token_s
        assert waiting_s <= static(times, order).first_token_s


@pytest.mark.slow
@given(_times(), st.data())
def test_with_the_wait_flag_earlier_arrivals_are_never_worse(times: LayerTimes, data: st.DataObject) -> None:
    """Without it they can be: who comes just before an arrival takes the host's time."""
    later = data.draw(st.lists(_SIXTEENTHS.map(lambda s: 4 * s), min_size=times.layers, max_size=times.layers))
    sooner = [arrival_s - data.draw(_SIXTEENTHS) for arrival_s in later]
    assert walk(times, sooner, waits=True)[-1].end_s <= walk(times, later, waits=True)[-1].end_s


@pytest.mark.slow
@given(_times())
def test_look_ahead_places_helpful_loads_first(times: LayerTimes) -> None:
    for size in range(1, times.layers + 1):
        course = dynamic(times, look_ahead_order(times, cut(times.layers, size)))
        helps = [course.places[stop - 1] is ComputePlace.DEVICE for _, stop in course.groups[:-1]]
        assert helps == sorted(helps, reverse=True)


@given(_times(), st.booleans(), st.booleans())
def test_a_plan_is_the_soonest_of_its_candidates(times: LayerTimes, is_static: bool, waits: bool) -> None:
    course = plan(times, is_static=is_static, waits=waits)
    assert _layers(course.groups) == list(range(times.layers))
    candidates_s = [
        static(times, load_order(cut(times.layers, size))).first_token_s
        if is_static
        else dynamic(times, load_order(cut(times.layers, size)), waits=waits).first_token_s
        for size in range(1, times.layers + 1)
    ]
    assert times.cached_s <= course.first_token_s <= min(candidates_s)
    assert course.first_token_s <= one_group(times, is_static=is_static, waits=waits).first_token_s
    assert course.first_token_s <= times.layers * times.host_s


@pytest.mark.parametrize("layers", [7, 32])
def test_the_last_group_has_what_remains(layers: int) -> None:
    groups = cut(layers, 5)
    assert _layers(groups) == list(range(layers))
    assert groups[-1] == (5 * (len(groups) - 1), layers)
