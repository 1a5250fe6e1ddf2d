"""Anthropic's messages API over HTTP."""

from typing import Any

import pytest

from lorikeet.http.body_gate import SMALL_BODY_BYTES
from tests.api.streams import events, merged
from tests.support.api_server import Running, Start
from tests.support.tool_calls import CALL, LONG, TWO_CALLS, prompt_of, set_reasoning

pytestmark = pytest.mark.slow

MESSAGES = "/v1/messages"
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
NOW = {"name": "now", "input_schema": {"type": "object"}}
TOOLS = [WEATHER, NOW]
ASKED = [{"role": "user", "content": "hello"}]
START = "<|im_start|>assistant\n"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "base", "max_tokens": 100, "messages": ASKED, **fields}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


async def test_message_has_anthropics_shape(server: Running) -> None:
    reply = await server.http.post(MESSAGES, json=body(system="be brief", metadata={"user_id": "x"}))
    message = reply.json()
    prompt = len(server.engine.submitted[0].prompt_token_ids)
    assert message == {
        "id": f"msg_{reply.headers['x-request-id']}",
        "type": "message",
        "role": "assistant",
        "model": "base",
        "content": [{"type": "text", "text": "hello world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "system_fingerprint": "ba5eba5eba5e",
        "usage": message["usage"],
    }
    assert message["usage"]["input_tokens"] == prompt
    assert message["usage"]["output_tokens"] > 1
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    assert prompt_of(server) == (f"<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n{START}")


@pytest.mark.parametrize("answer", ["hello world", "", TWO_CALLS, f"<think>hm</think>{CALL}"])
async def test_stream_adds_up_to_the_message(start: Start, answer: str) -> None:
    async with start(max_model_len=LONG, answer=answer) as server:
        set_reasoning(server, "qwen3")
        content = body(max_tokens=1000, tools=TOOLS)
        whole = (await server.http.post(MESSAGES, json=content)).json()
        assert without_ids(merged(await events(server.http, MESSAGES, content))) == without_ids(whole)


async def test_thoughts_texts_and_calls_are_blocks(start: Start) -> None:
    async with start(max_model_len=LONG, answer=f"<think>hm</think>{TWO_CALLS}") as server:
        set_reasoning(server, "qwen3")
        message = (await server.http.post(MESSAGES, json=body(max_tokens=1000, tools=TOOLS))).json()
        thoughts, text, weather, now = message["content"]
        assert thoughts == {"type": "thinking", "thinking": "hm", "signature": ""}
        assert text == {"type": "text", "text": "Let me see."}
        assert (weather["type"], weather["name"], weather["input"]) == ("tool_use", "get_weather", {"city": "Oslo"})
        assert (now["name"], now["input"]) == ("now", {})
        assert message["stop_reason"] == "tool_use"
        hidden = (await server.http.post(MESSAGES, json=body(max_tokens=1000, thinking={"type": "disabled"}))).json()
        assert hidden["content"][0]["type"] == "text"


async def test_history_with_calls_and_thoughts_gives_the_prompt_of_a_chat(start: Start) -> None:
    async with start(max_model_len=LONG) as server:
        history = [
            {"role": "user", "content": [{"type": "text", "text": "weather?", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "Let me see."},
                    {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]},
                    {"type": "text", "text": "and tomorrow?"},
                ],
            },
        ]
        assert (
            await server.http.post(MESSAGES, json=body(max_tokens=1000, messages=history, tools=TOOLS))
        ).status_code == 200
        functions = [
            {
                "type": "function",
                "function": {"parameters" if key == "input_schema" else key: tool[key] for key in tool},
            }
            for tool in TOOLS
        ]
        call = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
        chat = [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "Let me see.", "tool_calls": [{"id": "toolu_1", "function": call}]},
            {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
            {"role": "user", "content": "and tomorrow?"},
        ]
        await server.http.post("/v1/chat/completions", json={"messages": chat, "tools": functions})
        assert prompt_of(server, 0) == prompt_of(server, 1)
        count = await server.http.post(f"{MESSAGES}/count_tokens", json={"messages": history, "tools": TOOLS})
        assert count.json() == {"input_tokens": len(server.engine.submitted[0].prompt_token_ids)}


async def test_last_message_of_the_assistant_is_continued(server: Running) -> None:
    messages = [*ASKED, {"role": "assistant", "content": "well, "}]
    await server.http.post(MESSAGES, json=body(messages=messages))
    assert prompt_of(server).endswith(f"{START}well, ")


@pytest.mark.parametrize(
    ("fields", "ended"),
    [
        ({"stop_sequences": ["wor"]}, ("hello ", "stop_sequence", "wor")),
        ({"max_tokens": 1}, ("h", "max_tokens", None)),
        ({"top_k": 3, "temperature": 0.5, "seed": 5}, ("hello world", "end_turn", None)),
    ],
)
async def test_answer_has_a_stop_reason(server: Running, fields: dict[str, Any], ended: tuple[Any, ...]) -> None:
    message = (await server.http.post(MESSAGES, json=body(model="formal", **fields))).json()
    text = message["content"][0]["text"]
    assert (message["stop_reason"], message["stop_sequence"]) == ended[1:]
    assert text == ended[0] or (ended[1] == "max_tokens" and ended[0] in text)
    sampling = server.engine.submitted[0].sampling
    assert sampling.top_k == fields.get("top_k", sampling.top_k)


@pytest.mark.parametrize(
    ("choice", "status"),
    [({"type": "any"}, 200), ({"type": "tool", "name": "now"}, 200), ({"type": "tool", "name": "x"}, 400)],
)
async def test_tool_choice_is_a_grammar_as_in_chats(start: Start, choice: dict[str, str], status: int) -> None:
    async with start(max_model_len=LONG, answer=CALL) as server:
        reply = await server.http.post(MESSAGES, json=body(max_tokens=1000, tools=TOOLS, tool_choice=choice))
        assert reply.status_code == status
        assert all(request.sampling.grammar for request in server.engine.submitted)


async def test_output_format_is_a_grammar(server: Running) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        assert (await server.http.post(MESSAGES, json=body(**fields))).status_code == 200
        assert server.engine.submitted[-1].sampling.grammar


CLAUDE_TOOLS = [*TOOLS, {"type": "web_search_20250305", "name": "web_search"}]
THOUGHTS = {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "y"}]}
ONE_CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "now", "input": {}}]}
ITS_RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "z"}]}
LONG_CHAT = [*ASKED, THOUGHTS, *ASKED, THOUGHTS, *ASKED, ONE_CALL, ITS_RESULT]


