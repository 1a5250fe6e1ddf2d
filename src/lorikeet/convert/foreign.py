"""Rewrites other programs' adapters as PEFT's LoRA: mlx-lm, llama.cpp's GGUF, and the keys of Diffusers and kohya.

Only a factor is computed, so the result is exact. Unsloth and Axolotl save PEFT's format.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lorikeet.adapters.description import CONFIG_FILE, WEIGHTS_FILE
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.module_names import BaseModules
from lorikeet.adapters.peft_config import MAX_CONFIG_BYTES, read_json
from lorikeet.adapters.tensors import read_entries
from lorikeet.convert.folder import PREFIX, LowRank, write_lora
from lorikeet.kernels.quantized import QuantizedWeight
from lorikeet.models.config import read_model_config
from lorikeet.models.gguf import GgufFile, read_gguf, transformers_names
from lorikeet.models.gguf_weights import decode_gguf
from lorikeet.models.json_section import ModelConfigError

MLX_FILE = "adapters.safetensors"


class Foreign(NamedTuple):
    """An adapter of another program.

    Attributes:
        modules: the changes, by full names of modules in transformers.
        magnitudes: DoRA's magnitudes by the same names.
        config: keys of PEFT's config.
    """

    modules: dict[str, LowRank]
    magnitudes: dict[str, Tensor]
    config: dict[str, Any]


class Format(NamedTuple):
    """The format of another program.

    Attributes:
        name: name of the format.
        file: file of the weights.
        read: function that reads the file. Its second argument is the folder of the base.
    """

    name: str
    file: Path
    read: Callable[[Path, Path], Foreign]


def recognise(source: Path) -> Format | None:
    """Return the format of a file or folder.

    None for a PEFT folder or an unknown format.

    Raises:
        AdapterError: a file has none of the known formats, or a safetensors file cannot be read.
    """
    if source.is_file():
        candidates = [source]
    elif (source / CONFIG_FILE).is_file() and (source / WEIGHTS_FILE).is_file():
        candidates = [source / WEIGHTS_FILE]
    else:
        candidates = [*source.glob("*.safetensors"), *source.glob("*.gguf")]
    for file in candidates:
        if file.suffix == ".gguf":
            return Format("GGUF", file, _read_gguf)
        if file.suffix != ".safetensors":
            continue
        names = read_entries(file)
        if any(name.endswith((".lora_a", ".lora_b")) for name in names):
            return Format("mlx", file, _read_mlx)
        if any(_SIDES.search(name) for name in names):
            return Format("Diffusers", file, _read_diffusers)
    if source.is_file():
        raise AdapterError(f"{source}: not an adapter of mlx, GGUF or Diffusers; name the folder of a PEFT adapter")
    return None


def rewrite(form: Format, target: Path, base: Path) -> list[str]:
    """Write PEFT's folder, and return the names of the modules.

    Args:
        form: format of the adapter.
        target: a folder that must not exist.
        base: folder of the adapter's base.

    Raises:
        AdapterError: PEFT's LoRA cannot represent a part of the adapter, or the base lacks one of its modules.
    """
    found = form.read(form.file, base)
    config = {**found.config, "use_dora": True} if found.magnitudes else found.config
    others = {f"{PREFIX}{name}.lora_magnitude_vector": value for name, value in found.magnitudes.items()}
    write_lora(target, found.modules, config, others)
    return list(found.modules)


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{file}: cannot be read as safetensors: {error}") from error
    return tensors


def _pairs(file: Path, sides: Mapping[str, Mapping[str, Tensor]]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the two matrices of each module: the first has rank rows, the second rank columns.

    Raises:
        AdapterError: A or B is missing, or the two do not fit together.
    """
    for name, found in sides.items():
        if found.keys() != {"a", "b"}:
            raise AdapterError(f"{file}: {name} has only one of two matrices")
        a = found["a"].float()
        b = found["b"].float()
        if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
            raise AdapterError(
                f"{file}: {name} has matrices of shapes {list(a.shape)} and {list(b.shape)}, which are not LoRA of a "
                "linear layer"
            )
        yield name, a, b


# --- mlx --------------------------------------------------------------------------------------------------------------


