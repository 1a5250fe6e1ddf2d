"""What the memory counts about itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.memory.blocks import BlockPool
from lorikeet.memory.options import MemoryOptions
from lorikeet.memory.statistics import MemoryCounters
from lorikeet.memory.tiers import Tiers
from lorikeet.memory.tree import NO_NODE, DependencyTree, NodeKind
from tests.memory.trees import add_adapter, add_kv, random_tree


def invalid(tree: DependencyTree) -> int:
    tiers = Tiers(tree, BlockPool(1), BlockPool(1), dependent=False)
    return MemoryCounters(tiers, MemoryOptions(dependent=False)).stats(1, 0, 0).invalid_kv_bytes


def is_valid(tree: DependencyTree, node: int) -> bool:
    """By going up."""
    while node != NO_NODE and tree.on_device[node]:
        node = int(tree.parent[node])
    return node == NO_NODE


@pytest.mark.slow
@given(st.integers(0, 2**32), st.data())
def test_without_the_tree_kv_without_its_adapter_or_prefix_is_invalid(seed: int, data: st.DataObject) -> None:
    tree = random_tree(seed)
    for node in range(tree.end):
        if tree.kind[node] == NodeKind.KV:
            tree.on_device[node] = data.draw(st.integers(0, 9)) > 0
    there = [node for node in range(tree.end) if tree.kind[node] == NodeKind.KV and tree.on_device[node]]
    assert invalid(tree) == sum(not is_valid(tree, node) for node in there)


@pytest.mark.parametrize("away", range(10))
def test_kv_is_invalid_however_far_above_something_is_missing(away: int) -> None:
    tree = DependencyTree()
    path = [add_adapter(tree)]
    for _ in range(9):
        path.append(add_kv(tree, path[-1]))
    tree.on_device[path[away]] = False
    assert invalid(tree) == 9 - away
