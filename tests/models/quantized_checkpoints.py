"""Writers of quantised checkpoints, each by the definition of its format, and the numbers that it means.

They start from a checkpoint of ``make_checkpoint`` and change the linear weights of its layers.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Writer = Callable[[Tensor, torch.Generator], tuple[Tensors, Tensor]]
"""Weight ``[out, in]``, random numbers → tensors by the end of their names, and the weight that they mean in fp32."""


_LINEAR = ("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight", "_linear.weight")
"""Ends of the names of weights that are quantised; published checkpoints keep the gates of the delta rule plain."""


def write_quantized(
    folder: Path, writer: Writer, quantization: dict[str, Any], key: str = "quantization_config"
) -> Tensors:
    """Quantise the checkpoint in ``folder`` in place; return what all its weights are then, by name."""
    tensors = load_file(folder / "model.safetensors")
    stored = {}
    meant = {}
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if name.endswith(_LINEAR):
            made, meant[name] = writer(tensor, generator)
            stored |= {name.removesuffix(".weight") + end: value.contiguous() for end, value in made.items()}
        else:
            stored[name] = meant[name] = tensor
    save_file(stored, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {key: quantization}))
    return meant


def _words(levels: Tensor, bits: int) -> Tensor:
    """Pack codes ``[n, m]`` along the last dimension into int32, the lowest bits first."""
    count = 32 // bits
    parts = torch.nn.functional.pad(levels.long(), (0, -levels.shape[1] % count)).unflatten(1, (-1, count))
    words = (parts << torch.arange(0, 32, bits)).sum(dim=2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _asymmetric(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes ``[out, in]``, zeros and float16 scales ``[out, groups]`` by round-to-nearest."""
    parts = weight.unflatten(1, (-1, group))
    least = parts.amin(2).clamp(max=0)
    most = parts.amax(2).clamp(min=0)
    scales = ((most - least) / (2**bits - 1)).half()
    zeros = (-least / scales.float()).round().clamp(0, 2**bits - 1).long()
    levels = ((parts / scales.float()[:, :, None]).round() + zeros[:, :, None]).clamp(0, 2**bits - 1).long()
    return levels.flatten(1), zeros, scales


