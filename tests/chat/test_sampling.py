"""From a body's fields to sampling parameters."""

from typing import Any

import msgspec
import pytest

from lorikeet.chat.protocol import GenerationBody
from lorikeet.chat.sampling import (
    MAX_BIASES,
    ModelLimits,
    SamplingDefaults,
    check_prompt,
    logit_bias_pairs,
    params_for_choice,
    sampling_params,
)
from lorikeet.core.request import SamplingParams
from lorikeet.http.errors import ApiError

LIMITS = ModelLimits(max_model_len=100, vocabulary=50, eos_token_ids=(2, 3))


def params(limits: ModelLimits = LIMITS, **fields: Any) -> SamplingParams:
    body = GenerationBody(**fields)
    return sampling_params(
        body,
        limits,
        prompt_tokens=40,
        default_max_tokens=None,
        logprobs=None,
        logit_bias=logit_bias_pairs(body, limits.vocabulary, 1),
    )


@pytest.mark.parametrize(
    ("fields", "attribute", "expected"),
    [
        ({}, "max_tokens", 60),
        ({}, "temperature", 1.0),
        ({"temperature": 0}, "temperature", 0),
        ({"temperature": 100}, "temperature", 100),
        ({}, "top_k", 0),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 5}, "top_k", 5),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"seed": -1}, "seed", 2**63 - 1),
        ({"presence_penalty": -2, "frequency_penalty": 2}, "presence_penalty", -2),
        ({"repetition_penalty": 1.3}, "repetition_penalty", 1.3),
        ({"logit_bias": {"7": -100, "0": 1.5}}, "logit_bias", ((7, -100), (0, 1.5))),
        ({}, "stop_token_ids", (2, 3)),
        ({"stop_token_ids": [9]}, "stop_token_ids", (2, 3, 9)),
        ({"stop_token_ids": [9], "ignore_eos": True}, "stop_token_ids", (9,)),
        ({"min_tokens": 60}, "min_tokens", 60),
    ],
)
def test_fields_become_parameters(fields: dict[str, Any], attribute: str, expected: Any) -> None:
    assert getattr(params(**fields), attribute) == expected


@pytest.mark.parametrize("key", ["07", "+7", "7 ", "７", "50", "1" * 5000, ""])
def test_a_key_of_logit_bias_is_a_token_id_as_json_writes_it(key: str) -> None:
    with pytest.raises(ApiError, match="is not a token id below 50") as raised:
        params(logit_bias={key: 1.0})
    assert len(raised.value.message) < 100


def test_all_sequences_together_have_so_many_biases_at_most() -> None:
    body = GenerationBody(logit_bias={str(token): 1.0 for token in range(1024)})
    assert len(logit_bias_pairs(body, 1024, MAX_BIASES // 1024)) == 1024
    with pytest.raises(ApiError, match=r"logit_bias: 1024 entries for each of 65 sequences"):
        logit_bias_pairs(body, 1024, MAX_BIASES // 1024 + 1)


def test_end_token_outside_the_vocabulary_is_ignored() -> None:
    limits = msgspec.structs.replace(LIMITS, eos_token_ids=(2, 50))
    assert params(limits=limits).stop_token_ids == (2,)
    with pytest.raises(ApiError, match="Token id 50 is out of vocabulary"):
        params(limits=limits, stop_token_ids=[50])


def test_models_defaults_fill_missing_fields() -> None:
    defaults = SamplingDefaults.from_generation_config(
        {"temperature": 0.6, "top_p": 0.9, "top_k": None, "eos_token_id": [1], "do_sample": True}
    )
    limits = ModelLimits(100, 50, (), defaults)
    assert (params(limits).temperature, params(limits).top_p, params(limits).top_k) == (0.6, 0.9, 0)
    assert params(limits, temperature=0.0).temperature == 0.0


def test_a_prompt_and_answer_past_the_context_are_refused_with_both_lengths() -> None:
    assert params(max_tokens=60).max_tokens == 60
    with pytest.raises(ApiError, match=r"maximum context length is 100 tokens.*101 tokens \(40 in the input, 61"):
        params(max_tokens=61)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [([], "empty"), ([1] * 100, "your request has 100 input tokens"), ([50], "Token id 50 is out of")],
)
def test_prompts_that_cannot_be_served_are_refused(token_ids: list[int], message: str) -> None:
    with pytest.raises(ApiError, match=message):
        check_prompt(token_ids, LIMITS, "prompt")


def test_a_prompt_that_leaves_room_for_one_token_is_served() -> None:
    check_prompt([1] * 99, LIMITS, "prompt")


def test_choices_differ_in_their_seed_alone_and_always_in_the_same_way() -> None:
    first = params(seed=5)
    assert params_for_choice(first, 0) == first
    assert params_for_choice(first, 1) == params_for_choice(params(seed=5), 1)
    seeds = {params_for_choice(first, choice).seed for choice in range(128)}
    assert len(seeds) == 128
    assert all(0 <= seed < 2**63 for seed in seeds)
