"""Loads a rank's share of the model and allocates its device arena."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from lorikeet.config import DEVICES, ConfigError, EngineSettings, Settings
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.messages import BaseInfo
from lorikeet.core.process_tuning import keep_freed_memory
from lorikeet.kernels import huge_pages
from lorikeet.kernels.backends import choose_kernels
from lorikeet.kernels.devices import torch_dtype
from lorikeet.kernels.interface import Batch, Kernels
from lorikeet.kernels.lora import LoraBatch, LoraWeights
from lorikeet.kernels.quantized import GROUP
from lorikeet.memory.sizing import stored_geometry
from lorikeet.models.config import (
    BaseConfig,
    ModelConfig,
    TransformersConfig,
    max_model_len,
    read_model_config,
    wants_own_decoder,
)
from lorikeet.models.decoder import Decoder
from lorikeet.models.gguf import GGUF_FILE
from lorikeet.models.image_features import SeesImages, TowerError
from lorikeet.models.json_section import ModelConfigError, read_json_section
from lorikeet.models.loading import bits_on_load, load_weights
from lorikeet.models.parallel import RankGroup
from lorikeet.models.quantization_config import GGUF, read_quantization
from lorikeet.models.weights import DecoderWeights, pack_weights
from lorikeet.policies import BATCHING
from lorikeet.presets import MergeBy, resolve_preset
from lorikeet.worker.merging import Merger, linear_bytes

_MAX_PRISTINE_SHARE = 0.5
"""Pristine weights that would take more than this share of a CUDA device's free memory are kept on the host."""


@dataclass(frozen=True)
class RankModel:
    """One rank's share of the model.

    Attributes:
        config: configuration of the whole model, with all pipeline stages.
        decoder: the rank's share of our decoder, or a model of transformers.
        kernels: the kernel backend.
        dtype, device: dtype and device of weights, KV and adapters.
        geometry: sizes of the rank's share.
        merger: merges adapters into the decoder's weights; None if the preset never merges.
        weights: description of the form of the linear weights.
        whole_geometry: sizes of the whole model; None if the rank holds all of it.
        attention: the end of a name of the implementation, if transformers computes attention itself.
        tower: the part that computes images; None if they are refused.
        images_refused: why images are refused; empty if they are not.
    """

    config: BaseConfig
    decoder: "RunsModel"
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    geometry: ModelGeometry
    merger: Merger | None = None
    weights: str = ""
    whole_geometry: ModelGeometry | None = None
    attention: str = ""
    tower: SeesImages | None = None
    images_refused: str = ""

    def base_info(self) -> BaseInfo:
        """Return the description of the model for clients of the engine."""
        config = self.config
        how = "lorikeet"
        embed_size = 0
        if isinstance(config, ModelConfig):
            embed_size = config.hidden_size
        else:
            how = f"transformers {config.version}{self.attention}"
        dtype = str(self.dtype).removeprefix("torch.")
        return BaseInfo(
            config.architecture,
            how,
            config.vocab_size,
            config.eos_token_ids,
            dtype,
            embed_size,
            takes_images=self.tower is not None,
            images_refused=self.images_refused,
        )


class RunsModel(Protocol):
    """The model of a rank: its share of our decoder, or the modules of transformers.

    Attributes:
        fits_graphs: whether the model's steps can be captured in CUDA graphs, if the kernels can.
    """

    @property
    def fits_graphs(self) -> bool:
        """Whether steps can be captured in CUDA graphs."""
        ...

    def view_kv(self, arena: Tensor, block_size: int) -> Tensor:
        """Return a view of ``arena [blocks, elements]`` in the shape that the other methods take as ``kv``."""
        ...

    def forward(self, batch: Batch, kv: Tensor) -> Tensor:
        """Compute one step, and return the logits ``[S, vocab]`` of its sample rows."""
        ...

    def hidden(self, batch: Batch, kv: Tensor) -> Tensor:
        """Compute the layers of one step, store its keys and values, and return ``[S, hidden]``."""
        ...

    def head(self, hidden: Tensor, lora: LoraBatch | None = None) -> Tensor:
        """Return the logits ``[S, vocab]`` for rows of :meth:`hidden`.

        ``lora`` has the rows' adapters, if any has extras.
        """
        ...

    def prepare(self, adapter: LoraWeights) -> None:
        """Compute the extras of an adapter that depend on the base, into the adapter's blocks."""
        ...


