"""Least recently used: adapters and KV are evicted by time of last use."""

from lorikeet.memory.policies.base import EvictionPolicy
from lorikeet.memory.tree import Nodes, Scores


class Lru(EvictionPolicy):
    """Scores a node by the time of its last use, in seconds."""

    def scores(self, nodes: Nodes, now: float) -> Scores:
        """Return the times of last use."""
        return self.view.tree.last_use_s[nodes]
