"""Tiny random checkpoints of every decoder that transformers registers."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from lorikeet.models.architectures import ARCHITECTURES

VOCABULARY = 96
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
"""The parameters of experts, as PEFT's target_parameters names them."""
NOT_TRIED = "not tried: "
"""Begins the reason why no tiny checkpoint can be made here."""

_SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "dff", "ffn_hidden_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 128),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("dense_intermediate_size", "shared_intermediate_size", "shared_experts_intermediate_size"), 16),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("index_topk_blocks", "o_groups", "num_codebooks", "zero_expert_num"), 2),
    **dict.fromkeys(("lru_width", "hidden_size_global"), 32),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "d_inner"), 48),
    **dict.fromkeys(("max_target_positions", "n_ctx", "emb_dim_max"), 128),
    "encoder_hash_byte_group_vocab": 64,
    "dim_ff": 48,
    "dim_head": 8,
    "prompt_length": 4,
    "is_decoder": True,
    "causal": True,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "kv_channels": 8,
    "sliding_window": 6,
    "attention_window_size": 6,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "o_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    # Few heads would give many tokens a score of exactly 0, and which of these are chosen is left open.
    "index_n_heads": 16,
    "index_topk": 8,
    "index_head_dim": 8,
    "query_pre_attn_scalar": 8,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
    "laurel_rank": 4,
    "num_global_key_value_heads": 1,
    "global_head_dim": 16,
    "router_hidden_size": 16,
    "rotary_dim": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "gated_norm_rank": 4,
    "num_layers_per_stack": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes by the keys that configs use for them."""

_DELTA = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
"""A gated delta rule in half of the layers."""
_KIMI = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "num_experts_per_token": 2,
}
_MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}
_MAMBA_1 = {"mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
_MIXED = ["sliding_attention", "full_attention"]
_INKLING = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": 6}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_SPECIAL: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
        "layer_types": _MIXED * 2,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 12,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 6},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "reformer": {
        "attention_head_size": 8,
        "attn_layers": ["local", "lsh"] * 2,
        "axial_pos_embds": False,
        "local_attn_chunk_length": 64,
        "lsh_attn_chunk_length": 64,
        "num_hashes": 1,
        "num_buckets": 2,
        "hash_seed": 1,
    },
    "falcon": {"multi_query": True, "alibi": False},
    "gemma3_text": {"layer_types": _MIXED * 2},
    "gemma4_text": {"num_hidden_layers": 6, "layer_types": _MIXED * 3, "num_kv_shared_layers": 2},
    "gemma4_unified_text": {"num_hidden_layers": 6, "layer_types": _MIXED * 3, "num_kv_shared_layers": 2},
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "layer_types": _MIXED * 3,
        "num_kv_shared_layers": 2,
        "intermediate_size": 48,
        "activation_sparsity_pattern": [0.0] * 6,
    },
    "inkling2_text": _INKLING,
    "inkling_text": _INKLING,
    "glm_moe_dsa": {"indexer_types": ["full", "shared"] * 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "bailing_hybrid": {
        **_KIMI,
        "head_dim": 8,
        "num_expert_group": 1,
        "topk_group": 1,
        "n_group": 1,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "num_nextn_predict_layers": 0,
    },
    "bamba": {**_MAMBA_2, "attn_layer_indices": [1, 3], "attn_rotary_emb": 8},
    "falcon_h1": {**_MAMBA_2, "mamba_d_ssm": 64},
    "granitemoehybrid": {**_MAMBA_2, "layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {**_MAMBA_1, "expert_layer_period": 2, "expert_layer_offset": 0, "use_mamba_kernels": False},
    "kimi_linear": {**_KIMI, "head_dim": 8, "mlp_layer_types": ["dense", "sparse"] * 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "num_hidden_layers": 4,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 16,
        "mtp_layers_block_type": [],
    },
    "olmo_hybrid": {**_DELTA, "linear_num_value_heads": 2},
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
    "recurrent_gemma": {"num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"]},
    "zamba": {
        **_MAMBA_1,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "chunk_size": 8,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "adapter_rank": 4,
        "use_mamba_kernels": False,
    },
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4, "intermediate_size": 64, "use_falcon_mambapy": False},
    "mamba": {"state_size": 8, "time_step_rank": 4, "intermediate_size": 64},
    "lfm2": {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "ministral": {"head_dim": 8},
    "roc_bert": {"pronunciation_embed_dim": 16, "shape_embed_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""Keys of some architectures whose small defaults would leave out what is particular about them."""


