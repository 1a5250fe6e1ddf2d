"""Tiny random checkpoints of models that see, and random images for them as their processors would give them."""

import hashlib
import inspect
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from lorikeet.core.images import ImageTensor, PromptImage
from lorikeet.kernels.reference import ReferenceKernels
from lorikeet.models.image_features import TowerError
from lorikeet.models.json_section import ModelConfigError
from lorikeet.models.transformers_attention import UnsupportedAttention
from lorikeet.models.transformers_decoder import TransformersDecoder, load_model
from tests.models.library_bases import NOT_TRIED, VOCABULARY, NotTried, make_base, random_ids, small_values

IMAGE = VOCABULARY - 1
"""The placeholder's token, which random prompts lack."""
_START, _END, _VIDEO, _AUDIO = range(VOCABULARY - 5, IMAGE)
"""Tokens before and after images, and those of other inputs, which random prompts lack, too."""
SPECIAL = range(_START, VOCABULARY)
"""These tokens, which answers must not have."""
_TOKENS = {
    **dict.fromkeys(("image_token_id", "image_token_index"), IMAGE),
    **dict.fromkeys(("vision_start_token_id", "image_start_token_id", "im_start_id"), _START),
    **dict.fromkeys(("vision_end_token_id", "image_end_token_id", "im_end_id"), _END),
    **dict.fromkeys(("video_token_id", "video_token_index"), _VIDEO),
    **dict.fromkeys(("audio_token_id", "audio_token_index"), _AUDIO),
}
Tensors = dict[str, Tensor]

_FIXED: dict[str, Any] = {"image_size": 8, "patch_size": 4}
_TILES: dict[str, Any] = {"image_grid_pinpoints": [[8, 16], [16, 8], [16, 16]]}
_AXES: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
_GRID = {"depth": 3, "out_hidden_size": 32, "patch_size": 4, "spatial_merge_size": 2}


class Kind(NamedTuple):
    """A family of models that see.

    Attributes:
        config: keys of its config that differ from those of ``library_bases``; parts are nested.
        image: returns the tensors of an image, by the number of the image and the generator.
        joins_at: the dimension at which tensors of several images are joined, if it is not the first.
        is_framed: whether a token stands before and after each image.
    """

    config: dict[str, Any]
    image: Callable[[int, torch.Generator], Tensors]
    joins_at: Mapping[str, int] = {}
    is_framed: bool = False


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
    """Flat patches with their places; the model merges four into one."""
    width = 4
    places = torch.cartesian_prod(torch.arange(width), torch.arange(2))
    return {"pixel_values": torch.rand(1, 2 * width, 48, generator=generator), "image_position_ids": places[None]}


def _sized(number: int, generator: torch.Generator) -> Tensors:
    """One padded size, as several images of a prompt have it."""
    return {"pixel_values": _noise(generator, 1, 3, 8, 8), "image_sizes": torch.tensor([[8, 8]])}


def _flat(
    channels: int = 3, temporal: int = 1, patch: int = 4, merge: int = 2, name: str = "image_grid_thw", **more: Any
) -> Callable[[int, torch.Generator], Tensors]:
    """Flat patches of grids."""

    def image(number: int, generator: torch.Generator) -> Tensors:
        height, width = ((4, 6), (2, 4), (6, 2))[number % 3]
        return {
            "pixel_values": _noise(generator, height * width, channels * temporal * patch * patch),
            name: torch.tensor([[1, height, width]]),
        }

    return image


def _square(size: int) -> Callable[[int, torch.Generator], Tensors]:
    return lambda number, generator: {"pixel_values": _noise(generator, 1, 3, size, size)}


def _patches_of_grid(number: int, generator: torch.Generator) -> Tensors:
    found = _flat()(number, generator)
    return {**found, "pixel_values": found["pixel_values"].view(-1, 3, 4, 4)}


def _merged(number: int, generator: torch.Generator) -> Tensors:
    return {**_flat()(number, generator), "image_merge_sizes": torch.tensor([2])}


