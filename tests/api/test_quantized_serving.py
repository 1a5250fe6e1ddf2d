"""Quantised bases over real HTTP, with two adapters beside each: greedy answers of the 16-bit base they stand for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorikeet.kernels.quantized import quantize
from lorikeet.models import default
from lorikeet.models.default import prepare_default_model
from tests.models.checkpoints import make_checkpoint
from tests.models.gguf_files import MIXED, write_model
from tests.support.api_server import TOKENIZER
from tests.support.fakes import write_adapter
from tests.support.served import Server, make_model, serving

pytestmark = pytest.mark.slow

SAMPLES = Path(__file__).parents[2] / "examples/adapters"


async def answers(server: Server, models: Sequence[str], prompt: str) -> list[dict[str, Any]]:
    """Return the greedy answer of each model, with the likeliest tokens of each position."""
    found = []
    for model in models:
        body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0, "logprobs": 3, "ignore_eos": True}
        reply = await server.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        found.append({key: reply.json()["choices"][0][key] for key in ("text", "logprobs")})
    return found


@pytest.mark.long
async def test_gguf_file_of_the_default_model_answers_like_the_converted_model(
    default_model_cache: Path, tmp_path: Path
) -> None:
    converted = prepare_default_model(default_model_cache)
    file = default.find_gguf()
    flags = [f"--lora-modules={name}={SAMPLES / name}" for name in ("pirate", "json")]
    small = ["--memory=128MiB", "--max-model-len=512"]
    prompt = "<|im_start|>user\nWhat is honey?<|im_end|>\n<|im_start|>assistant\n"
    found = []
    for model, name, form, more in (
        (converted, default.NAME, "bfloat16", []),
        (file, file.stem, "GGUF Q4_1, GGUF Q8_0: ", [f"--tokenizer={converted}"]),
    ):
        async with serving(model, tmp_path / name, *flags, *more, f"--cache-dir={tmp_path}", *small) as server:
            assert (await server.http.get("/health")).json()["weights"].startswith(form)
            found.append(await answers(server, (name, "pirate", "json"), prompt))
    assert found[0] == found[1]
    assert len({answer["text"] for answer in found[0]}) == 3


async def test_base_quantised_on_load_answers_like_one_with_quantised_weights(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny")
    other = make_model(tmp_path / "numbers")
    adapters = [write_adapter(tmp_path / each, seed=seed, layers=3, hidden=48) for seed, each in enumerate("ab")]
    flags = [f"--lora-modules={each.name}={each}" for each in adapters]
    tensors = load_file(other / "model.safetensors")
    for key, tensor in tensors.items():
        if key.endswith("_proj.weight") or key == "lm_head.weight":
            bits = 8 if key == "lm_head.weight" else 4
            tensors[key] = quantize(tensor, bits).dequantized(torch.float32)
    save_file(tensors, other / "model.safetensors")
    async with serving(model, tmp_path / "home", *flags, "--quantization", "int4") as server:
        weights = (await server.http.get("/health")).json()["weights"]
        assert weights.startswith("int4 in groups of 32, output layer int8, quantised from float32: ")
        found = await answers(server, ("tiny", "a", "b"), "hello world")
    async with serving(other, tmp_path / "home2", *flags) as server:
        assert await answers(server, ("numbers", "a", "b"), "hello world") == found
    assert len({answer["text"] for answer in found}) == 3


@pytest.mark.long
async def test_a_gguf_file_is_served_with_another_tokenizer_and_over_two_ranks(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": TOKENIZER.get_vocab_size()}
    made = make_checkpoint(tmp_path / "made", "llama", **sizes)
    file = write_model(tmp_path / "mixed.gguf", made, "llama", {**MIXED, "token_embd": MIXED["output"]})
    tokenizer = make_model(tmp_path / "tokenizer")
    flags = [f"--tokenizer={tokenizer}", f"--cache-dir={tmp_path}", "--dtype=float32"]
    flags += [f"--lora-modules={name}={write_adapter(tmp_path / name, layers=3, hidden=256)}" for name in "ab"]
    found = []
    for ranks in ("1", "2"):
        async with serving(file, tmp_path / ranks, *flags, "--tensor-parallel-size", ranks) as server:
            found.append(await answers(server, ("mixed", "a"), "hello world"))
    assert [each["text"] for each in found[0]] == [each["text"] for each in found[1]]
