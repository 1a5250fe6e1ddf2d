"""Frees blocks on both tiers by evicting adapters and KV that no request needs.

The eviction policy scores the nodes of the tree, and the lowest score is evicted first. ``EvictionHeap`` finds the
lowest scores of one kind of node without sorting all nodes. ``EvictionQueues`` holds the heaps of one tier and decides
which nodes may be evicted from the tier. ``Evictor`` evicts the nodes with the lowest scores until enough blocks are
free.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lorikeet.core.events import AdapterEvent, AdapterEvicted
from lorikeet.core.guard import GuardedPart
from lorikeet.core.ids import AdapterDigest
from lorikeet.memory.blocks import BlockError, WaitReason
from lorikeet.memory.copy_lead import CopyLead
from lorikeet.memory.host_values import HostValues
from lorikeet.memory.options import MemoryOptions
from lorikeet.memory.policies.base import EvictionPolicy, PrefetchPolicy
from lorikeet.memory.reuse import KvReuse
from lorikeet.memory.shadows import CopyShadow
from lorikeet.memory.statistics import MemoryCounters
from lorikeet.memory.tiers import Tiers
from lorikeet.memory.tree import DependencyTree, NodeKind, Nodes, NodeTransfer, Scores
from lorikeet.presets import HostKv

_HEAP_NODES = 256
"""Number of lowest-scored nodes that are put into a heap at a time."""
_MAX_ENTRIES = 8 * _HEAP_NODES
"""Number of entries above which a heap is rebuilt, because most entries are then stale.

The limit is higher if many scores are equal.
"""


_FEW = 3
"""Largest number of nodes that are offered without a filter.

