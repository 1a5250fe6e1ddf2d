"""What has arrived of an adapter that is on its way from the host to the device."""

import math
import threading
import time

from torch import Tensor

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import BlockId
from lorikeet.core.plan import Transfer
from lorikeet.kernels.base import LoraWeights
from lorikeet.memory.adapter_blocks import AdapterLayout
from lorikeet.memory.layer_groups import blocks_needed


class Arrival:
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
    def of(cls, transfer: Transfer, arena: Tensor, layout: AdapterLayout) -> "Arrival":
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
