"""Frees blocks on both tiers by evicting adapters and KV that no request needs.

The eviction policy scores nodes of the tree. A heap per kind of node keeps the lowest scores without sorting all of
them, the queues of a tier say which nodes may be evicted, and the evictor evicts the lowest until enough blocks are
free.
"""

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lorikeet.core.events import AdapterEvent, AdapterEvicted
from lorikeet.core.ids import AdapterDigest
from lorikeet.memory.blocks import BlockError, WaitReason
from lorikeet.memory.policies.base import EvictionPolicy, PrefetchPolicy
from lorikeet.memory.rules import MemoryRules
from lorikeet.memory.statistics import MemoryCounters
from lorikeet.memory.tiers import Tiers
from lorikeet.memory.tree import DependencyTree, NodeKind, Nodes, NodeTransfer

_HEAP_NODES = 256
"""So many of the lowest are put in order at a time."""
_MAX_ENTRIES = 8 * _HEAP_NODES
"""Notes that are kept before all are thrown away and the lowest looked for anew; more where more are equal."""


class EvictionHeap:
    """A queue of one kind of nodes by ``tree.score``, the deeper of equals first.

    Most nodes never come near its head, so only the lowest few are ever sorted. Nodes that change are offered anew;
    notes about them that are no longer true are thrown away when they come up.

    Args:
        tree: holds the scores.
        candidates: returns all nodes that may leave now.
        is_candidate: whether one may.
    """

    def __init__(
        self, tree: DependencyTree, candidates: Callable[[], Nodes], is_candidate: Callable[[int], bool]
    ) -> None:
        self._tree = tree
        self._candidates = candidates
        self._is_candidate = is_candidate
        self._heap: list[tuple[float, int, int, int]] = []
        self._highest = -np.inf
        self._most = 0

    def forget(self) -> None:
        """All scores have changed."""
        self._heap, self._highest = [], -np.inf

    def offer(self, node: int) -> None:
        """A node's score has changed, or it may leave since now."""
        tree = self._tree
        score = float(tree.score[node])
        if score <= self._highest and self._is_candidate(node):
            if len(self._heap) >= self._most:  # of notes that are no longer true: nothing here grows with use
                self.forget()
                return
            heapq.heappush(self._heap, (score, -int(tree.depth[node]), node, int(tree.touched[node])))

    def first(self, count: int = 1) -> list[int]:
        """Return up to ``count`` nodes that leave first, the very first first; they stay in the queue."""
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
        tree, nodes = self._tree, self._candidates()
        if not len(nodes):
            self._highest, self._most = np.inf, _MAX_ENTRIES  # whoever may leave from now on is offered
            return False
        scores = tree.score[nodes]
        if len(nodes) > _HEAP_NODES:
            self._highest = float(np.partition(scores, _HEAP_NODES - 1)[_HEAP_NODES - 1])
            nodes = nodes[scores <= self._highest]
        else:
            self._highest = np.inf
        scores, depths, touched = tree.score[nodes], -tree.depth[nodes], tree.touched[nodes]
        self._heap = list(zip(scores.tolist(), depths.tolist(), nodes.tolist(), touched.tolist(), strict=True))
        heapq.heapify(self._heap)
        self._most = max(_MAX_ENTRIES, 2 * len(self._heap))
        return True

    def missing(self) -> list[int]:
        """Return the nodes that should be in the queue and are not; for checks."""
        tree, nodes = self._tree, self._candidates()
        known = {(node, touched, score) for score, _, node, touched in self._heap}
        lowest = nodes[tree.score[nodes] <= self._highest]
        return [node for node in lowest.tolist() if (node, tree.touched[node], tree.score[node]) not in known]


_NodeIndex = int | slice | Nodes
"""One node or several; what is asked about them is a bool, or an array of them."""
_ChildCount = int | npt.NDArray[np.bool_]
"""How many nodes are to be below each: 0, as a rule."""


