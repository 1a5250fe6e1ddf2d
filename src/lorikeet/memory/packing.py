"""Packs an adapter into blocks: decides which block holds which rank rows, and the order in which layers are loaded.

Packing is layer-major. If one layer ends and the next begins in the same block, both layers share the block. So groups
of layers may share blocks. A shared block is transferred with the group that is loaded first (TOPPINGS, section 4.1).
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from lorikeet.adapters.numbers import to_codes
from lorikeet.core.adapter import AdapterExtra, AdapterRef
from lorikeet.core.geometry import SCORE, ModelGeometry
from lorikeet.core.plan import Groups


class PackedRows(NamedTuple):
    """Describes a run of one module's rank rows in one block.

    Attributes:
        layer: decoder layer.
        module: a module of the geometry, or ``geometry.SCORE``.
        block: index in the adapter's list of blocks.
        offset: first element inside the block.
        first_row: index of its first rank row in the module.
        rows: number of rank rows.
    """

    layer: int
    module: str
    block: int
    offset: int
    first_row: int
    rows: int


class PackedExtra(NamedTuple):
    """Describes a run of rows of an extra tensor in one block.

    Attributes:
        number: index of the extra tensor among the adapter's extras.
        layer: layer of the matrix.
        block, offset, first_row, rows: see :class:`PackedRows`.
    """

    number: int
    layer: int
    block: int
    offset: int
    first_row: int
    rows: int


class AdapterPacking(NamedTuple):
    """Holds the segment table of a packed adapter.

    Attributes:
        pieces: runs of rows of A and B, ordered by layer, then module, then row.
        extras: runs of rows of the extras, which follow the pieces, in the order of the adapter's extras, then by layer
            and row.
        blocks: number of blocks that the adapter takes. With several pipeline stages, the largest number of any stage.
        used_elements: number of elements that hold weights; the rest of the blocks is waste.
        lora_bits: number of bits of an element, see ``ModelGeometry``.
    """

    pieces: tuple[PackedRows, ...]
    extras: tuple[PackedExtra, ...]
    blocks: int
    used_elements: int
    lora_bits: int = 0


def pack(
    ranks: Mapping[str, tuple[int, ...]],
    geometry: ModelGeometry,
    block_elements: int,
    extras: Sequence[AdapterExtra] = (),
) -> AdapterPacking:
    """Compute the packing of an adapter.

    Args:
        ranks: rank of each module on every layer, as in ``AdapterRef.ranks``.
        geometry: sizes of the model, or of one tensor-parallel rank's share.
        block_elements: number of elements of a block.
        extras: extra tensors, as in ``AdapterRef.extras``.

    Raises:
        ValueError: one rank row, or a row of an extra, is larger than a block.
    """
    packed = _pack_stage(ranks, geometry, block_elements, extras)
    if geometry.stages == 1:
        return packed
    # All tensor-parallel ranks use the same block numbers.
    firsts = range(0, geometry.layers * geometry.stages, geometry.layers)
    stages = (msgspec.structs.replace(geometry, first_layer=first) for first in firsts)
    most = max(_pack_stage(ranks, stage, block_elements, extras).blocks for stage in stages)
    return packed._replace(blocks=most)


def _pack_stage(
    ranks: Mapping[str, tuple[int, ...]], geometry: ModelGeometry, block_elements: int, extras: Sequence[AdapterExtra]
) -> AdapterPacking:
    space = _Space(block_elements)
    pieces: list[PackedRows] = []
    for layer in range(geometry.layers):
        for module in (*geometry.modules, SCORE):
            if module not in ranks:
                continue
            row_elements = geometry.row_elements(module)
            if row_elements > block_elements:
                raise ValueError(f"a rank row of {module} has {row_elements} elements, a block only {block_elements}")
            rank = ranks[module][geometry.first_layer + layer]
            pieces += [PackedRows(layer, module, *run) for run in space.take(rank, row_elements)]
    packed: list[PackedExtra] = []
    for number, extra in enumerate(extras):
        if extra.columns > block_elements:
            raise ValueError(f"{extra.kind} of {extra.module} has {extra.columns} columns, a block {block_elements}")
        for layer, count in enumerate(extra.rows):
            packed += [PackedExtra(number, layer, *run) for run in space.take(count, extra.columns)]
    blocks = space.block + 1 if space.used else 0
    return AdapterPacking(tuple(pieces), tuple(packed), blocks, space.used, geometry.lora_bits)


class _Space:
    """Tracks the used space of an adapter's blocks during packing.

    Attributes:
        block: index of the last block in use.
        used: number of elements used so far, over all blocks.
    """

    def __init__(self, block_elements: int) -> None:
        self._block_elements = block_elements
        self._offset = 0
        self.block = 0
        self.used = 0

    def take(self, count: int, row_elements: int) -> Iterator[tuple[int, int, int, int]]:
        """Reserve space for ``count`` rows. Yield the block, offset, first row and number of rows of each run."""
        done = 0
        while done < count:
            rows = min(count - done, (self._block_elements - self._offset) // row_elements)
            if rows == 0:
                self.block = self.block + 1
                self._offset = 0
                continue
            yield self.block, self._offset, done, rows
            done += rows
            self._offset += rows * row_elements
            self.used += rows * row_elements


def packing_for(ref: AdapterRef, geometry: ModelGeometry, block_elements: int, blocks: int) -> AdapterPacking:
    """Return the packing of an adapter for which ``blocks`` blocks were leased.

    Raises:
        ValueError: the adapter takes another number of blocks.
    """
    packing = pack(ref.ranks, geometry, block_elements, ref.extras)
    if packing.blocks != blocks:
        raise ValueError(f"adapter {ref.name!r} takes {packing.blocks} blocks, not {blocks}")
    return packing


def module_of(piece: PackedRows) -> tuple[int, str]:
    """Return the layer and module of a piece, to group a packing's pieces by module."""
    return piece.layer, piece.module


