"""Tiny random checkpoints of models that see, and random images for them as their processors would give them."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from lorikeet.core.images import ImageTensor, PromptImage
from tests.models.library_bases import VOCABULARY, make_base, random_ids, small_values

IMAGE = VOCABULARY - 1
"""The placeholder's token, which random prompts lack."""
Tensors = dict[str, Tensor]

_FIXED: dict[str, Any] = {"image_size": 8, "patch_size": 4}
_TILES: dict[str, Any] = {"image_grid_pinpoints": [[8, 16], [16, 8], [16, 16]]}
_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
_GRID = {"depth": 3, "out_hidden_size": 32, "patch_size": 4, "spatial_merge_size": 2}


class Kind(NamedTuple):
    """A family of models that see.

    Attributes:
        config: keys of its config that differ from those of ``library_bases``; parts are nested.
        image: returns the tensors of an image, by the number of the image and the generator.
        joins_at: the dimension at which tensors of several images are joined, if it is not the first.
    """

    config: dict[str, Any]
    image: Callable[[int, torch.Generator], Tensors]
    joins_at: Mapping[str, int] = {}


def _noise(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def _plain(number: int, generator: torch.Generator) -> Tensors:
    return {"pixel_values": _noise(generator, 1, 3, 8, 8)}


def _tiled(number: int, generator: torch.Generator) -> Tensors:
    """A high image of two tiles, or a wide one, after the whole image."""
    size = [12, 7] if number % 2 else [7, 15]
    return {"pixel_values": _noise(generator, 1, 3, 3, 8, 8), "image_sizes": torch.tensor([size])}


def _grid(number: int, generator: torch.Generator) -> Tensors:
    height, width = ((4, 6), (2, 4), (6, 2))[number % 3]
    pixels = 3 * 2 * 4 * 4
    return {
        "pixel_values": _noise(generator, height * width, pixels),
        "image_grid_thw": torch.tensor([[1, height, width]]),
    }


def _split(number: int, generator: torch.Generator) -> Tensors:
    tiles = 1 + 2 * (number % 2)
    return {
        "pixel_values": _noise(generator, 1, tiles, 3, 8, 8),
        "pixel_attention_mask": torch.ones(1, tiles, 8, 8, dtype=torch.bool),
    }


def _patches(number: int, generator: torch.Generator) -> Tensors:
    """Flat patches with their places, of which four become one."""
    width = 4
    places = torch.cartesian_prod(torch.arange(width), torch.arange(2))
    return {"pixel_values": torch.rand(1, 2 * width, 48, generator=generator), "image_position_ids": places[None]}


def _sized(number: int, generator: torch.Generator) -> Tensors:
    """One padded size, as several images of a prompt have it."""
    return {"pixel_values": _noise(generator, 1, 3, 8, 8), "image_sizes": torch.tensor([[8, 8]])}


KINDS: dict[str, Kind] = {
    "llava": Kind({"vision_config": _FIXED}, _plain),
    "llava_onevision": Kind({"vision_config": _FIXED, **_TILES, "vision_aspect_ratio": "anyres_max_9"}, _tiled),
    "smolvlm": Kind(
        {"vision_config": _FIXED, "scale_factor": 2}, _split, {"pixel_values": 1, "pixel_attention_mask": 1}
    ),
    "idefics3": Kind(
        {"vision_config": _FIXED, "scale_factor": 2}, _split, {"pixel_values": 1, "pixel_attention_mask": 1}
    ),
    "qwen2_5_vl": Kind(
        {"vision_config": {**_GRID, "fullatt_block_indexes": [1], "window_size": 16}, "text_config": _AXES}, _grid
    ),
    "qwen3_vl": Kind(
        {
            "vision_config": {**_GRID, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
            "text_config": _AXES,
        },
        _grid,
    ),
    "qwen3_5": Kind(
        {
            "vision_config": {**_GRID, "num_position_embeddings": 16},
            "text_config": {
                "head_dim": 16,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.75,
                    "mrope_section": [2, 2, 2],
                    "mrope_interleaved": True,
                },
            },
        },
        _grid,
    ),
    "gemma4": Kind(
        {"vision_config": {"patch_size": 4, "pooling_kernel_size": 2, "num_key_value_heads": 4}},
        _patches,
    ),
    "gemma3": Kind({"vision_config": _FIXED, "mm_tokens_per_image": 4}, _plain),
    "mistral3": Kind({"vision_config": _FIXED, "spatial_merge_size": 1}, _sized),
    "internvl": Kind({"vision_config": {"image_size": [8, 8], "patch_size": [4, 4]}, "image_seq_length": 1}, _plain),
    "llama4": Kind(
        {
            "vision_config": {
                **_FIXED,
                "vision_output_dim": 32,
                "intermediate_size": 128,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
                "pixel_shuffle_ratio": 0.5,
            }
        },
        _plain,
    ),
    "paligemma": Kind({"vision_config": {**_FIXED, "projection_dim": 32}, "projection_dim": 32}, _plain),
    "llava_next": Kind({"vision_config": _FIXED, **_TILES}, _tiled),
}


def make_vision_base(folder: Path, kind: str) -> PreTrainedModel:
    """Save a tiny checkpoint of a kind, and return transformers' model of it."""
    found = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind])
    values = {"image_token_id": IMAGE, **KINDS[kind].config}
    return make_base(folder, kind, lambda config: _set(config, values), found)


