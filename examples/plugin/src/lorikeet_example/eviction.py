"""Eviction of the largest first."""

from lorikeet.memory.policies.base import EvictionPolicy, MemoryView
from lorikeet.memory.tree import Nodes, Scores


class LargestFirst(EvictionPolicy):
    """Evicts the nodes that free the most blocks.

    Args:
        view: the state of the memory.
        recent_s: nodes that were used so many seconds ago or later are evicted after all others.
    """

    def __init__(self, view: MemoryView, *, recent_s: float = 0.0) -> None:
        super().__init__(view)
        self._recent_s = recent_s

    def scores(self, nodes: Nodes, now: float) -> Scores:
        """Return minus the number of blocks that evicting each node frees; the lowest score is evicted first."""
        tree = self.view.tree
        is_recent = now - tree.last_use_s[nodes] < self._recent_s
        return is_recent * float(self.view.device_blocks) - tree.size[nodes]