class EvictionQueues:
    """See the module.

    Args:
        tree: has everybody's score: the lowest leaves first.
        may_leave: whether nodes may, with so many below them.
    """

    def __init__(self, tree: DependencyTree, may_leave: Callable[[_NodeIndex, _ChildCount], Any]) -> None:
        self._tree = tree
        self._may_leave = may_leave
        self._queues = {
            kind: EvictionHeap(tree, partial(self.candidates, kind), self.allows)
            for kind in (NodeKind.KV, NodeKind.ADAPTER)
        }

    def allows(self, at: _NodeIndex) -> Any:
        """Whether nodes may leave."""
        return self._may_leave(at, 0)

    def candidates(self, kind: int) -> Nodes:
        """Return all of a kind that may leave."""
        every = slice(self._tree.end)
        return np.flatnonzero((self._tree.kind[every] == kind) & self.allows(every))

    def offer(self, node: int) -> None:
        """A node may have become one that can leave, or its score has changed."""
        kind = int(self._tree.kind[node])
        if kind in self._queues:
            self._queues[kind].offer(node)

    def forget(self, kind: int) -> None:
        """All scores of a kind have changed."""
        self._queues[kind].forget()

    def first(self, kind: int, count: int) -> list[int]:
        """Return up to ``count`` of a kind that leave first, the very first first."""
        return self._queues[kind].first(count)

    def run(self, node: int, most: int) -> list[int]:
        """Return KV that leaves first, with what it was last used together with: its equals by score before it.

        Args:
            node: who leaves first of all that may.
            most: nodes.

        Returns:
            KV of one branch, later KV first; each may leave when the one below it has.
        """
        tree, run = self._tree, [node]
        parent, kind = tree.parent.item, tree.kind.item
        while len(run) < most and kind(above := parent(run[-1])) == NodeKind.KV:
            run.append(above)
        at = np.asarray(run)
        leaves = (self._may_leave(at, np.arange(len(at)) > 0) & (tree.score[at] == tree.score[node])).tolist()
        return run[: leaves.index(False)] if False in leaves else run

    def overlooked(self) -> list[int]:
        """Return nodes that may leave and that nobody would ask to; for checks."""
        return [node for queue in self._queues.values() for node in queue.missing()]


def device_queues(tree: DependencyTree, *, dependent: bool) -> EvictionQueues:
    """Return who may leave the device: who rests there unneeded; where KV depends on what is above it, leaves only."""

    def may_leave(at: _NodeIndex, below: _ChildCount) -> Any:
        may = (
            tree.on_device[at]
            & (tree.moving[at] == NodeTransfer.NO)
            & (tree.pins[at] == 0)
            & (tree.kind[at] != NodeKind.BASE)
        )
        return may & (tree.children_on_device[at] == below) if dependent else may

    return EvictionQueues(tree, may_leave)


def host_queues(tree: DependencyTree) -> EvictionQueues:
    """Return who may leave the host: who rests there unneeded, and of KV only what nothing is below."""

    def may_leave(at: _NodeIndex, below: _ChildCount) -> Any:
        may = tree.on_host[at] & (tree.moving[at] == NodeTransfer.NO) & (tree.pins[at] == 0)
        return may & ((tree.kind[at] == NodeKind.ADAPTER) | (tree.children[at] == below))

    return EvictionQueues(tree, may_leave)


def is_nowhere(tree: DependencyTree, at: _NodeIndex) -> Any:
    """Whether nodes are KV that nobody needs and whose bytes are nowhere."""
    somewhere = tree.on_device[at] | tree.on_host[at] | (tree.moving[at] != NodeTransfer.NO) | (tree.pins[at] > 0)
    return (tree.kind[at] == NodeKind.KV) & ~somewhere


def evictable_host_blocks(tree: DependencyTree) -> int:
    """Return the host blocks of all who rest there unneeded, KV with what is below it and adapters."""
    every = slice(tree.end)
    rests = tree.on_host[every] & (tree.moving[every] == NodeTransfer.NO) & (tree.pins[every] == 0)
    adapters = np.flatnonzero(rests & (tree.kind[every] == NodeKind.ADAPTER)).tolist()
    kv = int((rests & (tree.kind[every] == NodeKind.KV)).sum())
    return kv + sum(len(tree.adapters[node].host_blocks) for node in adapters)


