"""Hawkeye (Jain and Lin, ISCA 2016), which ELORA §VIII-H compares itself with: learn what Belady's policy would keep.

OPTgen replays past requests as the optimal policy would have served them. An adapter whose nodes that policy would
mostly have kept is called friendly; nodes of the others leave first.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from lorikeet.memory.policies.base import EvictionPolicy, MemoryView, by_node
from lorikeet.memory.tree import NO_NODE, NodeKind, Nodes, Scores

_HISTORY = 8
"""The past is kept up to so many times the capacity, in blocks accessed."""
_MOST, _FRIENDLY = 7, 4
"""Counters of 3 bits; from 4 an adapter is friendly, and there they begin."""
_FRIENDLY_SCORE = 2.0**40
"""More than any number of accesses."""


class OptGen:
    """What an optimal cache would have hit: one that knows the future and need not keep what it fetches.

    Time is counted in requests. For each, it is known how many blocks the optimal cache holds then for later hits.

    Args:
        capacity: its blocks.
        history: blocks accessed, after which the past is forgotten.
    """

    def __init__(self, capacity: int, history: int) -> None:
        self._capacity = capacity
        self._history = history
        self._held = np.zeros(64, np.int64)
        self._blocks: deque[int] = deque()  # accessed by each request since self._first
        self._accessed = 0
        self._first = 0

    @property
    def now(self) -> int:
        """Number of the present request."""
        return self._first + len(self._blocks)

    def next_request(self, blocks: int) -> None:
        """End the present request, which accessed so many blocks; one counts at least, or some are never forgotten."""
        blocks = max(1, blocks)
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
        """Let the present request access what request ``last`` did before; return whether the optimal cache hits."""
        if last < self._first:
            return False
        held = self._held[last - self._first : len(self._blocks)]
        if held.max(initial=0) + size > self._capacity:
            return False
        held += size
        return True


class Hawkeye(EvictionPolicy):
    """Nodes of unfriendly adapters leave first, then the least recently accessed; one set of all nodes, unlike a CPU's.

    Its signature of an access, a program counter in the original, is the adapter.
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
        """Return the number of each node's last access, the friendly ones' above all others."""
        self._lengthen()
        return self._score[nodes]

    def arrived(self, adapter: int, path: Sequence[int], now: float) -> None:
        """Access the nodes of a request, and learn from those accessed before."""
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
        """Access KV that was just computed; all else was accessed by the request that it came for, if any."""
        self._lengthen()
        for node in nodes:
            if self._last[node] == NO_NODE and self.view.tree.kind[node] == NodeKind.KV:
                self._access([node])
                self._computed += 1

    def removed(self, nodes: Sequence[int], now: float) -> None:
        """A friendly node had to leave: its adapter is less so."""
        self._lengthen()
        for node in nodes:
            if self._score[node] >= _FRIENDLY_SCORE:
                self._learn(int(self.view.tree.top[node]), False)

    def forgotten(self, nodes: Sequence[int]) -> None:
        """Others may get their places."""
        self._lengthen()
        self._last[nodes], self._score[nodes], self._counter[nodes] = NO_NODE, 0.0, _FRIENDLY

    def _access(self, nodes: list[int]) -> None:
        self._accesses += 1
        friendly = self._counter[self.view.tree.top[nodes]] >= _FRIENDLY
        self._score[nodes] = self._accesses + np.where(friendly, _FRIENDLY_SCORE, 0.0)
        self._last[nodes] = self._optimal.now

    def _learn(self, adapter: int, kept: bool) -> None:
        self._counter[adapter] = min(self._counter[adapter] + 1, _MOST) if kept else max(self._counter[adapter] - 1, 0)

    def _lengthen(self) -> None:
        tree = self.view.tree
        self._last = by_node(self._last, tree, NO_NODE)
        self._score = by_node(self._score, tree, 0.0)
        self._counter = by_node(self._counter, tree, _FRIENDLY)