def _shaped(number: int, generator: torch.Generator) -> Tensors:
    """Flat patches with their grid; the model merges four into one."""
    height, width = ((2, 2), (2, 4))[number % 2]
    return {
        "pixel_values": _noise(generator, 1, 8, 48),
        "spatial_shapes": torch.tensor([[height, width]]),
        "pixel_attention_mask": (torch.arange(8) < height * width).long()[None],
    }


def _sliced(number: int, generator: torch.Generator) -> Tensors:
    """A row of patches, as MiniCPM-V takes them."""
    height, width = ((4, 4), (4, 8))[number % 2]
    return {
        "pixel_values": _noise(generator, 1, 3, 4, height * width * 4),
        "target_sizes": torch.tensor([[height, width]]),
    }


def _tiles(number: int, generator: torch.Generator) -> Tensors:
    return {
        "pixel_values": _noise(generator, 1, 2, 3, 8, 8),
        "pixel_attention_mask": torch.ones(1, 2, dtype=torch.bool),
    }


def _hw(number: int, generator: torch.Generator) -> Tensors:
    found = _flat()(number, generator)
    return {"pixel_values": found["pixel_values"], "image_grid_hw": found["image_grid_thw"][:, 1:]}


def _both(number: int, generator: torch.Generator) -> Tensors:
    return {"pixel_values": _noise(generator, 1, 3, 8, 8), "high_res_pixel_values": _noise(generator, 1, 3, 32, 32)}


