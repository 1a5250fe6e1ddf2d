"""Makes weighted mixtures of adapters: one adapter with the rank rows of all parts.

The result is the sum of ``weight * scaling * B·A``, like in PEFT's ``add_weighted_adapter`` with
``combination_type="cat"``. Matrices are not added up. The A of a module are stacked, and the B, each multiplied by
weight and scaling, stand side by side. So the mixture is exact, and its rank is the sum of the ranks.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from lorikeet.adapters.description import CONFIG_FILE, WEIGHTS_FILE
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.weights import load_weights
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import DECODER_NAMES, ModelGeometry

Part = tuple[AdapterRef, float]
"""An adapter and its weight."""

_Matrices = tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]


def write_mixture(folder: Path, parts: Sequence[Part], geometry: ModelGeometry) -> None:
    """Write a PEFT LoRA folder.

    Args:
        folder: an empty folder.
        parts: the adapters. The caller keeps their files during the call.
        geometry: sizes of the whole base model.

    Raises:
        AdapterError: an adapter is missing, has changed, or has a part that cannot be mixed.
        OSError: the folder cannot be written.
    """
    found: dict[tuple[int, str], _Matrices] = {}
    for ref, weight in parts:
        if ref.extras:
            raise AdapterError(f"adapter {ref.name!r} has {ref.extras[0].kind} beside A and B, which cannot be mixed")
        if ref.labels:
            raise AdapterError(f"adapter {ref.name!r} has a score head, which cannot be mixed")
        for each in load_weights(ref, geometry, "float32"):
            a, bt = found.setdefault((each.layer, each.module), ([], []))
            a.append(each.a)
            bt.append(each.bt * np.float32(weight))
    tensors = dict[str, NDArray[np.float32]]()
    ranks = dict[str, int]()
    for (layer, module), (a, bt) in found.items():
        name = _name(layer, module, geometry)
        tensors[f"base_model.model.{name}.lora_A.weight"] = np.concatenate(a)
        tensors[f"base_model.model.{name}.lora_B.weight"] = np.ascontiguousarray(np.concatenate(bt).T)
        ranks[name] = sum(map(len, a))
    save_file(tensors, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps(config_of(ranks)))


def config_of(ranks: Mapping[str, int]) -> dict[str, Any]:
    """Return PEFT's config for a LoRA without scaling, from the ranks by full names of modules."""
    largest = max(ranks.values())
    pattern = {name: rank for name, rank in ranks.items() if rank != largest}
    return {
        "peft_type": "LORA",
        "r": largest,
        "lora_alpha": largest,
        "rank_pattern": pattern,
        "alpha_pattern": pattern,
        "target_modules": list(ranks),
    }


def _name(layer: int, module: str, geometry: ModelGeometry) -> str:
    """Return the full name of a module that is a separate linear layer."""
    names = DECODER_NAMES if geometry.names is None else geometry.names
    paths = [(each.path, each.modules) for each in names.paths]
    paths += [(path, (each.module,)) for each in names.matrices for path in each.spellings]
    for path, modules in paths:
        if modules == (module,) and geometry.has_module(layer, module):
            return names.prefixes[0] + path.replace("{}", str(layer))
    raise AdapterError(f"{module} of layer {layer} is part of a fused linear layer, whose adapters cannot be mixed")
