"""Token ids in and out: ``/inference/v1/generate`` in vLLM's form, and the rendering of chats for it."""

from typing import Any

import pytest

from tests.support.api_server import END, TOKENIZER, Running
from tests.support.chat_requests import CHAT, MESSAGES, events

GENERATE = "/inference/v1/generate"
RENDER = "/v1/chat/completions/render"
PROMPT = TOKENIZER.encode("hello the ").ids
ANSWER = [*TOKENIZER.encode("hello world").ids, END]


def asked(**fields: Any) -> dict[str, Any]:
    params = {"max_tokens": 100, **fields.pop("sampling_params", {})}
    return {"model": "base", "token_ids": PROMPT, "sampling_params": params, **fields}


async def ask(server: Running, url: str, body: dict[str, Any], **given: Any) -> Any:
    reply = await server.http.post(url, json=body, **given)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_token_ids_come_in_and_go_out(server: Running) -> None:
    params = {"logprobs": 1, "output_kind": 2, "prompt_logprobs": None, "n": 2, "seed": 3}
    answer = await ask(server, GENERATE, asked(sampling_params=params, request_id="mine"))
    assert answer["request_id"] == "mine"
    for index, choice in enumerate(answer["choices"]):
        assert choice["index"] == index
        assert choice["token_ids"] == ANSWER
        assert choice["finish_reason"] == "stop"
        assert [each["token"] for each in choice["logprobs"]["content"]] == [f"token_id:{each}" for each in ANSWER]
    assert server.engine.submitted[-1].prompt_token_ids == PROMPT
    assert answer["system_fingerprint"]


async def test_the_weights_are_named_and_may_be_expected(server: Running) -> None:
    answer = await ask(server, GENERATE, asked(return_weight_versions=True))
    (choice,) = answer["choices"]
    assert choice["weight_versions"][0]["version"] == answer["system_fingerprint"]
    for padding in ("", "x" * 70_000):
        refused = await server.http.post(GENERATE, json=asked(expect_digest="0" * 12, padding=padding))
        assert refused.status_code == 409


async def test_a_stream_has_every_token(server: Running) -> None:
    chunks = await events(server.http, GENERATE, asked(stream=True, stream_options={"include_usage": True}))
    *parts, last = chunks
    assert {chunk["request_id"] for chunk in chunks} == {last["request_id"]}
    assert [token for chunk in parts for token in chunk["choices"][0]["token_ids"]] == ANSWER
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"
    assert last["usage"]["completion_tokens"] == len(ANSWER)


async def test_the_models_defaults_do_not_apply(server: Running) -> None:
    """A trainer must know the distribution that it samples from."""
    await ask(server, GENERATE, {"token_ids": PROMPT})
    sampling = server.engine.submitted[-1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (16, 1.0, 1.0, 0)


async def test_a_large_body_is_read_apart(server: Running) -> None:
    prompt = PROMPT * 4
    body = asked() | {"token_ids": prompt, "padding": "x" * 70_000, "request_id": "large"}
    answer = await ask(server, GENERATE, body)
    assert (answer["request_id"], answer["choices"][0]["token_ids"]) == ("large", ANSWER)
    assert server.engine.submitted[-1].prompt_token_ids == prompt


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"token_ids": []}, 400, "token_ids"),
        ({"token_ids": [10**6]}, 400, "token_ids"),
        ({"features": {"mm_hashes": {}}}, 501, "features"),
        ({"token_ids": [10**6], "padding": "x" * 70_000}, 400, "token_ids"),
        ({"token_ids": PROMPT * 1000}, 400, "token_ids"),
        ({"sampling_params": {"temperature": -1}}, 400, "sampling_params.temperature"),
        ({"sampling_params": {"prompt": "a"}}, 400, "sampling_params.prompt"),
        ({"sampling_params": {"temprature": 0}}, 400, "sampling_params.temprature"),
        ({"sampling_params": {"prompt_logprobs": 1}, "stream": True}, 400, "sampling_params.prompt_logprobs"),
    ],
)
async def test_wrong_fields_are_refused(server: Running, fields: dict[str, Any], status: int, param: str) -> None:
    reply = await server.http.post(GENERATE, json=asked(**fields))
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)


async def test_a_rendered_chat_gives_the_chats_answer(server: Running) -> None:
    chat = {"model": "base", "messages": MESSAGES, "max_tokens": 7, "temperature": 0.5, "stop": ["x"]}
    rendered = await ask(server, RENDER, chat)
    await ask(server, CHAT, chat)
    by_chat = server.engine.submitted[-1]
    assert rendered["token_ids"] == by_chat.prompt_token_ids
    await ask(server, GENERATE, rendered)
    by_tokens = server.engine.submitted[-1]
    assert by_tokens.prompt_token_ids == by_chat.prompt_token_ids
    for field in ("max_tokens", "temperature", "stop_token_ids"):
        assert getattr(by_tokens.sampling, field) == getattr(by_chat.sampling, field)


async def test_a_session_reaches_the_engine_as_its_tenants_own(server: Running) -> None:
    await ask(server, GENERATE, asked(), headers={"X-Session-ID": "trajectory-1"})
    assert server.engine.submitted[-1].session.endswith("trajectory-1")
    await ask(server, GENERATE, asked())
    assert server.engine.submitted[-1].session == ""


TEMPLATE = "{% for message in messages %}<{{ message.content }}>{% endfor %}"


@pytest.mark.parametrize("padding", [0, 70_000])
async def test_a_chat_may_bring_its_own_template(server: Running, padding: int) -> None:
    chat = {"model": "base", "messages": MESSAGES, "chat_template": TEMPLATE, "padding": "x" * padding}
    await ask(server, CHAT, chat)
    wanted = "".join(f"<{message['content']}>" for message in MESSAGES)
    assert server.engine.submitted[-1].prompt_token_ids == TOKENIZER.encode(wanted).ids
    tokens = await ask(server, "/tokenize", chat)
    assert tokens["tokens"] == TOKENIZER.encode(wanted).ids


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for", "chat_template"),
        ("{{ raise_exception('no') }}", "no"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "too much"),
        ("other", "'other'"),
        ("{" * 300_000, "262144"),
    ],
)
async def test_wrong_templates_are_refused(server: Running, template: str, words: str) -> None:
    reply = await server.http.post(CHAT, json={"model": "base", "messages": MESSAGES, "chat_template": template})
    assert reply.status_code == 400, reply.text
    assert words in reply.json()["error"]["message"]
