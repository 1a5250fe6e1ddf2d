"""ELORA's cost model: the worked figures of its equations, and the vectorised form against a plain one."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.memory.policies.base import LOWEST
from lorikeet.memory.tree import BASE, DependencyTree
from lorikeet.papers.elora.cost_model import (
    Elora,
    Factor,
    WindowMean,
    quantity_coefficient,
    required_adapters,
)
from tests.memory.trees import add_adapter, add_kv, nodes_of, random_tree, view_of


def zipf(n: int) -> np.ndarray:
    weights = 1 / np.arange(1, n + 1)
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("prob", "expected"), [(np.full(20, 1 / 20), 16.13), (np.full(50, 1 / 50), 23.81), (zipf(50), 17.03)]
)
def test_required_adapters_of_batch_of_32_match_hand_computation(prob: np.ndarray, expected: float) -> None:
    assert required_adapters(prob, 32) == pytest.approx(expected, abs=0.005)


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=20), st.floats(0, 100))
def test_required_adapters_are_at_most_all_and_at_most_the_batch(weights: list[float], batch: float) -> None:
    prob = np.array(weights) / sum(weights)
    required = required_adapters(prob, batch)
    assert 0 <= required <= len(weights)
    assert batch < 1 or required <= batch + 1e-9


def test_coefficient_rises_to_1_and_is_1_without_requirements() -> None:
    assert [quantity_coefficient(n, 4.0) for n in (0, 1, 4, 9)] == [0.0, 0.25, 1.0, 1.0]
    assert quantity_coefficient(0, 0.0) == 1.0


# --- scores ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("age", "expected"), [(0, 0.5), (1, 0.269), (5, 6.7e-3), (10, 4.5e-5), (100, 3.7e-44)])
def test_recency_is_one_minus_sigmoid(age: float, expected: float) -> None:
    tree = DependencyTree()
    node = add_kv(tree, BASE)
    score = Elora(view_of(tree)).scores(np.array([node]), age)[0]
    assert math.exp(score) == pytest.approx(expected, rel=0.02)


def test_ages_at_which_the_printed_form_is_0_or_overflows_keep_their_order() -> None:
    tree = DependencyTree()
    nodes = [add_kv(tree, BASE, last_use_s=last) for last in (0.0, 900.0, 960.0, 963.0)]
    assert 1 - 1 / (1 + math.exp(-37.0)) == 0.0
    scores = Elora(view_of(tree)).scores(np.array(nodes), 1000.0)
    assert scores == pytest.approx([-1000.0, -100.0, -40.0, -37.0])


def plain_score(tree: DependencyTree, node: int, now: float, without: Factor | None) -> float:
    """Equation 5, factor by factor; each node costs one block."""
    visit = 1.0 if without is Factor.VISIT else float(tree.visits[node])
    age = now - float(tree.last_use_s[node])
    recency = 1.0 if without is Factor.RECENCY else 1 / (1 + math.exp(age))
    return math.log(visit * recency) if visit else LOWEST


@pytest.mark.slow
@given(st.integers(0, 1000), st.floats(50, 200), st.sampled_from((None, *Factor)))
def test_scores_are_those_of_the_plain_formula(seed: int, now: float, without: Factor | None) -> None:
    tree = random_tree(seed)
    nodes = nodes_of(tree)
    scores = Elora(view_of(tree), without=without).scores(np.array(nodes), now)
    assert scores == pytest.approx([plain_score(tree, node, now, without) for node in nodes])


def test_unrequested_adapter_has_the_lowest_finite_score() -> None:
    tree = DependencyTree()
    never, old = add_adapter(tree, visits=0), add_adapter(tree, visits=1)
    scores = Elora(view_of(tree)).scores(np.array([never, old]), 1e9)
    assert scores[0] == LOWEST
    assert LOWEST < scores[1] < 0
    assert scores[0] + np.inf == np.inf


def test_blocks_of_adapters_cost_the_same_for_every_rank() -> None:
    tree = DependencyTree()
    nodes = np.array([add_adapter(tree, size=5), add_adapter(tree, size=10)])
    assert np.diff(Elora(view_of(tree)).scores(nodes, 1.0)) == 0


# --- the quantity of adapters ------------------------------------------------------------------------


def with_adapters(there: int, away: int, without: Factor | None = None) -> Elora:
    """Adapters used alike, and a batch of 32 for the last 5 seconds."""
    tree = DependencyTree()
    for n in range(there + away):
        add_adapter(tree, there=n < there)
    policy = Elora(view_of(tree), without=without)
    policy.batch(32, 0.0)
    return policy


def test_low_comes_from_the_visits_and_the_batch() -> None:
    assert with_adapters(20, 0).low(5.0) == pytest.approx(16.13, abs=0.005)
    assert with_adapters(10, 40).low(5.0) == pytest.approx(23.81, abs=0.005)


@pytest.mark.parametrize("resident", [2, 5, 10, 16])
def test_below_low_an_adapter_that_would_leave_counts_n_minus_1_over_n_of_kv(resident: int) -> None:
    policy = with_adapters(resident, 20 - resident)
    assert math.exp(policy.adapter_offset(5.0)) == pytest.approx((resident - 1) / resident)


@pytest.mark.parametrize("resident", [1, 5, 16])
def test_below_low_an_adapter_that_would_come_counts_n_plus_1_over_n_of_kv(resident: int) -> None:
    policy = with_adapters(resident, 20 - resident)
    coefficients = min(1.0, (resident + 1) / policy.low(5.0)), resident / policy.low(5.0)
    assert math.exp(policy.prefetch_adapter_offset(5.0)) == pytest.approx(coefficients[0] / coefficients[1])


def test_above_low_the_number_of_adapters_does_not_matter() -> None:
    policy = with_adapters(20, 0)
    assert (policy.adapter_offset(5.0), policy.prefetch_adapter_offset(5.0)) == (0.0, 0.0)


def test_by_the_printed_formula_the_last_adapter_leaves_before_all_kv() -> None:
    assert with_adapters(1, 9).adapter_offset(5.0) == -np.inf


def test_without_any_adapter_all_kv_comes_after_all_adapters() -> None:
    assert with_adapters(0, 9).prefetch_adapter_offset(5.0) == np.inf


def test_left_out_the_coefficient_never_matters() -> None:
    for resident in range(4):
        policy = with_adapters(resident, 9, Factor.LORA_EVAL)
        assert (policy.adapter_offset(5.0), policy.prefetch_adapter_offset(5.0)) == (0.0, 0.0)


def test_where_nothing_runs_no_adapter_is_required() -> None:
    policy = with_adapters(1, 9)
    policy.batch(0, 5.0)
    assert policy.low(7.5) > 0
    assert policy.low(10.0) == 0
    assert policy.adapter_offset(10.0) == 0.0


def test_a_batch_counts_as_1_at_least_while_a_request_waits() -> None:
    tree = DependencyTree()
    for _ in range(2):
        add_adapter(tree, there=False)
    policy = Elora(view_of(tree))
    assert policy.low(1.0) == 0
    policy.view.queued = 1
    assert policy.low(2.0) == pytest.approx(1.0)


def test_requests_of_the_base_need_no_adapter() -> None:
    tree = DependencyTree()
    add_adapter(tree, visits=1)
    tree.visits[BASE] = 3
    policy = Elora(view_of(tree))
    policy.batch(2, 0.0)
    assert policy.low(5.0) == pytest.approx(1 - 0.75**2)


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 9)), min_size=1, max_size=20), st.floats(0, 7))
def test_the_batch_is_its_mean_over_time(changes: list[tuple[float, int]], after: float) -> None:
    mean, times, now = WindowMean(5.0), [], 0.0
    for pause, value in changes:
        now += pause
        times.append((now, value))
        mean.set(value, now)
    now += after
    begin = max(times[0][0], now - 5.0)
    spans = [(max(begin, t), end, v) for (t, v), (end, _) in zip(times, [*times[1:], (now, 0)], strict=True)]
    area = sum(max(0.0, end - start) * value for start, end, value in spans)
    expected = area / (now - begin) if now > begin else times[-1][1]
    assert mean.mean(now) == pytest.approx(expected, rel=1e-6, abs=1e-6)
