"""The registered adapters of the memory: their sizes, and how they are freed together with their KV."""

from collections.abc import Callable, Container, Iterable
from typing import NamedTuple

import numpy as np

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import AdapterEvicted
from lorikeet.core.ids import AdapterDigest
from lorikeet.core.plan import Tier
from lorikeet.memory.blocks import BlockError
from lorikeet.memory.eviction import Evictor
from lorikeet.memory.rules import MemoryRules
from lorikeet.memory.tiers import Tiers
from lorikeet.memory.tree import NodeKind, Nodes, NodeTransfer, Scores


class AdapterSize(NamedTuple):
    """Size of a packed adapter.

    Attributes:
        blocks: number of blocks.
        weight_bytes: bytes of the blocks that hold weights; the rest is waste.
    """

    blocks: int
    weight_bytes: int


class KnownAdapters:
    """Adds adapter versions to the tree, and frees them.

    Args:
        tiers: holds the block accounts.
        evictor: evicts adapters and their KV.
        rules: of the preset.
        size: returns the size of a packed adapter.
        block_bytes: bytes of a block, for events and statistics.
    """

    def __init__(
        self,
        tiers: Tiers,
        evictor: Evictor,
        rules: MemoryRules,
        size: Callable[[AdapterRef], AdapterSize],
        block_bytes: int,
    ) -> None:
        self._tiers = tiers
        self._tree = tiers.tree
        self._evictor = evictor
        self._rules = rules
        self._size = size
        self._block_bytes = block_bytes
        self._slot_blocks = 0

    def add(self, ref: AdapterRef) -> int:
        """Add a new version to the tree, and return its node."""
        return self._tree.add_adapter(ref, self.device_blocks(ref), self._size(ref).blocks)

    def device_blocks(self, ref: AdapterRef) -> int:
        """Return the blocks that a version takes on the device; with padded slots, those of the largest version so far.

        A version that can never fit the device does not enlarge the slots.
        """
        blocks = self._size(ref).blocks
        if self._rules.padded_slots and blocks <= self._evictor.limit(NodeKind.ADAPTER):
            self._slot_blocks = blocks = max(self._slot_blocks, blocks)
        return blocks

    def current_device_blocks(self, node: int) -> int:
        """Return the blocks that an adapter off the device will take there; padded slots may have grown meanwhile."""
        self._tree.size[node] = self.device_blocks(self._tree.adapters[node].ref)
        return int(self._tree.size[node])

    def predicted_load_s(self, nodes: Nodes) -> Scores:
        """Return the expected seconds to load each adapter to the device, by past transfers."""
        host_s, source_s = (self._tiers.copy_s(source, Tier.DEVICE, 1) for source in (Tier.HOST, Tier.SOURCE))
        seconds: Scores = np.where(self._tree.on_host[nodes], host_s, source_s) * self._tree.size[nodes]
        return seconds

    def retire(self, digest: AdapterDigest, now: float) -> bool:
        """Free a version that no request needs, and its KV, on both tiers; append an ``AdapterEvicted`` event.

        Returns:
            False if transfers of it are in flight. No new ones are started for it, and the caller retries.

        Raises:
            BlockError: a sequence uses it.
        """
        tree, node = self._tree, self._tree.adapter(digest)
        if node is None:
            self._evictor.events.append(AdapterEvicted(digest, now, 0, dropped=True))
            return True
        entry = tree.adapters[node]
        entry.retired = True
        below = list(tree.below(node))
        if tree.moving[[node, *below]].any():
            return False
        if tree.pins[[node, *below]].any():
            raise BlockError(f"adapter {digest[:12]} is in use")
        freed = self._evictor.free_kv(below[::-1], now)
        if tree.on_host[node]:
            freed += len(entry.host_blocks)
            self._tiers.drop_adapter_from_host(node)
        if tree.on_device[node]:
            self._evictor.evict_adapter(node, now, other_blocks=freed, dropped=True)
        else:
            self._evictor.events.append(AdapterEvicted(digest, now, freed * self._block_bytes, dropped=True))
        self._evictor.forget_adapter(node)
        return True

    def evict_kv_without_adapter(self, node: int, now: float) -> None:
        """Evict the KV of an adapter that is not on the device, where the preset does not allow such KV."""
        tree = self._tree
        if not self._rules.dependent or tree.on_device[node] or tree.moving[node] == NodeTransfer.IN:
            return
        self._evict_all(reversed(list(tree.below(node))), now)

    def evict_kv_without_parent(self, node: int, now: float) -> None:
        """Evict KV that has arrived after its parent was evicted, with all its descendants, where it is not allowed."""
        tree = self._tree
        if not self._rules.dependent or tree.kind[node] != NodeKind.KV or not tree.on_device[node]:
            return
        parent = int(tree.parent[node])
        if tree.on_device[parent] or tree.moving[parent] == NodeTransfer.IN:
            return
        branch = {node: None}
        for kv in tree.below(int(tree.top[node])):  # parents come before children
            if int(tree.parent[kv]) in branch:
                branch[kv] = None
        self._evict_all(reversed(branch), now)

    def _evict_all(self, nodes: Iterable[int], now: float) -> None:
        """Evict those of ``nodes`` (later KV first) that are not pinned or in flight."""
        tree = self._tree
        idle = [kv for kv in nodes if tree.on_device[kv] and not tree.moving[kv] and not tree.pins[kv]]
        self._evictor.evict_kv(idle, now)

    def evict_if_not_kept(self, node: int, wanted: Container[int], now: float) -> None:
        """Evict an unused adapter that no queued request wants, where the preset does not keep adapters."""
        tree = self._tree
        if self._rules.keep_adapters or node in wanted:
            return
        is_idle = node in tree.adapters and tree.on_device[node] and not tree.moving[node]
        if is_idle and not tree.pins[node] and not tree.children_on_device[node]:
            self._evictor.evict_adapter(node, now)

    def waste_bytes(self) -> int:
        """Return the bytes in blocks of adapters on the device that hold no weights."""
        entries = (self._tree.adapters[node] for node in self._tree.adapters_on_device())
        return sum(len(e.device_blocks) * self._block_bytes - self._size(e.ref).weight_bytes for e in entries)
