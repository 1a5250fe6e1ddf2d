"""HALP (Song et al., NSDI 2023), which ELORA §VIII-H compares itself with: LRU proposes, a learned ranker picks.

The ranker says which of two nodes had better leave: a logistic function of the difference of their features. It is
trained by what happened: when one of two nodes, of which one left and one stayed, is used again first.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lorikeet.memory.policies.base import MemoryView
from lorikeet.memory.policies.lru import Lru

_RATE = 0.05
_PAIRS = 4096
"""So many decisions wait for their outcome; the oldest are given up."""


class _Pair(NamedTuple):
    """A decision.

    Attributes:
        left, stayed: nodes.
        difference: of their features then, left less stayed.
    """

    left: int
    stayed: int
    difference: npt.NDArray[np.float64]


class Halp(Lru):
    """Of the four least recently used candidates, the one leaves that the ranker says.

    Features are the logarithms of age (in seconds), visits, size and depth, the first, second and last plus 1. The
    ranker knows nothing at first, and then the least recently used leaves.
    """

    proposals = 4

    def __init__(self, view: MemoryView) -> None:
        super().__init__(view)
        self._weights = np.zeros(4)
        self._ids = count()
        self._pairs: OrderedDict[int, _Pair] = OrderedDict()
        self._pairs_of: defaultdict[int, set[int]] = defaultdict(set)

    def choose(self, nodes: Sequence[int], now: float) -> int:
        """Return the node that the ranker puts before all others, of equals the first."""
        features = self._features(nodes, now)
        best = int(np.argmax(features @ self._weights))
        for other, node in enumerate(nodes):
            if other != best:
                self._remember(_Pair(nodes[best], node, features[best] - features[other]))
        return nodes[best]

    def arrived(self, adapter: int, path: Sequence[int], now: float) -> None:
        """Learn from the decisions about the nodes that are used now."""
        for node in (adapter, *path):
            for pair in self._take(node):
                self._learn(pair.difference, was_right=pair.stayed == node)

    def forgotten(self, nodes: Sequence[int]) -> None:
        """How the decisions about them would have turned out will not be known."""
        for node in nodes:
            self._take(node)

    def _features(self, nodes: Sequence[int], now: float) -> npt.NDArray[np.float64]:
        tree, index = self.view.tree, np.array(nodes)
        numbers = (now - tree.last_use_s[index], tree.visits[index], tree.size[index] - 1, tree.depth[index])
        features: npt.NDArray[np.float64] = np.log1p(np.stack(numbers, axis=1))
        return features

    def _learn(self, difference: npt.NDArray[np.float64], *, was_right: bool) -> None:
        predicted = 1 / (1 + np.exp(-difference @ self._weights))
        self._weights += _RATE * (was_right - predicted) * difference

    def _remember(self, pair: _Pair) -> None:
        number = next(self._ids)
        self._pairs[number] = pair
        self._pairs_of[pair.left].add(number)
        self._pairs_of[pair.stayed].add(number)
        if len(self._pairs) > _PAIRS:
            self._drop(next(iter(self._pairs)))

    def _take(self, node: int) -> list[_Pair]:
        """Return the open decisions about a node, oldest first, and close them."""
        numbers = sorted(self._pairs_of.get(node, ()))
        return [self._drop(number) for number in numbers]

    def _drop(self, number: int) -> _Pair:
        pair = self._pairs.pop(number)
        for node in (pair.left, pair.stayed):
            self._pairs_of[node].discard(number)
            if not self._pairs_of[node]:
                del self._pairs_of[node]
        return pair
