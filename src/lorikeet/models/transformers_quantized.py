"""Dequantises the weights of quantised checkpoints while loading them for the modules of transformers."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lorikeet.kernels.quantized import QuantizedWeight, QuantizedWeightError
from lorikeet.models.json_section import read_json_section
from lorikeet.models.loading import WeightError, locate_tensors
from lorikeet.models.quantization_config import read_quantization
from lorikeet.models.quantized_formats import StoredWeight, stored_weights


def dequantised_weights(folder: Path, dtype: torch.dtype) -> dict[str, Tensor] | None:
    """Return a checkpoint's weights in ``dtype``, by their names in checkpoints of 16 bits.

    The result is None if the checkpoint is not quantised.

    Raises:
        ModelConfigError: the method is not supported.
        WeightError: a tensor is missing or broken.
    """
    config = read_quantization(read_json_section(folder / "config.json"))
    if config is None:
        return None
    where = locate_tensors(folder)
    found = dict[str, Tensor]()
    plain = set(where)
    try:
        for module, way in _modules(plain, stored_weights(config)).items():
            names = way.tensors(module, where) or {}
            if missing := sorted(set(names.values()) - where.keys()):
                raise WeightError(f"{folder}: {', '.join(missing)}: missing")
            plain -= {*names.values(), *(module + end for end in way.unused)}
            stored = {end: _read(where, name) for end, name in names.items()}
            try:
                value = way.decode(stored, _shape_of(stored, config.bits or 4))
            except (QuantizedWeightError, RuntimeError, KeyError, IndexError) as error:
                raise WeightError(f"{folder}: {module}: is not a valid {way.label} weight: {error}") from error
            wide = value.dequantized(dtype) if isinstance(value, QuantizedWeight) else value.to(dtype)
            found[f"{module}.weight"] = wide
        for name in sorted(plain):
            tensor = _read(where, name)
            found[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    except (SafetensorError, OSError) as error:
        raise WeightError(f"{folder}: cannot be read: {error}") from error
    return found


def _modules(names: set[str], ways: tuple[StoredWeight, ...]) -> dict[str, StoredWeight]:
    """Return the modules whose weights are quantised, each with the form of its weight."""
    found: dict[str, StoredWeight] = {}
    for way in ways:
        end = way.needed[0]
        for name in sorted(name for name in names if name.endswith(end)):
            found.setdefault(name.removesuffix(end), way)
    return found


def _read(where: Mapping[str, Path], name: str) -> Tensor:
    with safe_open(where[name], framework="pt") as tensors:
        return tensors.get_tensor(name)


def _shape_of(stored: Mapping[str, Tensor], bits: int) -> tuple[int, int]:
    """Return the numbers of outputs and inputs of a weight, from the shapes of its tensors."""
    if ".qweight" in stored:
        inputs = stored[".g_idx"].numel() if ".g_idx" in stored else stored[".qweight"].shape[0] * 32 // bits
        return stored[".scales"].shape[1], inputs
    if ".weight_packed" in stored:
        if ".weight_shape" in stored:
            outputs, inputs = stored[".weight_shape"].tolist()
            return int(outputs), int(inputs)
        outputs, words = stored[".weight_packed"].shape
        return outputs, words * 32 // bits
    outputs, inputs = stored[".weight"].shape
    return outputs, inputs
