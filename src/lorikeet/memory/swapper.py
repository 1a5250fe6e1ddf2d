"""Decides what moves without anybody waiting for it: every tick, and what is read into the host tier.

A tick (ELORA §VI-C) rescores all nodes. If the device is full, or somebody has found too few free blocks since the
last tick, it lets the lowest leave until ``evict_to`` of it is in use; if less than ``prefetch_below`` is, it brings
what scores highest. In between it does nothing. Nothing here waits: transfers end on their own.
"""

import math
import time
from collections import OrderedDict
from itertools import islice

from lorikeet.core.plan import PACKING_ORDER, LoadOrder, Tier
from lorikeet.memory.eviction import Evictor
from lorikeet.memory.policies.base import EvictionPolicy, PrefetchPolicy, is_prefetchable
from lorikeet.memory.rules import MemoryRules
from lorikeet.memory.statistics import MemoryCounters
from lorikeet.memory.tiers import Tiers
from lorikeet.memory.transfers import KV_BLOCKS_PER_TRANSFER, InflightTransfer
from lorikeet.memory.tree import NodeKind

_MAX_HOST_READS = 2
"""Reads into the host tier that nobody waits for, at a time."""
_MAX_PREFETCH_LOADS = 8
"""The same of those to the device: enough for readers until the next tick. More would take blocks long before their
bytes come, and what is wanted may have changed by then."""
_HOST_PREFETCH_SHARE = 0.5
"""What nobody waits for leaves the rest of the host tier to KV, where KV goes there."""
_EVICTIONS_PER_TICK = 64
_PREFETCHES_PER_TICK = 256
"""A tick takes its time from the steps; what is left to do, the next one does."""
_RETRY_S = 5.0
"""After a transfer of an adapter has failed it is not prefetched for so long. Nor is any read into the host tier after
one of those reads has failed, unless another succeeds: all files may be out of reach."""


