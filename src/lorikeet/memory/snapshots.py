"""Keeps copies of states in the tree, where later sequences with the same tokens can start from them.

Layers with linear attention, state spaces or convolutions carry a state from token to token. A *snapshot* is a copy of
a sequence's state at the end of a block. It is a chain of nodes below the node of that block, each of one block, so
that all other parts of the memory treat it like KV. A prefix can be reused up to a block with a whole snapshot.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from lorikeet.core.ids import BlockId
from lorikeet.core.messages import SnapshotStats
from lorikeet.core.plan import StateStep
from lorikeet.memory.blocks import SequenceLease
from lorikeet.memory.eviction import Evictor
from lorikeet.memory.policies.base import EvictionPolicy, StepForecast
from lorikeet.memory.tiers import Tiers
from lorikeet.memory.tree import KEY_BYTES, NodeKind, NodeTransfer

_NUMBER_BYTES = 4
_MOST_COST = 0.25
"""Largest cost of a snapshot at the end of a prompt, as a share of the prefill that it may spare a later request."""


def snapshot_keys(key: bytes, blocks: int) -> list[bytes]:
    """Return the keys of a snapshot of this many blocks, taken at the end of the block with a key."""
    return [key + number.to_bytes(_NUMBER_BYTES, "little") for number in range(blocks)]


def is_snapshot_key(key: bytes) -> bool:
    """Return whether a key is that of a node of a snapshot."""
    return len(key) > KEY_BYTES


class Snapshots:
    """Finds snapshots for new sequences, and takes snapshots of running ones.

    A running sequence has one state, in blocks of its lease. Snapshots are taken at the block boundaries at which a
    later request may begin: at the end of the prompt, where the prompt leaves the KV that was cached before, and, while
    the sequence decodes, at each boundary. The last kind replaces the one before it.

    A snapshot at the end of a prompt costs a step of its own for the tokens after it. So short prompts take none, since
    most later requests go on from the answer.

    Args:
        tiers: holds blocks and nodes.
        evictor: frees blocks.
        eviction: is notified of new nodes.
        forecast: predicts the time of steps.
        block_size: tokens of KV in a block.
        blocks: number of blocks of a state; 0 if no layer has a state.
        keeps: whether snapshots are kept after their sequence.
    """

    def __init__(
        self,
        tiers: Tiers,
        evictor: Evictor,
        eviction: EvictionPolicy,
        forecast: StepForecast,
        block_size: int,
        blocks: int,
        *,
        keeps: bool,
    ) -> None:
        self._tiers = tiers
        self._tree = tiers.tree
        self._evictor = evictor
        self._eviction = eviction
        self._forecast = forecast
        self._block_size = block_size
        self.blocks = blocks
        self._keeps = keeps
        self.taken = 0
        self.used = 0

    def usable(self, path: list[int], keys: Sequence[bytes], *, on_device: bool = False) -> tuple[list[int], list[int]]:
        """Return the longest part of a path that ends at a whole snapshot, and the snapshot's nodes.

        Args:
            path: nodes of the leading blocks of a sequence.
            keys: keys of these blocks, or more.
            on_device: whether the snapshot must be on the device or in flight to it.
        """
        if not self.blocks:
            return path, []
        tree = self._tree
        for length in range(len(path), 0, -1):
            key = keys[length - 1]
            if tree.find(key + bytes(_NUMBER_BYTES)) is None:
                continue
            chain = tree.match(snapshot_keys(key, self.blocks))
            if len(chain) < self.blocks:
                continue
            if on_device and not (tree.on_device[chain] | (tree.moving[chain] == NodeTransfer.IN)).all():
                continue
            return path[:length], chain
        return [], []

    def begin(self, lease: SequenceLease, chain: list[int], known: int, tokens: int) -> None:
        """Give a new lease its state, which is leased already, and choose where its prefill stops for snapshots.

        Args:
            lease: the lease.
            chain: nodes of the snapshot from which the sequence starts, pinned; empty to start from zeros.
            known: number of leading blocks that were cached, with or without a snapshot.
            tokens: number of the sequence's tokens.
        """
        lease.snapshot = chain
        self.used += bool(chain)
        if not self._keeps:
            return
        found = len(lease.path)
        stops = {known}
        last = (tokens - 1) // self._block_size
        if self._pays((last - found) * self._block_size):
            stops.add(last)
        lease.stops = [stop * self._block_size for stop in sorted(stops) if stop > found]

    def _pays(self, tokens: int) -> bool:
        """Return whether a snapshot that spares later requests so many tokens is worth a further step now."""
        return _MOST_COST * self._forecast.prefill_s(tokens) >= self._forecast.least_step_s

    def orders(
        self, lease: SequenceLease, computed: int, tokens: int, repeat: int, now: float, *, ends: bool
    ) -> StateStep | None:
        """Return the orders for the state of a sequence in a step; None if there are none.

        Args:
            lease: the lease of the sequence.
            computed: number of tokens computed before the step.
            tokens: number of tokens of the step.
            repeat: number of identical steps in the plan.
            now: the time.
            ends: whether the step computes the last known token, so that later steps decode.
        """
        if not lease.state:
            return None
        blocks: tuple[BlockId, ...] = ()
        load: tuple[BlockId, ...] = ()
        if not lease.state_sent:
            lease.state_sent = True
            blocks = tuple(lease.state)
            load = tuple(self._tiers.device_blocks(lease.snapshot)) if lease.snapshot else ()
        save: tuple[BlockId, ...] = ()
        save_at = self._boundary(lease, computed, tokens, repeat, ends=ends)
        if save_at and not lease.saving and self._evictor.ensure_free(self.blocks, 0, now):
            lease.saving = self._tiers.lease_private(self.blocks)
            lease.private.update(lease.saving)
            lease.saving_at = save_at
            save = tuple(lease.saving)
        return StateStep(blocks, load, save, save_at if save else 0) if blocks or save else None

    def _boundary(self, lease: SequenceLease, computed: int, tokens: int, repeat: int, *, ends: bool) -> int:
        """Return the number of tokens at which a plan should copy the state; 0 for none."""
        if not self._keeps:
            return 0
        end = computed + tokens
        if end in lease.stops:
            return end
        size = self._block_size
        boundary = -(-end // size) * size
        return boundary if ends and boundary <= end + repeat - 1 else 0

    def computed(self, leases: Iterable[tuple[SequenceLease, int]], now: float) -> None:
        """Insert the snapshots that have been taken, and unpin those from which sequences have started.

        Args:
            leases: the sequences of a step with the numbers of their computed tokens. Their full blocks are in the
                tree, as far as they can be.
            now: the time.
        """
        for lease, tokens in leases:
            if lease.snapshot and lease.state_sent:
                self._unpin(lease, now)
            if lease.saving and tokens >= lease.saving_at:
                self._insert(lease, now)
            lease.stops = [stop for stop in lease.stops if stop > tokens]

    def release(self, lease: SequenceLease, now: float) -> None:
        """Unpin the snapshot of a lease that ends before its first step."""
        if lease.snapshot:
            self._unpin(lease, now)

    def discard(self, lease: SequenceLease, now: float) -> None:
        """Free the snapshots that a sequence has taken."""
        for key in lease.taken:
            self._discard(key, now)
        lease.taken = []

    def stats(self, block_bytes: int) -> SnapshotStats | None:
        """Return the current statistics, with blocks of this many bytes; None if no layer has a state."""
        if not self.blocks:
            return None
        tree = self._tree
        end = tree.end
        are_kept = tree.is_snapshot[:end] & (tree.kind[:end] == NodeKind.KV)
        on_device = int(np.count_nonzero(are_kept & tree.on_device[:end]))
        on_host = int(np.count_nonzero(are_kept & tree.on_host[:end]))
        return SnapshotStats(
            on_device * block_bytes, on_host * block_bytes, self.blocks * block_bytes, self.taken, self.used
        )

    def _unpin(self, lease: SequenceLease, now: float) -> None:
        chain = lease.snapshot
        lease.snapshot = []
        self._tiers.unpin(chain)
        self._tree.last_use_s[chain] = now
        self._evictor.rescore(np.asarray(chain), now)
        self._evictor.remove_empty(chain[::-1])

    def _insert(self, lease: SequenceLease, now: float) -> None:
        """Move a copied state from the lease to the tree, and drop the copy before it that it replaces."""
        tree = self._tree
        tiers = self._tiers
        blocks = lease.saving
        at = lease.saving_at // self._block_size
        is_stop = lease.saving_at in lease.stops
        lease.saving = []
        lease.private.difference_update(blocks)
        if at > len(lease.path) or not tree.on_device[lease.path[at - 1]]:
            tiers.release_private(blocks)  # the KV is not in the tree, so that nothing could find the snapshot
            return
        key = lease.keys[at - 1]
        adopted: list[int] = []
        above = lease.path[at - 1]
        new: list[bytes] = []
        for number, each in enumerate(snapshot_keys(key, self.blocks)):
            node = tree.find(each)
            if node is None:
                new = snapshot_keys(key, self.blocks)[number:]
                break
            if tree.moving[node] == NodeTransfer.IN:
                break  # nodes below it must not be found, because the copy may fail
            if not tree.on_device[node]:
                tiers.adopt([node], [blocks[number]])
                adopted.append(node)
            above = node
        if new:
            ((*chain,),) = tree.add_kv([above], [new], now)
            tiers.adopt(chain, blocks[self.blocks - len(new) :])
            adopted += chain
        taken = {int(tree.device[node]) for node in adopted}
        tiers.release_private([block for block in blocks if block not in taken])
        if adopted:
            self.taken += 1
            tree.last_use_s[adopted] = now
            self._eviction.inserted(adopted, now)
            self._evictor.rescore(np.asarray(adopted), now)
        if lease.rolling is not None and lease.rolling != key:
            self._discard(lease.rolling, now)
            lease.taken = [each for each in lease.taken if each != lease.rolling]
        lease.rolling = None if is_stop or not adopted else key
        if adopted:
            lease.taken.append(key)

    def _discard(self, key: bytes, now: float) -> None:
        """Free a snapshot, unless a sequence or a transfer needs it."""
        nodes = [self._tree.find(each) for each in snapshot_keys(key, self.blocks)]
        self._evictor.discard([node for node in nodes if node is not None], now)
