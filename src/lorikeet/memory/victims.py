"""Who leaves first: the lowest scores among the nodes that may leave, without sorting all of them."""

import heapq
from collections.abc import Callable

import numpy as np

from lorikeet.memory.tree import Nodes, Tree

_CHOSEN = 256
"""So many of the lowest are put in order at a time."""
_MOST = 8 * _CHOSEN
"""Notes that are kept before all are thrown away and the lowest looked for anew; more where more are equal."""


class Victims:
    """A queue of one kind of nodes by ``tree.score``, the deeper of equals first.

    Most nodes never come near its head, so only the lowest few are ever sorted. Nodes that change are offered anew;
    notes about them that are no longer true are thrown away when they come up.

    Args:
        tree: holds the scores.
        candidates: returns all nodes that may leave now.
        is_candidate: whether one may.
    """

    def __init__(self, tree: Tree, candidates: Callable[[], Nodes], is_candidate: Callable[[int], bool]) -> None:
        self._tree = tree
        self._candidates = candidates
        self._is_candidate = is_candidate
        self._heap: list[tuple[float, int, int, int]] = []
        self._highest = -np.inf
        self._most = 0

    def forget(self) -> None:
        """All scores have changed."""
        self._heap, self._highest = [], -np.inf

    def offer(self, node: int) -> None:
        """A node's score has changed, or it may leave since now."""
        tree = self._tree
        score = float(tree.score[node])
        if score <= self._highest and self._is_candidate(node):
            if len(self._heap) >= self._most:  # of notes that are no longer true: nothing here grows with use
                self.forget()
                return
            heapq.heappush(self._heap, (score, -int(tree.depth[node]), node, int(tree.touched[node])))

    def first(self, count: int = 1) -> list[int]:
        """Return up to ``count`` nodes that leave first, the very first first; they stay in the queue."""
        tree = self._tree
        found: dict[int, tuple[float, int, int, int]] = {}
        while len(found) < count:
            if not self._heap:
                if self._highest == np.inf or not self._refill():
                    break
                found = {}
            score, _, node, touched = entry = heapq.heappop(self._heap)
            if (touched, score) == (tree.touched[node], tree.score[node]) and self._is_candidate(node):
                found[node] = entry
        for entry in found.values():
            heapq.heappush(self._heap, entry)
        return list(found)

    def _refill(self) -> bool:
        tree, nodes = self._tree, self._candidates()
        if not len(nodes):
            self._highest, self._most = np.inf, _MOST  # whoever may leave from now on is offered
            return False
        scores = tree.score[nodes]
        if len(nodes) > _CHOSEN:
            self._highest = float(np.partition(scores, _CHOSEN - 1)[_CHOSEN - 1])
            nodes = nodes[scores <= self._highest]
        else:
            self._highest = np.inf
        scores, depths, touched = tree.score[nodes], -tree.depth[nodes], tree.touched[nodes]
        self._heap = list(zip(scores.tolist(), depths.tolist(), nodes.tolist(), touched.tolist(), strict=True))
        heapq.heapify(self._heap)
        self._most = max(_MOST, 2 * len(self._heap))
        return True

    def missing(self) -> list[int]:
        """Return the nodes that should be in the queue and are not; for checks."""
        tree, nodes = self._tree, self._candidates()
        known = {(node, touched, score) for score, _, node, touched in self._heap}
        lowest = nodes[tree.score[nodes] <= self._highest]
        return [node for node in lowest.tolist() if (node, tree.touched[node], tree.score[node]) not in known]
