"""Writing an adapter into the blocks of its packing."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from numpy.typing import NDArray

from lorikeet.memory.packing import Packing, module_of


def write_pieces(
    weights: Iterable[tuple[int, str, NDArray[Any], NDArray[Any]]],
    packing: Packing,
    blocks: Sequence[int],
    arena: NDArray[Any],
) -> Iterator[int]:
    """Copy an adapter into its blocks, one block after the other.

    Args:
        weights: layer, module, A ``[rank, in_features]`` and Bᵀ ``[rank, out_features]``, in packing order, as
            ``adapters.weights.load_weights`` yields them.
        packing: where each row goes.
        blocks: the arena's blocks, in packing order.
        arena: ``[blocks, elements]``, changed in place.

    Yields:
        Before each block, how many are complete. The block is not touched before the caller asks on, who may so wait
        until a block of the arena can be used again.

    Raises:
        ValueError: the weights are not those that were packed, in their order.
    """
    modules = groupby(packing.pieces, key=module_of)
    block = -1
    for layer, module, a, bt in weights:
        packed, pieces = next(modules, (None, ()))
        targets = list(pieces)
        if packed != (layer, module) or sum(piece.rows for piece in targets) != a.shape[0]:
            raise ValueError(f"{module} of layer {layer} has rank {a.shape[0]}, which is not what was packed")
        for piece in targets:
            if piece.block != block:
                block = piece.block
                yield block
            rows = slice(piece.first_row, piece.first_row + piece.rows)
            middle = piece.offset + piece.rows * a.shape[1]
            end = middle + piece.rows * bt.shape[1]
            target = arena[blocks[block]]
            target[piece.offset : middle].reshape(piece.rows, -1)[:] = a[rows]
            target[middle:end].reshape(piece.rows, -1)[:] = bt[rows]
    for (layer, module), _ in modules:
        raise ValueError(f"{module} of layer {layer} was packed, but has no weights")
