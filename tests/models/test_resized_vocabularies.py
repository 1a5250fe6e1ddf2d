"""Adapters over a base whose vocabulary was resized answer as PEFT, or are refused in one sentence.

A family of all sizes, bases and ways to train the vocabulary; some of it runs by default, all with ``--all``.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from lorikeet.adapters.checkpoint import DescribeOptions, describe_folder
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.store import reference
from lorikeet.core.request import Request
from lorikeet.models.config import read_model_config
from tests.models.checkpoints import make_checkpoint
from tests.models.library_runs import MAX_MODEL_LEN, geometry_of, request, run, settings_of
from tests.models.peft_family import lora, make
from tests.models.peft_runs import load

VOCABULARY = 96
TOKENS = 4
PROMPT = [5, 41, 77, 3, 9, 12, 60, 79, 7]
TOLERANCE = 2e-5

SIZES = {"smaller": 80, "one fewer": 95, "the same": VOCABULARY, "one more": 97, "padded to 64": 128}
BASES = {"tied": "qwen3-biases", "untied": "llama"}
WAYS: dict[str, dict[str, Any]] = {
    "nothing of the vocabulary": {"target_modules": ["q_proj"]},
    "both layers": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "the embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "the output layer": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 7, 41, 60]},
    "LoRA on the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "LoRA on the output layer": {"target_modules": ["q_proj", "lm_head"]},
    "LoRA on both": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "DoRA on both": {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_dora": True},
    "LoRA with biases on the output layer": {"target_modules": ["q_proj", "lm_head"], "lora_bias": True},
}
"""What an adapter trains."""


def differences(found: dict[int, float], expected: Tensor) -> float:
    """Return the largest difference from PEFT's log probabilities, over the tokens that both have."""
    both = min(VOCABULARY, len(expected))
    wanted = expected[:both].log_softmax(-1)
    assert all(logprob == -torch.inf for token, logprob in found.items() if token >= both)
    return float((torch.tensor([found[token] for token in range(both)]) - wanted).abs().max())


def answer(base: Path, folder: Path, implementation: str) -> tuple[Request, list[tuple[int, dict[int, float]]]]:
    """Serve a prompt with an adapter; return each token with all log probabilities at its place."""
    geometry = geometry_of(base, implementation)
    asked = request("r", PROMPT, reference("adapter", folder, geometry), TOKENS)
    blocks = 2 * MAX_MODEL_LEN // 4 + 160
    settings = settings_of(base, implementation, memory_bytes=blocks * geometry.block_bytes(4))
    (tokens,) = run(settings, [[asked]]).tokens.values()
    return asked, [(each.token_id, dict(each.top)) for each in tokens]


def worst_difference(peft: PeftModel, base: Path, folder: Path, implementation: str) -> float:
    """Return the largest difference from PEFT of any log probability."""
    asked, tokens = answer(base, folder, implementation)
    token_ids = [*asked.prompt_token_ids, *(token for token, _ in tokens)]
    with torch.inference_mode():
        logits = peft(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    first = len(asked.prompt_token_ids) - 1
    return max(differences(top, logits[first + at]) for at, (_, top) in enumerate(tokens))


@pytest.mark.slow
@pytest.mark.sampled(10)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tie", BASES)
@pytest.mark.parametrize("implementation", ["lorikeet", "transformers"])
def test_an_adapter_of_a_resized_vocabulary_answers_as_peft(
    tmp_path: Path, way: str, size: str, tie: str, implementation: str
) -> None:
    base = tmp_path / "base"
    make_checkpoint(base, BASES[tie], vocab_size=VOCABULARY)
    resized = SIZES[size] if SIZES[size] != VOCABULARY else 0
    peft = make(load(base), tmp_path / "adapter", lora(**WAYS[way]), vocabulary=resized)
    assert worst_difference(peft, base, tmp_path / "adapter", implementation) < TOLERANCE


@pytest.mark.parametrize("rows", [80, 128])
@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_lora_on_a_resized_layer_without_the_layer_itself_is_refused_in_one_sentence(
    tmp_path: Path, module: str, rows: int
) -> None:
    base = tmp_path / "base"
    make_checkpoint(base, "llama", vocab_size=VOCABULARY)
    peft = make(load(base), tmp_path / "adapter", lora(target_modules=["q_proj", module]), vocabulary=rows)
    peft.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    with pytest.raises(AdapterError) as refused:
        describe_folder(tmp_path / "adapter", DescribeOptions(read_model_config(base).geometry(4)))
    assert f"is for {rows} tokens, but the" in str(refused.value)
    assert "of the base model has 96: a resized vocabulary needs" in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [[3, 100], [100], {"embed_tokens": [3, 100]}], ids=str)
@pytest.mark.parametrize("tie", BASES)
def test_added_tokens_that_were_trained_are_left_out_and_the_others_answer_as_peft(
    tmp_path: Path, tie: str, tokens: Any
) -> None:
    base = tmp_path / "base"
    make_checkpoint(base, BASES[tie], vocab_size=VOCABULARY)
    config = lora(target_modules=["q_proj"], trainable_token_indices=tokens)
    peft = make(load(base), tmp_path / "adapter", config, vocabulary=128)
    assert worst_difference(peft, base, tmp_path / "adapter", "lorikeet") < TOLERANCE
    found = describe_folder(tmp_path / "adapter", DescribeOptions(read_model_config(base).geometry(4)))
    assert any("1 tokens that are not used" in warning for warning in found.warnings)
