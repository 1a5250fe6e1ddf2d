"""Checks the consistency of the memory: recounts all blocks and pins, and compares them with the accounts."""

from collections.abc import Sequence

import numpy as np

from lorikeet.core.ids import BlockId
from lorikeet.memory.blocks import BlockError
from lorikeet.memory.tiers import Tiers
from lorikeet.memory.transfer_records import BlockCounts, HostCounts
from lorikeet.memory.tree import NO_BLOCK, DependencyTree, NodeKind, NodeTransfer


def check_accounts(tiers: Tiers, private: Sequence[BlockId]) -> None:
    """Recount all blocks and compare them with the accounts of the tiers.

    Args:
        tiers: holds the accounts.
        private: blocks of leases that are not in the tree.

    Raises:
        BlockError: the accounts are wrong, a block has two owners, or the tree is inconsistent.
    """
    tree = tiers.tree
    owners = list(private)
    host_owners = []
    found = {"cached": 0, "kv": len(owners), "adapter": 0, "inflight": 0}
    host = {"kv": 0, "adapter": 0, "inflight": 0}
    used = {NodeKind.KV: len(owners), NodeKind.ADAPTER: 0}
    resident = 0
    children = np.zeros(len(tree.kind), np.int64)
    on_device = np.zeros(len(tree.kind), np.int64)
    for node in range(tree.end):
        kind = int(tree.kind[node])
        moving = int(tree.moving[node])
        if kind in (NodeKind.UNUSED, NodeKind.BASE):
            continue
        is_kv = kind == NodeKind.KV
        entry = None if is_kv else tree.adapters[node]
        mine = [BlockId(int(tree.device[node]))] if entry is None else list(entry.device_blocks)
        mine = [block for block in mine if block != NO_BLOCK]
        hosts = [BlockId(int(tree.host[node]))] if entry is None else list(entry.host_blocks)
        hosts = [block for block in hosts if block != NO_BLOCK]
        if (moving != NodeTransfer.NO) != (node in tiers.transfer_of):
            raise BlockError(f"node {node} is in transfer state {moving}, but belongs to no transfer")
        is_whole = bool(tree.on_device[node] or moving == NodeTransfer.IN)
        if len(mine) != (tree.size[node] if is_whole else tree.kept[node]) or (is_whole and tree.kept[node]):
            raise BlockError(f"node {node} has device blocks {mine}, on_device {tree.on_device[node]}")
        if mine:
            owners += mine
            used[kind] += len(mine)
            resident += not is_kv and is_whole
            if moving in (NodeTransfer.IN, NodeTransfer.OUT, NodeTransfer.COPY):
                found["inflight"] += len(mine)
            elif tree.pins[node]:
                found["kv" if is_kv else "adapter"] += len(mine)
            else:
                found["cached"] += len(mine)
        if hosts:
            host_owners += hosts
            state = ("kv" if is_kv else "adapter") if tree.on_host[node] else "inflight"
            host[state] += len(hosts)
        elif tree.on_host[node]:
            raise BlockError(f"node {node} is on the host without blocks")
        if is_kv:
            parent = int(tree.parent[node])
            if tree.kind[parent] == NodeKind.UNUSED:
                raise BlockError(f"the parent of node {node} is not in the tree")
            children[parent] += 1
            on_device[parent] += bool(mine) and moving != NodeTransfer.OUT
    if len(set(owners)) != len(owners) or len(set(host_owners)) != len(host_owners):
        raise BlockError("a block has two owners")
    counts = BlockCounts(tiers.device.total - len(owners), **found)
    hosted = HostCounts(tiers.host.total - len(host_owners), **host)
    if counts != tiers.counts() or hosted != tiers.host_counts():
        raise BlockError(
            f"accounts say {tiers.counts()} and {tiers.host_counts()}, the blocks say {counts} and {hosted}"
        )
    if used != tiers.used_blocks or resident != tiers.resident_adapters:
        raise BlockError(f"{tiers.used_blocks} in use by the accounts, {used} by the blocks")
    if (children != tree.children).any() or (on_device != tree.children_on_device).any():
        raise BlockError("the tree miscounts children")


def check_tree(tree: DependencyTree, pinned: Sequence[Sequence[int]], *, dependent: bool) -> None:
    """Compare the pins of the tree with the pins of all leases, and check that no node is empty or misplaced.

    Args:
        tree: all nodes.
        pinned: the nodes of each lease.
        dependent: whether KV may be on the device only if its parent is on it.

    Raises:
        BlockError: a pin belongs to no lease or was lost, or a node is on a tier where it may not be.
    """
    pins = np.zeros(len(tree.pins), np.int64)
    for nodes in pinned:
        np.add.at(pins, nodes, 1)
    if (pins != tree.pins).any():
        raise BlockError("a pin belongs to no lease, or a pin was lost")
    for node in np.flatnonzero(tree.kind == NodeKind.KV).tolist():
        parent = int(tree.parent[node])
        there = tree.on_device[node] and tree.moving[node] != NodeTransfer.OUT
        if dependent and there and not (tree.on_device[parent] or tree.moving[parent] == NodeTransfer.IN):
            raise BlockError(f"KV node {node} is on the device, what it depends on is not")
        if not (tree.on_device[node] or tree.on_host[node] or tree.moving[node] or tree.children[node]):
            raise BlockError(f"KV node {node} is on no tier and has no children")