def read_base_config(settings: Settings, folder: Path) -> BaseConfig:
    """Return the base model's config, for our decoder or for the modules of transformers.

    Raises:
        ModelConfigError: the model is not supported, or does not split over the ranks.
    """
    wanted = settings.model.model_impl
    config: BaseConfig
    if wants_own_decoder(folder, wanted):
        config = read_model_config(folder)
    else:
        # This module imports transformers, which takes seconds.
        from lorikeet.models.transformers_decoder import read_transformers_config

        config = read_transformers_config(folder)
    config.check_divides(settings.engine.tensor_parallel, settings.engine.pipeline_parallel)
    return config


def load_rank(
    settings: Settings,
    folder: Path,
    group: RankGroup,
    progress: Callable[[str, int, int], None] | None = None,
    *,
    gpu: int | None = None,
) -> RankModel:
    """Load one rank's share of the model.

    Args:
        settings: settings of the engine.
        folder: folder of the model.
        group: the rank's group.
        progress: function called with (stage, done, total).
        gpu: number of the rank's GPU, if it differs from the rank's number.

    Raises:
        ConfigError: dtype, device or preset is unknown, or the preset merges adapters into weights that are quantised.
        ModelConfigError: the model is not supported, or does not split over the ranks.
        WeightError: the weights do not fit the config.
    """
    config = read_base_config(settings, folder)
    dtype = _dtype(settings, config)
    device = rank_device(settings, group.number if gpu is None else gpu)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Kernels are launched on the thread's current device.
        gc.collect()  # This frees the memory of closed engines in this process.
        torch.cuda.empty_cache()
    else:
        keep_freed_memory()
    if not isinstance(config, ModelConfig):
        return _load_transformers(settings, folder, config, dtype, device, progress)
    config = config.for_lengths(max_model_len(settings, config))
    share = config.stage(group.stage, group.stages)
    weights = load_weights(
        folder,
        share,
        dtype,
        device,
        rank=group.rank,
        tensor_parallel=group.size,
        load_format=settings.model.load_format,
        quantization=settings.model.quantization,
        progress=progress,
    )
    name, preset = resolve_preset(settings.engine.preset)
    merges = BATCHING.load(preset.batching).merges
    if merges and weights.are_quantized:
        raise ConfigError(
            f"preset {name}: merges adapters into the weights, and these are quantised ({weights.stored}): choose "
            "another preset, or set quantization to none for weights in 16 bits"
        )
    kernels = _kernels(settings, dtype, device)
    packed = pack_weights(weights, kernels, keep_plain=merges)
    geometry = stored_geometry(settings.engine, share.geometry(dtype.itemsize, group.size))
    merger = None
    if merges:
        place = _pristine_device(weights, device, preset.merge_by)
        merger = Merger(weights, packed, kernels, geometry, preset.merge_by, place)
    decoder = Decoder(share, packed, kernels, group, geometry.kv_bits)
    whole = stored_geometry(settings.engine, config.geometry(dtype.itemsize))
    tower = None
    images_refused = _why_without_images(
        config, group, weights.stored if weights.are_quantized else "", geometry.kv_bits
    )
    if not images_refused:
        # This module imports transformers, which takes seconds.
        from lorikeet.models.tower_loading import load_tower

        try:
            tower = load_tower(folder, dtype, device, load_format=settings.model.load_format)
        except TowerError as error:
            images_refused = str(error)
    if tower is not None:
        geometry = msgspec.structs.replace(geometry, tower=tower.modules)
        whole = msgspec.structs.replace(whole, tower=tower.modules)
    return RankModel(
        config,
        decoder,
        kernels,
        dtype,
        device,
        geometry,
        merger,
        weights.stored,
        whole,
        tower=tower,
        images_refused=images_refused,
    )


def _why_without_images(config: ModelConfig, group: RankGroup, quantized: str, kv_bits: int) -> str:
    """Return why images are refused with our decoder; empty if they are not."""
    if not config.has_other_parts:
        return f"{config.architecture} has no part for images"
    if group.size * group.stages > 1:
        return "they need one rank"
    if quantized:
        return f"they need weights in 16 or 32 bits with Lorikeet's decoder, and these are quantised ({quantized})"
    return "they need KV in 16 or 32 bits with Lorikeet's decoder" if kv_bits else ""


