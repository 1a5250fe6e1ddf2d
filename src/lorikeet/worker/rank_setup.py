"""Loads a rank's share of the model and allocates its device arena."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lorikeet.config import DEVICES, ConfigError, EngineSettings, Settings
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.process_tuning import keep_freed_memory
from lorikeet.kernels import huge_pages
from lorikeet.kernels.backends import choose_kernels
from lorikeet.kernels.base import Kernels, torch_dtype
from lorikeet.models.config import ModelConfig, read_model_config
from lorikeet.models.decoder import Decoder
from lorikeet.models.loading import load_weights
from lorikeet.models.parallel import RankGroup
from lorikeet.models.weights import DecoderWeights, pack_weights
from lorikeet.presets import MERGING_MODES, MergeBy, resolve_preset
from lorikeet.worker.merging import Merger, linear_bytes

_MAX_PRISTINE_SHARE = 0.5
"""Pristine weights that would take more than this share of a CUDA device's free memory are kept on the host."""


@dataclass(frozen=True)
class RankModel:
    """One rank's share of the model.

    Attributes:
        config: the whole model's.
        decoder: the rank's share.
        kernels: the kernel backend.
        dtype, device: of weights, KV and adapters.
        geometry: sizes of the rank's share.
        merger: merges adapters into the decoder's weights; None if the preset never merges.
        weights: in what form the linear weights are, in words.
    """

    config: ModelConfig
    decoder: Decoder
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    geometry: ModelGeometry
    merger: Merger | None = None
    weights: str = ""


def load_rank(
    settings: Settings, folder: Path, group: RankGroup, progress: Callable[[str, int, int], None] | None = None
) -> RankModel:
    """Load one rank's share of the model.

    Raises:
        ConfigError: dtype, device or preset is unknown, or the preset merges adapters into weights that are quantised.
        ModelConfigError: the model is not supported, or does not split over the ranks.
        WeightError: the weights do not fit the config.
    """
    config = read_model_config(folder)
    config.check_divides(group.size)
    dtype, device = _dtype(settings, config), rank_device(settings, group.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels are launched on the thread's current device
        gc.collect()  # free the memory of closed engines in this process
        torch.cuda.empty_cache()
    else:
        keep_freed_memory()
    weights = load_weights(
        folder,
        config,
        dtype,
        device,
        rank=group.rank,
        tensor_parallel=group.size,
        load_format=settings.model.load_format,
        quantization=settings.model.quantization,
        progress=progress,
    )
    name, preset = resolve_preset(settings.engine.preset)
    merges = preset.batching_mode in MERGING_MODES
    if merges and weights.are_quantized:
        raise ConfigError(
            f"preset {name}: merges adapters into the weights, and these are quantised ({weights.stored}): choose "
            "another preset, or set quantization to none for weights in 16 bits"
        )
    try:
        kernels = choose_kernels(settings.engine.kernels, dtype, device)
    except ValueError as error:
        raise ConfigError(f"kernels: {error}") from error
    packed = pack_weights(weights, kernels, keep_plain=merges)
    geometry = config.geometry(dtype.itemsize, group.size)
    merger = None
    if merges:
        place = _pristine_device(weights, device, preset.merge_by)
        merger = Merger(weights, packed, kernels, geometry, preset.merge_by, place)
    decoder = Decoder(config, packed, kernels, group)
    return RankModel(config, decoder, kernels, dtype, device, geometry, merger, weights.stored)


def rank_device(settings: Settings, rank: int) -> torch.device:
    """Return the device of a rank.

    Raises:
        ConfigError: there is no such device.
    """
    name = settings.engine.device
    if name not in DEVICES:
        raise ConfigError(f"device: {name!r} is not one of {', '.join(DEVICES)}")
    if name == "cuda" and torch.version.cuda is None:
        raise ConfigError(f"device: torch {torch.__version__} is built without CUDA; install a build with CUDA")
    if name == "cuda" and torch.cuda.device_count() <= rank:
        raise ConfigError(f"device: rank {rank} needs a CUDA device, torch sees {torch.cuda.device_count()}")
    return torch.device(name, rank) if name == "cuda" else torch.device(name)


def allocate_arena(model: RankModel, blocks: int, engine: EngineSettings) -> Tensor:
    """Return a zeroed device arena, ``[blocks, elements]``.

    On a CPU it is page-aligned, and the system provides its pages when they are first written, unless
    ``touch_memory`` is set.
    """
    elements = model.geometry.block_elements(engine.block_size)
    if model.device.type != "cpu":
        return torch.zeros(blocks, elements, dtype=model.dtype, device=model.device)
    arena = huge_pages.allocate(blocks * elements, model.dtype).view(blocks, elements)
    return arena.zero_() if engine.touch_memory else arena


def _dtype(settings: Settings, config: ModelConfig) -> torch.dtype:
    name = config.dtype if settings.model.dtype == "auto" else settings.model.dtype
    try:
        return torch_dtype(name)
    except ValueError as error:
        raise ConfigError(f"dtype: {error}") from error


def _pristine_device(weights: DecoderWeights, device: torch.device, merge_by: MergeBy) -> torch.device:
    """Return where pristine weights are kept: on the device if they fit and deltas are merged, else on the host."""
    if device.type == "cpu":
        return device
    fits = linear_bytes(weights) <= _MAX_PRISTINE_SHARE * torch.cuda.mem_get_info(device)[0]
    return device if fits and merge_by is MergeBy.DELTA else torch.device("cpu")
