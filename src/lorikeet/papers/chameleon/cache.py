"""Implements Chameleon's adapter cache (§4.1), which evicts the adapter with the lowest score.

Score = F * Frequency + R * Recency + S * Size. By this formula small adapters are evicted before large ones, because
they are cheap to load again. A sentence beside the formula in the paper states the opposite. Scores lie between 0 and
1. Adapters that queued requests need are in a higher tier, and are evicted after all others.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lorikeet.memory.policies.base import EvictionPolicy, MemoryView, extend_to_nodes, stays_on_device
from lorikeet.memory.tree import NodeKind, Nodes, Scores

WANTED = 10.0
"""Score that is added while a queued request needs the adapter: tier 2."""
PROTECTED = 5.0
"""Score that is added while a prefetch policy protects the adapter; still tier 1."""
WINDOW_S = 300.0
"""Seconds of the window in which uses are counted: the paper's T_refresh."""

_UNKNOWN = -1


class Chameleon(EvictionPolicy):
    """Scores adapters by frequency, recency and size, in tiers.

    All terms are between 0 and 1. Frequency: uses in the window, divided by the largest number of any resident adapter.
    Recency: last use, scaled between the oldest (0) and newest (1) of resident adapters. Size: rank, divided by the
    largest rank of all registered adapters. KV scores below any adapter. Chameleon keeps no KV of finished requests, so
    the only cached KV belongs to preempted requests.

    Args:
        view: the state of the memory.
        frequency, recency, size: the weights F, R and S (§4.1). The weights 0, 1, 0 give LRU within the tiers; a third
            each gives FairShare (§5.3).
    """

    rescored_at_eviction = True
    evictable_below = WANTED
    follows_queue = True

    def __init__(self, view: MemoryView, *, frequency: float = 0.45, recency: float = 0.10, size: float = 0.45) -> None:
        super().__init__(view)
        self._weights = frequency, recency, size
        self._uses: deque[tuple[float, int]] = deque()
        self._frequency = np.zeros(0, np.float64)
        self._rank = np.zeros(0, np.int64)
        self._protected: dict[int, float] = {}

    def scores(self, nodes: Nodes, now: float) -> Scores:
        """Return the current scores. Scores of adapters depend on the resident and the wanted adapters."""
        tree = self.view.tree
        is_adapter = tree.kind[nodes] == NodeKind.ADAPTER
        scores = np.where(is_adapter, 0.0, -1.0)
        if not is_adapter.any():
            return scores
        known = np.flatnonzero(tree.kind[: tree.end] == NodeKind.ADAPTER)
        resident = known[stays_on_device(tree, known)]
        if len(resident):
            scores[is_adapter] = self._scores(nodes[is_adapter], resident, known, now)
        return scores

    def protect(self, adapter: int, until_s: float) -> None:
        """Protect an adapter until ``until_s``: all unprotected and unwanted adapters are evicted first."""
        self._protected[adapter] = until_s

    def admitted(self, adapter: int, path: Sequence[int], now: float) -> None:
        """Count a use. Prefetches do not count."""
        self._forget_uses(now)  # scores are not computed while memory is free, so expired uses are dropped here too
        self._frequency[adapter] += 1
        self._uses.append((now, adapter))

    def forgotten(self, nodes: Sequence[int]) -> None:
        """Clear the state of removed nodes, whose indices may be reused."""
        for node in nodes:
            self._protected.pop(node, None)
            if node < len(self._rank):
                self._rank[node] = _UNKNOWN
            if node < len(self._frequency) and self._frequency[node]:
                self._frequency[node] = 0
                self._uses = deque(use for use in self._uses if use[1] != node)

    def _scores(self, adapters: Nodes, resident: Nodes, known: Nodes, now: float) -> Scores:
        self._forget_uses(now)
        frequency, recency, size = self._weights
        scores = (
            frequency * _share(self._frequency, adapters, resident)
            + recency * _between(self.view.tree.last_use_s, adapters, resident)
            + size * _share(self._ranks(known), adapters, known)
        )
        for tier, members in ((WANTED, self.view.waiting), (PROTECTED, self._protected_now(now))):
            if members:
                is_member = np.zeros(self.view.tree.end, np.bool_)
                is_member[list(members)] = True
                scores += tier * is_member[adapters]
        return scores

    def _forget_uses(self, now: float) -> None:
        self._frequency = extend_to_nodes(self._frequency, self.view.tree, 0.0)
        while self._uses and self._uses[0][0] <= now - WINDOW_S:
            self._frequency[self._uses.popleft()[1]] -= 1

    def _ranks(self, known: Nodes) -> npt.NDArray[np.int64]:
        """Return ranks by node.

        Each rank is computed once, because the computation covers all modules and layers of an adapter.
        """
        self._rank = extend_to_nodes(self._rank, self.view.tree, _UNKNOWN)
        for node in known[self._rank[known] == _UNKNOWN].tolist():
            self._rank[node] = self.view.tree.adapters[node].ref.max_rank
        return self._rank

    def _protected_now(self, now: float) -> dict[int, float]:
        self._protected = {node: until_s for node, until_s in self._protected.items() if now < until_s}
        return self._protected


def _share(values: npt.NDArray[np.float64] | npt.NDArray[np.int64], nodes: Nodes, among: Nodes) -> Scores:
    """Return the values of ``nodes`` divided by the largest value in ``among``; 0 if the largest value is 0."""
    most = float(values[among].max())
    return np.minimum(values[nodes] / most, 1.0) if most > 0 else np.zeros(len(nodes))


def _between(values: npt.NDArray[np.float64], nodes: Nodes, among: Nodes) -> Scores:
    """Return values scaled between the smallest (0) and the largest (1) in ``among``; 1 if the two are equal."""
    least, most = float(values[among].min()), float(values[among].max())
    return np.clip((values[nodes] - least) / (most - least), 0.0, 1.0) if most > least else np.ones(len(nodes))
