"""Least recently used: adapters and KV alike, by the last use alone."""

from lorikeet.memory.policies.base import EvictionPolicy
from lorikeet.memory.tree import Nodes, Scores


class Lru(EvictionPolicy):
    """Scores a node by the time of its last use, in seconds."""

    def scores(self, nodes: Nodes, now: float) -> Scores:
        """Return the last uses."""
        return self.view.tree.last_use_s[nodes]
