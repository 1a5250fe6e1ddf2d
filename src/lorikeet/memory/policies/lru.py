"""Least recently used: adapters and KV are evicted by time of last use."""

from typing import Final

import numpy as np

from lorikeet.memory.policies.base import EvictionPolicy
from lorikeet.memory.tree import NodeKind, Nodes, Scores

_LEAST_SHARE: Final = 0.05
"""KV is evicted before all else if a smaller share of its adapter's KV is asked for again."""
_BEFORE_OTHERS_S: Final = 1e9


class Lru(EvictionPolicy):
    """Scores a node by the time of its last use, in seconds."""

    def scores(self, nodes: Nodes, now: float) -> Scores:
        """Return the times of last use."""
        return self.view.tree.last_use_s[nodes]


class LruWithReuse(Lru):
    """LRU in which KV comes first that will hardly be asked for again, by what was asked for of its adapter's KV.

    It makes room for prefetches, too.
    """

    worthless_below = -_BEFORE_OTHERS_S / 2

    def scores(self, nodes: Nodes, now: float) -> Scores:
        """Return the times of last use, less by a constant for KV of which less than ``_LEAST_SHARE`` comes back."""
        tree, scores = self.view.tree, super().scores(nodes, now)
        is_kv = tree.kind[nodes] == NodeKind.KV
        if is_kv.any():
            lost = is_kv & (self.view.kv_reuse(tree.top[nodes].astype(np.int64)) < _LEAST_SHARE)
            scores[lost] -= _BEFORE_OTHERS_S
        return scores
