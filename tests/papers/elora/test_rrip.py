"""SRRIP beside the textbook's."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.memory.tree import DependencyTree
from lorikeet.papers.elora.rrip import Srrip
from tests.memory.trees import (
    add_adapter,
    add_kv,
    arrive,
    leave,
    view_of,
)


def textbook(trace: list[int], capacity: int) -> list[int]:
    """Who leaves: intervals that are really counted up; the first by number of those with 3."""
    interval: dict[int, int] = {}
    victims = []
    for item in trace:
        if item in interval:
            interval[item] = 0
            continue
        if len(interval) == capacity:
            while 3 not in interval.values():
                interval = {other: value + 1 for other, value in interval.items()}
            victims.append(min(other for other, value in interval.items() if value == 3))
            del interval[victims[-1]]
        interval[item] = 2
    return victims


@given(st.lists(st.integers(0, 8), max_size=200), st.integers(1, 6))
def test_victims_are_those_of_textbook_rrip(trace: list[int], capacity: int) -> None:
    tree = DependencyTree()
    nodes = [add_adapter(tree, there=False) for _ in range(9)]
    policy = Srrip(view_of(tree))
    victims = []
    for now, item in enumerate(trace):
        policy.arrived(nodes[item], [], now)
        if tree.on_device[nodes[item]]:
            continue
        there = [node for node in nodes if tree.on_device[node]]
        if len(there) == capacity:
            victim = there[int(np.argmin(policy.scores(np.array(there), now)))]
            policy.removed([victim], now)
            leave(tree, victim)
            victims.append(nodes.index(victim))
        arrive(tree, nodes[item])
        policy.inserted([nodes[item]], now)
    assert victims == textbook(trace, capacity)


def test_a_hit_of_what_lies_on_the_host_is_none() -> None:
    tree = DependencyTree()
    adapter = add_adapter(tree)
    here, away = add_kv(tree, adapter), add_kv(tree, adapter, there=False)
    policy = Srrip(view_of(tree))
    for node in (here, away):
        policy.inserted([node], 0.0)
    policy.arrived(adapter, [here, away], 1.0)
    assert np.diff(policy.scores(np.array([away, here]), 1.0)) == 2


def test_nodes_beyond_the_first_size_of_the_tree_are_known() -> None:
    tree = DependencyTree()
    policy = Srrip(view_of(tree))
    adapter = add_adapter(tree)
    policy.inserted([adapter], 0.0)
    nodes = [add_kv(tree, adapter) for _ in range(3000)]
    for node in nodes:
        policy.inserted([node], 0.0)
    policy.arrived(adapter, nodes[-1:], 1.0)
    scores = policy.scores(np.array([adapter, *nodes]), 1.0)
    assert scores.tolist() == [0.0] + [-2.0] * 2999 + [0.0]
