"""Makes room on both tiers: asks the eviction policy who leaves first, and lets them leave."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lorikeet.core.events import AdapterEvent, AdapterEvicted
from lorikeet.core.ids import AdapterDigest
from lorikeet.memory.blocks import BlockError
from lorikeet.memory.flights import Flight
from lorikeet.memory.leases import Wait
from lorikeet.memory.policies.base import Eviction, Prefetch
from lorikeet.memory.rules import MemoryRules
from lorikeet.memory.statistics import MemoryCounters
from lorikeet.memory.tiers import Tiers
from lorikeet.memory.tree import Kind, Moving, Nodes
from lorikeet.memory.victims import Victims


class _Area(NamedTuple):
    """A part of the device within which blocks are lent.

    Attributes:
        kinds: what it is for.
        limit: its blocks.
    """

    kinds: tuple[int, ...]
    limit: int


class Room:
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
        eviction: Eviction,
        prefetch: Prefetch,
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
            self._areas: tuple[_Area, ...] = (_Area((Kind.KV, Kind.ADAPTER), total),)
        else:
            adapters = int(rules.adapter_share * total)
            self._areas = (_Area((Kind.ADAPTER,), adapters), _Area((Kind.KV,), total - adapters))
        self._leaving = {
            kind: Victims(self._tree, partial(self._candidates, kind), self._may_leave)
            for kind in (Kind.KV, Kind.ADAPTER)
        }
        self._host_leaving = {
            kind: Victims(self._tree, partial(self._host_candidates, kind), self._may_leave_host)
            for kind in (Kind.KV, Kind.ADAPTER)
        }
        self.demand_failed = False
        self.evicted: list[AdapterDigest] = []
        self.events: list[AdapterEvent] = []

    # --- the device ----------------------------------------------------------------------------------

    def limit(self, kind: int) -> int:
        """Return the most device blocks that a kind may ever take."""
        return next(area.limit for area in self._areas if kind in area.kinds)

    def why_impossible(self, kv: int, adapter: int) -> str | None:
        """Return why so many blocks for KV and for an adapter could never be there at once, None if they could."""
        limits, total = (self.limit(Kind.KV), self.limit(Kind.ADAPTER)), self._tiers.device.total
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
            below: only nodes that score less may be evicted.
        """
        needs = [(area, sum({Kind.KV: kv, Kind.ADAPTER: adapter}[kind] for kind in area.kinds)) for area in self._areas]
        self.demand_failed |= below == np.inf and any(need > self._unused(area) for area, need in needs)
        for area, need in needs:
            if not self._could_clear(area, need, now, below):
                return False
        cleared = [self._clear(area, need, now, below) for area, need in needs if need]
        return all(cleared)

    def what_lacks(self, kv: int, adapter: int) -> Wait:
        """Return why room cannot be made for so many blocks of a request's KV and of its adapter."""
        if self._rules.adapter_share is not None and adapter > self.available(Kind.ADAPTER):
            return Wait.SLOT
        return Wait.ADAPTER_ROOM if adapter and kv <= self.available(Kind.KV) else Wait.ROOM

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
        """Ask for the scores of nodes that were used, or came."""
        tree = self._tree
        tree.score[nodes] = self._eviction.scores(nodes, now)
        for node in nodes[self._may_leave(nodes) | self._may_leave_host(nodes)].tolist():
            self.offer(node)

    def rescore_all(self, now: float) -> None:
        """Ask for all scores anew."""
        tree = self._tree
        nodes = np.flatnonzero(tree.kind[: tree.end] >= Kind.ADAPTER)
        tree.score[nodes] = self._eviction.scores(nodes, now)
        for victims in (*self._leaving.values(), *self._host_leaving.values()):
            victims.forget()

    def offer(self, node: int) -> None:
        """A node may have become one that can leave."""
        kind = int(self._tree.kind[node])
        if kind in self._leaving:
            self._leaving[kind].offer(node)
            self._host_leaving[kind].offer(node)

    def evict(self, node: int, now: float) -> None:
        """Let a node leave the device that may."""
        tree, tiers = self._tree, self._tiers
        if tree.kind[node] == Kind.ADAPTER:
            self.evict_adapter(node, now)
            return
        parent = int(tree.parent[node])
        self._eviction.removed(node, now)
        self._counters.left(node)
        if tree.on_host[node]:
            tiers.drop_from_device(node)
        elif self._rules.host_kv and self._make_host_room(1, adapters=False, before=node):
            tiers.store_kv(node, tiers.host.lease(1)[0], now)
        else:
            tiers.drop_from_device(node)
            self.forget_if_empty(node)
        self.offer(node)  # it may leave the host, too
        self.offer(parent)

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
        self._eviction.removed(node, now)
        self._counters.left(node)
        self._tiers.drop_from_device(node)
        self.evicted.append(entry.ref.digest)
        self.events.append(AdapterEvicted(entry.ref.digest, now, blocks * self._block_bytes, dropped))
        self.offer(node)

    def forget_if_empty(self, node: int) -> None:
        """Take KV out of the tree whose bytes are nowhere and that nothing is below, and earlier KV likewise."""
        tree = self._tree
        while (
            tree.kind[node] == Kind.KV
            and not (tree.on_device[node] or tree.on_host[node] or tree.moving[node] or tree.children[node])
            and not tree.pins[node]
        ):
            parent = int(tree.parent[node])
            self.forget(node)
            self.offer(parent)
            node = parent

    def free(self, node: int, now: float) -> int:
        """Free the blocks of resting KV on both tiers, take it out of the tree, and return how many they were."""
        tree, freed = self._tree, 0
        if tree.on_device[node]:
            self._eviction.removed(node, now)
            self._counters.left(node)
            self._tiers.drop_from_device(node)
            freed += 1
        if tree.on_host[node]:
            self._tiers.drop_from_host(node)
            freed += 1
        self.forget(node)
        return freed

    def discard(self, node: int, now: float) -> None:
        """Free KV that nobody needs and nothing is below, and earlier KV that is empty then."""
        tree, parent = self._tree, int(self._tree.parent[node])
        if tree.kind[node] == Kind.KV and not (tree.pins[node] or tree.children[node] or tree.moving[node]):
            self.free(node, now)
            self.offer(parent)
            self.forget_if_empty(parent)

    def forget(self, node: int) -> None:
        """Take a node out of the tree."""
        self._tree.remove(node)
        self._eviction.forgotten(node)
        self._prefetch.forgotten(node)

    # --- the host ------------------------------------------------------------------------------------

    def make_host_room(self, blocks: int) -> bool:
        """See to it that so many host blocks can be leased for an adapter: KV leaves first, then other adapters."""
        return self._make_host_room(blocks, adapters=True)

    def make_host_room_for_kv(self) -> bool:
        """See to it that a host block can be leased for KV: other KV leaves."""
        return self._make_host_room(1, adapters=False)

    def copy_to_host(self, node: int, now: float) -> Flight | None:
        """Begin to copy KV that is needed on the device to the host, too; None if there can be no room for it."""
        if not (self._rules.host_kv and self.make_host_room_for_kv()):
            return None
        self._eviction.removed(node, now)  # as far as it knows; it is told when the copy has ended that it is there
        return self._tiers.store_kv(node, self._tiers.host.lease(1)[0], now)

    def _make_host_room(self, blocks: int, *, adapters: bool, before: int | None = None) -> bool:
        """Let KV leave the host, and adapters if need be; nobody leaves if that would not suffice.

        Args:
            blocks: to be free.
            adapters: whether they may leave.
            before: only KV that leaves before this node.
        """
        tiers = self._tiers
        if blocks > 1 and not self._could_clear_host(blocks, adapters=adapters):
            return False
        while tiers.host.free < blocks:
            kv = self._host_leaving[Kind.KV].first()
            if kv and (before is None or self._leaves_before(kv[0], before)):
                tiers.drop_from_host(kv[0])
                self.forget_if_empty(kv[0])
                continue
            others = self._host_leaving[Kind.ADAPTER].first() if adapters else []
            if not others:
                return False
            tiers.drop_from_host(others[0])
        return True

    def _could_clear_host(self, blocks: int, *, adapters: bool) -> bool:
        tree, tiers = self._tree, self._tiers
        have = tiers.host.free
        if blocks <= have:
            return True
        every = slice(tree.end)
        rests = tree.on_host[every] & (tree.moving[every] == Moving.NO) & (tree.pins[every] == 0)
        have += int((rests & (tree.kind[every] == Kind.KV)).sum())
        if adapters and blocks > have:
            resting = np.flatnonzero(rests & (tree.kind[every] == Kind.ADAPTER)).tolist()
            have += sum(len(tree.adapters[node].host_blocks) for node in resting)
        return blocks <= have

    def _leaves_before(self, node: int, other: int) -> bool:
        """Whether a node scores less than another, or lies deeper."""
        tree = self._tree
        return (tree.score[node], -tree.depth[node]) < (tree.score[other], -tree.depth[other])

    # --- the inside ----------------------------------------------------------------------------------

    def check_queues(self) -> None:
        """See that nobody who may leave is overlooked; for tests and idle moments.

        Raises:
            BlockError: somebody is.
        """
        for victims in (*self._leaving.values(), *self._host_leaving.values()):
            if missing := victims.missing():
                raise BlockError(f"nodes {missing} may leave, and nobody would ask them to")

    def _free(self, area: _Area) -> int:
        return area.limit - sum(self._tiers.used_blocks[kind] for kind in area.kinds)

    def _unused(self, area: _Area) -> int:
        """Return what is free, or will be without evicting anybody else."""
        return self._free(area) + sum(self._tiers.leaving_blocks[kind] for kind in area.kinds)

    def _could_clear(self, area: _Area, blocks: int, now: float, below: float) -> bool:
        have = self._unused(area)
        if blocks <= have:
            return True
        if below == np.inf or blocks > self.available(area.kinds[0]):
            return blocks <= self.available(area.kinds[0])
        nodes = np.concatenate([self._candidates(kind) for kind in area.kinds])
        scores = self._eviction.scores(nodes, now)
        return blocks <= have + int(self._tree.size[nodes[scores < below]].sum())

    def _clear(self, area: _Area, blocks: int, now: float, below: float) -> bool:
        while self._unused(area) < blocks:
            node = self._first(area.kinds, now)
            if node is None or self._tree.score[node] >= below:
                return False
            top = int(self._tree.top[node])
            self.evict(node, now)
            if self._eviction.whole_branches:
                self._evict_branch(top, area, now)
        return self._free(area) >= blocks

    def _first(self, kinds: tuple[int, ...], now: float) -> int | None:
        """Return who leaves first. Adapters are compared with KV by what the policy adds to their scores."""
        tree, eviction = self._tree, self._eviction
        if Kind.ADAPTER in kinds and eviction.rescored_at_eviction:
            adapters = self._candidates(Kind.ADAPTER)
            tree.score[adapters] = eviction.scores(adapters, now)
            self._leaving[Kind.ADAPTER].forget()
            self._host_leaving[Kind.ADAPTER].forget()
        firsts = {kind: nodes for kind in kinds if (nodes := self._leaving[kind].first(eviction.proposals))}
        offsets = {Kind.KV: 0.0, Kind.ADAPTER: eviction.adapter_offset(now) if len(firsts) > 1 else 0.0}
        ranked = [(float(tree.score[node]) + offsets[kind], node) for kind, nodes in firsts.items() for node in nodes]
        if not ranked:
            return None
        ranked.sort(key=lambda item: item[0])
        proposed = [node for _, node in ranked[: eviction.proposals]]
        return eviction.choose(proposed, now)

    def _evict_branch(self, top: int, area: _Area, now: float) -> None:
        """Let everything leave that may below an adapter, and the adapter."""
        tree = self._tree
        branch = np.flatnonzero((tree.top[: tree.end] == top) & tree.on_device[: tree.end])
        for node in branch[np.argsort(-tree.depth[branch], kind="stable")].tolist():
            if tree.kind[node] in area.kinds and self._may_leave(node):
                self.evict(node, now)

    def _candidates(self, kind: int) -> Nodes:
        every = slice(self._tree.end)
        return np.flatnonzero((self._tree.kind[every] == kind) & self._may_leave(every))

    def _host_candidates(self, kind: int) -> Nodes:
        every = slice(self._tree.end)
        return np.flatnonzero((self._tree.kind[every] == kind) & self._may_leave_host(every))

    def _may_leave(self, at: int | slice | Nodes) -> Any:
        """Whether nodes may leave the device: bool, one or an array as ``at`` is one node or several."""
        tree = self._tree
        may = tree.on_device[at] & (tree.moving[at] == Moving.NO) & (tree.pins[at] == 0) & (tree.kind[at] != Kind.BASE)
        return may & (tree.children_on_device[at] == 0) if self._rules.dependent else may

    def _may_leave_host(self, at: int | slice | Nodes) -> Any:
        """Whether nodes may leave the host: KV only if nothing is below it. See :meth:`_may_leave`."""
        tree = self._tree
        may = tree.on_host[at] & (tree.moving[at] == Moving.NO) & (tree.pins[at] == 0)
        return may & ((tree.kind[at] == Kind.ADAPTER) | (tree.children[at] == 0))
