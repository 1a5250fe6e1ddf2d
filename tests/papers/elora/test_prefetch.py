"""ELORA's prefetch: the tree's rule, scores, and whole branches."""

from collections.abc import Iterator
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.memory.policies import prefetch as prefetching
from lorikeet.memory.policies.base import EvictionPolicy, is_prefetchable, stays_on_device
from lorikeet.memory.policies.lru import Lru
from lorikeet.memory.tree import BASE, DependencyTree, NodeKind, NodeTransfer
from lorikeet.papers.elora.bfs import Bfs
from lorikeet.papers.elora.cost_model import Elora, Factor
from lorikeet.papers.elora.prefetch import BestFirst, BestFirstFlat, Branches
from tests.memory.trees import (
    add_adapter,
    add_kv,
    bring_all,
    nodes_of,
    random_tree,
    roots_come_first,
    score,
    view_of,
)

NOW = 100.0


def plain_order(tree: DependencyTree, eviction: EvictionPolicy) -> Iterator[int]:
    """Algorithm D as it is written: of all candidates take the best, then look again."""
    named: set[int] = set()
    while True:
        candidates = []
        for node in set(nodes_of(tree)) - named:
            parent = int(tree.parent[node])
            is_adapter = tree.kind[node] == NodeKind.ADAPTER
            is_open = is_adapter or parent in named or stays_on_device(tree, np.array([parent]))[0]
            if is_open and is_prefetchable(tree, node):
                offset = eviction.prefetch_adapter_offset(NOW) if tree.kind[node] == NodeKind.KV else 0.0
                candidates.append((-(tree.score[node] - offset), -tree.last_use_s[node], tree.depth[node], node))
        if not candidates:
            return
        node = int(min(candidates)[3])
        named.add(node)
        yield node


def moved(order: Iterator[int], tree: DependencyTree) -> list[int]:
    """Bring the adapters of an order as they are named."""
    named = []
    for node in order:
        named.append(node)
        if tree.kind[node] == NodeKind.ADAPTER:
            tree.moving[node] = NodeTransfer.IN
    return named


@pytest.mark.slow
@given(st.integers(0, 1000), st.booleans(), st.sampled_from((None, Factor.RECENCY)), st.sampled_from((1, 3, 1024)))
def test_the_best_come_first_as_in_algorithm_d(seed: int, few_values: bool, without: Factor | None, chunk: int) -> None:
    orders = []
    for chosen in (True, False):
        tree = random_tree(seed, few_values=few_values)
        eviction = Elora(view_of(tree), without=without)
        eviction.batch(8, 0.0)
        score(tree, eviction, NOW)
        before, prefetching._SORTED = prefetching._SORTED, chunk
        try:
            order = BestFirst(eviction.view, eviction).targets(NOW) if chosen else plain_order(tree, eviction)
            orders.append(moved(order, tree))
        finally:
            prefetching._SORTED = before
    assert orders[0] == orders[1]


def test_everything_is_prefetched_in_the_end_even_unrequested_adapters() -> None:
    for seed in range(20):
        tree = random_tree(seed)
        eviction = Elora(view_of(tree))
        named = bring_all(BestFirst(eviction.view, eviction), tree, NOW)
        assert roots_come_first(tree, named)
        assert tree.on_device[nodes_of(tree)].all()


def test_first_prefetch_is_an_adapter_if_none_is_resident() -> None:
    tree = DependencyTree()
    add_kv(tree, BASE, there=False, visits=1000, last_use_s=NOW)
    adapter = add_adapter(tree, there=False, visits=1)
    eviction = Elora(view_of(tree))
    eviction.batch(8, 0.0)
    score(tree, eviction, NOW)
    assert next(BestFirst(eviction.view, eviction).targets(NOW)) == adapter


def test_each_adapter_that_comes_makes_the_next_less_urgent() -> None:
    tree = DependencyTree()
    add_adapter(tree, visits=100)
    adapters = [add_adapter(tree, there=False, visits=100) for _ in range(5)]
    kv = add_kv(tree, BASE, there=False, visits=140)
    eviction = Elora(view_of(tree))
    eviction.batch(1000, 0.0)
    # 100 (N+1)/N against 140: adapters come first while N is 1 or 2.
    named = bring_all(BestFirst(eviction.view, eviction), tree, NOW)
    assert named.index(kv) == 2
    assert set(named) == {*adapters, kv}


def test_kv_below_an_adapter_that_is_passed_over_is_not_named() -> None:
    tree = DependencyTree()
    adapter = add_adapter(tree, there=False)
    add_kv(tree, adapter, there=False)
    assert list(BestFirst(view_of(tree), Lru(view_of(tree))).targets(NOW)) == [adapter]


def test_moving_or_freed_nodes_and_their_children_are_not_prefetched() -> None:
    tree = DependencyTree()
    coming, retired, leaving = (add_adapter(tree, there=there) for there in (False, False, True))
    tree.moving[coming], tree.adapters[retired].retired = NodeTransfer.READ, True
    tree.moving[leaving] = NodeTransfer.OUT
    add_kv(tree, leaving, there=False)
    view = view_of(tree)
    for prefetch in (BestFirst(view, Lru(view)), Branches(view, Bfs(view))):
        assert list(prefetch.targets(NOW)) == []


def test_with_last_uses_as_scores_the_newest_come_first() -> None:
    tree = DependencyTree()
    adapter = add_adapter(tree, last_use_s=9.0)
    old, new = (add_kv(tree, adapter, there=False, last_use_s=last) for last in (1.0, 5.0))
    child = add_kv(tree, old, there=False, last_use_s=8.0)
    away = add_adapter(tree, there=False, last_use_s=3.0)
    view = view_of(tree)
    assert bring_all(BestFirst(view, Lru(view)), tree, NOW) == [new, away, old, child]


def test_without_the_tree_any_kv_on_the_host_is_named_by_itself() -> None:
    tree = DependencyTree()
    adapter = add_adapter(tree, there=False, visits=1)
    first = add_kv(tree, adapter, there=False, visits=2)
    second = add_kv(tree, first, there=False, visits=3)
    view = view_of(tree)
    assert bring_all(BestFirstFlat(view, Elora(view)), tree, NOW) == [second, first, adapter]


def test_branches_come_one_after_another_the_largest_sum_first() -> None:
    tree = DependencyTree()
    small, large = (add_adapter(tree, there=False, visits=visits) for visits in (5, 1))
    below_small = add_kv(tree, small, there=False)
    below_large = [add_kv(tree, large, there=False, visits=2) for _ in range(4)]
    deeper = add_kv(tree, below_large[0], there=False)
    base = add_kv(tree, BASE, there=False, visits=3)
    view = view_of(tree)
    named = bring_all(Branches(view, Bfs(view)), tree, NOW)
    assert named == [large, *below_large, deeper, small, below_small, base]


def test_branches_bring_everything_roots_first() -> None:
    for seed in range(20):
        tree = random_tree(seed)
        view = view_of(tree)
        named = bring_all(Branches(view, Bfs(view)), tree, NOW)
        assert roots_come_first(tree, named)
        assert tree.on_device[nodes_of(tree)].all()
        tops = [top for top, _ in groupby(int(tree.top[node]) for node in named)]
        assert len(tops) == len(set(tops)) > 1
