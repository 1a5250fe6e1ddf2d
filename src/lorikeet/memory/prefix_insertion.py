"""Inserts computed KV into the tree."""

from collections.abc import Collection, Iterable
from itertools import chain
from typing import NamedTuple

from lorikeet.core.ids import BlockId
from lorikeet.memory.blocks import SequenceLease
from lorikeet.memory.kv_events import BlockTokens
from lorikeet.memory.policies.base import EvictionPolicy
from lorikeet.memory.tiers import Tiers
from lorikeet.memory.tree import BASE, NodeTransfer, block_keys


class ComputedTokens(NamedTuple):
    """Describes the computed part of a sequence.

    Attributes:
        lease: blocks of the sequence.
        token_ids: tokens of the prompt and of the output so far.
        tokens: number of leading tokens whose KV is in the blocks.
    """

    lease: SequenceLease
    token_ids: list[int]
    tokens: int


class PrefixInsertion:
    """Inserts full blocks of KV into the tree, where other sequences can find the blocks by prefix.

    The blocks of all sequences of a step are inserted together, because a step fills many blocks.

    Args:
        tiers: records which blocks the new nodes have.
        eviction: is notified of the new nodes.
        block_size: tokens of KV in a block.
        tokens: keeps the tokens of new blocks for events of KV; None without events.
    """

    def __init__(
        self, tiers: Tiers, eviction: EvictionPolicy, block_size: int, tokens: BlockTokens | None = None
    ) -> None:
        self._tiers = tiers
        self._tree = tiers.tree
        self._eviction = eviction
        self._block_size = block_size
        self._tokens = tokens

    def insert(self, computed: Iterable[ComputedTokens], now: float) -> None:
        """Extend the paths of leases by the blocks that are now full."""
        new: dict[bytes, tuple[SequenceLease, list[bytes]]] = {}
        for lease, token_ids, tokens in computed:
            whole = tokens // self._block_size
            if whole <= len(lease.path):
                continue
            if len(lease.keys) < whole:
                digest = self._tree.digest(lease.adapter)
                lease.keys = block_keys(
                    digest, token_ids, self._block_size, lease.keys, salt=lease.salt, start=lease.adapter_start
                )
            if self._tokens is not None:
                first = len(lease.path)
                self._tokens.note(lease.keys[first:whole], token_ids, first, lease.salt)
            while self._follow(lease, whole, now):
                first = len(lease.path)
                if lease.keys[first] not in new:
                    new[lease.keys[first]] = lease, lease.keys[first:whole]
                    break
                # Another sequence of the same step may have computed the same tokens.
                self._insert_new(new.values(), now)
                new.clear()
        self._insert_new(new.values(), now)

    def _follow(self, lease: SequenceLease, whole: int, now: float) -> bool:
        """Extend the path by nodes of other sequences with the same tokens. Return whether new blocks remain."""
        tree = self._tree
        before = len(lease.path)
        is_new = False
        for key in lease.keys[before:whole]:
            node = tree.find(key)
            is_new = node is None
            if node is None or tree.moving[node] == NodeTransfer.IN:
                break  # KV below a node in flight must not be found, because the copy may fail
            if not tree.on_device[node]:
                block = lease.blocks[len(lease.path)]
                lease.private.remove(block)
                self._tiers.adopt([node], [block])
                self._eviction.inserted([node], now)
            lease.path.append(node)
        if followed := lease.path[before:]:
            self._tiers.pin(followed)
            tree.last_use_s[followed] = now
        return is_new

    def _insert_new(self, new: Collection[tuple[SequenceLease, list[bytes]]], now: float) -> None:
        """Add nodes for blocks that the tree does not contain."""
        if not new:
            return
        tops = None
        if any(lease.adapter_start for lease, _ in new):
            tops = list(chain.from_iterable(self._tops(lease, len(keys)) for lease, keys in new))
        above = [lease.path[-1] if lease.path else self._tops(lease, 1)[0] for lease, _ in new]
        nodes: list[int] = []
        blocks: list[BlockId] = []
        branches = self._tree.add_kv(above, [keys for _, keys in new], now, tops)
        for (lease, _), branch in zip(new, branches, strict=True):
            inserted = lease.blocks[len(lease.path) : len(lease.path) + len(branch)]
            lease.private.difference_update(inserted)
            lease.path += branch
            nodes += branch
            blocks += inserted
        self._tiers.insert(nodes, blocks)
        self._eviction.inserted(nodes, now)

    def _tops(self, lease: SequenceLease, count: int) -> list[int]:
        """Return the top node of each of the next ``count`` blocks.

        The top is the adapter's node, or the base model's node for blocks before the adapter acts.
        """
        of_base = max(0, lease.adapter_start // self._block_size - len(lease.path))
        return [BASE] * min(of_base, count) + [lease.adapter] * (count - of_base)
