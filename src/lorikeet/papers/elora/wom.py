"""Implements ELORA-WOM (§VIII-E): ELORA's cost model over flat tables, without usage dependencies between entries."""

from collections.abc import Sequence

import numpy as np

from lorikeet.memory.policies.base import MemoryView, extend_to_nodes
from lorikeet.memory.tree import Nodes, Scores
from lorikeet.papers.elora.cost_model import Elora

_NEVER = -np.inf


class Wom(Elora):
    """Scores each adapter and each block of KV by separate times of use.

    In the tree an adapter and earlier KV are used whenever later KV is used, so they never score lower. In this policy
    an entry is used when a request matches it on arrival, or when it is generated (§V-A). So KV that was generated late
    is newer than the adapter and the prompt that it needs. These are evicted first, and the KV stays invalid until it
    is evicted too. Among equal scores, the older entry is evicted first.
    """

    deeper_first = False

    def __init__(self, view: MemoryView) -> None:
        super().__init__(view)
        self._last_s = np.zeros(0)

    def arrived(self, adapter: int, path: Sequence[int], now: float) -> None:
        """Record the use of the entries that a request matches."""
        self._extend()
        self._last_s[[adapter, *path]] = now

    def inserted(self, nodes: Sequence[int], now: float) -> None:
        """Record the time of entries that are new in the table. Entries that are loaded again keep their time."""
        self._extend()
        at = np.asarray(nodes, np.int64)
        self._last_s[at[self._last_s[at] == _NEVER]] = now

    def forgotten(self, nodes: Sequence[int]) -> None:
        """Remove entries."""
        self._extend()
        self._last_s[np.asarray(nodes, np.int64)] = _NEVER

    def _last_use_s(self, nodes: Nodes) -> Scores:
        self._extend()
        # Adapters without requests score lowest because of their visits
        known: Scores = np.maximum(self._last_s[nodes], 0.0)
        return known

    def _extend(self) -> None:
        self._last_s = extend_to_nodes(self._last_s, self.view.tree, _NEVER)
