"""Models, tokenizer, version, and routes that are not there yet."""

from typing import Any

import pytest

from lorikeet import __version__
from tests.support.api_server import TOKENIZER, Running

pytestmark = pytest.mark.slow


async def test_the_base_model_comes_first_and_adapters_name_it_as_parent(server: Running) -> None:
    server.service.catalog.register("aaa", str(server.sources / "json"))
    cards = (await server.http.get("/v1/models")).json()["data"]
    assert [card["id"] for card in cards] == ["base", "formal", "aaa"]
    assert [card["parent"] for card in cards] == [None, "base", "base"]
    assert [card["root"] for card in cards] == ["/models/base", "formal", "json"], "where folders lie is not told"
    for card in cards:
        assert card["object"] == "model"
        assert card["max_model_len"] == 256
        assert card["input_modalities"] == ["text"]
        assert isinstance(card["created"], int)
        assert card["permission"][0]["object"] == "model_permission"


async def test_single_model_card(server: Running) -> None:
    for name in ("base", "formal"):
        assert (await server.http.get(f"/v1/models/{name}")).json()["id"] == name
    reply = await server.http.get("/v1/models/org/nobody")
    assert reply.status_code == 404
    assert reply.json()["error"]["message"] == "The model `org/nobody` does not exist."


async def test_a_prompt_is_tokenized_and_back(server: Running) -> None:
    reply = (await server.http.post("/tokenize", json={"model": "formal", "prompt": "hello 🦜"})).json()
    assert reply["tokens"] == TOKENIZER.encode("hello 🦜").ids
    assert (reply["count"], reply["max_model_len"]) == (len(reply["tokens"]), 256)
    text = (await server.http.post("/detokenize", json={"model": "base", "tokens": reply["tokens"]})).json()
    assert text == {"prompt": "hello 🦜"}


async def test_messages_are_tokenized_as_chat_does(server: Running) -> None:
    messages = [{"role": "user", "content": "hello"}]
    await server.http.post("/v1/chat/completions", json={"messages": messages})
    reply = (await server.http.post("/tokenize", json={"messages": messages, "return_token_strs": True})).json()
    assert reply["tokens"] == server.engine.submitted[0].prompt_token_ids
    assert reply["token_strs"][0] == "<|im_start|>"


@pytest.mark.parametrize(
    "fields",
    [
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"chat_template_kwargs": {"add_generation_prompt": False}},
        {"chat_template_kwargs": {"continue_final_message": True}, "add_generation_prompt": False},
        {"tools": [{"type": "function"}]},
        {"add_special_tokens": True},
        {"continue_final_message": True, "chat_template_kwargs": {"add_generation_prompt": True}},
        {"chat_template_kwargs": {"add_generation_prompt": "yes"}},
    ],
)
async def test_tokenize_and_chat_build_the_same_prompt_from_the_same_options(
    server: Running, fields: dict[str, Any]
) -> None:
    content = {"messages": [{"role": "user", "content": "hello"}], **fields}
    answered = await server.http.post("/v1/chat/completions", json=content)
    tokenized = await server.http.post("/tokenize", json=content)
    if answered.status_code == 200:
        assert tokenized.json()["tokens"] == server.engine.submitted[0].prompt_token_ids
    else:
        assert answered.status_code in (400, 501)
        assert (tokenized.status_code, tokenized.json()) == (answered.status_code, answered.json())


async def test_body_can_set_the_end_of_the_prompt(server: Running) -> None:
    messages = [{"role": "user", "content": "hello"}]
    ends = [{"add_generation_prompt": False}, {"continue_final_message": True}]
    for end in ends:
        content = {"messages": messages, "chat_template_kwargs": end}
        await server.http.post("/v1/chat/completions", json=content)
    prompts = [TOKENIZER.decode(r.prompt_token_ids, skip_special_tokens=False) for r in server.engine.submitted]
    assert prompts == ["<|im_start|>user\nhello<|im_end|>\n", "<|im_start|>user\nhello"]


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, 400),
        ("/tokenize", {"model": "nobody", "prompt": "x"}, 404),
        ("/detokenize", {"tokens": [1_000_000]}, 400),
        ("/detokenize", {"tokens": "x"}, 400),
    ],
)
async def test_invalid_tokenizer_calls_have_different_errors(
    server: Running, path: str, content: dict[str, object], status: int
) -> None:
    assert (await server.http.post(path, json=content)).status_code == status


async def test_a_long_text_is_tokenized_like_a_short_one(server: Running) -> None:
    text = "hello world " * 1000
    reply = (await server.http.post("/tokenize", json={"prompt": text})).json()
    assert reply["tokens"] == TOKENIZER.encode(text).ids


async def test_version_route(server: Running) -> None:
    assert (await server.http.get("/version")).json() == {"version": __version__}
    health = (await server.http.get("/health")).json()
    assert health == {
        "status": "ready",
        "paused": False,
        "kernels": "scripted",
        "weights": "",
        "engine_restarts": 0,
    }


@pytest.mark.parametrize("path", ["/pooling", "/v1/audio/speech"])
async def test_unsupported_routes_answer_501(server: Running, path: str) -> None:
    reply = await server.http.post(path, json={"model": "base", "input": "x"})
    assert reply.status_code == 501
    assert "not supported" in reply.json()["error"]["message"]
