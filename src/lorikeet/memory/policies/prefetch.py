"""Prefetches nodes by rank, parents before children."""

from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from lorikeet.memory.policies.base import PrefetchPolicy, is_prefetchable, stays_on_device
from lorikeet.memory.tree import DependencyTree, NodeKind, Nodes, NodeTransfer, Scores

_SORTED = 256
"""Number of best nodes that are sorted first. The number doubles each time more nodes are needed."""

_Key = tuple[float, float, int, int]
"""Negative score, negative last use, depth, node: among equal scores the newer node comes first, then the shallower."""


class RankedPrefetch(PrefetchPolicy):
    """Prefetches the nodes with the highest ranks. Between adapters and KV, the eviction policy's offset applies.

    A candidate is a node off the device whose parent is on the device, in flight to it, or was named before. Subclasses
    define the ranks.

    Attributes:
        flat: whether every node is a candidate, even if its parent is not on the device.
    """

    flat = False

    def targets(self, now: float) -> Iterator[int]:
        """Yield nodes, best first.

        The offset of adapters is read again for each node, because it changes as adapters load.
        """
        tree = self.view.tree
        ranks = self.ranks()
        adapters, kv = off_device(tree)
        # Otherwise the prefetch would evict a node of the same worth
        kv = kv[tree.score[kv] >= self.eviction.worthless_below]
        is_open = np.ones(len(kv), np.bool_) if self.flat else stays_on_device(tree, tree.parent[kv])
        below = _Children(tree, kv[~is_open])
        best_adapters = _Ranked(tree, adapters, ranks)
        best_kv = _Ranked(tree, kv[is_open], ranks)
        while best_adapters.first or best_kv.first:
            if _before(best_adapters.first, best_kv.first, self.eviction.prefetch_adapter_offset(now)):
                node = best_adapters.pop()
            else:
                node = best_kv.pop()
            if not is_prefetchable(tree, node):
                continue
            yield node
            if tree.kind[node] == NodeKind.KV or tree.moving[node] == NodeTransfer.IN or tree.on_device[node]:
                for child in below.of(node):
                    best_kv.add(child)

    def ranks(self) -> Scores:
        """Return the rank of each node. The node with the highest rank is named first."""
        raise NotImplementedError


class NewestFirst(RankedPrefetch):
    """Prefetches the most recently used nodes, parents before children.

    The policy fits eviction policies whose scores rank only nodes on the device.
    """

    def ranks(self) -> Scores:
        """Return the times of last use."""
        return self.view.tree.last_use_s


class _Ranked:
    """Queues nodes of one kind by rank. Initial nodes are sorted lazily, as they are popped."""

    def __init__(self, tree: DependencyTree, nodes: Nodes, ranks: Scores) -> None:
        self._tree = tree
        self._ranks = ranks
        self._heap: list[tuple[_Key, bool]] = []  # (key, whether the node is one of the sorted initial nodes)
        self._sorted = self._falling(nodes)
        self._take_next()

    @property
    def first(self) -> _Key | None:
        """Key of the best node."""
        return self._heap[0][0] if self._heap else None

    def pop(self) -> int:
        """Remove and return the best node."""
        key, was_sorted = heappop(self._heap)
        if was_sorted:
            self._take_next()
        return key[3]

    def add(self, node: int) -> None:
        """Add a node."""
        tree = self._tree
        key = (-float(self._ranks[node]), -float(tree.last_use_s[node]), int(tree.depth[node]), node)
        heappush(self._heap, (key, False))

    def _take_next(self) -> None:
        key = next(self._sorted, None)
        if key is not None:
            heappush(self._heap, (key, True))

    def _falling(self, nodes: Nodes) -> Iterator[_Key]:
        """Yield the keys of ``nodes`` in order, sorting ever larger parts of them as needed."""
        count = _SORTED
        while len(nodes):
            is_chosen = self._among_best(nodes, count)
            chosen = nodes[is_chosen]
            ranks = -self._ranks[chosen]
            last = -self._tree.last_use_s[chosen]
            depth = self._tree.depth[chosen]
            yield from sorted(zip(ranks.tolist(), last.tolist(), depth.tolist(), chosen.tolist(), strict=True))
            nodes = nodes[~is_chosen]
            count = 2 * count

    def _among_best(self, nodes: Nodes, count: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the ``count`` best nodes, including all nodes of equal rank and last use."""
        if count >= len(nodes):
            return np.ones(len(nodes), np.bool_)
        ranks = self._ranks[nodes]
        least = np.partition(ranks, -count)[-count]
        is_best: npt.NDArray[np.bool_] = ranks >= least
        ties = np.flatnonzero(ranks == least)
        if len(ties) > count:  # most scores are equal if they ignore recency
            last = self._tree.last_use_s[nodes[ties]]
            is_best[ties] = last >= np.partition(last, -count)[-count]
        return is_best


class _Children:
    """Finds the children of a node among given nodes."""

    def __init__(self, tree: DependencyTree, nodes: Nodes) -> None:
        self._tree = tree
        self._nodes = nodes
        # The parent is in the upper half of the bits, the node in the lower half
        self._by_parent: npt.NDArray[np.int64] | None = None

    def of(self, parent: int) -> list[int]:
        """Return the children of ``parent``. The first call sorts the nodes by parent."""
        if not self._tree.children[parent] or not len(self._nodes):
            return []
        if self._by_parent is None:
            self._by_parent = np.sort(self._tree.parent[self._nodes].astype(np.int64) << 32 | self._nodes)
        begin, end = np.searchsorted(self._by_parent, (parent << 32, (parent + 1) << 32))
        children: list[int] = (self._by_parent[begin:end] & 0xFFFFFFFF).tolist()
        return children


def off_device(tree: DependencyTree) -> tuple[Nodes, Nodes]:
    """Return adapters that are off the device and KV that is on the host only, without nodes in a transfer."""
    end = tree.end
    kind = tree.kind[:end]
    idle = ~tree.on_device[:end] & (tree.moving[:end] == NodeTransfer.NO)
    adapters = np.flatnonzero(idle & (kind == NodeKind.ADAPTER))
    return adapters, np.flatnonzero(idle & (kind == NodeKind.KV) & tree.on_host[:end])


def _before(adapter: _Key | None, kv: _Key | None, offset: float) -> bool:
    """Return whether an adapter ranks before KV with ``offset`` added to its score."""
    if adapter is None or kv is None:
        return adapter is not None
    return (adapter[0] - offset, *adapter[1:]) < kv
