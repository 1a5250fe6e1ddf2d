"""Reads the tensors of a GGUF file: keeps them packed where this is exact, and dequantises the others.

Layouts of the blocks: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lorikeet.core.text import install_command
from lorikeet.kernels.quantized import QuantizedWeight, quantized_weight
from lorikeet.models.gguf import GgufFile, GgufTensor, interleaved_heads, norms_are_one_more
from lorikeet.models.json_section import ModelConfigError


def decode_gguf(file: GgufFile, name: str) -> QuantizedWeight | Tensor:
    """Return a tensor in transformers' layout, quantised or in fp32.

    Args:
        file: the GGUF file.
        name: name of the tensor in the file.
    """
    tensor = file.tensors[name]
    raw = np.memmap(file.path, np.uint8, "r", tensor.start, (tensor.size_bytes,))
    decoded = _decoded(file, tensor, torch.from_numpy(np.array(raw)))
    kind = name.split(".")[-2]
    if heads := interleaved_heads(file).get(kind):
        rows = torch.arange(tensor.shape[0]).view(heads, -1, 2).transpose(1, 2).flatten()
        return decoded.rows(rows) if isinstance(decoded, QuantizedWeight) else decoded[rows]
    if isinstance(decoded, Tensor) and kind.endswith("norm") and norms_are_one_more(file):
        return decoded - 1
    return decoded


def _decoded(file: GgufFile, tensor: GgufTensor, raw: Tensor) -> QuantizedWeight | Tensor:
    kind = tensor.type
    if kind.name in _VALUES:
        return raw.view(_VALUES[kind.name]).view(tensor.shape).float()
    if len(tensor.shape) == 2 and kind.name in _BLOCKS:
        blocks = raw.view(tensor.shape[0], -1, kind.size_bytes)
        return _BLOCKS[kind.name](blocks)
    try:
        import gguf  # gguf is an extra, needed for types that are rarely used.
    except ImportError as error:
        raise ModelConfigError(
            f"{file.path}: tensors of type {kind.name} need gguf: {install_command('gguf')}"
        ) from error
    rows = raw.view(-1, tensor.shape[-1] // kind.values * kind.size_bytes).numpy()
    values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind.name])
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(tensor.shape)


_VALUES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _halves(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """Return float16 numbers at a byte of each block, as fp32 ``[out, blocks, count]``."""
    return blocks[:, :, start : start + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(values: Tensor) -> Tensor:
    """Return the low nibbles of the last dimension, followed by the high nibbles."""
    return torch.cat((values & 15, values >> 4), dim=-1)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Return bits 0 to 31 of four bytes of each block: 16 for a bit that is set, else 0."""
    bits = blocks[:, :, start : start + 4, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(2) << 4


def _q4_0(blocks: Tensor) -> QuantizedWeight:
    levels = _nibbles(blocks[:, :, 2:]).flatten(1)
    return quantized_weight(levels, _halves(blocks, 0).flatten(1), bits=4, group=32, zero=8)


def _q4_1(blocks: Tensor) -> QuantizedWeight:
    scales, least = _halves(blocks, 0, 2).unbind(2)
    return quantized_weight(_nibbles(blocks[:, :, 4:]).flatten(1), scales, least, bits=4, group=32)


def _q5_0(blocks: Tensor) -> QuantizedWeight:
    levels = _nibbles(blocks[:, :, 6:]) | _fifth_bits(blocks, 2)
    return quantized_weight(levels.flatten(1), _halves(blocks, 0).flatten(1), bits=8, group=32, zero=16)


def _q5_1(blocks: Tensor) -> QuantizedWeight:
    scales, least = _halves(blocks, 0, 2).unbind(2)
    levels = _nibbles(blocks[:, :, 8:]) | _fifth_bits(blocks, 4)
    return quantized_weight(levels.flatten(1), scales, least, bits=8, group=32)


def _q8_0(blocks: Tensor) -> QuantizedWeight:
    levels = (blocks[:, :, 2:] ^ 128).flatten(1)  # The bytes are int8 plus 128.
    return quantized_weight(levels, _halves(blocks, 0).flatten(1), bits=8, group=32, zero=128)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and minimum of each group of 32 in blocks of 256: fp32 ``[out, groups]``.

    Both are 6-bit numbers times a factor of the block. The first four of each fill the low bits of a byte. The last
    four have four bits in further bytes, and two in the highest bits of the first bytes.
    """
    factors = _halves(blocks, 0, 2)
    first = blocks[:, :, 4:8]
    second = blocks[:, :, 8:12]
    third = blocks[:, :, 12:16]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=2)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=2)
    return (scales * factors[:, :, :1]).flatten(1), (minima * factors[:, :, 1:]).flatten(1)


def _q4_k(blocks: Tensor) -> QuantizedWeight:
    scales, minima = _scales_and_minima(blocks)
    levels = _nibbles(blocks[:, :, 16:].unflatten(2, (4, 32)))
    return quantized_weight(levels.flatten(1), scales, -minima, bits=4, group=32)


def _q5_k(blocks: Tensor) -> QuantizedWeight:
    scales, minima = _scales_and_minima(blocks)
    low = _nibbles(blocks[:, :, 48:].unflatten(2, (4, 32))).flatten(2).unflatten(2, (8, 32))
    high = blocks[:, :, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return quantized_weight((low | (high << 4)).flatten(1), scales, -minima, bits=8, group=32)


def _q6_k(blocks: Tensor) -> QuantizedWeight:
    low = _nibbles(blocks[:, :, :128].unflatten(2, (2, 64)))  # The order is 0..63, then 64..127 of each half.
    high = blocks[:, :, 128:192].unflatten(2, (2, 1, 32)) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    scales = blocks[:, :, 192:208].contiguous().view(torch.int8).float() * _halves(blocks, 208)
    levels = low | (high.flatten(3) << 4)
    return quantized_weight(levels.flatten(1), scales.flatten(1), bits=8, group=16, zero=32)


_BLOCKS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""Types with the numbers of a ``QuantizedWeight``."""