def _meant(levels: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    return (levels - zeros[:, groups]).float() * scales.float()[:, groups]


def awq(group: int) -> Writer:
    """AutoAWQ's "GEMM" form: eight outputs to a word, in the order 0 2 4 6 1 3 5 7."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(values: Tensor) -> Tensor:
        return _words(values.unflatten(1, (-1, 8))[:, :, order].flatten(1), 4)

    def write(weight: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        levels, zeros, scales = _asymmetric(weight, 4, group)
        stored = {".qweight": packed(levels.T), ".qzeros": packed(zeros.T), ".scales": scales.T}
        return stored, _meant(levels, zeros, scales, torch.arange(weight.shape[1]) // group)

    return write


def gptq(bits: int, group: int, *, reordered: bool = False, version: int = 1, symmetric: bool = False) -> Writer:
    """AutoGPTQ's form: inputs packed along the columns of words; zeros minus one in version 1."""

    def write(weight: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        inputs = weight.shape[1]
        size = inputs if group == -1 else group
        levels, zeros, scales = _asymmetric(weight, bits, size)
        if symmetric:
            zeros = torch.full_like(zeros, 2 ** (bits - 1))
        groups = torch.arange(inputs) // size
        if reordered:
            groups = groups[torch.randperm(inputs, generator=generator)]
        stored = {
            ".qweight": _words(levels, bits).T,
            ".qzeros": _words((zeros.T - int(version == 1)) % 2**bits, bits),
            ".scales": scales.T,
            ".g_idx": groups.to(torch.int32),
        }
        return stored, _meant(levels, zeros, scales, groups)

    return write


def compressed_packed(group: int, *, asymmetric: bool = False) -> Writer:
    """compressed-tensors, "pack-quantized" in 4 bits: inputs packed along rows of words, 0 as 8."""

    def write(weight: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        levels, zeros, halves = _asymmetric(weight, 4, group)
        scales = halves.bfloat16()
        stored = {".weight_packed": _words(levels, 4), ".weight_scale": scales}
        stored[".weight_shape"] = torch.tensor(weight.shape)
        if asymmetric:
            stored[".weight_zero_point"] = _words(zeros.T, 4).T
        else:
            zeros = torch.full_like(zeros, 8)
        return stored, _meant(levels, zeros, scales, torch.arange(weight.shape[1]) // group)

    return write


def compressed_int8(weight: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
    """compressed-tensors, "int-quantized": a scale for each output."""
    scales = (weight.abs().amax(1, keepdim=True) / 127).float()
    levels = (weight / scales).round().clamp(-128, 127).to(torch.int8)
    return {".weight": levels, ".weight_scale": scales}, levels.float() * scales


def compressed_fp8(weight: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
    """compressed-tensors, "float-quantized": e4m3, a scale for each output; a scale of activations is not needed."""
    scales = weight.abs().amax(1, keepdim=True) / 448
    levels = (weight / scales).to(torch.float8_e4m3fn)
    stored = {".weight": levels, ".weight_scale": scales, ".input_scale": torch.ones(1)}
    return stored, levels.float() * scales


def fp8_blocks(size: int) -> Writer:
    """DeepSeek's and Qwen's fp8: e4m3, a scale for each block of outputs and inputs, the last ones smaller."""

    def write(weight: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        outputs, inputs = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -inputs % size, 0, -outputs % size))
        scales = padded.unflatten(1, (-1, size)).unflatten(0, (-1, size)).abs().amax((1, 3)) / 448
        spread = scales.repeat_interleave(size, 0)[:outputs].repeat_interleave(size, 1)[:, :inputs]
        levels = (weight / spread).to(torch.float8_e4m3fn)
        return {".weight": levels, ".weight_scale_inv": scales}, levels.float() * spread

    return write


NF4 = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]
)  # fmt: skip
"""The levels of NF4 (QLoRA, https://arxiv.org/abs/2305.14314, appendix E)."""


def nf4(*, nested: bool) -> Writer:
    """bitsandbytes: blocks of 64 in memory order, the high nibble first; scales in 8 bits if nested."""

    def write(weight: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
        scales = flat.abs().amax(1).clamp(min=1e-6)
        levels = ((flat / scales[:, None])[:, :, None] - NF4).abs().argmin(2).flatten()[: weight.numel()]
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
        stored = {".weight": (levels[::2] << 4 | levels[1::2]).to(torch.uint8)[:, None]}
        stored[".weight.quant_map"] = NF4.clone()
        if nested:
            table = torch.linspace(-1, 1, 256)
            offset = scales.mean()
            blocks = torch.nn.functional.pad(scales - offset, (0, -len(scales) % 256)).view(-1, 256)
            largest = blocks.abs().amax(1)
            codes = ((blocks / largest[:, None])[:, :, None] - table).abs().argmin(2)
            state |= {"nested_blocksize": 256, "nested_offset": float(offset), "nested_dtype": "float32"}
            stored |= {".weight.nested_absmax": largest, ".weight.nested_quant_map": table.clone()}
            stored[".weight.absmax"] = codes.flatten()[: len(scales)].to(torch.uint8)
            scales = (table[codes] * largest[:, None]).flatten()[: len(scales)] + float(offset)
        else:
            stored[".weight.absmax"] = scales
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        stored[".weight.quant_state.bitsandbytes__nf4"] = text
        spread = scales.repeat_interleave(64)[: weight.numel()]
        return stored, (NF4[levels] * spread).view(weight.shape)

    return write


def bnb_int8(weight: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
    """bitsandbytes, LLM.int8: the largest magnitude of each output beside the codes."""
    largest = weight.abs().amax(1)
    levels = (weight / largest[:, None] * 127).round().to(torch.int8)
    stored = {".weight": levels, ".SCB": largest, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, levels.float() * (largest / 127)[:, None]
