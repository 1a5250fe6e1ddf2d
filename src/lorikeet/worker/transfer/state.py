"""Transfers in flight on a rank, adapters that have arrived in part, and those loaded on its device."""

import math
import threading
import time
from dataclasses import dataclass

from torch import Tensor

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.executor import ExecutorError
from lorikeet.core.ids import AdapterDigest, BlockId
from lorikeet.core.plan import Tier, Transfer
from lorikeet.kernels.base import LoraWeights
from lorikeet.memory.adapter_blocks import AdapterLayout
from lorikeet.memory.packing import blocks_needed
from lorikeet.worker.transfer.device import StreamEvent


class PartialAdapter:
    """Which layers of an adapter are complete on the device; one thread notes, others ask.

    Args:
        transfer_id: of the transfer that brings it.
        ref: the adapter.
        host_blocks: where it lies in the host arena, in packing order. They hold it until the transfer is reported,
            and as long as the step that runs then.
        weights: its place in the device arena. What lies there is sound on layers that have arrived.
        needed: for each layer, how many blocks must have been copied before all of its own have.
        left_to_host: see ``Transfer``.
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
        self._arrived_s = [math.inf if blocks else -math.inf for blocks in needed]  # what has no blocks is there
        self._began_s = time.monotonic()
        self._has_begun = False
        self._block_s = math.inf  # a block's time so far
        self._failed = False
        self._changed = threading.Condition()

    @classmethod
    def of(cls, transfer: Transfer, arena: Tensor, layout: AdapterLayout) -> "PartialAdapter":
        """Return the arrival of a transfer of which nothing has been copied yet.

        Args:
            transfer: of an adapter, from the host to the device.
            arena: of the device, ``[blocks, elements]``.
            layout: of the adapter.

        Raises:
            ValueError: it has not as many blocks as the adapter takes.
        """
        ref, groups = transfer.adapter, transfer.groups
        assert ref is not None
        packing, layers = layout.packing, layout.geometry.layers
        weights = layout.weights(transfer.device_blocks, arena)
        needed = blocks_needed(packing, layers, groups)
        return cls(transfer.transfer_id, ref, transfer.host_blocks, weights, needed, range(*transfer.left_to_host))

    def begin(self) -> None:
        """Note that its blocks are being copied. Only the first call counts; until then it waited for others."""
        with self._changed:
            if not self._has_begun:
                self._has_begun, self._began_s = True, time.monotonic()

    def note(self, copied: int, *, failed: bool) -> None:
        """Note how many blocks have been copied; once a copy has failed, nothing arrives any more."""
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
        """Tell whether a layer has arrived."""
        return self._arrived_s[layer] < math.inf

    def wait_for(self, layer: int, timeout_s: float | None = None) -> bool:
        """Block until a layer has arrived; False if it never will, or has not within ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self.has(layer) or self._failed, timeout_s)
            return self.has(layer)

    def due_s(self, layer: int) -> float:
        """Return about when a layer arrives, by the pace of the blocks so far; infinity before the first."""
        return self._began_s + self.needed[layer] * self._block_s if self.needed[layer] else self._began_s

    def arrived_s(self, layer: int) -> float:
        """Return when a layer arrived, in seconds of the monotonic clock; infinity if it has not.

        One that the adapter does not change has always been there.
        """
        return self._arrived_s[layer]


STAGED_BLOCKS = 8
"""Blocks behind the host tier through which each reader passes adapters that are to lie on the device only."""


