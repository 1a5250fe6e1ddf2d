"""Manages the unified memory of one engine: one pool of blocks for KV and adapters, on the device and on the host.

The scheduler and the engine loop call ``Memory``. ``Memory`` leases blocks to sequences, reuses cached KV by prefix,
begins the transfers that a sequence waits for, and evicts and prefetches by the preset's policies. The memory neither
copies bytes nor waits: the executor makes the copies, and reports when a transfer has ended.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec
import numpy as np

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.events import AdapterEvent, AdapterLoaded
from lorikeet.core.guard import Guards
from lorikeet.core.ids import AdapterDigest
from lorikeet.core.messages import MemoryStats
from lorikeet.core.plan import PACKING_ORDER, LoadOrder, Tier, Transfer, TransferDone
from lorikeet.memory.blocks import BlockError, BlockPool, SequenceLease, TransferOutcome, WaitReason, arrived
from lorikeet.memory.eviction import Evictor
from lorikeet.memory.images import ImageMemory
from lorikeet.memory.integrity import check_accounts, check_tree
from lorikeet.memory.known_adapters import AdapterSize, KnownAdapters
from lorikeet.memory.kv_events import BlockTokens
from lorikeet.memory.kv_migration import KvMigration
from lorikeet.memory.options import MemoryOptions
from lorikeet.memory.policies.base import MemoryView, StepForecast
from lorikeet.memory.prefix_insertion import ComputedTokens, PrefixInsertion
from lorikeet.memory.reuse import KvReuse
from lorikeet.memory.shadows import Shadows
from lorikeet.memory.snapshots import Snapshots
from lorikeet.memory.statistics import MemoryCounters
from lorikeet.memory.swapper import Swapper
from lorikeet.memory.tiers import Tiers
from lorikeet.memory.transfer_records import BlockCounts, HostCounts, InflightTransfer
from lorikeet.memory.tree import BASE, DependencyTree, NodeKind, NodeTransfer, block_keys
from lorikeet.policies import EVICTION, PREFETCH
from lorikeet.presets import HostKv

_PLAIN = MemoryOptions()
_GHOSTS_PER_BLOCK = 2
"""Number of remembered keys of evicted KV, per block of both tiers."""

ChooseLoadOrder = Callable[[AdapterRef, int], LoadOrder]
"""Returns the order in which an adapter's blocks are copied from the host, given the number of tokens to prefill.
``PACKING_ORDER`` means that host cores do not assist the prefill."""


class _NoForecast:
    """Predicts nothing, for a memory without a scheduler."""

    least_step_s = 0.0

    def prefill_s(self, tokens: float) -> float:
        return 0.0

    def delay_per_lost_second(self, excluded: int = 0) -> float:
        return 0.0


class Memory:
    """Leases blocks, caches KV and adapters, and moves them between device and host.

    Args:
        device_blocks, host_blocks: sizes of the arenas, in blocks.
        block_size: tokens of KV in a block.
        block_bytes: bytes of a block, for reports.
        adapter_size: returns the size of a packed adapter.
        eviction, prefetch: names of policies (``policies.EVICTION``, ``policies.PREFETCH``).
        options: memory options of the preset.
        forecast: predicts steps for the policies. By default, nothing is predicted.
        tokens: keeps the tokens of blocks for events of KV; None without events.
        state_blocks: number of blocks of a sequence's state (``ModelGeometry.state_blocks``); 0 without a state.
        image_tokens: largest number of tokens of images whose embeddings are kept.
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
        options: MemoryOptions = _PLAIN,
        forecast: StepForecast | None = None,
        tokens: BlockTokens | None = None,
        state_blocks: int = 0,
        image_tokens: int = 0,
    ) -> None:
        forecast = forecast or _NoForecast()
        self.block_size = block_size
        self.block_bytes = block_bytes
        self._options = options
        self.tree = DependencyTree()
        self.tiers = Tiers(self.tree, BlockPool(device_blocks), BlockPool(host_blocks), dependent=options.dependent)
        self._reuse = KvReuse(_GHOSTS_PER_BLOCK * (device_blocks + host_blocks))
        self.guards = Guards(enabled=options.guard)
        self._view = MemoryView(
            self.tree,
            device_blocks,
            resident_adapters=lambda: self.tiers.resident_adapters,
            load_s=self.tiers.adapter_loads_s,
            load_kv_s=self.tiers.queued_kv_load_s,
            load_kv_alone_s=partial(self.tiers.copy_s, Tier.HOST, Tier.DEVICE),
            store_kv_s=self.tiers.queued_kv_store_s,
            store_kv_alone_s=partial(self.tiers.copy_s, Tier.DEVICE, Tier.HOST),
            reread_s=self.tiers.adapter_reread_s,
            prefill_s=lambda blocks: forecast.prefill_s(blocks * block_size),
            delay_per_lost_second=forecast.delay_per_lost_second,
            kv_reuse=self._reuse.shares_on_device,
            kv_share=self._reuse.share_on_device,
            evicted_kv_share=self._reuse.share,
            guards=self.guards,
        )
        self._eviction = EVICTION[eviction](self._view)
        self._prefetch = PREFETCH[prefetch](self._view, self._eviction)
        self.counters = MemoryCounters(self.tiers, options)
        self._shadows = Shadows.build(self._view, options, self._eviction, self.tiers)
        self.evictor = Evictor(
            self.tiers,
            self._eviction,
            self._prefetch,
            options,
            self.counters,
            self._reuse,
            block_bytes,
            self._shadows.copies,
        )
        self.swapper = Swapper(
            self.tiers, self.evictor, self._eviction, self._prefetch, options, self.counters, self._view, self._reuse
        )
        self.images = ImageMemory(image_tokens)
        self.adapters = KnownAdapters(self.tiers, self.evictor, options, adapter_size, block_bytes)
        self._insertion = PrefixInsertion(self.tiers, self._eviction, block_size, tokens)
        self.snapshots = Snapshots(
            self.tiers, self.evictor, self._eviction, forecast, block_size, state_blocks, keeps=options.keep_kv
        )
        self._copy_awaited_s: float | None = None
        # Both are in the order of admission, not by hash, so that runs repeat.
        self._leases: dict[SequenceLease, None] = {}
        self._waiting: dict[int, dict[SequenceLease, None]] = {}
        self.kv_migration = KvMigration(self.tiers, self.evictor, self._leases, self.snapshots)

    # --- counts --------------------------------------------------------------------------------------

    @property
    def total_blocks(self) -> int:
        """Number of blocks in the device arena."""
        return self.tiers.device.total

    def counts(self) -> BlockCounts:
        """Count the device blocks in each state."""
        return self.tiers.counts()

    def host_counts(self) -> HostCounts:
        """Count the host blocks in each state."""
        return self.tiers.host_counts()

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that ``tokens`` tokens of KV take."""
        return -(-tokens // self.block_size)

    def resident(self) -> dict[AdapterDigest, int]:
        """Return the adapters on the device, with the number of blocks of each."""
        return self.adapters.cached().resident

    def hosted(self) -> tuple[AdapterDigest, ...]:
        """Return the adapters in the host tier."""
        return self.adapters.cached().hosted

    @property
    def transfers_in_flight(self) -> int:
        """Number of transfers that have not ended."""
        return len(self.tiers.transfers)

    @property
    def awaited_transfers(self) -> int:
        """Number of transfers that an admitted sequence waits for."""
        return len(self._waiting)

    def awaited_s(self) -> float:
        """Return the expected seconds until all transfers to the device that a sequence waits for have ended."""
        seconds = 0.0
        for inflight in self.tiers.transfers.values():
            if inflight.demand and inflight.transfer.target is Tier.DEVICE:
                blocks = (len(inflight.transfer.device_blocks) or len(inflight.nodes)) - inflight.transfer.kept
                seconds += self.tiers.copy_s(inflight.transfer.source, Tier.DEVICE, blocks)
        return seconds

    @property
    def iteration_s(self) -> float:
        """Duration of the last step in seconds; 0 before the first."""
        return self._view.iteration_s

    @property
    def blocks_are_being_freed(self) -> bool:
        """Whether a transfer in flight will free device blocks when it ends."""
        return self.tiers.blocks_being_freed > 0

    @property
    def transfers_will_unblock(self) -> bool:
        """Whether a sequence waits for a transfer in flight, or such a transfer will free blocks."""
        return self.blocks_are_being_freed or any(inflight.demand for inflight in self.tiers.transfers.values())

    def why_impossible(self, ref: AdapterRef | None, tokens: int) -> str | None:
        """Return the reason why a sequence with an adapter could not run even alone. Return None if it could."""
        adapter = 0 if ref is None else self.adapters.device_blocks(ref)
        problem = self.evictor.why_impossible(self.blocks_for(tokens) + self.snapshots.blocks, adapter)
        return problem and f"{tokens} tokens and {adapter} blocks of adapter {problem}"

    # --- adapters ------------------------------------------------------------------------------------

    def register(self, ref: AdapterRef) -> int:
        """Add an adapter version to the tree, so that it can be prefetched and read into the host tier.

        Returns:
            The version's node. The node of a known version does not change.
        """
        node = self.tree.adapter(ref.digest)
        if node is None:
            node = self.adapters.add(ref)
            self.swapper.adapter_registered(node)
        return node

    def pin_adapters(self, digests: Iterable[AdapterDigest], now: float) -> None:
        """Pin these versions and unpin all others.

        A pinned adapter is evicted only if a request could not run otherwise.
        """
        self.evictor.pin(digests, now)

    def retire(self, digest: AdapterDigest, now: float) -> bool:
        """Free an unneeded adapter version and its KV on both tiers, and append an ``AdapterEvicted`` event.

        Returns:
            False if transfers of the version are in flight. No new transfer of the version is started, and the caller
            retries.

        Raises:
            BlockError: a sequence uses it.
        """
        node = self.tree.adapter(digest)
        is_gone = self.adapters.retire(digest, now)
        if is_gone and node is not None:
            self.swapper.forget(node)
        return is_gone

    def finish_transfer(self, done: TransferDone, now: float) -> TransferOutcome:
        """Apply the end of a transfer.

        Returns:
            The leases that waited for the transfer, grouped by its result.

        Raises:
            BlockError: the transfer was not in flight.
        """
        result = self.tiers.finish(done)
        inflight = result.inflight
        tree = self.tree
        leases = tuple(self._waiting.pop(done.transfer_id, ()))
        self.kv_migration.transfer_ended(done.transfer_id)
        self.swapper.note_transfer_end(inflight, done.error, now)
        if self._shadows.loads is not None:
            self._shadows.loads.ended(done.transfer_id, now - inflight.began_s, now)
        self._eviction.inserted(result.arrived, now)
        self.evictor.rescore(np.asarray(inflight.nodes, np.int64), now)
        nodes = np.asarray(inflight.nodes, np.int64)
        parents = tree.parent[nodes[tree.kind[nodes] == NodeKind.KV]]
        self.adapters.evict_kv_without_parents(nodes, now)
        self.evictor.offer_all(np.array(sorted(set(parents.tolist())), np.int64))
        self.evictor.remove_empty(list(reversed(inflight.nodes)))
        if inflight.transfer.adapter is not None:
            self.adapters.evict_kv_without_adapter(inflight.nodes[0], now)
            self._report_load(inflight, done, now)
            if inflight.demand:  # the request that needed the adapter may have ended
                self.adapters.evict_if_not_kept(inflight.nodes[0], self._view.waiting, now)
        return arrived(leases, done, inflight.began_s)

    def take_transfers(self) -> tuple[tuple[Transfer, ...], tuple[int, ...]]:
        """Return the transfers begun since the last call, and the ids of transfers that a sequence now waits for."""
        return self.tiers.take_started()

    def take_evictions(self) -> tuple[AdapterDigest, ...]:
        """Return the adapter versions evicted from the device since the last call, for the executor to forget."""
        evicted = tuple(self.evictor.evicted)
        self.evictor.evicted = []
        return evicted

    def take_events(self) -> tuple[AdapterEvent, ...]:
        """Return the adapter events since the last call."""
        events = tuple(self.evictor.events)
        self.evictor.events = []
        return events

    # --- requests ------------------------------------------------------------------------------------

    def arrive(self, ref: AdapterRef | None, keys: Sequence[bytes], tokens: int, now: float) -> None:
        """Update the visits and the last use of a new request's adapter and of the KV that the request matches.

        Visits are counted on arrival, not on admission (ELORA §V-B).

        Args:
            ref: adapter of the request; None for the base model.
            keys: keys of the whole blocks of the request's tokens.
            tokens: number of the request's tokens, including output that another engine has generated.
            now: the time.
        """
        adapter = BASE if ref is None else self.register(ref)
        path, chain = self.snapshots.usable(self.tree.match(keys), keys)
        nodes = np.array([adapter, *path, *chain])
        on_device = int(np.count_nonzero(self.tree.on_device[nodes[1 : 1 + len(path)]]))
        unused_s = now - float(self.tree.last_use_s[path[-1]]) if path else 0.0
        self._reuse.requested(adapter, keys, on_device, len(path), unused_s, now)
        self._shadows.requested(adapter, keys, path, now)
        self.tree.visits[nodes] += 1
        self.tree.last_use_s[nodes] = now
        self._eviction.arrived(adapter, path, now)
        self._prefetch.arrived(adapter, now)
        self.evictor.rescore(nodes, now)
        self.counters.arrived(adapter, path, self.block_size, tokens)

    def keys_of(
        self,
        digest: AdapterDigest | None,
        token_ids: Sequence[int],
        known: Sequence[bytes] = (),
        *,
        salt: str = "",
        start: int = 0,
    ) -> list[bytes]:
        """Return the keys of a sequence's whole blocks. ``known`` contains the keys of its first blocks."""
        return block_keys(digest, token_ids, self.block_size, known, salt=salt, start=start)

    def try_admit(
        self,
        ref: AdapterRef | None,
        keys: Sequence[bytes],
        tokens: int,
        now: float,
        *,
        salt: str = "",
        start: int = 0,
        load_order: ChooseLoadOrder = lambda ref, tokens: PACKING_ORDER,
    ) -> SequenceLease | WaitReason:
        """Admit a sequence: lease its blocks, reuse cached KV, and begin the transfers that it waits for.

        The last token is never read from the cache, because its logits are needed.

        Args:
            ref: adapter of the request; None for the base model.
            keys: keys of the whole blocks of the request's tokens.
            tokens: number of tokens that the blocks must hold.
            now: the time.
            salt: salt of its keys.
            start: position of the first token on which the adapter acts.
            load_order: chooses the load order of an adapter that is on the host but not on the device.

        Returns:
            The lease. If the sequence cannot be admitted, the reason; then nothing is leased or pinned.
        """
        tree = self.tree
        tiers = self.tiers
        adapter = BASE if ref is None else self.register(ref)
        if adapter != BASE:
            tree.adapters[adapter].retired = False  # requests that were accepted before the retirement are served first
        if tree.moving[adapter] == NodeTransfer.READ and not tree.on_device[adapter]:
            tiers.want([adapter])
            return WaitReason.TRANSFER
        load = adapter != BASE and not tree.on_device[adapter] and tree.moving[adapter] != NodeTransfer.IN
        adapter_blocks = self.adapters.missing_device_blocks(adapter) if load else 0
        # A cheap check comes first, because thousands of requests may wait for a slot
        if self.evictor.lacks_slot(adapter_blocks):
            return WaitReason.SLOT
        cached = tree.match(keys[: (tokens - 1) // self.block_size])
        path, chain = self.snapshots.usable(cached, keys)
        away = self._away([*path, *chain])
        may_compute = away and self._options.host_kv is HostKv.AHEAD
        if may_compute and not self._loads_kv(len(away), self.blocks_for(tokens), now):
            missing = self._away(path)
            path = path[: path.index(missing[0])] if missing else path
            path, chain = self.snapshots.usable(path, keys, on_device=True)
            away = []
        private = self.blocks_for(tokens) - len(path) + self.snapshots.blocks
        pinned = np.array([adapter, *path, *chain])
        tiers.pin(pinned)
        if not self.evictor.ensure_free(private + len(away), adapter_blocks, now):
            lacking = self.evictor.wait_reason(private + len(away), adapter_blocks)
            if self._copy_awaited_s is None and self.blocks_are_being_freed:
                self._copy_awaited_s = now
            tiers.unpin(pinned)
            self.evictor.offer_all(pinned)
            return lacking
        if self._copy_awaited_s is not None:
            if self._shadows.copies is not None:
                self._shadows.copies.waited(now - self._copy_awaited_s, now)
            self._copy_awaited_s = None
        lease = SequenceLease(
            adapter, path=path, keys=list(keys), cached_blocks=len(path), salt=salt, adapter_start=start
        )
        self._leases[lease] = None
        if load:
            to_prefill = tokens - len(path) * self.block_size
            may_assist = ref is not None and tree.on_host[adapter] and not start
            order = load_order(ref, to_prefill) if ref is not None and may_assist else PACKING_ORDER
            self.swapper.load(adapter, now, demand=True, order=order)
        if away:
            inflight = tiers.fetch_kv(away, tiers.device.lease(len(away)), now, demand=True)
            if self._shadows.loads is not None:
                self._shadows.loads.began(inflight.transfer.transfer_id, len(away), self.blocks_for(tokens), now)
        # An adapter on the device may be in a transfer to the host. No sequence waits for such a transfer.
        for inflight in tiers.want([] if tree.on_device[adapter] else [adapter]):
            lease.adapter_transfers.add(inflight.transfer.transfer_id)
            lease.assisted = bool(inflight.transfer.groups)
        for inflight in tiers.want([*path, *chain]):
            lease.kv_transfers.add(inflight.transfer.transfer_id)
        for transfer_id in lease.adapter_transfers | lease.kv_transfers:
            self._waiting.setdefault(transfer_id, {})[lease] = None
        tree.last_use_s[pinned] = now
        self._eviction.admitted(adapter, path, now)
        lease.prefetched = self.counters.admitted(adapter, path)
        lease.blocks = tiers.device_blocks(pinned[1 : 1 + len(path)])
        added = tiers.lease_private(private)
        lease.private.update(added)
        if self.snapshots.blocks:
            lease.state = added[: self.snapshots.blocks]
            added = added[self.snapshots.blocks :]
            self.snapshots.begin(lease, chain, len(cached), tokens)
        lease.blocks += added
        return lease

    def try_grow(self, wanted: Iterable[tuple[SequenceLease, int]], now: float) -> bool:
        """Extend leases until each holds its number of tokens.

        If not all can be extended, lease nothing and return False.
        """
        lacking = []
        size = self.block_size
        for lease, tokens in wanted:
            if tokens > size * len(lease.blocks):
                lacking.append((lease, self.blocks_for(tokens) - len(lease.blocks)))
        if lacking and not self.evictor.ensure_free(sum(missing for _, missing in lacking), 0, now):
            return False
        for lease, missing in lacking:
            blocks = self.tiers.lease_private(missing)
            lease.blocks += blocks
            lease.private.update(blocks)
        return True

    def commit(self, computed: Iterable[ComputedTokens], now: float) -> None:
        """Insert the full blocks of sequences into the tree, where other sequences can find them."""
        if self._options.keep_kv:
            self._insertion.insert(computed, now)

    def commit_states(self, leases: Iterable[tuple[SequenceLease, int]], now: float) -> None:
        """Apply the copies of states that a step has made; see ``Snapshots.computed``. After :meth:`commit`."""
        self.snapshots.computed(leases, now)

    def suspend(
        self, lease: SequenceLease, token_ids: list[int], computed_tokens: int, now: float, *, keep_kv: bool = True
    ) -> None:
        """Release the lease of a preempted sequence. Its full blocks stay cached until they are evicted.

        ``try_admit`` with the sequence's keys resumes the sequence: cached KV is reused, and the rest is computed
        again. Without ``keep_kv``, the KV that the sequence computed is freed. KV that the sequence found in the cache
        stays.
        """
        if keep_kv:
            self._insertion.insert([ComputedTokens(lease, token_ids, computed_tokens)], now)
        self._return_lease(lease, now)
        if not keep_kv:
            self.snapshots.discard(lease, now)
            self.evictor.discard(lease.path[lease.cached_blocks :], now)

    def release(self, lease: SequenceLease, now: float) -> None:
        """Release the lease of a finished sequence. Blocks in the tree stay cached, and all other blocks are freed.

        Raises:
            BlockError: the lease was released before.
        """
        self._return_lease(lease, now)
        self._reuse.computed(lease.adapter, len(lease.path) - lease.cached_blocks, now)
        if self._shadows.eviction is not None:
            self._shadows.eviction.ended(lease.adapter, lease.keys[: len(lease.path)])
        if not self._options.keep_kv:
            self.evictor.discard(lease.path, now)
        self.adapters.evict_if_not_kept(lease.adapter, self._view.waiting, now)

    def note_waiting(self, queued: int, wanted: Callable[[], Mapping[AdapterDigest, int]], now: float) -> None:
        """Pass the number of queued requests to the policies, and also their adapters if a policy uses them.

        Args:
            queued: number of requests in the queue.
            wanted: returns each adapter, in queue order, with the number of queued requests for it. The function is
                slow, so it is called only if a policy uses its result.
            now: the time.
        """
        self._view.queued = queued
        if self._options.keep_adapters and not (self._eviction.follows_queue or self._prefetch.follows_queue):
            return
        nodes = {self.tree.adapter(digest): count for digest, count in wanted().items()}
        before = self._view.waiting
        self._view.waiting = {node: count for node, count in nodes.items() if node is not None}
        for node in before:  # the requests that waited for the adapter may have been aborted
            self.adapters.evict_if_not_kept(node, self._view.waiting, now)

    def note_batch(self, running: int, now: float) -> None:
        """Pass the number of sequences that hold blocks to the policies."""
        self._eviction.batch(running, now)

    def note_step(self, step_s: float) -> None:
        """Pass the duration of the last step, in seconds, to the policies."""
        self._view.iteration_s = step_s

    # --- internals -----------------------------------------------------------------------------------

    def _away(self, nodes: Sequence[int]) -> list[int]:
        """Return the nodes that are neither on the device nor in flight to it."""
        at = np.array(nodes, np.int64)
        away: list[int] = at[~self.tree.on_device[at] & (self.tree.moving[at] != NodeTransfer.IN)].tolist()
        return away

    def _loads_kv(self, blocks: int, needed: int, now: float) -> bool:
        """Return whether a queued request loads KV from the host; else it computes that KV."""
        if self._shadows.loads is not None:
            return self._shadows.loads.loads(blocks, needed, now)
        return self._view.loading_kv_pays(blocks, needed, is_waiting=True)

    def _return_lease(self, lease: SequenceLease, now: float) -> None:
        if lease not in self._leases:
            raise BlockError("a sequence's blocks are released twice")
        del self._leases[lease]
        for transfer_id in lease.adapter_transfers | lease.kv_transfers:
            del self._waiting[transfer_id][lease]
            if not self._waiting[transfer_id]:
                del self._waiting[transfer_id]
        self.tiers.release_private(sorted(lease.private, reverse=True))
        self.snapshots.release(lease, now)
        pinned = np.array([lease.adapter, *lease.path])
        path = pinned[1:]
        self.tiers.unpin(pinned)
        self.tree.last_use_s[pinned] = now
        self.evictor.rescore(pinned, now)
        self.evictor.remove_empty(path[::-1])
        self.adapters.evict_kv_without_adapter(lease.adapter, now)
        if not self.tree.on_device[path].all():  # a transfer failed, so the KV after the gap is useless
            self.adapters.evict_kv_without_parents(path, now)
        self.swapper.wake()

    def _report_load(self, inflight: InflightTransfer, done: TransferDone, now: float) -> None:
        transfer = inflight.transfer
        assert transfer.adapter is not None
        if transfer.target is Tier.DEVICE or done.error is not None:
            self.evictor.events.append(AdapterLoaded(transfer.adapter.digest, now, now - inflight.began_s, done.error))

    def check_integrity(self) -> None:
        """Recount all blocks and pins and compare them with the accounts, for tests and idle moments.

        Raises:
            BlockError: an account is wrong, a block has two owners, or a pin belongs to no lease.
        """
        check_accounts(self.tiers, [block for lease in self._leases for block in lease.private])
        self.evictor.check_queues()
        check_tree(
            self.tree,
            [[lease.adapter, *lease.path, *lease.snapshot] for lease in self._leases],
            dependent=self._options.dependent,
        )

    def stats(self) -> MemoryStats:
        """Return the statistics of the memory."""
        cached = self.adapters.cached()
        stats = self.counters.stats(self.block_bytes, cached.waste_bytes, len(cached.hosted))
        return msgspec.structs.replace(stats, snapshots=self.snapshots.stats(self.block_bytes))
