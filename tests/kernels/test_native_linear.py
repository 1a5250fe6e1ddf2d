"""The native matrix product against fp64, by the error that torch makes in the same dtype."""

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor

from lorikeet.kernels.native import PanelWeight, load_library, supported_instruction_sets
from tests.kernels.exactness import check_error
from tests.kernels.linear_cases import DTYPES, kernels, sizes
from tests.support.step_counts import examples

instruction_sets = pytest.mark.parametrize("instruction_set", supported_instruction_sets())


@pytest.mark.slow
@instruction_sets
@given(sizes, sizes, sizes, st.booleans(), st.sampled_from(DTYPES))
@settings(max_examples=examples(50))
def test_the_error_is_at_most_twice_that_of_torch(
    instruction_set: str, rows: int, inputs: int, outputs: int, biased: bool, dtype: torch.dtype
) -> None:
    native = kernels(instruction_set)

    def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x, weight = (torch.randn(n, inputs, generator=generator).to(dtype) for n in (rows, outputs))
        bias = torch.randn(outputs, generator=generator).to(dtype) if biased else None
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        return native.linear(x, native.pack(weight), bias), F.linear(x, weight, bias), exact

    check_error("linear", draw)


@instruction_sets
@given(sizes, sizes, sizes, st.sampled_from(DTYPES))
@settings(max_examples=examples(20))
def test_logits_are_the_unrounded_fp32_sums_of_a_product(
    instruction_set: str, rows: int, inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    native = kernels(instruction_set)
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, inputs, generator=generator).to(dtype) for n in (rows, outputs))
    packed = native.pack(weight)
    logits = native.logits(x, packed)
    assert logits.dtype == torch.float32
    assert torch.equal(logits.to(dtype), native.linear(x, packed, None))


@instruction_sets
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sums(instruction_set: str, dtype: torch.dtype) -> None:
    native = kernels(instruction_set)

    def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(seed)
        x = torch.randn(3, 9001).to(dtype)
        weight = torch.randn(50, 9001).to(dtype)
        return (
            native.linear(x, native.pack(weight), None),
            F.linear(x, weight),
            F.linear(x.double(), weight.double()),
        )

    check_error("linear", draw)


@instruction_sets
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(
    instruction_set: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    x = torch.randn(1043, 300).to(dtype)
    weight = torch.randn(100, 300).to(dtype)
    native = kernels(instruction_set)
    alone = kernels(instruction_set, threads=1)
    together = native.linear(x, native.pack(weight), None)
    packed = alone.pack(weight)
    for row in (0, 7, 8, 37, 69, 511, 512, 1042):
        assert torch.equal(alone.linear(x[row : row + 1], packed, None)[0], together[row])


@instruction_sets
@given(sizes, sizes, st.one_of(sizes, st.sampled_from([32, 64, 128])), st.booleans(), st.integers(1, 3))
@settings(max_examples=examples(30))
def test_fused_gating_has_the_bits_of_separate_calls(
    instruction_set: str, rows: int, inputs: int, columns: int, biased: bool, threads: int
) -> None:
    native = kernels(instruction_set, threads)
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, inputs, generator=generator).bfloat16() for n in (rows, 2 * columns))
    bias = torch.randn(2 * columns, generator=generator).bfloat16() if biased else None
    packed = native.pack(weight)
    out = torch.full((rows, columns), 7.0).bfloat16()
    assert isinstance(packed, PanelWeight)
    address = None if bias is None else bias.data_ptr()
    gated = load_library(instruction_set).lorikeet_linear_gated(
        x.data_ptr(), inputs, packed.address, address, out.data_ptr(), rows, threads
    )
    assert gated is (instruction_set == "amx" and columns % 32 == 0)
    assert torch.equal(out, native.silu_mul(native.linear(x, packed, bias)) if gated else torch.full_like(out, 7.0))


@instruction_sets
def test_rows_may_be_part_of_wider_ones(instruction_set: str) -> None:
    torch.manual_seed(2)
    wide = torch.randn(5, 40).bfloat16()
    weight = torch.randn(9, 24).bfloat16()
    native = kernels(instruction_set)
    packed = native.pack(weight)
    assert packed.shape == (9, 24)
    assert torch.equal(
        native.linear(wide[:, 8:32], packed, None), native.linear(wide[:, 8:32].contiguous(), packed, None)
    )


@instruction_sets
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_is_repacked_where_it_lies(instruction_set: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, old, new = (torch.randn(rows, 31).to(dtype) for rows in (3, 100, 100))
    native = kernels(instruction_set)
    packed = native.pack(old)
    other = native.pack(new)
    assert isinstance(packed, PanelWeight)
    address = packed.address
    panels = packed.panels.data_ptr()
    native.repack(new, packed)
    assert (packed.address, packed.panels.data_ptr()) == (address, panels)
    assert torch.equal(native.linear(x, packed, None), native.linear(x, other, None))
    native.repack(old.T.contiguous().T, packed)
    assert torch.equal(native.linear(x, packed, None), native.linear(x, native.pack(old), None))


@instruction_sets
def test_a_weight_of_another_shape_or_dtype_cannot_take_its_place(instruction_set: str) -> None:
    native = kernels(instruction_set)
    packed = native.pack(torch.zeros(48, 8))
    for wrong in (torch.zeros(8, 48), torch.zeros(48, 8, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="over"):
            native.repack(wrong, packed)
