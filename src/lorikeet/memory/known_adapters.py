"""The adapters that the memory knows: what they take, and how they are given up with all that depends on them."""

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
    """What an adapter takes.

    Attributes:
        blocks: when packed.
        weight_bytes: of them that hold weights; the rest is waste.
    """

    blocks: int
    weight_bytes: int


class KnownAdapters:
    """See the module.

    Args:
        tiers: where everything is.
        room: frees what is given up.
        rules: of the row.
        size: what an adapter takes when packed.
        block_bytes: for reports.
    """

    def __init__(
        self,
        tiers: Tiers,
        room: Evictor,
        rules: MemoryRules,
        size: Callable[[AdapterRef], AdapterSize],
        block_bytes: int,
    ) -> None:
        self._tiers = tiers
        self._tree = tiers.tree
        self._evictor = room
        self._rules = rules
        self._size = size
        self._block_bytes = block_bytes
        self._slot_blocks = 0

    def add(self, ref: AdapterRef) -> int:
        """Add a version that is not known yet, and return its node."""
        return self._tree.add_adapter(ref, self.device_blocks(ref), self._size(ref).blocks)

    def device_blocks(self, ref: AdapterRef) -> int:
        """Return the blocks that a version takes on the device: with padded slots as many as the largest known one.

        One that could never be there does not make slots larger.
        """
        blocks = self._size(ref).blocks
        if self._rules.padded_slots and blocks <= self._evictor.limit(NodeKind.ADAPTER):
            self._slot_blocks = blocks = max(self._slot_blocks, blocks)
        return blocks

    def blocks_to_come(self, node: int) -> int:
        """Return the blocks that an adapter off the device will take there: slots may have grown since it was added."""
        self._tree.size[node] = self.device_blocks(self._tree.adapters[node].ref)
        return int(self._tree.size[node])

    def predicted_load_s(self, nodes: Nodes) -> Scores:
        """Return what bringing each adapter to the device should take, by what such transfers took so far."""
        host_s, source_s = (self._tiers.copy_s(source, Tier.DEVICE, 1) for source in (Tier.HOST, Tier.SOURCE))
        seconds: Scores = np.where(self._tree.on_host[nodes], host_s, source_s) * self._tree.size[nodes]
        return seconds

    def retire(self, digest: AdapterDigest, now: float) -> bool:
        """Free a version that no request needs, its KV too, on every tier; report what was freed.

        Returns:
            False if transfers of it are under way: nothing new begins for it alone, and the caller asks again.

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

    def clear_stranded(self, node: int, now: float) -> None:
        """Where KV may not be without its adapter: let KV leave whose adapter did not arrive."""
        tree = self._tree
        if not self._rules.dependent or tree.on_device[node] or tree.moving[node] == NodeTransfer.IN:
            return
        self._evict_all(reversed(list(tree.below(node))), now)

    def clear_stranded_kv(self, node: int, now: float) -> None:
        """The same for KV that landed on the device when what it depends on had left: it leaves with all below it."""
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
        """Evict KV that may leave, later KV first."""
        tree = self._tree
        rests = [kv for kv in nodes if tree.on_device[kv] and not tree.moving[kv] and not tree.pins[kv]]
        self._evictor.evict_kv(rests, now)

    def free_if_unkept(self, node: int, wanted: Container[int], now: float) -> None:
        """Where adapters are not kept: free one on the device that nobody needs or wants and nothing depends on."""
        tree = self._tree
        if self._rules.keep_adapters or node in wanted:
            return
        rests = node in tree.adapters and tree.on_device[node] and not tree.moving[node]
        if rests and not tree.pins[node] and not tree.children_on_device[node]:
            self._evictor.evict_adapter(node, now)

    def waste_bytes(self) -> int:
        """Return what adapters on the device take beyond their weights."""
        entries = (self._tree.adapters[node] for node in self._tree.adapters_on_device())
        return sum(len(e.device_blocks) * self._block_bytes - self._size(e.ref).weight_bytes for e in entries)
