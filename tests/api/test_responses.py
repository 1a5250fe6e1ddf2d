"""OpenAI's responses API over HTTP."""

import contextlib
import json
from typing import Any

import pytest

from lorikeet.api.routes import responses
from lorikeet.chat.responses_body import joined
from lorikeet.http.body_gate import SMALL_BODY_BYTES
from lorikeet.http.errors import ApiError
from lorikeet.serving.stored_responses import StoredResponse, StoredResponses
from tests.api.streams import events, text_of
from tests.support.api_server import Running, Start
from tests.support.chat_requests import bearer
from tests.support.tool_calls import CALL, LONG, TWO_CALLS, prompt_of, set_reasoning
from tests.support.waiting import until

pytestmark = pytest.mark.slow

RESPONSES = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS: list[dict[str, Any]] = [WEATHER, {"type": "function", "name": "now"}]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "base", "input": "hello", **fields}


async def create(server: Running, key: str = "", **fields: Any) -> dict[str, Any]:
    reply = await server.http.post(RESPONSES, json=body(**fields), headers=bearer(key) if key else {})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


async def get(server: Running, path: str, key: str = "", **params: Any) -> Any:
    reply = await server.http.get(f"{RESPONSES}/{path}", params=params, headers=bearer(key) if key else {})
    return reply.json() if reply.status_code == 200 else reply.status_code


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response without what differs from one to the next."""
    output = [{**item, "id": "", "call_id": ""} for item in response["output"]]
    return {**response, "id": "", "created_at": 0, "completed_at": 0, "output": output}


async def test_response_has_the_shape_that_openai_gives_it(server: Running) -> None:
    response = await create(server, instructions="be brief", metadata={"a": "b"}, temperature=0.5, model="formal")
    (item,) = response["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "hello world", "annotations": [], "logprobs": []}]
    said = {"object": "response", "status": "completed", "model": "formal", "store": True, "temperature": 0.5}
    assert response == response | said | {"metadata": {"a": "b"}, "instructions": "be brief", "error": None}
    prompt = len(server.engine.submitted[0].prompt_token_ids)
    usage = response["usage"]
    assert (usage["input_tokens"], usage["total_tokens"]) == (prompt, prompt + usage["output_tokens"])
    assert prompt_of(server).startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>")


@pytest.mark.parametrize("answer", ["hello world", "", TWO_CALLS, f"<think>hm</think>{CALL}"])
@pytest.mark.parametrize("tokens_at_once", [1, 1000])
async def test_stream_tells_of_every_part_in_order(start: Start, answer: str, tokens_at_once: int) -> None:
    async with start(max_model_len=LONG, answer=answer) as server:
        set_reasoning(server, "qwen3")
        server.engine.per_output = tokens_at_once
        whole = await create(server, tools=TOOLS)
        stream = await events(server.http, RESPONSES, body(tools=TOOLS))
        assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
        kinds = [event["type"].removeprefix("response.") for event in stream]
        assert (kinds[:2], kinds[-1]) == (["created", "in_progress"], "completed")
        last = stream[-1]["response"]
        assert plain(last) == plain(whole)
        texts: dict[str, str] = {}
        for event in stream:
            if event["type"].endswith(".delta"):
                texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
        written = {item["id"]: item.get("arguments") or text_of({"output": [item]}) for item in last["output"]}
        assert texts == {key: text for key, text in written.items() if text}
        done = [event["item"] for event in stream if event["type"] == "response.output_item.done"]
        assert done == last["output"]
        added = [event["item"] for event in stream if event["type"] == "response.output_item.added"]
        empty = {"function_call": ("arguments", ""), "message": ("content", []), "reasoning": ("content", [])}
        for new, full in zip(added, done, strict=True):
            key, nothing = empty[new["type"]]
            assert new == {**full, key: nothing, "status": "in_progress"}


async def test_thoughts_texts_and_calls_are_items(start: Start) -> None:
    async with start(max_model_len=LONG, answer=f"<think>hm</think>{TWO_CALLS}") as server:
        set_reasoning(server, "qwen3")
        response = await create(server, tools=TOOLS)
        thoughts, text, weather, now = response["output"]
        assert thoughts["content"] == [{"type": "reasoning_text", "text": "hm"}]
        assert text["content"][0]["text"] == "Let me see."
        assert (weather["type"], weather["name"], weather["arguments"]) == (
            "function_call",
            "get_weather",
            '{"city": "Oslo"}',
        )
        assert now["call_id"] != weather["call_id"]
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


async def test_items_give_the_prompt_of_a_chat(start: Start) -> None:
    async with start(max_model_len=LONG) as server:
        items: list[dict[str, Any]] = [
            {"role": "developer", "content": "be brief"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I see."}]},
            {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Oslo"}'},
            {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
        ]
        await create(server, input=items, tools=TOOLS)
        calls = [
            {"id": "c1", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}},
            {"id": "c2", "function": {"name": "now", "arguments": "{}"}},
        ]
        chat = [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "I see.", "reasoning": "hm", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            {"role": "tool", "tool_call_id": "c2", "content": "noon"},
        ]
        functions = [
            {"type": "function", "function": {key: tool[key] for key in tool if key != "type"}} for tool in TOOLS
        ]
        await server.http.post("/v1/chat/completions", json={"messages": chat, "tools": functions})
        assert prompt_of(server, 0) == prompt_of(server, 1)


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "now"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]},
    ],
)
async def test_tool_choice_is_a_grammar_as_in_chats(start: Start, choice: Any) -> None:
    async with start(max_model_len=LONG, answer=CALL) as server:
        await create(server, tools=TOOLS, tool_choice=choice)
        grammar = server.engine.submitted[0].sampling.grammar
        assert ("get_weather" in grammar) == (choice == "required")
        assert "now" in grammar


async def test_text_format_is_a_grammar(server: Running) -> None:
    form = {"type": "json_schema", "name": "x", "strict": True, "schema": {"type": "object", "properties": {"a": {}}}}
    response = await create(server, text={"format": form})
    assert server.engine.submitted[0].sampling.grammar
    assert response["text"]["format"] == form
    await create(server, text={"format": {"type": "text"}})
    assert not server.engine.submitted[1].sampling.grammar


async def test_log_probabilities_are_returned_on_request(server: Running) -> None:
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = await create(server, **fields)
    scores = response["output"][0]["content"][0]["logprobs"]
    assert len(scores) == response["usage"]["output_tokens"] - 1
    assert len(scores[0]["top_logprobs"]) == 2
    stream = await events(server.http, RESPONSES, body(**fields))
    deltas = [event for event in stream if event["type"] == "response.output_text.delta"]
    assert [score for event in deltas for score in event["logprobs"]] == scores


async def test_answer_that_is_cut_off_is_incomplete(server: Running) -> None:
    response = await create(server, max_output_tokens=2)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, 501, "tools"),
        ({"tool_choice": {"type": "file_search"}}, 501, "tool_choice"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, 400, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 501, "input"),
        ({"input": [{"content": "x"}]}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": "hello " * 300}, 400, "input"),
        ({"conversation": "conv_1"}, 501, "conversation"),
        ({"prompt": {"id": "x"}}, 501, "prompt"),
        ({"n": 2}, 501, "n"),
        ({"include": ["all"]}, 400, "include"),
        ({"text": {"format": {"type": "xml"}}}, 400, "text"),
        ({"max_output_tokens": 100_000}, 400, "max_output_tokens"),
        ({"previous_response_id": "resp_x"}, 404, "previous_response_id"),
        ({"background": True, "store": False}, 400, "background"),
    ],
)
async def test_unsupported_requests_are_refused(
    server: Running, fields: dict[str, Any], status: int, param: str
) -> None:
    reply = await server.http.post(RESPONSES, json=body(**fields))
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text
    assert reply.headers["x-should-retry"] == "false"
    assert not server.engine.submitted


CODEX_TOOLS = [
    {"type": "web_search", "external_web_access": False},
    *TOOLS,
    {"type": "namespace", "name": "empty", "description": "x", "tools": [{"type": "web_search"}]},
    {"type": "image_generation\r\n"},
]


async def test_tools_other_than_functions_are_left_out_and_named_in_a_header(start: Start) -> None:
    async with start(max_model_len=LONG) as server:
        named = "tools.0 (web_search), tools.3 (namespace), tools.4 (image_generation\\r\\n)"
        plainly = await server.http.post(RESPONSES, json=body(tools=TOOLS))
        assert "X-Lorikeet-Ignored" not in plainly.headers
        prompt = prompt_of(server)
        for fields in ({}, {"stream": True}, {"user": "x" * SMALL_BODY_BYTES}):
            reply = await server.http.post(RESPONSES, json=body(**{"tools": CODEX_TOOLS, **fields}))
            assert reply.status_code == 200, reply.text
            assert reply.headers["X-Lorikeet-Ignored"] == named
            assert prompt_of(server) == prompt
        many = [*TOOLS, *({"type": "mcp"} for _ in range(100))]
        reply = await server.http.post(RESPONSES, json=body(tools=many))
        assert reply.headers["X-Lorikeet-Ignored"].endswith("tools.21 (mcp), and 80 more")


async def test_a_tool_choice_of_a_tool_that_is_left_out_is_refused(server: Running) -> None:
    for choice, status in (({"type": "web_search"}, 501), ({"type": "function", "name": "apply_patch"}, 400)):
        reply = await server.http.post(RESPONSES, json=body(tools=CODEX_TOOLS, tool_choice=choice))
        assert (reply.status_code, reply.json()["error"]["param"]) == (status, "tool_choice"), reply.text
    assert not server.engine.submitted


PATCH_TEXT = '*** Begin Patch\n+say("é🦜\\\\n")\n*** End Patch'
FREEFORM: list[dict[str, Any]] = [
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
    },
    {"type": "namespace", "name": "mcp__git_", "description": "A repository.", "tools": [WEATHER, {**TOOLS[1]}]},
]


def call_of(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize("tokens_at_once", [1, 7, 1000])
async def test_a_custom_tool_is_called_with_text(start: Start, tokens_at_once: int) -> None:
    async with start(max_model_len=LONG, answer=call_of("apply_patch", input=PATCH_TEXT)) as server:
        server.engine.tokens_at_once = tokens_at_once
        (item,) = (await create(server, tools=FREEFORM))["output"]
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", PATCH_TEXT)
        assert item["id"].startswith("ctc_")
        assert "arguments" not in item
        prompt = prompt_of(server)
        assert "Edits files." in prompt
        assert "lark grammar" in prompt
        stream = await events(server.http, RESPONSES, body(tools=FREEFORM))
        kinds = [event["type"] for event in stream if "custom" in event["type"] or "item" in event["type"]]
        deltas = [event["delta"] for event in stream if event["type"] == "response.custom_tool_call_input.delta"]
        assert kinds == [
            "response.output_item.added",
            *["response.custom_tool_call_input.delta"] * len(deltas),
            "response.custom_tool_call_input.done",
            "response.output_item.done",
        ]
        assert "".join(deltas) == PATCH_TEXT
        assert len(deltas) > 1 or tokens_at_once == 1000
        assert next(event for event in stream if event["type"].endswith("added"))["item"]["input"] == ""
        assert next(event for event in stream if event["type"].endswith("input.done"))["input"] == PATCH_TEXT
        assert stream[-1]["response"]["output"][0]["input"] == PATCH_TEXT


async def test_a_tool_of_a_namespace_is_called_by_both_names(start: Start) -> None:
    async with start(max_model_len=LONG, answer=call_of("mcp__git__now")) as server:
        (item,) = (await create(server, tools=FREEFORM))["output"]
        assert (item["type"], item["namespace"], item["name"]) == ("function_call", "mcp__git_", "now")
        assert prompt_of(server).count("A repository.") == 1
        stream = await events(server.http, RESPONSES, body(tools=FREEFORM))
        done = next(event for event in stream if event["type"] == "response.function_call_arguments.done")
        assert done["name"] == "now"
        named = {"type": "function", "namespace": "mcp__git_", "name": "now"}
        for choice in (named, {"type": "allowed_tools", "mode": "required", "tools": [named]}):
            assert (await create(server, tools=FREEFORM, tool_choice=choice))["output"][0]["name"] == "now"
            assert server.engine.submitted[-1].sampling.grammar


async def test_custom_and_namespaced_calls_go_back_into_the_conversation(start: Start) -> None:
    async with start(max_model_len=LONG, answer=call_of("apply_patch", input="a\nb")) as server:
        first = await create(server, tools=FREEFORM)
        call = first["output"][0]
        result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done."}
        namespaced = {
            "type": "function_call",
            "namespace": "mcp__git_",
            "name": "now",
            "call_id": "c",
            "arguments": "{}",
        }
        told = {"type": "function_call_output", "call_id": "c", "output": "noon"}
        await create(server, tools=FREEFORM, input=[result, namespaced, told], previous_response_id=first["id"])
        by_id = prompt_of(server)
        given = [{"role": "user", "content": "hello"}, call, result, namespaced, told]
        await create(server, tools=FREEFORM, input=given)
        assert prompt_of(server) == by_id
        for said in (call_of("apply_patch", input="a\nb"), "Done.", call_of("mcp__git__now"), "noon"):
            assert said in by_id
        for item in ({"type": "custom_tool_call", "call_id": "c"}, {"type": "custom_tool_call_output"}):
            reply = await server.http.post(RESPONSES, json=body(input=[item]))
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input")


async def test_failure_before_the_first_token_has_its_status_and_a_later_one_an_event(server: Running) -> None:
    server.engine.dies_after = 0
    assert (await server.http.post(RESPONSES, json=body(stream=True))).status_code == 503
    server.engine.dies_after = 2
    stream = await events(server.http, RESPONSES, body())
    assert stream[-1]["type"] == "response.failed"
    assert stream[-1]["response"]["error"]["code"] == "server_error"


# --- stored answers ----------------------------------------------------------------------------------


async def test_conversation_continues_from_a_stored_response(server: Running) -> None:
    first = await create(server, instructions="be brief")
    second = await create(server, input="again", previous_response_id=first["id"])
    asked = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhello world<|im_end|>\n<|im_start|>user\nagain"
    assert prompt_of(server).startswith(asked)
    assert second["previous_response_id"] == first["id"]
    assert await get(server, second["id"]) == second
    listed = await get(server, f"{second['id']}/input_items", order="asc")
    assert [item["content"][0]["text"] for item in listed["data"]] == ["hello", "hello world", "again"]
    page = await get(server, f"{second['id']}/input_items", limit=1)
    assert (page["data"][0]["content"][0]["text"], page["has_more"]) == ("again", True)
    page = await get(server, f"{second['id']}/input_items", after=page["last_id"])
    assert [item["role"] for item in page["data"]] == ["assistant", "user"]


async def test_streamed_responses_are_stored_unless_disabled(server: Running) -> None:
    stream = await events(server.http, RESPONSES, body())
    assert await get(server, stream[0]["response"]["id"]) == stream[-1]["response"]
    assert await get(server, (await create(server, store=False))["id"]) == 404


async def test_deleted_response_is_gone(server: Running) -> None:
    response = await create(server)
    assert (await server.http.delete(f"{RESPONSES}/{response['id']}")).json()["deleted"]
    assert await get(server, response["id"]) == 404
    assert (await server.http.delete(f"{RESPONSES}/{response['id']}")).status_code == 404


async def test_keys_see_only_their_own_responses(start: Start) -> None:
    async with start(api_keys=("one", "two")) as server:
        response = await create(server, "one")
        path = f"{RESPONSES}/{response['id']}"
        assert await get(server, response["id"], "one") == response
        assert await get(server, response["id"], "two") == 404
        assert await get(server, f"{response['id']}/input_items", "two") == 404
        for method, route in (("DELETE", path), ("POST", f"{path}/cancel")):
            assert (await server.http.request(method, route, headers=bearer("two"))).status_code == 404
        following = body(previous_response_id=response["id"])
        assert (await server.http.post(RESPONSES, json=following, headers=bearer("two"))).status_code == 404
        assert (await server.http.post(RESPONSES, json=following, headers=bearer("one"))).status_code == 200


async def test_server_without_stored_responses_refuses_them(start: Start) -> None:
    async with start(stored_responses=0) as server:
        response = await create(server)
        assert not response["store"]
        assert await get(server, response["id"]) == 404
        assert (await server.http.post(RESPONSES, json=body(background=True))).status_code == 400


async def test_background_response_continues_without_a_client(server: Running) -> None:
    server.engine.open.clear()
    response = await create(server, background=True)
    assert response["status"] == "queued"
    following = body(previous_response_id=response["id"])
    assert (await server.http.post(RESPONSES, json=following)).status_code == 400
    server.engine.open.set()
    await until(lambda: server.service.gate.active == 0, "the answer has ended")
    done = await get(server, response["id"])
    assert (done["status"], text_of(done)) == ("completed", "hello world")
    cancelled = await server.http.post(f"{RESPONSES}/{response['id']}/cancel")
    assert cancelled.json()["status"] == "completed"
    assert (await server.http.post(RESPONSES, json=following)).status_code == 200


@pytest.mark.parametrize("how", ["cancel", "delete"])
async def test_background_response_can_be_stopped(server: Running, how: str) -> None:
    server.engine.open.clear()
    response = await create(server, background=True)
    path = f"{RESPONSES}/{response['id']}"
    if how == "cancel":
        assert (await server.http.post(f"{path}/cancel")).json()["status"] == "cancelled"
        assert (await get(server, response["id"]))["status"] == "cancelled"
    else:
        assert (await server.http.delete(path)).status_code == 200
        assert await get(server, response["id"]) == 404
    assert server.engine.aborted
    assert server.service.gate.active == 0
    foreground = await create_when_open(server)
    assert (await server.http.post(f"{RESPONSES}/{foreground['id']}/cancel")).status_code == 400


async def create_when_open(server: Running) -> dict[str, Any]:
    server.engine.open.set()
    return await create(server)


async def test_stream_of_a_background_response_can_be_read_again_from_any_event(server: Running) -> None:
    stream = await events(server.http, RESPONSES, body(background=True))
    response_id = stream[0]["response"]["id"]
    reply = await server.http.get(f"{RESPONSES}/{response_id}", params={"stream": True, "starting_after": 3})
    again = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    assert again == stream[4:]
    plain_one = await create(server)
    assert await get(server, plain_one["id"], stream=True) == 400


async def test_background_failure_is_in_the_response(server: Running) -> None:
    server.engine.dies_after = 2
    response = await create(server, background=True)
    await until(lambda: server.service.gate.active == 0, "the answer has ended")
    failed = await get(server, response["id"])
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")


@pytest.mark.slow
async def test_large_bodies_and_conversations_are_answered_as_small_ones(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start(max_model_len=LONG) as server:
        for padding in ({}, {"user": "x" * SMALL_BODY_BYTES}):
            first = await create(server, tools=TOOLS, instructions="be brief", **padding)
            await create(server, input="again", previous_response_id=first["id"], **padding)
        prompts = [request.prompt_token_ids for request in server.engine.submitted]
        assert prompts[:2] == prompts[2:]
        monkeypatch.setattr(responses, "SMALL_BODY_BYTES", 10)
        third = await create(server, input="again", previous_response_id=first["id"])
        assert server.engine.submitted[-1].prompt_token_ids == prompts[1]
        assert len((await get(server, f"{third['id']}/input_items"))["data"]) == 3


# --- How many answers are stored, and for how long ----------------------------------------------


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def stored(name: str, size: int = 10) -> StoredResponse:
    return StoredResponse(name, b"x" * size, b"")


def kept(store: StoredResponses, tenant: str, names: str) -> str:
    """Return which of the names are there."""
    found = ""
    for name in names:
        with contextlib.suppress(ApiError):
            found += store.get(tenant, name).response_id
    return found


def test_oldest_are_dropped_beyond_a_number() -> None:
    store = StoredResponses(3, 1000, 60)
    for name in "abcde":
        store.put("t", stored(name))
    assert kept(store, "t", "abcde") == "cde"
    assert (store.number, store.size_bytes) == (3, 30)


def test_tenant_with_the_most_bytes_makes_room() -> None:
    store = StoredResponses(100, 100, 60)
    store.put("small", stored("a"))
    for name in "bcdef":
        store.put("large", stored(name, 25))
    assert kept(store, "small", "a") == "a"
    assert kept(store, "large", "bcdef") == "def"
    store.put("small", stored("g", 101))
    assert kept(store, "small", "ag") == "a"


def test_answers_are_dropped_after_their_time() -> None:
    clock = Clock()
    store = StoredResponses(10, 1000, 60, clock)
    store.put("t", stored("a"))
    clock.now_s = 50
    store.put("t", stored("b"))
    clock.now_s = 61
    assert kept(store, "t", "ab") == "b"
    clock.now_s = 200
    assert kept(store, "t", "ab") == ""
    assert (store.number, store.size_bytes) == (0, 0)


def test_running_responses_are_not_dropped() -> None:
    store = StoredResponses(1, 1000, 60)
    running = stored("a")
    running.snapshot = bytes
    store.put("t", running)
    store.put("t", stored("b"))
    assert kept(store, "t", "ab") == "a"
    running.response = b"x" * 20
    running.snapshot = None
    store.put("t", running)
    assert (store.number, store.size_bytes) == (1, 30)


def test_tenants_do_not_see_each_other() -> None:
    store = StoredResponses(10, 1000, 60)
    store.put("t", stored("a"))
    assert kept(store, "u", "a") == ""
    store.delete("u", "a")
    assert kept(store, "t", "a") == "a"


def test_conversation_ends_with_the_answer() -> None:
    store = StoredResponses(10, 1000, 60)
    store.put("t", StoredResponse("a", b"[1]", b'{"status":"completed","output":[2,3]}'))
    store.put("t", StoredResponse("b", b"[1]", b'{"status":"failed","output":[]}'))
    assert json.loads(store.conversation("t", "a")) == [1, 2, 3]
    assert store.conversation("t", None) == b""
    with pytest.raises(ApiError, match="is failed"):
        store.conversation("t", "b")


def test_arrays_are_joined() -> None:
    assert joined(b"", b"[]", b"[1]", b"[2,3]") == b"[1,2,3]"
