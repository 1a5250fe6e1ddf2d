"""Implements SRRIP with 2 bits (Jaleel et al., ISCA 2010), a baseline of ELORA §VIII-H."""

from collections.abc import Sequence

import numpy as np

from lorikeet.memory.policies.base import EvictionPolicy, MemoryView, extend_to_nodes
from lorikeet.memory.tree import Nodes, Scores

_DISTANT = 3
_LONG = 2
_NEAR = 0


class Srrip(EvictionPolicy):
    """Predicts re-reference intervals: 2 for a new node, 0 after a hit; a node with 3 is evicted.

    If no node has 3, all nodes age until one does. One counter ages all nodes: a node stores its interval minus the
    counter at that time, so the order of nodes changes only when they are used. Among nodes that have reached 3, the
    node that reached 3 first has the lowest score.
    """

    def __init__(self, view: MemoryView) -> None:
        super().__init__(view)
        self._interval = np.zeros(0, np.int64)
        self._aged = 0

    def scores(self, nodes: Nodes, now: float) -> Scores:
        """Return negative intervals, up to a constant that is equal for all nodes."""
        self._interval = extend_to_nodes(self._interval, self.view.tree, 0)
        return -self._interval[nodes].astype(np.float64)

    def arrived(self, adapter: int, path: Sequence[int], now: float) -> None:
        """Set the interval of nodes that are hit on the device."""
        nodes = np.array([adapter, *path])
        self._set(nodes[self.view.tree.on_device[nodes]], _NEAR)

    def inserted(self, nodes: Sequence[int], now: float) -> None:
        """Set a long interval for new nodes."""
        self._set(np.array(nodes, np.int64), _LONG)

    def removed(self, nodes: Sequence[int], now: float) -> None:
        """Age all nodes until the evicted nodes would have reached interval 3."""
        self._interval = extend_to_nodes(self._interval, self.view.tree, 0)
        self._aged = max(self._aged, _DISTANT - int(self._interval[nodes].min(initial=_DISTANT)))

    def _set(self, nodes: Nodes, interval: int) -> None:
        self._interval = extend_to_nodes(self._interval, self.view.tree, 0)
        self._interval[nodes] = interval - self._aged
