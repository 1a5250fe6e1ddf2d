"""The native attention against fp64, by the error that torch makes in the same dtype."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from lorikeet.kernels.native import load_library, supported_instruction_sets
from lorikeet.kernels.reference import kv_codes
from tests.kernels.attention_cases import DTYPES, Case, Shape
from tests.kernels.exactness import check_error

pytestmark = pytest.mark.skipif(not supported_instruction_sets(), reason="no native library on this machine")


def check(shape: Shape, dtype: torch.dtype, instruction_set: str) -> None:
    """The error is small enough, and the same on one thread."""
    library = load_library(instruction_set)

    def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        case = Case(shape, dtype, seed)
        return case.native(library, 2), case.by_torch(dtype), case.by_torch(torch.float64)

    check_error("attention", draw)
    case = Case(shape, dtype)
    out = case.native(library, 2)
    assert torch.equal(out, case.native(library, 1))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Decodes, prefills and what lies between, on both sides of every size that the kernel cuts at."""
    lengths = st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 127, 128, 129, 192, 300]))
    sequences = []
    for _ in range(draw(st.integers(1, 4))):
        rows = draw(lengths)
        sequences.append((rows, rows + draw(st.one_of(st.just(0), lengths))))
    return Shape(
        sequences,
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 4, 7])),
        head_dim=draw(st.one_of(st.sampled_from([16, 32, 64, 80, 128]), st.integers(1, 130))),
        block_size=draw(st.sampled_from([1, 5, 16, 64])),
        window=draw(st.sampled_from([0, 0, 1, 17, 100])),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5])),
        one_order=draw(st.booleans()),
    )


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", supported_instruction_sets())
@given(shapes(), st.sampled_from(DTYPES))
@settings(max_examples=60)
def test_the_error_is_at_most_twice_that_of_torch(instruction_set: str, shape: Shape, dtype: torch.dtype) -> None:
    check(shape, dtype, instruction_set)


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", supported_instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_contexts_and_prompts(instruction_set: str, dtype: torch.dtype) -> None:
    check(Shape([(1, 5000), (512, 512), (64, 2000), (8, 65)]), dtype, instruction_set)


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", supported_instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 80), (3, 64), (7, 128)], ids="group {0[0]}, head_dim {0[1]}".format)
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(
    instruction_set: str, dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    library = load_library(instruction_set)
    sequences = [(1, 700), (40, 90), (3, 130), (1, 5), (200, 200), (2, 4200)]
    case = Case(Shape(sequences, group=heads[0], head_dim=heads[1]), dtype)
    together = case.native(library, 2)
    for index in range(len(case.contexts)):
        start, stop = case.row_starts[index : index + 2].tolist()
        assert torch.equal(together[start:stop], case.native(library, 1, only=index))


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", supported_instruction_sets())
@given(shapes(), st.sampled_from(DTYPES), st.booleans(), st.data())
@settings(max_examples=60)
def test_in_one_order_a_row_has_the_same_bits_in_every_chunk(
    instruction_set: str, shape: Shape, dtype: torch.dtype, coded: bool, data: st.DataObject
) -> None:
    library = load_library(instruction_set)
    case = Case(replace(shape, sequences=shape.sequences[:1], one_order=True), dtype)
    if coded:
        case.kv = kv_codes(case.kv)
    whole = case.native(library, 2)
    rows = shape.sequences[0][0]
    first = 0
    while first < rows:
        size = data.draw(st.one_of(st.just(1), st.integers(1, rows - first)))
        assert torch.equal(case.part(first, size).native(library, 1), whole[first : first + size])
        first += size


@pytest.mark.parametrize("instruction_set", supported_instruction_sets())
@pytest.mark.parametrize("rows", [1, 20])
def test_a_nan_that_is_seen_is_not_hidden(instruction_set: str, rows: int) -> None:
    case = Case(Shape([(rows, 100)]), torch.bfloat16)
    case.kv[case.tables[0, 0], 0, 3] = torch.nan
    assert case.native(load_library(instruction_set), 1).isnan().all()


@pytest.mark.parametrize("instruction_set", supported_instruction_sets())
@pytest.mark.parametrize("sizes", [(33, 33), (1, 33), (8, 33)], ids="{0[0]} rows".format)
def test_results_do_not_depend_on_earlier_calls(instruction_set: str, sizes: tuple[int, int]) -> None:
    library = load_library(instruction_set)
    case, spoilt = (Case(Shape([shape]), torch.bfloat16) for shape in (sizes, (sizes[0], 128)))
    before = case.native(library, 1)
    spoilt.kv[:] = torch.nan
    spoilt.native(library, 1)
    assert torch.equal(case.native(library, 1), before)