def turns(kept: int) -> dict[str, Any]:
    return {"type": "thinking_turns", "value": kept}


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
@pytest.mark.parametrize(
    ("edit", "status"),
    [
        ({"type": "clear_thinking_20251015", "keep": "all"}, 200),
        ({"type": "clear_thinking_20251015", "keep": turns(2)}, 200),
        ({"type": "clear_thinking_20251015", "keep": turns(1)}, 501),
        ({"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns"}}, 501),
        ({"type": "clear_thinking_20251015"}, 501),
        ({"type": "clear_tool_uses_20250919"}, 200),
        ({"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 0}}, 501),
        ({"type": "compact_20260112"}, 501),
    ],
)
async def test_context_management_that_changes_the_prompt_is_refused(
    server: Running, path: str, edit: dict[str, Any], status: int
) -> None:
    asked = body(messages=LONG_CHAT, max_tokens=8, context_management={"edits": [edit]})
    reply = await server.http.post(path, json=asked)
    assert reply.status_code == status, reply.text
    if status == 200:
        assert reply.headers.get("X-Lorikeet-Ignored") == "context_management"
    else:
        assert reply.json()["error"]["message"].startswith(f"context_management.edits.0: '{edit['type']}' would change")


async def test_tools_of_anthropics_types_are_left_out_and_named_in_a_header(start: Start) -> None:
    async with start(max_model_len=LONG) as server:
        await server.http.post(MESSAGES, json=body(tools=TOOLS))
        prompt = prompt_of(server)
        for stream in (False, True):
            reply = await server.http.post(MESSAGES, json=body(tools=CLAUDE_TOOLS, stream=stream))
            assert reply.status_code == 200, reply.text
            assert reply.headers["X-Lorikeet-Ignored"] == "tools.2 (web_search_20250305)"
            assert prompt_of(server) == prompt
        choice = {"type": "tool", "name": "web_search"}
        reply = await server.http.post(MESSAGES, json=body(tools=CLAUDE_TOOLS, tool_choice=choice))
        assert reply.status_code == 400
        assert "tool_choice" in reply.json()["error"]["message"]


IMAGE = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"messages": []}, 400, "invalid_request_error"),
        ({"model": "nobody"}, 404, "not_found_error"),
        ({"messages": IMAGE}, 400, "invalid_request_error"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 501, "invalid_request_error"),
        ({"mcp_servers": [{"type": "url", "url": "x", "name": "x"}]}, 501, "invalid_request_error"),
        ({"n": 2}, 501, "invalid_request_error"),
    ],
)
async def test_errors_are_in_anthropics_form(server: Running, fields: dict[str, Any], status: int, kind: str) -> None:
    reply = await server.http.post(MESSAGES, json=body(**fields))
    assert reply.status_code == status, reply.text
    error = reply.json()
    assert (error["type"], error["error"]["type"]) == ("error", kind)
    assert error["request_id"] == reply.headers["request-id"]
    assert reply.headers["x-should-retry"] == "false"
    assert len(reply.content) == int(reply.headers["content-length"])


