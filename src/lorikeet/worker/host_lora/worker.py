"""Computes the LoRA delta of one product of a layer for a host worker's rows of a ticket."""

import time
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from lorikeet.core.geometry import PRODUCTS, ModelGeometry
from lorikeet.core.ids import BlockId
from lorikeet.kernels.devices import torch_dtype
from lorikeet.kernels.lora import LoraPieces, LoraTargets
from lorikeet.memory.adapter_blocks import AdapterLayout
from lorikeet.memory.packing import pack
from lorikeet.models.weights import lora_targets
from lorikeet.worker.host_lora.ring import Ring, RingSlice

_PRODUCTS = tuple(PRODUCTS)


def site_of(layer: int, product: str) -> int:
    """Return the number that identifies a layer's product in tickets."""
    return layer * len(_PRODUCTS) + _PRODUCTS.index(product)


def layer_and_product(site: int) -> tuple[int, str]:
    """Return the layer and the product for a number from :func:`site_of`."""
    layer, number = divmod(site, len(_PRODUCTS))
    return layer, _PRODUCTS[number]


class ProductWidths:
    """The widths of x and y of each product.

    Args:
        geometry: sizes of a rank's share of the model.

    Attributes:
        inputs, outputs: numbers of inputs and outputs by product.
    """

    def __init__(self, geometry: ModelGeometry) -> None:
        self.inputs = {name: geometry.modules[modules[0]].in_features for name, modules in PRODUCTS.items()}
        self.outputs = {
            name: sum(geometry.modules[module].out_features for module in modules) for name, modules in PRODUCTS.items()
        }


def narrowed(slot: Tensor, width: int) -> Tensor:
    """Return a view of a slot ``[…, rows, widest]`` as rows of ``width`` elements, packed from the slot's beginning."""
    rows = slot.shape[-2]
    return slot.flatten(-2)[..., : rows * width].unflatten(-1, (rows, width))


def write_delta(x: Tensor, pieces: Sequence[LoraPieces], layer: int, targets: LoraTargets, y: Tensor) -> None:
    """Write the LoRA delta ``x Aᵀ Bᵀ`` of each target into its columns of ``y``; zeros for unchanged targets.

    A is the same on every rank for products that are split by output only, so ``x Aᵀ`` is computed once for all ranks.
    Other products are passed for one rank at a time. Workers call this for their slices, and a rank for the slices of
    lost workers. Sums are in fp32; each result is rounded once.

    Args:
        x: ``[rows, in]``.
        pieces: views of the adapter's weights on each rank.
        layer: index of the layer.
        targets: the product's modules, and their columns in y.
        y: ``[ranks, rows, out]``, overwritten.
    """
    wide = x.float().numpy()  # For few rows numpy is several times as fast as torch.
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
    """An adapter that is in the host arenas.

    Attributes:
        ranks: see ``AdapterRef.ranks``.
        blocks: the adapter's blocks in each arena, in packing order.
    """

    ranks: dict[str, tuple[int, ...]]
    blocks: tuple[BlockId, ...]


class SliceWorker:
    """Computes slices of tickets from weights in the host arena, on the calling thread.

    Args:
        ring: the ring with x, y and tickets.
        number: this worker's number.
        arenas: the host arena of each rank, ``[blocks, elements]`` of the model's dtype.
        geometry: sizes of a rank's share of the model.
    """

    def __init__(self, ring: Ring, number: int, arenas: Sequence[Tensor], geometry: ModelGeometry) -> None:
        dtype = torch_dtype(ring.shape.dtype)
        self._ring = ring
        self._number = number
        self._arenas = tuple(arenas)
        self._geometry = geometry
        self._targets = lora_targets(geometry)
        self._widths = ProductWidths(geometry)
        self._x = torch.from_numpy(ring.x).view(dtype)
        self._y = torch.from_numpy(ring.y).view(dtype)
        self._adapters: list[HostAdapter] = []
        self._pieces: list[tuple[LoraPieces, ...] | None] = []
        self._cuts: dict[int, list[RingSlice]] = {}

    def begin(self, adapters: Sequence[HostAdapter]) -> None:
        """Set the adapters of a step. Slices refer to an adapter by its index."""
        known = dict(zip(self._keys(), self._pieces, strict=True))
        self._adapters = list(adapters)
        self._pieces = [known.get(key) for key in self._keys()]
        self._cuts.clear()

    def prepare(self) -> None:
        """Create the views of all weights now, instead of with the first ticket.

        Each new adapter takes a millisecond.
        """
        for number in range(len(self._adapters)):
            self._weights(number)

    def run(self, ticket: int) -> None:
        """Compute this worker's slices of a ticket whose x is ready, and signal y.

        A worker without slices has nothing to do. The rank may not have waited for the worker, so the ticket may be
        overwritten.
        """
        description = self._ring.description(ticket)
        if description is None:
            return
        site, cut = description
        own = self._cuts.get(cut)
        if own is None:
            slices = self._ring.cut(cut)
            if slices is None:
                return
            own = self._cuts[cut] = [part for part in slices if part.worker == self._number]
        began_ns = time.monotonic_ns()
        for part in own:
            self.compute(ticket, site, part)
        self._ring.signal_y(ticket, self._number, began_ns, time.monotonic_ns())

    @torch.inference_mode()
    def compute(self, ticket: int, site: int, part: RingSlice) -> None:
        """Compute one slice, of this or another worker, without a signal."""
        slot = self._ring.slot(ticket)
        rows = slice(part.start, part.start + part.rows)
        layer, product = layer_and_product(site)
        x = narrowed(self._x[slot], self._widths.inputs[product])[rows]
        y = narrowed(self._y[slot], self._widths.outputs[product])[:, rows]
        write_delta(x, self._weights(part.adapter), layer, self._targets[product], y)

    def _weights(self, number: int) -> tuple[LoraPieces, ...]:
        pieces = self._pieces[number]
        if pieces is None:
            adapter = self._adapters[number]
            layout = AdapterLayout(pack(adapter.ranks, self._geometry, self._arenas[0].shape[1]), self._geometry)
            pieces = tuple(layout.weights(adapter.blocks, arena).pieces for arena in self._arenas)
            self._pieces[number] = pieces
        return pieces

    def _keys(self) -> list[tuple[object, ...]]:
        """Return, for each adapter, the values that determine where its weights' views lie."""
        return [(tuple(adapter.ranks.items()), adapter.blocks) for adapter in self._adapters]
