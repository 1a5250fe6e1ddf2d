"""Groups of layers as runs of blocks."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.core.geometry import LORA_MODULES, ModelGeometry, ModuleShape
from lorikeet.memory.packing import AdapterPacking, block_runs, blocks_needed, layer_blocks, pack, runs_needed

_ROW_ELEMENTS = 8


def _packing(ranks: list[int], block_rows: int, modules: tuple[str, ...] = ("q",)) -> AdapterPacking:
    """Pack an adapter with these ranks by layer; a block holds ``block_rows`` rank rows."""
    shape = ModuleShape(_ROW_ELEMENTS // 2, _ROW_ELEMENTS // 2)
    geometry = ModelGeometry(len(ranks), 1, 4, dict.fromkeys(LORA_MODULES, shape), 2)
    return pack(dict.fromkeys(modules, tuple(ranks)), geometry, block_rows * _ROW_ELEMENTS)


@st.composite
def _cases(draw: st.DrawFn) -> tuple[AdapterPacking, int, tuple[tuple[int, int], ...]]:
    ranks = draw(st.lists(st.integers(0, 9), min_size=1, max_size=12))
    modules = draw(st.sampled_from((("q",), ("q", "v"), ("q", "k", "v"))))
    cuts = draw(st.sets(st.integers(1, len(ranks)), max_size=5)) | {0, len(ranks)}
    bounds = sorted(cuts)
    groups = draw(st.permutations(list(pairwise(bounds))))
    return _packing(ranks, draw(st.integers(1, 12)), modules), len(ranks), tuple(groups)


def test_blocks_of_a_layer() -> None:
    """Ranks 3, 0, 2 and 4 in blocks of 4 rows: layers 0 and 2 share the first block, 2 and 3 the second."""
    packing = _packing([3, 0, 2, 4], 4)
    assert [list(blocks) for blocks in layer_blocks(packing, 4)] == [[0], [], [0, 1], [1, 2]]


def test_shared_block_is_loaded_with_the_first_group() -> None:
    packing = _packing([3, 0, 2, 4], 4)
    assert block_runs(packing, ((2, 4), (0, 2))) == ((0, 3),)
    assert block_runs(packing, ((3, 4), (0, 1), (1, 3))) == ((1, 3), (0, 1))
    assert block_runs(packing, ((0, 1), (1, 3), (3, 4))) == ((0, 1), (1, 2), (2, 3))


def test_what_a_layer_needs() -> None:
    packing = _packing([4, 4, 4], 3)  # layer 0 in blocks 0 and 1, layer 1 in 1 and 2, layer 2 in 2 and 3
    runs = block_runs(packing, ((1, 2), (2, 3), (0, 1)))
    assert runs == ((1, 3), (3, 4), (0, 1))
    assert blocks_needed(packing, 3, runs) == (4, 2, 3)
    assert runs_needed(packing, 3, runs) == (3, 1, 2)
    assert blocks_needed(packing, 3, ()) == (2, 3, 4)
    assert runs_needed(packing, 3, ()) == (1, 1, 1)


@pytest.mark.parametrize("groups", [((0, 2),), ((1, 3),), ((0, 2), (1, 3)), ((0, 3), (3, 3)), ()])
def test_groups_must_name_each_layer_once(groups: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="layer groups"):
        block_runs(_packing([1, 1, 1], 4), groups)


@given(_cases())
def test_runs_cover_every_block_once(case: tuple[AdapterPacking, int, tuple[tuple[int, int], ...]]) -> None:
    packing, _, groups = case
    order = [block for run in block_runs(packing, groups) for block in range(*run)]
    assert sorted(order) == list(range(packing.blocks))


@given(_cases())
def test_a_layer_is_complete_with_its_group_and_not_before_its_blocks(
    case: tuple[AdapterPacking, int, tuple[tuple[int, int], ...]],
) -> None:
    packing, layers, groups = case
    runs = block_runs(packing, groups)
    order = [block for run in runs for block in range(*run)]
    wanted = [{piece.block for piece in packing.pieces if piece.layer == layer} for layer in range(layers)]
    for layer, (blocks, arrived_runs) in enumerate(
        zip(blocks_needed(packing, layers, runs), runs_needed(packing, layers, runs), strict=True)
    ):
        # The least number of arrivals that brings all of its blocks, and the least number of runs.
        assert wanted[layer] <= set(order[:blocks])
        assert not blocks or not wanted[layer] <= set(order[: blocks - 1])
        assert sum(stop - first for first, stop in runs[:arrived_runs]) >= blocks
        assert not arrived_runs or sum(stop - first for first, stop in runs[: arrived_runs - 1]) < blocks
    brought: set[int] = set()
    for first, stop in groups:
        brought |= {block for layer in range(first, stop) for block in wanted[layer]}
        # With its group, and so with every block that an earlier group brought, a layer is complete.
        arrived = set(order[: len(brought)])
        assert all(wanted[layer] <= arrived for layer in range(first, stop))
