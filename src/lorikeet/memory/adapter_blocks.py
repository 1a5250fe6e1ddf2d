"""Provides the kernels' views of packed adapters in arena blocks."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from lorikeet.core.adapter import AdapterExtra, AdapterRef, Shape
from lorikeet.core.geometry import SCALE_BYTES, SCORE, ModelGeometry
from lorikeet.kernels.extra_weights import ExtraMatrix, ExtraWeights
from lorikeet.kernels.lora import LoraPieces, LoraWeights
from lorikeet.memory.packing import AdapterPacking, PackedRows, module_of, pack

_MAX_LAYOUTS = 128
"""Largest number of cached layouts.

Deployments have adapters of few shapes. A layout of all modules on 80 layers takes about 100 KB.
"""

_A_SCALE = 2.0**-7
"""Scale of A when codes are dequantised, so that its elements are at most 1."""


class AdapterLayout:
    """Holds the part of an adapter's layout that does not depend on its blocks, computed once per shape.

    Args:
        packing: position of each row.
        geometry: sizes that the packing was computed for.
        extras: extra tensors of the adapter, see ``AdapterRef``.

    Attributes:
        packing, geometry: the arguments.
    """

    def __init__(self, packing: AdapterPacking, geometry: ModelGeometry, extras: Sequence[AdapterExtra] = ()) -> None:
        self.packing = packing
        self.geometry = geometry
        self._extras = tuple(extras)
        numbers = {module: number for number, module in enumerate(geometry.modules)}
        slots = geometry.module_slots
        pieces = [piece for piece in packing.pieces if piece.module != SCORE]
        self._score = packing.pieces[len(pieces) :]
        places = [(p.layer * slots + numbers[p.module], p.block, p.offset, p.rows) for p in pieces]
        which, self._block, self._offset, self._rows = np.array(places, dtype=np.int64).reshape(-1, 4).T
        inputs = np.array([geometry.modules[p.module].in_features for p in pieces], dtype=np.int64)
        # A piece has its scales, then A, then Bᵀ: see packing.write_pieces.
        self._scale_bytes = self._rows * (SCALE_BYTES if geometry.lora_bits else 0)
        self._a_elements = self._rows * inputs
        self._index = torch.from_numpy(np.searchsorted(which, np.arange(geometry.layers * slots + 1)))
        self._rank = int(np.bincount(which, self._rows).max(initial=0))
        self._modules = frozenset(piece.module for piece in pieces)

    def weights(self, blocks: Sequence[int], arena: Tensor) -> LoraWeights:
        """Return the weights of an adapter as views of the arena, without a copy.

        Args:
            blocks: blocks of the arena, in packing order.
            arena: ``[blocks, elements]``.

        Raises:
            ValueError: the number of blocks differs from the packing.
        """
        if len(blocks) != self.packing.blocks:
            raise ValueError(f"the adapter takes {self.packing.blocks} blocks, not {len(blocks)}")

        def make_pieces() -> LoraPieces:
            if self.geometry.lora_bits:
                return _Codes(self.packing, blocks, arena, self.geometry)
            return {
                module: tuple(_views(piece, blocks, arena, self.geometry) for piece in pieces)
                for module, pieces in groupby(self.packing.pieces, key=module_of)
                if module[1] != SCORE
            }

        block = np.asarray(blocks, dtype=np.int64)[self._block]
        a = arena.data_ptr() + (block * arena.stride(0) + self._offset) * arena.itemsize + self._scale_bytes
        bits = self.geometry.lora_bits
        table = np.stack((a, a + self._a_elements * (bits // 8 or arena.itemsize), self._rows), axis=1)
        weights = LoraWeights.from_table(
            self._rank, self._modules, torch.from_numpy(table), self._index, make_pieces, bits=bits
        )
        weights.score = tuple(_views(piece, blocks, arena, self.geometry)[0] for piece in self._score)
        if self._extras:
            weights.extras = self._extra_weights(blocks, arena)
        return weights

    def _extra_weights(self, blocks: Sequence[int], arena: Tensor) -> ExtraWeights:
        found = {}
        for (number, layer), pieces in groupby(self.packing.extras, key=lambda piece: (piece.number, piece.layer)):
            extra = self._extras[number]
            views = [
                arena[blocks[each.block]][each.offset : each.offset + each.rows * extra.columns].view(each.rows, -1)
                for each in pieces
            ]
            found[extra.kind, layer, extra.module] = ExtraMatrix(tuple(views), extra.tokens)
        return ExtraWeights(found, self.geometry)


class AdapterLayouts:
    """Caches layouts; adapters of equal ranks share a layout.

    Args:
        geometry: sizes of one tensor-parallel rank's share of the model.
        block_elements: number of elements of a block.
    """

    def __init__(self, geometry: ModelGeometry, block_elements: int) -> None:
        @lru_cache(_MAX_LAYOUTS)
        def layout(shape: Shape) -> AdapterLayout:
            ranks, extras = shape
            return AdapterLayout(pack(dict(ranks), geometry, block_elements, extras), geometry, extras)

        self._layout = layout

    def of(self, ref: AdapterRef) -> AdapterLayout:
        """Return the layout of an adapter.

        Raises:
            ValueError: one rank row is larger than a block.
        """
        return self._layout(ref.shape)


class _Codes(Mapping[tuple[int, str], tuple[tuple[Tensor, Tensor], ...]]):
    """Computes an adapter's weights from its stored codes, in the arena's dtype.

    The weights are computed at every use, because blocks may arrive in between.
    """

    def __init__(self, packing: AdapterPacking, blocks: Sequence[int], arena: Tensor, geometry: ModelGeometry) -> None:
        self._blocks = blocks
        self._arena = arena
        self._geometry = geometry
        self._pieces = {key: tuple(pieces) for key, pieces in groupby(packing.pieces, key=module_of) if key[1] != SCORE}

    def __getitem__(self, key: tuple[int, str]) -> tuple[tuple[Tensor, Tensor], ...]:
        return tuple(_dequantized(piece, self._blocks, self._arena, self._geometry) for piece in self._pieces[key])

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


def _dequantized(
    piece: PackedRows, blocks: Sequence[int], arena: Tensor, geometry: ModelGeometry
) -> tuple[Tensor, Tensor]:
    """Return A and Bᵀ of a piece of codes.

    A is the codes times a power of two, so it is exact. Unlike Bᵀ, A does not depend on the tensor-parallel rank.
    """
    shape = geometry.shape_of(piece.module)
    sizes = [n * piece.rows for n in (SCALE_BYTES, shape.in_features, shape.out_features)]
    content = arena[blocks[piece.block]][piece.offset :].view(torch.uint8)
    scales, a, bt = content[: sum(sizes)].split_with_sizes(sizes)
    a, bt = (codes.view(torch.int8).view(piece.rows, -1).to(torch.float32) for codes in (a, bt))
    bt = bt * (scales.clone().view(torch.float32) / _A_SCALE)[:, None]
    return (a * _A_SCALE).to(arena.dtype), bt.to(arena.dtype)


def _views(piece: PackedRows, blocks: Sequence[int], arena: Tensor, geometry: ModelGeometry) -> tuple[Tensor, Tensor]:
    shape = geometry.shape_of(piece.module)
    block = arena[blocks[piece.block]]
    middle = piece.offset + piece.rows * shape.in_features
    end = middle + piece.rows * shape.out_features
    return (
        block[piece.offset : middle].view(piece.rows, shape.in_features),
        block[middle:end].view(piece.rows, shape.out_features),
    )
