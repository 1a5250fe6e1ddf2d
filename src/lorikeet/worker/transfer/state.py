"""The state of a rank's running transfers, of partly loaded adapters, and of loaded adapters."""

import math
import threading
import time
from dataclasses import dataclass

from torch import Tensor

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.executor import ExecutorError
from lorikeet.core.ids import AdapterDigest, BlockId
from lorikeet.core.plan import Tier, Transfer
from lorikeet.kernels.lora import LoraWeights
from lorikeet.memory.adapter_blocks import AdapterLayout
from lorikeet.memory.packing import blocks_needed
from lorikeet.worker.transfer.device import StreamEvent


class PartialAdapter:
    """An adapter that is being loaded to the device, with its arrived layers.

    Thread-safe.

    Args:
        transfer_id: id of the transfer that loads the adapter.
        ref: the adapter.
        host_blocks: the adapter's blocks in the host arena, in packing order. The blocks stay valid until the end of
            the step during which the transfer is reported.
        weights: views of the device arena. Only layers that have arrived are valid.
        needed: for each layer, the number of copied blocks at which the layer is complete.
        left_to_host: layers that the host always computes, see ``Transfer``.
    """

    def __init__(
        self,
        transfer_id: int,
        ref: AdapterRef,
        host_blocks: tuple[BlockId, ...],
        weights: LoraWeights,
        needed: tuple[int, ...],
        left_to_host: range,
    ) -> None:
        self.transfer_id = transfer_id
        self.ref = ref
        self.left_to_host = left_to_host
        self.host_blocks = host_blocks
        self.weights = weights
        self.needed = needed
        # Layers without blocks count as arrived.
        self._arrived_s = [math.inf if blocks else -math.inf for blocks in needed]
        self._began_s = time.monotonic()
        self._has_begun = False
        self._block_s = math.inf  # This is the mean of seconds per block so far.
        self._failed = False
        self._changed = threading.Condition()

    @classmethod
    def of(cls, transfer: Transfer, arena: Tensor, layout: AdapterLayout) -> "PartialAdapter":
        """Create the partial adapter of a transfer that has not begun.

        Args:
            transfer: the transfer of an adapter from host to device, in groups.
            arena: the device arena, ``[blocks, elements]``.
            layout: layout of the adapter.

        Raises:
            ValueError: the transfer's number of blocks is not the adapter's.
        """
        ref = transfer.adapter
        groups = transfer.groups
        assert ref is not None
        packing = layout.packing
        layers = layout.geometry.layers
        weights = layout.weights(transfer.device_blocks, arena)
        needed = blocks_needed(packing, layers, groups)
        return cls(transfer.transfer_id, ref, transfer.host_blocks, weights, needed, range(*transfer.left_to_host))

    def begin(self) -> None:
        """Record the time at which copying begins. Only the first call counts."""
        with self._changed:
            if not self._has_begun:
                self._has_begun = True
                self._began_s = time.monotonic()

    def note(self, copied: int, *, failed: bool) -> None:
        """Record the number of copied blocks. After a failed copy no further layer arrives."""
        now = time.monotonic()
        with self._changed:
            self._failed = failed
            if copied:
                self._block_s = (now - self._began_s) / copied
            if not failed:
                for layer, blocks in enumerate(self.needed):
                    if blocks <= copied and self._arrived_s[layer] == math.inf:
                        self._arrived_s[layer] = now
            self._changed.notify_all()

    def has(self, layer: int) -> bool:
        """Return whether a layer has arrived."""
        return self._arrived_s[layer] < math.inf

    def wait_for(self, layer: int, timeout_s: float | None = None) -> bool:
        """Block until a layer has arrived. Return False if the transfer has failed or ``timeout_s`` is over."""
        with self._changed:
            self._changed.wait_for(lambda: self.has(layer) or self._failed, timeout_s)
            return self.has(layer)

    def due_s(self, layer: int) -> float:
        """Return the expected arrival time of a layer (monotonic clock), or infinity before the first block."""
        return self._began_s + self.needed[layer] * self._block_s if self.needed[layer] else self._began_s

    def arrived_s(self, layer: int) -> float:
        """Return the time at which a layer arrived, in seconds of the monotonic clock.

        The time is infinity for a layer that has not arrived, and minus infinity for a layer that the adapter does not
        change.
        """
        return self._arrived_s[layer]


STAGED_BLOCKS = 8
"""Staging blocks of each reader, behind the host tier, for adapters that are loaded to the device only."""


