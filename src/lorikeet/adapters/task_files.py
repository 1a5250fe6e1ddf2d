"""Reads the tasks of an adapter besides text, and finds the score head.

The folder may come from an untrusted user, so it is read in the reader process (see ``adapters.reader``).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from lorikeet.adapters.description import WEIGHTS_FILE, ModuleTensors, TensorEntry
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.peft_config import read_json
from lorikeet.adapters.task import AdapterTask
from lorikeet.adapters.tensors import EXPONENTS
from lorikeet.core.geometry import SCORE, ModelGeometry
from lorikeet.core.request import PoolingKind

MODEL_CONFIG_FILE = "config.json"
"""File of transformers with the names of the labels."""
MODULES_FILE = "modules.json"
"""File of sentence-transformers that lists the modules after the model."""
POOLING_FILE = "1_Pooling/config.json"

TASK_FILES = {MODEL_CONFIG_FILE: 2**20, MODULES_FILE: 2**16, POOLING_FILE: 2**16}
"""Files that are read if they exist, with their largest sizes in bytes."""

_SCORE_KEY = re.compile(r"(?:base_model\.model\.)?score\.(?:modules_to_save\.default\.)?(weight|bias)")
_MAX_LABELS = 65_536
_LONGEST_LABEL = 256
_MULTI_LABEL = "multi_label_classification"
_MODES = {
    "lasttoken": PoolingKind.LAST,
    "mean_tokens": PoolingKind.MEAN,
    "mean": PoolingKind.MEAN,
    "weightedmean_tokens": PoolingKind.WEIGHTED_MEAN,
    "weightedmean": PoolingKind.WEIGHTED_MEAN,
}
"""Names of sentence-transformers, old (after ``pooling_mode_``) and new."""


def read_task(folder: Path, labels: int = 0) -> AdapterTask:
    """Read the files of ``TASK_FILES`` in the folder of an adapter or base model.

    Args:
        folder: folder with the files.
        labels: number of labels of the score head. 0 without a head; names of labels are then ignored.

    Raises:
        AdapterError: a file is too large or not valid, or has an unsupported setting. The message names the file.
    """
    config = _json(folder, MODEL_CONFIG_FILE) if labels else {}
    pooling, normalizes = _embedding(folder)
    return AdapterTask(_labels(config, labels), config.get("problem_type") == _MULTI_LABEL, pooling, normalizes)


def _json(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder / name, TASK_FILES[name]) if (folder / name).is_file() else {}


def _labels(config: Mapping[str, Any], labels: int) -> tuple[str, ...]:
    named = config.get("id2label")
    if not isinstance(named, dict) or not named:
        return ()
    if set(named) != {str(number) for number in range(labels)}:
        raise AdapterError(
            f"{MODEL_CONFIG_FILE}: id2label has {len(named)} labels, but the score head has {labels}: it must name "
            f"'0' to '{labels - 1}'"
        )
    found = tuple(named[str(number)] for number in range(labels))
    if not all(isinstance(label, str) and 0 < len(label) <= _LONGEST_LABEL for label in found):
        raise AdapterError(
            f"{MODEL_CONFIG_FILE}: id2label has a label that is not a text of 1 to {_LONGEST_LABEL} letters"
        )
    return found


def _embedding(folder: Path) -> tuple[PoolingKind | None, bool | None]:
    """Return pooling and normalisation from the files that sentence-transformers writes."""
    if not (folder / POOLING_FILE).is_file():
        return None, None
    config = _json(folder, POOLING_FILE)
    mode = config.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else mode if isinstance(mode, list) else []
    modes = modes or [key.removeprefix("pooling_mode_") for key, value in config.items() if value is True]
    modes = [each for each in modes if each != "include_prompt"]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise AdapterError(
            f"{POOLING_FILE}: pooling {', '.join(map(str, modes))[:100] or 'of no kind'} is not supported; supported "
            "are mean_tokens, weightedmean_tokens and lasttoken, one at a time"
        )
    kinds = _module_types(folder)
    if unknown := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
        raise AdapterError(f"{MODULES_FILE}: module {unknown[0][:100]} is not supported")
    return _MODES[modes[0]], "Normalize" in kinds


def _module_types(folder: Path) -> list[str]:
    if not (folder / MODULES_FILE).is_file():
        return []
    try:
        with (folder / MODULES_FILE).open("rb") as stream:
            listed = msgspec.json.decode(stream.read(TASK_FILES[MODULES_FILE]), type=list[_Module])
    except (OSError, msgspec.DecodeError) as error:
        raise AdapterError(f"{MODULES_FILE}: {error}") from error
    return [each.type.rpartition(".")[2] for each in listed]


class _Module(msgspec.Struct):
    type: str


def split_score(
    entries: Mapping[str, TensorEntry], geometry: ModelGeometry | None
) -> tuple[dict[str, TensorEntry], tuple[ModuleTensors, ...]]:
    """Separate the score head from the other tensors of an adapter.

    Args:
        entries: all tensors.
        geometry: sizes of the base. None if the base is unknown; the head is then on layer 0.

    Returns:
        The other tensors, and a list with the head as a module of the last layer. The list is empty without a head. The
        number of labels is the module's rank.

    Raises:
        AdapterError: the head has a bias, or is not a matrix that fits the base.
    """
    rest = dict[str, TensorEntry]()
    found = list[TensorEntry]()
    for name, entry in entries.items():
        match = _SCORE_KEY.fullmatch(name)
        if match is None:
            rest[name] = entry
        elif match[1] == "bias":
            raise AdapterError(f"{WEIGHTS_FILE}: tensor {name}: a score head with a bias is not supported")
        else:
            found.append(entry)
    if not found:
        return rest, ()
    if len(found) > 1:
        raise AdapterError(f"{WEIGHTS_FILE}: tensors {found[0].name} and {found[1].name} are the same matrix")
    (weight,) = found
    if weight.dtype not in EXPONENTS or len(weight.shape) != 2 or not 0 < weight.shape[0] <= _MAX_LABELS:
        raise AdapterError(
            f"{WEIGHTS_FILE}: tensor {weight.name} is {weight.dtype} {list(weight.shape)}; expected a matrix of "
            f"{', '.join(EXPONENTS)} with a row for each label, at most {_MAX_LABELS}"
        )
    if geometry is not None and weight.shape[1] != geometry.hidden_size:
        raise AdapterError(
            f"{WEIGHTS_FILE}: tensor {weight.name} has shape {list(weight.shape)}; the base model's hidden states have "
            f"{geometry.hidden_size} numbers"
        )
    layer = 0 if geometry is None else geometry.layers - 1
    nothing = TensorEntry(weight.name, weight.dtype, (0, weight.shape[0]), weight.stop, weight.stop)
    return rest, (ModuleTensors(layer, SCORE, weight.shape[0], 1.0, weight, nothing),)
