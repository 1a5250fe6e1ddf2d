"""Adapters inside arena blocks, as the kernels see them."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import LORA_MODULES, ModelGeometry
from lorikeet.kernels.base import LoraPieces, LoraWeights
from lorikeet.memory.packing import AdapterPacking, PackedRows, module_of, pack

_MOST_LAYOUTS = 128
"""Fleets have adapters of a few shapes; of all modules on 80 layers one layout takes some 100 KB."""


class AdapterLayout:
    """What is the same wherever an adapter lies: made once, it finds the weights in any blocks with little work.

    Args:
        packing: where each row lies.
        geometry: sizes that the packing was made for.

    Attributes:
        packing, geometry: as above.
    """

    def __init__(self, packing: AdapterPacking, geometry: ModelGeometry) -> None:
        self.packing, self.geometry = packing, geometry
        numbers = {module: number for number, module in enumerate(LORA_MODULES)}
        places = [(p.layer * len(LORA_MODULES) + numbers[p.module], p.block, p.offset, p.rows) for p in packing.pieces]
        which, self._block, self._offset, self._rows = np.array(places, dtype=np.int64).reshape(-1, 4).T
        inputs = np.array([geometry.modules[p.module].in_features for p in packing.pieces], dtype=np.int64)
        self._a_elements = self._rows * inputs
        self._index = torch.from_numpy(np.searchsorted(which, np.arange(geometry.layers * len(LORA_MODULES) + 1)))
        self._rank = int(np.bincount(which, self._rows).max(initial=0))
        self._modules = frozenset(piece.module for piece in packing.pieces)

    def weights(self, blocks: Sequence[int], arena: Tensor) -> LoraWeights:
        """See an adapter where it lies; nothing is copied.

        Args:
            blocks: the arena's blocks, in packing order.
            arena: ``[blocks, elements]``.

        Raises:
            ValueError: they are not as many as it takes.
        """
        if len(blocks) != self.packing.blocks:
            raise ValueError(f"the adapter takes {self.packing.blocks} blocks, not {len(blocks)}")

        def make_pieces() -> LoraPieces:
            return {
                module: tuple(_views(piece, blocks, arena, self.geometry) for piece in pieces)
                for module, pieces in groupby(self.packing.pieces, key=module_of)
            }

        block = np.asarray(blocks, dtype=np.int64)[self._block]
        a = arena.data_ptr() + (block * arena.stride(0) + self._offset) * arena.itemsize
        table = np.stack((a, a + self._a_elements * arena.itemsize, self._rows), axis=1)
        return LoraWeights.from_table(self._rank, self._modules, torch.from_numpy(table), self._index, make_pieces)


class AdapterLayouts:
    """The layouts of adapters, one for all that have the same ranks.

    Args:
        geometry: of a rank's share of the model.
        block_elements: elements of a block.
    """

    def __init__(self, geometry: ModelGeometry, block_elements: int) -> None:
        @lru_cache(_MOST_LAYOUTS)
        def layout(ranks: tuple[tuple[str, tuple[int, ...]], ...]) -> AdapterLayout:
            return AdapterLayout(pack(dict(ranks), geometry, block_elements), geometry)

        self._layout = layout

    def of(self, ref: AdapterRef) -> AdapterLayout:
        """Return the layout of an adapter.

        Raises:
            ValueError: one rank row is larger than a block.
        """
        return self._layout(tuple(ref.ranks.items()))


def _views(piece: PackedRows, blocks: Sequence[int], arena: Tensor, geometry: ModelGeometry) -> tuple[Tensor, Tensor]:
    shape = geometry.modules[piece.module]
    block = arena[blocks[piece.block]]
    middle = piece.offset + piece.rows * shape.in_features
    end = middle + piece.rows * shape.out_features
    return (
        block[piece.offset : middle].view(piece.rows, shape.in_features),
        block[middle:end].view(piece.rows, shape.out_features),
    )
