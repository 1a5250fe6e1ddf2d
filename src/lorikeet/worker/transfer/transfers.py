"""One rank's transfers between device, host and adapter files, which run while steps are computed.

The loader process reads a transfer's blocks, one of two threads copies them, or both: blocks are copied as soon as they
have been read. Each time, a copy thread takes the next few blocks of the most urgent transfer. A demanded transfer
therefore waits only for the groups of blocks that are in the stream already. A transfer with ``groups`` is copied group
by group, and steps can query which layers of its adapter have arrived.
"""

import logging
import threading
from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import Tensor

from lorikeet.config import EngineSettings
from lorikeet.core.executor import ExecutorError
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import AdapterDigest, BlockId
from lorikeet.core.plan import Tier, Transfer, TransferDone
from lorikeet.memory.adapter_blocks import AdapterLayouts
from lorikeet.memory.host_arena import HostArena
from lorikeet.worker.helper_process import HelperProcess
from lorikeet.worker.transfer.copies import GROUP_BYTES, Copier, CopyGroup
from lorikeet.worker.transfer.device import BlockCopy, DeviceBackend, device_at
from lorikeet.worker.transfer.finished import TransferCounts, TransferThread
from lorikeet.worker.transfer.loader import Loader, LoaderError
from lorikeet.worker.transfer.loader_process import BlocksFilled, LoaderSetup, ReadAdapter, ReadEnded
from lorikeet.worker.transfer.state import STAGED_BLOCKS, LoadedAdapters, PartialAdapter, TransferState

_LOG = logging.getLogger(__name__)

MAX_READS = 2
"""Attempts of a read that is lost with its loader process; each next process begins it again."""

_REPORT_BYTES = 2 * 2**20
"""The loader reports progress after reading this much. It is less than a group, so that copying overlaps reading."""