@dataclass(eq=False)
class TransferState:
    """How far a transfer has come. Change it only under the lock of ``TransferManager``.

    Attributes:
        transfer: what was asked for.
        demand: whether somebody waits for it by now.
        host_blocks: where its blocks lie in the host arena or pass through it, in order.
        reading: whether blocks are still to be read.
        filled: blocks of ``host_blocks`` that hold what they should; all of them where nothing is to be read.
        after: its copies follow the steps before this mark, which may use the blocks that it takes.
        copying: blocks being copied, or in a stream behind others.
        has_turn: some of its blocks are being copied, and are behind no others.
        copied: blocks copied.
        reader: whose turn it is to read it, and whose blocks it passes through; None before and after.
        error: why it has failed, None if it has not.
        arrival: what steps know of it that do not wait for its end, None if there is none.
        weights: where an adapter will lie on the device; None until that is found, and of everything else.
        active_s: seconds in which it was read or copied.
    """

    transfer: Transfer
    demand: bool
    host_blocks: tuple[BlockId, ...]
    reading: bool
    filled: int
    after: StreamEvent
    copying: int = 0
    has_turn: bool = False
    copied: int = 0
    reader: int | None = None
    error: str | None = None
    arrival: PartialAdapter | None = None
    weights: LoraWeights | None = None
    active_s: float = 0.0
    _active_since_s: float | None = None

    @property
    def urgency(self) -> tuple[bool, int]:
        """The least is the most urgent: those that are awaited, in the order in which they began, then the others."""
        return not self.demand, self.transfer.transfer_id

    @property
    def blocks(self) -> int:
        """How many blocks it has."""
        return len(self.transfer.device_blocks or self.transfer.host_blocks)

    @property
    def to_copy(self) -> int:
        """How many blocks are copied between host and device."""
        return 0 if self.transfer.source is Tier.SOURCE and self.transfer.target is Tier.HOST else self.blocks

    @property
    def is_staged(self) -> bool:
        """Whether it passes through its reader's own blocks."""
        return self.transfer.source is Tier.SOURCE and not self.transfer.host_blocks

    @property
    def room(self) -> int:
        """How many blocks may be read before one of them is copied."""
        return STAGED_BLOCKS if self.is_staged else self.blocks

    @property
    def is_over(self) -> bool:
        """Whether nobody works on its blocks any more, nor needs to."""
        return not (self.reading or self.copying) and (self.error is not None or self.copied == self.to_copy)

    @property
    def is_ready(self) -> bool:
        """Whether a block can be copied now. If it has failed, what is still being read has to go somewhere."""
        goes_on = self.error is None or self.reading
        return goes_on and self.copied + self.copying < min(self.filled, self.to_copy)

    def next_blocks(self, most: int) -> range:
        """Return which of its blocks are to be copied next: at most so many, and none of the group after."""
        begun = done = self.copied + self.copying
        for first, stop in self.transfer.groups:
            if done < stop - first:
                return range(first + done, min(stop, first + done + most))
            done -= stop - first
        return range(begun, min(self.filled, begun + most))

    def take_time(self) -> None:
        """Count the time since the last call, if it was being read or copied then."""
        now = time.monotonic()
        if self._active_since_s is not None:
            self.active_s += now - self._active_since_s
        is_read = self.reading and self.reader is not None and self.filled - self.copied < self.room
        self._active_since_s = now if is_read or self.has_turn else None


class LoadedAdapters:
    """Where weights lie. The end of a transfer counts only if no eviction and no newer transfer came after it began."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: dict[AdapterDigest, int] = {}
        self._weights: dict[AdapterDigest, LoraWeights] = {}

    def expect(self, digest: AdapterDigest, transfer_id: int) -> None:
        """Note that a transfer brings an adapter; what an earlier one brought is forgotten."""
        with self._lock:
            self._expected[digest] = transfer_id
            self._weights.pop(digest, None)

    def arrived(self, digest: AdapterDigest, transfer_id: int, weights: LoraWeights) -> None:
        """Note what a transfer has brought, if it is still the one that is expected."""
        with self._lock:
            if self._expected.get(digest) == transfer_id:
                del self._expected[digest]
                self._weights[digest] = weights

    def failed(self, digest: AdapterDigest, transfer_id: int) -> None:
        """Note that a transfer will bring nothing."""
        with self._lock:
            if self._expected.get(digest) == transfer_id:
                del self._expected[digest]

    def evict(self, digest: AdapterDigest) -> None:
        """Forget an adapter, and whatever is on its way."""
        with self._lock:
            self._expected.pop(digest, None)
            self._weights.pop(digest, None)

    def weights(self, digest: AdapterDigest) -> LoraWeights:
        """Return where an adapter's weights lie.

        Raises:
            ExecutorError: it is not in the arena.
        """
        with self._lock:
            if digest not in self._weights:
                raise ExecutorError(f"adapter {digest} is used, but is not loaded")
            return self._weights[digest]
