"""The three APIs of chats, on the default model and its adapters: the same conversations get the same answers."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from lorikeet.models.default import prepare_default_model
from tests.api.streams import events, merged, text_of
from tests.support.served import ADAPTERS, Server, serving

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

BASE = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"
SHORT = {"type": "string", "maxLength": 12}
SCHEMA = {"type": "object", "properties": {"city": SHORT}, "required": ["city"], "additionalProperties": False}
TOKENS = 24
SCHEMA_TOKENS = 64
"""Enough for the object with all the whitespace that the grammar lets a model write."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(default_model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    model = prepare_default_model(default_model_cache)
    flags = [flag for name in ("pirate", "formal") for flag in ("--lora-modules", f"{name}={ADAPTERS / name}")]
    # In fp32 the answers do not depend on how a prompt is divided into steps.
    flags += ["--served-model-name", BASE, "--memory", "256MiB", "--max-model-len", "1024", "--dtype", "float32"]
    async with serving(model, tmp_path_factory.mktemp("home"), *flags) as started:
        yield started


async def answers(server: Server, path: str, body: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    """Return an answer, read as a stream or whole."""
    if not stream:
        reply = await server.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        whole: dict[str, Any] = reply.json()
        return whole
    found = await events(server.http, path, body)
    return merged(found) if path == "/v1/messages" else found[-1]["response"]


async def chat_of(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    content = {"messages": messages, "temperature": 0, "max_tokens": TOKENS, **body}
    reply = await server.http.post("/v1/chat/completions", json=content)
    assert reply.status_code == 200, reply.text
    message: dict[str, Any] = reply.json()["choices"][0]["message"]
    return message


@pytest.mark.sampled
@pytest.mark.parametrize("case", ["plain", "tools", "schema"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", [BASE, "pirate", "formal"])
async def test_all_apis_give_the_answer_of_the_chat(server: Server, model: str, case: str, stream: bool) -> None:
    common: dict[str, Any] = {"model": model, "temperature": 0}
    function = {"name": "find", "parameters": SCHEMA}
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    own_fields: dict[str, tuple[dict[str, Any], ...]] = {
        "plain": ({}, {}, {}),
        "tools": (
            {
                "tools": [{"type": "function", "function": function}],
                "tool_choice": "required",
                "max_tokens": SCHEMA_TOKENS,
            },
            {
                "tools": [{"type": "function", **function}],
                "tool_choice": "required",
                "max_output_tokens": SCHEMA_TOKENS,
            },
            {
                "tools": [{"name": "find", "input_schema": SCHEMA}],
                "tool_choice": {"type": "any"},
                "max_tokens": SCHEMA_TOKENS,
            },
        ),
        "schema": (
            {
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
                "max_tokens": SCHEMA_TOKENS,
            },
            {"text": {"format": form}, "max_output_tokens": SCHEMA_TOKENS},
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "max_tokens": SCHEMA_TOKENS},
        ),
    }
    chat, responses, messages = own_fields[case]
    expected = await chat_of(server, common | chat)
    asked = common | {"input": QUESTION, "max_output_tokens": TOKENS} | responses
    response = await answers(server, "/v1/responses", asked, stream=stream)
    asked = common | {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": TOKENS} | messages
    message = await answers(server, "/v1/messages", asked, stream=stream)
    assert response["model"] == message["model"] == model
    if case != "tools":
        assert text_of(response) == "".join(block["text"] for block in message["content"]) == expected["content"]
        assert case == "plain" or "city" in json.loads(expected["content"])
        return
    calls = [call["function"]["arguments"] for call in expected["tool_calls"]]
    assert [item["arguments"] for item in response["output"] if item["type"] == "function_call"] == calls
    uses = [block["input"] for block in message["content"] if block["type"] == "tool_use"]
    assert uses == [json.loads(call) for call in calls]
