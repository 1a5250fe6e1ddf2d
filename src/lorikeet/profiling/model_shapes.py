"""Provides configs of published models for engines with dummy weights (``--load-format dummy``).

Sizes come from the models' ``config.json``: meta-llama/Llama-2-7b-hf, meta-llama/Meta-Llama-3-8B, Qwen/Qwen3-8B.
"""

import json
from pathlib import Path
from typing import Any

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SHARED: dict[str, Any] = {"hidden_act": "silu", "tie_word_embeddings": False, "dtype": "bfloat16"}
MODEL_SHAPES: dict[str, dict[str, Any]] = {
    "llama-2-7b": _LLAMA
    | {
        "intermediate_size": 11008,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
    },
    "llama-3-8b": _LLAMA
    | {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
}
"""Model configs by name."""


def write_model_shape(folder: Path, name: str) -> Path:
    """Write the config of a model into ``folder``, and return the folder.

    Args:
        folder: model folder for an engine with dummy weights; created if missing.
        name: one of ``MODEL_SHAPES``.

    Raises:
        ValueError: the model is unknown.
    """
    if name not in MODEL_SHAPES:
        raise ValueError(f"{name!r} is not one of {', '.join(MODEL_SHAPES)}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_SHARED | MODEL_SHAPES[name], indent=1), encoding="utf-8")
    return folder
