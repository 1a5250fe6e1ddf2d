"""Loads model weights from safetensors files into the tensors of one rank, or fills them with random values.

``WeightLayout`` maps every checkpoint tensor to the part of the rank's tensors that it fills.
"""

import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lorikeet.core.messages import LOADING_WEIGHTS
from lorikeet.kernels.base import LayerWeights
from lorikeet.models.config import ROW_PARALLEL, ModelConfig, read_json_section
from lorikeet.models.weights import DecoderWeights

_WHOLE = slice(None)
_EMBEDDING = "model.embed_tokens.weight"
_LM_HEAD = "lm_head.weight"

# Some checkpoints carry the rotary frequencies, which follow from the config.
_ALWAYS_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

_PATHS = {
    **{module: f"self_attn.{module}_proj" for module in ("q", "k", "v", "o")},
    **{module: f"mlp.{module}_proj" for module in ("gate", "up", "down")},
}


class WeightTarget(NamedTuple):
    """Destination of a checkpoint tensor.

    Attributes:
        view: the tensor that it is copied to.
        shape: its shape in the checkpoint.
        part: the slice of it that this rank holds.
    """

    view: Tensor
    shape: tuple[int, ...]
    part: tuple[slice, ...]


class WeightLayout:
    """Uninitialised weights of one rank, and the destination of every checkpoint tensor.

    Args:
        config: configuration of the model.
        dtype, device: of the weights.
        rank, tensor_parallel: which share of the model.

    Attributes:
        weights: the weights, to be filled through ``targets``.
        targets: destinations by name in the checkpoint.
        copies: by name, checkpoint tensors that are not loaded but must equal another one, with the other's name.

    Raises:
        ModelConfigError: the model does not split over the ranks.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, rank: int, tensor_parallel: int
    ) -> None:
        self._config = config
        self._rank = rank
        self._ranks = tensor_parallel
        self._dtype = dtype
        self._device = device
        self._shapes = config.module_shapes()
        self.targets: dict[str, WeightTarget] = {}
        config.check_divides(tensor_parallel)
        self.weights = self._decoder()
        self.copies = {_LM_HEAD: _EMBEDDING} if config.tie_word_embeddings else {}

    def is_ignored(self, name: str) -> bool:
        """Return whether a checkpoint may hold ``name`` though the model does not need it."""
        return name in self.copies or _ALWAYS_IGNORED.fullmatch(name) is not None

    def _decoder(self) -> DecoderWeights:
        config = self._config
        embedding = self._plain(_EMBEDDING, config.vocab_size, config.hidden_size)
        layers = tuple(self._layer(f"model.layers.{layer}.") for layer in range(config.layers))
        final_norm = self._plain("model.norm.weight", config.hidden_size)
        tied = config.tie_word_embeddings
        lm_head = embedding if tied else self._plain(_LM_HEAD, config.vocab_size, config.hidden_size)
        return DecoderWeights(embedding, layers, final_norm, lm_head)

    def _layer(self, prefix: str) -> LayerWeights:
        config = self._config
        qkv, qkv_bias = self._fused(prefix, ("q", "k", "v"), biased=config.qkv_bias)
        o, o_bias = self._fused(prefix, ("o",), biased=config.o_bias)
        gate_up, gate_up_bias = self._fused(prefix, ("gate", "up"), biased=config.mlp_bias)
        down, down_bias = self._fused(prefix, ("down",), biased=config.mlp_bias)
        return LayerWeights(
            input_norm=self._plain(f"{prefix}input_layernorm.weight", config.hidden_size),
            post_norm=self._plain(f"{prefix}post_attention_layernorm.weight", config.hidden_size),
            qkv=qkv,
            o=o,
            gate_up=gate_up,
            down=down,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            q_norm=self._plain(f"{prefix}self_attn.q_norm.weight", config.head_dim) if config.qk_norm else None,
            k_norm=self._plain(f"{prefix}self_attn.k_norm.weight", config.head_dim) if config.qk_norm else None,
        )

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _plain(self, name: str, *shape: int) -> Tensor:
        """Allocate a tensor that every rank holds whole."""
        view = self._empty(*shape)
        self.targets[name] = WeightTarget(view, shape, (_WHOLE,) * len(shape))
        return view

    def _fused(self, prefix: str, modules: tuple[str, ...], *, biased: bool) -> tuple[Tensor, Tensor | None]:
        """Allocate this rank's share of the stacked weight of ``modules``, and of their bias."""
        shards = [self._config.module_shard(module, self._rank, self._ranks) for module in modules]
        rows = [shard.outputs.stop - shard.outputs.start for shard in shards]
        columns = shards[0].inputs.stop - shards[0].inputs.start
        weight = self._empty(sum(rows), columns)
        bias = self._empty(sum(rows)) if biased else None
        holds_bias = self._rank == 0 or not ROW_PARALLEL.intersection(modules)
        for index, (module, shard) in enumerate(zip(modules, shards, strict=True)):
            place = slice(sum(rows[:index]), sum(rows[: index + 1]))
            shape = self._shapes[module]
            path = prefix + _PATHS[module]
            full = (shape.out_features, shape.in_features)
            self.targets[f"{path}.weight"] = WeightTarget(weight[place], full, (shard.outputs, shard.inputs))
            if bias is not None:
                self.targets[f"{path}.bias"] = WeightTarget(bias[place], (shape.out_features,), (shard.outputs,))
        return weight, bias if holds_bias else None


Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_FLOATS = ("BF16", "F16", "F32")
_DUMMY_STD = 0.02


