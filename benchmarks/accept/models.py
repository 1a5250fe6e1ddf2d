"""Base models for the lines, without any hub."""

import shutil
from pathlib import Path

from lorikeet.models.default import default_cache_dir, prepare_default_model

SAMPLES = Path("examples/adapters")
"""The sample adapters, as seen from the root of the checkout."""

LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "eos_token_id": 2,
}
"""Its ``config.json``, for engines that read no weights."""


def default_model() -> Path:
    """Return the folder of SmolLM2-135M-Instruct, converted if need be."""
    return prepare_default_model(default_cache_dir())


def tiny_model(folder: Path, seed: int = 0) -> Path:
    """Write a random two-layer Llama with the default model's tokenizer to ``folder`` and return it.

    For lines whose figure does not depend on the model: it loads at once.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    source = default_model()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)
    return folder
