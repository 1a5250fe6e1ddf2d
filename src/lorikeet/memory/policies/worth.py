"""Worth: the seconds that having a node on the device saves, by the reuse that was seen of nodes like it.

Every node is worth its rate of use times the cheaper of loading and computing it, per block. The rate is learned: of
nodes of a kind, used so often, that have not been used for so long, how many were used in the next second. So no time
constant is set. It is the hazard rate of survival analysis, estimated by events over exposure (D. R. Cox, D. Oakes,
"Analysis of Survival Data", 1984, chapter 3); nodes that leave the memory are censored.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from lorikeet.memory.policies.base import EvictionPolicy, MemoryView, extend_to_nodes
from lorikeet.memory.tree import NodeKind, Nodes, NodeTransfer, Scores

_AGES: Final = 14
"""Classes of age: below 1/8 s, then doubling."""
_VISITS: Final = 6
"""Classes of visits: 1, 2, 3 to 4, 5 to 8, and so on."""
_HALF_LIFE_S: Final = 600.0
"""Half-life of what was counted."""
_PRIOR_EVENTS: Final = 0.5
"""Before anything was counted a node is taken to be used once in about its age."""
_OWN_EVENTS: Final = 8.0
"""Uses of an adapter's nodes after which its own reuse counts as much as that of all adapters."""
_CHUNK_NODES: Final = 8192


class Worth(EvictionPolicy):
    """Scores nodes by the logarithm of seconds saved per second and block.

    Args:
        view: the state of the memory.
    """

    def __init__(self, view: MemoryView) -> None:
        super().__init__(view)
        shape = (2, _VISITS, _AGES)
        ages_s = 2.0 ** (np.arange(_AGES) - 3)
        self._events = np.full(shape, _PRIOR_EVENTS)
        self._exposure_s = np.full(shape, _PRIOR_EVENTS) * ages_s * np.ones(shape)
        self._own_events, self._own_expected = np.zeros(0), np.zeros(0)
        self._counted_s = 0.0

    def scores(self, nodes: Nodes, now: float) -> Scores:
        """Return log(rate of use * seconds saved per block)."""
        tree, view = self.view.tree, self.view
        kv = tree.kind[nodes] == NodeKind.KV
        rates = self._rates(nodes, now)
        step_s, load_s = view.prefill_s(1) * (1 + view.running), view.load_block_s()
        saved = np.where(kv & ~tree.on_host[nodes], step_s, min(step_s, load_s))
        saved = np.where(kv, saved, load_s)
        scores: Scores = np.log(rates * np.maximum(saved, 1e-6))
        return scores

    def asked(self, nodes: Nodes, now: float) -> None:
        """Count uses of nodes, before their times of last use change."""
        tree = self.view.tree
        nodes = nodes[(tree.kind[nodes] >= NodeKind.ADAPTER) & (tree.pins[nodes] == 0) & (tree.last_use_s[nodes] > 0)]
        self._extend()
        np.add.at(self._events, self._classes(nodes, now), 1.0)
        np.add.at(self._own_events, tree.top[nodes], 1.0)

    def ticked(self, now: float) -> None:
        """Count for how long nodes have not been used."""
        tree, end, passed_s = self.view.tree, self.view.tree.end, now - self._counted_s
        self._counted_s = now
        self._extend()
        there = tree.on_device[:end] | tree.on_host[:end] | (tree.kind[:end] == NodeKind.ADAPTER)
        idle = there & (tree.kind[:end] >= NodeKind.ADAPTER) & (tree.pins[:end] == 0) & (tree.last_use_s[:end] > 0)
        nodes = np.flatnonzero(idle)
        fade = 0.5 ** (passed_s / _HALF_LIFE_S)
        at = np.ravel_multi_index(self._classes(nodes, now), self._events.shape)
        rates = (self._events / self._exposure_s).ravel()
        counts = np.bincount(at, minlength=self._events.size).reshape(self._events.shape)
        expected = np.bincount(tree.top[nodes], rates[at] * passed_s, minlength=len(self._own_expected))
        self._events, self._exposure_s = fade * self._events, fade * self._exposure_s + counts * passed_s
        self._own_events, self._own_expected = fade * self._own_events, fade * self._own_expected + expected

    def forgotten(self, nodes: "npt.ArrayLike") -> None:
        """Clear the state of removed nodes, whose indices may be reused."""
        at = np.asarray(nodes, np.int64)
        at = at[at < len(self._own_events)]
        self._own_events[at] = self._own_expected[at] = 0.0

    def _extend(self) -> None:
        self._own_events = extend_to_nodes(self._own_events, self.view.tree, 0.0)
        self._own_expected = extend_to_nodes(self._own_expected, self.view.tree, 0.0)

    def _rates(self, nodes: Nodes, now: float) -> Scores:
        self._extend()
        top = self.view.tree.top[nodes]
        own = (self._own_events[top] + _OWN_EVENTS) / (self._own_expected[top] + _OWN_EVENTS)
        rates: Scores = (self._events / self._exposure_s)[self._classes(nodes, now)] * own
        return rates

    def _classes(self, nodes: Nodes, now: float) -> tuple[npt.NDArray[np.int64], ...]:
        tree = self.view.tree
        ages_s = np.maximum(now - tree.last_use_s[nodes], 1e-3)
        age = np.clip(np.log2(ages_s).astype(np.int64) + 4, 0, _AGES - 1)
        visits = np.clip(np.ceil(np.log2(np.maximum(tree.visits[nodes], 1.0))).astype(np.int64), 0, _VISITS - 1)
        return (tree.kind[nodes] == NodeKind.KV).astype(np.int64), visits, age
