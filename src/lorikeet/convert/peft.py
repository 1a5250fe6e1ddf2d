"""Converts adapters of other types to LoRA, and merges adapters into a base, with PEFT."""

import json
import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from lorikeet.adapters.description import CONFIG_FILE
from lorikeet.adapters.errors import AdapterError
from lorikeet.convert.folder import PREFIX, LowRank, check_free, copy_chat_files, read_weights, write_lora
from lorikeet.models.default import whole_folder

_ROUNDING = 1e-6
"""Singular values below this share of the largest are rounding errors."""
_FIRST_SKETCH = 48
"""Columns of the first random projection of a change; each further one has four times as many."""
_SMALLER = (8, 16, 32, 64, 128, 256)
"""Ranks at which errors are reported."""
_UNITS = 1024
"""Unit vectors for which a layer is computed at once."""


class Converted(NamedTuple):
    """The conversion of a module.

    Attributes:
        module: full name of the module.
        rank: rank of the low-rank matrices.
        error: Frobenius norm of the error, divided by the norm of the weight's whole change.
        at: errors at smaller ranks, by rank.
    """

    module: str
    rank: int
    error: float
    at: dict[int, float]


def convert(folder: Path, target: Path, base: Path, rank: int, tolerance: float) -> list[Converted]:
    """Approximate a PEFT adapter of another type by the nearest LoRA adapter of a given rank.

    Args:
        folder: folder of the adapter, of any type that replaces linear layers by other linear maps.
        target: a folder that does not exist.
        base: folder of the base that the adapter was trained on.
        rank: maximum rank of a module. 0 takes the rank that ``tolerance`` needs, as long as A and B are smaller than
            the weight.
        tolerance: maximum ``Converted.error``.

    Raises:
        AdapterError: PEFT cannot load the adapter, an adapted layer is not linear, or the error of a module is larger
            than ``tolerance``.
    """
    check_free(target)
    with quiet():
        return _convert(folder, target, base, rank, tolerance)


class _Map(NamedTuple):
    """The map of a linear layer: ``x @ weight.T + bias``, fp64 ``[out, in]`` and ``[out]``."""

    weight: Tensor
    bias: Tensor


@torch.inference_mode()
def _convert(folder: Path, target: Path, base: Path, rank: int, tolerance: float) -> list[Converted]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    model = load_base(base)
    kinds = (nn.Linear, Conv1D)
    # The map is computed now, since loading an adapter may change weights.
    before = {name: _stored(part) for name, part in model.named_modules() if isinstance(part, kinds)}
    model = with_adapter(model, folder)
    modules: dict[str, LowRank] = {}
    biases: dict[str, Tensor] = {}
    found: list[Converted] = []
    for name, layer in model.base_model.model.named_modules():
        if isinstance(layer, BaseTunerLayer) and name not in before:
            raise AdapterError(f"{folder}: {name} is not a linear layer, and cannot be converted")
        if name not in before or isinstance(layer, ModulesToSaveWrapper):
            continue
        old = before[name]
        try:
            new = _computed(layer, old.weight.shape[1]) if isinstance(layer, BaseTunerLayer) else _stored(layer)
            weight = new.weight - old.weight.double()
            bias = new.bias - old.bias.double()
            if not isinstance(layer, BaseTunerLayer) and not weight.any() and not bias.any():
                continue
            a, b, error, at = low_rank(weight, rank, tolerance)
        except ValueError as wrong:
            raise AdapterError(f"{folder}: {name}: {wrong}") from wrong
        if error > tolerance:
            raise AdapterError(
                f"{folder}: {name}: at rank {len(a)} the error is {error:.3g} of the change, above the tolerance of "
                f"{tolerance:g}: allow a larger --rank or --tolerance"
            )
        found.append(Converted(name, len(a), error, at))
        modules[name] = LowRank(a, b)
        if bias.norm() > _ROUNDING * (old.bias.norm() + new.bias.norm()):
            biases[name] = bias.float()
    if not found:
        raise AdapterError(f"{folder}: it changes no linear layer")
    given = json.loads((folder / CONFIG_FILE).read_text())
    others = {key: value for key, value in read_weights(folder).items() if _is_whole(key, given)}
    if biases:
        for name, each in modules.items():
            others[f"{PREFIX}{name}.lora_B.bias"] = biases.get(name, torch.zeros(len(each.b)))
    config = {
        "lora_bias": bool(biases),
        "modules_to_save": given.get("modules_to_save"),
        "base_model_name_or_path": given.get("base_model_name_or_path"),
        "fan_in_fan_out": any(isinstance(part, Conv1D) for part in model.modules()),
        "task_type": given.get("task_type"),
    }
    write_lora(target, modules, config, others)
    copy_chat_files(folder, target)
    return found


