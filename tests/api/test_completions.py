"""Completions over HTTP."""

from typing import Any

import pytest

from lorikeet.chat.text_processor import TextProcessor
from tests.support.api_server import END, TOKENIZER, Running, count_calls_off_the_loop
from tests.support.chat_requests import COMPLETIONS, events

pytestmark = pytest.mark.slow


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "base", "prompt": "hello", **fields}


async def test_answer_has_openais_shape(server: Running) -> None:
    answer = (await server.http.post(COMPLETIONS, json=body())).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "hello world",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "token_ids": None,
            "system_fingerprint": "ba5eba5eba5e",
        }
    ]
    assert answer["system_fingerprint"] == "ba5eba5eba5e"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", [TOKENIZER.encode("hello").ids]),
        (["hello", "the"], [TOKENIZER.encode("hello").ids, TOKENIZER.encode("the").ids]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
async def test_a_prompt_comes_in_four_forms(server: Running, prompt: Any, expected: list[list[int]]) -> None:
    answer = (await server.http.post(COMPLETIONS, json=body(prompt=prompt, n=2))).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(expected)))
    sent = [request.prompt_token_ids for request in server.engine.submitted]
    assert sent == [prompt for prompt in expected for _ in range(2)]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


@pytest.mark.parametrize("prompt", [[], "", [[]], [""], [5, "x"], [100_000], 7, None])
async def test_missing_prompt_is_refused(server: Running, prompt: Any) -> None:
    reply = await server.http.post(COMPLETIONS, json=body(prompt=prompt))
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "prompt"
    assert server.service.gate.active == 0


async def test_default_limit_is_sixteen_tokens(server: Running) -> None:
    await server.http.post(COMPLETIONS, json=body())
    await server.http.post(COMPLETIONS, json=body(prompt=[5] * 250))
    assert [request.sampling.max_tokens for request in server.engine.submitted] == [16, 6]


