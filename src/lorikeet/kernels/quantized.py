"""Linear weights in 4 or 8 bits as plain tensors, the form in which weights are loaded, cut and joined.

Backends with another layout pack them further (``Kernels.pack``).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class QuantizedWeightError(ValueError):
    """Raised when codes, scales and sizes do not fit together. The message names them."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A linear weight ``[out, in]``: ``(code - zero) * scale``, or ``code * scale + offset``.

    Attributes:
        bits: 4 or 8.
        inputs: number of input features.
        group: number of consecutive inputs that share a scale, which is even. The last group may have fewer inputs.
        zero: the code that stands for 0: a power of two, or 0 if there are offsets.
        codes: uint8 ``[out, ceil(in / 2)]`` for 4 bits, the even input in the low nibble; ``[out, in]`` for 8 bits.
        scales: float16 or float32 ``[out, ceil(in / group)]``.
        offsets: the same shape and dtype, or None.
    """

    bits: int
    inputs: int
    group: int
    zero: int
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """``[out, in]``."""
        return torch.Size((len(self.codes), self.inputs))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the weight."""
        return sum(tensor.nbytes for tensor in (self.codes, self.scales, self.offsets) if tensor is not None)

    @property
    def device(self) -> torch.device:
        """Device of the weight's tensors."""
        return self.codes.device

    def to(self, device: torch.device) -> "QuantizedWeight":
        """Return the weight on a device."""
        offsets = None if self.offsets is None else self.offsets.to(device)
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device), offsets=offsets)

    def levels(self) -> Tensor:
        """Return the codes, uint8 ``[out, in]``."""
        return self.codes if self.bits == 8 else unpack_nibbles(self.codes)[:, : self.inputs]

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight ``[out, in]``, computed in fp32 and rounded once."""
        levels = self.levels().float()
        scales = self._spread(self.scales)
        if self.offsets is None:
            return levels.sub_(self.zero).mul_(scales).to(dtype)
        return levels.mul_(scales).add_(self._spread(self.offsets)).to(dtype)

    def rows(self, outputs: "slice | Tensor") -> "QuantizedWeight":
        """Return a weight of some outputs, in the given order."""
        offsets = None if self.offsets is None else self.offsets[outputs].contiguous()
        return replace(
            self, codes=self.codes[outputs].contiguous(), scales=self.scales[outputs].contiguous(), offsets=offsets
        )

    def columns(self, start: int, stop: int) -> "QuantizedWeight":
        """Return a weight of some inputs.

        Groups that a cut divides become smaller groups with the same numbers.

        Raises:
            QuantizedWeightError: the cut would separate the two inputs of a pair.
        """
        if (start, stop) == (0, self.inputs):
            return self
        if start % 2:
            raise QuantizedWeightError(f"cannot be cut at input {start}: pairs of inputs stay together")
        whole = self
        if start % self.group:
            whole = self.regrouped(math.gcd(self.group, start))
        groups = slice(start // whole.group, -(-stop // whole.group))
        bytes_of = slice(start * self.bits // 8, -(-stop * self.bits // 8))
        offsets = None if whole.offsets is None else whole.offsets[:, groups].contiguous()
        return replace(
            whole,
            inputs=stop - start,
            codes=whole.codes[:, bytes_of].contiguous(),
            scales=whole.scales[:, groups].contiguous(),
            offsets=offsets,
        )

    def regrouped(self, group: int) -> "QuantizedWeight":
        """Return the same weight in smaller groups. ``group`` must divide the present group."""
        if group == self.group:
            return self
        if self.group % group or group % 2:
            raise QuantizedWeightError(f"groups of {self.group} inputs cannot become groups of {group}")
        count = -(-self.inputs // group)
        times = self.group // group

        def repeated(values: Tensor) -> Tensor:
            return values.repeat_interleave(times, dim=1)[:, :count].contiguous()

        offsets = None if self.offsets is None else repeated(self.offsets)
        return replace(self, group=group, scales=repeated(self.scales), offsets=offsets)

    def widened(self) -> "QuantizedWeight":
        """Return the same weight with codes of 8 bits."""
        return self if self.bits == 8 else replace(self, bits=8, codes=self.levels().contiguous())

    def with_offsets(self) -> "QuantizedWeight":
        """Return the same weight with offsets instead of a zero, in float32 unless float16 is exact."""
        if self.offsets is not None:
            return self
        scales = self.scales.float()
        scales, offsets = narrowed(scales, -self.zero * scales)
        return replace(self, zero=0, scales=scales, offsets=offsets)

    def _spread(self, values: Tensor) -> Tensor:
        """Return fp32 ``[out, in]``, with each group's value at all inputs of the group."""
        return values.float().repeat_interleave(self.group, dim=1)[:, : self.inputs]


