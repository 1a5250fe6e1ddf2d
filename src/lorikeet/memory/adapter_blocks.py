"""Adapters inside arena blocks, as the kernels see them."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from lorikeet.core.geometry import LORA_MODULES, ModelGeometry
from lorikeet.kernels.base import LoraPieces, LoraWeights
from lorikeet.memory.packing import Packing, Piece, module_of


def weights_in_place(packing: Packing, blocks: Sequence[int], arena: Tensor, geometry: ModelGeometry) -> LoraWeights:
    """See an adapter where it lies; nothing is copied.

    Args:
        packing: where each row lies.
        blocks: the arena's blocks, in packing order.
        arena: ``[blocks, elements]``.
        geometry: sizes that the packing was made for.
    """

    def make_pieces() -> LoraPieces:
        return {
            module: tuple(_views(piece, blocks, arena, geometry) for piece in pieces)
            for module, pieces in groupby(packing.pieces, key=module_of)
        }

    numbers = {module: number for number, module in enumerate(LORA_MODULES)}
    places = np.array(
        [(p.layer * len(LORA_MODULES) + numbers[p.module], blocks[p.block], p.offset, p.rows) for p in packing.pieces],
        dtype=np.int64,
    ).reshape(-1, 4)
    inputs = np.array([geometry.modules[p.module].in_features for p in packing.pieces], dtype=np.int64)
    which, block, offset, rows = places.T
    a = arena.data_ptr() + (block * arena.stride(0) + offset) * arena.itemsize
    table = np.stack((a, a + rows * inputs * arena.itemsize, rows), axis=1)
    index = np.searchsorted(which, np.arange(geometry.layers * len(LORA_MODULES) + 1))
    rank = int(np.bincount(which, rows).max(initial=0))
    modules = frozenset(piece.module for piece in packing.pieces)
    return LoraWeights.from_table(rank, modules, torch.from_numpy(table), torch.from_numpy(index), make_pieces)


def _views(piece: Piece, blocks: Sequence[int], arena: Tensor, geometry: ModelGeometry) -> tuple[Tensor, Tensor]:
    shape = geometry.modules[piece.module]
    block = arena[blocks[piece.block]]
    middle = piece.offset + piece.rows * shape.in_features
    end = middle + piece.rows * shape.out_features
    return (
        block[piece.offset : middle].view(piece.rows, shape.in_features),
        block[middle:end].view(piece.rows, shape.out_features),
    )
