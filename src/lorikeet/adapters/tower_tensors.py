"""Finds the tensors of an adapter that belong to the vision tower or projector of a model that sees."""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lorikeet.adapters.description import CONFIG_FILE, WEIGHTS_FILE, TensorEntry, TowerTensor
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.peft_config import ModuleMatcher
from lorikeet.adapters.tensors import EXPONENTS
from lorikeet.core.geometry import TowerModules

_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>[A-Za-z_][A-Za-z0-9_.]*?)"
    r"\.(?:lora_(?P<side>[AB])(?:\.default)?\.(?P<of>weight|bias)|(?P<parameter>[A-Za-z_][A-Za-z0-9_]*))"
)
_SAVED = re.compile(r"\.modules_to_save(?:\.default)?(?=\.)")
"""Part of the names of whole parameters in the files of some versions of PEFT."""
_COPY = ".original_module."
"""Part of the names of the base's own tensors, which some versions of PEFT save beside those of modules_to_save."""


class SplitTensors(NamedTuple):
    """The tensors of a weights file: those of the tower, and all others by name."""

    tower: tuple[TowerTensor, ...]
    others: dict[str, TensorEntry]


def split_tower(
    entries: Mapping[str, TensorEntry], matcher: ModuleMatcher, modules: TowerModules | None
) -> SplitTensors:
    """Divide the tensors of a weights file into those of the tower and others.

    Args:
        entries: the tensors by name.
        matcher: matcher of the config's patterns.
        modules: the tower's modules; None if prompts have no images.

    Raises:
        AdapterError: a tensor of the tower is neither LoRA nor a whole parameter, or does not fit the tower.
    """
    if modules is None:
        return SplitTensors((), dict(entries))
    others: dict[str, TensorEntry] = {}
    found: list[TowerTensor] = []
    for name, entry in entries.items():
        plain = name.removeprefix("base_model.model.").removeprefix(modules.prefix)
        if not plain.startswith(modules.parts):
            others[name] = entry
        elif _COPY not in name:
            found.append(_described(name, entry, matcher, modules))
    _check_pairs(found)
    return SplitTensors(tuple(found), others)


def _described(name: str, entry: TensorEntry, matcher: ModuleMatcher, modules: TowerModules) -> TowerTensor:
    match = _NAME.fullmatch(_SAVED.sub("", name))
    if match is None or entry.dtype not in EXPONENTS:
        raise _refusal(entry, "is neither LoRA nor a whole parameter of the vision tower")
    full = match["module"]
    module = full.removeprefix(modules.prefix)
    if match["side"] is None:
        shape = modules.parameters.get(f"{module}.{match['parameter']}")
        if shape is None:
            raise _refusal(entry, "is of a parameter that the base model's vision tower lacks")
        if entry.shape != shape:
            raise _refusal(entry, f"has shape {list(entry.shape)}; the base model needs {list(shape)}")
        return TowerTensor(module, match["parameter"], entry)
    weight = modules.parameters.get(f"{module}.weight")
    if weight is None or module not in modules.adaptable:
        raise _refusal(entry, "is of a module of the vision tower on which LoRA is not supported")
    rank, scaling = matcher.rank_and_scaling(full)
    if match["of"] == "bias":
        if match["side"] == "A" or entry.shape != weight[:1]:
            raise _refusal(entry, f"has shape {list(entry.shape)}; the base model needs {list(weight[:1])}")
        return TowerTensor(module, "lora_bias", entry, scaling)
    wanted = (rank, *weight[1:]) if match["side"] == "A" else (weight[0], rank, *(1 for _ in weight[2:]))
    if entry.shape != wanted:
        raise _refusal(entry, f"has shape {list(entry.shape)}; base model and {CONFIG_FILE} need {list(wanted)}")
    return TowerTensor(module, match["side"].lower(), entry, scaling)


def _check_pairs(found: Iterable[TowerTensor]) -> None:
    """Check that each A has a B, and no tensor is there twice."""
    kinds: dict[str, dict[str, TensorEntry]] = {}
    for each in found:
        other = kinds.setdefault(each.module, {}).setdefault(each.kind, each.entry)
        if other is not each.entry:
            raise AdapterError(f"{WEIGHTS_FILE}: tensors {other.name} and {each.entry.name} are the same matrix")
    for sides in kinds.values():
        for side, needed in (("a", "b"), ("b", "a"), ("lora_bias", "b")):
            if side in sides and needed not in sides:
                raise AdapterError(f"{WEIGHTS_FILE}: tensor {sides[side].name} has no matching lora_{needed.upper()}")


def _refusal(entry: TensorEntry, why: str) -> AdapterError:
    return AdapterError(f"{WEIGHTS_FILE}: tensor {entry.name} {why}")
