"""Reads the linear weights of quantised checkpoints from the tensors that store them.

A weight is kept packed if a ``QuantizedWeight`` can hold its numbers. Otherwise this module dequantises the weight to
fp32, and the loader rounds it to the model's dtype. The supported layouts are those of AutoAWQ, AutoGPTQ, GPTQModel,
compressed-tensors and bitsandbytes.
"""

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorikeet.kernels.quantized import QuantizedWeight, QuantizedWeightError, quantized_weight, unpack_nibbles
from lorikeet.models import quantization_config as methods
from lorikeet.models.quantization_config import QuantizationConfig

Stored = Mapping[str, Tensor]
"""The tensors of one module, by the end of their names."""

Decoded = QuantizedWeight | Tensor


class StoredWeight(NamedTuple):
    """A way to store a linear weight.

    Attributes:
        label: name of the format in the log.
        needed: suffixes of the tensors' names, after the module's name. The first suffix distinguishes the format from
            others.
        optional: suffixes of further tensors, which may be missing.
        decode: function that returns the weight ``[out, in]``.
        unused: suffixes of tensors that are not read, since activations are not quantised here.
    """

    label: str
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    decode: Callable[[Stored, tuple[int, int]], Decoded]
    unused: tuple[str, ...] = ()

    def tensors(self, module: str, present: Collection[str]) -> dict[str, str] | None:
        """Return the names of the tensors that store ``module``, by suffix.

        None if the module is stored in another way.

        Needed tensors are included even if they are missing.
        """
        if module + self.needed[0] not in present:
            return None
        more = (end for end in self.optional if module + end in present)
        return {end: module + end for end in (*self.needed, *more)}


def stored_weights(config: QuantizationConfig) -> tuple[StoredWeight, ...]:
    """Return the ways in which a checkpoint with this quantisation may store linear weights."""
    return _WAYS[config.method](config)


# --- AWQ ----------------------------------------------------------------------------------------------------------

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that holds each of eight outputs."""


def _awq(config: QuantizationConfig) -> tuple[StoredWeight, ...]:
    def decode(stored: Stored, shape: tuple[int, int]) -> Decoded:
        levels = _words(stored[".qweight"], 4).unflatten(1, (-1, 8))[:, :, _AWQ_ORDER].flatten(1).T
        zeros = _words(stored[".qzeros"], 4).unflatten(1, (-1, 8))[:, :, _AWQ_ORDER].flatten(1).T
        return _with_zeros(levels, zeros, stored[".scales"].T, 4, config.group)

    return (StoredWeight("awq", (".qweight", ".qzeros", ".scales"), (), decode),)


# --- GPTQ ---------------------------------------------------------------------------------------------------------


def _gptq(config: QuantizationConfig) -> tuple[StoredWeight, ...]:
    bits = config.bits

    def decode(stored: Stored, shape: tuple[int, int]) -> Decoded:
        levels = _words(stored[".qweight"].T, bits)[:, : shape[1]]
        zeros = _words(stored[".qzeros"], bits)[:, : shape[0]].T
        if config.zeros_are_one_less:
            zeros = (zeros + 1) & (2**bits - 1)
        scales = stored[".scales"].T
        group = shape[1] if config.group == -1 else config.group
        order = stored.get(".g_idx")
        if order is None or torch.equal(order.long(), torch.arange(shape[1]) // group):
            return _with_zeros(levels, zeros, scales, max(bits, 4), config.group)
        groups = order.long()
        return (levels - zeros[:, groups]).float() * scales.float()[:, groups]

    return (StoredWeight("gptq", (".qweight", ".qzeros", ".scales"), (".g_idx",), decode),)


def _with_zeros(levels: Tensor, zeros: Tensor, scales: Tensor, bits: int, group: int) -> QuantizedWeight:
    """Return ``(level - zero) * scale`` with zeros and scales ``[out, groups]``."""
    group = levels.shape[1] + levels.shape[1] % 2 if group == -1 else group
    scales = scales.float()
    first = int(zeros[0, 0])
    if first.bit_count() == 1 and bool((zeros == first).all()):
        return quantized_weight(levels, scales, bits=bits, group=group, zero=first)
    return quantized_weight(levels, scales, -(zeros * scales), bits=bits, group=group)


def _words(words: Tensor, bits: int) -> Tensor:
    """Return the codes in 32-bit words ``[n, words]``, from the lowest bits on: int32 ``[n, words * 32 / bits]``."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.to(torch.int32)[:, :, None] >> shifts) & (2**bits - 1)).flatten(1)


