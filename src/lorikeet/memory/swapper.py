"""Moves adapters and KV ahead of demand: periodic eviction and prefetch, and reads into the host tier.

A tick (ELORA §VI-C) rescores all nodes, unless no score can have changed. If the device is full, or an allocation has
failed since the last tick, the tick evicts the lowest scores until ``EVICT_TO`` of the device is in use. If less than
``PREFETCH_BELOW`` is in use, the tick prefetches the highest scores. Otherwise the tick does nothing. The swapper never
waits for a transfer.
"""

import math
import time
from collections import OrderedDict
from itertools import islice

from lorikeet.core.plan import PACKING_ORDER, LoadOrder, Tier
from lorikeet.memory.eviction import Evictor
from lorikeet.memory.options import MemoryOptions
from lorikeet.memory.policies.base import (
    EvictionPolicy,
    MemoryView,
    PrefetchPolicy,
    is_prefetchable,
)
from lorikeet.memory.reuse import KvReuse
from lorikeet.memory.shadows import COPIES_IN_FLIGHT, EVICTIONS_PER_TICK, RESERVED_SHARE
from lorikeet.memory.statistics import MemoryCounters
from lorikeet.memory.tiers import Tiers
from lorikeet.memory.transfer_records import KV_BLOCKS_PER_TRANSFER, InflightTransfer
from lorikeet.memory.tree import NodeKind
from lorikeet.presets import HostKv

_MAX_HOST_READS = 2
"""Largest number of prefetching reads into the host tier in flight."""
_MAX_PREFETCH_LOADS = 8
"""Largest number of prefetching reads to the device in flight.

The number keeps the readers busy until the next tick. More reads would lease blocks long before they are filled, while
requests may need other adapters.
"""
_HOST_PREFETCH_SHARE = 0.5
"""Share of the host tier that prefetched adapters may use. The rest is for KV, if the preset stores KV on the host."""
PREFETCH_BELOW = 0.7
"""Share of the device up to which the swapper prefetches."""
EVICT_TO = 1 - RESERVED_SHARE
"""Share of the device that stays in use when the swapper evicts from a full device."""
_PREFETCHES_PER_TICK = 256
"""Limits of one tick, which delays the next step; the next tick continues."""
_RETRY_S = 5.0
"""Seconds for which an adapter is not prefetched after its transfer has failed.

After a failed read into the host tier, no other such read starts for the same time, unless a read succeeds, because all
files may be unreachable.
"""