class WeightError(ValueError):
    """The weights of a checkpoint are broken or do not match its config; the message names file and tensor."""


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
    """Load the weights of one rank. Of split tensors only the rank's slice is read.

    Args:
        folder: a checkpoint with ``model.safetensors``, or with an index and shards. Not read for ``dummy``.
        config: configuration of the checkpoint.
        dtype: dtype of the loaded weights.
        device: device of the loaded weights.
        rank, tensor_parallel: which share of the model.
        load_format: ``auto`` for safetensors, ``dummy`` for small random weights of the right shapes.
        seed: seed of dummy weights; on one kind of device all ranks get shares of the same model.
        progress: called with (stage, tensors done, total tensors).

    Raises:
        WeightError: a tensor is missing, unknown, or of a wrong shape or dtype; a file is broken; there are only
            pickle files; or ``load_format`` is unknown.
        ModelConfigError: the model does not split over the ranks.
    """
    layout = WeightLayout(config, dtype, torch.device(device), rank, tensor_parallel)
    report = progress or (lambda stage, done, total: None)
    if load_format == "dummy":
        _fill_randomly(layout, seed, report)
    elif load_format == "auto":
        _fill_from_files(folder, layout, report)
    else:
        raise WeightError(f"load format {load_format!r} is not one of auto, dummy")
    return layout.weights


def _fill_from_files(folder: Path, layout: WeightLayout, progress: Progress) -> None:
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
        progress(LOADING_WEIGHTS, done, total)
        for name, tensor in _read(file, {name: layout.targets[name] for name in names}):
            layout.targets[name].view.copy_(tensor)
            done += 1
            progress(LOADING_WEIGHTS, done, total)
    for name, other in layout.copies.items():
        if name in where:
            _check_equal(where[name], name, other, layout.targets[other])


def _check_equal(file: Path, name: str, other: str, target: WeightTarget) -> None:
    """Check that a tensor which is not loaded equals the loaded tensor to which it is tied."""
    for _, tensor in _read(file, {name: target}):
        if not torch.equal(tensor.to(target.view), target.view):
            raise WeightError(
                f"{file}: {name} differs from {other}, to which config.json ties it: if it was trained separately, set "
                "tie_word_embeddings to false"
            )


def _locate_tensors(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor of the checkpoint."""
    if (folder / INDEX_FILE).is_file():
        index = read_json_section(folder / INDEX_FILE).get("weight_map")
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


def _read(file: Path, targets: dict[str, WeightTarget]) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's slice of each tensor, after checking shape and dtype."""
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


def _fill_randomly(layout: WeightLayout, seed: int, progress: Progress) -> None:
    for done, (name, target) in enumerate(layout.targets.items()):
        if name.endswith("norm.weight"):
            target.view.fill_(1.0)
        else:
            # One generator per tensor, and the whole tensor before slicing, so every number of ranks gives one model.
            place = target.view.device
            generator = torch.Generator(place).manual_seed(zlib.crc32(name.encode(), seed))
            target.view.copy_(torch.randn(target.shape, generator=generator, device=place)[target.part] * _DUMMY_STD)
        progress("making random weights", done + 1, len(layout.targets))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    more = f" and {len(names) - 5} more tensors" if len(names) > 5 else ""
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'}"
