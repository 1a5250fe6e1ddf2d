"""Makes blocks that are full findable by others: those of all sequences of a step at once, since there are many."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import AdapterEvent, AdapterLoaded
from lorikeet.core.ids import AdapterDigest
from lorikeet.core.messages import MemoryStats
from lorikeet.core.plan import PACKING_ORDER, LoadOrder, Tier, Transfer, TransferDone
from lorikeet.memory.blocks import BlockError, BlockPool, SequenceLease, TransferOutcome, WaitReason, arrived
from lorikeet.memory.eviction import Evictor
from lorikeet.memory.integrity import check_accounts, check_tree
from lorikeet.memory.known_adapters import AdapterSize, KnownAdapters
from lorikeet.memory.kv_migration import KvMigration
from lorikeet.memory.policies import EVICTION, PREFETCH
from lorikeet.memory.policies.base import EvictionPolicy, MemoryView
from lorikeet.memory.rules import MemoryRules
from lorikeet.memory.statistics import MemoryCounters
from lorikeet.memory.swapper import Swapper
from lorikeet.memory.tiers import Tiers
from lorikeet.memory.transfers import BlockCounts, HostCounts, InflightTransfer
from lorikeet.memory.tree import BASE, DependencyTree, NodeKind, NodeTransfer, block_keys


class ComputedTokens(NamedTuple):
    """How far a sequence is.

    Attributes:
        lease: its blocks.
        token_ids: all its tokens.
        tokens: of them whose KV is in its blocks, from the first on.
    """

    lease: SequenceLease
    token_ids: list[int]
    tokens: int


class PrefixInsertion:
    """Puts what sequences have computed into the tree.

    Args:
        tiers: let nodes stand for the blocks.
        eviction: is told of them.
        block_size: tokens of KV in a block.
    """

    def __init__(self, tiers: Tiers, eviction: EvictionPolicy, block_size: int) -> None:
        self._tiers = tiers
        self._tree = tiers.tree
        self._eviction = eviction
        self._block_tokens = block_size

    def insert(self, computed: Iterable[ComputedTokens], now: float) -> None:
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
            if node is None or tree.moving[node] == NodeTransfer.IN:
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


_PLAIN = MemoryRules()

Assist = Callable[[AdapterRef, int], LoadOrder]
"""How an adapter on the host is to arrive if the host assists a prefill of so many tokens; ``PACKING_ORDER`` if not."""


class Memory:
    """See the module.

    Args:
        device_blocks, host_blocks: sizes of the arenas.
        block_size: tokens of KV in a block.
        block_bytes: bytes of a block, for reports.
        adapter_size: what an adapter takes when packed.
        eviction, prefetch: names of policies.
        rules: of the row.
        assist: whose prefill the host assists; nobody's by default.
    """

    def __init__(
        self,
        device_blocks: int,
        host_blocks: int,
        block_size: int,
        block_bytes: int,
        adapter_size: Callable[[AdapterRef], AdapterSize],
        eviction: str = "lru",
        prefetch: str = "none",
        rules: MemoryRules = _PLAIN,
        assist: Assist = lambda ref, tokens: PACKING_ORDER,
    ) -> None:
        self._assist = assist
        self.block_size = block_size
        self.block_bytes = block_bytes
        self._rules = rules
        self.tree = DependencyTree()
        self.tiers = Tiers(self.tree, BlockPool(device_blocks), BlockPool(host_blocks), dependent=rules.dependent)
        self._view = MemoryView(self.tree, device_blocks)
        self._view.resident_adapters = lambda: self.tiers.resident_adapters
        self._eviction = EVICTION[eviction](self._view)
        self._prefetch = PREFETCH[prefetch](self._view, self._eviction)
        self.counters = MemoryCounters(self.tiers, rules)
        self.evictor = Evictor(self.tiers, self._eviction, self._prefetch, rules, self.counters, block_bytes)
        self.swapper = Swapper(self.tiers, self.evictor, self._eviction, self._prefetch, rules, self.counters)
        self.adapters = KnownAdapters(self.tiers, self.evictor, rules, adapter_size, block_bytes)
        self._insertion = PrefixInsertion(self.tiers, self._eviction, block_size)
        self._view.load_s = self.adapters.predicted_load_s
        self._leases: set[SequenceLease] = set()
        self._waiting: dict[int, set[SequenceLease]] = {}
        self.kv_migration = KvMigration(self.tiers, self.evictor, self._leases)

    # --- what there is -------------------------------------------------------------------------------

    @property
    def total_blocks(self) -> int:
        """Blocks in the device arena."""
        return self.tiers.device.total

    def counts(self) -> BlockCounts:
        """Return the number of device blocks in each state."""
        return self.tiers.counts()

    def host_counts(self) -> HostCounts:
        """Return the number of host blocks in each state."""
        return self.tiers.host_counts()

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that ``tokens`` tokens of KV take."""
        return -(-tokens // self.block_size)

    def resident(self) -> dict[AdapterDigest, int]:
        """Return the adapters on the device and the blocks of each."""
        entries = map(self.tree.adapters.__getitem__, self.tree.adapters_on_device())
        return {entry.ref.digest: len(entry.device_blocks) for entry in entries}

    @property
    def transfers_under_way(self) -> int:
        """Transfers that have not ended."""
        return len(self.tiers.transfers)

    @property
    def awaited_transfers(self) -> int:
        """Transfers that some admitted sequence waits for."""
        return len(self._waiting)

    @property
    def room_is_coming(self) -> bool:
        """Whether blocks become free by transfers under way alone."""
        return self.tiers.blocks_being_freed > 0

    @property
    def relief_is_coming(self) -> bool:
        """Whether a transfer is under way that somebody waits for, or that frees blocks."""
        return self.room_is_coming or any(inflight.demand for inflight in self.tiers.transfers.values())

    def why_impossible(self, ref: AdapterRef | None, tokens: int) -> str | None:
        """Return why a sequence of ``tokens`` tokens under an adapter could not run even alone, None if it could."""
        adapter = 0 if ref is None else self.adapters.device_blocks(ref)
        problem = self.evictor.why_impossible(self.blocks_for(tokens), adapter)
        return problem and f"{tokens} tokens and {adapter} blocks of adapter {problem}"

    # --- adapters ------------------------------------------------------------------------------------

    def register(self, ref: AdapterRef) -> int:
        """Take note of a version, so that it can be prefetched and read into the host tier; return its node."""
        node = self.tree.adapter(ref.digest)
        if node is None:
            node = self.adapters.add(ref)
            self.swapper.note_known(node)
        return node

    def retire(self, digest: AdapterDigest, now: float) -> bool:
        """Free a version that no request needs, its KV too, on every tier; report what was freed.

        Returns:
            False if transfers of it are under way: nothing new begins for it alone, and the caller asks again.

        Raises:
            BlockError: a sequence uses it.
        """
        node = self.tree.adapter(digest)
        is_gone = self.adapters.retire(digest, now)
        if is_gone and node is not None:
            self.swapper.forget(node)
        return is_gone

    def finish_transfer(self, done: TransferDone, now: float) -> TransferOutcome:
        """Take the end of a transfer in.

        Raises:
            BlockError: it was not under way.
        """
        result = self.tiers.finish(done)
        inflight, tree = result.inflight, self.tree
        leases = tuple(self._waiting.pop(done.transfer_id, ()))
        self.kv_migration.transfer_ended(done.transfer_id)
        self.swapper.note_transfer_end(inflight, done.error, now)
        self._eviction.inserted(result.came, now)
        self.evictor.rescore(np.asarray(inflight.nodes), now)
        for node in inflight.nodes:
            if tree.kind[node] == NodeKind.KV:
                self.evictor.offer(int(tree.parent[node]))
                self.adapters.clear_stranded_kv(node, now)
        self.evictor.forget_if_empty(list(reversed(inflight.nodes)))
        if inflight.transfer.adapter is not None:
            self.adapters.clear_stranded(inflight.nodes[0], now)
            self._report_load(inflight, done, now)
            if inflight.demand:  # whoever asked for it may have ended
                self.adapters.free_if_unkept(inflight.nodes[0], self._view.waiting, now)
        return arrived(leases, done, inflight.began_s)

    def take_transfers(self) -> tuple[tuple[Transfer, ...], tuple[int, ...]]:
        """Return the transfers begun since the last call, and the ids of earlier ones that are awaited by now."""
        return self.tiers.take_begun()

    def take_evictions(self) -> tuple[AdapterDigest, ...]:
        """Return the versions whose device blocks were given up since the last call, for the executor to forget."""
        evicted, self.evictor.evicted = tuple(self.evictor.evicted), []
        return evicted

    def take_events(self) -> tuple[AdapterEvent, ...]:
        """Return what happened to adapters since the last call."""
        events, self.evictor.events = tuple(self.evictor.events), []
        return events

    # --- requests ------------------------------------------------------------------------------------

    def arrive(self, ref: AdapterRef | None, keys: Sequence[bytes], tokens: int, now: float) -> None:
        """A request arrived (ELORA §V-B): note visits and last uses of its adapter and of the KV that it matches.

        Args:
            ref: its adapter.
            keys: of its whole blocks.
            tokens: of its prompt, and those that another engine has added.
            now: the time.
        """
        adapter = BASE if ref is None else self.register(ref)
        path = self.tree.match(keys)
        nodes = [adapter, *path]
        self.tree.visits[nodes] += 1
        self.tree.last_use_s[nodes] = now
        self._eviction.arrived(adapter, path, now)
        self._prefetch.arrived(adapter, now)
        self.evictor.rescore(np.asarray(nodes), now)
        self.counters.arrived(adapter, path, self.block_size, tokens)

    def keys_of(
        self, digest: AdapterDigest | None, token_ids: Sequence[int], known: Sequence[bytes] = ()
    ) -> list[bytes]:
        """Return the keys of the whole blocks of a sequence, going on from those known."""
        return block_keys(digest, token_ids, self.block_size, known)

    def try_admit(
        self, ref: AdapterRef | None, keys: Sequence[bytes], tokens: int, now: float
    ) -> SequenceLease | WaitReason:
        """Lease the blocks of a sequence, reuse the KV that is found for it, and begin the transfers it waits for.

        The last token is never taken from the cache, since its logits are wanted.

        Args:
            ref: its adapter.
            keys: of its whole blocks.
            tokens: that it must hold.
            now: the time.
        """
        tree, tiers = self.tree, self.tiers
        adapter = BASE if ref is None else self.register(ref)
        if adapter != BASE:
            tree.adapters[adapter].retired = False  # who was accepted before it is freed is served first
        if tree.moving[adapter] == NodeTransfer.READ and not tree.on_device[adapter]:
            tiers.want([adapter])
            return WaitReason.TRANSFER
        load = adapter != BASE and not tree.on_device[adapter] and tree.moving[adapter] != NodeTransfer.IN
        adapter_blocks = self.adapters.blocks_to_come(adapter) if load else 0
        if self.evictor.lacks_slot(adapter_blocks):  # asked first, as thousands may wait for one
            return WaitReason.SLOT
        path = tree.match(keys[: (tokens - 1) // self.block_size])
        away = [node for node in path if not tree.on_device[node] and tree.moving[node] != NodeTransfer.IN]
        private = self.blocks_for(tokens) - len(path)
        pinned = [adapter, *path]
        tiers.pin(pinned)
        if not self.evictor.make(private + len(away), adapter_blocks, now):
            lacking = self.evictor.what_lacks(private + len(away), adapter_blocks)
            tiers.unpin(pinned)
            self.evictor.offer_all(np.asarray(pinned))
            return lacking
        lease = SequenceLease(adapter, path=path, keys=list(keys), cached_blocks=len(path))
        self._leases.add(lease)
        if load:
            to_prefill = tokens - len(path) * self.block_size
            order = self._assist(ref, to_prefill) if ref is not None and tree.on_host[adapter] else PACKING_ORDER
            self.swapper.load(adapter, now, demand=True, order=order)
        if away:
            tiers.fetch_kv(away, tiers.device.lease(len(away)), now, demand=True)
        # An adapter that is on the device may be on its way to the host, too, for which nobody has to wait.
        for inflight in tiers.want([] if tree.on_device[adapter] else [adapter]):
            lease.adapter_transfers.add(inflight.transfer.transfer_id)
            lease.assisted = bool(inflight.transfer.groups)
        for inflight in tiers.want(path):
            lease.kv_transfers.add(inflight.transfer.transfer_id)
        for transfer_id in lease.adapter_transfers | lease.kv_transfers:
            self._waiting.setdefault(transfer_id, set()).add(lease)
        tree.last_use_s[pinned] = now
        self._eviction.admitted(adapter, path, now)
        self.counters.admitted(adapter, path)
        lease.blocks = tiers.device_blocks(path)
        added = tiers.lease_private(private)
        lease.blocks += added
        lease.private.update(added)
        return lease

    def try_grow(self, wanted: Iterable[tuple[SequenceLease, int]], now: float) -> bool:
        """Let each lease hold so many tokens; False, and nothing is leased, if there is no room for all."""
        lacking = []
        for lease, tokens in wanted:
            missing = self.blocks_for(tokens) - len(lease.blocks)
            if missing > 0:
                lacking.append((lease, missing))
        if lacking and not self.evictor.make(sum(missing for _, missing in lacking), 0, now):
            return False
        for lease, missing in lacking:
            blocks = self.tiers.lease_private(missing)
            lease.blocks += blocks
            lease.private.update(blocks)
        return True

    def is_behind(self, lease: SequenceLease, computed_tokens: int) -> bool:
        """Whether blocks of a lease are full that :meth:`commit` was not told of."""
        return computed_tokens >= (len(lease.path) + 1) * self.block_size

    def commit(self, computed: Iterable[ComputedTokens], now: float) -> None:
        """Make the blocks of sequences that are full now findable by others."""
        if self._rules.keep_kv:
            self._insertion.insert(computed, now)

    def suspend(
        self, lease: SequenceLease, token_ids: list[int], computed_tokens: int, now: float, *, keep_kv: bool = True
    ) -> None:
        """Give a lease back whose sequence will go on: its whole blocks stay, on whichever tier there is room.

        ``try_admit`` with the sequence's keys resumes it: what is still there is fetched, the rest computed again.
        Without ``keep_kv`` nothing stays but what was found for it.
        """
        if keep_kv:
            self._insertion.insert([ComputedTokens(lease, token_ids, computed_tokens)], now)
        self._give_back(lease, now)
        for node in () if keep_kv else reversed(lease.path[lease.cached_blocks :]):
            self.evictor.discard(node, now)

    def release(self, lease: SequenceLease, now: float) -> None:
        """Give a lease back whose sequence has ended: what the tree knows stays cached, the rest is free.

        Raises:
            BlockError: it was given back before.
        """
        self._give_back(lease, now)
        if not self._rules.keep_kv:
            for node in reversed(lease.path):
                self.evictor.discard(node, now)
        self.adapters.free_if_unkept(lease.adapter, self._view.waiting, now)

    def note_waiting(self, queued: int, wanted: Callable[[], Mapping[AdapterDigest, int]], now: float) -> None:
        """Tell the policies how many requests are queued and, if that matters, which adapters they want in what order.

        Args:
            queued: how many.
            wanted: returns the adapters with how many want each; takes a while.
            now: the time.
        """
        self._view.queued = queued
        if self._rules.keep_adapters and not (self._eviction.follows_queue or self._prefetch.follows_queue):
            return
        nodes = {self.tree.adapter(digest): count for digest, count in wanted().items()}
        before = self._view.waiting
        self._view.waiting = {node: count for node, count in nodes.items() if node is not None}
        for node in before:  # whoever waited for it may have been aborted
            self.adapters.free_if_unkept(node, self._view.waiting, now)

    def note_batch(self, running: int, now: float) -> None:
        """Tell the policies how many sequences hold blocks from now on."""
        self._eviction.batch(running, now)

    def note_step(self, step_s: float) -> None:
        """Tell the policies how long a step takes at present."""
        self._view.iteration_s = step_s

    # --- the inside ----------------------------------------------------------------------------------

    def _give_back(self, lease: SequenceLease, now: float) -> None:
        if lease not in self._leases:
            raise BlockError("a sequence's blocks are released twice")
        self._leases.remove(lease)
        for transfer_id in lease.adapter_transfers | lease.kv_transfers:
            self._waiting[transfer_id].discard(lease)
            if not self._waiting[transfer_id]:
                del self._waiting[transfer_id]
        self.tiers.release_private(sorted(lease.private, reverse=True))
        pinned = [lease.adapter, *lease.path]
        self.tiers.unpin(pinned)
        self.tree.last_use_s[pinned] = now
        self.evictor.rescore(np.asarray(pinned), now)
        self.evictor.forget_if_empty(lease.path[::-1])
        self.adapters.clear_stranded(lease.adapter, now)
        if not self.tree.on_device[lease.path].all():  # some of it did not arrive; what did is of no use here
            for node in lease.path:
                self.adapters.clear_stranded_kv(node, now)
        self.swapper.stir()

    def _report_load(self, inflight: InflightTransfer, done: TransferDone, now: float) -> None:
        transfer = inflight.transfer
        assert transfer.adapter is not None
        if transfer.target is Tier.DEVICE or done.error is not None:
            self.evictor.events.append(AdapterLoaded(transfer.adapter.digest, now, now - inflight.began_s, done.error))

    def check_integrity(self) -> None:
        """Count everything anew and compare; for tests and idle moments.

        Raises:
            BlockError: the accounts are wrong, a block has two owners, or something is pinned by nobody.
        """
        check_accounts(self.tiers, [block for lease in self._leases for block in lease.private])
        self.evictor.check_queues()
        check_tree(self.tree, [[lease.adapter, *lease.path] for lease in self._leases], dependent=self._rules.dependent)

    def stats(self) -> MemoryStats:
        """Return what there is to tell."""
        return self.counters.stats(self.block_bytes, self.adapters.waste_bytes())
