"""HALP: it begins as LRU, and learns from what is used again."""

import random

import numpy as np
import pytest

from lorikeet.memory.tree import DependencyTree, NodeKind
from lorikeet.papers.elora import halp
from lorikeet.papers.elora.halp import Halp
from tests.memory.trees import add_adapter, arrive, leave, view_of


def replay(seed: int, proposals: int) -> tuple[list[int], int]:
    """Serve a few adapters again and again beside others that come once; return who left, and misses of the few."""
    chance, tree = random.Random(seed), DependencyTree()
    few = [add_adapter(tree, there=False, visits=0) for _ in range(4)]
    once = iter([add_adapter(tree, there=False, visits=0) for _ in range(1500)])
    policy, victims, missed = Halp(view_of(tree)), [], 0
    for now in range(1500):
        node = chance.choice(few) if now % 4 == 0 else next(once)
        tree.visits[node] += 1
        tree.last_use_s[node] = now
        policy.arrived(node, [], now)
        if tree.on_device[node]:
            continue
        missed += node in few and now > 500
        there = np.flatnonzero(tree.on_device & (tree.kind == NodeKind.ADAPTER))
        if len(there) == 8:
            oldest = there[np.argsort(policy.scores(there, now), kind="stable")][:proposals].tolist()
            victims.append(policy.choose(oldest, now))
            leave(tree, victims[-1])
        arrive(tree, node)
    return victims, missed


def test_at_first_the_least_recently_used_leaves() -> None:
    tree = DependencyTree()
    nodes = [add_adapter(tree, last_use_s=last, size=size) for last, size in ((1.0, 9), (2.0, 1), (3.0, 5))]
    policy = Halp(view_of(tree))
    assert policy.scores(np.array(nodes), 4.0).tolist() == [1.0, 2.0, 3.0]
    assert policy.choose(nodes, 4.0) == nodes[0]


@pytest.mark.slow
def test_it_learns_to_keep_what_is_used_again() -> None:
    learned, lru = (sum(replay(seed, proposals)[1] for seed in range(3)) for proposals in (Halp.proposals, 1))
    assert learned < lru / 2


def test_the_same_requests_have_the_same_victims() -> None:
    assert replay(5, Halp.proposals) == replay(5, Halp.proposals)


def test_decision_is_judged_by_first_used_node() -> None:
    tree = DependencyTree()
    nodes = [add_adapter(tree, last_use_s=last, size=size) for last, size in ((1.0, 9), (2.0, 1))]
    right, wrong, unknown = (Halp(view_of(tree)) for _ in range(3))
    for policy in (right, wrong, unknown):
        policy.choose(nodes, 3.0)
    right.arrived(nodes[1], [], 4.0)
    right.arrived(nodes[0], [], 5.0)
    wrong.arrived(nodes[0], [], 4.0)
    unknown.forgotten([nodes[0]])
    unknown.arrived(nodes[1], [], 4.0)
    assert [policy.choose(nodes, 3.0) for policy in (right, wrong, unknown)] == [nodes[0], nodes[1], nodes[0]]


def test_only_so_many_decisions_wait_for_their_outcome() -> None:
    tree = DependencyTree()
    nodes = [add_adapter(tree) for _ in range(4)]
    policy = Halp(view_of(tree))
    for _ in range(3000):
        policy.choose(nodes, 1.0)
    assert len(policy._pairs) == halp._MAX_PAIRS
    assert sum(len(numbers) for numbers in policy._pairs_of.values()) == 2 * halp._MAX_PAIRS
