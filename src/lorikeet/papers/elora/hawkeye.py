"""Implements Hawkeye (Jain and Lin, ISCA 2016), a baseline of ELORA §VIII-H, which learns from Belady's optimal policy.

OPTgen replays past requests as the optimal policy would have served them. An adapter is cache-friendly if the optimal
policy would have kept most of its nodes. Nodes of other adapters are evicted first.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from lorikeet.memory.policies.base import EvictionPolicy, MemoryView, extend_to_nodes
from lorikeet.memory.tree import NO_NODE, NodeKind, Nodes, Scores

_HISTORY = 8
"""History length in accessed blocks, as a multiple of the capacity."""
_MAX_COUNTER, _FRIENDLY = 7, 4
"""Counters have 3 bits and start at 4; from 4 on an adapter is friendly."""
_FRIENDLY_SCORE = 2.0**40
"""Score that exceeds any number of accesses."""


class OptGen:
    """Computes the hits of an optimal cache, which knows the future and may bypass blocks.

    Time is counted in requests. For each past request, the number of blocks that the optimal cache holds for later hits
    is stored.

    Args:
        capacity: size of the cache in blocks.
        history: number of accessed blocks after which older requests are forgotten.
    """

    def __init__(self, capacity: int, history: int) -> None:
        self._capacity = capacity
        self._history = history
        self._held = np.zeros(64, np.int64)
        self._blocks: deque[int] = deque()  # blocks accessed by each request since self._first
        self._accessed = 0
        self._first = 0

    @property
    def now(self) -> int:
        """Number of the current request."""
        return self._first + len(self._blocks)

    def next_request(self, blocks: int) -> None:
        """End the current request, which accessed ``blocks`` blocks."""
        blocks = max(1, blocks)  # at least 1, because requests without blocks would otherwise never be dropped
        self._blocks.append(blocks)
        self._accessed += blocks
        forgotten = 0
        while self._accessed > self._history:
            self._accessed -= self._blocks.popleft()
            forgotten += 1
        self._first += forgotten
        kept = len(self._blocks)
        if forgotten:
            self._held[:kept] = self._held[forgotten : forgotten + kept]
            self._held[kept : kept + forgotten] = 0
        if kept == len(self._held):
            self._held = np.concatenate([self._held, np.zeros_like(self._held)])

    def access_again(self, last: int, size: int) -> bool:
        """Access a node of ``size`` blocks that request ``last`` accessed. Return whether the optimal cache hits."""
        if last < self._first:
            return False
        held = self._held[last - self._first : len(self._blocks)]
        if held.max(initial=0) + size > self._capacity:
            return False
        held += size
        return True


class Hawkeye(EvictionPolicy):
    """Evicts nodes of unfriendly adapters first, then the least recently accessed.

    All nodes form one cache set. The adapter replaces the program counter from which the original predicts.
    """

    def __init__(self, view: MemoryView) -> None:
        super().__init__(view)
        self._optimal = OptGen(view.device_blocks, _HISTORY * view.device_blocks)
        self._last = np.zeros(0, np.int64)
        self._score = np.zeros(0, np.float64)
        self._counter = np.zeros(0, np.int64)
        self._accesses = 0
        self._computed = 0

    def scores(self, nodes: Nodes, now: float) -> Scores:
        """Return the number of each node's last access, plus a large constant for nodes of friendly adapters."""
        self._lengthen()
        return self._score[nodes]

    def arrived(self, adapter: int, path: Sequence[int], now: float) -> None:
        """Access the nodes of a request, and train on the nodes that were accessed before."""
        self._lengthen()
        tree = self.view.tree
        nodes = [adapter, *path]
        for node in nodes:
            if self._last[node] != NO_NODE:
                kept = self._optimal.access_again(int(self._last[node]), int(tree.size[node]))
                self._learn(int(tree.top[node]), kept)
        self._access(nodes)
        self._optimal.next_request(int(tree.size[nodes].sum()) + self._computed)
        self._computed = 0

    def inserted(self, nodes: Sequence[int], now: float) -> None:
        """Access newly computed KV. Loaded nodes were already accessed when their request arrived."""
        self._lengthen()
        for node in nodes:
            if self._last[node] == NO_NODE and self.view.tree.kind[node] == NodeKind.KV:
                self._access([node])
                self._computed += 1

    def removed(self, nodes: Sequence[int], now: float) -> None:
        """Make the adapter of an evicted friendly node less friendly."""
        self._lengthen()
        for node in nodes:
            if self._score[node] >= _FRIENDLY_SCORE:
                self._learn(int(self.view.tree.top[node]), False)

    def forgotten(self, nodes: Sequence[int]) -> None:
        """Clear the state of removed nodes, whose indices may be reused."""
        self._lengthen()
        self._last[nodes], self._score[nodes], self._counter[nodes] = NO_NODE, 0.0, _FRIENDLY

    def _access(self, nodes: list[int]) -> None:
        self._accesses += 1
        friendly = self._counter[self.view.tree.top[nodes]] >= _FRIENDLY
        self._score[nodes] = self._accesses + np.where(friendly, _FRIENDLY_SCORE, 0.0)
        self._last[nodes] = self._optimal.now

    def _learn(self, adapter: int, kept: bool) -> None:
        counter = self._counter[adapter]
        self._counter[adapter] = min(counter + 1, _MAX_COUNTER) if kept else max(counter - 1, 0)

    def _lengthen(self) -> None:
        tree = self.view.tree
        self._last = extend_to_nodes(self._last, tree, NO_NODE)
        self._score = extend_to_nodes(self._score, tree, 0.0)
        self._counter = extend_to_nodes(self._counter, tree, _FRIENDLY)
