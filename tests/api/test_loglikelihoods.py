"""Log likelihoods of continuations, as evaluation harnesses ask for them, are those of transformers and PEFT."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.support.api_server import TOKENIZER, Running
from tests.support.chat_requests import COMPLETIONS
from tests.support.live import write_adapter
from tests.support.served import make_model, serving

QUESTIONS = [("hello the world, ", ("the lorikeet", "a small parrot", "日本語")), ("the", (" lorikeet", " world"))]


def expected(model: torch.nn.Module, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Return the log likelihood of a continuation, and whether it is the greedy one."""
    with torch.inference_mode():
        logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
    logprobs = logits.log_softmax(dim=-1)
    chosen = torch.tensor(continuation)
    return float(logprobs[range(len(chosen)), chosen].sum()), bool((logprobs.argmax(dim=-1) == chosen).all())


async def test_the_tokens_of_a_continuation_are_found_among_the_echoed_ones(server: Running) -> None:
    for question, choices in QUESTIONS:
        context = TOKENIZER.encode(question).ids
        for continuation in (TOKENIZER.encode(choice).ids for choice in choices):
            asked = {"model": "base", "prompt": context + continuation, "echo": True, "max_tokens": 1, "logprobs": 1}
            reply = await server.http.post(COMPLETIONS, json=asked)
            logprobs = reply.json()["choices"][0]["logprobs"]
            assert len(logprobs["tokens"]) == len(context) + len(continuation) + 1
            places = range(len(context), len(context) + len(continuation))
            assert logprobs["token_logprobs"][len(context) : -1] == [-float(place) for place in places]


@pytest.mark.slow
@pytest.mark.long
async def test_multiple_choice_equals_transformers_on_base_and_adapter(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    adapter = write_adapter(tmp_path / "mine", folder, seed=3)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    own = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), adapter)
    flags = ("--dtype", "float32", "--lora-modules", f"mine={adapter}", "--max-num-batched-tokens", "16")
    async with serving(folder, tmp_path / "home", *flags) as server:
        pairs = [
            (TOKENIZER.encode(question).ids, TOKENIZER.encode(choice).ids)
            for question, choices in QUESTIONS
            for choice in choices
        ]
        for name, model in (("tiny", base), ("mine", own), ("tiny", base)):
            asked = {"model": name, "echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0}
            body = {**asked, "prompt": [context + continuation for context, continuation in pairs]}
            reply = await server.http.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            for (context, continuation), choice in zip(pairs, reply.json()["choices"], strict=True):
                logprobs = choice["logprobs"]
                values = logprobs["token_logprobs"][len(context) : -1]
                tops = zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
                is_greedy = all(max(top, key=top.__getitem__) == token for token, top in list(tops)[len(context) : -1])
                likelihood, was_greedy = expected(model, context, continuation)
                assert sum(values) == pytest.approx(likelihood, abs=1e-3)
                assert is_greedy == was_greedy
