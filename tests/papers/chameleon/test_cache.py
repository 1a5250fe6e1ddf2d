"""Chameleon's cache: the worked example of its score, tiers, and its relation to LRU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.memory.policies.base import MemoryView
from lorikeet.memory.policies.lru import Lru
from lorikeet.memory.tree import BASE, DependencyTree
from lorikeet.papers.chameleon.cache import Chameleon
from lorikeet.policies import EVICTION
from lorikeet.presets import PRESETS
from tests.memory.trees import add_adapter, add_kv, view_of

FAIRSHARE = PRESETS["chameleon:fairshare"].eviction


def three(name: str) -> tuple[Chameleon, list[int]]:
    """a: used often, long ago, small; b: just now, small; c: large."""
    tree = DependencyTree()
    nodes = [add_adapter(tree, rank=rank, last_use_s=last) for rank, last in ((8, 100.0), (8, 110.0), (128, 102.0))]
    policy = EVICTION[name](view_of(tree))
    assert isinstance(policy, Chameleon)
    for node, uses in zip(nodes, (10, 1, 1), strict=True):
        for _ in range(uses):
            policy.admitted(node, [], 100.0)
    return policy, nodes


def leaving_order(policy: Chameleon, nodes: list[int]) -> str:
    return "".join("abc"[index] for index in np.argsort(policy.scores(np.array(nodes), 110.0)))


@pytest.mark.parametrize(
    ("name", "scores", "order"),
    [
        ("chameleon", [0.478125, 0.173125, 0.515], "bac"),
        (FAIRSHARE, [0.354167, 0.3875, 0.433333], "abc"),
        ("chameleon(frequency=0,recency=1,size=0)", [0.0, 1.0, 0.2], "acb"),
    ],
)
def test_the_worked_example(name: str, scores: list[float], order: str) -> None:
    policy, nodes = three(name)
    assert policy.scores(np.array(nodes), 110.0) == pytest.approx(scores, abs=1e-6)
    assert leaving_order(policy, nodes) == order


adapters = st.lists(
    st.tuples(st.sampled_from((8, 16, 128)), st.integers(0, 9), st.integers(0, 1000)),
    min_size=1,
    max_size=12,
    unique_by=lambda adapter: adapter[2],
)


def used(given_adapters: list[tuple[int, int, int]], **weights: float) -> tuple[Chameleon, np.ndarray]:
    """Adapters of (rank, uses, last use)."""
    tree = DependencyTree()
    nodes = [add_adapter(tree, rank=rank, last_use_s=last) for rank, _, last in given_adapters]
    policy = Chameleon(view_of(tree), **weights)
    for node, (_, uses, _) in zip(nodes, given_adapters, strict=True):
        for _ in range(uses):
            policy.admitted(node, [], 900.0)
    return policy, np.array(nodes)


@given(adapters)
def test_with_recency_alone_it_is_lru(given_adapters: list[tuple[int, int, int]]) -> None:
    policy, nodes = used(given_adapters, frequency=0.0, recency=1.0, size=0.0)
    lru = Lru(policy.view)
    assert np.argsort(policy.scores(nodes, 1000.0)).tolist() == np.argsort(lru.scores(nodes, 1000.0)).tolist()


@given(adapters)
def test_scores_are_those_of_the_plain_formula(given_adapters: list[tuple[int, int, int]]) -> None:
    policy, nodes = used(given_adapters)
    ranks, uses, lasts = zip(*given_adapters, strict=True)
    expected = [
        0.45 * (use / max(uses) if max(uses) else 0)
        + 0.10 * ((last - min(lasts)) / (max(lasts) - min(lasts)) if max(lasts) > min(lasts) else 1)
        + 0.45 * rank / max(ranks)
        for rank, use, last in given_adapters
    ]
    assert policy.scores(nodes, 1000.0) == pytest.approx(expected)


@pytest.mark.slow
@given(adapters, st.data())
def test_queued_adapters_leave_last_and_protected_ones_just_before_them(
    given_adapters: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    policy, nodes = used(given_adapters)
    wanted, protected = (data.draw(st.sets(st.sampled_from(nodes.tolist()))) for _ in range(2))
    policy.view.waiting = dict.fromkeys(wanted, 1)
    for node in protected:
        policy.protect(node, 1001.0)
    order = nodes[np.argsort(policy.scores(nodes, 1000.0))].tolist()
    tiers = [(node in wanted, node in protected) for node in order]
    assert tiers == sorted(tiers)
    policy.view.waiting = {}
    order = nodes[np.argsort(policy.scores(nodes, 1001.0))].tolist()
    policy, nodes = used(given_adapters)
    assert order == nodes[np.argsort(policy.scores(nodes, 1001.0))].tolist()


def test_uses_count_for_five_minutes() -> None:
    policy, nodes = used([(8, 1, 0), (8, 2, 1)], frequency=1.0, recency=0.0, size=0.0)
    policy.admitted(nodes[0], [], 1000.0)
    assert policy.scores(nodes, 1199.0).tolist() == [1.0, 1.0]
    assert policy.scores(nodes, 1200.0).tolist() == [1.0, 0.0]
    assert policy.scores(nodes, 1300.0).tolist() == [0.0, 0.0]


def test_old_uses_are_forgotten_without_scoring() -> None:
    policy, (node,) = used([(8, 1, 0)])
    for second in range(1000, 5000):
        policy.admitted(node, [], float(second))
    assert len(policy._uses) <= 300


def test_recency_and_frequency_are_relative_to_resident_adapters() -> None:
    tree = DependencyTree()
    here = [add_adapter(tree, last_use_s=last) for last in (10.0, 20.0)]
    away = add_adapter(tree, there=False, rank=128, last_use_s=100.0)
    policy = Chameleon(view_of(tree))
    policy.admitted(away, [], 0.0)
    policy.admitted(here[0], [], 0.0)
    policy.admitted(away, [], 0.0)
    scores = policy.scores(np.array(here), 200.0)
    assert scores == pytest.approx([0.45 + 0.45 / 16, 0.10 + 0.45 / 16])


def test_adapter_in_a_reused_slot_has_its_own_rank_and_uses() -> None:
    tree = DependencyTree()
    gone, other = add_adapter(tree, rank=128), add_adapter(tree, rank=16)
    policy = Chameleon(view_of(tree), recency=0.0)
    policy.admitted(gone, [], 0.0)
    policy.protect(gone, 1000.0)
    policy.scores(np.array([gone]), 1.0)
    policy.forgotten([gone])
    tree.remove_adapter(gone)
    new = add_adapter(tree, rank=8)
    assert new == gone
    assert policy.scores(np.array([new, other]), 2.0) == pytest.approx([0.225, 0.45])
    assert policy.scores(np.array([new, other]), 400.0) == pytest.approx([0.225, 0.45])


def test_kv_leaves_before_any_adapter() -> None:
    tree = DependencyTree()
    adapter = add_adapter(tree)
    kv = add_kv(tree, BASE)
    policy = Chameleon(MemoryView(tree, 10))
    policy.view.waiting = {BASE: 1}
    scores = policy.scores(np.array([adapter, kv]), 0.0)
    assert scores[1] < 0 <= scores[0]
