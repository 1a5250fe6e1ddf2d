"""What the training script feeds the model: no training here."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig
from styles import Pair
from train_adapters import batches, clean_config, encode


class LetterTokenizer:
    """One token per character; the template wraps the prompt in angle brackets."""

    eos_token_id = 0

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": True}
        return f"<{messages[0]['content']}>"

    def __call__(self, text: str, add_special_tokens: bool) -> SimpleNamespace:
        assert not add_special_tokens
        return SimpleNamespace(input_ids=[ord(letter) for letter in text])


def test_only_the_answer_and_the_end_of_the_turn_are_learned() -> None:
    example = encode(LetterTokenizer(), Pair("ab", "yz"))
    assert example.input_ids == [*map(ord, "<ab>yz"), 0]
    assert example.labels == [-100, -100, -100, -100, ord("y"), ord("z"), 0]


def test_an_epoch_has_every_example_once_and_padding_is_not_learned() -> None:
    examples = [encode(LetterTokenizer(), Pair("p" * n, "a" * n)) for n in range(1, 11)]
    seen: list[tuple[list[int], list[int]]] = []
    for ids, labels in batches(examples, 7, random.Random(3)):
        assert ids.shape == labels.shape
        for row, label in zip(ids.tolist(), labels.tolist(), strict=True):
            length = row.index(0) + 1
            assert set(row[length:]) <= {7}
            assert set(label[length:]) <= {-100}
            seen.append((row[:length], label[:length]))
    assert sorted(seen) == sorted(map(tuple, examples))


def test_the_order_of_an_epoch_depends_on_the_seed_alone() -> None:
    examples = [encode(LetterTokenizer(), Pair("p", "a" * n)) for n in range(1, 9)]

    def order(seed: int) -> list[torch.Tensor]:
        return [ids for ids, _ in batches(examples, 7, random.Random(seed))]

    assert all(torch.equal(one, two) for one, two in zip(order(1), order(1), strict=True))
    assert [ids.shape for ids in order(1)] != [ids.shape for ids in order(2)]


def test_a_saved_config_names_the_public_base_and_still_reads_as_plain_lora(tmp_path: Path) -> None:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["v_proj", "q_proj"], base_model_name_or_path=str(tmp_path))
    config.save_pretrained(str(tmp_path))
    clean_config(tmp_path / "adapter_config.json")
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert written["target_modules"] == ["q_proj", "v_proj"]
    assert "megatron_core" not in written
    read = LoraConfig.from_pretrained(str(tmp_path))
    assert (read.r, read.lora_alpha, read.target_modules) == (4, 8, {"q_proj", "v_proj"})
