"""Tracks the device and host tiers: the blocks of each node, transfers in flight, and exact accounts of all blocks.

Every block is in exactly one state of ``BlockCounts`` or ``HostCounts``, and the counts add up to the sizes of the
arenas after every step.
"""

from collections.abc import Iterable, Sequence
from itertools import count

import msgspec
import numpy as np
import numpy.typing as npt

from lorikeet.core.ids import BlockId
from lorikeet.core.plan import PACKING_ORDER, LoadOrder, Tier, Transfer, TransferDone
from lorikeet.memory.blocks import BlockError, BlockPool
from lorikeet.memory.transfer_records import (
    KV_BLOCKS_PER_TRANSFER,
    BlockCounts,
    HostCounts,
    InflightTransfer,
    RouteTotals,
    TransferResult,
)
from lorikeet.memory.tree import NO_BLOCK, NO_NODE, DependencyTree, NodeKind, Nodes, NodeTransfer, Scores


class Tiers:
    """Moves nodes between the tiers and counts blocks by state. Callers make sure that enough blocks are free.

    Args:
        tree: records the tiers that hold the bytes of each node.
        device, host: block pools of the tiers.
        dependent: whether KV may be on the device only if its parent is on it.

    Attributes:
        transfers, transfer_of: transfers in flight, by id and by node.
        totals: finished transfers by source and target.
        used_blocks: number of leased device blocks by kind of node, including blocks in flight.
        cached_blocks: number of device blocks of nodes that are neither pinned nor in flight, by kind.
        blocks_being_freed: number of device blocks of KV that become free when its copy to the host ends, unless the KV
            is pinned again.
        blocks_being_copied: number of device blocks of KV that stays on the device while it is being copied to the
            host. The KV cannot be evicted until the copy ends.
        resident_adapters: number of adapters on the device or in flight to it.
        adapter_changes: counter that rises with each change of the adapters on the device or on the host.
    """

    def __init__(self, tree: DependencyTree, device: BlockPool, host: BlockPool, *, dependent: bool) -> None:
        self.tree = tree
        self.device = device
        self.host = host
        self.transfers: dict[int, InflightTransfer] = {}
        self.totals: dict[tuple[Tier, Tier], RouteTotals] = {}
        self.blocks_being_freed = self.blocks_being_copied = 0
        self.used_blocks = {NodeKind.KV: 0, NodeKind.ADAPTER: 0}
        self.cached_blocks = {NodeKind.KV: 0, NodeKind.ADAPTER: 0}
        self.resident_adapters = self.adapter_changes = 0
        self._dependent = dependent
        self.transfer_of: dict[int, InflightTransfer] = {}
        self._begun: list[InflightTransfer] = []
        self._storing: InflightTransfer | None = None
        self._urgent: list[int] = []
        self._ids = count()
        self._kv = self._adapter = self._inflight = self._host_kv = self._host_adapter = self._host_inflight = 0

    # --- accounts ------------------------------------------------------------------------------------

    def counts(self) -> BlockCounts:
        """Return the number of device blocks in each state."""
        cached = self.cached_blocks[NodeKind.KV] + self.cached_blocks[NodeKind.ADAPTER]
        return BlockCounts(self.device.free, cached, self._kv, self._adapter, self._inflight)

    def host_counts(self) -> HostCounts:
        """Return the number of host blocks in each state."""
        return HostCounts(self.host.free, self._host_kv, self._host_adapter, self._host_inflight)

    def lease_private(self, blocks: int) -> list[BlockId]:
        """Lease device blocks for KV that is not in the tree."""
        self._kv += blocks
        self.used_blocks[NodeKind.KV] += blocks
        return self.device.lease(blocks)

    def release_private(self, blocks: Sequence[BlockId]) -> None:
        """Release blocks that :meth:`lease_private` has leased."""
        self.device.release(blocks)
        self._kv -= len(blocks)
        self.used_blocks[NodeKind.KV] -= len(blocks)

    def adopt(self, nodes: Sequence[int], blocks: Sequence[BlockId]) -> None:
        """Assign leased private blocks to unpinned KV nodes."""
        self._assign(np.asarray(nodes, np.int64), blocks)
        self._kv -= len(nodes)
        self.cached_blocks[NodeKind.KV] += len(nodes)

    def insert(self, nodes: Sequence[int], blocks: Sequence[BlockId]) -> None:
        """Assign leased private blocks to new KV nodes, and pin the nodes, which belong to running sequences."""
        tree = self.tree
        at = np.asarray(nodes, np.int64)
        self._assign(at, blocks)
        tree.pins[at] = 1
        tree.touched[at] += 1

    def _assign(self, at: Nodes, blocks: Sequence[BlockId]) -> None:
        tree = self.tree
        tree.device[at] = blocks
        tree.device_generation[at] = self.device.generations(blocks)
        tree.on_device[at] = True
        tree.count_on_device(at, 1)

    def device_blocks(self, path: Sequence[int] | Nodes) -> list[BlockId]:
        """Return the device blocks of KV nodes that are on the device or in flight to it.

        Raises:
            BlockError: a block was freed after it was assigned to the node.
        """
        return self.device.checked(self.tree.device[path].tolist(), self.tree.device_generation[path].tolist())

    def host_blocks(self, path: Sequence[int] | Nodes) -> list[BlockId]:
        """Return the host blocks of KV nodes; see :meth:`device_blocks` for errors."""
        return self.host.checked(self.tree.host[path].tolist(), self.tree.host_generation[path].tolist())

    def pin(self, nodes: Sequence[int] | Nodes) -> None:
        """Pin nodes to their tiers until each pin is removed with :meth:`unpin`. Pins are counted."""
        self._change_pins(nodes, 1)

    def unpin(self, nodes: Sequence[int] | Nodes) -> None:
        """Remove one pin of each node."""
        self._change_pins(nodes, -1)

    def _change_pins(self, nodes: Sequence[int] | Nodes, change: int) -> None:
        tree = self.tree
        index = np.asarray(nodes, np.int64)
        before = tree.pins[index]
        tree.pins[index] = before + change
        tree.touched[index] += 1
        turned = index[before == (0 if change > 0 else 1)]
        if not len(turned):
            return
        moving = tree.moving[turned]
        there = tree.on_device[turned] | (tree.kept[turned] > 0)
        still = turned[there & (moving != NodeTransfer.OUT) & (moving != NodeTransfer.COPY)]
        others = still[tree.kind[still] != NodeKind.KV].tolist()  # usually only the adapter, or nothing
        kv = (len(still) - len(others)) * change
        adapter = sum(map(tree.device_size, others)) * change
        self._kv += kv
        self._adapter += adapter
        self.cached_blocks[NodeKind.KV] -= kv
        self.cached_blocks[NodeKind.ADAPTER] -= adapter

    def copy_s(self, source: Tier, target: Tier, blocks: int) -> float:
        """Return the expected seconds of a transfer of this many blocks; 0 before the first transfer."""
        totals = self.totals.get((source, target))
        return totals.busy_s / totals.blocks * blocks if totals and totals.blocks else 0.0

    def adapter_loads_s(self, nodes: Nodes) -> Scores:
        """Return the expected seconds to load each adapter to the device, from past transfers."""
        host_s = self.copy_s(Tier.HOST, Tier.DEVICE, 1)
        source_s = self.copy_s(Tier.SOURCE, Tier.DEVICE, 1)
        blocks = self.tree.size[nodes] - self.tree.kept[nodes]
        seconds: Scores = np.where(self.tree.on_host[nodes], host_s, source_s) * blocks
        return seconds

    def adapter_reread_s(self, blocks: int) -> float:
        """Return the expected seconds by which loading an adapter takes longer from its source than from the host.

        The result is 0 before a transfer of each kind, and where the source is as fast.
        """
        host_s = self.copy_s(Tier.HOST, Tier.DEVICE, blocks)
        return max(0.0, self.copy_s(Tier.SOURCE, Tier.DEVICE, blocks) - host_s) if host_s else 0.0

    def queued_kv_load_s(self, blocks: int) -> float:
        """Return the expected seconds until this many blocks of KV are copied to the device.

        The copy starts after the copies in flight.
        """
        before = sum(
            len(inflight.transfer.device_blocks) or len(inflight.nodes)
            for inflight in self.transfers.values()
            if inflight.transfer.target is Tier.DEVICE and inflight.demand
        )
        return self.copy_s(Tier.HOST, Tier.DEVICE, before + blocks)

    def queued_kv_store_s(self, blocks: int) -> float:
        """Return the expected seconds until this many blocks of KV are copied to the host.

        The copy starts after the copies in flight.
        """
        before = self.blocks_being_freed + self.blocks_being_copied
        return self.copy_s(Tier.DEVICE, Tier.HOST, before + blocks)

    # --- transfers -----------------------------------------------------------------------------------

    def fetch_adapter(
        self,
        node: int,
        device_blocks: Sequence[BlockId],
        host_blocks: Sequence[BlockId],
        now: float,
        *,
        demand: bool,
        order: LoadOrder = PACKING_ORDER,
    ) -> InflightTransfer:
        """Begin to load an adapter to the device, from the host if it is there, otherwise from its source.

        Args:
            node: the adapter; not on the device, in no transfer.
            device_blocks: blocks leased for the adapter, in addition to its kept blocks.
            host_blocks: blocks leased for a copy on the host; empty if the adapter is on the host already, or if no
                copy is wanted.
            now: the time.
            demand: whether a sequence waits for the transfer; False for a prefetch.
            order: order in which the adapter's blocks arrive.
        """
        tree = self.tree
        entry = self.tree.adapters[node]
        from_host = bool(tree.on_host[node])
        # Files are read as a whole, and a copy in groups follows the order of the groups. Both write kept blocks again.
        kept = int(tree.kept[node]) if from_host and order == PACKING_ORDER else 0
        self._count(node, -1)
        tree.kept[node] = 0
        entry.device_blocks += tuple(device_blocks)
        if not from_host:
            entry.host_blocks = tuple(host_blocks)
            self._host_inflight += len(host_blocks)
        tree.moving[node] = NodeTransfer.IN
        self._inflight += len(entry.device_blocks)
        self.used_blocks[NodeKind.ADAPTER] += len(entry.device_blocks)
        self.resident_adapters += 1
        source = Tier.HOST if from_host else Tier.SOURCE
        blocks = entry.device_blocks[: entry.host_size]
        transfer = Transfer(
            next(self._ids), source, Tier.DEVICE, entry.host_blocks, blocks, entry.ref, demand, *order, kept=kept
        )
        return self._begin(transfer, (node,), now)

    def fetch_kv(
        self, nodes: Sequence[int], device_blocks: Sequence[BlockId], now: float, *, demand: bool
    ) -> InflightTransfer:
        """Begin to copy KV from the host to the device.

        Args:
            nodes: KV that is on the host only and in no transfer, parents before children.
            device_blocks: blocks leased for the nodes, one for each.
            now: the time.
            demand: whether a sequence waits for the transfer; False for a prefetch.
        """
        tree = self.tree
        at = np.asarray(nodes, np.int64)
        tree.device[at] = device_blocks
        tree.device_generation[at] = self.device.generations(device_blocks)
        tree.moving[at] = NodeTransfer.IN
        tree.count_on_device(at, 1)
        self._inflight += len(nodes)
        self.used_blocks[NodeKind.KV] += len(nodes)
        return self._begin(Transfer(next(self._ids), Tier.HOST, Tier.DEVICE, demand=demand), nodes, now)

    def store_kv(
        self, nodes: Sequence[int], host_blocks: Sequence[BlockId], now: float, *, stays: bool = False
    ) -> None:
        """Begin to copy KV to the host.

        When the copy ends, the KV's device blocks are freed, unless the KV was pinned again. Calls between two plans
        share transfers of ``KV_BLOCKS_PER_TRANSFER`` blocks.

        Args:
            nodes: KV that is on the device only and in no transfer. Later KV comes first, so that a node that stays
                keeps its ancestors.
            host_blocks: blocks leased for the nodes, one for each.
            now: the time.
            stays: whether the KV keeps its device blocks when the copy ends.
        """
        tree = self.tree
        at = np.asarray(nodes, np.int64)
        pinned = int(np.count_nonzero(tree.pins[at]))
        self._kv -= pinned
        self.cached_blocks[NodeKind.KV] -= len(nodes) - pinned
        self._inflight += len(nodes)
        self._host_inflight += len(nodes)
        if stays:
            self.blocks_being_copied += len(nodes)
            tree.moving[at] = NodeTransfer.COPY
        else:
            self.blocks_being_freed += len(nodes)
            tree.count_on_device(at, -1)  # makes the parents evictable immediately
            tree.moving[at] = NodeTransfer.OUT
        tree.host[at] = host_blocks
        tree.host_generation[at] = self.host.generations(host_blocks)
        while nodes:
            if self._storing is None or len(self._storing.nodes) == KV_BLOCKS_PER_TRANSFER:
                self._storing = self._begin(Transfer(next(self._ids), Tier.DEVICE, Tier.HOST), (), now)
            space = KV_BLOCKS_PER_TRANSFER - len(self._storing.nodes)
            self._join(self._storing, nodes[:space])
            nodes = nodes[space:]

    def read_to_host(self, node: int, host_blocks: Sequence[BlockId], now: float) -> InflightTransfer:
        """Begin to read an adapter from its source into the host tier, as a prefetch."""
        entry = self.tree.adapters[node]
        entry.host_blocks = tuple(host_blocks)
        self._host_inflight += len(host_blocks)
        self.tree.moving[node] = NodeTransfer.READ
        transfer = Transfer(next(self._ids), Tier.SOURCE, Tier.HOST, entry.host_blocks, adapter=entry.ref, demand=False)
        return self._begin(transfer, (node,), now)

    def adopt_on_host(self, node: int, block: BlockId) -> None:
        """Assign a leased host block to a KV node that is on no tier. The caller writes the block."""
        self.tree.host[node] = block
        (self.tree.host_generation[node],) = self.host.generations((block,))
        self.tree.on_host[node] = True
        self._host_kv += 1

    def drop_adapter(self, node: int) -> None:
        """Free the device blocks of an unpinned adapter."""
        self._count(node, -1)
        self.adapter_changes += 1
        self.resident_adapters -= bool(self.tree.on_device[node])
        self._free_device(node)
        self.tree.on_device[node] = False
        self.tree.kept[node] = 0
        self.tree.touched[node] += 1

    def shorten_adapter(self, node: int, blocks: int) -> None:
        """Free the last device blocks of an unpinned adapter, but not all of its blocks."""
        tree = self.tree
        entry = self.tree.adapters[node]
        self._count(node, -1)
        self.adapter_changes += 1
        self.resident_adapters -= bool(tree.on_device[node])
        self.device.release(entry.device_blocks[-blocks:])
        entry.device_blocks = entry.device_blocks[:-blocks]
        tree.on_device[node] = False
        tree.kept[node] = len(entry.device_blocks)
        tree.touched[node] += 1
        self._count(node, 1)

    def drop_kv(self, nodes: Sequence[int]) -> None:
        """Free the device blocks of unpinned KV. The KV is lost, unless it is on the host."""
        tree = self.tree
        at = np.asarray(nodes, np.int64)
        self.device.release(self.device_blocks(at))
        tree.count_on_device(at, -1)
        tree.device[at] = NO_BLOCK
        tree.on_device[at] = False
        tree.touched[at] += 1
        self.used_blocks[NodeKind.KV] -= len(nodes)
        self.cached_blocks[NodeKind.KV] -= len(nodes)

    def drop_adapter_from_host(self, node: int) -> None:
        """Free the host blocks of an adapter that is in no transfer."""
        entry = self.tree.adapters[node]
        self.host.release(entry.host_blocks)
        self._host_adapter -= len(entry.host_blocks)
        self.adapter_changes += 1
        entry.host_blocks = ()
        self.tree.on_host[node] = False

    def drop_kv_from_host(self, nodes: Sequence[int]) -> None:
        """Free the host blocks of KV that is in no transfer."""
        at = np.asarray(nodes, np.int64)
        self.host.release(self.host_blocks(at))
        self._host_kv -= len(nodes)
        self.tree.host[at] = NO_BLOCK
        self.tree.on_host[at] = False

    def want(self, nodes: Iterable[int]) -> list[InflightTransfer]:
        """Mark the transfers that load ``nodes`` to the device as awaited, and return them."""
        wanted = {}
        for node in nodes:
            inflight = self.transfer_of.get(node)
            if inflight is None or (inflight.transfer.target is Tier.HOST and inflight.transfer.source is Tier.DEVICE):
                continue
            wanted[inflight.transfer.transfer_id] = inflight
            if not inflight.demand:
                inflight.demand = True
                self._urgent.append(inflight.transfer.transfer_id)
        return list(wanted.values())

    def take_started(self) -> tuple[tuple[Transfer, ...], tuple[int, ...]]:
        """Return the transfers begun since the last call, and the ids of transfers that a sequence now waits for.

        A returned transfer receives no further KV.
        """
        replaced = msgspec.structs.replace
        for inflight in self._begun:
            inflight.transfer = replaced(inflight.transfer, demand=inflight.demand)
            if inflight.transfer.adapter is None:
                host = self.host_blocks(list(inflight.nodes))
                device = self.device_blocks(list(inflight.nodes))
                inflight.transfer = replaced(inflight.transfer, host_blocks=tuple(host), device_blocks=tuple(device))
        begun = tuple(inflight.transfer for inflight in self._begun)
        new = {transfer.transfer_id for transfer in begun}
        urgent = tuple(i for i in self._urgent if i in self.transfers and i not in new)
        self._begun = []
        self._urgent = []
        self._storing = None
        return begun, urgent

    def finish(self, done: TransferDone) -> TransferResult:
        """Apply the end of a transfer to its nodes and to the accounts.

        Raises:
            BlockError: the transfer was not in flight.
        """
        inflight = self.transfers.pop(done.transfer_id, None)
        if inflight is None:
            raise BlockError(f"transfer {done.transfer_id} was not in flight")
        transfer = inflight.transfer
        blocks = len(transfer.device_blocks or transfer.host_blocks) - transfer.kept
        self.totals.setdefault((transfer.source, transfer.target), RouteTotals()).note(blocks, done)
        result = TransferResult(inflight, done.error)
        nodes = np.asarray(inflight.nodes, np.int64)
        how = self.tree.moving[nodes]
        for node in inflight.nodes:
            del self.transfer_of[node]
        are_ended = self._finish_together(nodes, how, result)
        self.tree.moving[nodes] = NodeTransfer.NO
        self.tree.touched[nodes] += 1
        if are_ended:
            return result
        for node, moving in zip(inflight.nodes, how.tolist(), strict=True):
            match moving:
                case NodeTransfer.IN:
                    self._finish_in(node, result)
                case NodeTransfer.OUT:
                    self._finish_out(node, result)
                case NodeTransfer.COPY:
                    self._finish_copy(node, result.error)
                case NodeTransfer.READ:
                    self._finish_host_adapter(node, result.error)
                case NodeTransfer.NO:
                    raise BlockError(f"node {node} of transfer {done.transfer_id} was not being moved")
        return result

    # --- internals -----------------------------------------------------------------------------------

    def _begin(self, transfer: Transfer, nodes: Sequence[int], now: float) -> InflightTransfer:
        inflight = self.transfers[transfer.transfer_id] = InflightTransfer(transfer, (), now, transfer.demand)
        self._begun.append(inflight)
        self._join(inflight, nodes)
        return inflight

    def _join(self, inflight: InflightTransfer, nodes: Sequence[int]) -> None:
        inflight.nodes += tuple(nodes)
        self.transfer_of.update(dict.fromkeys(nodes, inflight))
        if nodes:
            self.tree.touched[np.asarray(nodes, np.int64)] += 1

    def _finish_together(self, nodes: Nodes, how: npt.NDArray[np.int8], result: TransferResult) -> bool:
        """End the copies of KV together, if all of them succeeded and are alike. Return whether they were ended.

        A transfer ends every few steps, with tens of blocks.
        """
        tree = self.tree
        count = len(nodes)
        if result.error is not None or not count or (how != how[0]).any() or tree.kind[nodes[0]] != NodeKind.KV:
            return False
        pinned = tree.pins[nodes] > 0
        if how[0] == NodeTransfer.OUT:
            if (pinned | (self._dependent & (tree.children_on_device[nodes] > 0))).any():
                return False
            self.blocks_being_freed -= count
            self.used_blocks[NodeKind.KV] -= count
            self.device.release(self.device_blocks(nodes))
            tree.device[nodes] = NO_BLOCK
            tree.on_device[nodes] = False
        else:
            if how[0] == NodeTransfer.IN:
                if not self._are_reachable(nodes):
                    return False
                tree.on_device[nodes] = True
                result.arrived.extend(result.inflight.nodes)
            else:
                self.blocks_being_copied -= count
            running = int(np.count_nonzero(pinned))
            self._kv += running
            self.cached_blocks[NodeKind.KV] += count - running
        self._inflight -= count
        if how[0] != NodeTransfer.IN:
            self._host_inflight -= count
            self._host_kv += count
            tree.on_host[nodes] = True
        return True

    def _are_reachable(self, nodes: Nodes) -> bool:
        """Return whether KV that arrives on the device has its parents there, or in flight to it like itself.

        KV on the device is useless if its parent was evicted, or if its parent's copy failed.
        """
        tree = self.tree
        parents = tree.parent[nodes]
        reachable = tree.on_device[parents] | (tree.moving[parents] == NodeTransfer.IN)
        return not self._dependent or bool(reachable.all())

    def _finish_in(self, node: int, result: TransferResult) -> None:
        tree = self.tree
        self._inflight -= int(tree.size[node])
        if tree.kind[node] == NodeKind.ADAPTER and result.inflight.transfer.source is Tier.SOURCE:
            self._finish_host_adapter(node, result.error)
        parent = int(tree.parent[node])
        is_reachable = (
            not self._dependent or parent == NO_NODE or tree.on_device[parent] or tree.moving[parent] == NodeTransfer.IN
        )
        self.used_blocks[int(tree.kind[node])] -= int(tree.size[node])
        if result.error is None and is_reachable:
            tree.on_device[node] = True
            self.adapter_changes += bool(tree.kind[node] == NodeKind.ADAPTER)
            self._count(node, 1)
            result.arrived.append(node)
            return
        if tree.kind[node] == NodeKind.ADAPTER:
            self.resident_adapters -= 1
        else:
            tree.children_on_device[tree.parent[node]] -= 1
        self._free_device(node)
        if tree.kind[node] == NodeKind.KV and result.error is not None:
            self.drop_kv_from_host([node])  # a block whose copy failed is not used again

    def _finish_out(self, node: int, result: TransferResult) -> None:
        tree = self.tree
        self.blocks_being_freed -= 1
        self._finish_host_kv(node, result.error)
        if tree.pins[node] or (self._dependent and tree.children_on_device[node]):
            self._count(node, 1)  # the KV or one of its children was pinned again during the copy
            result.arrived.append(node)
            tree.children_on_device[tree.parent[node]] += 1
        else:
            self._free_device(node)
            tree.on_device[node] = False

    def _finish_copy(self, node: int, error: str | None) -> None:
        self.blocks_being_copied -= 1
        self._finish_host_kv(node, error)
        self._count(node, 1)

    def _finish_host_kv(self, node: int, error: str | None) -> None:
        tree = self.tree
        self._inflight -= 1
        self._host_inflight -= 1
        self.used_blocks[NodeKind.KV] -= 1
        if error is None:
            tree.on_host[node] = True
            self._host_kv += 1
        else:
            self.host.release(self.host_blocks([node]))
            tree.host[node] = NO_BLOCK

    def _finish_host_adapter(self, node: int, error: str | None) -> None:
        entry = self.tree.adapters[node]
        if not entry.host_blocks:
            return
        self._host_inflight -= len(entry.host_blocks)
        if error is None:
            self.tree.on_host[node] = True
            self.adapter_changes += 1
            self._host_adapter += len(entry.host_blocks)
        else:
            self.host.release(entry.host_blocks)
            entry.host_blocks = ()

    def _count(self, node: int, sign: int) -> None:
        """Add a node on the device to the accounts (``sign`` 1), or subtract it (-1)."""
        tree = self.tree
        kind = int(tree.kind[node])
        blocks = tree.device_size(node) * sign
        self.used_blocks[kind] += blocks
        if not tree.pins[node]:
            self.cached_blocks[kind] += blocks
        elif kind == NodeKind.KV:
            self._kv += blocks
        else:
            self._adapter += blocks

    def _free_device(self, node: int) -> None:
        entry = self.tree.adapters.get(node)
        if entry is None:
            self.device.release(self.device_blocks([node]))
            self.tree.device[node] = NO_BLOCK
        else:
            self.device.release(entry.device_blocks)
            entry.device_blocks = ()
