"""The sampler against a slow, obvious one, and the properties that resuming on another replica needs."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from lorikeet.core.messages import StepOutputs
from lorikeet.core.plan import NOT_FINITE, PromptToken, SequenceStart, Token
from lorikeet.core.request import Request, SamplingParams
from lorikeet.engine.build import build_replica
from lorikeet.kernels.sampling import choose, gumbel_noise
from lorikeet.models.config import read_model_config
from lorikeet.worker.batch import RankSequence
from lorikeet.worker.sampler import _NONE_ALLOWED, Sampler, bias_of, edit_logits
from tests.kernels.choices import VOCAB, filters, kept_slowly
from tests.support.live import greedy, live_settings, make_model, prompt


def row(prompt: list[int] | None = None, outputs: list[int] | None = None, **params: Any) -> RankSequence:
    """A sequence to sample for; greedy unless told otherwise."""
    prompt = [1, 2] if prompt is None else prompt
    outputs = outputs or []
    sampling = SamplingParams(**{"max_tokens": 100, "temperature": 0.0, **params})
    return RankSequence(SequenceStart("r", prompt + outputs, len(prompt), sampling, None))


def sample(logits: torch.Tensor, rows: list[RankSequence]) -> list[Token | str]:
    return Sampler(choose).sample(logits, rows)


def random_logits(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(scale=3.0, size=(rows, vocab)).astype(np.float32))


def edited_slowly(logits: list[float], prompt: list[int], outputs: list[int], params: SamplingParams) -> list[float]:
    """Bias, penalties and min_tokens, token by token as their documentation says."""
    edited = list(logits)
    for token in range(len(edited)):
        edited[token] += sum(bias for biased, bias in params.logit_bias if biased == token)
        if token in prompt or token in outputs:
            factor = params.repetition_penalty
            edited[token] = edited[token] / factor if edited[token] > 0 else edited[token] * factor
        if token in outputs:
            edited[token] -= params.presence_penalty
        edited[token] -= params.frequency_penalty * outputs.count(token)
        if token in params.stop_token_ids and len(outputs) < params.min_tokens:
            edited[token] = -math.inf
    return edited


token_lists = st.lists(st.integers(0, VOCAB - 1), max_size=12)
penalties = st.fixed_dictionaries(
    {
        "presence_penalty": st.sampled_from([0.0, 0.5, -1.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.25, 1.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.7]),
        "logit_bias": st.lists(st.tuples(st.integers(0, VOCAB - 1), st.floats(-9, 9, width=32)), max_size=3).map(tuple),
        "stop_token_ids": st.sampled_from([(), (3,), (0, 23)]),
        "min_tokens": st.integers(0, 6),
    }
)
temperatures = st.sampled_from([0.3, 1.0, 1.7])


@given(st.integers(0, 2**32), token_lists, token_lists, penalties)
def test_edits_equal_the_slow_and_obvious_ones(seed: int, prompt: list[int], outputs: list[int], given: Any) -> None:
    logits = random_logits(seed)[0]
    asked = row(prompt, outputs, **given)
    expected = edited_slowly(logits.tolist(), prompt, outputs, asked.sampling)
    edit_logits(logits, asked, bias_of(asked.sampling))
    np.testing.assert_allclose(logits.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@given(st.integers(0, 2**32), st.integers(0, 5000), temperatures, penalties, filters)
def test_the_token_has_the_largest_noisy_logit_of_the_kept_tokens(
    seed: int, position: int, temperature: float, edits: dict[str, Any], kept_by: dict[str, Any]
) -> None:
    logits = random_logits(seed)
    outputs = [5] * position
    asked = row([1, 2], outputs, seed=seed, temperature=temperature, **edits, **kept_by)
    edited = edited_slowly(logits[0].tolist(), [1, 2], outputs, asked.sampling)
    scaled = [value / temperature for value in edited]
    noise = gumbel_noise(seed, position + 2, np.arange(VOCAB))
    noisy = {token: scaled[token] + float(noise[token]) for token in kept_slowly(scaled, **kept_by)}
    (token,) = sample(logits, [asked])
    # Rounding may part the two where tokens tie almost exactly, nowhere else.
    assert noisy.get(token.token_id, -math.inf) == pytest.approx(max(noisy.values()), abs=1e-4)


@pytest.mark.slow
@given(st.integers(0, 2**32), st.lists(st.tuples(temperatures, penalties, filters), min_size=1, max_size=5))
def test_token_does_not_depend_on_the_rest_of_the_batch(seed: int, given: list[Any]) -> None:
    rows = [
        row([1, 2], [5] * i, seed=i, logprobs=3, temperature=temperature, **edits, **kept_by)
        for i, (temperature, edits, kept_by) in enumerate(given)
    ]
    rows.append(row([1, 2], [5]))
    logits = random_logits(seed, rows=len(rows))
    alone = [sample(logits[i : i + 1], [asked])[0] for i, asked in enumerate(rows)]
    assert sample(logits, rows) == alone


@pytest.mark.slow
def test_tokens_are_drawn_in_proportion_to_their_probability() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    draws = 4000
    rows = [row(seed=seed, temperature=1.0) for seed in range(draws)]
    tokens = [token.token_id for token in sample(probabilities.log().repeat(draws, 1), rows)]
    shares = np.bincount(tokens, minlength=5) / draws
    np.testing.assert_allclose(shares, probabilities.numpy(), atol=0.03)
    assert shares[4] == 0


def test_no_temperature_overflows() -> None:
    tokens = sample(random_logits(0), [row(temperature=1e-40)])
    assert tokens == [Token(int(random_logits(0).argmax()))]


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    logits = random_logits(1)
    best = int(logits.argmax())
    (token,) = sample(logits, [row(logit_bias=((best, -100.0),), temperature=0.5, seed=3, logprobs=2)])
    expected = logits[0].log_softmax(dim=-1)
    assert token.token_id != best
    assert token.logprob == pytest.approx(float(expected[token.token_id]))
    assert token.top == tuple(zip(expected.topk(2).indices.tolist(), expected.topk(2).values.tolist(), strict=True))


@given(st.integers(0, 2**32), token_lists, temperatures, penalties, filters)
def test_processed_logprobs_are_of_the_distribution_that_is_sampled(
    seed: int, outputs: list[int], temperature: float, edits: dict[str, Any], kept_by: dict[str, Any]
) -> None:
    logits = random_logits(seed)
    asked = row([1, 2], outputs, seed=seed, temperature=temperature, logprobs=VOCAB, processed_logprobs=True)
    asked.sampling = msgspec.structs.replace(asked.sampling, **edits, **kept_by)
    scaled = [each / temperature for each in edited_slowly(logits[0].tolist(), [1, 2], outputs, asked.sampling)]
    kept = kept_slowly(scaled, **kept_by)
    mass = math.log(sum(math.exp(scaled[token]) for token in kept))
    (token,) = sample(logits, [asked])
    reported = {token_id: logprob for token_id, logprob in token.top if logprob > -math.inf}
    # Rounding may part the two where a token is at the edge of a filter.
    assert abs(len(reported) - len(kept)) <= 1
    if reported.keys() == set(kept):
        for token_id, logprob in [*reported.items(), (token.token_id, token.logprob)]:
            assert logprob == pytest.approx(scaled[token_id] - mass, abs=1e-4)


def test_processed_logprobs_of_a_greedy_token_are_not_scaled() -> None:
    logits = random_logits(1)
    (token,) = sample(logits, [row(logprobs=0, processed_logprobs=True)])
    assert token.logprob == pytest.approx(float(logits[0].log_softmax(dim=-1).max()))


def test_zero_alternatives_still_report_the_token_itself() -> None:
    (token,) = sample(random_logits(1), [row(logprobs=0)])
    assert token.logprob is not None
    assert token.top == ()


def test_a_stop_token_cannot_come_before_min_tokens() -> None:
    logits = random_logits(2)
    best = int(logits.argmax())
    params: dict[str, Any] = {"stop_token_ids": (best,), "min_tokens": 2}
    assert sample(logits, [row(outputs=[9], **params)])[0].token_id != best
    assert sample(logits, [row(outputs=[9, 9], **params)])[0].token_id == best


def test_token_ids_outside_of_the_vocabulary_have_no_effect() -> None:
    logits = random_logits(3)
    edits: dict[str, Any] = {"logit_bias": ((VOCAB, 5.0),), "stop_token_ids": (VOCAB + 1,), "min_tokens": 2}
    asked = row([VOCAB], [VOCAB + 5], presence_penalty=1.0, repetition_penalty=2.0, **edits)
    assert sample(logits, [asked])[0].token_id == int(logits.argmax())


def test_logits_are_not_changed() -> None:
    logits = random_logits(4, rows=2)
    before = logits.clone()
    sample(logits, [row(temperature=1.0, logit_bias=((1, 3.0),)), row(presence_penalty=1.0)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_reported_by_row(bad: float) -> None:
    logits = random_logits(5, rows=3)
    logits[1, 4] = bad
    tokens = sample(logits, [row(), row(), row(temperature=1.0)])
    assert [token == NOT_FINITE for token in tokens] == [False, True, False]


def test_a_temperature_that_fp32_cannot_hold_is_greedy() -> None:
    logits = random_logits(5)
    for top_p in (0.9, 1.0):
        (token,) = sample(logits, [row(temperature=1e-46, top_p=top_p)])
        assert token == Token(int(logits.argmax()))


def test_temperature_infinite_in_fp32_draws_among_the_allowed_tokens() -> None:
    held: dict[str, Any] = {"stop_token_ids": (3, 4, 5), "min_tokens": 2, "temperature": 1e39}
    for top_k, top_p in ((0, 1.0), (2, 1.0), (2, 0.9), (0, 0.9)):
        (token,) = sample(random_logits(5), [row(top_k=top_k, top_p=top_p, **held)])
        assert isinstance(token, Token)
        assert token.token_id not in (3, 4, 5)


def test_a_row_that_its_own_penalty_leaves_without_finite_logits_fails_alone() -> None:
    logits = random_logits(5, rows=2).abs() + 1
    tokens = sample(logits, [row(repetition_penalty=1e-39, top_p=0.9, temperature=1.0), row()])
    assert tokens == [_NONE_ALLOWED, Token(int(logits[1].argmax()))]


def test_each_step_samples_as_if_it_were_the_first() -> None:
    a = row([1, 2], seed=1, temperature=1.0)
    b = row([3], seed=2, temperature=1.0, top_k=5, stop_token_ids=tuple(range(12)), min_tokens=3)
    c = row([4, 5], seed=3, presence_penalty=1.5, logprobs=1)
    sampler = Sampler(choose)
    for step, rows in enumerate([[a, b], [a, b], [a, b, c], [a, b, c], [c, b], [b, a], [b, a]]):
        logits = random_logits(step, rows=len(rows))
        tokens = sampler.sample(logits, rows)
        assert tokens == sample(logits, rows)
        for sequence, token in zip(rows, tokens, strict=True):
            assert isinstance(token, Token)
            sequence.add_token(token.token_id)


def test_bfloat16_logits_are_edited_as_floats() -> None:
    logits = torch.tensor([[100.0, 100.0, 100.0]], dtype=torch.bfloat16)
    (token,) = sample(logits, [row(logit_bias=((2, 1e-3),), seed=1)])
    assert token == Token(2)


def test_bias_comes_before_penalties() -> None:
    (token,) = sample(torch.tensor([[2.0, 0.0, 1.4]]), [row([1], logit_bias=((1, 4.0),), repetition_penalty=3.0)])
    assert token == Token(0)  # (0 + 4) / 3 < 1.4 < 2 < 0 / 3 + 4


@given(
    st.integers(0, 2**32),
    token_lists,
    st.sets(st.integers(0, VOCAB - 1), max_size=4),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=4),
)
def test_only_allowed_tokens_and_no_bad_words(
    seed: int, outputs: list[int], allowed: set[int], bad: list[list[int]]
) -> None:
    outputs = [each % 4 for each in outputs]
    logits = random_logits(seed)
    possible = {
        token
        for token in range(VOCAB)
        if (not allowed or token in allowed) and not any([*outputs, token][-len(word) :] == word for word in bad)
    }
    given = {"allowed_token_ids": tuple(allowed), "bad_words": tuple(map(tuple, bad))}
    (token,) = sample(logits, [row(outputs=outputs, **given)])
    if not possible:
        assert token == _NONE_ALLOWED
    else:
        assert token == Token(max(possible, key=lambda each: float(logits[0, each])))


def test_named_tokens_are_reported_instead_of_the_likeliest() -> None:
    logits = random_logits(5)
    logprobs = logits[0].log_softmax(dim=-1)
    best = int(logits[0].argmax())
    (token,) = sample(logits, [row(logprobs=3, logprob_token_ids=(4, 9, best))])
    assert isinstance(token, Token)
    named = [best, *(each for each in (4, 9) if each != best)]
    assert [token_id for token_id, _ in token.top] == named
    assert [value for _, value in token.top] == pytest.approx([float(logprobs[each]) for each in named])


# --- Log probabilities of prompts are those of transformers, however the prompt is computed -----


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


@pytest.mark.slow
@pytest.mark.parametrize("budget", [7, 64, 200])
def test_prompt_logprobs_equal_transformers_for_any_chunks(model: Path, budget: int) -> None:
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


def test_processed_logprobs_of_a_prompt_are_the_models(model: Path) -> None:
    """No temperature acts on a token that nobody samples, as in vLLM."""
    ids = prompt(20)
    asked = greedy("a", ids, 1, prompt_logprobs=0, processed_logprobs=True, temperature=0.5)
    found = scored(answer(model, [asked]), "a")
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(model).float()(torch.tensor([ids])).logits[0]
    for position, logprobs in enumerate(logits.log_softmax(dim=-1)[:-1], start=1):
        assert found[position].logprob == pytest.approx(float(logprobs[ids[position]]), abs=1e-4)


@pytest.mark.slow
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
