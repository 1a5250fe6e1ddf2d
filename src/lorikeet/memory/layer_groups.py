"""Which blocks of an adapter hold which layers, and in which order groups of layers arrive (TOPPINGS, section 4.1).

Neighbouring layers share a block where one ends and the next begins, so a group of layers is not a set of blocks of its
own: a block that two groups share travels with the group that is loaded first.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from lorikeet.core.plan import Groups
from lorikeet.memory.packing import Packing


def layer_blocks(packing: Packing, layers: int) -> tuple[range, ...]:
    """Return for each of ``layers`` layers the blocks that hold its weights; none where the adapter changes nothing.

    They are neighbours, as packings are layer-major.
    """
    bounds = [(0, 0)] * layers
    for piece in packing.pieces:  # ordered by layer, and within it by block
        first, stop = bounds[piece.layer]
        bounds[piece.layer] = (first if stop else piece.block, piece.block + 1)
    return tuple(range(first, stop) for first, stop in bounds)


def block_runs(packing: Packing, groups: Sequence[tuple[int, int]]) -> Groups:
    """Return the ``groups`` of a transfer that brings an adapter group of layers by group of layers.

    Args:
        packing: of the adapter.
        groups: (first layer, layer after the last) in the order in which they are to arrive; together every layer once.

    Returns:
        Half-open runs of blocks in that order, every block in one of them. A group whose blocks all travel with earlier
        groups has none.

    Raises:
        ValueError: the groups leave a layer out, or name one twice.
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
        # What remains is one run: other groups share at most its blocks at either end.
        own = [block for layer in range(first, stop) for block in blocks[layer] if block not in taken]
        if own:
            runs.append((own[0], own[-1] + 1))
            taken.update(own)
    return tuple(runs)


def blocks_needed(packing: Packing, layers: int, runs: Groups) -> tuple[int, ...]:
    """Return for each layer how many blocks must have arrived before all of its own have.

    Under tensor parallelism a layer is ready when the rank with the fewest arrived blocks has as many.

    Args:
        packing: of the adapter.
        layers: of the model.
        runs: ``groups`` of its transfer, whose blocks arrive one after the other; empty: as they lie.
    """
    order = (block for run in runs or ((0, packing.blocks),) for block in range(*run))
    arrival = {block: number for number, block in enumerate(order, start=1)}
    return tuple(max((arrival[block] for block in blocks), default=0) for blocks in layer_blocks(packing, layers))


def runs_needed(packing: Packing, layers: int, runs: Groups) -> tuple[int, ...]:
    """Return for each layer how many of ``runs`` must have arrived; arguments as for :func:`blocks_needed`."""
    ends = list(accumulate(stop - first for first, stop in runs or ((0, packing.blocks),)))
    return tuple(bisect_left(ends, blocks) + 1 if blocks else 0 for blocks in blocks_needed(packing, layers, runs))