class Swapper:
    """See the module.

    Args:
        tiers: carries the moves out.
        room: finds room.
        eviction, prefetch: the row's policies.
        rules: of the row.
        counters: are told what it did.
    """

    def __init__(
        self,
        tiers: Tiers,
        room: Evictor,
        eviction: EvictionPolicy,
        prefetch: PrefetchPolicy,
        rules: MemoryRules,
        counters: MemoryCounters,
    ) -> None:
        self._tiers = tiers
        self._tree = tiers.tree
        self._evictor = room
        self._eviction = eviction
        self._prefetch = prefetch
        self._rules = rules
        self._counters = counters
        self._most_unasked = (_HOST_PREFETCH_SHARE if rules.host_kv and rules.keep_kv else 1.0) * tiers.host.total
        self._unread: OrderedDict[int, None] = OrderedDict()
        self._reads = 0
        self._read_again_s = -math.inf
        self._retry_s: dict[int, float] = {}
        self._due_s = 0.0 if rules.tick_s else math.inf
        self._resting = True
        self._clearing = False
        self._expected_s = math.inf

    @property
    def due_s(self) -> float:
        """When the next tick or prefetch is due; ``inf`` if none is."""
        return min(self._due_s, self._expected_s)

    @property
    def rests_until_s(self) -> float:
        """The same, if nothing happens: a tick does nothing after one that has moved nothing."""
        return self._expected_s if self._resting else self.due_s

    def stir(self) -> None:
        """Something has happened that may let the next tick move something."""
        self._resting = False

    def tick(self, now: float) -> None:
        """Do what is due. Called by the loop between steps; the clock's time, never the machine's, decides."""
        self._counters.observe(now)
        if now < self._due_s:
            return
        self._due_s = now + self._rules.tick_s
        started_s = time.perf_counter()
        self._evictor.rescore_all(now)
        under_way = len(self._tiers.transfers)
        total, unused = self._tiers.device.total, self._evictor.unused()
        wanted = round((1 - self._rules.evict_to) * total)
        is_full = unused == 0 or self._evictor.demand_failed
        self._evictor.demand_failed = False
        self._clearing = (is_full or self._clearing) and unused < wanted
        if self._clearing:
            self._evictor.clear(wanted, now, _EVICTIONS_PER_TICK)
        elif self._prefetch.fills and total - unused < self._rules.prefetch_below * total:
            self._fill(round((1 - self._rules.prefetch_below) * total), now)
        self._resting = len(self._tiers.transfers) == under_way and not self._clearing
        self._counters.decided(time.perf_counter() - started_s)

    def after_admission(self, now: float) -> None:
        """Read known adapters into the host tier, and prefetch by policies that use whatever memory is free.

        Called once the waiting requests have had their turn.
        """
        self._read_ahead(now)
        self._expected_s = self._read_again_s if self._unread and now < self._read_again_s else math.inf
        if not self._prefetch.fills:
            self._fill(0, now)
            self._expected_s = min(self._expected_s, self._prefetch.due_s(now))

    def load(self, node: int, now: float, *, demand: bool, order: LoadOrder = PACKING_ORDER) -> InflightTransfer:
        """Begin to bring an adapter to the device, its blocks in an ``order``; its room has been made.

        It is read through the host tier, and stays there, too, as far as there is room: on ``demand`` that is made.
        """
        tiers, entry, host_blocks = self._tiers, self._tree.adapters[node], []
        if not self._tree.on_host[node]:
            size = entry.host_size
            has_room = self._evictor.make_host_room(size, now) if demand else self._has_room_unasked(size)
            host_blocks = tiers.host.lease(size) if has_room else []
        blocks = tiers.device.lease(int(self._tree.size[node]))
        return tiers.fetch_adapter(node, blocks, host_blocks, now, demand=demand, order=order)

    def note_known(self, node: int) -> None:
        """A new adapter is to be read into the host tier when there is room."""
        self.stir()
        self._await_read(node)

    def forget(self, node: int) -> None:
        """An adapter was taken out of the tree."""
        self._unread.pop(node, None)
        self._retry_s.pop(node, None)

    def note_transfer_end(self, inflight: InflightTransfer, error: str | None, now: float) -> None:
        """A transfer has ended."""
        self.stir()
        if error is not None:
            self._counters.left(inflight.nodes)
        if inflight.transfer.adapter is None:
            return
        node = inflight.nodes[0]
        if inflight.transfer.target is Tier.HOST:
            self._reads -= 1
            self._read_again_s = -math.inf if error is None else now + _RETRY_S
        if error is not None:
            self._retry_s[node] = now + _RETRY_S
            self._await_read(node)

    def reads_ahead(self, now: float) -> bool:
        """Whether adapters are still to be read into the host tier, and can be."""
        return bool(self._reads or self._next_unread(now) is not None)

    def _await_read(self, node: int) -> None:
        """Let an adapter be read into the host tier after all others."""
        if self._tiers.host.total:
            self._unread[node] = None
            self._unread.move_to_end(node)

    def _fill(self, leave_free: int, now: float) -> None:
        """Bring nodes to the device as long as more than ``leave_free`` blocks stay unused."""
        tree = self._tree
        batch: list[int] = []
        refused: dict[float, int] = {}  # by what may be evicted, the least room that could not be made so
        loads = sum(
            inflight.transfer.source is Tier.SOURCE and inflight.transfer.target is Tier.DEVICE and not inflight.demand
            for inflight in self._tiers.transfers.values()
        )
        for node in islice(self._prefetch.targets(now), _PREFETCHES_PER_TICK):
            if not is_prefetchable(tree, node) or self._retry_s.get(node, now) > now:
                continue
            is_read = tree.kind[node] == NodeKind.ADAPTER and not tree.on_host[node]
            if is_read and loads >= _MAX_PREFETCH_LOADS:
                continue
            size = int(tree.size[node])
            short = size + len(batch) + leave_free - self._tiers.device.free
            below = self._prefetch.evicts_below(node) if short > 0 else -math.inf
            if short > 0 and below == -math.inf:
                break
            if tree.kind[node] == NodeKind.KV:
                batch.append(node)
                continue
            if size >= refused.get(below, math.inf):  # room only becomes less meanwhile
                continue
            self._fetch(batch, now)  # first, as it was named first
            batch = []
            if self._evictor.make(0, size, now, below):
                self._note(self.load(node, now, demand=False), now)
                loads += is_read
            else:
                refused[below] = size
        self._fetch(batch, now)

    def _fetch(self, batch: list[int], now: float) -> None:
        """Begin to bring KV to the device, some blocks to a transfer."""
        for begin in range(0, len(batch), KV_BLOCKS_PER_TRANSFER):
            nodes = batch[begin : begin + KV_BLOCKS_PER_TRANSFER]
            blocks = self._tiers.device.lease(len(nodes))
            self._note(self._tiers.fetch_kv(nodes, blocks, now, demand=False), now)

    def _note(self, inflight: InflightTransfer, now: float) -> None:
        for node in inflight.nodes:
            self._prefetch.fetched(node, now)
            self._counters.prefetched(node)

    def _read_ahead(self, now: float) -> None:
        while self._reads < _MAX_HOST_READS and (node := self._next_unread(now)) is not None:
            del self._unread[node]
            self._reads += 1
            blocks = self._tiers.host.lease(self._tree.adapters[node].host_size)
            self._tiers.read_to_host(node, blocks, now)

    def _next_unread(self, now: float) -> int | None:
        """Return the next adapter to read into the host tier, None if there is none or no room, or it is too early."""
        tree, most = self._tree, self._most_unasked  # one that is larger by itself must not keep others from being read
        while self._unread and now >= self._read_again_s:
            node = next(iter(self._unread))
            entry = tree.adapters[node]
            if entry.retired or tree.on_host[node] or tree.moving[node] or entry.host_size > most:
                del self._unread[node]
                continue
            return node if self._has_room_unasked(entry.host_size) else None
        return None

    def _has_room_unasked(self, blocks: int) -> bool:
        """Whether the host tier has so many blocks for an adapter that nobody asks for: nothing leaves it for that."""
        host = self._tiers.host
        return host.total - host.free + blocks <= self._most_unasked