def quantized_weight(
    levels: Tensor, scales: Tensor, offsets: Tensor | None = None, *, bits: int, group: int, zero: int = 0
) -> QuantizedWeight:
    """Create a weight from codes ``[out, in]`` of any integer dtype, and fp32 scales and offsets ``[out, groups]``.

    Raises:
        QuantizedWeightError: shapes do not fit, a code needs more bits, or a scale or offset is not finite.
    """
    outputs, inputs = levels.shape
    shape = (outputs, -(-inputs // group))
    for values in (scales, offsets):
        if values is not None and tuple(values.shape) != shape:
            raise QuantizedWeightError(f"scales have shape {list(values.shape)}, not {list(shape)}")
        if values is not None and not bool(values.isfinite().all()):
            raise QuantizedWeightError("a scale is not finite")
    if levels.numel() and not 0 <= int(levels.min()) <= int(levels.max()) < 2**bits:
        raise QuantizedWeightError(f"a code is not in [0, {2**bits})")
    codes = levels.to(torch.uint8)
    if bits == 4:
        codes = pack_nibbles(codes)
    scales, offsets = narrowed(scales, offsets)
    return QuantizedWeight(bits, inputs, group, zero, codes.contiguous(), scales, offsets)


def stacked(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Join weights that read the same inputs into one weight, in the widest of their formats. Outputs stay in order."""
    if len(parts) == 1:
        return parts[0]
    if len({part.bits for part in parts}) > 1:
        parts = [part.widened() for part in parts]
    if len({(part.zero, part.offsets is None) for part in parts}) > 1:
        parts = [part.with_offsets() for part in parts]
    group = math.gcd(*(part.group for part in parts))
    parts = [part.regrouped(group) for part in parts]
    dtype = torch.float16 if all(part.scales.dtype == torch.float16 for part in parts) else torch.float32
    offsets = [part.offsets.to(dtype) for part in parts if part.offsets is not None]
    return replace(
        parts[0],
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales.to(dtype) for part in parts]),
        offsets=torch.cat(offsets) if offsets else None,
    )


def narrowed(scales: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return fp32 scales and offsets in float16 if the conversion is exact for all, else unchanged."""
    given = [values.float() for values in (scales, offsets) if values is not None]
    halves = [values.half() for values in given]
    exact = all(torch.equal(half.float(), wide) for half, wide in zip(halves, given, strict=True))
    kept = halves if exact else given
    return kept[0].contiguous(), kept[1].contiguous() if offsets is not None else None


def pack_nibbles(levels: Tensor) -> Tensor:
    """Pack codes below 16, ``[out, in]``, into uint8 ``[out, ceil(in / 2)]``, with the even input in the low nibble."""
    if levels.shape[1] % 2:
        levels = torch.nn.functional.pad(levels, (0, 1))
    return levels[:, ::2] | (levels[:, 1::2] << 4)


def unpack_nibbles(codes: Tensor) -> Tensor:
    """Unpack ``codes [out, bytes]`` into ``[out, 2 * bytes]``, the reverse of :func:`pack_nibbles`."""
    return torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)


GROUP = 32
"""Inputs of a group of weights that are quantised on load."""

_CHUNK_ELEMENTS = 2**17
"""Elements that are quantised at a time, few enough for the caches."""


def quantize(weight: Tensor, bits: int, group: int = GROUP) -> QuantizedWeight:
    """Quantise a weight ``[out, in]`` symmetrically.

    No group has a larger squared error than with round-to-nearest.

    Scales are float16. For 8 bits the largest magnitude of a group becomes 127. For 4 bits three scales are tried for
    each group: the largest magnitude becomes -8 (like in GGUF's Q4_0) or 7, or the scale fits the
    codes of the better of both by least squares.
    """
    rows = weight.split(max(1, _CHUNK_ELEMENTS // weight.shape[1]))
    return stacked([_quantize_rows(some, bits, group) for some in rows])


def _quantize_rows(weight: Tensor, bits: int, group: int) -> QuantizedWeight:
    outputs, inputs = weight.shape
    groups = -(-inputs // group)
    wide = torch.nn.functional.pad(weight.float(), (0, groups * group - inputs)).view(outputs, groups, group)
    least = -(2 ** (bits - 1))
    most = 2 ** (bits - 1) - 1
    largest = wide.gather(2, wide.abs().argmax(dim=2, keepdim=True))
    chosen = _rounded(wide, largest.abs() / most, least, most)
    if bits == 4:
        chosen = _better(chosen, _rounded(wide, largest / least, least, most))
        chosen = _better(chosen, _rounded(wide, _fitted(wide, chosen.codes), least, most))
    levels = (chosen.codes - least).flatten(1)[:, :inputs]
    return quantized_weight(levels.to(torch.uint8), chosen.scale[:, :, 0], bits=bits, group=group, zero=-least)


class _Rounded(NamedTuple):
    """Rounded groups: codes ``[out, groups, group]``, scale and squared error ``[out, groups, 1]``."""

    codes: Tensor
    scale: Tensor
    error: Tensor


def _rounded(wide: Tensor, scale: Tensor, least: int, most: int) -> _Rounded:
    """Round groups to multiples of a scale, which is rounded to float16 first."""
    scale = _half(scale)
    codes = (wide * torch.where(scale == 0, 0.0, 1.0 / scale)).round_().clamp_(least, most)
    return _Rounded(codes, scale, (codes * scale).sub_(wide).square_().sum(dim=2, keepdim=True))


def _better(one: _Rounded, other: _Rounded) -> _Rounded:
    """Return, for each group, the rounding with the smaller error."""
    is_better = other.error < one.error
    return _Rounded(*(torch.where(is_better, b, a) for a, b in zip(one, other, strict=True)))


def _half(scale: Tensor) -> Tensor:
    """Return a scale rounded as it is stored."""
    return scale.clamp(-65504.0, 65504.0).half().float()


def _fitted(wide: Tensor, codes: Tensor) -> Tensor:
    """Return the scale that brings codes closest to a group: Σ w·c / Σ c²."""
    return (wide * codes).sum(dim=2, keepdim=True) / codes.square().sum(dim=2, keepdim=True).clamp_(min=1e-12)
