"""Weights from safetensors, whole or one tensor-parallel rank's share; every tensor is matched or named."""

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lorikeet.models.checkpoint import read_settings
from lorikeet.models.config import ModelConfig
from lorikeet.models.layout import Layout, Target
from lorikeet.models.weights import DecoderWeights

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_FLOATS = ("BF16", "F16", "F32")
_DUMMY_STD = 0.02


class WeightError(ValueError):
    """A checkpoint's weights do not fit its config; the message names file and tensor."""


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    rank: int = 0,
    tensor_parallel: int = 1,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> DecoderWeights:
    """Load one rank's weights; of tensors that are split, only its slice is read.

    Args:
        folder: a checkpoint with ``model.safetensors``, or with its index and shards. Not read for ``dummy``.
        config: the checkpoint's.
        dtype: what the weights are converted to.
        device: where they go.
        rank, tensor_parallel: which share.
        load_format: ``auto`` for safetensors, ``dummy`` for small random weights of the right shapes.
        seed: of the dummy weights; all ranks draw the same model from it, on one kind of device.
        progress: called with (stage, tensors done, tensors in all).

    Raises:
        WeightError: a tensor is missing, unknown, or of a wrong shape or dtype; a file is broken; there are only
            pickle files; or ``load_format`` is unknown.
        ModelConfigError: the model does not split over the ranks.
    """
    layout = Layout(config, dtype, torch.device(device), rank, tensor_parallel)
    report = progress or (lambda stage, done, total: None)
    if load_format == "dummy":
        _fill_randomly(layout, seed, report)
    elif load_format == "auto":
        _fill_from_files(folder, layout, report)
    else:
        raise WeightError(f"load format {load_format!r} is not one of auto, dummy")
    return layout.weights


def _fill_from_files(folder: Path, layout: Layout, progress: Progress) -> None:
    where = _locate_tensors(folder)
    found = {name for name in where if not layout.is_ignored(name)}
    if missing := sorted(layout.targets.keys() - found):
        raise WeightError(f"{folder}: {_some(missing)} missing")
    if unknown := sorted(found - layout.targets.keys()):
        raise WeightError(f"{folder}: {_some(unknown)} not part of the model that config.json describes")
    done, total = 0, len(found)
    by_file: dict[Path, list[str]] = {}
    for name in sorted(found):
        by_file.setdefault(where[name], []).append(name)
    for file, names in by_file.items():
        progress("loading weights", done, total)
        for name, tensor in _read(file, {name: layout.targets[name] for name in names}):
            layout.targets[name].view.copy_(tensor)
            done += 1
            progress("loading weights", done, total)
    for name, other in layout.copies.items():
        if name in where:
            _check_equal(where[name], name, other, layout.targets[other])


def _check_equal(file: Path, name: str, other: str, target: Target) -> None:
    """Check that a tensor which is not read into the model is what the model has in its place."""
    for _, tensor in _read(file, {name: target}):
        if not torch.equal(tensor.to(target.view), target.view):
            raise WeightError(
                f"{file}: {name} is not {other}, to which config.json ties it: if it was trained on its own, set "
                "tie_word_embeddings to false"
            )


def _locate_tensors(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor of the checkpoint."""
    if (folder / INDEX_FILE).is_file():
        index = read_settings(folder / INDEX_FILE).get("weight_map")
        if not isinstance(index, dict):
            raise WeightError(f"{folder / INDEX_FILE}: weight_map: must be an object")
        outside = sorted({str(file) for file in index.values() if Path(str(file)).name != file})
        if outside:
            raise WeightError(f"{folder / INDEX_FILE}: weight_map: {outside[0]!r} is not a file of the folder")
        return {name: folder / file for name, file in index.items()}
    single = folder / SINGLE_FILE
    if single.is_file():
        try:
            with safe_open(single, framework="pt") as tensors:
                return dict.fromkeys(tensors.keys(), single)
        except SafetensorError as error:
            raise WeightError(f"{single}: is not a valid safetensors file: {error}") from error
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise WeightError(f"{folder / pickles[0]}: pickle files are not loaded, convert the model to safetensors")
    raise WeightError(f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}")


def _read(file: Path, targets: dict[str, Target]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor's slice for this rank, after checking that shape and dtype are as they must be."""
    try:
        with safe_open(file, framework="pt") as tensors:
            present = set(tensors.keys())
            for name, target in targets.items():
                if name not in present:
                    raise WeightError(f"{file}: {name} is missing, though the index names this file")
                stored = tensors.get_slice(name)
                shape, kind = tuple(stored.get_shape()), stored.get_dtype()
                if shape != target.shape:
                    raise WeightError(f"{file}: {name} has shape {list(shape)}, not {list(target.shape)}")
                if kind not in _FLOATS:
                    raise WeightError(f"{file}: {name} has dtype {kind}, not one of {', '.join(_FLOATS)}")
                yield name, stored[target.part]
    except (SafetensorError, OSError) as error:
        raise WeightError(f"{file}: cannot be read: {error}") from error


def _fill_randomly(layout: Layout, seed: int, progress: Progress) -> None:
    for done, (name, target) in enumerate(layout.targets.items()):
        if name.endswith("norm.weight"):
            target.view.fill_(1.0)
        else:
            # A generator per tensor, whole before it is sliced: every rank count gives the same model.
            place = target.view.device
            generator = torch.Generator(place).manual_seed(zlib.crc32(name.encode(), seed))
            target.view.copy_(torch.randn(target.shape, generator=generator, device=place)[target.part] * _DUMMY_STD)
        progress("making random weights", done + 1, len(layout.targets))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    more = f" and {len(names) - 5} more tensors" if len(names) > 5 else ""
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'}"