class NotTried(Exception):
    """No tiny checkpoint can be made."""


def decoders() -> dict[str, type[PreTrainedModel]]:
    """Return the causal models that the library lists, by the type of their config."""
    return {kind: model_class(kind) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}


def model_class(kind: str) -> type[PreTrainedModel]:
    """Return the class of the causal model with a type of config, or else of the model that reads images, too."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) or MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind]
    found: type[PreTrainedModel] = getattr(transformers, names if isinstance(names, str) else names[0])
    return found


def small_config(
    kind: str, found: type[PreTrainedModel] | None = None, special: Mapping[str, Any] = MappingProxyType({})
) -> PreTrainedConfig:
    """Return a tiny config of a type.

    Args:
        kind: the type.
        found: the model's class, if it is not that of :func:`model_class`.
        special: further keys, nested for parts of the config.
    """
    config_class = (found or model_class(kind)).config_class or CONFIG_MAPPING[kind]
    kind = config_class.model_type if config_class.model_type in _SPECIAL else kind
    values = _merged({**small_values(config_class), **_SPECIAL.get(kind, {})}, special)
    if "kv_lora_rank" in values and "num_key_value_heads" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]  # latent attention has no groups
    return config_class(**values)


def _merged(values: Mapping[str, Any], special: Mapping[str, Any]) -> dict[str, Any]:
    nested = {key: _merged(values[key], each) for key, each in special.items() if isinstance(values.get(key), dict)}
    return {**values, **special, **nested}


def small_values(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return small values of the keys that a type of config has, and of its parts."""
    try:
        defaults = vars(config_class())
    except Exception:
        defaults = dict.fromkeys(_SMALL)
    values = {key: value for key, value in _SMALL.items() if defaults.get(key, "") not in ("", None)}
    values |= {key: small_values(type(value)) for key, value in defaults.items() if isinstance(value, PreTrainedConfig)}
    return values | _SPECIAL.get(config_class.model_type, {})


def make_base(
    folder: Path,
    kind: str,
    change: Callable[[PreTrainedConfig], None] = lambda config: None,
    found: type[PreTrainedModel] | None = None,
    special: Mapping[str, Any] = MappingProxyType({}),
    **overrides: Any,
) -> PreTrainedModel:
    """Save a random fp32 checkpoint, and return transformers' model of it.

    Args:
        folder: folder of the checkpoint.
        kind: type of config.
        change: changes the config.
        found: the model's class, if it is not that of :func:`model_class`.
        special: see :func:`small_config`.
        overrides: keys of the config that are set after it was made.

    Raises:
        NotTried: none can be made here.
    """
    torch.manual_seed(len(kind))
    try:
        config = small_config(kind, found, special)
        for key, value in overrides.items():
            setattr(config, key, value)
        change(config)
        model = (
            (found or model_class(kind))._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        )
    except Exception as error:  # of many kinds, for packages that are missing and sizes that do not go together
        raise NotTried(NOT_TRIED + " ".join(str(error).split())[:100]) from error
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.1
            # Gemma 4 does not scale its scores down, so that large weights give large rounding errors: with a factor of
            # 1, transformers' own log probabilities in fp32 differ from those in fp64 by 2e-4.
            factor = 0.5 if kind.startswith(("gemma4", "qwen3_5", "qwen3_next")) else 2
            if special:  # Towers add to these errors.
                factor = min(factor, 1)
            parameter.copy_(noise + 1.0 if parameter.dim() == 1 else noise * factor)
    model.save_pretrained(folder)
    return model


def random_ids(tokens: int, seed: int) -> list[int]:
    """Return ordinary tokens."""
    return random.Random(seed).choices(range(3, VOCABULARY), k=tokens)


def row(kind: str, reason: str) -> str:
    """Return the start of a line of the table in docs/models.md.

    Args:
        kind: type of config.
        reason: why it is refused; "" if it runs.
    """
    name = model_class(kind).__name__
    how = "refused" if reason else "own decoder" if name in ARCHITECTURES else "transformers"
    if reason.startswith(NOT_TRIED):
        how = "not tried"
        reason = reason.removeprefix(NOT_TRIED)
    return f"| `{kind}` | {name} | {how} | {reason.split('(')[0].strip()}".rstrip()
