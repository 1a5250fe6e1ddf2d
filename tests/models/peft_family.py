"""Random adapters of every kind that PEFT saves and the server serves."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from transformers import PreTrainedModel

Change = Callable[[str, torch.Tensor], torch.Tensor]


def _changed(name: str, value: torch.Tensor) -> torch.Tensor:
    noise = torch.randn_like(value)
    if "magnitude" in name:
        return value * (1 + 0.3 * noise)
    if "ia3_l" in name:
        return 1 + 0.3 * noise
    if "lora_" in name or "bias" in name:
        return noise * 0.15
    if "norm" in name or "ln_" in name:
        return value * (1 + 0.3 * noise)
    return value + 0.1 * noise


def make(model: PreTrainedModel, folder: Path, config: Any, seed: int = 3, vocabulary: int = 0) -> PeftModel:
    """Save a random adapter of a config over a base, which is changed, and return PEFT's model of it."""
    torch.manual_seed(seed)
    if vocabulary:
        model.resize_token_embeddings(vocabulary)
    peft = get_peft_model(model, config).eval()
    trained = {name for name, value in peft.named_parameters() if value.requires_grad}
    with torch.no_grad():
        for name, value in peft.named_parameters():
            if name in trained or "trainable_tokens_delta" in name:
                value.copy_(_changed(name, value))
    peft.save_pretrained(str(folder))
    return peft


def lora(**options: Any) -> LoraConfig:
    """A LoRA config of small rank."""
    return LoraConfig(**{"r": 4, "lora_alpha": 6, "init_lora_weights": False, **options})


def of_type(name: str, **options: Any) -> PeftConfig:
    """A config of one of PEFT's types."""
    config: PeftConfig = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(name)](**options)
    return config


def ia3(**options: Any) -> PeftConfig:
    """An IA³ config."""
    return of_type("IA3", **options)


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]

LLAMA_LIKE: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: lora(target_modules=LINEAR),
    "rsLoRA": lambda: lora(target_modules=LINEAR, use_rslora=True),
    "DoRA": lambda: lora(target_modules=LINEAR, use_dora=True),
    "DoRA on the vocabulary": lambda: lora(target_modules=["embed_tokens", "lm_head", "q_proj"], use_dora=True),
    "biases of LoRA's modules": lambda: lora(target_modules=ATTENTION, bias="lora_only"),
    "all biases": lambda: lora(target_modules=["v_proj", "up_proj"], bias="all"),
    "LoRA with biases": lambda: lora(target_modules=LINEAR, lora_bias=True),
    "DoRA with biases": lambda: lora(target_modules=LINEAR, use_dora=True, bias="all"),
    "whole norms": lambda: lora(target_modules=["q_proj"], modules_to_save=["norm"]),
    "whole linear layers": lambda: lora(target_modules=["q_proj"], modules_to_save=["o_proj", "k_proj", "gate_proj"]),
    "whole output layer": lambda: lora(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "whole vocabulary": lambda: lora(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]),
    "LoRA on the vocabulary": lambda: lora(target_modules=["embed_tokens", "lm_head", "down_proj"]),
    "trained tokens": lambda: lora(target_modules=["q_proj"], trainable_token_indices=[3, 7, 11, 40]),
    "IA3": lambda: ia3(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "IA3 on all, scaling the input of o": lambda: ia3(
        target_modules=LINEAR, feedforward_modules=["o_proj"], modules_to_save=["norm"]
    ),
    "tuned norms": lambda: of_type("LN_TUNING", target_modules=["input_layernorm", "post_attention_layernorm", "norm"]),
    "trained tokens alone": lambda: of_type("TRAINABLE_TOKENS", token_indices=[3, 7, 11, 40]),
}
"""Over bases with Llama's names."""
SAMPLE = ("LoRA", "DoRA with biases", "LoRA with biases", "whole norms", "whole linear layers", "trained tokens",
          "LoRA on the vocabulary", "IA3", "tuned norms", "trained tokens alone")  # fmt: skip
"""Some of them."""

GPT2_LINEAR = ["c_attn", "c_proj", "c_fc"]
GPT2_LIKE: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: lora(target_modules=GPT2_LINEAR, fan_in_fan_out=True),
    "DoRA": lambda: lora(target_modules=GPT2_LINEAR, fan_in_fan_out=True, use_dora=True),
    "all biases": lambda: lora(target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, bias="all"),
    "LoRA with biases": lambda: lora(target_modules=GPT2_LINEAR, fan_in_fan_out=True, lora_bias=True),
    "whole norms": lambda: lora(target_modules=["c_fc"], fan_in_fan_out=True, modules_to_save=["ln_1", "ln_f"]),
    "whole linear layers": lambda: lora(target_modules=["c_fc"], fan_in_fan_out=True, modules_to_save=["c_attn"]),
    "LoRA on the vocabulary": lambda: lora(target_modules=["wte", "c_fc"]),
    "trained tokens": lambda: lora(
        target_modules=["c_fc"], fan_in_fan_out=True, trainable_token_indices={"wte": [3, 7, 11, 40]}
    ),
    "IA3": lambda: ia3(target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"]),
    "tuned norms": lambda: of_type("LN_TUNING", target_modules=["ln_1", "ln_2", "ln_f"]),
    "trained tokens alone": lambda: of_type("TRAINABLE_TOKENS", target_modules=["wte"], token_indices=[3, 7, 11, 40]),
}
"""Over GPT-2, whose linear layers are transposed."""

CONVERTED: dict[str, Callable[[], Any]] = {
    "PiSSA": lambda: lora(target_modules=ATTENTION, init_lora_weights="pissa"),
    "OLoRA": lambda: lora(target_modules=ATTENTION, init_lora_weights="olora"),
    **{
        name: partial(of_type, name, **{"target_modules": ATTENTION, **options})
        for name, options in {
            "ADALORA": {"init_r": 4, "target_r": 2, "total_step": 10},
            "ADAMSS": {"r": 4, "num_subspaces": 2},
            "BEFT": {},
            "BOFT": {"boft_block_size": 8},
            "C3A": {"block_size": 8},
            "DEFT": {"r": 4},
            "DELORA": {"r": 4},
            "FOURIERFT": {"n_frequency": 40},
            "FROD": {"target_modules": ["q_proj"]},
            "GLORA": {"r": 4},
            "GRALORA": {"r": 4},
            "HIRA": {"r": 4},
            "HRA": {"r": 4},
            "LOHA": {"r": 2, "alpha": 4},
            "LOKR": {"r": 2, "alpha": 4},
            "MISS": {"r": 4},
            "OFT": {"r": 0, "oft_block_size": 8},
            "OSF": {"effective_rank": 0.9},
            "PEANUT": {"r": 4},
            "PSOFT": {"r": 4},
            "PVERA": {"r": 4, "target_modules": ["q_proj"]},
            "RANDLORA": {"r": 4, "target_modules": ["q_proj"]},
            "ROAD": {"group_size": 8},
            "SHIRA": {"r": 4},
            "SUPERTUNING": {"sparsity": 0.9},
            "TINYLORA": {},
            "UNILORA": {"r": 4},
            "VBLORA": {"r": 4, "target_modules": ["q_proj"], "num_vectors": 16, "vector_length": 16},
            "VERA": {"r": 4, "target_modules": ["q_proj"]},
            "WAVEFT": {"n_frequency": 40},
        }.items()
    },
}
"""Types that are converted to LoRA, and initialisations of LoRA that are, over bases with Llama's names."""
