"""Sizes, classes, quotas and the ledger of Chameleon's queue, with the worked examples of its spec."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.core.ids import RequestId
from lorikeet.papers.chameleon.class_stats import SlidingWindow
from lorikeet.papers.chameleon.quotas import ClassLoad, QuotaAccounting, SurplusShare, assign_quotas
from lorikeet.papers.chameleon.size_classes import (
    OUTPUT_ONLY_WEIGHTS,
    KRule,
    RequestSize,
    find_classes,
    weighted_sizes,
)

SPEC_SIZES = (0.05, 0.06, 0.07, 0.30, 0.31, 0.32, 0.80, 0.81, 0.82)
SPEC_LOADS = (ClassLoad(500, 2, 4.00, 10), ClassLoad(1500, 4, 0.75, 20), ClassLoad(4000, 10, 0.06, 50))


def test_weighted_request_size_is_as_worked_out_by_hand() -> None:
    largest = RequestSize(4000, 1000, 128)
    assert float(weighted_sizes(RequestSize(1000, 200, 32), largest)) == pytest.approx(0.225)
    assert float(weighted_sizes(RequestSize(9000, 9000, 0), largest)) == pytest.approx(0.8), "what is above counts as 1"
    assert float(weighted_sizes(RequestSize(1000, 200, 32), largest, OUTPUT_ONLY_WEIGHTS)) == pytest.approx(0.2)


def test_classes_of_nine_sizes_by_the_elbow_and_literally() -> None:
    elbow = find_classes(np.array(SPEC_SIZES), KRule.ELBOW)
    assert elbow.squares == pytest.approx((0.8756, 0.09435, 0.0006, 0.00045), rel=1e-3)
    assert elbow.centroids == pytest.approx((0.06, 0.31, 0.81))
    assert elbow.boundaries == pytest.approx((0.185, 0.56))
    assert len(find_classes(np.array(SPEC_SIZES), KRule.LEAST_SQUARES).centroids) == 4
    assert elbow.of(np.array((0.1, elbow.boundaries[0], 0.19, 0.9))).tolist() == [0, 0, 1, 2]


def test_equal_sizes_are_one_class() -> None:
    for rule in KRule:
        assert find_classes(np.full(50, 0.3), rule).boundaries == ()


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(1, 4))
def test_no_partition_has_less_squares(values: list[int], most: int) -> None:
    sizes = np.array(sorted(values), np.float64) / 40
    found = find_classes(sizes, KRule.LEAST_SQUARES, most).squares

    def squares(cuts: tuple[int, ...]) -> float:
        parts = np.split(sizes, cuts)
        return sum(float(((part - part.mean()) ** 2).sum()) for part in parts if len(part))

    for number, value in enumerate(found, 1):
        best = min(squares(cuts) for cuts in itertools.combinations_with_replacement(range(len(sizes)), number - 1))
        assert value == pytest.approx(best, abs=1e-9)


def test_many_samples_give_nearly_the_classes_of_the_values_themselves() -> None:
    random = np.random.default_rng(2)
    sizes = np.concatenate([random.normal(middle, 0.02, 5000) for middle in (0.1, 0.4, 0.8)]).clip(0, 1)
    found = find_classes(sizes, KRule.ELBOW)
    assert found.centroids == pytest.approx((0.1, 0.4, 0.8), abs=0.002)


def test_quotas_of_three_classes_are_as_worked_out_by_hand() -> None:
    assert [load.least_tokens for load in SPEC_LOADS] == pytest.approx([4100, 4800, 3200])
    assert assign_quotas(SPEC_LOADS, 24200, floor=False, share=SurplusShare.LEAST).tokens == (8200, 9600, 6400)


def test_quotas_with_the_most_for_the_smallest_class() -> None:
    assert assign_quotas(SPEC_LOADS, 24200, floor=False, share=SurplusShare.PRIORITY).tokens == (10150, 8833, 5217)


def test_quotas_that_hold_the_largest_request_of_each_class() -> None:
    assert assign_quotas(SPEC_LOADS, 24200, floor=True, share=SurplusShare.LEAST).tokens == (7691, 9005, 7504)


def test_quotas_in_an_overload_are_scaled() -> None:
    found = assign_quotas(SPEC_LOADS, 6050, floor=False, share=SurplusShare.PRIORITY)
    assert found.tokens == (2050, 2400, 1600)
    assert not found.feasible
    held = assign_quotas(SPEC_LOADS, 6050, floor=True, share=SurplusShare.PRIORITY)
    assert held.tokens == (526, 1524, 4000), "each still holds its largest request"


@given(
    st.lists(st.tuples(*[st.floats(0.1, 1e4)] * 3, st.sampled_from([0.5, 30.0, float("inf")])), min_size=1, max_size=4),
    st.integers(1, 10**6),
    st.booleans(),
    st.sampled_from(SurplusShare),
)
def test_quotas_add_up(
    loads: list[tuple[float, float, float, float]], total: int, floor: bool, share: SurplusShare
) -> None:
    found = assign_quotas([ClassLoad(*load) for load in loads], total, floor=floor, share=share)
    assert sum(found.tokens) == total
    assert min(found.tokens) >= 0


def test_ledger_credits_the_lender_and_reassigns_when_classes_change() -> None:
    ledger, one, two = QuotaAccounting(100), RequestId("one"), RequestId("two")
    ledger.divide((60, 40), {})
    ledger.hold(one, 0, 60)
    ledger.hold(one, 1, 10)
    ledger.hold(two, 1, 35)
    assert [ledger.available(number) for number in (0, 1)] == [0, -5]
    ledger.give_back(two)
    assert [ledger.available(number) for number in (0, 1)] == [0, 30]
    ledger.divide((10, 30, 60), {one: 2})
    assert [ledger.available(number) for number in range(3)] == [10, 30, -10]
    assert ledger.held_by(one) == 70
    with pytest.raises(ValueError, match="do not add up to 100"):
        ledger.divide((10, 30), {one: 1})


def test_a_window_forgets_what_is_old() -> None:
    window = SlidingWindow(2)
    for index in range(1000):
        window.add(float(index), index, -index)
    assert window.since(990.0)[:, 0].tolist() == list(range(990, 1000))
    assert len(window) == 10
    for index in range(1000, 2000):
        window.add(float(index), index, -index)
    assert window.since(1995.0).tolist() == [[index, -index] for index in range(1995, 2000)]