_QWEN_3_5 = Kind(
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
)

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
    "qwen3_5": _QWEN_3_5,
    "gemma4": Kind(
        {
            "vision_config": {
                "patch_size": 4,
                "pooling_kernel_size": 2,
                "num_key_value_heads": 4,
                "num_hidden_layers": 1,
            },
            "text_config": {"use_bidirectional_attention": "vision"},
        },
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
    "idefics2": Kind(
        {
            "vision_config": _FIXED,
            "perceiver_config": {
                "resampler_n_latents": 3,
                "resampler_n_heads": 4,
                "resampler_head_dim": 8,
                "num_key_value_heads": 2,
            },
        },
        _split,
        {"pixel_values": 1, "pixel_attention_mask": 1},
    ),
    "exaone4_5": Kind(
        {
            "vision_config": {**_GRID, "fullatt_block_indexes": [1], "window_size": 16},
            "text_config": {"model_type": "exaone4", "sliding_window_pattern": 2, **_AXES},
        },
        _grid,
    ),
    "gemma4_unified": Kind(
        {
            "vision_config": {
                "patch_size": 4,
                "pooling_kernel_size": 1,
                "model_patch_size": 4,
                "mm_posemb_size": 32,
                "num_soft_tokens": 8,
            },
            "text_config": {"use_bidirectional_attention": "vision", "sliding_window": 10},
        },
        _patches,
    ),
    "got_ocr2": Kind(
        {"vision_config": {"image_size": 64, "patch_size": 4, "window_size": 2, "output_channels": 8}}, _square(64)
    ),
    "pp_chart2table": Kind(
        {"vision_config": {"image_size": 64, "patch_size": 4, "window_size": 2, "output_channels": 8}}, _square(64)
    ),
    "lfm2_vl": Kind({"vision_config": {"patch_size": 4, "num_patches": 16}, "projector_hidden_size": 32}, _shaped),
    "paddleocr_vl": Kind(
        {"vision_config": {"image_size": 16, "patch_size": 4}, "text_config": _AXES}, _patches_of_grid
    ),
    "qwen2_5_omni_thinker": Kind(
        {
            "vision_start_token_id": _START,
            "vision_end_token_id": _END,
            "vision_config": {**_GRID, "fullatt_block_indexes": [1], "window_size": 16},
            "text_config": _AXES,
        },
        _grid,
        is_framed=True,
    ),
    "qwen3_omni_moe_thinker": Kind(
        {
            "vision_start_token_id": _START,
            "vision_end_token_id": _END,
            "vision_config": {**_GRID, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
            "text_config": _AXES,
        },
        _grid,
        is_framed=True,
    ),
    "video_llama_3": Kind({"vision_config": {"patch_size": 4}}, _merged),
    "fuyu": Kind(
        {"image_size": 8, "patch_size": 4}, lambda number, generator: {"pixel_values": _noise(generator, 1, 4, 48)}
    ),
    "chameleon": Kind(
        {
            "vocabulary_map": {"<image>": IMAGE, **{f"IMGIMG{chr(65 + i)}Z": 40 + i for i in range(8)}},
            "vq_config": {
                "resolution": 8,
                "embed_dim": 8,
                "num_embeddings": 8,
                "latent_channels": 8,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
            },
        },
        _plain,
    ),
    "emu3": Kind(
        {
            "vocabulary_map": {
                "<image>": IMAGE,
                "<|extra_200|>": 60,
                **{f"<|visual token {i:06d}|>": 40 + i for i in range(8)},
            },
            "vq_config": {
                "codebook_size": 8,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "attn_resolutions": [],
            },
        },
        _sized,
    ),
    "janus": Kind(
        {
            "vision_config": {**_FIXED, "projection_dim": 32, "num_image_tokens": 4},
            "vq_config": {
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "latent_channels": 8,
                "num_embeddings": 16,
                "projection_dim": 32,
                "image_token_embed_dim": 32,
                "num_patches": 2,
            },
        },
        _plain,
    ),
    "deepseek_vl_hybrid": Kind(
        {
            "vision_config": _FIXED,
            "high_res_vision_config": {
                "image_size": 32,
                "patch_size": 4,
                "output_channels": 8,
                "window_size": 2,
                "global_attn_indexes": [1],
            },
        },
        _both,
    ),
    "ernie4_5_vl_moe": Kind(
        {
            "vision_config": _GRID,
            "text_config": {
                "moe_intermediate_size": [16, 16],
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
            },
        },
        _flat(),
    ),
    "glm5_next": Kind(
        {
            "vision_config": {**_GRID, "image_size": 16, "projection_intermediate_size": 32, "head_dim": 8},
            "text_config": {
                "num_key_value_heads": 4,
                "qk_rope_head_dim": 0,
                "head_dim": 0,
                "mlp_layer_types": ["dense", "sparse"] * 2,
                "layer_types": ["linear_attention", "indexed_attention"] * 2,
                "indexer_types": ["full"] * 4,
                "linear_num_heads": 4,
                "linear_head_dim": 8,
                "index_kpool": 2,
            },
        },
        _grid,
    ),
    "dots3_note": Kind(
        {
            "vision_config": {
                "patch_size": 4,
                "adapter_in_dim": 32,
                "adapter_out_dim": 32,
                "mlp_layer_types": ["dense"] * 4,
            },
            "text_config": {
                "num_key_value_heads": 4,
                "mlp_layer_types": ["dense", "sparse"] * 2,
                "layer_types": ["indexed_attention", "sliding_attention"] * 2,
            },
            "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
        },
        _flat(),
    ),
    "qwen4_exp": Kind(
        {
            "vision_config": {**_GRID, "num_position_embeddings": 16},
            "text_config": {
                "layer_types": ["linear_attention", "indexed_attention"] * 2,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "indexer_n_heads": 4,
                "indexer_kv_heads": 1,
                "indexer_head_dim": 16,
                "indexer_budget": 8,
                "indexer_compress_ratio": 2,
                "hc_lowrank": 8,
                "ple_embed_dim": 8,
                "head_dim": 16,
                "rope_parameters": {"mrope_section": [2, 2, 2], "partial_rotary_factor": 0.75},
            },
        },
        _grid,
    ),
    "cosmos3_edge": Kind(
        {"vision_config": {"patch_size": 4, "num_patches": 16}, "projector_hidden_size": 32, "text_config": _AXES},
        _flat(),
    ),
    "hunyuan_vl": Kind(
        {
            "vision_config": {"patch_size": 4, "out_hidden_size": 32, "text_hidden_size": 32, "num_key_value_heads": 4},
            "text_config": {
                "head_dim": 8,
                "rope_parameters": {"xdrope_section": [1, 1, 1, 1], "mrope_section": [1, 1, 1, 1]},
            },
        },
        _flat(),
    ),
    "lfm3_vl": Kind({"vision_config": {"patch_size": 4, "num_key_value_heads": 2}, "projector_hidden_size": 32}, _grid),
    "muse_glimmer": Kind(
        {
            "vision_config": {"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4},
            "out_hidden_size": 128,
            "projector_hidden_size": 32,
        },
        _grid,
    ),
    "step3p7": Kind(
        {
            "vision_config": {"image_size": 32, "patch_size": 4, "max_position_embeddings": 64},
            "text_config": {
                "sliding_window": 6,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
                "mlp_layer_types": ["dense", "sparse"] * 2,
                "share_expert_dim": 16,
                "num_sliding_attention_heads": 4,
            },
        },
        _square(32),
    ),
    "kimi_k25": Kind(
        {
            "vision_config": {"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4},
            "projection_hidden_size": 32,
            "text_config": {"num_key_value_heads": 4, "first_k_dense_replace": 1},
        },
        _patches_of_grid,
    ),
    "minicpm_ocr": Kind(
        {
            "vision_config": {"image_size": 32, "patch_size": 4, "insert_layer_id": 1},
            "patch_size": 4,
            "insert_layer_id": 1,
        },
        _sliced,
        {"pixel_values": 3},
    ),
    "minicpmv4_6": Kind(
        {
            "vision_config": {"image_size": 32, "patch_size": 4, "insert_layer_id": 1},
            "patch_size": 4,
            "insert_layer_id": 1,
        },
        _sliced,
        {"pixel_values": 3},
    ),
    "minicpmv4_7": Kind(
        {
            "vision_config": {"image_size": 32, "patch_size": 4, "insert_layer_id": 1},
            "patch_size": 4,
            "insert_layer_id": 1,
        },
        _sliced,
        {"pixel_values": 3},
    ),
    "mistral_large4": Kind(
        {
            "vision_config": _FIXED,
            "spatial_merge_size": 1,
            "text_config": {
                "num_key_value_heads": 4,
                "mlp_layer_types": ["dense", "sparse"] * 2,
                "layer_types": ["indexed_attention"] * 4,
                "indexer_types": ["full"] * 4,
                "no_rope_layers": [1, 0] * 2,
                "kv_source_layers": [0, 1, 2, 3],
            },
        },
        _sized,
    ),
    "nemotron_h_omni": Kind(
        {
            "vision_config": {
                "patch_size": 4,
                "image_size": 8,
                "max_img_size": 16,
                "patch_dim": 48,
                "mlp_ratio": 2.0,
                "video_temporal_patch_size": 2,
            },
            "vision_hidden_size": 32,
            "projector_hidden_size": 32,
        },
        _hw,
    ),
    "unlimited_ocr": Kind(
        {
            "vision_config": {
                "sam_config": {
                    "image_size": 64,
                    "patch_size": 4,
                    "window_size": 2,
                    "output_channels": 8,
                    "downsample_channels": [8, 32],
                    "global_attn_indexes": [1],
                },
                "encoder_config": {"image_size": 16, "patch_size": 4},
            },
            "text_config": {
                "num_key_value_heads": 4,
                "mlp_layer_types": ["dense", "sparse"] * 2,
                "layer_types": ["reference_sliding_attention"] * 4,
                "sliding_window": 6,
            },
        },
        _square(64),
    ),
    "deepseek_ocr2": Kind(
        {
            "vision_config": {
                "sam_config": {
                    "image_size": 64,
                    "patch_size": 4,
                    "window_size": 2,
                    "output_channels": 8,
                    "downsample_channels": [8, 32],
                    "global_attn_indexes": [1],
                },
                "encoder_config": {"num_key_value_heads": 4},
            },
            "text_config": {
                "num_key_value_heads": 4,
                "num_experts_per_tok": 2,
                "max_position_embeddings": 1024,
                "n_group": 1,
                "topk_group": 1,
                "mlp_layer_types": ["dense", "sparse"] * 2,
            },
        },
        _square(64),
    ),
    "granite_docling": Kind(
        {
            "vision_config": {**_FIXED, "out_hidden_size": 32, "scale_factor": 2, "deepstack_visual_indexes": [0, 1]},
            "text_config": {},
        },
        _tiles,
    ),
    "minimax_m3_vl": Kind(
        {"vision_config": {"patch_size": 4, "image_size": 16}, "projector_hidden_size": 32, "merged_hidden_size": 128},
        _grid,
    ),
    "aria": Kind(
        {
            "vision_config": _FIXED,
            "projector_patch_to_query_dict": {4: 3},
            "max_value_projector_patch_to_query_dict": 3,
        },
        _plain,
    ),
    "aya_vision": Kind({"vision_config": _FIXED}, _plain),
    "cohere2_vision": Kind({"vision_config": _FIXED, "alignment_intermediate_size": 64}, _plain),
    "cohere_compass": Kind(
        {"vision_config": {**_GRID, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}}, _grid
    ),
    "cosmos3_omni": Kind(
        {
            "vision_config": {**_GRID, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
            "text_config": _AXES,
        },
        _grid,
    ),
    "deepseek_vl": Kind({"vision_config": _FIXED}, _plain),
    "glm46v": Kind({"vision_config": {**_GRID, "image_size": 16}, "text_config": _AXES}, _grid),
    "glm4v": Kind({"vision_config": {**_GRID, "image_size": 16}, "text_config": _AXES}, _grid),
    "glm4v_moe": Kind(
        {
            "vision_config": {**_GRID, "image_size": 16},
            "text_config": {"rope_parameters": {"mrope_section": [1, 1, 0]}},
        },
        _grid,
    ),
    "glm_ocr": Kind({"vision_config": {**_GRID, "image_size": 16}, "text_config": _AXES}, _grid),
    "glmga": Kind({"vision_config": {**_GRID, "image_size": 16}, "text_config": _AXES}, _grid),
    "hyperclovax_vision_v2": Kind({"vision_config": {**_GRID, "fullatt_block_indexes": [1], "window_size": 16}}, _grid),
    "llava_next_video": Kind({"vision_config": _FIXED, **_TILES}, _tiled),
    "lighton_ocr": Kind({"vision_config": _FIXED}, _sized),
    "ovis2": Kind({"vision_config": _FIXED}, _plain),
    "qianfan_ocr": Kind({"vision_config": {"image_size": [8, 8], "patch_size": [4, 4]}}, _plain),
    "qwen2_vl": Kind({"vision_config": {**_GRID, "embed_dim": 32, "hidden_size": 32}, "text_config": _AXES}, _grid),
    "qwen3_5_moe": _QWEN_3_5,
    "qwen3_vl_moe": Kind(
        {
            "vision_config": {**_GRID, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
            "text_config": _AXES,
        },
        _grid,
    ),
    "shieldgemma2": Kind({"vision_config": _FIXED, "mm_tokens_per_image": 4}, _plain),
    "video_llava": Kind({"vision_config": _FIXED}, _plain),
    "vipllava": Kind({"vision_config": _FIXED, "vision_feature_layer": [-1, -2, 1]}, _plain),
}

REFUSED = frozenset({"chameleon", "ernie4_5_vl_moe", "glm5_next", "ovis2", "qwen4_exp"})
"""Kinds whose images are refused; the table in docs/models.md has the reasons."""


def class_name(kind: str) -> str:
    """Return the name of the class that transformers registers for images and text."""
    names = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind]
    return names if isinstance(names, str) else names[0]


def why_without_images(kind: str) -> str:
    """Return why a class takes no images; empty if it takes them.

    Raises:
        NotTried: no tiny checkpoint can be made.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            if kind in KINDS:
                base = make_vision_base(folder, kind)
            else:
                base = make_base(folder, kind, found=getattr(transformers, class_name(kind)))
            model = load_model(folder, torch.float32, torch.device("cpu"))
            decoder = TransformersDecoder(model, ReferenceKernels(), 128)
            if decoder.tower is None:
                return decoder.images_refused
            if kind in KINDS:
                tensors = KINDS[kind].image(0, torch.Generator().manual_seed(0))
                decoder.tower.encode([IMAGE] * placeholders(base, tensors), packed(tensors))
                return ""
            raise NotTried(f"{NOT_TRIED}no image is made for its tower")
        except (TowerError, UnsupportedAttention) as error:
            return str(error)
        except ModelConfigError as error:
            raise NotTried(f"{NOT_TRIED}{str(error).partition(': ')[2]}") from error


def image_row(kind: str, reason: str) -> str:
    """Return a line of the table of classes that take images in docs/models.md.

    Args:
        kind: type of config.
        reason: why it takes none; empty if it takes them.
    """
    how = "yes" if not reason else "not tried" if reason.startswith(NOT_TRIED) else "refused"
    shown = reason.removeprefix(NOT_TRIED).partition("(")[0].partition(":")[0].strip()
    return f"| `{kind}` | {class_name(kind)} | {how} | {shown} |"


def make_vision_base(folder: Path, kind: str) -> PreTrainedModel:
    """Save a tiny checkpoint of a kind, and return transformers' model of it."""
    found = getattr(transformers, class_name(kind))

    def change(config: PreTrainedConfig) -> None:
        tokens = {key: value for key, value in _TOKENS.items() if hasattr(config, key)}
        _set(config, {**tokens, "image_token_id": IMAGE, **KINDS[kind].config})

    return make_base(folder, kind, change, found, special=KINDS[kind].config)


def _set(config: PreTrainedConfig, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        part = getattr(config, key, None)
        if isinstance(part, dict) and isinstance(value, dict):
            value = {**part, **value}
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
        token_ids += _words(words[at], seed + at)
        tensors = KINDS[kind].image(number, torch.Generator().manual_seed(number))
        length = placeholders(model, tensors)
        token_ids += [_START] if KINDS[kind].is_framed else []
        images.append(PromptImage(_digest(kind, number), len(token_ids), length, packed(tensors)))
        token_ids += [IMAGE] * length + ([_END] if KINDS[kind].is_framed else [])
        for name, tensor in tensors.items():
            joined.setdefault(name, []).append(tensor)
    token_ids += _words(words[len(numbers)], seed + len(numbers))
    given = {name: torch.cat(each, KINDS[kind].joins_at.get(name, 0)) for name, each in joined.items()}
    return Seen(token_ids, tuple(images), given)


def _words(tokens: int, seed: int) -> list[int]:
    return [1 + each % (_START - 1) for each in random_ids(tokens, seed)]


def placeholders(model: PreTrainedModel, tensors: Tensors) -> int:
    """Return the number of placeholders of an image."""
    whole = model if hasattr(model, "get_image_features") else model.base_model
    with torch.inference_mode():
        output = whole.get_image_features(**tensors, return_dict=True)
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
    if kind == "paligemma":
        types = (torch.arange(token_ids.shape[1]) >= prompt_tokens).long()[None]
        return {"token_type_ids": types} if IMAGE in token_ids else {}
    accepted = inspect.signature(type(model).forward).parameters
    found = {
        "attention_mask": torch.ones_like(token_ids),
        "mm_token_type_ids": (token_ids == IMAGE).int(),
        "token_type_ids": (token_ids == IMAGE).long(),
    }
    return {name: each for name, each in found.items() if name in accepted}


def _digest(kind: str, number: int) -> bytes:
    return hashlib.sha256(f"{kind} {number}".encode()).digest()