def _load_transformers(
    settings: Settings,
    folder: Path,
    config: TransformersConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str, int, int], None] | None,
) -> RankModel:
    """Load a model of transformers, and check that Lorikeet can serve it."""
    from lorikeet.models.transformers_attention import UnsupportedAttention
    from lorikeet.models.transformers_decoder import TransformersDecoder, load_model

    if settings.engine.deterministic:
        raise ConfigError(
            f"deterministic: needs Lorikeet's own decoder, and {config.architecture} runs by transformers' modules, "
            "whose products depend on the batch: leave --deterministic out"
        )
    if settings.engine.kv_cache_dtype == "int8":
        raise ConfigError(
            f"kv_cache_dtype: int8 needs Lorikeet's own decoder, and {config.architecture} runs by transformers' "
            "modules: leave --kv-cache-dtype out"
        )
    quantized = read_quantization(read_json_section(folder / "config.json"))
    method = GGUF if (folder / GGUF_FILE).is_file() else quantized.method if quantized else ""
    bits = bits_on_load(settings.model.quantization, method, folder)
    kernels = _kernels(settings, dtype, device)
    model = load_model(folder, dtype, device, load_format=settings.model.load_format, progress=progress)
    try:
        decoder = TransformersDecoder(model, kernels, max_model_len(settings, config), bits)
    except UnsupportedAttention as error:
        raise ModelConfigError(f"{folder / 'config.json'}: {config.architecture} cannot be served: {error}") from error
    config = msgspec.structs.replace(config, vocab_size=decoder.vocab_size)
    names = {GGUF: "GGUF"}
    stored = str(dtype).removeprefix("torch.")
    if method:
        stored = f"{names.get(method, method)} dequantised to {stored}"
    if bits:
        stored = f"int{bits} in groups of {GROUP}, quantised from {stored}"
    geometry = stored_geometry(settings.engine, decoder.geometry)
    if decoder.tower is not None:
        geometry = msgspec.structs.replace(geometry, tower=decoder.tower.modules)
    attention = decoder.way.value
    return RankModel(
        config,
        decoder,
        kernels,
        dtype,
        device,
        geometry,
        weights=stored,
        attention=attention,
        tower=decoder.tower,
        images_refused=decoder.images_refused,
    )


def _kernels(settings: Settings, dtype: torch.dtype, device: torch.device) -> Kernels:
    try:
        one_order = settings.engine.deterministic
        kernels = choose_kernels(settings.engine.kernels, dtype, device, one_order=one_order)
    except ValueError as error:
        raise ConfigError(f"kernels: {error}") from error
    for name in ("lora_dtype", "kv_cache_dtype"):
        if getattr(settings.engine, name) == "int8" and not kernels.reads_codes:
            flag = name.replace("_", "-")
            raise ConfigError(f"{name}: int8 needs the CPU kernels, not {kernels.name}: leave --{flag} out")
    return kernels


def rank_device(settings: Settings, rank: int) -> torch.device:
    """Return the device of a rank.

    Raises:
        ConfigError: the device does not exist.
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

    On a CPU the arena is page-aligned, and the system provides its pages when they are first written, unless
    ``touch_memory`` is set.
    """
    elements = model.geometry.block_elements(engine.block_size)
    if model.device.type != "cpu":
        return torch.zeros(blocks, elements, dtype=model.dtype, device=model.device)
    arena = huge_pages.allocate(blocks * elements, model.dtype).view(blocks, elements)
    return arena.zero_() if engine.touch_memory else arena


def _dtype(settings: Settings, config: BaseConfig) -> torch.dtype:
    name = config.dtype if settings.model.dtype == "auto" else settings.model.dtype
    try:
        return torch_dtype(name)
    except ValueError as error:
        raise ConfigError(f"dtype: {error}") from error


def _pristine_device(weights: DecoderWeights, device: torch.device, merge_by: MergeBy) -> torch.device:
    """Return the device of the pristine weights: the GPU if they fit and deltas are merged, else the host."""
    if device.type == "cpu":
        return device
    fits = linear_bytes(weights) <= _MAX_PRISTINE_SHARE * torch.cuda.mem_get_info(device)[0]
    return device if fits and merge_by is MergeBy.DELTA else torch.device("cpu")
