"""What holds for every policy of the tables."""

import numpy as np
import pytest

from lorikeet.memory.policies.base import PrefetchPolicy
from lorikeet.memory.policies.lru import Lru, LruWithReuse
from lorikeet.memory.tree import BASE, DependencyTree
from lorikeet.policies import EVICTION, PREFETCH
from tests.memory.trees import (
    add_adapter,
    add_kv,
    bring_all,
    nodes_of,
    random_tree,
    roots_come_first,
    view_of,
)
from tests.support.policies import policy_values


@pytest.mark.parametrize("name", policy_values("eviction"))
def test_every_policy_has_a_finite_score_for_every_node(name: str) -> None:
    for seed in range(10):
        tree = random_tree(seed)
        nodes = nodes_of(tree)
        policy = EVICTION[name](view_of(tree))
        policy.batch(4, 0.0)
        for node in nodes:
            if tree.on_device[node]:
                policy.inserted([node], 0.0)
        for node in nodes:
            policy.arrived(int(tree.top[node]), [node] if tree.top[node] != node else [], 1.0)
            policy.admitted(int(tree.top[node]), [], 1.0)
        scores = policy.scores(np.array([BASE, *nodes]), 100.0)
        assert np.isfinite(scores[1:]).all()
        assert policy.choose(nodes[:3], 100.0) in nodes[:3]


@pytest.mark.parametrize("name", policy_values("eviction"))
def test_score_of_a_node_does_not_depend_on_others_scored_with_it(name: str) -> None:
    tree = random_tree(3)
    policy, nodes = EVICTION[name](view_of(tree)), nodes_of(tree)
    for node in nodes:
        policy.arrived(int(tree.top[node]), [], 1.0)
    together = policy.scores(np.array(nodes), 100.0)
    assert together == pytest.approx([policy.scores(np.array([node]), 100.0)[0] for node in nodes])


@pytest.mark.slow
@pytest.mark.parametrize("name", policy_values("eviction"))
def test_all_nodes_of_a_large_tree_are_scored(name: str) -> None:
    tree = random_tree(4, adapters=300, kv=3000)
    policy, nodes = EVICTION[name](view_of(tree)), nodes_of(tree)
    assert policy.scores(np.array(nodes), 100.0).shape == (3300,)


@pytest.mark.parametrize("name", PREFETCH)
def test_every_prefetch_names_roots_first_and_nothing_twice(name: str) -> None:
    for seed in range(10):
        tree = random_tree(seed)
        view = view_of(tree)
        prefetch = PREFETCH[name](view, Lru(view))
        view.waiting = dict.fromkeys(tree.adapters, 1)
        named = bring_all(prefetch, tree, 100.0)
        assert len(named) == len(set(named))
        assert name == "best-first:flat" or roots_come_first(tree, named)
        assert bring_all(prefetch, tree, 100.0) == []


def test_the_least_recently_used_scores_lowest() -> None:
    tree = random_tree(2)
    nodes = nodes_of(tree)
    assert Lru(view_of(tree)).scores(np.array(nodes), 0.0).tolist() == tree.last_use_s[nodes].tolist()


def test_rarely_reused_kv_is_evicted_before_older_adapters_and_other_kv() -> None:
    tree = DependencyTree()
    chats, single_shots, idle = add_adapter(tree, last_use_s=8), add_adapter(tree, last_use_s=9), add_adapter(tree)
    chat = add_kv(tree, chats, last_use_s=8)
    shots = [add_kv(tree, single_shots, last_use_s=at) for at in (7, 9)]
    view = view_of(tree)
    view.kv_reuse = lambda tops: np.where(tops == single_shots, 0.04, 0.3)
    nodes = np.array([chats, single_shots, idle, chat, *shots])
    order = nodes[np.argsort(LruWithReuse(view).scores(nodes, 10.0), kind="stable")]
    assert order.tolist() == [*shots, idle, chats, chat, single_shots]


def test_without_prefetch_nothing_is_named() -> None:
    view = view_of(DependencyTree())
    prefetch = PREFETCH["none"](view, Lru(view))
    assert type(prefetch) is PrefetchPolicy
    assert list(prefetch.targets(0.0)) == []
    assert prefetch.evicts_below(1) == -np.inf
