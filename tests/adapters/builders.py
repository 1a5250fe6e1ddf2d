"""Adapters for tests, made by PEFT, or by hand with a single fault."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from lorikeet.adapters.checkpoint import PROJECTIONS
from lorikeet.core.geometry import ModelGeometry, ModuleShape

LAYERS = 3
HIDDEN = 32
HEADS = 8
KV_HEADS = 2
HEAD_DIM = 4
MLP = 48
Tensors = dict[str, NDArray[Any]]


def geometry(ranks: int = 1, layers: int = LAYERS) -> ModelGeometry:
    """The tiny model, or one rank's share of it."""
    q = HIDDEN // ranks
    kv = max(KV_HEADS // ranks, 1) * HEAD_DIM
    mlp = MLP // ranks
    shapes = {
        "q": (HIDDEN, q),
        "k": (HIDDEN, kv),
        "v": (HIDDEN, kv),
        "o": (q, HIDDEN),
        "gate": (HIDDEN, mlp),
        "up": (HIDDEN, mlp),
        "down": (mlp, HIDDEN),
    }
    modules = {name: ModuleShape(*shape) for name, shape in shapes.items()}
    return ModelGeometry(layers, max(KV_HEADS // ranks, 1), HEAD_DIM, modules, 4)


def tiny_llama() -> LlamaForCausalLM:
    """A random Llama of the sizes above."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
    )
    return LlamaForCausalLM(config)


def peft_adapter(folder: Path, seed: int = 1, **options: Any) -> PeftModel:
    """Save an adapter made by PEFT, B not zero, and return a model that PEFT loaded it into.

    Loaded again, since PEFT sorts the keys of its config file, and among patterns the first match counts.
    """
    options.setdefault("target_modules", ["q_proj", "v_proj"])
    model = get_peft_model(tiny_llama(), LoraConfig(task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return PeftModel.from_pretrained(tiny_llama(), folder)


def key(layer: int, module: str, side: str) -> str:
    """Name of a tensor as PEFT writes it."""
    return f"base_model.model.model.layers.{layer}.{PROJECTIONS[module]}.lora_{side}.weight"


def lora_tensors(rank: int = 4, modules: tuple[str, ...] = ("q", "v"), seed: int = 0) -> Tensors:
    """Random fp32 tensors of an adapter on all layers."""
    generator = np.random.default_rng(seed)
    tensors: Tensors = {}
    for layer in range(LAYERS):
        for module in modules:
            shape = geometry().modules[module]
            for side, size in (("A", (rank, shape.in_features)), ("B", (shape.out_features, rank))):
                tensors[key(layer, module, side)] = generator.normal(size=size).astype(np.float32)
    return tensors


def write_config(folder: Path, **config: Any) -> None:
    """Write ``adapter_config.json`` of a rank-4 adapter on q and v, with changes."""
    folder.mkdir(parents=True, exist_ok=True)
    defaults = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(defaults | config))


def write_adapter(folder: Path, tensors: Tensors | None = None, **config: Any) -> Path:
    """Write a rank-4 adapter on q and v, with the changes given."""
    write_config(folder, **config)
    save_file(lora_tensors() if tensors is None else tensors, folder / "adapter_model.safetensors")
    return folder


def shard(folder: Path, parts: int = 2) -> None:
    """Replace the weights file of a folder by several."""
    tensors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    places = {}
    for part in range(parts):
        name = f"adapter_model-{part + 1:05}-of-{parts:05}.safetensors"
        names = sorted(tensors)[part::parts]
        save_file({each: tensors[each] for each in names}, folder / name)
        places |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "adapter_model.safetensors.index.json").write_text(json.dumps(index))