For so few nodes, the NumPy calls take longer than they save.
"""


class EvictionHeap:
    """Orders evictable nodes of one kind by ``tree.score``.

    Of nodes with equal scores, the deeper node or the lower index comes first.

    Most nodes never have a low score, so only the lowest few are sorted. A node that changes is offered again. Its old
    entry is then stale (``tree.touched`` differs) and is dropped when it reaches the top.

    Args:
        tree: holds the scores.
        candidates: returns all nodes that may be evicted now.
        is_candidate: returns whether a node may be evicted now.
        deeper_first: see ``EvictionPolicy``.
    """

    def __init__(
        self,
        tree: DependencyTree,
        candidates: Callable[[], Nodes],
        is_candidate: Callable[[int], bool],
        *,
        deeper_first: bool,
    ) -> None:
        self._tree = tree
        self._depth_factor = -1 if deeper_first else 0
        self._candidates = candidates
        self._is_candidate = is_candidate
        self._heap: list[tuple[float, int, int, int]] = []
        self._highest = -np.inf
        self._max_entries = 0

    def invalidate(self) -> None:
        """Drop all entries, because all scores have changed."""
        self._heap = []
        self._highest = -np.inf

    def offer(self, node: int) -> None:
        """Add a node whose score has changed or which has become evictable. A node that is not evictable is ignored."""
        tree = self._tree
        score = float(tree.score[node])
        if score <= self._highest and self._is_candidate(node):
            if len(self._heap) >= self._max_entries:  # most entries are stale, and the heap must not grow without limit
                self.invalidate()
                return
            heapq.heappush(
                self._heap, (score, self._depth_factor * int(tree.depth[node]), node, int(tree.touched[node]))
            )

    def first(self, count: int = 1) -> list[int]:
        """Return up to ``count`` nodes with the lowest scores, the lowest first. The nodes stay in the queue."""
        tree = self._tree
        found: dict[int, tuple[float, int, int, int]] = {}
        while len(found) < count:
            if not self._heap:
                if self._highest == np.inf or not self._refill():
                    break
                found = {}
            score, _, node, touched = entry = heapq.heappop(self._heap)
            if (touched, score) == (tree.touched[node], tree.score[node]) and self._is_candidate(node):
                found[node] = entry
        for entry in found.values():
            heapq.heappush(self._heap, entry)
        return list(found)

    def _refill(self) -> bool:
        tree = self._tree
        nodes = self._candidates()
        if not len(nodes):
            self._highest = np.inf  # every node that becomes evictable is offered
            self._max_entries = _MAX_ENTRIES
            return False
        scores = tree.score[nodes]
        if len(nodes) > _HEAP_NODES:
            self._highest = float(np.partition(scores, _HEAP_NODES - 1)[_HEAP_NODES - 1])
            nodes = nodes[scores <= self._highest]
        else:
            self._highest = np.inf
        scores = tree.score[nodes]
        depths = self._depth_factor * tree.depth[nodes]
        touched = tree.touched[nodes]
        self._heap = list(zip(scores.tolist(), depths.tolist(), nodes.tolist(), touched.tolist(), strict=True))
        heapq.heapify(self._heap)
        self._max_entries = max(_MAX_ENTRIES, 2 * len(self._heap))
        return True

    def missing(self) -> list[int]:
        """Return evictable nodes that lack an entry, for consistency checks."""
        tree = self._tree
        nodes = self._candidates()
        known = {(node, touched, score) for score, _, node, touched in self._heap}
        lowest = nodes[tree.score[nodes] <= self._highest]
        return [node for node in lowest.tolist() if (node, tree.touched[node], tree.score[node]) not in known]


_NodeIndex = int | slice | Nodes
"""One node or several; a predicate of them is a bool, or an array of bools."""
_ChildCount = int | npt.NDArray[np.bool_]
"""Number of children that each node has: 0 for leaves."""


class EvictionQueues:
    """Holds the nodes that may be evicted from one tier, by kind and score.

    Args:
        tree: holds the scores: the lowest is evicted first.
        evictable: returns whether nodes may be evicted, given the number of their children on the tier.
        deeper_first: see ``EvictionPolicy``.
    """

    def __init__(
        self, tree: DependencyTree, evictable: Callable[[_NodeIndex, _ChildCount], Any], *, deeper_first: bool = True
    ) -> None:
        self._tree = tree
        self._evictable = evictable
        self._queues = {
            kind: EvictionHeap(tree, partial(self.candidates, kind), self.allows, deeper_first=deeper_first)
            for kind in (NodeKind.KV, NodeKind.ADAPTER)
        }

    def allows(self, at: _NodeIndex) -> Any:
        """Return whether nodes may be evicted now."""
        return self._evictable(at, 0)

    def candidates(self, kind: int) -> Nodes:
        """Return all nodes of a kind that may be evicted now."""
        every = slice(self._tree.end)
        return np.flatnonzero((self._tree.kind[every] == kind) & self.allows(every))

    def offer(self, node: int) -> None:
        """Add a node that has become evictable, or whose score has changed."""
        kind = int(self._tree.kind[node])
        if kind in self._queues:
            self._queues[kind].offer(node)

    def invalidate(self, kind: int) -> None:
        """Drop all entries of a kind, because all scores of the kind have changed."""
        self._queues[kind].invalidate()

    def first(self, kind: int, count: int) -> list[int]:
        """Return up to ``count`` nodes of a kind with the lowest scores, the lowest first."""
        return self._queues[kind].first(count)

    def run(self, node: int, most: int) -> list[int]:
        """Return ``node`` and its ancestors of equal score, as far as they become evictable after it.

        KV of equal score was last used together, so it is evicted together.

        Args:
            node: the KV node that is evicted first.
            most: largest number of nodes to return.

        Returns:
            KV of one branch, later KV first. Each node becomes evictable when the node before it in the list is
            evicted.
        """
        tree = self._tree
        run = [node]
        parent = tree.parent.item
        for _ in range(min(most, tree.depth.item(node)) - 1):
            run.append(parent(run[-1]))
        at = np.asarray(run)
        follows = (self._evictable(at, np.arange(len(at)) > 0) & (tree.score[at] == tree.score[node])).tolist()
        return run[: follows.index(False)] if False in follows else run

    def missing(self) -> list[int]:
        """Return evictable nodes that the heaps would never return, for consistency checks."""
        return [node for queue in self._queues.values() for node in queue.missing()]


def device_queues(tree: DependencyTree, *, dependent: bool, deeper_first: bool) -> EvictionQueues:
    """Return the queues of the device.

    Its evictable nodes are neither pinned nor in flight; if ``dependent``, they are also leaves.
    """

    def evictable(at: _NodeIndex, children: _ChildCount) -> Any:
        idle = (
            (tree.on_device[at] | (tree.kept[at] > 0))
            & (tree.moving[at] == NodeTransfer.NO)
            & (tree.pins[at] == 0)
            & (tree.kind[at] != NodeKind.BASE)
        )
        return idle & (tree.children_on_device[at] == children) if dependent else idle

    return EvictionQueues(tree, evictable, deeper_first=deeper_first)


def host_queues(tree: DependencyTree) -> EvictionQueues:
    """Return the queues of the host.

    Its evictable nodes are neither pinned nor in flight; evictable KV is also a leaf.
    """

    def evictable(at: _NodeIndex, children: _ChildCount) -> Any:
        idle = tree.on_host[at] & (tree.moving[at] == NodeTransfer.NO) & (tree.pins[at] == 0)
        return idle & ((tree.kind[at] == NodeKind.ADAPTER) | (tree.children[at] == children))

    return EvictionQueues(tree, evictable)


def has_no_bytes(tree: DependencyTree, at: _NodeIndex) -> Any:
    """Return whether nodes are unpinned KV without bytes: on no tier, and in no transfer."""
    somewhere = tree.on_device[at] | tree.on_host[at] | (tree.moving[at] != NodeTransfer.NO) | (tree.pins[at] > 0)
    return (tree.kind[at] == NodeKind.KV) & ~somewhere


def evictable_host_blocks(tree: DependencyTree) -> int:
    """Return the number of host blocks of all nodes that are not pinned or in flight."""
    every = slice(tree.end)
    idle = tree.on_host[every] & (tree.moving[every] == NodeTransfer.NO) & (tree.pins[every] == 0)
    adapters = np.flatnonzero(idle & (tree.kind[every] == NodeKind.ADAPTER)).tolist()
    kv = int((idle & (tree.kind[every] == NodeKind.KV)).sum())
    return kv + sum(len(tree.adapters[node].host_blocks) for node in adapters)


class _DeviceShare(NamedTuple):
    """Limits the device blocks that some kinds of nodes may take.

    Attributes:
        kinds: kinds of nodes whose blocks count towards it.
        limit: largest number of blocks.
    """

    kinds: tuple[int, ...]
    limit: int


class Evictor:
    """Evicts the lowest-scored nodes until enough blocks are free, on the device and on the host.

    Args:
        tiers: frees and copies the blocks.
        eviction: scores the nodes.
        prefetch: is notified of nodes that are removed from the tree.
        options: memory options of the preset.
        counters: counts evictions.
        reuse: records the KV that leaves the device, if KV is copied ahead of its eviction.
        block_bytes: size of a block, for events.
        copies: prices copies ahead of eviction beside other copies; None if they are not guarded.

    Attributes:
        lead: estimates the KV that must have a copy because it is evicted soon.
        allocation_failed: whether a request found too few free blocks since the swapper last reset it.
        evicted: adapter versions evicted from the device; ``Memory.take_evictions`` passes them to the executor.
        events: adapter events; ``Memory.take_events`` takes them.
    """

    def __init__(
        self,
        tiers: Tiers,
        eviction: EvictionPolicy,
        prefetch: PrefetchPolicy,
        options: MemoryOptions,
        counters: MemoryCounters,
        reuse: KvReuse,
        block_bytes: int,
        copies: CopyShadow | None = None,
    ) -> None:
        self._tiers = tiers
        self._tree = tiers.tree
        self._copies = copies
        self._guards = eviction.view.guards
        self._eviction = eviction
        self._prefetch = prefetch
        self._options = options
        self._counters = counters
        self._reuse = reuse
        self._block_bytes = block_bytes
        total = tiers.device.total
        if options.adapter_share is None:
            self._shares: tuple[_DeviceShare, ...] = (_DeviceShare((NodeKind.KV, NodeKind.ADAPTER), total),)
        else:
            adapters = int(options.adapter_share * total)
            self._shares = (_DeviceShare((NodeKind.ADAPTER,), adapters), _DeviceShare((NodeKind.KV,), total - adapters))
        self._device_queues = device_queues(self._tree, dependent=options.dependent, deeper_first=eviction.deeper_first)
        self._host_queues = host_queues(self._tree)
        self._host_values = HostValues(eviction.view)
        self._pinned: frozenset[AdapterDigest] = frozenset()
        self.lead = CopyLead(tiers.host.total)
        self.allocation_failed = False
        self.evicted: list[AdapterDigest] = []
        self.events: list[AdapterEvent] = []

    @property
    def copies_ahead(self) -> bool:
        """Whether KV is copied to the host ahead of its eviction now."""
        return self._options.host_kv is HostKv.AHEAD and self._guards.is_on(GuardedPart.COPIES)

    @property
    def copies_at_eviction(self) -> bool:
        """Whether all KV is copied to the host when it is evicted now."""
        return self._options.host_kv is HostKv.EVICTED or (
            self._options.host_kv is HostKv.AHEAD and not self._guards.is_on(GuardedPart.COPIES)
        )

    # --- the device ----------------------------------------------------------------------------------

    def pin(self, digests: Iterable[AdapterDigest], now: float) -> None:
        """Pin these adapters and unpin all others.

        A pinned adapter is evicted only if a request could not run otherwise.
        """
        self._pinned = frozenset(digests)
        self.rescore_all(now)

    def is_pinned(self, node: int) -> bool:
        """Return whether a node is a pinned adapter."""
        entry = self._tree.adapters.get(node) if self._pinned else None
        return entry is not None and entry.ref.digest in self._pinned

    def _scores(self, nodes: Nodes, now: float) -> Scores:
        """Return the policy's scores; pinned adapters have infinite scores."""
        scores = self._eviction.scores(nodes, now)
        if self._pinned:
            scores = np.where([self.is_pinned(int(node)) for node in nodes], np.inf, scores)
        return scores

    def limit(self, kind: int) -> int:
        """Return the largest number of device blocks that a kind of node may take."""
        return next(share.limit for share in self._shares if kind in share.kinds)

    def why_impossible(self, kv: int, adapter: int) -> str | None:
        """Return the reason why blocks of KV and of an adapter never fit the device together.

        Return None if they fit.
        """
        limits = (self.limit(NodeKind.KV), self.limit(NodeKind.ADAPTER))
        total = self._tiers.device.total
        if kv <= limits[0] and adapter <= limits[1] and kv + adapter <= total:
            return None
        split = f", of which {limits[0]} for KV and {limits[1]} for adapters" if sum(limits) <= total else ""
        return f"need {kv + adapter} blocks of {self._block_bytes} bytes, there are {total}{split}"

    def unused(self) -> int:
        """Return the number of device blocks that are free, or will be free when the transfers in flight have ended."""
        return sum(self._unused(share) for share in self._shares)

    def ensure_free(self, kv: int, adapter: int, now: float, below: float = np.inf) -> bool:
        """Evict nodes until this many device blocks are free for KV and for adapters.

        If eviction cannot free enough blocks, nothing is evicted.

        Args:
            kv, adapter: number of blocks.
            now: the time.
            below: score below which adapters may be evicted; ``inf`` if any node may be evicted.

        Returns:
            True if the blocks can be leased now. False if too few blocks can be freed, or if the blocks become free
            only when transfers to the host have ended.
        """
        needs = [
            (share, sum({NodeKind.KV: kv, NodeKind.ADAPTER: adapter}[kind] for kind in share.kinds))
            for share in self._shares
        ]
        self.allocation_failed |= below == np.inf and any(need > self._unused(share) for share, need in needs)
        for share, need in needs:
            if not self._can_free(share, need, now, below):
                return False
        kinds = None if below == np.inf else (NodeKind.ADAPTER,)
        freed = [self._free_blocks(share, need, now, below, kinds) for share, need in needs if need]
        return all(freed)

    def lacks_slot(self, adapter: int) -> bool:
        """Return whether an adapter of this many blocks lacks room in the share reserved for adapters.

        Without such a share, the result is False. A missing slot counts as a failed allocation.
        """
        lacks = bool(adapter) and self._options.adapter_share is not None and adapter > self.available(NodeKind.ADAPTER)
        self.allocation_failed |= lacks
        return lacks

    def wait_reason(self, kv: int, adapter: int) -> WaitReason:
        """Return the reason why :meth:`ensure_free` failed for a request whose adapter does not lack a slot."""
        return WaitReason.ADAPTER_BLOCKS if adapter and kv <= self.available(NodeKind.KV) else WaitReason.KV_BLOCKS

    def available(self, kind: int) -> int:
        """Return the number of device blocks that a kind could get if all evictable nodes were evicted."""
        share = next(share for share in self._shares if kind in share.kinds)
        return self._unused(share) + sum(self._tiers.cached_blocks[kind] for kind in share.kinds)

    def evict_until_free(self, blocks: int, now: float, most: int) -> None:
        """Evict nodes until ``blocks`` device blocks are unused, but at most ``most`` blocks."""
        blocks = min(blocks, self.unused() + most)
        for share in self._shares:
            self._free_blocks(share, blocks * share.limit // self._tiers.device.total, now, np.inf, even_pinned=False)

    def worthless(self) -> int:
        """Return the number of device blocks of worthless nodes (see ``EvictionPolicy.worthless_below``)."""
        tree = self._tree
        end = self._tree.end
        below = self._eviction.worthless_below
        if below == -np.inf:
            return 0
        idle = tree.on_device[:end] & (tree.moving[:end] == NodeTransfer.NO) & (tree.pins[:end] == 0)
        return int((idle & (tree.kind[:end] == NodeKind.KV) & (tree.score[:end] < below)).sum())

    def evict_worthless(self, blocks: int, now: float) -> None:
        """Evict worthless nodes until ``blocks`` device blocks are unused, or no worthless node is left."""
        below = self._eviction.worthless_below
        if below > -np.inf:
            for share in self._shares:
                self._free_blocks(share, blocks, now, below, share.kinds, even_pinned=False)

    def rescore(self, nodes: Nodes, now: float) -> None:
        """Score nodes that were used or inserted.

        Adapters are skipped if the policy scores all adapters at each eviction.
        """
        tree = self._tree
        is_adapter = self._tree.kind[nodes] == NodeKind.ADAPTER
        scored = nodes[~is_adapter] if self._eviction.rescored_at_eviction else nodes
        if len(scored):
            tree.score[scored] = self._scores(scored, now)
        self.offer_all(nodes)

    def rescore_all(self, now: float) -> None:
        """Score all nodes again."""
        tree = self._tree
        nodes = np.flatnonzero(tree.kind[: tree.end] >= NodeKind.ADAPTER)
        tree.score[nodes] = self._scores(nodes, now)
        for kind in (NodeKind.KV, NodeKind.ADAPTER):
            self._device_queues.invalidate(kind)
            self._host_queues.invalidate(kind)

    def offer(self, node: int) -> None:
        """Add a node to the queue of each tier from which it has become evictable."""
        self._device_queues.offer(node)
        self._host_queues.offer(node)

    def offer_all(self, nodes: Nodes) -> None:
        """Add the evictable nodes among ``nodes`` to the queues of both tiers."""
        if len(nodes) > _FEW:
            nodes = nodes[self._device_queues.allows(nodes) | self._host_queues.allows(nodes)]
        for node in nodes.tolist():
            self.offer(node)

    def evict_kv(self, nodes: Sequence[int], now: float) -> None:
        """Evict KV from the device.

        If the preset copies evicted KV to the host, KV is copied as far as host blocks can be freed, earlier KV first.
        If KV is copied ahead of its eviction, KV without a copy is copied now only if the wait for its blocks costs
        less time than the KV is expected to save. Other KV without a copy is lost, and its blocks become free
        immediately.

        Args:
            nodes: evictable KV, later KV first.
            now: the time.
        """
        tree = self._tree
        tiers = self._tiers
        at = np.asarray(nodes, np.int64)
        above = set(tree.parent[at].tolist()).difference(nodes)
        is_copied = tree.on_host[at]
        self._eviction.removed(nodes, now)
        self._counters.removed(nodes)
        if self._options.host_kv is HostKv.AHEAD:
            tops = tree.top[at]
            for top in set(tops.tolist()):  # an aLoRA's KV may lie below the base's KV
                keys = tree.keys_of_kv(at[tops == top])
                self._reuse.evicted(top, keys, now)
                if self._copies is not None:
                    self._copies.evicted(top, keys, now)
        uncopied = at[~is_copied].tolist() if tiers.host.total else []
        free = 0
        if uncopied and self.copies_at_eviction:
            free = self.free_host_for_kv(len(uncopied), nodes[0], now)
        elif uncopied and self.copies_ahead and self._is_copied(uncopied):
            self.lead.late(len(uncopied), now)
            if self._is_copied_late(uncopied):
                self._drop_copies(len(uncopied), float(tree.score[nodes[0]]))
                free = self.free_host_for_kv(len(uncopied), nodes[0], now)
        stored = uncopied[len(uncopied) - free :]
        dropped = nodes
        if stored:
            is_stored = set(stored)
            dropped = [node for node in nodes if node not in is_stored]
        lost = uncopied[: len(uncopied) - free] if tiers.host.total else dropped
        self._note_lost(lost)
        tiers.drop_kv(dropped)
        if stored:
            tiers.store_kv(stored, tiers.host.lease(len(stored)), now)
        self.remove_empty(lost)
        self.offer_all(np.array([*at[is_copied].tolist(), *above], np.int64))

    def _note_lost(self, nodes: Sequence[int]) -> None:
        """Record KV that leaves its last tier, if KV is copied ahead of its eviction."""
        if nodes and self._options.host_kv is HostKv.AHEAD:
            self._reuse.lost(int(self._tree.top[nodes[0]]), len(nodes))

    def _is_copied(self, nodes: Sequence[int]) -> bool:
        """Return whether KV of one branch is copied ahead of its eviction; rarely reused KV is not."""
        return self._reuse.is_copied(self._tree.top.item(nodes[0]))

    def _is_copied_late(self, nodes: Sequence[int]) -> bool:
        """Return whether KV that was not copied ahead is copied when it is evicted."""
        share = self._reuse.share(self._tree.top.item(nodes[0]))
        return self._eviction.view.waiting_for_a_copy_pays(len(nodes), share)

    def evict_adapter(
        self, node: int, now: float, *, most: int | None = None, other_blocks: int = 0, dropped: bool = False
    ) -> None:
        """Free device blocks of an adapter, and append an ``AdapterEvicted`` event if the adapter was complete.

        Args:
            node: an adapter with blocks on the device, in no transfer.
            now: the time.
            most: largest number of blocks to free, starting with the last; None for all.
            other_blocks: number of blocks freed together with the adapter, for the event.
            dropped: whether a user unloaded the adapter. If not, it was evicted for its blocks.
        """
        entry = self._tree.adapters[node]
        was_complete = bool(self._tree.on_device[node])
        blocks = len(entry.device_blocks)
        if was_complete:
            self._eviction.removed([node], now)
            self._counters.removed([node])
            self.evicted.append(entry.ref.digest)
        if most is not None and most < blocks:
            self._tiers.shorten_adapter(node, blocks := most)
        else:
            self._tiers.drop_adapter(node)
        if was_complete or dropped:
            freed_bytes = (blocks + other_blocks) * self._block_bytes
            self.events.append(AdapterEvicted(entry.ref.digest, now, freed_bytes, dropped))
        self.offer(node)

    def remove_empty(self, nodes: Sequence[int] | Nodes) -> None:
        """Remove KV leaves that are on no tier from the tree, and then ancestors that have become such leaves."""
        tree = self._tree
        at = np.asarray(nodes, np.int64)
        at = at[has_no_bytes(tree, at)]
        if not len(at):
            return
        children = tree.children.item
        parents = tree.parent.item
        # Nearly all nodes form one branch without other children, later KV first, which is removed as a whole.
        ends = np.flatnonzero((tree.parent[at[:-1]] != at[1:]) | (tree.children[at[1:]] != 1))
        whole = (int(ends[0]) + 1 if len(ends) else len(at)) if not children(at[0]) else 0
        every: list[int] = at.tolist()
        empty = dict.fromkeys(every)
        gone = dict.fromkeys(every[:whole])
        below = dict.fromkeys(every[1:whole], 0)
        if whole:
            above = parents(every[whole - 1])
            below[above] = children(above) - 1
            every = [above, *every[whole:]]
        for node in every:
            while not (node in gone or below.get(node, children(node))) and (node in empty or has_no_bytes(tree, node)):
                gone[node] = None
                parent = parents(node)
                below[parent] = below.get(parent, children(parent)) - 1
                node = parent
        if gone:
            self._forget_kv(list(gone))
            for node in below.keys() - gone.keys():
                self.offer(node)

    def free_kv(self, nodes: Sequence[int], now: float) -> int:
        """Free the blocks of KV on both tiers, and remove the KV and ancestors without bytes from the tree.

        Args:
            nodes: KV in no transfer, later KV first, with all its descendants.
            now: the time.

        Returns:
            The number of blocks freed.
        """
        tree = self._tree
        above = set(tree.parent[nodes].tolist()).difference(nodes) if nodes else set()
        on_device = [node for node in nodes if tree.on_device[node]]
        self._eviction.removed(on_device, now)
        self._counters.removed(on_device)
        self._tiers.drop_kv(on_device)
        on_host = [node for node in nodes if tree.on_host[node]]
        self._tiers.drop_kv_from_host(on_host)
        self._forget_kv(nodes)
        left = sorted(above)  # an aLoRA's KV may lie below the base's KV
        for node in left:
            self.offer(node)
        self.remove_empty([node for node in left if tree.kind[node] == NodeKind.KV])
        return len(on_device) + len(on_host)

    def discard(self, chain: Sequence[int], now: float) -> None:
        """Free the end of a chain of KV on both tiers, and remove ancestors without bytes from the tree.

        Args:
            chain: nodes, each the parent of the next one. What lies above the last node that is pinned, moves or has
                further children stays.
            now: the time.
        """
        if not chain:
            return
        tree = self._tree
        at = np.asarray(chain, np.int64)
        children = np.ones(len(at), np.int64)
        children[-1] = 0
        is_free = (tree.kind[at] == NodeKind.KV) & (tree.pins[at] == 0) & (tree.moving[at] == NodeTransfer.NO)
        needed = np.flatnonzero(~is_free | (tree.children[at] != children))
        if free := list(chain[needed[-1] + 1 if len(needed) else 0 :]):
            self.free_kv(free[::-1], now)

    def forget_adapter(self, node: int) -> None:
        """Remove an adapter from the tree."""
        self._tree.remove_adapter(node)
        self._reuse.forget(node)
        self._eviction.forgotten([node])
        self._prefetch.forgotten([node])

    def _forget_kv(self, nodes: Sequence[int]) -> None:
        self._tree.remove_kv(nodes)
        self._eviction.forgotten(nodes)
        self._prefetch.forgotten(nodes)

    # --- the host ------------------------------------------------------------------------------------

    def ensure_host_free(self, blocks: int, now: float) -> bool:
        """Evict from the host until an adapter of this many blocks fits.

        KV is evicted first, and then other adapters; but if KV is copied ahead of its eviction, whichever has the lower
        value (see ``HostValues``). If eviction cannot free enough blocks, nothing is evicted and False is returned.
        """
        tiers = self._tiers
        if tiers.host.free < blocks:
            if tiers.host.free + evictable_host_blocks(self._tree) < blocks:
                return False
            self._score_adapters(self._host_queues, now)
        while tiers.host.free < blocks:
            adapter = self._adapter_worth_less(None, now)
            if adapter is not None:
                tiers.drop_adapter_from_host(adapter)
            elif not self._evict_host_kv(blocks):
                others = self._host_queues.first(NodeKind.ADAPTER, 1)
                if not others:
                    return False
                tiers.drop_adapter_from_host(others[0])
        return True

    def _adapter_worth_less(self, stored: int | None, now: float) -> int | None:
        """Return the adapter that leaves the host before any KV, because its blocks are worth less; None for none.

        Without measurements, and if KV is not copied ahead of its eviction, KV leaves first.

        Args:
            stored: KV that is stored in the adapter's place and must be worth more, too; None if an adapter is stored.
            now: the time.
        """
        values = self._host_values
        if self._options.host_kv is not HostKv.AHEAD or not values.known():
            return None
        adapters = self._host_queues.first(NodeKind.ADAPTER, 1)
        if not adapters or self.is_pinned(adapters[0]):
            return None
        kv = self._host_queues.first(NodeKind.KV, 1)
        if stored is None and not kv:
            return None
        value = values.of(adapters[0], now)
        is_least = all(value < values.of(each, now) for each in kv)
        return adapters[0] if is_least and (stored is None or value < values.of(stored, now)) else None

    def free_host_for_kv(self, blocks: int = 1, before: int | None = None, now: float = 0.0) -> int:
        """Evict from the host for KV. Return how many of ``blocks`` host blocks can then be leased for KV.

        Other KV is evicted, and adapters that are worth less than the KV (see :meth:`ensure_host_free`).

        Args:
            blocks: wanted.
            before: node before which the evicted KV must rank, by a lower score, or by an equal score and a larger
                depth. None if any KV, but no adapter may be evicted.
            now: the time; needed with ``before``.
        """
        while self._tiers.host.free < blocks:
            adapter = None if before is None else self._adapter_worth_less(before, now)
            if adapter is not None:
                self._tiers.drop_adapter_from_host(adapter)
            elif not self._evict_host_kv(blocks, before):
                break
        return min(blocks, self._tiers.host.free)

    def copy_to_host(self, nodes: Sequence[int], now: float) -> None:
        """Begin to copy pinned KV to the host: the first of ``nodes``, as far as host blocks can be freed."""
        stored = nodes[: self.free_host_for_kv(len(nodes))] if self._options.host_kv is not HostKv.NONE else ()
        if stored:
            self._eviction.removed(stored, now)  # until the copy ends, when ``inserted`` reports them again
            self._tiers.store_kv(stored[::-1], self._tiers.host.lease(len(stored)), now)

    def copy_ahead(self, most: int, soon: int, pays: Callable[[Nodes], npt.NDArray[np.bool_]], now: float) -> None:
        """Begin to copy KV that is likely to be evicted first to the host. The KV stays on the device.

        A host block is worth more if its content is not on the device. So a full host tier drops copies of KV that will
        be evicted from the device late. Only KV that is evicted soon may displace other KV from the host.

        Args:
            most: largest number of blocks.
            soon: number of cached blocks that count as evicted soon.
            pays: returns whether copying KV of each adapter saves time, given the adapters' nodes.
            now: the time.
        """
        tree = self._tree
        tops = tree.tops[tree.on_device[tree.tops]]
        tops = tops[pays(tops)]
        if not len(tops):
            return
        end = self._tree.end
        is_paying = np.zeros(end, np.bool_)
        is_paying[tops] = True
        idle = (tree.kind[:end] == NodeKind.KV) & tree.on_device[:end] & (tree.moving[:end] == NodeTransfer.NO)
        cached = np.flatnonzero(idle & (tree.pins[:end] == 0) & is_paying[tree.top[:end]])
        nodes = cached[~tree.on_host[cached]]  # as a rule few
        if len(nodes) > most:
            nodes = nodes[np.argpartition(tree.score[nodes], most)[:most]]
        nodes = nodes[np.lexsort((-tree.depth[nodes], tree.score[nodes]))]
        if len(nodes) > self._tiers.host.free and len(cached) > soon:
            last = np.partition(tree.score[cached], soon)[soon]
            nodes = nodes[: max(self._tiers.host.free, int((tree.score[nodes] < last).sum()))]
        if not len(nodes):
            return
        chosen: list[int] = nodes.tolist()
        self._drop_copies(len(chosen), float(tree.score[chosen[-1]]))
        chosen = chosen[: self.free_host_for_kv(len(chosen), chosen[0], now)]
        self._tiers.store_kv(chosen, self._tiers.host.lease(len(chosen)), now, stays=True)

    def _drop_copies(self, blocks: int, above: float) -> None:
        """Free host blocks by dropping copies of KV that is also on the device, if that pays.

        Otherwise KV that is nowhere else is dropped, the lowest score first. Only copies of KV that scores above a
        limit are dropped, the highest score first.
        """
        missing = blocks - self._tiers.host.free
        if missing <= 0 or not self._eviction.view.losing_copies_pays(self._reuse.lost_share()):
            return
        tree, end = self._tree, self._tree.end
        twice = tree.on_device[:end] & tree.on_host[:end] & (tree.moving[:end] == NodeTransfer.NO)
        nodes = np.flatnonzero(twice & (tree.kind[:end] == NodeKind.KV) & (tree.score[:end] > above))
        if len(nodes) > missing:
            nodes = nodes[np.argpartition(-tree.score[nodes], missing)[:missing]]
        self._tiers.drop_kv_from_host(nodes.tolist())
        self.offer_all(nodes)

    def _evict_host_kv(self, blocks: int, before: int | None = None) -> bool:
        """Evict KV of one branch from the host, up to ``blocks`` free blocks. Return whether any KV was evictable."""
        tree = self._tree
        most = blocks - self._tiers.host.free
        first = self._host_queues.first(NodeKind.KV, 1)
        if not first:
            return False
        if before is not None:
            score, limit = tree.score[[first[0], before]]
            if score == limit:  # in this case only deeper KV is evicted
                most = min(most, int(tree.depth[first[0]] - tree.depth[before]))
            if score > limit or most <= 0:
                return False
        run = self._host_queues.run(first[0], most)
        self._note_lost([node for node in run if not tree.on_device[node]])
        self._tiers.drop_kv_from_host(run)
        self.remove_empty(run)
        return True

    # --- internals -----------------------------------------------------------------------------------

    def check_queues(self) -> None:
        """Check that the queues contain every evictable node, for tests and idle moments.

        Raises:
            BlockError: an evictable node is in no queue.
        """
        if missing := self._device_queues.missing() + self._host_queues.missing():
            raise BlockError(f"nodes {missing} are evictable, but in no eviction queue")

    def _free(self, share: _DeviceShare) -> int:
        return share.limit - sum(self._tiers.used_blocks[kind] for kind in share.kinds)

    def _unused(self, share: _DeviceShare) -> int:
        """Return the number of blocks that are free, or will be free when the transfers in flight have ended."""
        return self._free(share) + (self._tiers.blocks_being_freed if NodeKind.KV in share.kinds else 0)

    def _can_free(self, share: _DeviceShare, blocks: int, now: float, below: float) -> bool:
        have = self._unused(share)
        if blocks <= have:
            return True
        if below == np.inf or blocks > self.available(share.kinds[0]):
            return blocks <= self.available(share.kinds[0])
        adapters = self._device_queues.candidates(NodeKind.ADAPTER)
        scores = self._scores(adapters, now)
        return blocks <= have + sum(map(self._tree.device_size, adapters[scores < below].tolist()))

    def _free_blocks(
        self,
        share: _DeviceShare,
        blocks: int,
        now: float,
        below: float,
        kinds: tuple[int, ...] | None = None,
        *,
        even_pinned: bool = True,
    ) -> bool:
        kinds = kinds or share.kinds
        while (missing := blocks - self._unused(share)) > 0:
            nodes = self._next_victims(kinds, missing, now)
            if not nodes or self._tree.score[nodes[0]] >= below < np.inf:
                return False
            if not even_pinned and self.is_pinned(nodes[0]):
                return False
            top = int(self._tree.top[nodes[0]])
            self._evict(nodes, now, missing if self._options.adapter_chain else None)
            if self._eviction.whole_branches:
                self._evict_branch(top, share, now)
        return self._free(share) >= blocks

    def _next_victims(self, kinds: tuple[int, ...], most: int, now: float) -> list[int]:
        """Return the next nodes to evict: an adapter, or up to ``most`` blocks of KV of one branch, later KV first.

        Before adapters are compared with KV, the policy's ``adapter_offset`` is added to their scores.
        """
        tree = self._tree
        eviction = self._eviction
        if NodeKind.ADAPTER in kinds:
            self._score_adapters(self._device_queues, now)
        firsts = {kind: nodes for kind in kinds if (nodes := self._device_queues.first(kind, eviction.proposals))}
        offsets = {NodeKind.KV: 0.0, NodeKind.ADAPTER: eviction.adapter_offset(now) if len(firsts) > 1 else 0.0}
        ranked = [(float(tree.score[node]) + offsets[kind], node) for kind, nodes in firsts.items() for node in nodes]
        if not ranked:
            return []
        ranked.sort(key=lambda item: item[0])
        if self._pinned:
            ranked = [item for item in ranked if not self.is_pinned(item[1])] or ranked
        node = eviction.choose([node for _, node in ranked[: eviction.proposals]], now)
        is_alone = eviction.proposals > 1 or eviction.whole_branches or not eviction.deeper_first
        is_alone |= bool(tree.kind[node] == NodeKind.ADAPTER)
        return [node] if is_alone else self._device_queues.run(node, most)

    def _score_adapters(self, queues: EvictionQueues, now: float) -> None:
        """Score all evictable adapters of a tier again if their scores depend on the other resident nodes."""
        if self._eviction.rescored_at_eviction:
            adapters = queues.candidates(NodeKind.ADAPTER)
            self._tree.score[adapters] = self._scores(adapters, now)
            self._device_queues.invalidate(NodeKind.ADAPTER)
            self._host_queues.invalidate(NodeKind.ADAPTER)

    def _evict(self, nodes: list[int], now: float, most: int | None = None) -> None:
        if self._tree.kind[nodes[0]] == NodeKind.ADAPTER:
            self.evict_adapter(nodes[0], now, most=most)
        else:
            self.evict_kv(nodes, now)

    def _evict_branch(self, top: int, share: _DeviceShare, now: float) -> None:
        """Evict all evictable KV below an adapter, and then the adapter."""
        tree = self._tree
        branch = np.flatnonzero((tree.top[: tree.end] == top) & tree.on_device[: tree.end])
        for node in branch[np.argsort(-tree.depth[branch], kind="stable")].tolist():
            if tree.kind[node] in share.kinds and self._device_queues.allows(node) and not self.is_pinned(node):
                self._evict([node], now)
