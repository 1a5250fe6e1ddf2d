"""Adapters inside arena blocks: writing the pieces of a packing, and views of them for the kernels."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from lorikeet.core.geometry import ModelGeometry
from lorikeet.kernels.base import LoraWeights
from lorikeet.memory.packing import Packing, Piece


def write_pieces(
    weights: Iterable[tuple[int, str, Tensor, Tensor]], packing: Packing, blocks: Sequence[int], arena: Tensor
) -> None:
    """Copy an adapter into its blocks.

    Args:
        weights: layer, module, A ``[rank, in_features]`` and Bᵀ ``[rank, out_features]``, as
            ``adapters.weights.load_weights`` yields them.
        packing: where each row goes.
        blocks: the arena's blocks, in packing order.
        arena: ``[blocks, elements]``, changed in place.

    Raises:
        ValueError: the weights are not those that were packed.
    """
    pieces = _by_module(packing)
    for layer, module, a, bt in weights:
        targets = pieces.pop((layer, module), [])
        if sum(piece.rows for piece in targets) != a.shape[0]:
            raise ValueError(f"{module} of layer {layer} has rank {a.shape[0]}, which is not what was packed")
        for piece in targets:
            rows = slice(piece.first_row, piece.first_row + piece.rows)
            a_view, bt_view = _views(piece, blocks, arena, a.shape[1], bt.shape[1])
            a_view.copy_(a[rows])
            bt_view.copy_(bt[rows])
    if pieces:
        layer, module = next(iter(pieces))
        raise ValueError(f"{module} of layer {layer} was packed, but has no weights")


def weights_in_place(packing: Packing, blocks: Sequence[int], arena: Tensor, geometry: ModelGeometry) -> LoraWeights:
    """See an adapter where it lies; nothing is copied.

    Args:
        packing: where each row lies.
        blocks: the arena's blocks, in packing order.
        arena: ``[blocks, elements]``.
        geometry: sizes that the packing was made for.
    """
    pieces = {
        (layer, module): tuple(
            _views(piece, blocks, arena, geometry.modules[module].in_features, geometry.modules[module].out_features)
            for piece in pieces
        )
        for (layer, module), pieces in _by_module(packing).items()
    }
    return LoraWeights(pieces, geometry.layers)


def _by_module(packing: Packing) -> dict[tuple[int, str], list[Piece]]:
    pieces: dict[tuple[int, str], list[Piece]] = {}
    for piece in packing.pieces:
        pieces.setdefault((piece.layer, piece.module), []).append(piece)
    return pieces


def _views(
    piece: Piece, blocks: Sequence[int], arena: Tensor, in_features: int, out_features: int
) -> tuple[Tensor, Tensor]:
    block = arena[blocks[piece.block]]
    middle = piece.offset + piece.rows * in_features
    end = middle + piece.rows * out_features
    return block[piece.offset : middle].view(piece.rows, in_features), block[middle:end].view(piece.rows, out_features)