async def test_errors_of_a_running_stream_are_events(server: Running) -> None:
    server.engine.dies_after = 2
    stream = await events(server.http, MESSAGES, body())
    assert stream[-1]["type"] == "error"
    assert stream[-1]["error"]["type"] == "overloaded_error"
    server.engine.dies_after = 0
    assert (await server.http.post(MESSAGES, json=body(stream=True))).status_code == 503


async def test_key_may_come_in_anthropics_header(start: Start) -> None:
    async with start(api_keys=("one", "two")) as server:
        refused = await server.http.post(MESSAGES, json=body(), headers={"x-api-key": "three"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        assert (await server.http.post(MESSAGES, json=body(), headers={"x-api-key": "one"})).status_code == 200
        headers = {"Authorization": "Bearer one"}
        assert (await server.http.post(MESSAGES, json=body(), headers=headers)).status_code == 200
        assert (await server.http.get("/v1/models", headers={"x-api-key": "two"})).status_code == 200
        first, second = server.engine.submitted
        assert first.tenant == second.tenant
        assert first.tenant.startswith("key-")


@pytest.mark.slow
async def test_large_bodies_are_answered_as_small_ones(start: Start) -> None:
    async with start(max_model_len=LONG, answer=CALL) as server:
        for path, fields in (
            (MESSAGES, {"system": "x", "tools": TOOLS, "tool_choice": {"type": "any"}, "max_tokens": 200}),
            (MESSAGES, {"messages": IMAGE, "max_tokens": 5}),
            (f"{MESSAGES}/count_tokens", {"system": "x", "tools": TOOLS}),
        ):
            seen = []
            for padding in ({}, {"user": "x" * SMALL_BODY_BYTES}):
                server.engine.submitted.clear()
                reply = await server.http.post(path, json={"messages": ASKED, **fields, **padding})
                prompts = [request.prompt_token_ids for request in server.engine.submitted]
                answer = {**reply.json(), "id": "", "request_id": "", "content": ""}
                seen.append((reply.status_code, answer, prompts))
            assert seen[0] == seen[1]
        assert len(server.service.prompt_processes.pids) == 1
