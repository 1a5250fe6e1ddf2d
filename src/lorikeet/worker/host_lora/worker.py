"""What a host worker computes for a ticket: the LoRA delta of q, k and v of one layer."""

import time
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import BlockId
from lorikeet.kernels.base import LoraPieces, LoraTargets
from lorikeet.kernels.tensors import torch_dtype
from lorikeet.memory.adapter_blocks import AdapterLayout
from lorikeet.memory.packing import pack
from lorikeet.models.weights import lora_targets
from lorikeet.worker.host_lora.ring import Ring, RingSlice


def host_targets(geometry: ModelGeometry) -> LoraTargets:
    """Return the modules that the host computes, and their columns in y."""
    return lora_targets(geometry)["qkv"]


def write_delta(x: Tensor, pieces: Sequence[LoraPieces], layer: int, targets: LoraTargets, y: Tensor) -> None:
    """Write ``x Aᵀ Bᵀᵀ`` of each target into its columns of ``y``, zeros where the adapter leaves it alone.

    A is whole on every rank, as q, k and v are split by their outputs alone; so ``x Aᵀ`` is computed once for all.

    Workers call this for their slices, and a rank calls it for slices of workers that it has lost. Sums are in fp32;
    each result is rounded once.

    Args:
        x: ``[rows, in]``.
        pieces: of each rank, weights where they lie.
        layer: of the model.
        targets: see :func:`host_targets`.
        y: ``[ranks, rows, out]``, overwritten.
    """
    wide = x.float().numpy()  # numpy multiplies few rows several times as fast as torch does, and many as fast
    for module, column, outputs in targets.each:
        columns = y[:, :, column : column + outputs]
        inner = [wide @ a.float().numpy().T for a, _ in pieces[0].get((layer, module), ())]
        if not inner:
            columns.zero_()
            continue
        for of_rank, its_columns in zip(pieces, columns, strict=True):
            total, *others = (u @ bt.float().numpy() for u, (_, bt) in zip(inner, of_rank[layer, module], strict=True))
            for other in others:
                total += other
            its_columns.copy_(torch.from_numpy(total))


class HostAdapter(msgspec.Struct, frozen=True):
    """An adapter in the host arenas.

    Attributes:
        ranks: as in ``AdapterRef.ranks``.
        blocks: where it lies in each, in packing order.
    """

    ranks: dict[str, tuple[int, ...]]
    blocks: tuple[BlockId, ...]


class SliceWorker:
    """Computes slices of tickets from weights in the host arena, in the calling thread.

    Args:
        ring: where x, y and tickets lie.
        number: whose slices.
        arenas: the host arena of each rank, ``[blocks, elements]`` of the model's dtype.
        geometry: of a rank's share of the model.
    """

    def __init__(self, ring: Ring, number: int, arenas: Sequence[Tensor], geometry: ModelGeometry) -> None:
        dtype = torch_dtype(ring.shape.dtype)
        self._ring = ring
        self._number = number
        self._arenas = tuple(arenas)
        self._geometry = geometry
        self._targets = host_targets(geometry)
        self._x = torch.from_numpy(ring.x).view(dtype)
        self._y = torch.from_numpy(ring.y).view(dtype)
        self._adapters: list[HostAdapter] = []
        self._pieces: list[tuple[LoraPieces, ...] | None] = []
        self._cuts: dict[int, list[RingSlice]] = {}

    def begin(self, adapters: Sequence[HostAdapter]) -> None:
        """Take over the adapters of a step; slices name them by their place in this list."""
        known = dict(zip(self._places(), self._pieces, strict=True))
        self._adapters = list(adapters)
        self._pieces = [known.get(place) for place in self._places()]
        self._cuts.clear()

    def prepare(self) -> None:
        """Find all weights now, which takes a millisecond for each new adapter, and not with its first ticket."""
        for number in range(len(self._adapters)):
            self._weights(number)

    def run(self, ticket: int) -> None:
        """Compute the own slices of a ticket whose x is ready, and signal y.

        Where others had work and this worker had none, the rank may have gone on, and the ticket be gone: then nothing
        is to be done.
        """
        description = self._ring.description(ticket)
        if description is None:
            return
        layer, cut = description
        own = self._cuts.get(cut)
        if own is None:
            slices = self._ring.cut(cut)
            if slices is None:
                return
            own = self._cuts[cut] = [part for part in slices if part.worker == self._number]
        began_ns = time.monotonic_ns()
        for part in own:
            self.compute(ticket, layer, part)
        self._ring.signal_y(ticket, self._number, began_ns, time.monotonic_ns())

    @torch.inference_mode()
    def compute(self, ticket: int, layer: int, part: RingSlice) -> None:
        """Compute one slice, whoever's it is, and signal nothing."""
        slot, rows = self._ring.slot(ticket), slice(part.start, part.start + part.rows)
        write_delta(self._x[slot, rows], self._weights(part.adapter), layer, self._targets, self._y[slot, :, rows])

    def _weights(self, number: int) -> tuple[LoraPieces, ...]:
        pieces = self._pieces[number]
        if pieces is None:
            adapter = self._adapters[number]
            layout = AdapterLayout(pack(adapter.ranks, self._geometry, self._arenas[0].shape[1]), self._geometry)
            pieces = tuple(layout.weights(adapter.blocks, arena).pieces for arena in self._arenas)
            self._pieces[number] = pieces
        return pieces

    def _places(self) -> list[tuple[object, ...]]:
        """What says where each adapter's weights lie, though not what they are."""
        return [(tuple(adapter.ranks.items()), adapter.blocks) for adapter in self._adapters]
