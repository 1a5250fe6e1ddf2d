"""Rotary position embeddings (https://arxiv.org/abs/2104.09864) with the scalings of ``rope.SCALINGS``.

All of it is fp32 in the order of operations that checkpoints were trained with: at position 8,000 one unit in
the last place of a frequency already turns a head by a thousandth.
"""

import math

import torch
from torch import Tensor

from lorikeet.models.rope import RopeScaling


class Rotary:
    """Cos and sin for given positions. Computed for each step, so no table limits the context."""

    def __init__(self, rope: RopeScaling, head_dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim).repeat(2).to(device)
        self._factor = rope.attention_factor

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin ``[T, head_dim]`` in ``dtype`` for int64 ``positions [T]``."""
        angles = positions[:, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._factor != 1:
            cos, sin = cos * self._factor, sin * self._factor
        return cos.to(dtype), sin.to(dtype)


def inverse_frequencies(rope: RopeScaling, head_dim: int) -> Tensor:
    """Return the angle per position, in radians, of each pair of dimensions: fp32 ``[head_dim / 2]``."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim)
    return plain


def _llama3(rope: RopeScaling, plain: Tensor) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor, blend by the rotations in between."""
    rotations = rope.original_tokens / (2 * math.pi / plain)
    kept = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * plain / rope.factor + kept * plain


def _yarn(rope: RopeScaling, plain: Tensor, head_dim: int) -> Tensor:
    """Keep the pairs below a band, divide those above by the factor, blend inside (https://arxiv.org/abs/2309.00071).

    The band lies between the pairs that rotate ``beta_fast`` and ``beta_slow`` times over the original context.
    """

    def pair_of(rotations: float) -> float:
        return head_dim * math.log(rope.original_tokens / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(head_dim // 2).float() - low) / width).clamp(0.0, 1.0)
    return plain / rope.factor * (1 - kept) + plain * kept
