"""Products with quantised weights.

Few rows take one launch. For many rows a kernel unpacks the weight first.

In both cases the weight is computed in fp32 and rounded to the dtype of ``x`` before the product, like in the
reference.
"""

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lorikeet.kernels.quantized import QuantizedWeight
from lorikeet.kernels.triton.launch import INTERPRETED, launch, tiles_of, wait_for_previous

MOST_ROWS = 64
"""For more rows the weight is unpacked once: tiles of rows would each unpack it."""
_ROWS = 16
_OUTPUTS = 32
_INPUTS = 128
_WARPS = 4
_STAGES = 3
_UNPACKED_OUTPUTS = 8
_UNPACKED_INPUTS = 512
_UNPACK_WARPS = 4


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Return ``x @ weightᵀ + bias``, ``[rows, out]``."""
    rows, inputs = x.shape
    outputs = len(weight.codes)
    codes = weight.codes
    scales = weight.scales
    offsets = weight.offsets
    shape = inputs, float(weight.zero), codes.stride(0), scales.stride(0)
    if rows > MOST_ROWS:
        plain = x.new_empty(outputs, inputs)
        grid = tiles_of(outputs, _UNPACKED_OUTPUTS), tiles_of(inputs, _UNPACKED_INPUTS)
        unpack[grid](
            codes, scales, scales if offsets is None else offsets, plain, outputs, *shape,
            weight.bits, weight.group, offsets is not None, _UNPACKED_OUTPUTS, _UNPACKED_INPUTS,
            **launch(_UNPACK_WARPS),
        )  # fmt: skip
        return F.linear(x, plain, bias)
    out = x.new_empty(rows, outputs)
    grid = tiles_of(outputs, _OUTPUTS), tiles_of(rows, _ROWS)
    multiply[grid](
        x, codes, scales, scales if offsets is None else offsets, x if bias is None else bias, out,
        rows, outputs, x.stride(0), *shape, weight.bits, weight.group, offsets is not None, bias is not None,
        _ROWS, _OUTPUTS, _INPUTS * 2 // x.element_size(), INTERPRETED, **launch(_WARPS, _STAGES),
    )  # fmt: skip
    return out


@triton.jit
def unpack(
    codes, scales, offsets, out, outputs, inputs, zero, code_stride, scale_stride,
    BITS: tl.constexpr, GROUP: tl.constexpr, OFFSETS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write a tile of the weight, ``[out, in]``."""
    output = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)[:, None]
    k = tl.program_id(1) * INPUTS + tl.arange(0, INPUTS)[None, :]
    inside = (output < outputs) & (k < inputs)
    value = _values(codes, scales, offsets, output, k, inside, zero, code_stride, scale_stride, BITS, GROUP, OFFSETS)
    wait_for_previous(PDL)
    tl.store(out + output * inputs + k, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def multiply(
    x, codes, scales, offsets, bias, out, rows, outputs, x_stride, inputs, zero, code_stride, scale_stride,
    BITS: tl.constexpr, GROUP: tl.constexpr, OFFSETS: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write a tile of the product, ``[rows, out]``."""
    output = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    kind = out.dtype.element_ty
    wait_for_previous(PDL)
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, inputs, INPUTS):
        k = start + tl.arange(0, INPUTS)
        inside = (output < outputs)[None, :] & (k < inputs)[:, None]
        weight = _values(
            codes, scales, offsets, output[None, :], k[:, None], inside, zero, code_stride, scale_stride,
            BITS, GROUP, OFFSETS,
        ).to(kind)  # fmt: skip
        place = x + row[:, None] * x_stride + k[None, :]
        value = tl.load(place, mask=(row < rows)[:, None] & (k < inputs)[None, :], other=0.0)
        if INTERPRETED:
            value = value.to(tl.float32)
            weight = weight.to(tl.float32)
        sums = tl.dot(value, weight, sums, input_precision="ieee")
    if BIAS:
        sums += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    kept = (row < rows)[:, None] & (output < outputs)[None, :]
    tl.store(out + row[:, None] * outputs + output[None, :], sums.to(kind), mask=kept)


@triton.jit
def _values(
    codes, scales, offsets, output, k, inside, zero, code_stride, scale_stride,
    BITS: tl.constexpr, GROUP: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """Return the weights of some outputs and inputs in fp32, with 0 where ``inside`` is false."""
    if BITS == 4:
        pair = tl.load(codes + output * code_stride + k // 2, mask=inside, other=0).to(tl.int32)
        code = (pair >> (k % 2 * 4)) & 15
    else:
        code = tl.load(codes + output * code_stride + k, mask=inside, other=0).to(tl.int32)
    at = output * scale_stride + k // GROUP
    scale = tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
    if OFFSETS:
        return code.to(tl.float32) * scale + tl.load(offsets + at, mask=inside, other=0.0).to(tl.float32)
    return (code.to(tl.float32) - zero) * scale
