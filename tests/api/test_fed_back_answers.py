"""A conversation that the server answered can go on, whatever the model wrote and wherever it was cut off."""

import asyncio
import json
import random
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.chat.text_processor import TextProcessor
from lorikeet.chat.tool_parsers import TOOL_FORMATS
from lorikeet.core.chat_template import ChatTemplate
from tests.chat.broken_answers import broken_answer
from tests.support.api_server import END, TEMPLATE, TOKENIZER, Running, Start
from tests.support.fuzzing import Fuzzing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

MOST_TOKENS = 400
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
DESCRIBED = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
CALLS_IN = {
    "none": TEMPLATE,
    "items": "{% for m in messages %}{{ m.role }} {{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }};{% endfor %}{% endfor %}{% endfor %}"
    "{% if tools %}<function=x>{% endif %}",
    "json": "{% for m in messages %}{{ m.role }} {{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}{% if tools %}<tool_call>{% endif %}",
    "text": "{% for m in messages %}{{ m.role }} {{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}{% if tools %}[TOOL_CALLS]{% endif %}",
}
"""Templates, by the form in which they read the arguments of earlier calls."""


def stream_of(reply: httpx.Response) -> list[Any]:
    """Return the events of a stream that came to its end."""
    data = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    found = [json.loads(each) for each in data if each != "[DONE]"]
    assert data[-1] == "[DONE]" or found[-1]["type"] in ("response.completed", "response.incomplete", "message_stop")
    assert not any("error" in each and each["error"] for each in found), found[-1]
    return found


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, f"{path}: {reply.status_code} {reply.text[:500]} to {json.dumps(body)[:2_000]}"
    return reply


def chat_goes_on(http: httpx.Client, tools: bool, stream: bool) -> None:
    body: dict[str, Any] = {"model": "base", "messages": [{"role": "user", "content": "a"}], "max_tokens": MOST_TOKENS}
    if tools:
        body["tools"] = [{"type": "function", "function": {**DESCRIBED, "name": name}} for name in ("f", "g")]
    if stream:
        message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
        for chunk in stream_of(post(http, CHAT, body | {"stream": True})):
            for choice in chunk["choices"]:
                delta = choice["delta"]
                message["content"] += delta.get("content") or ""
                for part in delta.get("tool_calls", ()):
                    if "id" in part:
                        message["tool_calls"].append({**part, "function": {**part["function"]}})
                    else:
                        message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    else:
        message = post(http, CHAT, body).json()["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in message.get("tool_calls") or ()]
    later = [*body["messages"], message, *results, {"role": "user", "content": "b"}]
    post(http, CHAT, body | {"messages": later})
    post(http, "/tokenize", {"model": "base", "messages": later})


def responses_go_on(http: httpx.Client, tools: bool, stream: bool, kind: str = "function") -> None:
    body: dict[str, Any] = {"model": "base", "input": [{"role": "user", "content": "a"}]}
    body["max_output_tokens"] = MOST_TOKENS
    if tools:
        body["tools"] = [{"type": kind, **DESCRIBED, "name": name} for name in ("f", "g")]
    if stream:
        events = stream_of(post(http, RESPONSES, body | {"stream": True}))
        answer = events[-1]["response"]
        for item in answer["output"]:
            deltas = [each["delta"] for each in events if each.get("item_id") == item["id"] and "delta" in each]
            assert "".join(deltas) == item.get("input", "".join(deltas))
    else:
        answer = post(http, RESPONSES, body).json()
    results = [
        {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "r"}
        for item in answer["output"]
        if item["type"] in ("function_call", "custom_tool_call")
    ]
    post(http, RESPONSES, body | {"input": [*body["input"], *answer["output"], *results]})
    post(http, RESPONSES, body | {"input": results or "b", "previous_response_id": answer["id"]})


def responses_of_custom_tools_go_on(http: httpx.Client, tools: bool, stream: bool) -> None:
    responses_go_on(http, tools, stream, "custom")


def messages_go_on(http: httpx.Client, tools: bool, stream: bool) -> None:
    body: dict[str, Any] = {"model": "base", "messages": [{"role": "user", "content": "a"}], "max_tokens": MOST_TOKENS}
    if tools:
        body["tools"] = [{"name": name, "input_schema": DESCRIBED["parameters"]} for name in ("f", "g")]
    if stream:
        stream_of(post(http, MESSAGES, body | {"stream": True}))
    content = post(http, MESSAGES, body).json()["content"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "r"}
        for block in content
        if block["type"] == "tool_use"
    ]
    later: Any = [*body["messages"], {"role": "assistant", "content": content}]
    post(
        http,
        MESSAGES,
        body | {"messages": [*later, {"role": "user", "content": [*results, {"type": "text", "text": "b"}]}]},
    )


@pytest.mark.parametrize("kind", CALLS_IN)
@pytest.mark.parametrize("goes_on", [chat_goes_on, responses_go_on, responses_of_custom_tools_go_on, messages_go_on])
async def test_every_answer_can_be_fed_back(start: Start, kind: str, goes_on: Any, fuzz: Fuzzing) -> None:
    async with start(max_model_len=100_000) as server:
        serve_template(server, CALLS_IN[kind])

        def run(http: httpx.Client) -> None:
            @fuzz.settings(few=8)
            @given(st.integers(0, 2**40))
            def converse(seed: int) -> None:
                choose = random.Random(seed)
                text, _ = broken_answer(choose.choice(list(TOOL_FORMATS.values())), choose)
                tokens = [*TOKENIZER.encode(text).ids, END]
                server.engine.script = lambda request: tokens[: request.sampling.max_tokens]
                with fuzz.case(text[:500]):
                    goes_on(http, choose.random() < 0.8, choose.random() < 0.5)
                fuzz.counts["conversations"] += 1

            converse()

        with httpx.Client(base_url=server.http.base_url, timeout=60) as http:
            await asyncio.to_thread(run, http)


def serve_template(server: Running, template: str) -> None:
    """Let the base have another template."""
    chats = server.service.chats
    texts = TextProcessor(TOKENIZER, ChatTemplate(template, {}))
    object.__setattr__(chats.base, "text_processor", texts)
