"""An adapter written into blocks reads back as it was, whatever ranks and block sizes meet."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import LORA_MODULES, ModelGeometry, ModuleShape
from lorikeet.core.ids import AdapterDigest, AdapterName
from lorikeet.memory.adapter_blocks import AdapterLayout, AdapterLayouts
from lorikeet.memory.packing import pack, write_pieces

Ranks = dict[str, tuple[int, ...]]
Floats = NDArray[np.float32]


@st.composite
def adapters(draw: st.DrawFn) -> tuple[Ranks, ModelGeometry, int]:
    """Ranks, a geometry and a block size in which every row fits."""
    layers = draw(st.integers(1, 4))
    size = st.integers(1, 9)
    shapes = {module: ModuleShape(draw(size), draw(size)) for module in LORA_MODULES}
    chosen = draw(st.lists(st.sampled_from(LORA_MODULES), unique=True))
    ranks = {module: tuple(draw(st.lists(st.integers(0, 9), min_size=layers, max_size=layers))) for module in chosen}
    largest = max(shape.in_features + shape.out_features for shape in shapes.values())
    return ranks, ModelGeometry(layers, 1, 1, shapes, 4), draw(st.integers(largest, 4 * largest))


def random_weights(ranks: Ranks, geometry: ModelGeometry) -> list[tuple[int, str, Floats, Floats]]:
    """Distinct numbers in every element, in packing order."""
    weights, count = [], 0
    for layer in range(geometry.layers):
        for module in LORA_MODULES:
            rank = ranks.get(module, (0,) * geometry.layers)[layer]
            shape = geometry.modules[module]
            if rank:
                sizes = rank * shape.in_features, rank * shape.out_features
                a = np.arange(count, count + sizes[0], dtype=np.float32).reshape(rank, -1) + 1
                b = np.arange(count + sizes[0], count + sum(sizes), dtype=np.float32).reshape(-1, rank) + 1
                weights.append((layer, module, a, b.T))
                count += sum(sizes)
    return weights


@pytest.mark.slow
@settings(deadline=None)
@given(adapters())
def test_every_row_is_packed_once_and_none_straddles_a_block(case: tuple[Ranks, ModelGeometry, int]) -> None:
    ranks, geometry, block_elements = case
    packing = pack(ranks, geometry, block_elements)
    rows = [(p.layer, p.module, row) for p in packing.pieces for row in range(p.first_row, p.first_row + p.rows)]
    expected = [
        (layer, module, row)
        for layer in range(geometry.layers)
        for module in LORA_MODULES
        if module in ranks
        for row in range(ranks[module][layer])
    ]
    assert rows == expected
    ends = []
    for piece in packing.pieces:
        shape = geometry.modules[piece.module]
        ends.append(piece.offset + piece.rows * (shape.in_features + shape.out_features))
        assert piece.rows > 0
        assert ends[-1] <= block_elements
    for (piece, after), end in zip(pairwise(packing.pieces), ends, strict=False):
        assert (after.block, after.offset) in ((piece.block, end), (piece.block + 1, 0))
    assert packing.blocks == len({piece.block for piece in packing.pieces})
    assert packing.used_elements <= packing.blocks * block_elements


@pytest.mark.slow
@settings(deadline=None)
@given(adapters(), st.randoms(use_true_random=False))
def test_views_return_written_weights_and_write_no_other_block(case, random) -> None:  # type: ignore[no-untyped-def]
    ranks, geometry, block_elements = case
    packing = pack(ranks, geometry, block_elements)
    arena = np.zeros((packing.blocks + 3, block_elements), np.float32)
    blocks = random.sample(range(len(arena)), packing.blocks)
    weights = random_weights(ranks, geometry)
    assert list(write_pieces(weights, packing, blocks, arena)) == list(range(packing.blocks))
    placed = AdapterLayout(packing, geometry).weights(blocks, torch.from_numpy(arena))
    views = placed.pieces
    assert list(views) == [(layer, module) for layer, module, _, _ in weights]
    for layer, module, a, bt in weights:
        pieces = views[layer, module]
        assert np.array_equal(torch.cat([piece[0] for piece in pieces]).numpy(), a)
        assert np.array_equal(torch.cat([piece[1] for piece in pieces]).numpy(), bt)
        assert all(view.untyped_storage().data_ptr() == arena.ctypes.data for view in pieces[0])
    assert int((arena != 0).sum()) == packing.used_elements
    # The same as numbers: what lies between two entries of the index are the pieces of one (layer, module).
    index = iter(pairwise(placed.index.tolist()))
    for layer in range(geometry.layers):
        for module in LORA_MODULES:
            rows = [[a.data_ptr(), bt.data_ptr(), len(a)] for a, bt in views.get((layer, module), ())]
            assert placed.table[slice(*next(index))].tolist() == rows


def test_weights_that_were_not_packed_are_refused() -> None:
    geometry = ModelGeometry(1, 1, 1, {module: ModuleShape(3, 2) for module in LORA_MODULES}, 4)
    packing = pack({"q": (2,), "v": (1,)}, geometry, 10)
    arena = np.zeros((packing.blocks, 10), np.float32)
    q, v = random_weights({"q": (2,), "v": (1,)}, geometry)
    for wrong in ([q], [q, v, (0, "k", *q[2:])], [(0, "q", *v[2:]), v]):
        with pytest.raises(ValueError, match="packed"):
            list(write_pieces(wrong, packing, range(packing.blocks), arena))


def test_weights_in_another_order_are_refused() -> None:
    geometry = ModelGeometry(1, 1, 1, {module: ModuleShape(3, 2) for module in LORA_MODULES}, 4)
    ranks = {"q": (2,), "v": (2,)}
    packing = pack(ranks, geometry, 10)
    q, v = random_weights(ranks, geometry)
    with pytest.raises(ValueError, match="packed"):
        list(write_pieces([v, q], packing, range(packing.blocks), np.zeros((packing.blocks, 10))))


@pytest.mark.slow
@settings(deadline=None)
@given(adapters(), st.integers(1, 3))
def test_an_adapter_passes_through_few_blocks_if_each_is_taken_in_time(
    case: tuple[Ranks, ModelGeometry, int], ring: int
) -> None:
    ranks, geometry, block_elements = case
    packing = pack(ranks, geometry, block_elements)
    expected = np.zeros((packing.blocks, block_elements), np.float32)
    list(write_pieces(random_weights(ranks, geometry), packing, range(packing.blocks), expected))
    staged, taken = np.zeros((ring, block_elements), np.float32), np.zeros_like(expected)
    blocks = [block % ring for block in range(packing.blocks)]

    def take(block: int) -> None:
        taken[block] = staged[block % ring]
        staged[block % ring] = 0.0

    for filled in write_pieces(random_weights(ranks, geometry), packing, blocks, staged):
        if filled >= ring:
            take(filled - ring)
    for block in range(max(0, packing.blocks - ring), packing.blocks):
        take(block)
    assert np.array_equal(taken, expected)


def test_adapters_of_equal_ranks_share_layout_but_not_blocks() -> None:
    geometry = ModelGeometry(1, 1, 1, {module: ModuleShape(3, 2) for module in LORA_MODULES}, 4)
    layouts = AdapterLayouts(geometry, 10)
    first, second, other = (
        AdapterRef(AdapterName(name), AdapterDigest(name), "", {"q": (rank,), "v": (1,)}, 0)
        for name, rank in (("a", 3), ("b", 3), ("c", 2))
    )
    layout = layouts.of(first)
    assert layouts.of(second) is layout
    assert layouts.of(other) is not layout
    arena = torch.zeros(8, 10)
    here, there = layout.weights([0, 1], arena), layout.weights([5, 2], arena)
    assert here.pieces[0, "v"][0][0].data_ptr() == arena[1].data_ptr() + 5 * 4
    assert there.pieces[0, "v"][0][0].data_ptr() == arena[2].data_ptr() + 5 * 4
    assert here.table[:, 0].tolist() == [arena[block].data_ptr() + at * 4 for block, at in ((0, 0), (1, 0), (1, 5))]
    assert there.table[:, 0].tolist() == [arena[block].data_ptr() + at * 4 for block, at in ((5, 0), (2, 0), (2, 5))]


@pytest.mark.parametrize("blocks", [[], [0], [0, 1, 2]])
def test_an_adapter_lies_in_as_many_blocks_as_it_takes(blocks: list[int]) -> None:
    geometry = ModelGeometry(1, 1, 1, {module: ModuleShape(3, 2) for module in LORA_MODULES}, 4)
    layout = AdapterLayout(pack({"q": (3,)}, geometry, 10), geometry)
    with pytest.raises(ValueError, match=f"takes 2 blocks, not {len(blocks)}"):
        layout.weights(blocks, torch.zeros(8, 10))
