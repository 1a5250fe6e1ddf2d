"""Quantised weights, and products with them, which have the bits of products with dequantised weights."""

import gguf
import hypothesis.strategies as st
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from torch import Tensor

from lorikeet.kernels.native import PanelWeight, load_library, supported_instruction_sets
from lorikeet.kernels.quantized import (
    QuantizedWeight,
    QuantizedWeightError,
    pack_nibbles,
    quantize,
    quantized_weight,
    stacked,
    unpack_nibbles,
)
from lorikeet.kernels.reference import ReferenceKernels
from tests.kernels.linear_cases import DTYPES, kernels, sizes
from tests.kernels.quantized_cases import weights
from tests.support.step_counts import examples

instruction_sets = pytest.mark.parametrize("instruction_set", supported_instruction_sets())


@pytest.mark.slow
@instruction_sets
@given(weights(), sizes, st.booleans(), st.sampled_from(DTYPES), st.integers(1, 3))
@settings(max_examples=examples(60))
def test_a_product_has_the_bits_of_one_with_the_dequantised_weight(
    instruction_set: str, weight: QuantizedWeight, rows: int, biased: bool, dtype: torch.dtype, threads: int
) -> None:
    native = kernels(instruction_set, threads)
    outputs, inputs = weight.shape
    x = torch.randn(rows, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    packed = native.pack(weight, dtype)
    plain = native.pack(weight.dequantized(dtype))
    assert torch.equal(native.linear(x, packed, bias), native.linear(x, plain, bias))
    assert torch.equal(native.logits(x, packed), native.logits(x, plain))
    assert packed.shape == weight.shape


@instruction_sets
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [2, 16, 32, 48, 64])
def test_few_rows_of_many_inputs_have_the_bits_of_the_dequantised_weight(
    instruction_set: str, bits: int, group: int
) -> None:
    generator = torch.Generator().manual_seed(group)
    native = kernels(instruction_set)
    outputs = 75
    inputs = 1010
    levels = torch.randint(0, 2**bits, (outputs, inputs), generator=generator)
    scales = torch.rand(outputs, -(-inputs // group), generator=generator)
    weight = quantized_weight(levels, scales.half().float(), -7 * scales, bits=bits, group=group)
    packed = native.pack(weight, torch.bfloat16)
    plain = native.pack(weight.dequantized(torch.bfloat16))
    for rows in (1, 2, 16, 17, 31, 32, 33):
        x = torch.randn(rows, inputs, generator=generator).bfloat16()
        assert torch.equal(native.linear(x, packed, None), native.linear(x, plain, None))


@instruction_sets
@pytest.mark.parametrize("bits", [8, 4])
def test_fused_gating_has_the_bits_of_separate_calls(instruction_set: str, bits: int) -> None:
    torch.manual_seed(bits)
    native = kernels(instruction_set)
    x = torch.randn(40, 96).bfloat16()
    packed = native.pack(quantize(torch.randn(128, 96), bits), torch.bfloat16)
    out = torch.zeros(40, 64).bfloat16()
    assert isinstance(packed, PanelWeight)
    gated = load_library(instruction_set).lorikeet_linear_gated(
        x.data_ptr(), 96, packed.address, None, out.data_ptr(), 40, 2
    )
    assert gated is (instruction_set == "amx")
    assert not gated or torch.equal(out, native.silu_mul(native.linear(x, packed, None)))


@instruction_sets
def test_a_row_has_the_same_bits_in_any_company(instruction_set: str) -> None:
    torch.manual_seed(1)
    native = kernels(instruction_set)
    alone = kernels(instruction_set, threads=1)
    x = torch.randn(1043, 320).bfloat16()
    weight = quantize(torch.randn(100, 320), 4)
    together = native.linear(x, native.pack(weight, torch.bfloat16), None)
    packed = alone.pack(weight, torch.bfloat16)
    for row in (0, 7, 8, 37, 69, 511, 512, 1042):
        assert torch.equal(alone.linear(x[row : row + 1], packed, None)[0], together[row])


@instruction_sets
def test_a_quantised_weight_cannot_be_overwritten(instruction_set: str) -> None:
    native = kernels(instruction_set)
    with pytest.raises(ValueError, match="quantised"):
        native.repack(torch.zeros(64, 32), native.pack(quantize(torch.ones(64, 32), 8), torch.float32))


def test_the_reference_multiplies_with_the_dequantised_weight() -> None:
    weight = quantize(torch.randn(20, 48), 4)
    x = torch.randn(3, 48).bfloat16()
    reference = ReferenceKernels()
    found = reference.linear(x, reference.pack(weight, torch.bfloat16), None)
    assert torch.equal(found, x @ weight.dequantized(torch.bfloat16).T)


@given(weights(), st.data())
def test_cuts_and_joints_keep_the_numbers(weight: QuantizedWeight, data: st.DataObject) -> None:
    outputs, inputs = weight.shape
    whole = weight.dequantized(torch.float32)
    start = 2 * data.draw(st.integers(0, (inputs - 1) // 2))
    stop = data.draw(st.integers(start + 1, inputs))
    part = weight.columns(start, stop)
    assert torch.equal(part.dequantized(torch.float32), whole[:, start:stop])
    row = data.draw(st.integers(0, outputs - 1))
    assert torch.equal(weight.rows(slice(row, None)).dequantized(torch.float32), whole[row:])
    halves = weight.rows(slice(0, row)), weight.rows(slice(row, None))
    assert torch.equal(stacked(halves).dequantized(torch.float32), whole)
    assert torch.equal(weight.widened().dequantized(torch.float32), whole)
    assert weight.shape == whole.shape


def test_weights_of_several_formats_are_joined_in_the_wider_one() -> None:
    torch.manual_seed(0)
    one = quantize(torch.randn(6, 64), 4)
    other = quantize(torch.randn(5, 64), 8, group=16)
    offsets = quantized_weight(
        torch.randint(0, 16, (3, 64)), torch.rand(3, 2).half().float(), torch.rand(3, 2), bits=4, group=32
    )
    parts = [one, offsets, other]
    joined = stacked(parts)
    assert (joined.bits, joined.group, joined.scales.dtype) == (8, 16, torch.float32)
    assert torch.equal(
        joined.dequantized(torch.float32), torch.cat([part.dequantized(torch.float32) for part in parts])
    )


def test_nibbles() -> None:
    levels = torch.tensor([[1, 2, 15, 0, 7]], dtype=torch.uint8)
    assert pack_nibbles(levels).tolist() == [[0x21, 0x0F, 0x07]]
    assert unpack_nibbles(pack_nibbles(levels))[:, :5].equal(levels)


@pytest.mark.parametrize(
    ("levels", "scales", "complaint"),
    [
        ([[16, 0]], [[1.0]], "a code is not in"),
        ([[1, 0]], [[1.0, 2.0]], "scales have shape"),
        ([[1, 0]], [[float("nan")]], "not finite"),
    ],
)
def test_levels_and_scales_that_do_not_fit_are_refused(
    levels: list[list[int]], scales: list[list[float]], complaint: str
) -> None:
    with pytest.raises(QuantizedWeightError, match=complaint):
        quantized_weight(torch.tensor(levels), torch.tensor(scales), bits=4, group=2, zero=8)


def errors(weight: Tensor, found: Tensor) -> Tensor:
    """Return the squared error of each group of 32."""
    return (found - weight).unflatten(1, (-1, 32)).square().sum(2)


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "one sided", "tiny", "zeros and outliers"])
def test_the_error_is_at_most_that_of_round_to_nearest(kind: str) -> None:
    torch.manual_seed(3)
    weight = {
        "normal": torch.randn(64, 256) * 0.02,
        "heavy tails": torch.randn(64, 256) ** 3,
        "one sided": torch.rand(64, 256),
        "tiny": torch.randn(64, 256) * 1e-7,
        "zeros and outliers": (torch.rand(64, 256) > 0.97) * torch.randn(64, 256),
    }[kind]
    for bits, reference in ((4, Type.Q4_0), (8, Type.Q8_0)):
        found = quantize(weight, bits)
        theirs = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), reference), reference)
        mine = errors(weight, found.dequantized(torch.float32))
        nearest = errors(weight, torch.from_numpy(theirs))
        # By group to a rounding of the scale to float16, which the library makes after it has chosen the codes.
        assert (mine <= nearest * 1.01 + 1e-20).all()
        assert mine.sum() <= nearest.sum()