# --- compressed-tensors and fp8 -------------------------------------------------------------------------------------

_UNUSED_SCALES = (".input_scale", ".output_scale", ".input_zero_point", ".input_global_scale")


def _compressed(config: QuantizationConfig) -> tuple[StoredWeight, ...]:
    bits = config.bits or 4

    def packed(stored: Stored, shape: tuple[int, int]) -> Decoded:
        levels = _words(stored[".weight_packed"], bits)[:, : shape[1]]
        scales = stored[".weight_scale"]
        zeros = stored.get(".weight_zero_point")
        if zeros is not None:
            middle = 2 ** (bits - 1)
            packs = zeros.dtype == torch.int32
            zeros = _words(zeros.T, bits)[:, : shape[0]].T if packs else zeros.to(torch.int16) + middle
        return _grouped(levels, zeros, scales, bits, shape, stored.get(".weight_g_idx"))

    def whole(stored: Stored, shape: tuple[int, int]) -> Decoded:
        weight = stored[".weight"]
        scales = stored[".weight_scale"]
        if weight.dtype != torch.int8:
            return _scaled(weight, scales, shape, config.block)
        zeros = stored.get(".weight_zero_point")
        levels = weight.to(torch.int16) + 128
        return _grouped(levels, None if zeros is None else zeros.to(torch.int16) + 128, scales, 8, shape, None)

    return (
        StoredWeight(
            f"compressed-tensors int{bits}",
            (".weight_packed", ".weight_scale"),
            (".weight_zero_point", ".weight_shape", ".weight_g_idx"),
            packed,
            _UNUSED_SCALES,
        ),
        StoredWeight(
            "compressed-tensors", (".weight_scale", ".weight"), (".weight_zero_point",), whole, _UNUSED_SCALES
        ),
    )


