"""Implements ELORA's prefetch by score, parents before children (sections V-B and VI-C), and its variants."""

from collections.abc import Iterator

import numpy as np

from lorikeet.memory.policies.base import PrefetchPolicy, is_prefetchable, stays_on_device
from lorikeet.memory.policies.prefetch import RankedPrefetch, off_device
from lorikeet.memory.tree import NO_NODE, NodeKind, Scores


class BestFirst(RankedPrefetch):
    """Prefetches the nodes with the highest scores of the eviction policy."""

    def ranks(self) -> Scores:
        """Return the scores."""
        return self.view.tree.score


class BestFirstFlat(BestFirst):
    """Prefetches like ``BestFirst`` but ignores the tree (ELORA-WOM): every node is a candidate."""

    flat = True


class Branches(PrefetchPolicy):
    """Prefetches whole branches, an adapter and then its KV, the highest-scored branch first (ELORA §VIII-H, BFS)."""

    def targets(self, now: float) -> Iterator[int]:
        """Yield the nodes of each branch, parents before children."""
        tree = self.view.tree
        nodes = np.concatenate(off_device(tree))
        some = np.full(tree.end, NO_NODE)
        some[tree.top[nodes]] = nodes
        tops = np.flatnonzero(some != NO_NODE)
        for top in tops[np.argsort(-tree.score[some[tops]], kind="stable")]:
            branch = nodes[tree.top[nodes] == top]
            named: set[int] = set()
            for node in branch[np.argsort(tree.depth[branch], kind="stable")].tolist():
                parent = int(tree.parent[node])
                is_open = parent == NO_NODE or parent in named or bool(stays_on_device(tree, np.array([parent]))[0])
                if is_open and is_prefetchable(tree, node):
                    if tree.kind[node] == NodeKind.KV:
                        named.add(node)
                    yield node
