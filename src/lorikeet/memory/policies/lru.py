"""Evicts the least recently used adapters and KV first."""

from typing import Final

import numpy as np

from lorikeet.core.guard import GuardedPart
from lorikeet.memory.policies.base import MIN_REUSED_SHARE, EvictionPolicy, MemoryView
from lorikeet.memory.tree import NodeKind, Nodes, Scores

_EVICTED_FIRST_S: Final = 1e9


class Lru(EvictionPolicy):
    """Scores a node by the time of its last use, in seconds."""

    def scores(self, nodes: Nodes, now: float) -> Scores:
        """Return the times of last use."""
        return self.view.tree.last_use_s[nodes]

    def scores_changed(self) -> bool:
        """Return False, because a node's score changes only when the node is used."""
        return False


class LruWithReuse(Lru):
    """Evicts by last use, except that KV of adapters whose KV is rarely reused (< 5 %) is evicted first.

    Such KV is also evicted for prefetches. While ``GuardedPart.EVICTION`` is off, it evicts by last use alone.
    """

    worthless_below = -_EVICTED_FIRST_S / 2

    def __init__(self, view: MemoryView) -> None:
        super().__init__(view)
        self._rarely_reused = b""

    def scores_changed(self) -> bool:
        """Return whether the KV of any adapter has become rarely reused or no longer is, or the guard has switched."""
        before = self._rarely_reused
        if not self.view.guards.is_on(GuardedPart.EVICTION):
            self._rarely_reused = b""
            return before != b""
        tops = self.view.tree.tops
        self._rarely_reused = np.packbits(self.view.kv_reuse(tops) < MIN_REUSED_SHARE).tobytes() + tops.tobytes()
        return self._rarely_reused != before

    def scores(self, nodes: Nodes, now: float) -> Scores:
        """Return the times of last use, minus a constant for KV that is rarely reused."""
        tree = self.view.tree
        scores = super().scores(nodes, now)
        if not self.view.guards.is_on(GuardedPart.EVICTION):
            return scores
        tops = tree.top[nodes]
        is_one = len(tops) > 0 and bool((tops == tops[0]).all())  # as a rule: the nodes of a request
        if is_one and self.view.kv_share(int(tops[0])) >= MIN_REUSED_SHARE:
            return scores
        is_kv = tree.kind[nodes] == NodeKind.KV
        lost = is_kv if is_one else is_kv & (self.view.kv_reuse(tops.astype(np.int64)) < MIN_REUSED_SHARE)
        scores[lost] -= _EVICTED_FIRST_S
        return scores
