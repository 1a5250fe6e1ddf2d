"""Computes cos and sin of rotary embeddings for the positions of a step."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lorikeet.models.rope import RopeScaling


class Rotary:
    """Cos and sin of the rotary position embedding (https://arxiv.org/abs/2104.09864), for given positions.

    Both are computed for each step, so no table limits the context. The computation is in fp32, with the order of
    operations used in training. At position 8,000, an error of one unit in the last place of a frequency already
    rotates a head by a thousandth.

    Args:
        ropes: base and scaling of each embedding; None for an embedding that rotates nothing.
        rotary_dim: number of elements of a head that are rotated. The remaining pairs have an angle of 0.
        head_dim: size of a head.
        device: device on which cos and sin are computed.
        axes: axis of each rotated pair, for positions of several axes.
    """

    def __init__(
        self,
        ropes: Sequence[RopeScaling | None],
        rotary_dim: int,
        head_dim: int,
        device: torch.device,
        axes: Sequence[int] = (),
    ) -> None:
        frequencies = torch.zeros(len(ropes), head_dim // 2)
        factors = torch.ones(len(ropes), head_dim // 2)
        for number, rope in enumerate(ropes):
            if rope is not None:
                frequencies[number, : rotary_dim // 2] = inverse_frequencies(rope, rotary_dim)
                factors[number, : rotary_dim // 2] = rope.attention_factor
        self._frequencies = frequencies.repeat(1, 2)[:, None].to(device)
        self._factors = factors.repeat(1, 2)[:, None].to(device) if bool((factors != 1).any()) else None

        of_pairs = torch.tensor([*axes, *(0 for _ in range(head_dim // 2 - len(axes)))])
        self._axes = of_pairs.repeat(2).to(device)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin ``[ropes, T, head_dim]`` in ``dtype`` for int64 ``positions [T]`` or ``[axes, T]``."""
        by_element = positions[:, None] if positions.dim() == 1 else positions[self._axes].T.contiguous()
        angles = by_element * self._frequencies
        cos = angles.cos()
        sin = angles.sin()
        if self._factors is not None:
            cos = cos * self._factors
            sin = sin * self._factors
        return cos.to(dtype), sin.to(dtype)


def inverse_frequencies(rope: RopeScaling, head_dim: int) -> Tensor:
    """Return the angle per position, in radians, of each pair of dimensions: fp32 ``[head_dim / 2]``."""
    positions_per_radian = rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    plain = 1.0 / positions_per_radian
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.divisors) * positions_per_radian)
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim)
    return plain


def _llama3(rope: RopeScaling, plain: Tensor) -> Tensor:
    """Keep high frequencies, divide low ones by the factor, and blend in between. The old context sets the limits."""
    rotations = rope.original_tokens / (2 * math.pi / plain)
    kept = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * plain / rope.factor + kept * plain


def _yarn(rope: RopeScaling, plain: Tensor, head_dim: int) -> Tensor:
    """Keep the frequencies below a band, divide those above by the factor, and blend inside (arXiv 2309.00071).

    The band is between the pairs that rotate ``beta_fast`` and ``beta_slow`` times over the original context.
    """

    def pair_of(rotations: float) -> float:
        return head_dim * math.log(rope.original_tokens / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = pair_of(rope.beta_fast)
    high = pair_of(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(head_dim // 2).float() - low) / width).clamp(0.0, 1.0)
    return plain / rope.factor * (1 - kept) + plain * kept