def layer_blocks(packing: AdapterPacking, layers: int) -> tuple[range, ...]:
    """Return the range of blocks that holds each layer's weights.

    The range is empty for layers that the adapter does not change. The blocks of a layer are consecutive, because
    packings are layer-major.
    """
    bounds = [(0, 0)] * layers
    for piece in packing.pieces:  # pieces are ordered by layer, then by block
        first, stop = bounds[piece.layer]
        bounds[piece.layer] = (first if stop else piece.block, piece.block + 1)
    return tuple(range(first, stop) for first, stop in bounds)


def block_runs(packing: AdapterPacking, groups: Sequence[tuple[int, int]]) -> Groups:
    """Return the ``groups`` of a transfer that loads an adapter by groups of layers.

    Args:
        packing: packing of the adapter.
        groups: (first layer, layer after the last) of each group, in loading order. Together the groups contain every
            layer once.

    Returns:
        Half-open runs of blocks in loading order. Every block is in exactly one run. A group whose blocks are all
        loaded with earlier groups has no run.

    Raises:
        ValueError: the groups miss a layer, or contain one twice.
    """
    covered = 0
    for first, stop in sorted(groups):
        if first != covered or stop <= first:
            raise ValueError(f"layer groups {tuple(groups)} do not name each layer once")
        covered = stop
    if packing.pieces and packing.pieces[-1].layer >= covered:
        raise ValueError(f"layer groups {tuple(groups)} end before layer {packing.pieces[-1].layer}")
    blocks = layer_blocks(packing, covered)
    taken: set[int] = set()
    runs = []
    for first, stop in groups:
        # The group's remaining blocks are one run, because other groups can share only its first and last block.
        own = [block for layer in range(first, stop) for block in blocks[layer] if block not in taken]
        if own:
            runs.append((own[0], own[-1] + 1))
            taken.update(own)
    return tuple(runs)


