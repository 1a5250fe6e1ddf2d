"""ELORA's BFS policy: sums over branches."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.memory.policies.base import LOWEST
from lorikeet.memory.tree import BASE, DependencyTree
from lorikeet.papers.elora.bfs import Bfs
from lorikeet.papers.elora.cost_model import Elora
from tests.memory.trees import (
    add_adapter,
    add_kv,
    nodes_of,
    random_tree,
    view_of,
)


@pytest.mark.slow
@given(st.integers(0, 1000), st.data())
def test_a_node_scores_the_sum_of_eval_over_its_branch(seed: int, data: st.DataObject) -> None:
    tree = random_tree(seed)
    view, nodes = view_of(tree), nodes_of(tree)
    each = dict(zip(nodes, Elora(view).scores(np.array(nodes), 60.0), strict=True))
    asked = data.draw(st.lists(st.sampled_from(nodes), min_size=1))
    scores = Bfs(view).scores(np.array(asked), 60.0)
    for node, score in zip(asked, scores, strict=True):
        branch = [other for other in nodes if tree.top[other] == tree.top[node]]
        total = sum(tree.size[other] * math.exp(each[other]) for other in branch)
        assert score == pytest.approx(math.log(total) if total else LOWEST)


def test_sums_of_very_old_nodes_still_differ() -> None:
    tree = DependencyTree()
    one, two = add_adapter(tree), add_adapter(tree)
    add_kv(tree, two)
    scores = Bfs(view_of(tree)).scores(np.array([one, two]), 1e6)
    assert np.diff(scores) == pytest.approx(math.log(2))


def test_all_kv_of_the_base_is_a_branch_too() -> None:
    tree = DependencyTree()
    kv = [add_kv(tree, BASE) for _ in range(3)]
    policy = Bfs(view_of(tree))
    scores = policy.scores(np.array([BASE, *kv]), 0.0)
    assert scores[1:] == pytest.approx(math.log(3 * 0.5))


def test_a_branch_leaves_as_a_whole_and_counts_no_adapters() -> None:
    policy = Bfs(view_of(random_tree(1)))
    policy.batch(32, 0.0)
    assert policy.whole_branches
    assert policy.adapter_offset(5.0) == 0.0