def _grouped(
    levels: Tensor, zeros: Tensor | None, scales: Tensor, bits: int, shape: tuple[int, int], order: Tensor | None
) -> Decoded:
    """Return the weight of codes with one scale per tensor, output or group.

    Without zero points, the middle code is 0.
    """
    outputs, inputs = shape
    scales = scales.float().reshape(1 if scales.numel() == 1 else outputs, -1).expand(outputs, -1)
    middle = 2 ** (bits - 1)
    zeros = torch.full(scales.shape, middle) if zeros is None else zeros.to(torch.int32).reshape(-1, scales.shape[1])
    zeros = zeros.expand(scales.shape)
    if inputs % scales.shape[1]:
        raise QuantizedWeightError(f"{scales.shape[1]} groups do not divide {inputs} inputs")
    group = inputs // scales.shape[1]
    groups = torch.arange(inputs) // group if order is None else order.long()
    in_order = bool((groups == torch.arange(inputs) // group).all())
    # Offsets are exact only if zero times scale is exact, which it is not for scales of 24 bits.
    exact = bool((zeros == middle).all()) or torch.equal(scales.bfloat16().float(), scales)
    exact = exact or torch.equal(scales.half().float(), scales)
    if in_order and exact and (group % 2 == 0 or scales.shape[1] == 1):
        return _with_zeros(levels, zeros, scales, bits, -1 if scales.shape[1] == 1 else group)
    return (levels - zeros[:, groups]).float() * scales[:, groups]


def _fp8(config: QuantizationConfig) -> tuple[StoredWeight, ...]:
    def decode(stored: Stored, shape: tuple[int, int]) -> Decoded:
        scale = stored.get(".weight_scale_inv", stored.get(".weight_scale"))
        assert scale is not None
        return _scaled(stored[".weight"], scale, shape, config.block)

    unused = (*_UNUSED_SCALES, ".activation_scale")
    return (
        StoredWeight("fp8", (".weight_scale_inv", ".weight"), (), decode, unused),
        StoredWeight("fp8", (".weight_scale", ".weight"), (), decode, unused),
    )


def _scaled(weight: Tensor, scales: Tensor, shape: tuple[int, int], block: tuple[int, int] | None) -> Tensor:
    """Return ``weight * scale`` in fp32, with one scale per tensor, output, or block of outputs and inputs."""
    outputs, inputs = shape
    scales = scales.float()
    if scales.numel() == 1:
        return weight.float() * scales.reshape(1, 1)
    scales = scales.reshape(len(scales), -1)
    high, wide = block or (-(-outputs // len(scales)), -(-inputs // scales.shape[1]))
    spread = scales.repeat_interleave(high, dim=0)[:outputs].repeat_interleave(wide, dim=1)[:, :inputs]
    if spread.shape != weight.shape:
        raise QuantizedWeightError(f"scales have shape {list(scales.shape)}, which does not fit {list(weight.shape)}")
    return weight.float() * spread


# --- bitsandbytes ---------------------------------------------------------------------------------------------------


def _bitsandbytes(config: QuantizationConfig) -> tuple[StoredWeight, ...]:
    def in_4_bits(kind: str) -> StoredWeight:
        state = f".weight.quant_state.bitsandbytes__{kind}"
        needed = (state, ".weight", ".weight.absmax", ".weight.quant_map")
        nested = (".weight.nested_absmax", ".weight.nested_quant_map")
        return StoredWeight(f"bitsandbytes {kind}", needed, nested, lambda stored, shape: _levels_of(stored, state))

    def in_8_bits(stored: Stored, shape: tuple[int, int]) -> Decoded:
        scales = stored[".SCB"].float()[:, None] / 127
        levels = stored[".weight"].to(torch.int16) + 128
        group = shape[1] + shape[1] % 2
        return quantized_weight(levels, scales, bits=8, group=group, zero=128)

    whole = StoredWeight("bitsandbytes int8", (".SCB", ".weight"), (".weight_format",), in_8_bits)
    return (in_4_bits("nf4"), in_4_bits("fp4"), whole)


def _levels_of(stored: Stored, state: str) -> Tensor:
    """Return the weight that codes of a table of 16 levels give, with one scale for each block in memory order."""
    settings = _json_of(stored[state])
    absmax = stored[".weight.absmax"]
    if (nested := stored.get(".weight.nested_absmax")) is not None:
        table = stored[".weight.nested_quant_map"].float()
        size = int(settings["nested_blocksize"])
        absmax = table[absmax.long()] * nested.float().repeat_interleave(size)[: len(absmax)]
        absmax = absmax + float(settings["nested_offset"])
    codes = stored[".weight"].reshape(1, -1)
    levels = unpack_nibbles((codes << 4) | (codes >> 4))[0]  # The high nibble comes first.
    shape = tuple(int(size) for size in settings["shape"])
    levels = levels[: shape[0] * shape[1]]
    values = stored[".weight.quant_map"].float()[levels.long()]
    scales = absmax.float().repeat_interleave(int(settings["blocksize"]))[: len(values)]
    return (values * scales).reshape(shape)


def _json_of(tensor: Tensor) -> dict[str, Any]:
    try:
        settings = json.loads(bytes(tensor.to(torch.uint8).tolist()))
    except ValueError as error:
        raise QuantizedWeightError(f"the state of the quantisation is not JSON: {error}") from error
    missing = {"shape", "blocksize"} - settings.keys() if isinstance(settings, dict) else {"shape"}
    if missing:
        raise QuantizedWeightError(f"the state of the quantisation has no {' and no '.join(sorted(missing))}")
    return dict(settings)


_WAYS: dict[str, Callable[[QuantizationConfig], tuple[StoredWeight, ...]]] = {
    methods.AWQ: _awq,
    methods.GPTQ: _gptq,
    methods.COMPRESSED: _compressed,
    methods.FP8: _fp8,
    methods.BITSANDBYTES: _bitsandbytes,
}