async def test_the_prompt_is_echoed_on_request(server: Running) -> None:
    answer = (await server.http.post(COMPLETIONS, json=body(prompt="the ", echo=True))).json()
    assert answer["choices"][0]["text"] == "the hello world"
    chunks = await events(server.http, COMPLETIONS, body(prompt="the ", echo=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "the hello world"


async def test_echo_is_decoded_once_per_prompt_of_accepted_requests(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[list[int]] = []
    decode = TextProcessor.decode

    def counting(texts: TextProcessor, token_ids: list[int], **options: bool) -> str:
        decoded.append(token_ids)
        return decode(texts, token_ids, **options)

    monkeypatch.setattr(TextProcessor, "decode", counting)
    prompts = [TOKENIZER.encode(text).ids for text in ("the ", "a ")]
    for outside in ([5] * 300, [100_000]):
        assert (await server.http.post(COMPLETIONS, json=body(prompt=outside, echo=True, n=3))).status_code == 400
    server.service.gate.draining = True
    assert (await server.http.post(COMPLETIONS, json=body(prompt=prompts, echo=True))).status_code == 503
    assert decoded == []
    server.service.gate.draining = False
    answer = (await server.http.post(COMPLETIONS, json=body(prompt=prompts, echo=True, n=2))).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["the hello world"] * 2 + ["a hello world"] * 2
    assert decoded == prompts


async def test_failed_echo_releases_the_ticket(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> str:
        raise RuntimeError("broken")

    monkeypatch.setattr(TextProcessor, "decode", broken)
    assert (await server.http.post(COMPLETIONS, json=body(prompt=[5], echo=True))).status_code == 500
    assert server.service.gate.active == 0


async def test_prompts_long_in_total_are_encoded_at_once_off_the_event_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_calls_off_the_loop(monkeypatch)
    assert (await server.http.post(COMPLETIONS, json=body(prompt=["hello"] * 3))).status_code == 200
    assert not calls
    assert (await server.http.post(COMPLETIONS, json=body(prompt=["hello " * 20] * 40))).status_code == 200
    assert len(calls) == 1
    long = [5] * 5000
    assert (await server.http.post("/detokenize", json={"tokens": long})).json() == {"prompt": TOKENIZER.decode(long)}
    assert len(calls) == 2
    chat = {"messages": [{"role": "user", "content": "hello " * 50}] * 100, "return_token_strs": True}
    reply = (await server.http.post("/tokenize", json=chat)).json()
    assert reply["token_strs"] == [TOKENIZER.id_to_token(token) for token in reply["tokens"]]
    assert len(calls) == 4


async def test_max_completion_tokens_counts_here_too_and_before_max_tokens(server: Running) -> None:
    for fields in ({"max_tokens": 1}, {"max_completion_tokens": 1}, {"max_tokens": 9, "max_completion_tokens": 1}):
        content = {"model": "base", "prompt": "hello", **fields}
        answer = (await server.http.post(COMPLETIONS, json=content)).json()
        assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 1)
    refused = await server.http.post(
        COMPLETIONS, json={"model": "base", "prompt": "hello", "max_completion_tokens": 300}
    )
    assert refused.json()["error"]["param"] == "max_completion_tokens"


async def test_logprobs_say_where_each_token_lies(server: Running) -> None:
    whole = (await server.http.post(COMPLETIONS, json=body(logprobs=2))).json()["choices"][0]["logprobs"]
    assert whole["text_offset"][0] == 0
    for offset, token in zip(whole["text_offset"], whole["tokens"], strict=True):
        assert "hello world<|im_end|>"[offset:].startswith(token)
    assert all(len(top) == 2 for top in whole["top_logprobs"])
    chunks = await events(server.http, COMPLETIONS, body(logprobs=2))
    offsets = [offset for chunk in chunks for offset in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == whole["text_offset"]


async def test_logprobs_may_be_false_and_an_empty_list_of_embeddings_is_none(server: Running) -> None:
    asked = {"model": "base", "prompt": "hello", "logprobs": False, "prompt_embeds": []}
    answer = (await server.http.post("/v1/completions", json=asked)).json()
    assert answer["choices"][0]["logprobs"] is None
    refused = await server.http.post("/v1/completions", json={"model": "base", "prompt": None, "prompt_embeds": []})
    assert "must be provided and non-empty" in refused.json()["error"]["message"]


async def test_suffixes_are_not_supported(server: Running) -> None:
    assert (await server.http.post(COMPLETIONS, json=body(suffix="x"))).status_code == 501


@pytest.mark.parametrize(
    ("fields", "reason", "stop_reason", "shown"),
    [
        ({}, "stop", None, "hello"),
        ({"stop_token_ids": [1]}, "stop", None, "hello"),
        ({"ignore_eos": True}, "length", None, "hello world"),
        ({"ignore_eos": True, "stop_token_ids": [END]}, "stop", END, "hello"),
        ({"ignore_eos": True, "stop": ["<|im_end|>"]}, "stop", "<|im_end|>", "hello"),
        ({"ignore_eos": True, "stop": ["lo<|im_end|> w"]}, "stop", "lo<|im_end|> w", "hel"),
        ({"ignore_eos": True, "stop": ["<|im_end|>"], "skip_special_tokens": False}, "stop", "<|im_end|>", "hello"),
        ({"ignore_eos": True, "stop": ["<|im_end|>"], "min_tokens": 20}, "length", None, "hello world"),
        ({"ignore_eos": True, "stop": ["<|im_end|>"], "include_stop_str_in_output": True}, "stop", "<|im_end|>",
         "hello<|im_end|>"),
        ({"stop": ["<|im_end|>"]}, "stop", None, "hello"),
    ],
)  # fmt: skip
async def test_stop_conditions_of_an_answer(
    server: Running, fields: dict[str, Any], reason: str, stop_reason: object, shown: str
) -> None:
    first, second = (TOKENIZER.encode(text).ids for text in ("hello", " world"))
    server.engine.script = lambda request: _until_a_stop([*first, END, *second, *[5] * 9], request)
    most = len(first) + 1 + len(second)
    if "min_tokens" in fields:
        fields = {**fields, "min_tokens": most}
    reply = await server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": most, **fields})
    choice = reply.json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], choice["text"]) == (reason, stop_reason, shown)


def _until_a_stop(tokens: list[int], request: Any) -> list[int]:
    """Return the tokens up to the first that ends the answer, as an engine does."""
    stops = request.sampling.stop_token_ids
    at = next((at for at, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[: min(at + 1, request.sampling.max_tokens)]
