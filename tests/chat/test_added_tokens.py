"""Tokenizers with added tokens tokenize as in transformers, token by token, for bases and for adapters."""

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from lorikeet.adapters.chat_files import read_chat
from lorikeet.adapters.errors import AdapterError
from lorikeet.chat.adapter_chat import AdapterChats
from lorikeet.chat.chat_settings import ChatSettings
from lorikeet.chat.protocol import ChatMessage
from lorikeet.chat.sampling import ModelLimits
from lorikeet.chat.text_processor import PromptStyle, TextProcessor
from lorikeet.core.chat_template import ChatTemplate
from tests.support.api_server import TOKENIZER
from tests.support.fuzzing import Fuzzing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

SPEC: dict[str, Any] = json.loads(TOKENIZER.to_str())
SIZE = TOKENIZER.get_vocab_size()
NAMES = ("<|a|>", "<|b|>", "[END]", "<end>", "▁x", "word", "<|im_end|>x", "<é>", "a b", "</s>")
TEMPLATES = (
    "{% for m in messages %}<|a|>{{ m.role }}\n{{ m.content }}{{ eos_token }}\n{% endfor %}<|a|>",
    "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}[END]{% endfor %}",
    "{{ bos_token or '' }}{% for m in messages %} {{ m.content | trim }} word {% endfor %}",
)
WORDS = (*NAMES, *(token["content"] for token in SPEC["added_tokens"]), "hello", " ", "  ", "\n", "wordy", "Grüße", "x")


def flags(choose: random.Random) -> dict[str, bool]:
    plain = {"special": choose.random() < 0.5, "lstrip": False, "rstrip": False, "normalized": False}
    if choose.random() < 0.4:
        plain |= {name: choose.random() < 0.5 for name in ("lstrip", "rstrip", "normalized")}
    return plain | {"single_word": choose.random() < 0.15}


def added_tokens(choose: random.Random) -> list[dict[str, Any]]:
    """Return the added tokens of a relative of the tokenizer: more of them, others, renamed ones and other flags."""
    tokens = [dict(token) for token in SPEC["added_tokens"]]
    for token in tokens:
        if choose.random() < 0.3:
            token |= flags(choose)
        if choose.random() < 0.15:
            token["content"] = f"<|renamed_{token['id']}|>"
    last = max(SIZE, *(token["id"] + 1 for token in tokens))
    names = choose.sample(NAMES, choose.randint(0, 5))
    return tokens + [{"id": last + at, "content": name, **flags(choose)} for at, name in enumerate(names)]


def write(folder: Path, tokens: list[dict[str, Any]], config: dict[str, Any], choose: random.Random) -> None:
    """Write the files of a tokenizer, as those before and since transformers 5."""
    spec = json.loads(json.dumps(SPEC))
    by_id = {token["id"]: token["content"] for token in tokens}
    vocabulary = spec["model"]["vocab"]
    spec["model"]["vocab"] = {by_id.get(token_id, text): token_id for text, token_id in vocabulary.items()}
    spec["added_tokens"] = tokens
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    if choose.random() < 0.5:
        listed = {str(token["id"]): {key: token[key] for key in token if key != "id"} for token in tokens}
        config = {**config, "added_tokens_decoder": listed}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_generated_tokenizers_and_templates_are_those_of_transformers(fuzz: Fuzzing) -> None:
    base = TextProcessor(TOKENIZER, ChatTemplate(TEMPLATES[0], {"eos_token": "<|im_end|>"}))
    chats = AdapterChats(ChatSettings(base, ModelLimits(1000, SIZE + 8, (0,))))

    @fuzz.settings(few=40)
    @given(st.integers(0, 2**40))
    def compare(seed: int) -> None:
        choose = random.Random(seed)
        tokens = added_tokens(choose)
        template = choose.choice(TEMPLATES)
        names = [token["content"] for token in tokens]
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
        config["eos_token"] = choose.choice(names)
        config["pad_token"] = choose.choice([config["eos_token"], *names])
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            write(folder, tokens, config, choose)
            theirs = PreTrainedTokenizerFast.from_pretrained(str(folder))
            of_base = TextProcessor.read(folder)
            try:
                fitted = chats.fit(read_chat(folder))
            except AdapterError:
                fuzz.counts["refused"] += 1
                return
        settings = chats.settings(fitted)
        of_adapter = settings.text_processor
        if fitted.chat_template:
            of_adapter = of_adapter.with_template(ChatTemplate(fitted.chat_template, fitted.special_tokens))
        end = theirs.convert_tokens_to_ids(config["eos_token"])
        assert end in settings.limits.eos_token_ids
        assert of_base.eos_token_id == end
        for _ in range(4):
            text = "".join(choose.choices(WORDS, k=choose.randint(1, 8)))
            expected = theirs.encode(text, add_special_tokens=False)
            for ours in (of_base, of_adapter):
                found = ours.token_ids(text, add_special_tokens=False)
                assert found == expected, f"{text!r}: {found} instead of {expected}, {tokens}"
                assert ours.decode(found) == theirs.decode(found, clean_up_tokenization_spaces=False)
                assert ours.decode(found, skip_special_tokens=True) == theirs.decode(
                    found, skip_special_tokens=True, clean_up_tokenization_spaces=False
                )
            fuzz.counts["texts"] += 1
        said: list[dict[str, Any]] = [{"role": "user", "content": text}, {"role": "assistant", "content": "hello"}]
        given_to_them = said
        if "m.content %}" in template:
            given_to_them = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in said]
        expected_text = theirs.apply_chat_template(given_to_them, tokenize=False)
        for ours in (of_base, of_adapter):
            assert ours.chat_prompt([ChatMessage(**each) for each in said], PromptStyle()) == expected_text
        fuzz.counts["tokenizers"] += 1

    compare()
    assert fuzz.counts["tokenizers"]
