"""One rank's transfers between device, host and adapter files, beside the steps.

A transfer is read in a loader process, or copied by one of two threads, or both: blocks are copied as soon as they have
been read. Whoever copies takes the next few blocks of the most urgent transfer each time, so one that is awaited waits
for no more of the others than is in a stream already: a group of blocks, or as many groups as the device has ahead. A
transfer with groups of its own is copied group by group, and steps can ask which layers of its adapter have arrived.
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

_TOLD_BYTES = 2 * 2**20
"""Of so much that has been read its copier is told at once: less than a group, or nothing is copied during the rest."""


class TransferManager:
    """Runs one rank's transfers, and owns its host arena.

    Args:
        arena: the device arena, ``[blocks, elements]``.
        host_blocks: size of the host tier.
        geometry: sizes of this rank's share of the model.
        rank, size: which share of how many.
        process: reads adapters; owned by this object from now on.
        settings: how many adapters are read at once, and the declared link.
        on_done: called, on another thread, with every transfer that has ended, well or not.
        device: whose the arena is; made of where that lies unless given.

    Raises:
        ExecutorError: the device does not take the host arena.

    Attributes:
        device: whose the arena is.
        place: where that lies.
        host: the host tier, ``[host_blocks, elements]``.
        host_arena: the memory that it lies in.
        adapters: those that have arrived in the device arena.
        loader: what reads adapters.
        counts: who has worked on blocks.
        on_arrival: called, on another thread, with a transfer that comes in groups and how many of its blocks have
            arrived so far; -1: no more will.
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
    ) -> None:
        self._arena = arena
        self.device = device or device_at(arena.device)
        self.place = arena.device
        self._layouts = AdapterLayouts(geometry, arena.shape[1])
        self._on_done = on_done
        self._has_peers = size > 1
        self.on_arrival: Callable[[int, int], None] = lambda transfer_id, blocks: None
        self._most_reads = settings.load_threads
        # Twice, so that prefetches keep nobody who is awaited from being read.
        self._free_readers = list(range(2 * settings.load_threads))
        self._lock = threading.Lock()
        self._underway: dict[int, TransferState] = {}
        self._unread: dict[int, TransferState] = {}  # of these, those that nobody has begun to read
        self._arrivals: dict[AdapterDigest, PartialAdapter] = {}
        self.adapters = LoadedAdapters()
        self.counts = TransferCounts()
        block_bytes, readers = arena[:1].nbytes, len(self._free_readers)
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
        told_blocks = max(1, min(self._group_blocks, _TOLD_BYTES // block_bytes))
        setup = LoaderSetup(geometry, rank, size, arena.shape[1], dtype, readers, told_blocks)
        self.loader = Loader(process, self.host_arena, setup, self._filled, self._read_ended)
        self._copiers = {
            target: Copier(
                f"copy-to-{target}",
                self.device.stream(),
                self.device.copies_ahead,
                partial(self._next_group, target),
                self._turned,
                self._copied,
                settings.link_bytes_per_s,
                self.counts,
            )
            for target in (Tier.DEVICE, Tier.HOST)
        }

    def start(self, transfer: Transfer) -> None:
        """Begin a transfer. A newer one of the same adapter to the device takes the place of an older."""
        error, arrival = self._flaw(transfer), None
        if transfer.groups and transfer.adapter is not None and error is None:
            try:
                arrival = PartialAdapter.of(transfer, self._arena, self._layouts.of(transfer.adapter))
            except ValueError as flaw:
                error = str(flaw)
        underway = TransferState(
            transfer,
            transfer.demand,
            transfer.host_blocks,
            reading=transfer.source is Tier.SOURCE and error is None,
            filled=0 if transfer.source is Tier.SOURCE else len(transfer.host_blocks),
            after=self.device.steps.mark(),
            error=error,
            arrival=arrival,
        )
        if transfer.adapter is not None and transfer.target is Tier.DEVICE:
            self.adapters.expect(transfer.adapter.digest, transfer.transfer_id)
        with self._lock:
            self._underway[transfer.transfer_id] = underway
            if underway.reading:
                self._unread[transfer.transfer_id] = underway
            if transfer.adapter is not None and transfer.target is Tier.DEVICE:
                self._arrivals.pop(transfer.adapter.digest, None)
                if arrival is not None:
                    self._arrivals[transfer.adapter.digest] = arrival
        self._go_on(underway)

    def begin_copies(self) -> None:
        """Begin to copy what has been started, without waiting for the threads that go on with it."""
        for copier in self._copiers.values():
            copier.begin()

    def promote(self, transfer_ids: Collection[int]) -> None:
        """Put transfers among those that are awaited; ids that are not under way any more are left out."""
        with self._lock:
            for transfer_id in transfer_ids:
                if transfer_id in self._underway:
                    self._underway[transfer_id].demand = True
        self._start_reads()

    def arrival(self, digest: AdapterDigest) -> PartialAdapter | None:
        """Return what has arrived of an adapter that comes in groups; None if none does.

        Whoever asks before :meth:`LoadedAdapters.weights` finds it here or there, even while it changes sides. One
        whose transfer has failed is found here until it is tried again: a step may be under way that counts on it. So
        is every one where there are other ranks, until it is evicted: they may not have it yet.
        """
        with self._lock:
            return self._arrivals.get(digest)

    def evict(self, digest: AdapterDigest) -> None:
        """Forget an adapter on the device."""
        with self._lock:
            self._arrivals.pop(digest, None)
        self.adapters.evict(digest)

    def close(self) -> None:
        """Abandon what is under way, once the blocks that are being copied have been."""
        for copier in self._copiers.values():
            copier.close()
        self.loader.close()
        try:
            self._unregister()
        finally:
            # Whoever still knows this object does not keep gigabytes with it.
            self._unregister = lambda: None
            self.host = self._host_blocks = torch.empty(0, self.host.shape[1], dtype=self.host.dtype)
            self.host_arena.close()

    def _flaw(self, transfer: Transfer) -> str | None:
        """Return what makes a transfer impossible."""
        device, host = transfer.device_blocks, transfer.host_blocks
        for tier, blocks, total in ((Tier.DEVICE, device, len(self._arena)), (Tier.HOST, host, len(self.host))):
            missing = next((block for block in blocks if not 0 <= block < total), None)
            if missing is not None:
                return f"there is no {tier} block {missing}, only {total} blocks"
        if transfer.source is Tier.SOURCE and transfer.adapter is None:
            return "only adapters have a source"
        if (transfer.source is not Tier.SOURCE or (host and device)) and len(host) != len(device):
            return f"{len(device)} device blocks and {len(host)} host blocks do not go together"
        if transfer.groups:
            grouped = sorted(block for group in transfer.groups for block in range(*group))
            if transfer.source is Tier.SOURCE or grouped != list(range(len(host))):
                return f"groups {transfer.groups} do not name each of {len(host)} blocks in the arenas once"
        return None

    # Each of these is called when something has happened, under the lock or not as it says. What ends is taken out of
    # ``_underway`` under the lock by one thread, which then reports it without.

    def _go_on(self, underway: TransferState) -> None:
        """Let whatever can happen next. Not under the lock."""
        with self._lock:
            is_over = self._take_if_over(underway)
        if is_over:
            self._report(underway)
        elif underway.to_copy:
            self._copiers[underway.transfer.target].wake()
        self._start_reads()

    def _take_if_over(self, underway: TransferState) -> bool:
        """Tell whether it has just ended. Under the lock."""
        if not underway.is_over or self._underway.pop(underway.transfer.transfer_id, None) is None:
            return False
        underway.take_time()
        return True

    def _report(self, underway: TransferState) -> None:
        """Report a transfer that nobody works on any more. Not under the lock."""
        transfer = underway.transfer
        if transfer.adapter is not None and transfer.target is Tier.DEVICE:
            self._note_adapter(underway)
            with self._lock:
                is_last = self._arrivals.get(transfer.adapter.digest) is underway.arrival
                if underway.arrival is not None and underway.error is None and is_last and not self._has_peers:
                    del self._arrivals[transfer.adapter.digest]
        if underway.error is not None:
            what = "KV" if transfer.adapter is None else f"adapter {transfer.adapter.name}"
            _LOG.warning("%s was not moved from %s to %s: %s", what, transfer.source, transfer.target, underway.error)
        self._on_done(TransferDone(transfer.transfer_id, underway.error, underway.active_s))
        with self._lock:
            self._free_reader(underway)

    def _note_adapter(self, underway: TransferState) -> None:
        """Let steps use an adapter that has arrived; it fails here if its blocks are not as many as it takes."""
        transfer, ref = underway.transfer, underway.transfer.adapter
        assert ref is not None
        self._find_weights(underway)
        if underway.error is None:
            assert underway.weights is not None
            self.adapters.arrived(ref.digest, transfer.transfer_id, underway.weights)
        else:
            self.adapters.failed(ref.digest, transfer.transfer_id)

    def _find_weights(self, underway: TransferState) -> None:
        """Note where an adapter will lie on the device, unless that is known or of no use. Not under the lock."""
        transfer = underway.transfer
        is_settled = underway.weights is not None or underway.error is not None
        if is_settled or transfer.adapter is None or transfer.target is not Tier.DEVICE:
            return
        try:
            weights = self._layouts.of(transfer.adapter).weights(transfer.device_blocks, self._arena)
        except ValueError as error:
            with self._lock:
                underway.error = str(error)
        else:
            with self._lock:
                underway.weights = weights

    # --- reading -------------------------------------------------------------------------------------

    def _start_reads(self) -> None:
        """Give readers that are free something to do. Not under the lock."""
        while True:
            with self._lock:
                underway = self._next_read()
                if underway is None:
                    return
                self._start_read(underway)
                is_over = self._take_if_over(underway)
            if is_over:
                self._report(underway)

    def _next_read(self) -> TransferState | None:
        """Return the most urgent transfer that is to be read, if it may be now. Under the lock."""
        if not (self._unread and self._free_readers):
            return None
        first = min(self._unread.values(), key=lambda underway: underway.urgency)
        others = [underway for underway in self._underway.values() if underway.reader is not None]
        before = sum(underway.demand for underway in others) if first.demand else len(others)
        return first if before < self._most_reads else None

    def _start_read(self, underway: TransferState) -> None:
        """Under the lock."""
        transfer, reader = underway.transfer, self._free_readers.pop()
        del self._unread[transfer.transfer_id]
        assert transfer.adapter is not None
        underway.reader = reader
        underway.take_time()
        if underway.is_staged:
            first = len(self.host) + STAGED_BLOCKS * reader
            underway.host_blocks = tuple(BlockId(first + block % STAGED_BLOCKS) for block in range(underway.blocks))
        try:
            blocks, room = underway.host_blocks, underway.room
            self.loader.read(ReadAdapter(transfer.transfer_id, reader, transfer.adapter, blocks, room))
        except LoaderError as error:
            underway.reading, underway.error = False, str(error)

    def _filled(self, message: BlocksFilled) -> None:
        with self._lock:
            underway = self._underway[message.transfer_id]
            underway.filled = message.blocks
            underway.take_time()
        self._go_on(underway)

    def _read_ended(self, message: ReadEnded) -> None:
        self.counts.add({TransferThread(work, thread): times for work, thread, times in message.counts})
        if message.trace:
            _LOG.error("transfer %d: %s", message.transfer_id, message.trace)
        with self._lock:
            underway = self._underway[message.transfer_id]
            underway.reading = False
            if message.error is None:
                underway.filled = underway.blocks
            else:
                underway.error = message.error
            underway.take_time()
            if not underway.is_staged:
                self._free_reader(underway)
        self._go_on(underway)

    def _free_reader(self, underway: TransferState) -> None:
        """Under the lock."""
        if underway.reader is not None:
            self._free_readers.append(underway.reader)
            underway.reader = None

    # --- copying -------------------------------------------------------------------------------------

    def _next_group(self, target: Tier) -> CopyGroup[TransferState] | None:
        """Return the next blocks of the most urgent transfer that has any."""
        with self._lock:
            ready = [
                underway
                for underway in self._underway.values()
                if underway.transfer.target is target and underway.is_ready
            ]
            if not ready:
                return None
            underway = min(ready, key=lambda underway: underway.urgency)
            blocks = underway.next_blocks(self._group_blocks)
            underway.copying += len(blocks)
        on_host = self._host_blocks, underway.host_blocks[blocks.start : blocks.stop]
        on_device = self._arena, underway.transfer.device_blocks[blocks.start : blocks.stop]
        if target is Tier.DEVICE:
            return CopyGroup(underway, underway.after, BlockCopy(*on_host, *on_device))
        return CopyGroup(underway, underway.after, BlockCopy(*on_device, *on_host))

    def _turned(self, group: CopyGroup[TransferState]) -> None:
        if group.job.copied:  # while others are being copied, so that nothing is left to do at the end
            self._find_weights(group.job)
        with self._lock:
            group.job.has_turn = True
            group.job.take_time()
            if group.job.arrival is not None:
                group.job.arrival.begin()

    def _copied(self, group: CopyGroup[TransferState], error: str | None) -> None:
        underway, blocks = group.job, group.copy.blocks
        with self._lock:
            underway.has_turn = False
            underway.copying -= blocks
            underway.copied += blocks  # even if it failed: what is still being read has to go somewhere
            underway.take_time()
            underway.error = underway.error or error
            if underway.arrival is not None:
                is_failed = underway.error is not None
                underway.arrival.note(underway.copied, failed=is_failed)
                self.on_arrival(underway.transfer.transfer_id, -1 if is_failed else underway.copied)
            if underway.is_staged and underway.reading and underway.reader is not None:
                self.loader.give_room(underway.reader, blocks)
            is_over = self._take_if_over(underway)
        if is_over:
            self._report(underway)
            self._start_reads()
