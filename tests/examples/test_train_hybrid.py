"""The small hybrid of the examples: its loss, and a short training whose base and adapters a server tells apart."""

import json
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
from peft import PeftModel
from styles import build_pairs, load_topics
from train_adapters import IGNORED_LABEL
from train_hybrid import STYLES, Lengths, answer_loss, make_base, plain_pairs, train_all
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.harness import running_server
from lorikeet.models.default import prepare_default_model

NAMES = ("base", *STYLES)
TOKENS = 70


def test_unused_tokens_count_in_the_loss_as_one_logit() -> None:
    """It equals the cross entropy over the whole vocabulary, whose other embeddings are 0."""
    torch.manual_seed(0)
    base = make_base(vocabulary=50, hidden=64, layers=4)
    used = torch.tensor([3, 4, 7, 11, 30])
    unused = [token for token in range(50) if token not in used.tolist()]
    with torch.no_grad():
        base.model.embed_tokens.weight[unused] = 0
    ids = used[torch.tensor([[0, 1, 2, 4], [4, 3, 3, 0]])]
    labels = ids.clone()
    labels[:, :2] = IGNORED_LABEL
    logits = base(input_ids=ids, use_cache=False).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    assert torch.allclose(answer_loss(base, used, ids, labels), expected, atol=1e-5)


@pytest.mark.slow
def test_a_server_answers_as_peft_with_base_and_adapters(tmp_path: Path, default_model_cache: Path) -> None:
    """After a few passes over some of the texts, the adapters' answers differ from each other and from the base's."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(prepare_default_model(default_model_cache))
    topics = load_topics()[:4]
    train_all(tokenizer, topics, tmp_path, make_base(len(tokenizer), hidden=64), Lengths(8, 12))
    (prompt, *_) = [topic.prompt for topic in topics]
    (answers,) = _served(tmp_path, [prompt])
    assert len(set(answers.values())) == 3
    assert answers == {name: _expected(tokenizer, tmp_path, name, prompt) for name in NAMES}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.slow
def test_base_and_adapters_answer_as_they_were_trained(tmp_path: Path, default_model_cache: Path) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(prepare_default_model(default_model_cache))
    topics = load_topics()[::6]
    train_all(tokenizer, topics, tmp_path, make_base(len(tokenizer)), Lengths())
    pairs = {"base": plain_pairs(topics)} | {style: build_pairs(style, topics) for style in STYLES}
    found = _served(tmp_path, [topic.prompt for topic in topics])
    for name in NAMES:
        right = sum(answers[name] == pair.answer for answers, pair in zip(found, pairs[name], strict=True))
        assert right >= 0.9 * len(topics), f"{name}: {right} of {len(topics)}"


def _served(folder: Path, prompts: list[str]) -> list[dict[str, str]]:
    """Return the greedy answer to each prompt of the base and of each adapter, from a server."""
    flags = [str(folder / "base"), "--served-model-name", "base", "--dtype", "float32", "--memory", "64MiB"]
    flags += ["--threads", "1", "--store-dir", str(folder / "store")]
    for style in STYLES:
        flags += ["--lora-modules", f"{style}={folder / style}"]
    with running_server(flags, folder / "log") as running:
        found = [{name: _answer(running.url, name, prompt) for name in NAMES} for prompt in prompts]
        assert "lorikeet:snapshot_bytes" in urlopen(f"{running.url}/metrics").read().decode()
    return found


def _answer(url: str, model: str, prompt: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": TOKENS,
        "temperature": 0,
    }
    request = Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    answer: str = json.load(urlopen(request))["choices"][0]["message"]["content"]
    return answer


def _expected(tokenizer: Any, folder: Path, name: str, prompt: str) -> str:
    """Return what transformers and PEFT answer."""
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    if name != "base":
        model = PeftModel.from_pretrained(model, folder / name)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=TOKENS)[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))
