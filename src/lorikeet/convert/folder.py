"""Reads and writes PEFT folders as matrices, for commands that compute with adapters."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorikeet.adapters.chat_files import CHAT_FILES
from lorikeet.adapters.description import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.folder_hints import PICKLED_FILE
from lorikeet.adapters.mixture import config_of
from lorikeet.adapters.peft_config import MAX_CONFIG_BYTES, read_json
from lorikeet.adapters.reader import describe
from lorikeet.core.geometry import SCORE
from lorikeet.models.default import whole_folder

PREFIX = "base_model.model."
_KEPT = ("base_model_name_or_path", "revision", "task_type", "fan_in_fan_out", "alora_invocation_tokens")
"""Keys of a config that also hold for an adapter that is made from another."""


class LowRank(NamedTuple):
    """The change to one linear layer: ``scaling * b @ a``.

    Attributes:
        a: fp32 ``[rank, in_features]``.
        b: fp32 ``[out_features, rank]``.
        scaling: factor, with rsLoRA and patterns applied.
    """

    a: Tensor
    b: Tensor
    scaling: float = 1.0

    @property
    def rank(self) -> int:
        """The inner size of A and B."""
        return len(self.a)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return B times scaling, and A, in fp64."""
        return self.b.double() * self.scaling, self.a.double()


class LoraFolder(NamedTuple):
    """A LoRA adapter in memory.

    Attributes:
        config: content of ``adapter_config.json``.
        modules: the changes, by full names of linear layers.
        others: the other tensors, by names in the file.
    """

    config: dict[str, Any]
    modules: dict[str, LowRank]
    others: dict[str, Tensor]

    @property
    def kept_config(self) -> dict[str, Any]:
        """The config's keys that also apply to adapters made from this one."""
        return {key: self.config[key] for key in _KEPT if self.config.get(key) is not None}


def read_lora(folder: Path) -> LoraFolder:
    """Read a folder that passes the server's checks.

    Raises:
        AdapterError: the folder does not pass, or changes parameters by name, which may not be linear layers'.
    """
    described = describe(folder)
    config = read_json(folder / CONFIG_FILE, MAX_CONFIG_BYTES)
    if config.get("target_parameters"):
        raise AdapterError(f"{folder}: it changes parameters by name (target_parameters), which is not supported here")
    tensors: dict[str, Tensor] = {}
    for name in described.shards or (WEIGHTS_FILE,):
        tensors |= load_file(folder / name)
    pairs = {each.a.name: (each.b.name, each.scaling) for each in described.modules if each.module != SCORE}
    for each in described.extras:  # This is LoRA on the output layer.
        if each.kind == "b" and each.entry is not None and ".lora_B" in each.entry.name:
            pairs[each.entry.name.replace(".lora_B", ".lora_A")] = each.entry.name, each.scaling
    modules = {}
    for a, (b, scaling) in pairs.items():
        name = a.rpartition(".lora_A")[0].removeprefix(PREFIX)
        modules[name] = LowRank(tensors.pop(a).float(), tensors.pop(b).float(), scaling)
    return LoraFolder(config, modules, tensors)


def is_pickled(folder: Path) -> bool:
    """Return whether a folder has its weights only in the pickle that old versions of PEFT write."""
    return (folder / PICKLED_FILE).is_file() and not any(
        (folder / each).is_file() for each in (WEIGHTS_FILE, INDEX_FILE)
    )


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder of PEFT: of one file, of shards, or of a pickle, whose code is not run.

    Raises:
        AdapterError: there is no such file, or it cannot be read, or holds more than tensors.
    """
    tensors: dict[str, Tensor] = {}
    try:
        if is_pickled(folder):
            found = torch.load(folder / PICKLED_FILE, map_location="cpu", weights_only=True)
            if not isinstance(found, dict) or not all(isinstance(each, Tensor) for each in found.values()):
                raise AdapterError(f"{folder / PICKLED_FILE}: it holds more than tensors by their names")
            return {name: value.clone().contiguous() for name, value in found.items()}
        shards = [WEIGHTS_FILE]
        if (folder / INDEX_FILE).is_file():
            index = read_json(folder / INDEX_FILE, MAX_CONFIG_BYTES).get("weight_map")
            shards = sorted(set(index.values())) if isinstance(index, dict) else shards
        for name in shards:
            tensors |= load_file(folder / name)
    except (OSError, SafetensorError, UnpicklingError, RuntimeError, EOFError) as error:
        raise AdapterError(f"{folder}: its weights cannot be read: {_first_line(error)}") from error
    return tensors


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]


def rewrite_pickled(folder: Path, target: Path) -> int:
    """Write a folder with the tensors of a pickle as safetensors, exactly; return their number.

    Args:
        folder: folder of PEFT.
        target: a folder that must not exist.

    Raises:
        AdapterError: the pickle cannot be read, or the target exists.
    """
    check_free(target)
    tensors = read_weights(folder)
    config = read_json(folder / CONFIG_FILE, MAX_CONFIG_BYTES)
    with whole_folder(target) as whole:
        save_file(tensors, whole / WEIGHTS_FILE)
        (whole / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    copy_chat_files(folder, target)
    return len(tensors)


def write_lora(
    target: Path, modules: Mapping[str, LowRank], config: Mapping[str, Any], others: Mapping[str, Tensor] | None = None
) -> None:
    """Write a complete folder, or nothing after an error.

    The scaling is multiplied into B.

    Args:
        target: a folder that must not exist.
        modules: the changes, by full names of linear layers.
        config: further keys of the config.
        others: further tensors.

    Raises:
        AdapterError: the folder exists, or there are no modules.
    """
    check_free(target)
    if not modules:
        raise AdapterError(f"{target}: the adapter would change no linear layer")
    tensors = dict(others or {})
    for name, each in modules.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = each.a
        tensors[f"{PREFIX}{name}.lora_B.weight"] = each.b if each.scaling == 1 else each.b * each.scaling
    written = {**config_of({name: each.rank for name, each in modules.items()}), **config}
    with whole_folder(target) as folder:
        save_file({key: value.to(torch.float32).contiguous() for key, value in tensors.items()}, folder / WEIGHTS_FILE)
        (folder / CONFIG_FILE).write_text(json.dumps(written, indent=2) + "\n")


def copy_chat_files(source: Path, target: Path) -> None:
    """Copy the chat template and the tokenizer settings of a folder."""
    for name in CHAT_FILES:
        if (source / name).is_file():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copy(source / name, target / name)


def check_free(target: Path) -> None:
    """Check that a folder can be written.

    Raises:
        AdapterError: the folder exists already.
    """
    if target.exists():
        raise AdapterError(f"{target} exists already")
