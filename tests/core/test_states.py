"""Declared states are placed in blocks without a part across two of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.core.geometry import ModelGeometry, ModuleShape
from lorikeet.core.states import STATE_BYTES, StateShape, place_states

shapes = st.lists(
    st.builds(StateShape, st.integers(0, 3), st.just("recurrent"), st.integers(1, 5), st.tuples(st.integers(1, 40))),
    max_size=6,
)


@given(shapes)
def test_no_part_crosses_a_block_or_overlaps_another(declared: list[StateShape]) -> None:
    block_bytes = 192
    found = place_states(declared, block_bytes)
    taken = set[int]()
    for shape, parts in zip(declared, found.places, strict=True):
        assert len(parts) == shape.parts
        for block, offset in parts:
            assert block < found.blocks
            assert (offset + shape.part_elements) * STATE_BYTES <= block_bytes
            elements = {block * block_bytes // STATE_BYTES + offset + i for i in range(shape.part_elements)}
            assert taken.isdisjoint(elements)
            taken |= elements
    assert bool(found.blocks) == bool(declared)


def test_a_part_larger_than_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="layer 2: a part of its state conv has 256 bytes, a block only 192"):
        place_states([StateShape(2, "conv", 1, (64,))], 192)


def test_blocks_hold_the_largest_part_of_a_state() -> None:
    modules = {"in": ModuleShape(100, 60)}
    states = (StateShape(0, "recurrent", 3, (8, 33)),)
    small = ModelGeometry(1, 1, 8, modules, 2, states=states)
    assert small.block_bytes(4) == 1088  # 8 x 33 x 4 bytes, in whole lines of 64
    assert small.block_bytes(100) == 3200
    assert (small.state_blocks(4), small.state_blocks(100)) == (3, 2)
    without_kv = ModelGeometry(1, 1, 8, modules, 4, states=(StateShape(0, "conv", 1, (3, 4)),), has_kv=False)
    assert without_kv.kv_shapes() == ()
    assert without_kv.block_bytes(4) == 640  # a rank row of the module
    assert without_kv.token_bytes == 0