def _read_mlx(file: Path, base: Path) -> Foreign:
    """Read an adapter of ``mlx_lm.lora``: A and B transposed, and a factor ``scale`` in the config."""
    config = read_json(file.parent / CONFIG_FILE, MAX_CONFIG_BYTES)
    settings = config.get("lora_parameters") or config
    try:
        scale = float(settings["scale"])
        if "alpha" in settings:  # This is the format of versions until the middle of 2024.
            scale *= float(settings["alpha"]) / int(settings["rank"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise AdapterError(f"{file.parent / CONFIG_FILE}: lora_parameters has no valid scale") from error
    sides: dict[str, dict[str, Tensor]] = {}
    magnitudes = {}
    for name, value in _tensors(file).items():
        module, _, kind = name.rpartition(".")
        if kind in ("lora_a", "lora_b"):
            sides.setdefault(module, {})[kind[-1]] = value.T
        elif kind == "m":
            magnitudes[module] = value
        else:
            raise AdapterError(f"{file}: tensor {name} is neither A, B nor a magnitude of mlx")
    if any(module.endswith("embed_tokens") for module in sides):
        raise AdapterError(f"{file}: LoRA on the embedding is not rewritten")
    modules = {name: LowRank(a.contiguous(), b.contiguous(), scale) for name, a, b in _pairs(file, sides)}
    return Foreign(modules, magnitudes, {"base_model_name_or_path": config.get("model") or ""})


# --- GGUF -------------------------------------------------------------------------------------------------------------


def _read_gguf(file: Path, base: Path) -> Foreign:
    """Read an adapter of llama.cpp's ``convert_lora_to_gguf.py``. The factor is alpha divided by rank."""
    try:
        content = read_gguf(file)
    except ModelConfigError as error:
        raise AdapterError(str(error)) from error
    meta = content.metadata
    if (meta.get("general.type"), meta.get("adapter.type")) != ("adapter", "lora"):
        raise AdapterError(f"{file}: this is not a LoRA adapter: general.type is {meta.get('general.type')!r}")
    alpha = float(meta.get("adapter.lora.alpha", 0.0))
    sides: dict[str, dict[str, Tensor]] = {}
    names = _gguf_modules(content)
    heads = _interleaved_heads(content, base)
    plain = content._replace(metadata={})  # Only the base's file would state how to reorder the rows.
    for name in content.tensors:
        weight, _, kind = name.rpartition(".lora_")
        if weight not in names:
            raise AdapterError(f"{file}: tensor {name} is not LoRA on a known linear layer")
        try:
            value = decode_gguf(plain, name)
        except ModelConfigError as error:
            raise AdapterError(str(error)) from error
        whole = value.dequantized(torch.float32) if isinstance(value, QuantizedWeight) else value
        if kind == "b" and (count := heads.get(weight.split(".")[-2])):
            whole = whole.view(count, -1, 2, whole.shape[1]).transpose(1, 2).reshape(whole.shape)
        sides.setdefault(names[weight], {})[kind] = whole
    modules = {name: LowRank(a, b, alpha / len(a) if alpha else 1.0) for name, a, b in _pairs(file, sides)}
    invocation = meta.get("adapter.alora.invocation_tokens")
    return Foreign(modules, {}, {"alora_invocation_tokens": invocation} if invocation else {})


def _gguf_modules(content: GgufFile) -> dict[str, str]:
    """Return a map from the file's names of weights to transformers' names of the linear layers with LoRA."""
    weights = {name.rpartition(".lora_")[0]: tensor for name, tensor in content.tensors.items() if ".lora_" in name}
    names = transformers_names(content._replace(tensors=weights))
    return {
        own: name.removesuffix(".weight")
        for name, own in names.items()
        if name != own and not name.startswith("model.embed_tokens")
    }


def _interleaved_heads(content: GgufFile, base: Path) -> dict[str, int]:
    """Return the numbers of heads of q and k, whose rows are reordered.

    They come from the base, since the file lacks them.
    """
    if content.metadata.get("general.architecture") != "llama":
        return {}
    try:
        config = json.loads((base / "config.json").read_text())
        heads = int(config["num_attention_heads"])
        return {"attn_q": heads, "attn_k": int(config.get("num_key_value_heads") or heads)}
    except (OSError, ValueError, KeyError) as error:
        raise AdapterError(
            f"{base}: its config.json does not give the number of heads, which {content.path} needs"
        ) from error


# --- Diffusers, kohya -------------------------------------------------------------------------------------------------

_SIDES = re.compile(r"[._]?(?:lora\.|lora_linear_layer\.|lora_)(down|up)\.weight$")
_ALPHA = ".alpha"
_PARTS = re.compile(r"^(?:text_encoder|transformer|diffusion_model|unet|lora_te\d?|lora_unet|lora)[._]")
"""Of a pipeline, before the names of a language model's layers."""


def _read_diffusers(file: Path, base: Path) -> Foreign:
    """Read an adapter with keys ``….lora_down.weight``, ``….lora_up.weight`` and ``….alpha``, in either spelling."""
    full = _names_of(base)
    sides: dict[str, dict[str, Tensor]] = {}
    alphas = {}
    for key, value in _tensors(file).items():
        if key.endswith(_ALPHA):
            alphas[_full_name(key.removesuffix(_ALPHA), full, file)] = float(value)
            continue
        match = _SIDES.search(key)
        if match is None:
            raise AdapterError(f"{file}: tensor {key} is neither lora_down, lora_up nor alpha")
        name = _full_name(key[: match.start()], full, file)
        sides.setdefault(name, {})["a" if match[1] == "down" else "b"] = value
    return Foreign(
        {name: LowRank(a, b, alphas.get(name, len(a)) / len(a)) for name, a, b in _pairs(file, sides)}, {}, {}
    )


def _names_of(base: Path) -> dict[str, str]:
    """Return the full names of a base's linear layers, by the spelling with underscores."""
    try:
        geometry = read_model_config(base).geometry(4)
    except ModelConfigError as error:
        raise AdapterError(f"{base}: the names of its layers are not known: {error}") from error
    return {name.replace(".", "_"): name for name in BaseModules(geometry).names("model.")}


def _full_name(key: str, full: Mapping[str, str], file: Path) -> str:
    name = _PARTS.sub("", key).replace(".", "_")
    found = full.get(name) or full.get(f"model_{name}")
    if found is None:
        raise AdapterError(f"{file}: {key} is not a linear layer of the base")
    return found
