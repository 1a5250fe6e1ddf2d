"""SRRIP with 2 bits (Jaleel et al., ISCA 2010), which ELORA §VIII-H compares itself with."""

from collections.abc import Sequence

import numpy as np

from lorikeet.memory.policies.base import EvictionPolicy, MemoryView, by_node
from lorikeet.memory.tree import Nodes, Scores

_DISTANT = 3
_LONG = 2
_NEAR = 0


class Srrip(EvictionPolicy):
    """A node comes with interval 2, a hit sets it to 0, and who has 3 leaves; if nobody has, all age until one does.

    Ageing is counted once for all nodes: kept is a node's interval less the ageing that had happened by then. Its
    order is that of the intervals, and does not change while nothing happens to the nodes. Where intervals stop at 3,
    the node that reached it first has the lower score.
    """

    def __init__(self, view: MemoryView) -> None:
        super().__init__(view)
        self._interval = np.zeros(0, np.int64)
        self._aged = 0

    def scores(self, nodes: Nodes, now: float) -> Scores:
        """Return intervals with the sign turned, up to what all have in common."""
        self._interval = by_node(self._interval, self.view.tree, 0)
        return -self._interval[nodes].astype(np.float64)

    def arrived(self, adapter: int, path: Sequence[int], now: float) -> None:
        """Count hits: nodes that are on the device."""
        nodes = np.array([adapter, *path])
        self._set(nodes[self.view.tree.on_device[nodes]], _NEAR)

    def inserted(self, nodes: Sequence[int], now: float) -> None:
        """Begin with a long interval."""
        self._set(np.array(nodes, np.int64), _LONG)

    def removed(self, nodes: Sequence[int], now: float) -> None:
        """Age all, as far as was needed for these to be the first to leave."""
        self._interval = by_node(self._interval, self.view.tree, 0)
        self._aged = max(self._aged, _DISTANT - int(self._interval[nodes].min(initial=_DISTANT)))

    def _set(self, nodes: Nodes, interval: int) -> None:
        self._interval = by_node(self._interval, self.view.tree, 0)
        self._interval[nodes] = interval - self._aged
