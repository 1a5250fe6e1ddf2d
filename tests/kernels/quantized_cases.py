"""Quantised weights for tests of kernels."""

import hypothesis.strategies as st
import torch

from lorikeet.kernels.quantized import QuantizedWeight, quantized_weight
from tests.kernels.linear_cases import sizes


@st.composite
def weights(draw: st.DrawFn) -> QuantizedWeight:
    """Of both widths, with zeros or offsets, scales of both dtypes, and groups that the inputs need not fill."""
    bits = draw(st.sampled_from([4, 8]))
    outputs = draw(sizes)
    inputs = draw(sizes)
    group = draw(st.sampled_from([2, 16, 32, 64, inputs + inputs % 2]))
    shape = outputs, -(-inputs // group)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    levels = torch.randint(0, 2**bits, (outputs, inputs), generator=generator)
    scales = torch.randn(shape, generator=generator) / 2**bits
    if draw(st.booleans()):
        scales = scales.half().float()
    if draw(st.booleans()):
        # So that sums are exact, as those of all formats are.
        scales = scales.bfloat16().float()
        offsets = torch.randn(shape, generator=generator).bfloat16().float()
        return quantized_weight(levels, scales, offsets, bits=bits, group=group)
    return quantized_weight(levels, scales, bits=bits, group=group, zero=2 ** (bits - 1))
