"""Makes blocks that are full findable by others: those of all sequences of a step at once, since there are many."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from lorikeet.memory.leases import SequenceLease
from lorikeet.memory.policies.base import Eviction
from lorikeet.memory.tiers import Tiers
from lorikeet.memory.tree import Moving, block_keys


class Computed(NamedTuple):
    """How far a sequence is.

    Attributes:
        lease: its blocks.
        token_ids: all its tokens.
        tokens: of them whose KV is in its blocks, from the first on.
    """

    lease: SequenceLease
    token_ids: list[int]
    tokens: int


class Insertion:
    """Puts what sequences have computed into the tree.

    Args:
        tiers: let nodes stand for the blocks.
        eviction: is told of them.
        block_size: tokens of KV in a block.
    """

    def __init__(self, tiers: Tiers, eviction: Eviction, block_size: int) -> None:
        self._tiers = tiers
        self._tree = tiers.tree
        self._eviction = eviction
        self._block_tokens = block_size

    def insert(self, computed: Iterable[Computed], now: float) -> None:
        """Lengthen the paths of leases by the blocks that are full now."""
        new: dict[bytes, tuple[SequenceLease, list[bytes]]] = {}
        for lease, token_ids, tokens in computed:
            whole = tokens // self._block_tokens
            if whole <= len(lease.path):
                continue
            if len(lease.keys) < whole:
                digest = self._tree.digest(lease.adapter)
                lease.keys = block_keys(digest, token_ids, self._block_tokens, lease.keys)
            while self._follow(lease, whole, now):
                first = len(lease.path)
                if lease.keys[first] not in new:
                    new[lease.keys[first]] = lease, lease.keys[first:whole]
                    break
                self._insert_new(new.values(), now)  # another sequence of the step has computed the same tokens
                new.clear()
        self._insert_new(new.values(), now)

    def _follow(self, lease: SequenceLease, whole: int, now: float) -> bool:
        """Go along what others have computed meanwhile; return whether there is more that nobody has."""
        tree, tiers, before = self._tree, self._tiers, len(lease.path)
        is_new = False
        for key in lease.keys[before:whole]:
            node = tree.find(key)
            is_new = node is None
            if node is None or tree.moving[node] == Moving.IN:
                break  # what depends on KV on its way must not be found if its copy fails
            if not tree.on_device[node]:
                block = lease.blocks[len(lease.path)]
                lease.private.remove(block)
                tiers.adopt([node], [block])
                self._eviction.inserted([node], now)
            lease.path.append(node)
        if followed := lease.path[before:]:
            tiers.pin(followed)
            tree.last_use_s[followed] = now
        return is_new

    def _insert_new(self, new: Collection[tuple[SequenceLease, list[bytes]]], now: float) -> None:
        if not new:
            return
        above = [lease.path[-1] if lease.path else lease.adapter for lease, _ in new]
        nodes, blocks = [], []
        branches = self._tree.add_kv(above, [keys for _, keys in new], now)
        for (lease, _), branch in zip(new, branches, strict=True):
            mine = lease.blocks[len(lease.path) : len(lease.path) + len(branch)]
            lease.private.difference_update(mine)
            lease.path += branch
            nodes += branch
            blocks += mine
        self._tiers.adopt(nodes, blocks)
        self._eviction.inserted(nodes, now)
        self._tiers.pin(nodes)
