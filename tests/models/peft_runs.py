"""Loads the adapters of PEFT with PEFT itself, for comparison."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def load(folder: Path) -> PreTrainedModel:
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model: PreTrainedModel = loaded.eval()
    return model
