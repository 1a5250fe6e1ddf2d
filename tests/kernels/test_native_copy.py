"""Native copies, on every instruction set of this machine."""

import ctypes
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.kernels.native import load_library, native_copy, supported_instruction_sets

pytestmark = pytest.mark.skipif(not supported_instruction_sets(), reason="no native library can be used here")


@pytest.fixture(params=supported_instruction_sets(), scope="module")
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return load_library(request.param)


sizes = st.one_of(st.integers(0, 70), st.integers(250, 260), st.integers(500, 5000), st.integers(65_000, 140_000))


@pytest.mark.slow
@given(sizes, st.integers(0, 64), st.integers(0, 64), st.sampled_from([0.0, math.inf]), st.data())
def test_blocks_arrive_and_no_other_byte_changes(
    library: ctypes.CDLL, size: int, source_start: int, target_start: int, until_s: float, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(size)
    wide = torch.randint(0, 256, (64 + 5 * size,), dtype=torch.uint8, generator=generator)
    source = wide[source_start : source_start + 5 * size].view(5, size)
    into = torch.full((64 + 7 * size,), 77, dtype=torch.uint8)
    target = into[target_start : target_start + 7 * size].view(7, size)
    target_blocks = data.draw(st.lists(st.integers(0, 6), unique=True, max_size=5))
    source_blocks = data.draw(st.lists(st.integers(0, 4), min_size=len(target_blocks), max_size=len(target_blocks)))
    expected = into.clone()
    for taken, put in zip(source_blocks, target_blocks, strict=True):
        start = target_start + put * size
        expected[start : start + size] = source[taken]
    native_copy(library, source, source_blocks, target, target_blocks, until_s)
    assert torch.equal(into, expected)


@pytest.mark.parametrize(
    ("target", "source_blocks", "target_blocks"),
    [
        (torch.zeros(2, 7), [0, 1], [0, 1]),
        (torch.zeros(2, 8, dtype=torch.int32), [0, 1], [0, 1]),
        (torch.zeros(2, 16)[:, ::2], [0, 1], [0, 1]),
        (torch.zeros(2, 8), [0, 1], [0]),
        (torch.zeros(2, 8), [0, 1], [0, 2]),
        (torch.zeros(4, 8), [0, 2], [0, 3]),
        (torch.zeros(2, 8), [0, 1], [0, -1]),
    ],
    ids=["shape", "dtype", "gaps", "count", "behind-target", "behind-source", "before"],
)
def test_arenas_and_blocks_that_do_not_match_are_refused(
    library: ctypes.CDLL, target: torch.Tensor, source_blocks: list[int], target_blocks: list[int]
) -> None:
    with pytest.raises(RuntimeError, match="copied"):
        native_copy(library, torch.ones(2, 8), source_blocks, target, target_blocks, 0.0)
    assert not target.any()
