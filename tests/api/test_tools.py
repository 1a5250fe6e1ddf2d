"""Tools and reasoning in chat completions over HTTP."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from lorikeet.chat.chat_settings import ChatSettings
from lorikeet.chat.sampling import ModelLimits
from lorikeet.chat.structured_output import GrammarChecks
from lorikeet.chat.text_processor import TextProcessor
from lorikeet.core.chat_template import ChatTemplate
from tests.support.api_server import END, TEMPLATE, Running, Start
from tests.support.chat_requests import CHAT, MESSAGES, body, events
from tests.support.fakes import byte_level_tokenizer
from tests.support.tool_calls import CALL, LONG, NOW, TOOLS, TWO_CALLS, WEATHER, prompt_of, set_reasoning

pytestmark = pytest.mark.slow


def merged(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the deltas of a stream together, as clients do."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or ""
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(message["tool_calls"]):
                assert part["type"] == "function"
                message["tool_calls"].append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
            call = message["tool_calls"][part["index"]]
            assert part.get("id", call["id"]) == call["id"]
            call["arguments"] += part["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    return message


async def test_calls_are_parsed_from_the_answer(start: Start) -> None:
    async with start(max_model_len=LONG, answer=TWO_CALLS) as server:
        reply = await server.http.post(CHAT, json=body(tools=TOOLS))
        (choice,) = reply.json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert message["content"] == "Let me see."
        functions = [(call["type"], call["function"]) for call in message["tool_calls"]]
        assert functions == [
            ("function", {"name": "get_weather", "arguments": '{"city": "Oslo"}'}),
            ("function", {"name": "now", "arguments": "{}"}),
        ]
        assert len({call["id"] for call in message["tool_calls"]}) == 2

        stream = merged(await events(server.http, CHAT, body(tools=TOOLS)))
        assert [(call["name"], call["arguments"]) for call in stream["tool_calls"]] == [
            ("get_weather", '{"city": "Oslo"}'),
            ("now", "{}"),
        ]
        assert (stream["content"], stream["finish_reason"]) == ("Let me see.", "tool_calls")


async def test_arguments_are_streamed(start: Start) -> None:
    async with start(max_model_len=LONG, answer=CALL) as server:
        chunks = await events(server.http, CHAT, body(tools=TOOLS))
        parts = [part for chunk in chunks for part in chunk["choices"][0]["delta"].get("tool_calls", ())]
        assert len(parts) > 5
        assert all(chunk["choices"][0]["delta"] or chunk["choices"][0]["finish_reason"] for chunk in chunks)


async def test_a_call_alone_has_no_content(start: Start) -> None:
    async with start(max_model_len=LONG, answer=CALL) as server:
        message = (await server.http.post(CHAT, json=body(tools=TOOLS))).json()["choices"][0]["message"]
        assert message["content"] is None


async def test_one_call_is_reported_without_parallel_tool_calls(start: Start) -> None:
    async with start(max_model_len=LONG, answer=TWO_CALLS) as server:
        content = body(tools=TOOLS, parallel_tool_calls=False)
        message = (await server.http.post(CHAT, json=content)).json()["choices"][0]["message"]
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]
        assert len(merged(await events(server.http, CHAT, content))["tool_calls"]) == 1


async def test_an_answer_that_is_cut_off_keeps_its_reason(start: Start) -> None:
    async with start(max_model_len=LONG, answer=CALL) as server:
        (choice,) = (await server.http.post(CHAT, json=body(tools=TOOLS, max_tokens=60))).json()["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


async def test_text_without_a_call_is_content(start: Start) -> None:
    async with start(max_model_len=LONG, answer=" 1 < 2 <tool") as server:
        (choice,) = (await server.http.post(CHAT, json=body(tools=TOOLS))).json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": " 1 < 2 <tool"}
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("fields", [{"tools": TOOLS, "tool_choice": "none"}, {"tools": []}, {"tool_choice": "none"}])
async def test_chat_with_tool_choice_none_is_a_plain_chat(start: Start, fields: dict[str, Any]) -> None:
    async with start(max_model_len=LONG, answer=CALL) as server:
        (choice,) = (await server.http.post(CHAT, json=body(**fields))).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
        assert prompt_of(server) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


async def test_a_template_without_tools_gets_them_as_a_system_prompt(start: Start) -> None:
    system = {"role": "system", "content": "Be brief."}
    async with start(max_model_len=LONG) as server:
        await server.http.post(CHAT, json=body(tools=[NOW], messages=[system, *MESSAGES]))
        await server.http.post(CHAT, json=body(tools=[NOW]))
        openings = ("Be brief.\n\nYou can call functions.", "You can call functions.")
        for at, opening in enumerate(openings):
            prompt = prompt_of(server, at)
            assert prompt.startswith(f"<|im_start|>system\n{opening}")
            assert json.dumps(NOW) in prompt
            assert '<tool_call>\n{"name": "function_name", "arguments": {"argument_name": "value"}}\n' in prompt


HISTORY = [
    *MESSAGES,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": f"call_{at}", "type": "function", "function": {"name": "now", "arguments": "{}"}} for at in (1, 2)
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "night"}]},
]


async def test_calls_and_results_are_kept_without_tools(server: Running) -> None:
    reply = await server.http.post(CHAT, json=body(messages=HISTORY))
    assert reply.json()["choices"][0]["message"]["content"] == "hello world"
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    results = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in ("noon", "night"))
    turns = [("user", "hello"), ("assistant", f"{call}\n{call}"), ("user", results)]
    expected = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert prompt_of(server) == expected + "<|im_start|>assistant\n"


async def test_template_with_tools_gets_tools_and_calls_as_objects(start: Start) -> None:
    source = (
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{% for m in messages %}"
        "{% for call in m.tool_calls or [] %}{{ call.function.arguments.city }}{{ call.id }}{% endfor %}"
        "{{ m.role }}:{{ m.content }};{% endfor %}<tool_call>"
    )
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [{"id": "x1", "function": function}]}, HISTORY[-2]]
    async with start(max_model_len=LONG, answer=CALL) as server:
        server.service.text_processor.template = ChatTemplate(source, {})
        reply = await server.http.post(CHAT, json=body(messages=messages, tools=TOOLS))
        assert reply.json()["choices"][0]["finish_reason"] == "tool_calls"
        assert prompt_of(server) == "get_weather now user:hello;Oslox1assistant:;tool:noon;<tool_call>"
        counted = await server.http.post("/tokenize", json={"messages": messages, "tools": TOOLS})
        assert counted.json()["tokens"] == server.engine.submitted[0].prompt_token_ids


async def test_tools_of_a_template_in_an_unknown_format_are_refused(start: Start) -> None:
    async with start() as server:
        server.service.text_processor.template = ChatTemplate("{{ tools }}{{ messages }}", {})
        reply = await server.http.post(CHAT, json=body(tools=TOOLS))
        assert reply.status_code == 400
        assert "--tool-call-parser" in reply.json()["error"]["message"]
        plain = await server.http.post(CHAT, json=body(tools=TOOLS, tool_choice="none"))
        assert plain.status_code == 200


@pytest.mark.parametrize(
    ("fields", "where", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "always", "tools": TOOLS}, "tool_choice", "none, auto, required"),
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": TOOLS}, "tool_choice", "'no'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "pattern"),
        ({"tools": [{"type": "web_search"}]}, "tools", "function"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools",
            "JSON schema of an object",
        ),
    ],
)
async def test_tools_that_are_not_valid_are_refused(
    server: Running, fields: dict[str, Any], where: str, words: str
) -> None:
    reply = await server.http.post(CHAT, json=body(**fields))
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, where)
    assert words in error["message"]


async def test_large_bodies_have_tools_too(start: Start) -> None:
    async with start(max_model_len=LONG, answer=CALL, max_body_bytes=2**22) as server:
        described = {**NOW, "function": {**NOW["function"], "description": "x" * 270_000}}
        reply = await server.http.post(CHAT, json=body(tools=[described]))
        assert "maximum context length" in reply.json()["error"]["message"]
        spaced = json.dumps(body(tools=TOOLS)).encode() + b" " * 70_000
        reply = await server.http.post(CHAT, content=spaced, headers={"Content-Type": "application/json"})
        assert reply.json()["choices"][0]["finish_reason"] == "tool_calls"
        small = await server.http.post(CHAT, json=body(tools=TOOLS))
        assert small.status_code == 200
        first, second = server.engine.submitted
        assert first.prompt_token_ids == second.prompt_token_ids


async def test_thoughts_are_reported_apart(start: Start) -> None:
    async with start(max_model_len=LONG, answer=f"<think>\nhm\n</think>\n\n{TWO_CALLS}") as server:
        set_reasoning(server, "qwen3")
        answer = (await server.http.post(CHAT, json=body(tools=TOOLS))).json()
        message = answer["choices"][0]["message"]
        assert (message["reasoning"], message["reasoning_content"]) == ("hm", "hm")
        thought = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert 2 <= thought < answer["usage"]["completion_tokens"] / 2
        assert message["content"] == "Let me see."
        assert len(message["tool_calls"]) == 2
        stream = merged(await events(server.http, CHAT, body(tools=TOOLS)))
        assert (stream["reasoning"], stream["content"], len(stream["tool_calls"])) == ("hm", "Let me see.", 2)
        hidden = (await server.http.post(CHAT, json=body(include_reasoning=False))).json()
        assert hidden["choices"][0]["message"] == {"role": "assistant", "content": TWO_CALLS}
        assert hidden["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}


async def test_a_grammar_leaves_room_for_thoughts(start: Start) -> None:
    async with start(max_model_len=LONG) as server:
        set_reasoning(server, "qwen3")
        for fields in ({"response_format": AS_JSON}, {"tools": TOOLS, "tool_choice": "required"}):
            for kwargs, rule in (
                ({}, '(\\"<think>\\" text'),
                ({"end": "<think>\n"}, '\\"<think>\\"? text'),
                ({"end": "</think>"}, ""),
            ):
                server.service.text_processor.template = ChatTemplate(TEMPLATE + "{{ end }}", {})
                reply = await server.http.post(CHAT, json=body(**fields, chat_template_kwargs=kwargs))
                assert reply.status_code == 200, reply.text
                grammar = server.engine.submitted[-1].sampling.grammar
                assert (rule in grammar) if rule else "<think>" not in grammar


async def test_thoughts_have_a_budget(start: Start) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])  # not special, as Qwen3's
    begin, end = map(tokenizer.token_to_id, ("<think>", "</think>"))
    size = tokenizer.get_vocab_size()
    async with start(max_model_len=LONG) as server:
        budget = {"thinking_token_budget": 3}
        refused = await server.http.post(CHAT, json=body(**budget))
        assert refused.status_code == 400
        assert "--reasoning-parser" in refused.json()["error"]["message"]
        set_reasoning(server, "qwen3")
        refused = await server.http.post(CHAT, json=body(**budget))
        assert "'</think>', which ends the thoughts of this model, is several tokens" in refused.text
        chats = server.service.chats
        processor = TextProcessor(tokenizer, ChatTemplate(TEMPLATE, {}))
        limits = ModelLimits(LONG, size, (END,))
        chats.base = ChatSettings(processor, limits, reasoning_parser="qwen3")
        await server.service.grammars.close()
        server.service.grammars = GrammarChecks(processor, limits)
        for fields in ({}, {"response_format": AS_JSON}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "required"}):
            reply = await server.http.post(CHAT, json=body(**budget, **fields))
            assert reply.status_code == 200, reply.text
            grammar = server.engine.submitted[-1].sampling.grammar
            assert f"any{{0,3}} <[{end}]>" in grammar
            matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=[END]), grammar, log_level=0)
            assert matcher.deep_copy().try_consume_tokens([begin, END]) == 1, "an answer cannot end in thoughts"
            assert matcher.try_consume_tokens([begin, *tokenizer.encode("hmmm").ids]) == 4
            assert matcher.compute_ff_tokens()[:1] == [end]
        assert (await server.http.post(CHAT, json=body(thinking_token_budget=-1))).status_code == 200
        assert not server.engine.submitted[-1].sampling.grammar
        assert (await server.http.post(CHAT, json=body(thinking_token_budget=0))).status_code == 200
        assert f"text: <[{end}]>" in server.engine.submitted[-1].sampling.grammar


async def test_thoughts_opened_by_the_prompt_need_no_marker(start: Start) -> None:
    async with start(max_model_len=LONG, answer="hm</think>yes") as server:
        set_reasoning(server, "qwen3")
        server.service.text_processor.template = ChatTemplate(TEMPLATE + "<think>\n", {})
        message = (await server.http.post(CHAT, json=body())).json()["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("hm", "yes")


async def test_markers_that_are_special_tokens_are_found(start: Start) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(["<tool_call>", "</tool_call>"])
    async with start(max_model_len=LONG) as server:
        limits = ModelLimits(LONG, tokenizer.get_vocab_size(), (END,))
        server.service.chats.base = ChatSettings(TextProcessor(tokenizer, ChatTemplate(TEMPLATE, {})), limits)
        server.engine.script = lambda request: [*tokenizer.encode(CALL).ids, END]
        assert tokenizer.token_to_id("<tool_call>") in tokenizer.encode(CALL).ids
        message = (await server.http.post(CHAT, json=body(tools=TOOLS))).json()["choices"][0]["message"]
        assert message["tool_calls"][0]["function"]["name"] == "get_weather"
        plain = (await server.http.post(CHAT, json=body())).json()["choices"][0]["message"]
        assert plain["content"].startswith('\n{"name"')


NAMED = {"type": "function", "function": {"name": "now"}}
AS_JSON = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "title": "plain"}}}


async def test_grammar_enforces_a_required_call(start: Start) -> None:
    async with start(answer=CALL, max_model_len=LONG) as server:

        async def grammar(**fields: Any) -> str:
            reply = await server.http.post(CHAT, json=body(tools=TOOLS, **fields))
            assert reply.status_code == 200, reply.text
            return server.engine.submitted[-1].sampling.grammar

        assert await grammar() == ""
        strict = {"type": "function", "function": {"name": "now", "strict": True}}
        await server.http.post(CHAT, json=body(tools=[WEATHER, strict]))
        assert "TEXT" in server.engine.submitted[-1].sampling.grammar
        required = await grammar(tool_choice="required")
        one = await grammar(tool_choice=NAMED)
        assert "get_weather" in required
        assert '("\\n"' in required, "several calls"
        assert "get_weather" not in one
        assert '("\\n"' not in one
        assert await grammar(tool_choice="required", response_format=AS_JSON) == required
        either = await grammar(response_format=AS_JSON)
        assert '"title": "plain"' in either
        assert "get_weather" in either
        by_name = {"type": "function", "function": {"name": "get_weather"}}
        named = await server.http.post(CHAT, json=body(tools=[WEATHER], tool_choice=by_name))
        assert named.json()["choices"][0]["finish_reason"] == "stop"

        refused = await server.http.post(CHAT, json=body(tools=TOOLS, regex="a+"))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "regex")
        schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}
        bad = {"type": "function", "function": {"name": "bad", "parameters": schema}}
        refused = await server.http.post(CHAT, json=body(tools=[bad], tool_choice="required"))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
        refused = await server.http.post(CHAT, json=body(tools=[*TOOLS, bad], tool_choice="required"))
        assert refused.json()["error"]["message"].startswith("tools: bad: ")
