"""A model that builds in milliseconds, and engines that take little memory."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lorikeet.worker import memory_profiling


@pytest.fixture
def small_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines without a size take little: they touch all of it, and the next may come before it is freed."""
    monkeypatch.setattr(memory_profiling, "_CPU_BYTES", 2**26)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
