"""Tracks the registered adapter versions and the tiers that hold them."""

from collections.abc import Callable, Container, Iterable
from typing import NamedTuple

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import AdapterEvicted
from lorikeet.core.ids import AdapterDigest
from lorikeet.memory.blocks import BlockError
from lorikeet.memory.eviction import Evictor
from lorikeet.memory.options import MemoryOptions
from lorikeet.memory.tiers import Tiers
from lorikeet.memory.tree import NodeKind, Nodes, NodeTransfer


class AdapterSize(NamedTuple):
    """Holds the size of a packed adapter.

    Attributes:
        blocks: number of blocks.
        weight_bytes: number of the blocks' bytes that hold weights; the rest is waste.
    """

    blocks: int
    weight_bytes: int


class CachedAdapters(NamedTuple):
    """Lists the adapters on both tiers.

    Attributes:
        resident: adapters on the device, with the number of blocks of each.
        hosted: adapters on the host.
        waste_bytes: number of bytes in device blocks that hold no weights.
    """

    resident: dict[AdapterDigest, int]
    hosted: tuple[AdapterDigest, ...]
    waste_bytes: int


class KnownAdapters:
    """Adds adapter versions to the tree, and frees them.

    Args:
        tiers: has the block accounts.
        evictor: evicts adapters and their KV.
        options: memory options of the preset.
        size: returns the size of a packed adapter.
        block_bytes: size of a block, for events and statistics.
    """

    def __init__(
        self,
        tiers: Tiers,
        evictor: Evictor,
        options: MemoryOptions,
        size: Callable[[AdapterRef], AdapterSize],
        block_bytes: int,
    ) -> None:
        self._tiers = tiers
        self._tree = tiers.tree
        self._evictor = evictor
        self._options = options
        self._size = size
        self._block_bytes = block_bytes
        self._slot_blocks = 0
        self._weight_bytes: dict[int, int] = {}
        self._cached = CachedAdapters({}, (), 0)
        self._cached_at = 0

    def add(self, ref: AdapterRef) -> int:
        """Add a new version to the tree, and return its node."""
        size = self._size(ref)
        node = self._tree.add_adapter(ref, self.device_blocks(ref), size.blocks)
        self._weight_bytes[node] = size.weight_bytes
        return node

    def device_blocks(self, ref: AdapterRef) -> int:
        """Return the number of device blocks that a version takes.

        With padded slots, this is the size of the largest version.

        A version that can never fit the device does not enlarge the slots.
        """
        blocks = self._size(ref).blocks
        if self._options.padded_slots and blocks <= self._evictor.limit(NodeKind.ADAPTER):
            self._slot_blocks = max(self._slot_blocks, blocks)
            return self._slot_blocks
        return blocks

    def missing_device_blocks(self, node: int) -> int:
        """Return the number of blocks that must be leased to load an adapter.

        Padded slots may have grown since the adapter was added.
        """
        self._tree.size[node] = self.device_blocks(self._tree.adapters[node].ref)
        return self._tree.missing_blocks(node)

    def retire(self, digest: AdapterDigest, now: float) -> bool:
        """Free an unneeded version and its KV on both tiers, and append an ``AdapterEvicted`` event.

        Returns:
            False if transfers of the version are in flight. No new transfer of the version is started, and the caller
            retries.

        Raises:
            BlockError: a sequence uses it.
        """
        tree = self._tree
        node = tree.adapter(digest)
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
        if tree.on_device[node] or tree.kept[node]:
            self._evictor.evict_adapter(node, now, other_blocks=freed, dropped=True)
        else:
            self._evictor.events.append(AdapterEvicted(digest, now, freed * self._block_bytes, dropped=True))
        self._evictor.forget_adapter(node)
        del self._weight_bytes[node]
        return True

    def evict_kv_without_adapter(self, node: int, now: float) -> None:
        """Evict the KV of an adapter that is not on the device, unless the preset allows such KV."""
        tree = self._tree
        if not self._options.dependent or tree.on_device[node] or tree.moving[node] == NodeTransfer.IN:
            return
        self._evict_all(reversed(list(tree.below(node))), now)

    def evict_kv_without_parents(self, nodes: Nodes, now: float) -> None:
        """Evict KV that arrived after its parent was evicted, with all its descendants, unless the preset allows it."""
        tree = self._tree
        if not self._options.dependent:
            return
        there = nodes[(tree.kind[nodes] == NodeKind.KV) & tree.on_device[nodes]]
        parents = tree.parent[there]
        for node in there[~tree.on_device[parents] & (tree.moving[parents] != NodeTransfer.IN)].tolist():
            if tree.on_device[node]:  # it may have been evicted as a descendant
                self._evict_all(reversed([node, *tree.descendants(node)]), now)

    def _evict_all(self, nodes: Iterable[int], now: float) -> None:
        """Evict the KV nodes that are neither pinned nor in flight. Later KV must come first in ``nodes``."""
        tree = self._tree
        idle = [kv for kv in nodes if tree.on_device[kv] and not tree.moving[kv] and not tree.pins[kv]]
        if idle:
            self._evictor.evict_kv(idle, now)

    def evict_if_not_kept(self, node: int, wanted: Container[int], now: float) -> None:
        """Evict an adapter that no running or queued request needs, unless the preset keeps unused adapters."""
        tree = self._tree
        if self._options.keep_adapters or node in wanted or self._evictor.is_pinned(node):
            return
        is_idle = node in tree.adapters and tree.on_device[node] and not tree.moving[node]
        if is_idle and not tree.pins[node] and not tree.children_on_device[node]:
            self._evictor.evict_adapter(node, now)

    def cached(self) -> CachedAdapters:
        """Return the adapters on both tiers.

        The result is cached until an adapter moves, so callers must not change it.

        The cache pays because statistics are read many times a second, and adapters move rarely.
        """
        if self._cached_at != self._tiers.adapter_changes:
            tree = self._tree
            adapters = tree.adapters
            nodes = tree.adapters_on_device()
            resident = {adapters[node].ref.digest: len(adapters[node].device_blocks) for node in nodes}
            hosted = tuple([adapters[node].ref.digest for node in tree.adapters_on_host()])
            weight_bytes = sum(map(self._weight_bytes.__getitem__, nodes))
            waste_bytes = sum(resident.values()) * self._block_bytes - weight_bytes
            self._cached = CachedAdapters(resident, hosted, waste_bytes)
            self._cached_at = self._tiers.adapter_changes
        return self._cached