def _set(config: PreTrainedConfig, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        part = getattr(config, key, None)
        if part is None and key in config.sub_configs:
            part_class = config.sub_configs[key]
            part = part_class(**small_values(part_class))
            setattr(config, key, part)
        if isinstance(part, PreTrainedConfig):
            _set(part, value)
        else:
            setattr(config, key, value)


class Seen(NamedTuple):
    """A prompt with images, for the engine and for transformers.

    Attributes:
        token_ids: the prompt.
        images: its images.
        given: the arguments of transformers' model besides the tokens.
    """

    token_ids: list[int]
    images: tuple[PromptImage, ...]
    given: Tensors


def prompt_with(
    model: PreTrainedModel, kind: str, numbers: Sequence[int], seed: int, words: Sequence[int] = (5, 3, 4, 6)
) -> Seen:
    """Return a prompt with images between random words.

    Args:
        model: transformers' model, which counts the placeholders of each image.
        kind: a key of ``KINDS``.
        numbers: the images, by numbers.
        seed: seed of the words.
        words: number of words before each image and after the last.
    """
    token_ids: list[int] = []
    images: list[PromptImage] = []
    joined: dict[str, list[Tensor]] = {}
    for at, number in enumerate(numbers):
        token_ids += [1 + each % (IMAGE - 1) for each in random_ids(words[at], seed + at)]
        tensors = KINDS[kind].image(number, torch.Generator().manual_seed(number))
        length = placeholders(model, tensors)
        images.append(PromptImage(_digest(kind, number), len(token_ids), length, packed(tensors)))
        token_ids += [IMAGE] * length
        for name, tensor in tensors.items():
            joined.setdefault(name, []).append(tensor)
    token_ids += [1 + each % (IMAGE - 1) for each in random_ids(words[len(numbers)], seed + len(numbers))]
    given = {name: torch.cat(each, KINDS[kind].joins_at.get(name, 0)) for name, each in joined.items()}
    return Seen(token_ids, tuple(images), given)


def placeholders(model: PreTrainedModel, tensors: Tensors) -> int:
    """Return the number of placeholders of an image."""
    with torch.inference_mode():
        output = model.get_image_features(**tensors, return_dict=True)
    found = output.last_hidden_state if output.get("pooler_output") is None else output.pooler_output
    parts = [found] if isinstance(found, Tensor) else list(found)
    return sum(each.flatten(0, -2).shape[0] for each in parts)


def packed(tensors: Tensors) -> dict[str, ImageTensor]:
    """Return tensors as a request has them."""
    return {
        name: ImageTensor(str(each.dtype).removeprefix("torch."), tuple(each.shape), each.numpy().tobytes())
        for name, each in tensors.items()
    }


def marks(model: PreTrainedModel, token_ids: Tensor, prompt_tokens: int) -> Tensors:
    """Return the arguments that mark placeholders, as processors give them.

    PaliGemma sees a prompt with images in both directions, and its answers are causal.
    """
    kind = model.config.model_type
    if kind == "paligemma" and IMAGE in token_ids:
        return {"token_type_ids": (torch.arange(token_ids.shape[1]) >= prompt_tokens).long()[None]}
    if kind == "gemma3":
        return {"token_type_ids": (token_ids == IMAGE).long()}
    return {"mm_token_type_ids": (token_ids == IMAGE).int()} if hasattr(model.base_model, "get_rope_index") else {}


def _digest(kind: str, number: int) -> bytes:
    return hashlib.sha256(f"{kind} {number}".encode()).digest()