@dataclass(eq=False)
class TransferState:
    """The progress of a transfer.

    Callers change it only under the lock of ``TransferManager``.

    Attributes:
        transfer: the requested transfer.
        demand: whether a request waits for the transfer now.
        host_blocks: the transfer's blocks in the host arena, in order. Staging blocks occur several times.
        reading: whether there are blocks left to read.
        filled: number of ``host_blocks`` that have been read. If the transfer reads nothing, all of them.
        after: event of the stream of steps after which copies begin, since earlier steps may use the target blocks.
        copying: number of blocks in the copy stream.
        is_copying: whether some of the transfer's blocks are at the front of the copy stream.
        copied: number of blocks copied.
        reader: number of the reader that reads the adapter; None before and after reading.
        lost_reads: number of times that the read was lost with the loader process.
        has_rested: whether the read has waited until a loader process may be started.
        is_lost: whether the read was lost, and must begin again once no block is being copied.
        error: why the transfer has failed; None if it has not.
        partial: the adapter for steps that use layers before the transfer ends; None for a transfer without groups.
        weights: views of the adapter's weights on the device. None until computed, and for other transfers.
        active_s: seconds of reading and copying so far.
    """

    transfer: Transfer
    demand: bool
    host_blocks: tuple[BlockId, ...]
    reading: bool
    filled: int
    after: StreamEvent
    copying: int = 0
    is_copying: bool = False
    copied: int = 0
    reader: int | None = None
    lost_reads: int = 0
    has_rested: bool = False
    is_lost: bool = False
    error: str | None = None
    partial: PartialAdapter | None = None
    weights: LoraWeights | None = None
    active_s: float = 0.0
    _active_since_s: float | None = None

    @property
    def urgency(self) -> tuple[bool, int]:
        """Sort key, most urgent first: demanded transfers, then prefetches, each in the order of their start."""
        return not self.demand, self.transfer.transfer_id

    @property
    def blocks(self) -> int:
        """Number of blocks that the transfer moves."""
        return len(self.transfer.device_blocks or self.transfer.host_blocks)

    @property
    def to_copy(self) -> int:
        """Number of blocks that are copied between host and device."""
        return 0 if self.transfer.source is Tier.SOURCE and self.transfer.target is Tier.HOST else self.blocks

    @property
    def is_staged(self) -> bool:
        """Whether the transfer passes through its reader's staging blocks."""
        return self.transfer.source is Tier.SOURCE and not self.transfer.host_blocks

    @property
    def max_uncopied(self) -> int:
        """Maximum number of blocks that may be read ahead of copying."""
        return STAGED_BLOCKS if self.is_staged else self.blocks

    @property
    def has_ended(self) -> bool:
        """Whether the transfer is complete, or has failed and no reader or copy uses its blocks any more."""
        return not (self.reading or self.copying) and (self.error is not None or self.copied == self.to_copy)

    @property
    def is_ready(self) -> bool:
        """Whether a block can be copied now.

        After an error, copying continues while the reader needs staging blocks.
        """
        is_needed = (self.error is None or self.reading) and not self.is_lost
        return is_needed and self.copied + self.copying < min(self.filled, self.to_copy)

    def next_blocks(self, most: int) -> range:
        """Return the indices of the next blocks to copy: at most ``most``, all in one of the transfer's groups."""
        begun = done = self.copied + self.copying
        for first, stop in self.transfer.groups:
            if done < stop - first:
                return range(first + done, min(stop, first + done + most))
            done -= stop - first
        return range(begun, min(self.filled, begun + most))

    def update_active_s(self) -> None:
        """Add the time since the last call to ``active_s`` if blocks were being read or copied.

        Call it on every change.
        """
        now = time.monotonic()
        if self._active_since_s is not None:
            self.active_s += now - self._active_since_s
        is_read = self.reading and self.reader is not None and self.filled - self.copied < self.max_uncopied
        self._active_since_s = now if is_read or self.is_copying else None


class LoadedAdapters:
    """The weights of loaded adapters. A transfer counts only if no eviction and no newer transfer followed it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: dict[AdapterDigest, int] = {}
        self._weights: dict[AdapterDigest, LoraWeights] = {}

    def expect(self, digest: AdapterDigest, transfer_id: int) -> None:
        """Record that a transfer loads an adapter, and forget the weights from an earlier transfer."""
        with self._lock:
            self._expected[digest] = transfer_id
            self._weights.pop(digest, None)

    def arrived(self, digest: AdapterDigest, transfer_id: int, weights: LoraWeights) -> None:
        """Store the weights that a transfer has loaded, if no newer transfer is expected."""
        with self._lock:
            if self._expected.get(digest) == transfer_id:
                del self._expected[digest]
                self._weights[digest] = weights

    def failed(self, digest: AdapterDigest, transfer_id: int) -> None:
        """Record that a transfer has failed."""
        with self._lock:
            if self._expected.get(digest) == transfer_id:
                del self._expected[digest]

    def evict(self, digest: AdapterDigest) -> None:
        """Forget an adapter and its expected transfer."""
        with self._lock:
            self._expected.pop(digest, None)
            self._weights.pop(digest, None)

    def has_extras(self, digest: AdapterDigest) -> bool:
        """Return whether the adapters include a loaded adapter with more than A and B."""
        with self._lock:
            found = self._weights.get(digest)
            return found is not None and found.extras is not None

    def weights(self, digest: AdapterDigest) -> LoraWeights:
        """Return the weights of an adapter, as views of the device arena.

        Raises:
            ExecutorError: the adapter is not loaded.
        """
        with self._lock:
            if digest not in self._weights:
                raise ExecutorError(f"adapter {digest} is used, but is not loaded")
            return self._weights[digest]