class _DeviceShare(NamedTuple):
    """A part of the device within which blocks are lent.

    Attributes:
        kinds: what it is for.
        limit: its blocks.
    """

    kinds: tuple[int, ...]
    limit: int


class Evictor:
    """See the module.

    Args:
        tiers: carries the moves out.
        eviction: scores nodes.
        prefetch: is told of nodes that are gone.
        rules: of the row.
        counters: are told who left.
        block_bytes: for reports.

    Attributes:
        demand_failed: somebody waited for blocks that were not free, since a tick last asked.
        evicted: versions that have left the device, for the executor.
        events: for whoever listens.
    """

    def __init__(
        self,
        tiers: Tiers,
        eviction: EvictionPolicy,
        prefetch: PrefetchPolicy,
        rules: MemoryRules,
        counters: MemoryCounters,
        block_bytes: int,
    ) -> None:
        self._tiers = tiers
        self._tree = tiers.tree
        self._eviction = eviction
        self._prefetch = prefetch
        self._rules = rules
        self._counters = counters
        self._block_bytes = block_bytes
        total = tiers.device.total
        if rules.adapter_share is None:
            self._areas: tuple[_DeviceShare, ...] = (_DeviceShare((NodeKind.KV, NodeKind.ADAPTER), total),)
        else:
            adapters = int(rules.adapter_share * total)
            self._areas = (_DeviceShare((NodeKind.ADAPTER,), adapters), _DeviceShare((NodeKind.KV,), total - adapters))
        self._device_queues = device_queues(self._tree, dependent=rules.dependent)
        self._host_queues = host_queues(self._tree)
        self.demand_failed = False
        self.evicted: list[AdapterDigest] = []
        self.events: list[AdapterEvent] = []

    # --- the device ----------------------------------------------------------------------------------

    def limit(self, kind: int) -> int:
        """Return the most device blocks that a kind may ever take."""
        return next(area.limit for area in self._areas if kind in area.kinds)

    def why_impossible(self, kv: int, adapter: int) -> str | None:
        """Return why so many blocks for KV and for an adapter could never be there at once, None if they could."""
        limits, total = (self.limit(NodeKind.KV), self.limit(NodeKind.ADAPTER)), self._tiers.device.total
        if kv <= limits[0] and adapter <= limits[1] and kv + adapter <= total:
            return None
        split = f", of which {limits[0]} for KV and {limits[1]} for adapters" if sum(limits) <= total else ""
        return f"need {kv + adapter} blocks of {self._block_bytes} bytes, there are {total}{split}"

    def unused(self) -> int:
        """Return the device blocks that are free, or will be without evicting anybody else."""
        return sum(self._unused(area) for area in self._areas)

    def make(self, kv: int, adapter: int, now: float, below: float = np.inf) -> bool:
        """See to it that so many blocks for KV and for adapters can be leased now.

        Nobody is evicted if that would not suffice. KV that is on its way to the host is not waited for here: False,
        and its room comes with the end of its transfer.

        Args:
            kv, adapter: blocks.
            now: the time.
            below: only adapters that score less may be evicted; ``inf``: anybody.
        """
        needs = [
            (area, sum({NodeKind.KV: kv, NodeKind.ADAPTER: adapter}[kind] for kind in area.kinds))
            for area in self._areas
        ]
        self.demand_failed |= below == np.inf and any(need > self._unused(area) for area, need in needs)
        for area, need in needs:
            if not self._could_clear(area, need, now, below):
                return False
        cleared = [self._clear(area, need, now, below) for area, need in needs if need]
        return all(cleared)

    def lacks_slot(self, adapter: int) -> bool:
        """Whether others keep so many blocks of an adapter out of the share that is for adapters, if there is one.

        As where ``make`` finds no room, that is a demand that failed.
        """
        lacks = bool(adapter) and self._rules.adapter_share is not None and adapter > self.available(NodeKind.ADAPTER)
        self.demand_failed |= lacks
        return lacks

    def what_lacks(self, kv: int, adapter: int) -> WaitReason:
        """Return why room cannot be made for so many blocks of a request's KV and of its adapter, which has a slot."""
        return WaitReason.ADAPTER_ROOM if adapter and kv <= self.available(NodeKind.KV) else WaitReason.ROOM

    def available(self, kind: int) -> int:
        """Return the device blocks of a kind that could be leased if everything that may leave left."""
        area = next(area for area in self._areas if kind in area.kinds)
        return self._unused(area) + sum(self._tiers.cached_blocks[kind] for kind in area.kinds)

    def clear(self, blocks: int, now: float, most: int) -> None:
        """Evict until so many device blocks are free or on their way to be, or ``most`` more than there were."""
        blocks = min(blocks, self.unused() + most)
        for area in self._areas:
            self._clear(area, blocks * area.limit // self._tiers.device.total, now, np.inf)

    def rescore(self, nodes: Nodes, now: float) -> None:
        """Ask for the scores of nodes that were used, or came; not of adapters if all are asked for at an eviction."""
        tree, is_adapter = self._tree, self._tree.kind[nodes] == NodeKind.ADAPTER
        scored = nodes[~is_adapter] if self._eviction.rescored_at_eviction else nodes
        if len(scored):
            tree.score[scored] = self._eviction.scores(scored, now)
        self.offer_all(nodes)

    def rescore_all(self, now: float) -> None:
        """Ask for all scores anew."""
        tree = self._tree
        nodes = np.flatnonzero(tree.kind[: tree.end] >= NodeKind.ADAPTER)
        tree.score[nodes] = self._eviction.scores(nodes, now)
        for kind in (NodeKind.KV, NodeKind.ADAPTER):
            self._device_queues.forget(kind)
            self._host_queues.forget(kind)

    def offer(self, node: int) -> None:
        """A node may have become one that can leave."""
        self._device_queues.offer(node)
        self._host_queues.offer(node)

    def offer_all(self, nodes: Nodes) -> None:
        """The same for many, of whom few can."""
        for node in nodes[self._device_queues.allows(nodes) | self._host_queues.allows(nodes)].tolist():
            self.offer(node)

    def evict_kv(self, nodes: Sequence[int], now: float) -> None:
        """Let KV leave the device that may; it goes to the host as far as that has room, for earlier KV first.

        Args:
            nodes: later KV first.
            now: the time.
        """
        tree, tiers = self._tree, self._tiers
        parents = set(tree.parent[nodes].tolist())
        self._eviction.removed(nodes, now)
        self._counters.left(nodes)
        away = [node for node in nodes if not tree.on_host[node]] if self._rules.host_kv and tiers.host.total else []
        places = self.make_host_room_for_kv(len(away), before=nodes[0]) if away else 0
        stored = away[len(away) - places :]
        goes = set(stored)
        dropped = [node for node in nodes if node not in goes]
        tiers.drop_kv(dropped)
        tiers.store_kv(stored, tiers.host.lease(len(stored)), now)
        self.forget_if_empty(dropped)
        self.offer_all(np.array([*nodes, *(parents - set(nodes))], np.int64))  # may leave now, or the host, too

    def evict_adapter(self, node: int, now: float, *, other_blocks: int = 0, dropped: bool = False) -> None:
        """Free an adapter's device blocks.

        Args:
            node: at rest there.
            now: the time.
            other_blocks: freed with it, for the report.
            dropped: because it was asked for, not to make room.
        """
        entry = self._tree.adapters[node]
        blocks = len(entry.device_blocks) + other_blocks
        self._eviction.removed([node], now)
        self._counters.left([node])
        self._tiers.drop_adapter(node)
        self.evicted.append(entry.ref.digest)
        self.events.append(AdapterEvicted(entry.ref.digest, now, blocks * self._block_bytes, dropped))
        self.offer(node)

    def forget_if_empty(self, nodes: Sequence[int]) -> None:
        """Take KV out of the tree whose bytes are nowhere and that nothing is below, and earlier KV likewise."""
        tree, at = self._tree, np.asarray(nodes, np.int64)
        empty = dict.fromkeys(at[is_nowhere(tree, at)].tolist())
        if not empty:
            return
        gone: dict[int, None] = {}
        below: dict[int, int] = {}
        children, parents = tree.children.item, tree.parent.item
        for node in empty:
            while not (node in gone or below.get(node, children(node))) and (node in empty or is_nowhere(tree, node)):
                gone[node] = None
                parent = parents(node)
                below[parent] = below.get(parent, children(parent)) - 1
                node = parent
        if gone:
            self._forget_kv(list(gone))
            for node in below.keys() - gone.keys():
                self.offer(node)

    def free_kv(self, nodes: Sequence[int], now: float) -> int:
        """Free the blocks of resting KV on both tiers, take it out of the tree, and return how many they were.

        Args:
            nodes: later KV first, with all that is below.
            now: the time.
        """
        tree = self._tree
        on_device = [node for node in nodes if tree.on_device[node]]
        self._eviction.removed(on_device, now)
        self._counters.left(on_device)
        self._tiers.drop_kv(on_device)
        on_host = [node for node in nodes if tree.on_host[node]]
        self._tiers.drop_kv_from_host(on_host)
        self._forget_kv(nodes)
        return len(on_device) + len(on_host)

    def discard(self, node: int, now: float) -> None:
        """Free KV that nobody needs and nothing is below, and earlier KV that is empty then."""
        tree, parent = self._tree, int(self._tree.parent[node])
        if tree.kind[node] == NodeKind.KV and not (tree.pins[node] or tree.children[node] or tree.moving[node]):
            self.free_kv([node], now)
            self.offer(parent)
            self.forget_if_empty([parent])

    def forget_adapter(self, node: int) -> None:
        """Take an adapter out of the tree."""
        self._tree.remove_adapter(node)
        self._eviction.forgotten([node])
        self._prefetch.forgotten([node])

    def _forget_kv(self, nodes: Sequence[int]) -> None:
        self._tree.remove_kv(nodes)
        self._eviction.forgotten(nodes)
        self._prefetch.forgotten(nodes)

    # --- the host ------------------------------------------------------------------------------------

    def make_host_room(self, blocks: int, now: float) -> bool:
        """See to it that so many host blocks can be leased for an adapter: KV leaves first, then other adapters.

        Nobody leaves if that would not suffice.
        """
        tiers = self._tiers
        if tiers.host.free < blocks:
            if tiers.host.free + evictable_host_blocks(self._tree) < blocks:
                return False
            self._score_adapters(self._host_queues, now)
        while tiers.host.free < blocks:
            if self._clear_host_of_kv(blocks):
                continue
            others = self._host_queues.first(NodeKind.ADAPTER, 1)
            if not others:
                return False
            tiers.drop_adapter_from_host(others[0])
        return True

    def make_host_room_for_kv(self, blocks: int = 1, before: int | None = None) -> int:
        """Let other KV leave the host; return how many of ``blocks`` blocks can be leased for KV then.

        Args:
            blocks: wanted.
            before: only KV leaves that scores less than this node, or lies deeper.
        """
        while self._tiers.host.free < blocks and self._clear_host_of_kv(blocks, before):
            pass
        return min(blocks, self._tiers.host.free)

    def copy_to_host(self, nodes: Sequence[int], now: float) -> None:
        """Begin to copy KV that is needed on the device to the host, too: of ``nodes`` the first that find room."""
        stored = nodes[: self.make_host_room_for_kv(len(nodes))] if self._rules.host_kv else ()
        if stored:
            self._eviction.removed(stored, now)  # so far; it is told when the copy has ended that they are there
            self._tiers.store_kv(stored[::-1], self._tiers.host.lease(len(stored)), now)

    def _clear_host_of_kv(self, blocks: int, before: int | None = None) -> bool:
        """Let KV of one branch leave the host towards so many free blocks; whether there was any that may leave."""
        tree, most = self._tree, blocks - self._tiers.host.free
        first = self._host_queues.first(NodeKind.KV, 1)
        if not first:
            return False
        if before is not None:
            score, limit = tree.score[[first[0], before]]
            if score == limit:  # then only what lies deeper
                most = min(most, int(tree.depth[first[0]] - tree.depth[before]))
            if score > limit or most <= 0:
                return False
        run = self._host_queues.run(first[0], most)
        self._tiers.drop_kv_from_host(run)
        self.forget_if_empty(run)
        return True

    # --- the inside ----------------------------------------------------------------------------------

    def check_queues(self) -> None:
        """See that nobody who may leave is overlooked; for tests and idle moments.

        Raises:
            BlockError: somebody is.
        """
        if overlooked := self._device_queues.overlooked() + self._host_queues.overlooked():
            raise BlockError(f"nodes {overlooked} may leave, and nobody would ask them to")

    def _free(self, area: _DeviceShare) -> int:
        return area.limit - sum(self._tiers.used_blocks[kind] for kind in area.kinds)

    def _unused(self, area: _DeviceShare) -> int:
        """Return what is free, or will be without evicting anybody else."""
        return self._free(area) + (self._tiers.blocks_being_freed if NodeKind.KV in area.kinds else 0)

    def _could_clear(self, area: _DeviceShare, blocks: int, now: float, below: float) -> bool:
        have = self._unused(area)
        if blocks <= have:
            return True
        if below == np.inf or blocks > self.available(area.kinds[0]):
            return blocks <= self.available(area.kinds[0])
        adapters = self._device_queues.candidates(NodeKind.ADAPTER)
        scores = self._eviction.scores(adapters, now)
        return blocks <= have + int(self._tree.size[adapters[scores < below]].sum())

    def _clear(self, area: _DeviceShare, blocks: int, now: float, below: float) -> bool:
        kinds = area.kinds if below == np.inf else (NodeKind.ADAPTER,)
        while (missing := blocks - self._unused(area)) > 0:
            nodes = self._first(kinds, missing, now)
            if not nodes or self._tree.score[nodes[0]] >= below:
                return False
            top = int(self._tree.top[nodes[0]])
            self._evict(nodes, now)
            if self._eviction.whole_branches:
                self._evict_branch(top, area, now)
        return self._free(area) >= blocks

    def _first(self, kinds: tuple[int, ...], most: int, now: float) -> list[int]:
        """Return who leaves first: an adapter, or up to ``most`` blocks of KV of one branch, later KV first.

        Adapters are compared with KV by what the policy adds to their scores.
        """
        tree, eviction = self._tree, self._eviction
        if NodeKind.ADAPTER in kinds:
            self._score_adapters(self._device_queues, now)
        firsts = {kind: nodes for kind in kinds if (nodes := self._device_queues.first(kind, eviction.proposals))}
        offsets = {NodeKind.KV: 0.0, NodeKind.ADAPTER: eviction.adapter_offset(now) if len(firsts) > 1 else 0.0}
        ranked = [(float(tree.score[node]) + offsets[kind], node) for kind, nodes in firsts.items() for node in nodes]
        if not ranked:
            return []
        ranked.sort(key=lambda item: item[0])
        node = eviction.choose([node for _, node in ranked[: eviction.proposals]], now)
        is_alone = eviction.proposals > 1 or eviction.whole_branches or tree.kind[node] == NodeKind.ADAPTER
        return [node] if is_alone else self._device_queues.run(node, most)

    def _score_adapters(self, leaving: EvictionQueues, now: float) -> None:
        """Ask for the scores of all adapters that may leave a tier, where they depend on who else is there."""
        if self._eviction.rescored_at_eviction:
            adapters = leaving.candidates(NodeKind.ADAPTER)
            self._tree.score[adapters] = self._eviction.scores(adapters, now)
            self._device_queues.forget(NodeKind.ADAPTER)
            self._host_queues.forget(NodeKind.ADAPTER)

    def _evict(self, nodes: list[int], now: float) -> None:
        if self._tree.kind[nodes[0]] == NodeKind.ADAPTER:
            self.evict_adapter(nodes[0], now)
        else:
            self.evict_kv(nodes, now)

    def _evict_branch(self, top: int, area: _DeviceShare, now: float) -> None:
        """Let everything leave that may below an adapter, and the adapter."""
        tree = self._tree
        branch = np.flatnonzero((tree.top[: tree.end] == top) & tree.on_device[: tree.end])
        for node in branch[np.argsort(-tree.depth[branch], kind="stable")].tolist():
            if tree.kind[node] in area.kinds and self._device_queues.allows(node):
                self._evict([node], now)
