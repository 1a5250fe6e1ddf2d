"""TRL's asynchronous trainer, unchanged, trains against a server with the flags of its documents."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.clients import trainers
from benchmarks.harness import default_model, running_server
from lorikeet.adapters.checkpoint import begin_digest

STEPS = 10
FLAGS = (
    *("--max-model-len", "1024", "--enable-lora", "--max-lora-rank", "8", "--max-loras", "6"),
    *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--generation-config", "vllm"),
    *("--weight-transfer-config", '{"backend":"nccl"}', "--dtype", "float32"),
)
VARIABLES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A random Llama with the tokenizer of the default model."""
    folder = tmp_path / "base"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(default_model() / name, folder / name)
    return folder


def digest_of(folder: Path) -> str:
    digest = begin_digest(folder / "adapter_config.json")
    digest.update((folder / "adapter_model.safetensors").read_bytes())
    return digest.hexdigest()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_ten_steps_of_the_asynchronous_trainer_sync_what_was_trained(base: Path, tmp_path: Path) -> None:
    python = trainers.python("trl", install=os.environ.get("REQUIRE_ALL") == "1")
    if python is None:
        pytest.skip("TRL is not installed: run python -m benchmarks.clients trl once")
    flags = [str(base), *FLAGS, "--store-dir", str(tmp_path / "store"), "--memory", "100MiB"]
    with running_server(flags, tmp_path / "server.log", environment=VARIABLES) as server:
        script = str(trainers.HERE / "trl_training.py")
        ran = subprocess.run(
            [str(python), script, server.url, str(base), str(tmp_path / "out"), str(STEPS)],
            env={**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    assert ran.returncode == 0, ran.stderr[-3000:]
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith(('{"synced"', '{"log"'))]
    syncs = [line for line in lines if "synced" in line]
    assert len(syncs) == STEPS
    assert all(sync["digest"] == digest_of(Path(sync["folder"])) for sync in syncs)
    assert len({sync["digest"] for sync in syncs}) == STEPS, "each step has changed the weights"
    (log,) = (line["log"] for line in lines if "log" in line)
    assert log["ratio"] == pytest.approx(1.0, abs=0.2)
    assert log["sample/staleness_max"] <= 4