class Swapper:
    """Evicts and prefetches between steps, by the policies and options of the preset.

    Args:
        tiers: starts the transfers.
        evictor: frees blocks.
        eviction, prefetch: policies of the preset.
        options: memory options of the preset.
        counters: counts prefetches and ticks.
        view: computes the expected times of steps and copies.
        reuse: estimates the reused share of each adapter's KV.
    """

    def __init__(
        self,
        tiers: Tiers,
        evictor: Evictor,
        eviction: EvictionPolicy,
        prefetch: PrefetchPolicy,
        options: MemoryOptions,
        counters: MemoryCounters,
        view: MemoryView,
        reuse: KvReuse,
    ) -> None:
        self._tiers = tiers
        self._tree = tiers.tree
        self._evictor = evictor
        self._view = view
        self._reuse = reuse
        self._eviction = eviction
        self._prefetch = prefetch
        self._options = options
        self._counters = counters
        prefetch_share = _HOST_PREFETCH_SHARE if options.host_kv is not HostKv.NONE and options.keep_kv else 1.0
        self._max_prefetched_host_blocks = prefetch_share * tiers.host.total
        self._to_read: OrderedDict[int, None] = OrderedDict()
        self._reads = 0
        self._reads_paused_until_s = -math.inf
        self._retry_s: dict[int, float] = {}
        self._due_s = 0.0 if options.tick_s else math.inf
        self._is_idle = True
        self._is_evicting = False
        self._next_prefetch_s = math.inf

    @property
    def due_s(self) -> float:
        """Time of the next tick or prefetch; ``inf`` if none is due."""
        return min(self._due_s, self._next_prefetch_s)

    @property
    def idle_until_s(self) -> float:
        """Time of the next tick or prefetch in an idle engine.

        After a tick that moved nothing, further ticks are not needed.
        """
        return self._next_prefetch_s if self._is_idle else self.due_s

    def wake(self) -> None:
        """Record a change of the memory, so that the next tick runs."""
        self._is_idle = False

    def tick(self, now: float) -> None:
        """Evict and prefetch if a tick is due.

        The engine loop calls this method between steps, with its clock's time.
        """
        self._counters.observe(now)
        if now < self._due_s:
            return
        self._due_s = now + self._options.tick_s
        started_s = time.perf_counter()
        if self._eviction.scores_changed():
            self._evictor.rescore_all(now)
        in_flight = len(self._tiers.transfers)
        total = self._tiers.device.total
        unused = self._evictor.unused()
        if self._evictor.copies_ahead and total - unused >= PREFETCH_BELOW * total:
            self._copy_ahead(now)
        wanted = round((1 - EVICT_TO) * total)
        is_full = unused == 0 or self._evictor.allocation_failed
        self._evictor.allocation_failed = False
        evicts_early = self._evictor.copies_at_eviction  # other evicted blocks become free immediately
        self._is_evicting = evicts_early and (is_full or self._is_evicting) and unused < wanted
        if self._is_evicting:
            self._evictor.evict_until_free(wanted, now, EVICTIONS_PER_TICK)
        elif self._prefetch.below_watermark_only and self._has_room(total - unused):
            self._prefetch_nodes(round((1 - PREFETCH_BELOW) * total), now)
        self._is_idle = len(self._tiers.transfers) == in_flight and not self._is_evicting
        self._counters.ticked(time.perf_counter() - started_s)

    def _has_room(self, used: int) -> bool:
        """Return whether the swapper prefetches while this many blocks of the device are in use."""
        below = PREFETCH_BELOW * self._tiers.device.total
        return used < below or used - self._evictor.worthless() < below

    def after_admission(self, now: float) -> None:
        """Read registered adapters into the host tier, and run prefetch policies that use all free memory.

        The scheduler calls this method after admission, so that waiting requests get blocks first.
        """
        self._start_host_reads(now)
        is_paused = self._to_read and now < self._reads_paused_until_s
        self._next_prefetch_s = self._reads_paused_until_s if is_paused else math.inf
        if not self._prefetch.below_watermark_only:
            self._prefetch_nodes(0, now)
            self._next_prefetch_s = min(self._next_prefetch_s, self._prefetch.due_s(now))

    def load(self, node: int, now: float, *, demand: bool, order: LoadOrder = PACKING_ORDER) -> InflightTransfer:
        """Begin to load an adapter to the device, which has enough free blocks for it.

        An adapter that is not on the host is read through the host tier and stays there, if host blocks are free. On
        ``demand``, other nodes are evicted from the host to free blocks.

        Args:
            node: node of the adapter, which is neither on the device nor in a transfer.
            now: the time.
            demand: whether a sequence waits for it.
            order: order in which the adapter's blocks arrive.
        """
        tiers = self._tiers
        entry = self._tree.adapters[node]
        host_blocks = []
        if not self._tree.on_host[node]:
            size = entry.host_size
            fits = self._evictor.ensure_host_free(size, now) if demand else self._fits_prefetch_share(size)
            host_blocks = tiers.host.lease(size) if fits else []
        blocks = tiers.device.lease(self._tree.missing_blocks(node))
        return tiers.fetch_adapter(node, blocks, host_blocks, now, demand=demand, order=order)

    def adapter_registered(self, node: int) -> None:
        """Queue a new adapter to be read into the host tier."""
        self.wake()
        self._queue_host_read(node)

    def forget(self, node: int) -> None:
        """Drop an adapter that was removed from the tree."""
        self._to_read.pop(node, None)
        self._retry_s.pop(node, None)

    def note_transfer_end(self, inflight: InflightTransfer, error: str | None, now: float) -> None:
        """Record the end of a transfer. An adapter whose transfer failed is queued for a host read again."""
        self.wake()
        if error is not None:
            self._counters.removed(inflight.nodes)
        if inflight.transfer.adapter is None:
            return
        node = inflight.nodes[0]
        if inflight.transfer.target is Tier.HOST:
            self._reads -= 1
            self._reads_paused_until_s = -math.inf if error is None else now + _RETRY_S
        if error is not None:
            self._retry_s[node] = now + _RETRY_S
            self._queue_host_read(node)

    def has_host_reads(self, now: float) -> bool:
        """Return whether reads into the host tier are in flight, or can be started now."""
        return bool(self._reads or self._next_to_read(now) is not None)

    def _copy_ahead(self, now: float) -> None:
        """Copy KV that will be evicted soon to the host, if loading it again would save time."""
        tiers = self._tiers
        lead = self._evictor.lead
        cached = self._tiers.cached_blocks[NodeKind.KV]
        most = min(COPIES_IN_FLIGHT, lead.at_a_time(cached, now)) - tiers.blocks_being_copied
        if tiers.host.total and most > 0 and self._view.loading_kv_pays(1):
            self._evictor.copy_ahead(most, lead.soon(cached, now), self._reuse.are_copied, now)

    def _queue_host_read(self, node: int) -> None:
        """Queue an adapter to be read into the host tier, after all other queued adapters."""
        if self._tiers.host.total:
            self._to_read[node] = None
            self._to_read.move_to_end(node)

    def _prefetch_nodes(self, leave_free: int, now: float) -> None:
        """Prefetch the nodes that the policy names, as long as more than ``leave_free`` device blocks stay free."""
        tree = self._tree
        batch: list[int] = []
        refused: dict[float, int] = {}  # smallest size for which eviction did not free enough, by score limit
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
            size = tree.missing_blocks(node)
            short = size + len(batch) + leave_free - self._tiers.device.free
            if short > 0 and self._evictor.copies_ahead:
                self._evictor.evict_worthless(size + len(batch) + leave_free, now)
                short = size + len(batch) + leave_free - self._tiers.device.free
            below = self._prefetch.evicts_below(node) if short > 0 else -math.inf
            if short > 0 and below == -math.inf:
                break
            if tree.kind[node] == NodeKind.KV:
                batch.append(node)
                continue
            if size >= refused.get(below, math.inf):  # free memory can only shrink in this loop
                continue
            self._fetch_kv(batch, now)  # first, because the policy named it first
            batch = []
            self._tiers.pin([node])  # pinned, so that its kept blocks are not evicted to load the rest
            is_free = self._evictor.ensure_free(0, size, now, below)
            self._tiers.unpin([node])
            if is_free:
                self._note_prefetch(self.load(node, now, demand=False), now)
                loads += is_read
            else:
                refused[below] = size
                self._evictor.offer(node)
        self._fetch_kv(batch, now)

    def _fetch_kv(self, batch: list[int], now: float) -> None:
        """Begin to copy KV to the device, with ``KV_BLOCKS_PER_TRANSFER`` blocks per transfer."""
        for begin in range(0, len(batch), KV_BLOCKS_PER_TRANSFER):
            nodes = batch[begin : begin + KV_BLOCKS_PER_TRANSFER]
            blocks = self._tiers.device.lease(len(nodes))
            self._note_prefetch(self._tiers.fetch_kv(nodes, blocks, now, demand=False), now)

    def _note_prefetch(self, inflight: InflightTransfer, now: float) -> None:
        for node in inflight.nodes:
            self._prefetch.fetched(node, now)
            self._counters.prefetched(node)

    def _start_host_reads(self, now: float) -> None:
        while self._reads < _MAX_HOST_READS and (node := self._next_to_read(now)) is not None:
            del self._to_read[node]
            self._reads += 1
            blocks = self._tiers.host.lease(self._tree.adapters[node].host_size)
            self._tiers.read_to_host(node, blocks, now)

    def _next_to_read(self, now: float) -> int | None:
        """Return the next adapter to read into the host tier; None if no queued adapter fits or reads are paused."""
        tree = self._tree
        limit = self._max_prefetched_host_blocks
        while self._to_read and now >= self._reads_paused_until_s:
            node = next(iter(self._to_read))
            entry = tree.adapters[node]
            # An adapter larger than the limit is skipped, so that it does not block the adapters behind it.
            if entry.retired or tree.on_host[node] or tree.moving[node] or entry.host_size > limit:
                del self._to_read[node]
                continue
            return node if self._fits_prefetch_share(entry.host_size) else None
        return None

    def _fits_prefetch_share(self, blocks: int) -> bool:
        """Return whether a prefetched adapter of this many blocks fits the host tier without an eviction."""
        host = self._tiers.host
        return host.total - host.free + blocks <= self._max_prefetched_host_blocks
