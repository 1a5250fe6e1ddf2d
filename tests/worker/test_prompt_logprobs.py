"""Log probabilities of prompts are those of transformers, however the prompt is computed."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lorikeet.core.messages import StepOutputs
from lorikeet.core.plan import PromptToken
from lorikeet.core.request import Request
from lorikeet.engine.build import build_replica
from lorikeet.models.config import read_model_config
from tests.support.live import greedy, live_settings, make_model, prompt


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def expected(model: Path, token_ids: list[int]) -> Tensor:
    """Return log probabilities ``[tokens - 1, vocab]`` of the second token on."""
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(model).float()(torch.tensor([token_ids])).logits[0]
    return logits.log_softmax(dim=-1)[:-1]


def answer(model: Path, requests: Iterable[Request], max_model_len: int = 160, **engine: Any) -> list[StepOutputs]:
    settings = live_settings(model, **engine)
    settings = msgspec.structs.replace(
        settings, model=msgspec.structs.replace(settings.model, max_model_len=max_model_len)
    )
    running = build_replica(settings).engine
    outputs = []
    try:
        for request in requests:
            running.submit(request)
        while running.has_requests:
            outputs.append(running.step())
        return [*outputs, msgspec.structs.replace(running.step(), stats=running.stats())]
    finally:
        running.close()


def scored(outputs: list[StepOutputs], name: str) -> dict[int, PromptToken]:
    """What a request was told, by position; each position once."""
    found: dict[int, PromptToken] = {}
    for each in (each for turn in outputs for each in turn.prompt_logprobs if each.request_id == name):
        for position, token in enumerate(each.tokens, each.position):
            assert position not in found
            found[position] = token
    return found


@pytest.mark.parametrize("budget", [7, 64, 200])
def test_they_equal_transformers_for_any_chunks_beside_other_requests(model: Path, budget: int) -> None:
    """Prompts of one to 150 tokens, some with common prefixes, which are not taken from the cache."""
    long = prompt(150)
    prompts = {"a": long, "b": long[:90], "c": [5], "d": [5, 6]}
    requests = [greedy(name, ids, 3, prompt_logprobs=2) for name, ids in prompts.items()]
    requests += [greedy("plain", long[:100], 5), greedy("again", long, 3, prompt_logprobs=0, logprobs=None)]
    outputs = answer(model, requests, max_num_batched_tokens=budget)
    for name, ids in [*prompts.items(), ("again", long)]:
        found = scored(outputs, name)
        assert sorted(found) == list(range(1, len(ids)))
        if len(ids) == 1:
            continue
        for position, logprobs in enumerate(expected(model, ids), start=1):
            token = found[position]
            assert token.token_id == ids[position]
            assert token.logprob == pytest.approx(float(logprobs[ids[position]]), abs=1e-4)
            assert token.rank == pytest.approx(int((logprobs > logprobs[ids[position]]).sum()) + 1, abs=1)
            best = logprobs.topk(2).values.tolist() if name != "again" else []
            assert [logprob for _, logprob in token.top] == pytest.approx(best, abs=1e-4)
    assert not scored(outputs, "plain")


def test_a_preempted_request_repeats_nothing_that_it_has_computed(model: Path) -> None:
    """Eight sequences in memory for about five."""
    long = prompt(60)
    requests = [greedy(name, [seed, *long], 40, prompt_logprobs=0) for seed, name in enumerate("abcdefgh")]
    block_bytes = read_model_config(model).geometry(4).block_bytes(4)
    outputs = answer(model, requests, 110, memory_bytes=150 * block_bytes, max_num_batched_tokens=16)
    stats = outputs[-1].stats
    assert stats is not None
    assert stats.preemptions
    for request in requests:
        found = scored(outputs, request.request_id)
        values = expected(model, request.prompt_token_ids)
        assert sorted(found) == list(range(1, 61))
        for position, token in found.items():
            assert token.logprob == pytest.approx(float(values[position - 1, token.token_id]), abs=1e-4)
