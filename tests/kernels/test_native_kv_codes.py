"""Keys and values as codes of 8 bits: their error, and the kernels that write and read them."""

from dataclasses import replace

import pytest
import torch

from lorikeet.kernels.interface import Batch, RotaryPairs, Rotation, kv_view
from lorikeet.kernels.native import NativeKernels, load_library, supported_instruction_sets
from lorikeet.kernels.reference import ReferenceKernels, kv_codes, kv_from_codes
from tests.kernels.attention_cases import DTYPES, Case, Shape

SETS = pytest.mark.parametrize("instruction_set", supported_instruction_sets())
BOTH_DTYPES = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SHAPES = [
    Shape([(1, 300), (1, 1), (20, 147), (1, 64)], window=100),
    Shape([(4, 129), (130, 130)], kv_heads=2, group=7, head_dim=80, block_size=5, softcap=1.5),
    Shape([(1, 40), (9, 9)], kv_heads=1, group=2, head_dim=18),
]


def stored(values: torch.Tensor, kernels: NativeKernels | ReferenceKernels) -> torch.Tensor:
    """Return what a backend stores of values ``[T, kv_heads, head_dim]``, one block of them: codes of k and of v."""
    tokens, heads, head_dim = values.shape
    kv = torch.zeros(1, 2, tokens, heads, head_dim + 2, dtype=torch.int8)
    rows = torch.arange(tokens)
    none = torch.zeros(0, dtype=torch.int64)
    batch = Batch(none, rows, torch.zeros_like(rows), rows, none, none, none, none)
    still = torch.ones(tokens, head_dim, dtype=values.dtype), torch.zeros(tokens, head_dim, dtype=values.dtype)
    qkv = torch.cat((values, values, values), dim=1).flatten(1)
    kernels.rotary_store(qkv, Rotation(*still, RotaryPairs(head_dim)), kv, batch, None)
    return kv[0]


@SETS
@BOTH_DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_over_codes_is_that_over_the_numbers_they_mean(
    instruction_set: str, dtype: torch.dtype, shape: Shape
) -> None:
    case = Case(shape, dtype)
    library = load_library(instruction_set)
    codes = kv_codes(case.kv)
    case.kv = kv_from_codes(codes, dtype)
    expected = case.native(library, 2)
    case.kv = codes
    assert torch.equal(case.native(library, 2), expected)
    assert torch.equal(case.native(library, 1), expected)


@SETS
@BOTH_DTYPES
@pytest.mark.parametrize("head_dim", [2, 18, 64, 130])
def test_native_codes_equal_the_reference(instruction_set: str, dtype: torch.dtype, head_dim: int) -> None:
    values = torch.randn(20, 3, head_dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    values[3] *= 1e-3
    values[4] = 0
    values[5] = 1e-38
    native = stored(values, NativeKernels(instruction_set, load_library(instruction_set)))
    reference = stored(values, ReferenceKernels())
    assert torch.equal(reference[1], kv_codes(values))
    assert torch.equal(native, reference)
    assert torch.equal(native[0], native[1])


@SETS
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_stays_visible(instruction_set: str, bad: float) -> None:
    values = torch.ones(2, 1, 24)
    values[0, 0, 17] = bad
    for kernels in (NativeKernels(instruction_set, load_library(instruction_set)), ReferenceKernels()):
        found = kv_from_codes(stored(values, kernels), torch.float32)
        assert found[:, 0].isnan().all()
        assert (found[:, 1] - 1).abs().max() < 0.01


@BOTH_DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_reads_codes(dtype: torch.dtype, shape: Shape) -> None:
    case = Case(replace(shape, window=0), dtype)
    codes = kv_codes(case.kv)
    tables = case.tables.where(case.tables < len(codes), 0)
    none = torch.zeros(0, dtype=torch.int64)
    batch = Batch(none, none, none, none, case.row_starts, case.contexts, tables, none)
    columns = case.heads + 2 * shape.kv_heads
    qkv = torch.nn.functional.pad(case.q[:, : case.heads * shape.head_dim], (0, 2 * shape.kv_heads * shape.head_dim))
    assert qkv.shape[1] == columns * shape.head_dim
    found, expected = (
        ReferenceKernels().attention(qkv, kv, batch, shape.head_dim**-0.5, None, shape.softcap)
        for kv in (codes, kv_from_codes(codes, dtype))
    )
    torch.testing.assert_close(found, expected, rtol=0.01, atol=1e-5)
    assert not found.isnan().any()


def test_attention_is_off_by_less_than_a_hundredth() -> None:
    case = Case(Shape([(1, 500)]), torch.float32)
    exact = case.by_torch(torch.float64)
    case.kv = kv_from_codes(kv_codes(case.kv), torch.float32)
    off = (case.by_torch(torch.float64) - exact).norm() / exact.norm()
    assert 0.003 < float(off) < 0.01


def test_a_view_of_codes_takes_the_bytes_of_the_arena() -> None:
    arena = torch.zeros(3, 2 * 2 * 4 * 5 * (64 + 2) // 2, dtype=torch.bfloat16)
    view = kv_view(arena, 2, 4, 5, 64, bits=8)
    assert view.shape == (2, 3, 2, 4, 5, 66)
    view[1, 2] = 1
    assert bool((arena.view(torch.int8)[2].view(2, -1)[1] == 1).all())
    assert not arena[:2].any()
