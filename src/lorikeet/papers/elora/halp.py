"""Implements HALP (Song et al., NSDI 2023), a baseline of ELORA §VIII-H.

LRU proposes nodes, and a learned ranker picks one.

The ranker predicts by a logistic function of the features' difference which of two nodes should be evicted. For each
evicted node and each node that was kept instead, the ranker learns from which of the two is used again first.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lorikeet.memory.policies.base import MemoryView
from lorikeet.memory.policies.lru import Lru

_LEARNING_RATE = 0.05
_MAX_PAIRS = 4096
"""Largest number of decisions that wait for their outcome. The oldest decisions are dropped first."""


class _Pair(NamedTuple):
    """Records an eviction decision between two nodes.

    Attributes:
        evicted, kept: the two nodes.
        difference: features of the evicted node minus features of the kept node, at the time of the decision.
    """

    evicted: int
    kept: int
    difference: npt.NDArray[np.float64]


class Halp(Lru):
    """Evicts the node that the ranker picks among the four least recently used candidates.

    Features are the logarithms of age in seconds plus 1, visits plus 1, size, and depth plus 1. An untrained ranker
    picks the least recently used.
    """

    proposals = 4

    def __init__(self, view: MemoryView) -> None:
        super().__init__(view)
        self._weights = np.zeros(4)
        self._ids = count()
        self._pairs: OrderedDict[int, _Pair] = OrderedDict()
        self._pairs_of: defaultdict[int, set[int]] = defaultdict(set)

    def choose(self, nodes: Sequence[int], now: float) -> int:
        """Return the node that the ranker scores highest; the first among equals."""
        features = self._features(nodes, now)
        best = int(np.argmax(features @ self._weights))
        for other, node in enumerate(nodes):
            if other != best:
                self._remember(_Pair(nodes[best], node, features[best] - features[other]))
        return nodes[best]

    def arrived(self, adapter: int, path: Sequence[int], now: float) -> None:
        """Train on the decisions about nodes that are used now."""
        for node in (adapter, *path):
            for pair in self._take(node):
                self._learn(pair.difference, was_right=pair.kept == node)

    def forgotten(self, nodes: Sequence[int]) -> None:
        """Drop decisions about removed nodes, whose outcome will stay unknown."""
        for node in nodes:
            self._take(node)

    def _features(self, nodes: Sequence[int], now: float) -> npt.NDArray[np.float64]:
        tree, index = self.view.tree, np.array(nodes)
        numbers = (now - tree.last_use_s[index], tree.visits[index], tree.size[index] - 1, tree.depth[index])
        features: npt.NDArray[np.float64] = np.log1p(np.stack(numbers, axis=1))
        return features

    def _learn(self, difference: npt.NDArray[np.float64], *, was_right: bool) -> None:
        predicted = 1 / (1 + np.exp(-difference @ self._weights))
        self._weights += _LEARNING_RATE * (was_right - predicted) * difference

    def _remember(self, pair: _Pair) -> None:
        number = next(self._ids)
        self._pairs[number] = pair
        self._pairs_of[pair.evicted].add(number)
        self._pairs_of[pair.kept].add(number)
        if len(self._pairs) > _MAX_PAIRS:
            self._drop(next(iter(self._pairs)))

    def _take(self, node: int) -> list[_Pair]:
        """Remove and return the open decisions about a node, oldest first."""
        numbers = sorted(self._pairs_of.get(node, ()))
        return [self._drop(number) for number in numbers]

    def _drop(self, number: int) -> _Pair:
        pair = self._pairs.pop(number)
        for node in (pair.evicted, pair.kept):
            self._pairs_of[node].discard(number)
            if not self._pairs_of[node]:
                del self._pairs_of[node]
        return pair
