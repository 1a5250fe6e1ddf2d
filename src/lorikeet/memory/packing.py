"""Where the rank rows of an adapter lie in its blocks: layer-major, no row straddles a block.

A *rank row* of a module is one row of A (``in_features`` elements) and the matching column of B
(``out_features`` elements, LoRA's scaling folded in). A *piece* is a run of rank rows of one (layer,
module) inside one block: first its rows of A, ``rows × in_features``, then its rows of Bᵀ,
``rows × out_features``, both contiguous. Pieces follow each other without gaps until the next row no
longer fits; the rest of that block is waste. So an adapter takes space in proportion to its rank, any
block of the pool serves, and layers complete in load order (ELORA's paging by rank, TOPPINGS' layer groups).
"""

from collections.abc import Mapping
from typing import NamedTuple

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import LORA_MODULES, ModelGeometry


class Piece(NamedTuple):
    """A run of rank rows of one module in one block.

    Attributes:
        layer: decoder layer.
        module: one of ``LORA_MODULES``.
        block: index in the adapter's list of blocks.
        offset: first element inside the block.
        first_row: first rank row of the module that the piece holds.
        rows: number of rank rows.
    """

    layer: int
    module: str
    block: int
    offset: int
    first_row: int
    rows: int


class Packing(NamedTuple):
    """The segment table of an adapter.

    Attributes:
        pieces: ordered by layer, then module, then row.
        blocks: number of blocks the adapter takes.
        used_elements: elements that hold weights; the rest of the blocks is waste.
    """

    pieces: tuple[Piece, ...]
    blocks: int
    used_elements: int


def pack(ranks: Mapping[str, tuple[int, ...]], geometry: ModelGeometry, block_elements: int) -> Packing:
    """Lay an adapter out over equal blocks.

    Args:
        ranks: per module the rank on every layer, as in ``AdapterRef.ranks``.
        geometry: sizes of the model (of one rank's share under tensor parallelism).
        block_elements: elements of a block.

    Raises:
        ValueError: one rank row is larger than a block.
    """
    pieces: list[Piece] = []
    block, offset, used = 0, 0, 0
    for layer in range(geometry.layers):
        for module in LORA_MODULES:
            if module not in ranks:
                continue
            shape = geometry.modules[module]
            row_elements = shape.in_features + shape.out_features
            if row_elements > block_elements:
                raise ValueError(f"a rank row of {module} has {row_elements} elements, a block only {block_elements}")
            done, rank = 0, ranks[module][layer]
            while done < rank:
                rows = min(rank - done, (block_elements - offset) // row_elements)
                if rows == 0:
                    block, offset = block + 1, 0
                    continue
                pieces.append(Piece(layer, module, block, offset, done, rows))
                done += rows
                offset += rows * row_elements
                used += rows * row_elements
    return Packing(tuple(pieces), block + 1 if pieces else 0, used)


def packing_for(ref: AdapterRef, geometry: ModelGeometry, block_elements: int, blocks: int) -> Packing:
    """Return the packing of an adapter for which somebody has set ``blocks`` blocks aside.

    Raises:
        ValueError: it takes another number of blocks.
    """
    packing = pack(ref.ranks, geometry, block_elements)
    if packing.blocks != blocks:
        raise ValueError(f"adapter {ref.name!r} takes {packing.blocks} blocks, not {blocks}")
    return packing


def module_of(piece: Piece) -> tuple[int, str]:
    """Return the layer and module that a piece belongs to; those of one module follow each other in a packing."""
    return piece.layer, piece.module
