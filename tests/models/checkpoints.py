"""Builders: tiny random checkpoints made with transformers, of every architecture and feature."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    SmolLM3Config,
)

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}

_GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "query_pre_attn_scalar": 20,
    "sliding_window": 6,
    "tie_word_embeddings": True,
}
_TWO_ROPES: dict[str, Any] = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
}
_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}

_MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
    "logits_scaling": 8.0,
}

VARIANTS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama-mha": (LlamaConfig, {"num_key_value_heads": 4}),
    # 96: whole panels of the native kernels, which gate them at once.
    "llama-biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "intermediate_size": 96}),
    "llama-head-dim": (LlamaConfig, {"head_dim": 16}),
    "llama-linear": (LlamaConfig, {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0}}),
    "llama-llama3": (
        LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral-window": (MistralConfig, {"sliding_window": 5}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-window": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen2-yarn": (
        Qwen2Config,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3-5": (Qwen3_5TextConfig, {**_DELTA, "linear_value_head_dim": 16}),
    "qwen3-5-last": (
        Qwen3_5TextConfig,
        {
            **_DELTA,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "granite": (
        GraniteConfig,
        _MULTIPLIERS,
    ),
    "granite-hybrid": (
        GraniteMoeHybridConfig,
        {
            **_MULTIPLIERS,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "shared_intermediate_size": 80,
            "num_local_experts": 0,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
            "time_step_limit": [0.1, 2.0],
        },
    ),
    "granite-hybrid-attention": (
        GraniteMoeHybridConfig,
        {
            **_MULTIPLIERS,
            "layer_types": ["full_attention"] * 3,
            "position_embedding_type": "rope",
            "shared_intermediate_size": 80,
            "num_local_experts": 0,
            "mamba_n_heads": 8,
        },
    ),
    "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "gemma": (GemmaConfig, {"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": (Gemma2Config, {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma3": (
        Gemma3TextConfig,
        {**_GEMMA, "num_hidden_layers": 4, "sliding_window_pattern": 2, "rope_parameters": _TWO_ROPES},
    ),
    "olmo2": (Olmo2Config, {"pad_token_id": 0}),
    "olmo3": (Olmo3Config, {"pad_token_id": 0, "sliding_window": 5, "num_hidden_layers": 4}),
    "phi3": (Phi3Config, {"pad_token_id": 0, "sliding_window": 7}),
    "phi3-partial": (Phi3Config, {"pad_token_id": 0, "head_dim": 16, "partial_rotary_factor": 0.75}),
    "phi3-longrope": (
        Phi3Config,
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            },
        },
    ),
    "glm": (GlmConfig, {"pad_token_id": 0, "head_dim": 16}),
    "glm4": (Glm4Config, {"pad_token_id": 0, "head_dim": 16, "attention_bias": True}),
    "qwen3-biases": (Qwen3Config, {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
}
"""Every feature that a checkpoint can ask for, at least once."""


def make_checkpoint(folder: Path, variant: str, **overrides: Any) -> PreTrainedModel:
    """Save a random fp32 checkpoint of ``VARIANTS[variant]`` and return transformers' model of it."""
    config_class, settings = VARIANTS[variant]
    torch.manual_seed(len(variant))
    max_shard_size = overrides.pop("max_shard_size", "1GB")
    config = config_class(**{**SIZES, **settings, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Far from the defaults (zero biases, norms of one), so that a tensor in a wrong place shows.
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.dim() == 1 else 0.0))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def oracle_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """Return transformers' logits ``[T, vocab]`` of one sequence."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]