def blocks_needed(packing: AdapterPacking, layers: int, runs: Groups) -> tuple[int, ...]:
    """Return, for each layer, the number of blocks that must arrive until the layer is complete.

    Under tensor parallelism, a layer is ready when every rank has received that number of blocks.

    Args:
        packing: packing of the adapter.
        layers: number of layers of the model.
        runs: ``groups`` of the transfer, in the order in which the blocks arrive; empty for packing order.
    """
    order = (block for run in runs or ((0, packing.blocks),) for block in range(*run))
    arrival = {block: number for number, block in enumerate(order, start=1)}
    return tuple(max((arrival[block] for block in blocks), default=0) for blocks in layer_blocks(packing, layers))


def runs_needed(packing: AdapterPacking, layers: int, runs: Groups) -> tuple[int, ...]:
    """Return, for each layer, the number of ``runs`` that must arrive until the layer is complete.

    See :func:`blocks_needed` for the arguments.
    """
    ends = list(accumulate(stop - first for first, stop in runs or ((0, packing.blocks),)))
    return tuple(bisect_left(ends, blocks) + 1 if blocks else 0 for blocks in blocks_needed(packing, layers, runs))


def write_pieces(
    weights: Iterable[tuple[int, str, NDArray[Any], NDArray[Any]]],
    packing: AdapterPacking,
    blocks: Sequence[int],
    arena: NDArray[Any],
    extras: Iterable[tuple[int, int, Callable[[int, int], NDArray[Any]]]] = (),
) -> Iterator[int]:
    """Copy an adapter's weights into its blocks, one block after the other.

    A piece of a packing with codes consists of the scales of its rank rows (fp32), the codes of A, and the codes of Bᵀ.
    The scale of a rank row is the product of the scales of its rows of A and Bᵀ, because only the product is needed.

    Args:
        weights: layer, module, A ``[rank, in_features]`` and Bᵀ ``[rank, out_features]``, in packing order, as
            ``adapters.weights.load_weights`` yields them.
        packing: position of each row.
        blocks: blocks of the arena, in packing order.
        arena: ``[blocks, elements]``, changed in place.
        extras: number and layer of each extra tensor, and a function that reads ``count`` rows of the tensor from row
            ``first`` on, as ``adapters.weights.load_extras`` yields them.

    Yields:
        The number of complete blocks, before each block is written. The next block is written only when the caller
        resumes the iterator, so the caller can first wait until that block is free.

    Raises:
        ValueError: the weights do not match the packing or its order.
    """
    modules = groupby(packing.pieces, key=module_of)
    block = -1
    for layer, module, a, bt in weights:
        packed, pieces = next(modules, (None, ()))
        targets = list(pieces)
        if packed != (layer, module) or sum(piece.rows for piece in targets) != a.shape[0]:
            raise ValueError(f"{module} of layer {layer} has rank {a.shape[0]}, which is not what was packed")
        if has_codes := packing.lora_bits == 8 and module != SCORE:
            a, a_scales = to_codes(a)
            bt, b_scales = to_codes(bt)
            scales = a_scales * b_scales
        for piece in targets:
            if piece.block != block:
                block = piece.block
                yield block
            rows = slice(piece.first_row, piece.first_row + piece.rows)
            target = arena[blocks[block]][piece.offset :]
            parts = (scales[rows], a[rows], bt[rows]) if has_codes else (a[rows], bt[rows])
            for part in parts:
                kept = target.view(np.uint8)[: part.nbytes].view(part.dtype)
                kept.reshape(part.shape)[:] = part
                target = target.view(np.uint8)[part.nbytes :]
    for (layer, module), _ in modules:
        raise ValueError(f"{module} of layer {layer} was packed, but has no weights")
    matrices = groupby(packing.extras, key=lambda piece: (piece.number, piece.layer))
    for (key, rows_of), (number, layer, read) in zip(matrices, extras, strict=True):
        if key != (number, layer):
            raise ValueError(f"extra {number} of layer {layer} is not what was packed")
        for each in rows_of:
            if each.block != block:
                block = each.block
                yield block
            found = read(each.first_row, each.rows)
            target = arena[blocks[block]]
            target[each.offset : each.offset + found.size].reshape(found.shape)[:] = found
