"""The device tier: which adapter and which KV is where, who may leave, and exact accounts of all blocks.

Every block is in exactly one of five states, and their counts add up to the arena after every step:

======== ===========================================================
free     nobody leases it
cached   holds an adapter or KV that no sequence uses; may be evicted
kv       KV of a running sequence
adapter  weights that a running sequence uses
inflight weights that are being transferred
======== ===========================================================
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import AdapterEvent, AdapterEvicted, AdapterLoaded
from lorikeet.core.ids import AdapterDigest, BlockId
from lorikeet.core.plan import AdapterLoad, AdapterLoadDone
from lorikeet.memory.blocks import BlockError, BlockPool
from lorikeet.memory.policies import EvictionPolicy
from lorikeet.memory.tree import AdapterNode, KvNode, Node, Residency, match


class BlockCounts(NamedTuple):
    """Blocks by state; their sum is the arena."""

    free: int
    cached: int
    kv: int
    adapter: int
    inflight: int


@dataclass(eq=False)
class SequenceLease:
    """The blocks of one running sequence.

    Attributes:
        adapter: the version it runs under; pinned.
        blocks: its block table.
        path: tree nodes of its leading blocks; pinned. A node may lie in another block than the sequence's
            own, if two sequences computed the same tokens at the same time.
        private: those of ``blocks`` that the tree does not know.
    """

    adapter: AdapterNode
    blocks: list[BlockId] = field(default_factory=list)
    path: list[KvNode] = field(default_factory=list)
    private: set[BlockId] = field(default_factory=set)


class DeviceMemory:
    """Owner of the device blocks and of the tree over them.

    Args:
        total_blocks: size of the arena.
        block_tokens: tokens of KV in a block.
        block_bytes: for reports.
        adapter_blocks: number of blocks that an adapter takes when packed.
        eviction: which unused leaf leaves first.
        keep_kv: whether KV stays after its request has finished.
    """

    def __init__(
        self,
        total_blocks: int,
        block_tokens: int,
        block_bytes: int,
        adapter_blocks: Callable[[AdapterRef], int],
        eviction: EvictionPolicy,
        *,
        keep_kv: bool = True,
    ) -> None:
        self.block_tokens = block_tokens
        self.block_bytes = block_bytes
        self.adapter_blocks = adapter_blocks
        self._pool = BlockPool(total_blocks)
        self._eviction = eviction
        self._keep_kv = keep_kv
        self._base = AdapterNode(None, Residency.LOADED)
        self._adapters: dict[AdapterDigest, AdapterNode] = {}
        self._leases: set[SequenceLease] = set()
        self._leaves: list[tuple[float, int, Node]] = []
        self._tick = count()
        self._cached = self._kv = self._adapter = self._inflight = 0
        self._loads = 0
        self._evicted: list[AdapterDigest] = []
        self._events: list[AdapterEvent] = []

    # --- what there is -------------------------------------------------------------------------------

    @property
    def total_blocks(self) -> int:
        """Blocks in the arena."""
        return self._pool.total

    def counts(self) -> BlockCounts:
        """Return the number of blocks in each state."""
        return BlockCounts(self._pool.free, self._cached, self._kv, self._adapter, self._inflight)

    def residency(self, digest: AdapterDigest | None) -> Residency:
        """Return where the weights of a version are (the base's are always loaded)."""
        if digest is None:
            return Residency.LOADED
        node = self._adapters.get(digest)
        return Residency.ABSENT if node is None else node.residency

    def resident(self) -> dict[AdapterDigest, int]:
        """Return the loaded adapters and the blocks of each."""
        return {d: node.blocks for d, node in self._adapters.items() if node.residency is Residency.LOADED}

    @property
    def loads_in_flight(self) -> int:
        """Number of adapters being transferred."""
        return self._loads

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that ``tokens`` tokens of KV take."""
        return -(-tokens // self.block_tokens)

    # --- adapters ------------------------------------------------------------------------------------

    def try_start_load(self, ref: AdapterRef, now: float) -> AdapterLoad | None:
        """Lease blocks for an absent adapter, or return None while there is no room."""
        blocks = self._try_take(self.adapter_blocks(ref), now)
        if blocks is None:
            return None
        generation = next(self._tick)
        self._adapters[ref.digest] = AdapterNode(
            ref.digest, Residency.LOADING, tuple(blocks), generation, load_started_s=now, last_use_s=now
        )
        self._inflight += len(blocks)
        self._loads += 1
        return AdapterLoad(ref, tuple(blocks), generation)

    def finish_load(self, done: AdapterLoadDone, now: float) -> float:
        """Take the end of a transfer in: the adapter is loaded, or its blocks are free again.

        Returns:
            When the transfer began.

        Raises:
            BlockError: it was not in flight.
        """
        node = self._adapters.get(done.digest)
        if node is None or node.residency is not Residency.LOADING or node.load_generation != done.generation:
            raise BlockError(f"load {done.generation} of adapter {done.digest[:12]} was not in flight")
        self._inflight -= node.blocks
        self._loads -= 1
        if done.error is None:
            node.residency, node.last_use_s = Residency.LOADED, now
            self._cached += node.blocks
            self._offer(node)
        else:
            del self._adapters[done.digest]
            self._pool.release(node.held)
        self._events.append(AdapterLoaded(done.digest, now, now - node.load_started_s, done.error))
        return node.load_started_s

    def purge(self, digest: AdapterDigest, now: float) -> None:
        """Free an unused adapter and all KV below it; an absent one is reported with 0 bytes.

        Raises:
            BlockError: it is in use or in flight.
        """
        node = self._adapters.get(digest)
        if node is None:
            self._events.append(AdapterEvicted(digest, now, 0, dropped=True))
            return
        if node.pins or node.residency is not Residency.LOADED:
            raise BlockError(f"adapter {digest[:12]} is in use ({node.pins} sequences, {node.residency.name})")
        freed_blocks = 0
        for kv in list(_below(node)):
            self._pool.check(kv.block, kv.generation)
            self._pool.release([kv.block])
            del kv.parent.children[kv.tokens]  # also from parents that go too: candidates may still name it
            freed_blocks += 1
        self._cached -= freed_blocks
        self._evict_adapter(node, now, freed_blocks, dropped=True)

    def take_evictions(self) -> tuple[AdapterDigest, ...]:
        """Return the versions whose blocks were given up since the last call, for the executor to forget."""
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def take_events(self) -> tuple[AdapterEvent, ...]:
        """Return what happened to adapters since the last call."""
        events, self._events = tuple(self._events), []
        return events

    # --- sequences -----------------------------------------------------------------------------------

    def try_admit(self, digest: AdapterDigest | None, token_ids: list[int], now: float) -> SequenceLease | None:
        """Lease the blocks for ``token_ids``, reusing cached KV; None while there is no room.

        The last token is never taken from the cache, since its logits are wanted. The adapter must be
        loaded. ``len(lease.path) * block_tokens`` tokens need no prefill.
        """
        adapter = self._base if digest is None else self._adapters[digest]
        path = match(adapter, token_ids, self.block_tokens, len(token_ids) - 1)
        lease = SequenceLease(adapter, path=path)
        self._pin(adapter, now)
        for node in path:
            self._pool.check(node.block, node.generation)
            self._pin(node, now)
        lease.blocks = [node.block for node in path]
        self._leases.add(lease)
        if self.try_grow(lease, len(token_ids), now) is None:
            self.release(lease, now)
            return None
        return lease

    def try_grow(self, lease: SequenceLease, tokens: int, now: float) -> tuple[BlockId, ...] | None:
        """Let a lease hold ``tokens`` tokens; return the new blocks, or None while there is no room."""
        missing = self.blocks_for(tokens) - len(lease.blocks)
        if missing <= 0:
            return ()
        blocks = self._try_take(missing, now)
        if blocks is None:
            return None
        lease.blocks += blocks
        lease.private.update(blocks)
        self._kv += len(blocks)
        return tuple(blocks)

    def commit(self, lease: SequenceLease, token_ids: list[int], computed_tokens: int, now: float) -> None:
        """Make the blocks that are full now findable by others.

        ``token_ids`` are the sequence's tokens, the KV of the first ``computed_tokens`` of them is in its blocks.
        """
        if not self._keep_kv:
            return
        size = self.block_tokens
        for index in range(len(lease.path), computed_tokens // size):
            parent: Node = lease.path[-1] if lease.path else lease.adapter
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            node = parent.children.get(tokens)
            if node is None:
                block = lease.blocks[index]
                node = KvNode(tokens, parent, block, self._pool.generation(block), now)
                parent.children[tokens] = node
                lease.private.remove(block)
                self._kv -= 1  # counted again by the pin below
                self._cached += 1
            self._pin(node, now)
            lease.path.append(node)

    def release(self, lease: SequenceLease, now: float) -> None:
        """Give a lease back: what the tree knows stays cached, the rest is free.

        Raises:
            BlockError: it was given back before.
        """
        if lease not in self._leases:
            raise BlockError("a sequence's blocks are released twice")
        self._leases.remove(lease)
        self._pool.release(sorted(lease.private, reverse=True))
        self._kv -= len(lease.private)
        for node in reversed(lease.path):
            self._unpin(node, now)
        self._unpin(lease.adapter, now)

    # --- the inside ----------------------------------------------------------------------------------

    def _try_take(self, blocks: int, now: float) -> list[BlockId] | None:
        """Lease blocks, evicting for them; None, and nothing evicted, if that would not suffice."""
        if self._pool.free + self._cached < blocks:
            return None
        while self._pool.free < blocks:
            self._evict_one(now)
        return self._pool.lease(blocks)

    def _pin(self, node: Node, now: float) -> None:
        if node.pins == 0:
            self._cached -= node.blocks
            self._count_used(node, node.blocks)
        node.pins += 1
        node.last_use_s = now

    def _unpin(self, node: Node, now: float) -> None:
        node.pins -= 1
        node.last_use_s = now
        if node.pins == 0:
            self._count_used(node, -node.blocks)
            self._cached += node.blocks
            self._offer(node)

    def _count_used(self, node: Node, blocks: int) -> None:
        if isinstance(node, KvNode):
            self._kv += blocks
        else:
            self._adapter += blocks

    def _offer(self, node: Node) -> None:
        """Note an unused leaf as a candidate for eviction. Entries that no longer hold are skipped later."""
        if node.children or node.pins or node is self._base:
            return
        heapq.heappush(self._leaves, (self._eviction(node), next(self._tick), node))
        if len(self._leaves) > 2 * self._pool.total + 64:  # while nothing is evicted, entries only grow stale
            valid = {id(entry[2]): entry for entry in self._leaves if self._is_candidate(entry[2], entry[0])}
            self._leaves = list(valid.values())
            heapq.heapify(self._leaves)

    def _is_candidate(self, node: Node, key: float) -> bool:
        if node.children or node.pins or key != self._eviction(node):
            return False
        if isinstance(node, KvNode):
            return node.parent.children.get(node.tokens) is node
        return node.digest is not None and self._adapters.get(node.digest) is node

    def _evict_one(self, now: float) -> None:
        while self._leaves:
            key, _, node = heapq.heappop(self._leaves)
            if not self._is_candidate(node, key):
                continue
            if isinstance(node, KvNode):
                self._pool.check(node.block, node.generation)
                del node.parent.children[node.tokens]
                self._pool.release([node.block])
                self._cached -= 1
                self._offer(node.parent)
            else:
                self._evict_adapter(node, now)
            return
        raise BlockError(f"{self._cached} cached blocks, but no leaf to evict")

    def _evict_adapter(self, node: AdapterNode, now: float, kv_blocks: int = 0, *, dropped: bool = False) -> None:
        assert node.digest is not None, "the base has no weights to evict"
        del self._adapters[node.digest]
        self._pool.release(node.held)
        self._cached -= node.blocks
        self._evicted.append(node.digest)
        freed_bytes = (node.blocks + kv_blocks) * self.block_bytes
        self._events.append(AdapterEvicted(node.digest, now, freed_bytes, dropped))

    def check_integrity(self) -> None:
        """Count everything anew from the tree and the leases and compare; for tests and idle moments.

        Raises:
            BlockError: the accounts are wrong, or a block has two owners.
        """
        owners: list[BlockId] = [block for lease in self._leases for block in lease.private]
        kv = len(owners)
        cached = adapter = inflight = loads = 0
        for top in (self._base, *self._adapters.values()):
            owners += top.held
            if top.residency is Residency.LOADING:
                inflight += top.blocks
                loads += 1
            elif top.pins:
                adapter += top.blocks
            else:
                cached += top.blocks
            for node in _below(top):
                self._pool.check(node.block, node.generation)
                owners.append(node.block)
                kv, cached = (kv + 1, cached) if node.pins else (kv, cached + 1)
        found = BlockCounts(self._pool.total - len(owners), cached, kv, adapter, inflight)
        if found != self.counts() or loads != self._loads or len(set(owners)) != len(owners):
            raise BlockError(f"accounts say {self.counts()}, the blocks {found}, {len(set(owners))} distinct owners")


def _below(node: Node) -> Iterator[KvNode]:
    """Yield all KV below a node."""
    stack = list(node.children.values())
    while stack:
        child = stack.pop()
        yield child
        stack += child.children.values()
