"""Trees grown by hand, without memory around them, for policies to look at."""

import random
from itertools import count

import numpy as np

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, AdapterName
from lorikeet.memory.policies.base import EvictionPolicy, MemoryView, PrefetchPolicy
from lorikeet.memory.tree import BASE, NO_NODE, DependencyTree, NodeKind, NodeTransfer

_KEYS = count()


def reference(name: str, rank: int = 8) -> AdapterRef:
    return AdapterRef(AdapterName(name), AdapterDigest(name), "", {"q_proj": (rank,)}, 0)


def view_of(tree: DependencyTree, device_blocks: int = 1000) -> MemoryView:
    return MemoryView(tree, device_blocks, resident_adapters=lambda: resident(tree))


def resident(tree: DependencyTree) -> int:
    return sum(bool(tree.on_device[node]) or tree.moving[node] == NodeTransfer.IN for node in tree.adapters)


def add_adapter(
    tree: DependencyTree,
    *,
    there: bool = True,
    size: int = 1,
    rank: int = 8,
    visits: float = 1,
    last_use_s: float = 0.0,
) -> int:
    """An adapter on the device, or else only at its source."""
    node = tree.add_adapter(reference(f"adapter {next(_KEYS)}", rank), size, size)
    tree.on_device[node], tree.visits[node], tree.last_use_s[node] = there, visits, last_use_s
    return node


def add_kv(tree: DependencyTree, parent: int, *, there: bool = True, visits: float = 1, last_use_s: float = 0.0) -> int:
    """A block of KV on the device, or else on the host."""
    ((node,),) = tree.add_kv([parent], [[str(next(_KEYS)).encode()]], last_use_s)
    tree.visits[node], tree.on_host[node] = visits, not there
    if there:
        arrive(tree, node)
    return node


def arrive(tree: DependencyTree, node: int) -> None:
    tree.on_device[node] = True
    if tree.kind[node] == NodeKind.KV:
        tree.children_on_device[tree.parent[node]] += 1


def leave(tree: DependencyTree, node: int) -> None:
    tree.on_device[node] = False
    if tree.kind[node] == NodeKind.KV:
        tree.on_host[node] = True
        tree.children_on_device[tree.parent[node]] -= 1


def nodes_of(tree: DependencyTree) -> list[int]:
    return np.flatnonzero(tree.kind >= NodeKind.ADAPTER).tolist()


def random_tree(seed: int, adapters: int = 5, kv: int = 40, *, few_values: bool = False) -> DependencyTree:
    """Some of everything; the device holds a connected part of it, as the tree rule demands."""
    chance, tree = random.Random(seed), DependencyTree()
    numbers = [1.0, 2.0] if few_values else [chance.uniform(1, 50) for _ in range(100)]
    nodes = [BASE]
    for _ in range(adapters):
        nodes.append(
            add_adapter(
                tree,
                there=chance.random() < 0.5,
                size=chance.randint(1, 9),
                rank=chance.choice((8, 64)),
                visits=chance.choice((0.0, *numbers)),
                last_use_s=chance.choice(numbers),
            )
        )
    for _ in range(kv):
        parent = chance.choice(nodes)
        there = bool(tree.on_device[parent]) and chance.random() < 0.5
        nodes.append(
            add_kv(tree, parent, there=there, visits=chance.choice(numbers), last_use_s=chance.choice(numbers))
        )
    return tree


def score(tree: DependencyTree, eviction: EvictionPolicy, now: float) -> None:
    nodes = np.array(nodes_of(tree), int)
    tree.score[nodes] = eviction.scores(nodes, now)


def bring_all(prefetch: PrefetchPolicy, tree: DependencyTree, now: float) -> list[int]:
    """Bring what is named as the swapper does: adapters at once, KV at the end; return it."""
    score(tree, prefetch.eviction, now)
    named = []
    for node in prefetch.targets(now):
        named.append(node)
        if tree.kind[node] == NodeKind.ADAPTER:
            tree.moving[node] = NodeTransfer.IN
    for node in named:
        tree.moving[node] = NodeTransfer.NO
        arrive(tree, node)
    return named


def roots_come_first(tree: DependencyTree, named: list[int]) -> bool:
    """Whether no node was named before its parent, given where nodes were before."""
    before = set(named)
    for node in named:
        before.remove(node)
        if tree.parent[node] != NO_NODE and tree.parent[node] in before:
            return False
    return True
