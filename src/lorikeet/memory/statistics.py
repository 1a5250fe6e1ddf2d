"""Counts the memory's statistics: bytes by kind and tier, cache hits, packing waste, transfers, and time of ticks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lorikeet.core.messages import DecisionTimes, MemoryStats, RouteStats, TierBytes
from lorikeet.memory.options import MemoryOptions
from lorikeet.memory.tiers import Tiers
from lorikeet.memory.tree import BASE, NodeKind, NodeTransfer

_OBSERVE_EVERY_S = 0.1


@dataclass
class _Shares:
    """Integrates block counts over time, in block seconds, with samples every ``_OBSERVE_EVERY_S``."""

    invalid: float = 0.0
    unpinned: float = 0.0


class MemoryCounters:
    """Counts cache hits, prefetches and tick times. ``MemoryStats`` defines each number.

    Args:
        tiers: has the block accounts.
        options: memory options of the preset.
    """

    def __init__(self, tiers: Tiers, options: MemoryOptions) -> None:
        self._tiers = tiers
        self._dependent = options.dependent
        self._adapter_queries = self._adapter_hits = 0
        self._kv_queries_tokens = self._kv_hits_tokens = self._kv_host_hits_tokens = 0
        self._prefetched = self._prefetched_used = 0
        self._unused: dict[int, bytes] = {}
        self._decisions = DecisionTimes()
        self._shares = _Shares()
        self._observed_s: float | None = None

    def arrived(self, adapter: int, path: Sequence[int], block_size: int, query_tokens: int) -> None:
        """Count the blocks that a new request needs, and the number of them on the device.

        A hit on the host counts as a miss. So does KV on the device whose adapter or earlier KV is not on the device
        (ELORA spec, R14 and R17).
        """
        tree = self._tiers.tree
        if adapter != BASE:
            self._adapter_queries += 1
            self._adapter_hits += bool(tree.on_device[adapter])
        there = tree.on_device[list(path)] if path and tree.on_device[adapter] else np.zeros(0, np.bool_)
        on_device = int(np.argmin(there)) if not there.all() else len(there)
        self._kv_queries_tokens += query_tokens
        self._kv_hits_tokens += on_device * block_size
        self._kv_host_hits_tokens += (len(path) - on_device) * block_size

    def admitted(self, adapter: int, path: Sequence[int]) -> tuple[int, ...]:
        """Count and return the prefetched nodes that an admitted request is the first to use."""
        tree = self._tiers.tree
        used = [node for node in (adapter, *path) if node in self._unused]
        first = tuple(node for node in used if self._unused.pop(node) == tree.key_of(node))
        self._prefetched_used += len(first)
        return first

    def prefetched(self, node: int) -> None:
        """Count the start of a prefetch to the device."""
        self._prefetched += 1
        self._unused[node] = self._tiers.tree.key_of(node)

    def removed(self, nodes: Sequence[int]) -> None:
        """Record that nodes were evicted from the device, or failed to arrive."""
        for node in nodes if self._unused else ():
            self._unused.pop(node, None)

    def ticked(self, seconds: float) -> None:
        """Record the wall time of a tick of the swapper."""
        old = self._decisions
        self._decisions = DecisionTimes(old.count + 1, old.total_s + seconds, max(old.worst_s, seconds))

    def observe(self, now: float) -> None:
        """Sample the device at intervals, for averages over time."""
        if self._observed_s is None:
            self._observed_s = now
        passed_s = now - self._observed_s
        if passed_s < _OBSERVE_EVERY_S:
            return
        self._observed_s = now
        invalid, unpinned = self._invalid_blocks()
        self._shares.invalid += invalid * passed_s
        self._shares.unpinned += unpinned * passed_s

    def stats(self, block_bytes: int, waste_bytes: int, host_adapters: int) -> MemoryStats:
        """Return the current statistics.

        Args:
            block_bytes: size of a block in bytes.
            waste_bytes: number of bytes in device blocks of adapters that hold no weights.
            host_adapters: number of adapters on the host.
        """
        device = self._tiers.counts()
        host = self._tiers.host_counts()
        cached = self._tiers.cached_blocks
        invalid, _ = self._invalid_blocks()
        shares = self._shares
        return MemoryStats(
            device=TierBytes(
                total=self._tiers.device.total * block_bytes,
                free=device.free * block_bytes,
                adapters=(device.adapter + cached[NodeKind.ADAPTER]) * block_bytes,
                kv_running=device.kv * block_bytes,
                kv_cached=cached[NodeKind.KV] * block_bytes,
                inflight=device.inflight * block_bytes,
            ),
            host=TierBytes(
                total=self._tiers.host.total * block_bytes,
                free=host.free * block_bytes,
                adapters=host.adapter * block_bytes,
                kv_running=0,
                kv_cached=host.kv * block_bytes,
                inflight=host.inflight * block_bytes,
            ),
            host_adapters=host_adapters,
            packing_waste_bytes=waste_bytes,
            invalid_kv_bytes=invalid * block_bytes,
            invalid_kv_share=shares.invalid / shares.unpinned if shares.unpinned else 0.0,
            adapter_queries=self._adapter_queries,
            adapter_hits=self._adapter_hits,
            kv_queries_tokens=self._kv_queries_tokens,
            kv_hits_tokens=self._kv_hits_tokens,
            kv_host_hits_tokens=self._kv_host_hits_tokens,
            transfers={
                f"{source}-{target}": RouteStats(
                    total.transfers, total.blocks * block_bytes, total.failed, total.busy_s
                )
                for (source, target), total in sorted(self._tiers.totals.items())
            },
            prefetched=self._prefetched,
            prefetched_used=self._prefetched_used,
            decisions=self._decisions,
            nodes=len(self._tiers.tree),
            metadata_bytes=self._tiers.tree.metadata_bytes(),
        )

    def _invalid_blocks(self) -> tuple[int, int]:
        """Return the number of invalid unpinned KV blocks on the device, and of all unpinned ones.

        A block is invalid if its adapter or earlier KV is not on the device.
        """
        tree = self._tiers.tree
        away = tree.tops[~tree.on_device[tree.tops]]
        if self._dependent and not (tree.has_mixed_branches or tree.children_on_device[away].any()):
            return 0, self._tiers.cached_blocks[NodeKind.KV]
        end = self._tiers.tree.end
        is_kv = tree.kind[:end] == NodeKind.KV
        there = tree.on_device[:end]
        rests = is_kv & there & (tree.pins[:end] == 0) & (tree.moving[:end] == NodeTransfer.NO)
        unpinned = np.flatnonzero(rests)
        if self._dependent:  # in this case only the adapter can be missing
            valid = there[tree.top[unpinned]]
        else:
            valid_everywhere = there.copy()
            above = np.where(is_kv, tree.parent[:end], np.arange(end))
            # The number of covered ancestors doubles with each round
            for _ in range(int(tree.depth[:end].max()).bit_length()):
                valid_everywhere &= valid_everywhere[above]
                above = above[above]
            valid = valid_everywhere[unpinned]
        return len(unpinned) - int(np.count_nonzero(valid)), len(unpinned)