class TransferManager:
    """Runs one rank's transfers, and owns the rank's host arena.

    Args:
        arena: the device arena, ``[blocks, elements]``.
        host_blocks: size of the host arena, in blocks.
        geometry: sizes of this rank's share of the model.
        rank, size: the tensor-parallel rank, and the number of ranks.
        process: the loader process. This object owns it.
        settings: the settings, with the number of concurrent reads and the declared link.
        on_done: function called on another thread with every transfer that has ended or failed.
        device: the device backend of the arena. The default is the backend for the arena's ``torch.device``.
        whole: sizes of the whole model. The default is ``geometry``.

    Raises:
        ExecutorError: the device cannot register the host arena.

    Attributes:
        device: the device of the arena.
        place: the arena's ``torch.device``.
        host: the host arena, ``[host_blocks, elements]``.
        host_arena: the shared memory of the host arena.
        adapters: the adapters that are loaded in the device arena.
        loader: the interface to the loader process.
        counts: counters of processed blocks and modules, by thread.
        on_arrival: function called on another thread with the id of a transfer in groups and the number of its blocks
            that have arrived so far, or -1 if the transfer has failed.
    """

    def __init__(
        self,
        arena: Tensor,
        host_blocks: int,
        geometry: ModelGeometry,
        rank: int,
        size: int,
        process: HelperProcess,
        settings: EngineSettings,
        on_done: Callable[[TransferDone], None],
        device: DeviceBackend | None = None,
        whole: ModelGeometry | None = None,
    ) -> None:
        self._arena = arena
        self.device = device or device_at(arena.device)
        self.place = arena.device
        self._layouts = AdapterLayouts(geometry, arena.shape[1])
        self._on_done = on_done
        self._has_other_ranks = size > 1
        self.on_arrival: Callable[[int, int], None] = lambda transfer_id, blocks: None
        self._max_reads = settings.load_threads
        # There are twice as many readers, so that prefetches do not delay reads of demanded adapters.
        self._free_readers = list(range(2 * settings.load_threads))
        self._lock = threading.Lock()
        self._inflight: dict[int, TransferState] = {}
        self._unread: dict[int, TransferState] = {}  # These transfers of _inflight have not begun to be read.
        self._rest: threading.Timer | None = None  # Reads wait here until a loader process may be started again.
        self._partial: dict[AdapterDigest, PartialAdapter] = {}
        self.adapters = LoadedAdapters()
        self.counts = TransferCounts()
        block_bytes = arena[:1].nbytes
        readers = len(self._free_readers)
        self.host_arena = HostArena.create(host_blocks + readers * STAGED_BLOCKS, block_bytes)
        if settings.touch_memory:
            self.host_arena.bytes.fill(0)
        self._host_blocks = torch.from_numpy(self.host_arena.bytes).view(arena.dtype)
        self.host: Tensor = self._host_blocks[:host_blocks]
        try:
            self._unregister = self.device.register(self._host_blocks)
        except RuntimeError as error:
            size_bytes = self._host_blocks.nbytes
            raise ExecutorError(f"{size_bytes:,} bytes of host memory cannot be registered: {error}") from error
        self._group_blocks = max(1, GROUP_BYTES // block_bytes)
        dtype = str(arena.dtype).removeprefix("torch.")
        report_blocks = max(1, min(self._group_blocks, _REPORT_BYTES // block_bytes))
        elements = arena.shape[1]
        setup = LoaderSetup(geometry, whole or geometry, rank, size, elements, dtype, readers, report_blocks)
        self.loader = Loader(process, self.host_arena, setup, self._filled, self._read_ended, self._read_lost)
        self._copiers = {
            target: Copier(
                f"copy-to-{target}",
                self.device.stream(),
                self.device.copies_ahead,
                partial(self._next_group, target),
                self._copy_begins,
                self._copied,
                settings.link_bytes_per_s,
                self.counts,
            )
            for target in (Tier.DEVICE, Tier.HOST)
        }

    def start(self, transfer: Transfer) -> None:
        """Start a transfer. A newer transfer of the same adapter to the device replaces an older one."""
        error = self._invalid(transfer)
        partial_adapter = None
        if transfer.groups and transfer.adapter is not None and error is None:
            try:
                partial_adapter = PartialAdapter.of(transfer, self._arena, self._layouts.of(transfer.adapter))
            except ValueError as problem:
                error = str(problem)
        state = TransferState(
            transfer,
            transfer.demand,
            transfer.host_blocks,
            reading=transfer.source is Tier.SOURCE and error is None,
            filled=0 if transfer.source is Tier.SOURCE else len(transfer.host_blocks),
            after=self.device.steps.record_event(),
            copied=transfer.kept,
            error=error,
            partial=partial_adapter,
        )
        if transfer.adapter is not None and transfer.target is Tier.DEVICE:
            self.adapters.expect(transfer.adapter.digest, transfer.transfer_id)
        with self._lock:
            self._inflight[transfer.transfer_id] = state
            if state.reading:
                self._unread[transfer.transfer_id] = state
            if transfer.adapter is not None and transfer.target is Tier.DEVICE:
                self._partial.pop(transfer.adapter.digest, None)
                if partial_adapter is not None:
                    self._partial[transfer.adapter.digest] = partial_adapter
        self._advance(state)

    def begin_copies(self) -> None:
        """Start copying new transfers on the calling thread, without waiting for the copy threads to wake."""
        for copier in self._copiers.values():
            copier.begin()

    def promote(self, transfer_ids: Collection[int]) -> None:
        """Mark transfers as demanded; ids of ended transfers are ignored."""
        with self._lock:
            for transfer_id in transfer_ids:
                if transfer_id in self._inflight:
                    self._inflight[transfer_id].demand = True
        self._start_reads()

    def partial_adapter(self, digest: AdapterDigest) -> PartialAdapter | None:
        """Return an adapter that is being loaded in groups.

        None if it is not, or is loaded completely.

        A caller that tries this method first and :meth:`LoadedAdapters.weights` second finds the adapter even if the
        transfer ends in between. An adapter whose transfer has failed is returned until it is loaded again, since a
        running step may use it. With several ranks, every adapter is returned until it is evicted, since other ranks
        may not have loaded it yet.
        """
        with self._lock:
            return self._partial.get(digest)

    def evict(self, digest: AdapterDigest) -> None:
        """Forget an adapter on the device. Its blocks may be reused."""
        with self._lock:
            self._partial.pop(digest, None)
        self.adapters.evict(digest)

    def close(self) -> None:
        """Finish the copies that have begun, and abandon all other transfers."""
        for copier in self._copiers.values():
            copier.close()
        with self._lock:
            if self._rest is not None:
                self._rest.cancel()
        self.loader.close()
        try:
            self._unregister()
        finally:
            # References to this object must not keep gigabytes alive.
            self._unregister = lambda: None
            self.host = self._host_blocks = torch.empty(0, self.host.shape[1], dtype=self.host.dtype)
            self.host_arena.close()

    def _invalid(self, transfer: Transfer) -> str | None:
        """Return why a transfer is invalid; None if it is valid."""
        device = transfer.device_blocks
        host = transfer.host_blocks
        for tier, blocks, total in ((Tier.DEVICE, device, len(self._arena)), (Tier.HOST, host, len(self.host))):
            missing = next((block for block in blocks if not 0 <= block < total), None)
            if missing is not None:
                return f"there is no {tier} block {missing}: the arena has {total} blocks"
        if transfer.source is Tier.SOURCE and transfer.adapter is None:
            return "only adapters have a source"
        if (transfer.source is not Tier.SOURCE or (host and device)) and len(host) != len(device):
            return f"{len(device)} device blocks and {len(host)} host blocks do not go together"
        is_copy_in = transfer.source is Tier.HOST and transfer.target is Tier.DEVICE
        if transfer.kept and not (is_copy_in and not transfer.groups and 0 < transfer.kept < len(device)):
            return f"{transfer.kept} of {len(device)} blocks cannot be kept"
        if transfer.groups:
            grouped = sorted(block for group in transfer.groups for block in range(*group))
            if transfer.source is Tier.SOURCE or grouped != list(range(len(host))):
                return f"groups {transfer.groups} do not name each of {len(host)} blocks in the arenas once"
        return None

    # The methods below run on several threads. Each docstring states whether the caller holds the lock. A transfer that
    # has ended is removed from ``_inflight`` under the lock by one thread, which then reports it without the lock.

    def _advance(self, state: TransferState) -> None:
        """Report a transfer if it has ended, else start its next read or copy. The caller does not hold the lock."""
        with self._lock:
            has_ended = self._remove_if_ended(state)
        if has_ended:
            self._report(state)
        elif state.to_copy:
            self._copiers[state.transfer.target].wake()
        self._start_reads()

    def _remove_if_ended(self, state: TransferState) -> bool:
        """Remove a transfer if it has ended, and return whether this call removed it. The caller holds the lock."""
        if not state.has_ended or self._inflight.pop(state.transfer.transfer_id, None) is None:
            return False
        state.update_active_s()
        return True

    def _report(self, state: TransferState) -> None:
        """Report a transfer that has ended. The caller does not hold the lock."""
        transfer = state.transfer
        if transfer.adapter is not None and transfer.target is Tier.DEVICE:
            self._note_adapter(state)
            with self._lock:
                is_newest = self._partial.get(transfer.adapter.digest) is state.partial
                if state.partial is not None and state.error is None and is_newest and not self._has_other_ranks:
                    del self._partial[transfer.adapter.digest]
        if state.error is not None:
            what = "KV" if transfer.adapter is None else f"adapter {transfer.adapter.name}"
            _LOG.warning("%s: transfer from %s to %s failed: %s", what, transfer.source, transfer.target, state.error)
        self._on_done(TransferDone(transfer.transfer_id, state.error, state.active_s))
        with self._lock:
            self._free_reader(state)

    def _note_adapter(self, state: TransferState) -> None:
        """Make a loaded adapter usable by steps. The transfer fails if the number of its blocks is wrong."""
        transfer = state.transfer
        ref = state.transfer.adapter
        assert ref is not None
        self._find_weights(state)
        if state.error is None:
            assert state.weights is not None
            self.adapters.arrived(ref.digest, transfer.transfer_id, state.weights)
        else:
            self.adapters.failed(ref.digest, transfer.transfer_id)

    def _find_weights(self, state: TransferState) -> None:
        """Compute the views of an adapter's weights in the arena, if needed. The caller does not hold the lock."""
        transfer = state.transfer
        is_done = state.weights is not None or state.error is not None
        if is_done or transfer.adapter is None or transfer.target is not Tier.DEVICE:
            return
        try:
            weights = self._layouts.of(transfer.adapter).weights(transfer.device_blocks, self._arena)
        except ValueError as error:
            with self._lock:
                state.error = str(error)
        else:
            with self._lock:
                state.weights = weights

    # --- reading -------------------------------------------------------------------------------------

    def _start_reads(self) -> None:
        """Start reads while there are free readers. The caller does not hold the lock."""
        while True:
            with self._lock:
                state = self._next_read()
                if state is None:
                    return
                ended = [each for each in self._start_read(state) if self._remove_if_ended(each)]
            for each in ended:
                self._report(each)

    def _next_read(self) -> TransferState | None:
        """Return the most urgent unread transfer if its read may start now. The caller holds the lock."""
        if not (self._unread and self._free_readers) or self._rest is not None:
            return None
        first = min(self._unread.values(), key=lambda state: state.urgency)
        reading = [state for state in self._inflight.values() if state.reader is not None]
        ahead = sum(state.demand for state in reading) if first.demand else len(reading)
        return first if ahead < self._max_reads else None

    def _start_read(self, state: TransferState) -> "list[TransferState]":
        """Send a read to the loader process.

        Return the transfers that have failed for lack of a process. The caller holds the lock.
        """
        transfer = state.transfer
        reader = self._free_readers.pop()
        del self._unread[transfer.transfer_id]
        assert transfer.adapter is not None
        state.reader = reader
        state.update_active_s()
        if state.is_staged:
            first = len(self.host) + STAGED_BLOCKS * reader
            state.host_blocks = tuple(BlockId(first + block % STAGED_BLOCKS) for block in range(state.blocks))
        try:
            blocks = state.host_blocks
            free = state.max_uncopied
            self.loader.read(ReadAdapter(transfer.transfer_id, reader, transfer.adapter, blocks, free))
        except LoaderError as error:
            self._free_reader(state)
            state.update_active_s()
            self._unread[transfer.transfer_id] = state
            return self._rest_reads(error)
        return []

    def _rest_reads(self, error: LoaderError) -> "list[TransferState]":
        """Delay all reads until a loader process may start.

        Return the reads that were delayed before. The caller holds the lock.
        """
        failed = []
        for each in list(self._unread.values()):
            if each.has_rested:
                del self._unread[each.transfer.transfer_id]
                each.reading = False
                each.error = str(error)
                failed.append(each)
            each.has_rested = True
        if self._unread:
            self._rest = threading.Timer(error.rest_s, self._end_rest)
            self._rest.daemon = True
            self._rest.start()
        return failed

    def _end_rest(self) -> None:
        with self._lock:
            self._rest = None
        self._start_reads()

    def _filled(self, message: BlocksFilled) -> None:
        with self._lock:
            state = self._inflight[message.transfer_id]
            state.filled = message.blocks
            state.update_active_s()
        self._advance(state)

    def _read_ended(self, message: ReadEnded) -> None:
        self.counts.add({TransferThread(work, thread): times for work, thread, times in message.counts})
        if message.trace:
            _LOG.error("transfer %d: %s", message.transfer_id, message.trace)
        with self._lock:
            state = self._inflight[message.transfer_id]
            state.reading = False
            if message.error is None:
                state.filled = state.blocks
            else:
                state.error = message.error
            state.update_active_s()
            if not state.is_staged:
                self._free_reader(state)
        self._advance(state)

    def _read_lost(self, transfer_id: int, reason: str) -> None:
        """Begin a lost read again, or fail it if it has been lost too often, since the adapter may be the cause."""
        with self._lock:
            state = self._inflight[transfer_id]
            state.lost_reads += 1
            is_tried_again = state.lost_reads < MAX_READS and state.error is None
            if is_tried_again:
                state.is_lost = True
                self._begin_again(state)
        if is_tried_again:
            name = "" if state.transfer.adapter is None else state.transfer.adapter.name
            _LOG.warning("adapter %s is read again, since %s", name, reason)
            self._start_reads()
        else:
            self._read_ended(ReadEnded(transfer_id, reason, "", ()))

    def _begin_again(self, state: TransferState) -> None:
        """Queue a lost read again from its first block, once no copy uses its blocks. The caller holds the lock."""
        if state.copying:
            return
        state.is_lost = False
        state.reading = state.error is None
        if state.reading:
            state.filled = state.copied = 0
            self._unread[state.transfer.transfer_id] = state
        self._free_reader(state)
        state.update_active_s()

    def _free_reader(self, state: TransferState) -> None:
        """Make the transfer's reader available. The caller holds the lock."""
        if state.reader is not None:
            self._free_readers.append(state.reader)
            state.reader = None

    # --- copying -------------------------------------------------------------------------------------

    def _next_group(self, target: Tier) -> CopyGroup[TransferState] | None:
        """Return the next blocks of the most urgent transfer to ``target`` that has blocks to copy.

        None if there is none.
        """
        with self._lock:
            ready = [state for state in self._inflight.values() if state.transfer.target is target and state.is_ready]
            if not ready:
                return None
            state = min(ready, key=lambda state: state.urgency)
            blocks = state.next_blocks(self._group_blocks)
            state.copying += len(blocks)
        on_host = self._host_blocks, state.host_blocks[blocks.start : blocks.stop]
        on_device = self._arena, state.transfer.device_blocks[blocks.start : blocks.stop]
        if target is Tier.DEVICE:
            return CopyGroup(state, state.after, BlockCopy(*on_host, *on_device))
        return CopyGroup(state, state.after, BlockCopy(*on_device, *on_host))

    def _copy_begins(self, group: CopyGroup[TransferState]) -> None:
        # The views are computed while blocks are being copied, so that nothing is left to do at the end.
        if group.job.copied:
            self._find_weights(group.job)
        with self._lock:
            group.job.is_copying = True
            group.job.update_active_s()
            if group.job.partial is not None:
                group.job.partial.begin()

    def _copied(self, group: CopyGroup[TransferState], error: str | None) -> None:
        state = group.job
        blocks = group.copy.blocks
        with self._lock:
            state.is_copying = False
            state.copying -= blocks
            # This happens even after a failure, so that the reader gets its staging blocks back.
            state.copied += blocks
            state.update_active_s()
            state.error = state.error or error
            if state.partial is not None:
                is_failed = state.error is not None
                state.partial.note(state.copied, failed=is_failed)
                self.on_arrival(state.transfer.transfer_id, -1 if is_failed else state.copied)
            was_lost = state.is_lost
            if was_lost:
                self._begin_again(state)
            elif state.is_staged and state.reading and state.reader is not None:
                self.loader.free_blocks(state.reader, blocks)
            has_ended = self._remove_if_ended(state)
        if has_ended:
            self._report(state)
        if has_ended or was_lost:
            self._start_reads()