def _stored(part: Any) -> _Map:
    """Return copies of a layer's weight and bias in their dtype."""
    weight = part.weight.detach()
    bias = part.bias
    weight = weight.T if isinstance(part, Conv1D) else weight
    kept = torch.zeros(len(weight), dtype=weight.dtype) if bias is None else bias.detach().clone()
    return _Map(weight.clone(), kept)


def _computed(layer: nn.Module, inputs: int) -> _Map:
    """Return the linear map of a layer with an adapter, computed from the layer's outputs for unit vectors.

    This also works for types of adapters that cannot be merged. The computation is in fp64 if the type allows it, so
    that the rounding of a large weight does not hide the rank of a small change.

    Raises:
        ValueError: the layer is not linear.
    """
    generator = torch.Generator().manual_seed(0)
    some = torch.randn(4, inputs, generator=generator, dtype=torch.float64)
    try:
        layer.double()
        layer(some)
        dtype = torch.float64
    except RuntimeError:  # Some types have tensors besides parameters.
        layer.float()
        dtype = torch.float32
    bias = layer(torch.zeros(1, inputs, dtype=dtype))[0]
    units = torch.eye(inputs, dtype=dtype).tensor_split(-(-inputs // _UNITS))
    weight = torch.cat([(layer(part) - bias).T for part in units], dim=1).double()
    expected = some @ weight.T + bias.double()
    found = layer(some.to(dtype)).double()
    layer.float()
    if float((found - expected).norm()) > 1e-3 * float(found.norm()):
        raise ValueError("with the adapter it is not linear, and cannot be converted")
    return _Map(weight, bias.double())


def low_rank(delta: Tensor, rank: int, tolerance: float) -> tuple[Tensor, Tensor, float, dict[int, float]]:
    """Return the best low-rank matrices for a change of a weight, and their error.

    Args:
        delta: ``[out, in]``.
        rank: maximum rank. 0 takes the rank that is needed, as long as A and B are smaller than ``delta``.
        tolerance: maximum error, divided by the norm of ``delta``.

    Returns:
        A ``[r, in]`` and B ``[out, r]`` of the smallest rank within the tolerance, else of ``rank``; the error; and the
        errors at smaller ranks, by rank.

    Raises:
        ValueError: A and B would not be smaller.
    """
    delta = delta.double()
    total = float(delta.norm())
    if total == 0:
        return torch.zeros(1, delta.shape[1]), torch.zeros(delta.shape[0], 1), 0.0, {}
    left, values, right, rest = _leading(delta, total, rank, tolerance)
    squares = values.square()
    lost = (squares.sum() - squares.cumsum(0)).clamp(min=0).add(rest**2).sqrt() / total
    real = int((values > _ROUNDING * values[0]).sum())
    needed = min(int((lost > tolerance).sum()) + 1, real)
    kept = min(needed, rank) if rank else needed
    at = {size: float(lost[size - 1]) for size in _SMALLER if size < kept}
    if not rank and kept > 1 and kept * sum(delta.shape) >= delta.numel():
        errors = ", ".join(f"{error:.2g} at {size}" for size, error in at.items())
        raise ValueError(
            f"for an error of {tolerance:g} of the change it needs rank {kept}, where A and B are no smaller than the "
            f"weight (errors at smaller ranks: {errors or 'none'}): allow more with --tolerance, name the rank "
            "with --rank, or merge it into its base with `lorikeet adapters merge FOLDER OUT --base BASE`"
        )
    roots = values[:kept].sqrt()
    a = roots[:, None] * right[:kept]
    b = left[:, :kept] * roots
    error = 0.0 if kept == real and rest == 0 else float(lost[kept - 1])
    return a.float().contiguous(), b.float().contiguous(), error, at


def _leading(delta: Tensor, total: float, rank: int, tolerance: float) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return singular vectors and values like ``torch.linalg.svd``, and the norm of the rest.

    Only the leading ones are computed, by a random projection and two power iterations
    (https://arxiv.org/abs/0909.4061, algorithm 4.4). If this saves little work, all are computed.
    """
    generator = torch.Generator().manual_seed(0)
    size = _FIRST_SKETCH
    while 4 * size <= min(delta.shape):
        basis = torch.linalg.qr(delta @ torch.randn(delta.shape[1], size, generator=generator, dtype=delta.dtype)).Q
        for _ in range(2):
            basis = torch.linalg.qr(delta @ torch.linalg.qr(delta.T @ basis).Q).Q
        small = basis.T @ delta
        rest = float((delta - basis @ small).norm())
        if rest <= max(tolerance / 2, _ROUNDING) * total or 0 < 2 * rank <= size:
            left, values, right = torch.linalg.svd(small, full_matrices=False)
            return basis @ left, values, right, rest if rest > _ROUNDING * total else 0.0
        size *= 4
    return *torch.linalg.svd(delta, full_matrices=False), 0.0


def _is_whole(key: str, config: dict[str, Any]) -> bool:
    """Return whether a tensor is a whole weight of one of ``modules_to_save``."""
    path = key.removeprefix(PREFIX).rpartition(".")[0]
    return any(path.endswith(name) for name in config.get("modules_to_save") or [])


def merge_into(folder: Path, target: Path, base: Path) -> None:
    """Merge an adapter into a base, and write the base in its dtype with tokenizer and templates.

    Args:
        folder: folder of an adapter of any type that PEFT can merge.
        target: a folder that does not exist.
        base: folder of the adapter's base.

    Raises:
        AdapterError: PEFT cannot load or merge the adapter.
    """
    check_free(target)
    with quiet():
        dtype = AutoConfig.from_pretrained(base, local_files_only=True).dtype or torch.float32
        model = with_adapter(load_base(base), folder)
        try:
            merged = model.merge_and_unload(safe_merge=True)
        except Exception as error:  # The exceptions are of many kinds.
            raise AdapterError(f"{folder}: PEFT cannot merge it: {error}") from error
        with whole_folder(target) as place:
            merged.to(dtype).save_pretrained(place)
            for file in base.iterdir():
                if file.is_file() and file.suffix in _TEXTS and not (place / file.name).exists():
                    shutil.copy(file, place / file.name)
            copy_chat_files(folder, place)


_TEXTS = {".json", ".jinja", ".txt", ".model"}
"""Endings of the files of a base that are copied, unless the new folder has them."""


def load_base(base: Path) -> PreTrainedModel:
    """Load a base model in fp32 for inference."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    return loaded


def with_adapter(model: PreTrainedModel, folder: Path) -> Any:
    """Return the model with an adapter, loaded by PEFT.

    Raises:
        AdapterError: PEFT cannot load the adapter.
    """
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(model, str(folder)).eval()
    except Exception as error:  # The exceptions are of many kinds.
        raise AdapterError(f"{folder}: PEFT cannot load it: {error}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the progress bars and warnings of libraries off the terminal."""
    transformers_logging.disable_progress_bar()
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        transformers_logging.enable_progress_bar()
