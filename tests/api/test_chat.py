"""Chat completions over HTTP."""

from collections.abc import Sequence
from typing import Any

import pytest

from lorikeet.core.chat_template import ChatTemplate
from lorikeet.http import errors
from lorikeet.http.body_gate import SMALL_BODY_BYTES
from lorikeet.http.errors import ApiError
from tests.support.api_server import END, TOKENIZER, Running, Start, count_calls_off_the_loop
from tests.support.chat_requests import CHAT, MESSAGES, body, events, text_of

pytestmark = pytest.mark.slow

BATCH = f"{CHAT}/batch"


async def test_answer_has_openais_shape(server: Running) -> None:
    reply = await server.http.post(CHAT, json=body())
    answer = reply.json()
    assert reply.status_code == 200
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "base"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello world"}
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    prompt = len(server.engine.submitted[0].prompt_token_ids)
    generated = len(TOKENIZER.encode("hello world").ids) + 1
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_messages_go_through_the_chat_template(server: Running) -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]
    await server.http.post(CHAT, json=body(messages=messages))
    await server.http.post(CHAT, json=body(messages=messages, add_generation_prompt=False))
    prompts = [TOKENIZER.decode(r.prompt_token_ids, skip_special_tokens=False) for r in server.engine.submitted]
    turns = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello\nworld<|im_end|>\n"
    assert prompts == [turns + "<|im_start|>assistant\n", turns]


@pytest.mark.parametrize("nothing", [{"tool_calls": None}, {"tool_calls": []}, {"refusal": None, "name": None}])
async def test_null_fields_of_a_message_are_hidden_from_the_template(start: Start, nothing: dict[str, Any]) -> None:
    # As Llama 3.1's and Mistral's do, which take an answer with the field for a call of tools.
    asks_for_field = "{% for m in messages %}{% if 'tool_calls' in m %}{{ m.tool_calls | length }}{% endif %}"
    names = "{{ m.keys() | sort | join(' ') }} {{ m.content }}{% endfor %}"
    async with start() as server:
        server.service.text_processor.template = ChatTemplate(asks_for_field + names, {})
        messages = [{"role": "assistant", "content": "hi", **nothing}, {"role": "user", "name": "me", "content": "you"}]
        reply = await server.http.post(CHAT, json=body(messages=messages))
        assert reply.status_code == 200, reply.text
        prompt = TOKENIZER.decode(server.engine.submitted[0].prompt_token_ids)
        assert prompt == "content role hicontent name role you"


async def test_answer_can_continue_the_last_message(server: Running) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "hel"}]
    reply = await server.http.post(CHAT, json=body(messages=messages, continue_final_message=True))
    assert reply.status_code == 200
    prompt = TOKENIZER.decode(server.engine.submitted[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhel"
    both = body(messages=messages, continue_final_message=True, add_generation_prompt=True)
    refused = await server.http.post(CHAT, json=both)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "continue_final_message")


async def test_a_stream_opens_with_the_role_and_ends_with_a_reason(server: Running) -> None:
    chunks = await events(server.http, CHAT, body())
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(chunks) == "hello world"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "stop"]
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_is_in_the_last_or_every_chunk_on_request(server: Running) -> None:
    last = await events(server.http, CHAT, body(stream_options={"include_usage": True}))
    assert [chunk for chunk in last if "usage" in chunk] == last[-1:]
    assert last[-1]["choices"] == []
    options = {"include_usage": True, "continuous_usage_stats": True}
    always = await events(server.http, CHAT, body(stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in always]
    generated = counts[-1]
    assert counts == [*range(generated + 1), generated]


@pytest.mark.parametrize("options", [{}, {"include_usage": None, "continuous_usage_stats": None}])
async def test_empty_stream_options_have_no_effect(server: Running, options: dict[str, None]) -> None:
    chunks = await events(server.http, CHAT, body(stream_options=options))
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("said", [{}, {"include_usage": None}, {"include_usage": False}])
async def test_usage_in_every_chunk_needs_one_option(server: Running, said: dict[str, bool | None]) -> None:
    chunks = await events(server.http, CHAT, body(stream_options={**said, "continuous_usage_stats": True}))
    wanted = said.get("include_usage") is None
    assert [("usage" in chunk) for chunk in chunks] == [wanted] * len(chunks)
    assert (chunks[-1]["choices"] == []) is wanted


async def test_several_conversations_are_answered_at_once(server: Running) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("hi", "hello world")]
    asked = body(model="formal", messages=conversations, logprobs=True, top_logprobs=1, return_token_ids=True)
    answer = (await server.http.post(BATCH, json=asked)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice, request in zip(answer["choices"], server.engine.submitted, strict=True):
        assert choice["message"]["content"] == "hello world"
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) > 0
        assert request.adapter is not None
    one, other = (request.prompt_token_ids for request in server.engine.submitted)
    assert one != other
    assert answer["usage"]["prompt_tokens"] == len(one) + len(other)
    assert server.service.gate.active == 0


async def test_batch_of_more_than_a_small_body_is_answered(server: Running) -> None:
    asked = {"model": "base", "messages": [MESSAGES], "max_tokens": 2, "user": "x" * SMALL_BODY_BYTES}
    reply = await server.http.post(BATCH, json=asked)
    assert (reply.status_code, len(reply.json()["choices"])) == (200, 1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": [[{"role": "user", "content": "x"}], [{"role": "user"}]]}, "messages.1.0"),
        ({"messages": [[{"role": "user", "content": "x"}], [{"role": "user", "content": "x" * 2000}]]}, "messages.1: "),
        ({"messages": []}, "messages"),
        ({"messages": MESSAGES}, "messages"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n: "),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop_regex": "x"}, "regular expression"),
    ],
)
async def test_unsupported_conversations_are_refused_by_name(
    server: Running, fields: dict[str, Any], said: str
) -> None:
    refused = await server.http.post(BATCH, json={"model": "base", "messages": [MESSAGES], **fields})
    assert refused.status_code in (400, 501)
    assert said in refused.json()["error"]["message"]
    assert server.service.gate.active == 0


async def test_a_server_may_tell_usage_in_every_chunk_and_the_times_of_a_request(start: Start) -> None:
    async with start(force_include_usage=True, request_metrics=True) as server:
        asked = body()
        whole = (await server.http.post(CHAT, json=asked)).json()["metrics"]
        assert {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms"} <= whole.keys()
        assert min(whole.values()) >= 0
        chunks = await events(server.http, CHAT, body(max_tokens=1))
        assert all(chunk["usage"]["prompt_tokens"] for chunk in chunks)
        assert ["metrics" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert "mean_itl_ms" not in chunks[-1]["metrics"]
        unasked = await events(server.http, CHAT, body(stream_options={"include_usage": False}))
        assert not any("usage" in chunk for chunk in unasked)


async def test_choices_have_different_seeds(server: Running) -> None:
    answer = (await server.http.post(CHAT, json=body(n=3, seed=7))).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    seeds = [request.sampling.seed for request in server.engine.submitted]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    assert answer["usage"]["prompt_tokens"] == len(server.engine.submitted[0].prompt_token_ids)
    chunks = await events(server.http, CHAT, body(n=2))
    assert [text_of(chunks, index) for index in (0, 1)] == ["hello world"] * 2


async def test_without_a_seed_two_requests_differ(server: Running) -> None:
    for _ in range(2):
        await server.http.post(CHAT, json=body())
    first, second = server.engine.submitted
    assert first.sampling.seed != second.sampling.seed


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"stop": "lo w"}, "hel", "lo w"),
        ({"stop": ["zzz", "wor"], "include_stop_str_in_output": True}, "hello wor", "wor"),
        ({"stop": "hello world!"}, "hello world", None),
    ],
)
async def test_stop_strings_end_the_answer(start: Start, fields: dict[str, Any], text: str, reason: str | None) -> None:
    async with start() as server:
        answer = (await server.http.post(CHAT, json=body(**fields))).json()
        (choice,) = answer["choices"]
        assert (choice["message"]["content"], choice["stop_reason"]) == (text, reason)
        assert choice["finish_reason"] == "stop"
        assert text_of(await events(server.http, CHAT, body(**fields))) == text
        # The engine need not go on.
        assert len(server.engine.aborted) == (2 if reason else 0)


async def test_a_stop_string_does_not_count_before_min_tokens(server: Running) -> None:
    answer = (await server.http.post(CHAT, json=body(stop="h", min_tokens=2))).json()
    assert answer["choices"][0]["message"]["content"] == "hello world"


async def test_stop_string_that_begins_before_min_tokens_and_ends_after_counts(server: Running) -> None:
    first, *_ = (TOKENIZER.decode([token]) for token in TOKENIZER.encode("hello world").ids)
    over = "hello world"[len(first) - 1 : len(first) + 1]
    for content in (body(stop=over, min_tokens=1), body(stop=[over, first], min_tokens=1)):
        answer = (await server.http.post(CHAT, json=content)).json()["choices"][0]
        assert (answer["message"]["content"], answer["stop_reason"]) == (first[:-1], over)
        assert text_of(await events(server.http, CHAT, content)) == first[:-1]


async def test_stop_tokens_are_reported_and_not_shown(server: Running) -> None:
    stop = TOKENIZER.encode("hello world").ids[1]
    answer = (await server.http.post(CHAT, json=body(stop_token_ids=[stop]))).json()["choices"][0]
    shown = TOKENIZER.decode(TOKENIZER.encode("hello world").ids[:1])
    assert (answer["message"]["content"], answer["stop_reason"]) == (shown, stop)


async def test_ignore_eos_leaves_the_end_tokens_out_of_the_stop_tokens(server: Running) -> None:
    await server.http.post(CHAT, json=body())
    await server.http.post(CHAT, json=body(ignore_eos=True))
    assert [request.sampling.stop_token_ids for request in server.engine.submitted] == [(END,), ()]


async def test_max_tokens_ends_with_length(server: Running) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = (await server.http.post(CHAT, json=body(**{name: 1}))).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 1


async def test_default_limit_of_a_chat_is_the_whole_context(server: Running) -> None:
    await server.http.post(CHAT, json=body())
    (request,) = server.engine.submitted
    assert request.sampling.max_tokens == 256 - len(request.prompt_token_ids)


async def test_logprobs_cover_every_token(server: Running) -> None:
    whole = (await server.http.post(CHAT, json=body(logprobs=True, top_logprobs=2))).json()
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == whole["usage"]["completion_tokens"]
    assert "".join(entry["token"] for entry in content) == "hello world<|im_end|>"
    assert bytes(byte for entry in content for byte in entry["bytes"]) == b"hello world<|im_end|>"
    assert [entry["logprob"] for entry in content[0]["top_logprobs"]] == [-0.5, -1.5]
    chunks = await events(server.http, CHAT, body(logprobs=True))
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert sum(len(part["content"]) for part in streamed if part) == len(content)


async def test_a_long_list_of_logprobs_is_written_off_the_event_loop(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = TOKENIZER.decode(TOKENIZER.encode("hello world " * 200).ids[:150])
    async with start(answer) as server:
        calls = count_calls_off_the_loop(monkeypatch)
        for n, written in ((1, 0), (2, 1)):
            reply = (await server.http.post(CHAT, json=body(logprobs=True, top_logprobs=20, n=n))).json()
            assert [len(choice["logprobs"]["content"]) for choice in reply["choices"]] == [151] * n
            assert len(calls) == written


async def test_an_adapter_is_chosen_by_name_in_three_ways(server: Running) -> None:
    for fields in ({"model": "formal"}, {"model": "base:formal"}, {"model": "base", "lora_path": "formal"}):
        answer = (await server.http.post(CHAT, json=body(**fields))).json()
        assert answer["model"] == "formal"
    record = server.service.catalog.get("formal")
    assert record is not None
    assert [request.digest for request in server.engine.submitted] == [record.digest] * 3


async def test_an_unknown_model_is_a_404_and_never_the_base(server: Running) -> None:
    for name in ("nobody", "base:nobody", "formal:base"):
        reply = await server.http.post(CHAT, json=body(model=name))
        assert reply.status_code == 404
        error = reply.json()["error"]
        assert error["message"] == f"The model `{name}` does not exist."
        assert (error["type"], error["param"], error["code"]) == ("NotFoundError", "model", 404)
    assert (await server.http.post(CHAT, json=body(model="base", lora_path="nobody"))).status_code == 404
    assert server.engine.submitted == []


@pytest.mark.parametrize(("impossible", "status"), [(False, 500), (True, 400)])
async def test_engine_failure_is_a_500_and_impossible_request_a_400_also_streaming(
    server: Running, impossible: bool, status: int
) -> None:
    server.engine.refusal = "adapter_model.safetensors: truncated"
    server.engine.impossible = impossible
    for stream in (False, True):
        reply = await server.http.post(CHAT, json=body(model="formal", stream=stream))
        assert reply.status_code == status
        assert "truncated" in reply.json()["error"]["message"]


async def test_engine_death_during_a_stream_is_an_error_event(server: Running) -> None:
    server.engine.dies_after = 2
    chunks = await events(server.http, CHAT, body())
    assert text_of(chunks[:-1]) != ""
    assert chunks[-1]["error"]["code"] == 503
    reply = await server.http.post(CHAT, json=body())
    assert reply.status_code == 503


async def test_a_request_that_takes_too_long_ends_with_504(start: Start) -> None:
    async with start(request_timeout_s=0.05) as server:
        server.engine.open.clear()
        reply = await server.http.post(CHAT, json=body(stream=True))
        assert reply.status_code == 504
        assert len(server.engine.aborted) == 1
        assert server.service.gate.active == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"stop_regex": "a+"}, "stop_regex"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"adapter_id": "someone/adapter"}, "adapter_id"),
        ({"adapter_source": "hub"}, "adapter_source"),
        ({"add_special_tokens": True}, "add_special_tokens"),
    ],
)
async def test_unsupported_fields_are_refused_by_name(server: Running, fields: dict[str, Any], param: str) -> None:
    reply = await server.http.post(CHAT, json=body(**fields))
    assert reply.status_code == 501
    assert reply.json()["error"]["param"] == param
    assert reply.headers["x-should-retry"] == "false"


async def test_an_image_is_a_bad_request(server: Running) -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    reply = await server.http.post(CHAT, json=body(messages=[{"role": "user", "content": [image]}]))
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "messages"
    assert error["message"] == "messages.0: only text is supported, not content of type 'image_url'."


async def test_fields_that_change_nothing_are_accepted(server: Running) -> None:
    fields: dict[str, Any] = {
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "best_of": 1,
        "user": "me",
    }
    fields |= {"lora": [], "adapter_id": "", "adapter_source": None, "add_special_tokens": False}
    assert (await server.http.post(CHAT, json=body(**fields))).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "ten"}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 1e39}, "temperature"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty"),
        ({"repetition_penalty": 1e39}, "repetition_penalty"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"stop": [1]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop_token_ids": [100_000]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"1": 200}}, "logit_bias"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 50, "logprobs": True}, "top_logprobs"),
        ({"model": 7}, "model"),
    ],
)
async def test_invalid_field_is_a_400_that_names_the_field(server: Running, fields: dict[str, Any], param: str) -> None:
    reply = await server.http.post(CHAT, json=body(**fields))
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", param, 400)
    assert param in error["message"] or error["message"]
    assert server.engine.submitted == []


STRING = "Input should be a valid string"
LIST = "Input should be a valid list"


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/v1/completions", {"prompt": 5}, f"prompt: {STRING} or {LIST}."),
        (CHAT, {"messages": MESSAGES, "stop": 5}, f"stop: {STRING} or {LIST}."),
        (CHAT, {"messages": [{"role": ""}]}, "messages.0.role: String should have at least 1 character."),
        (CHAT, {"messages": MESSAGES, "min_p": 2}, "min_p: Input should be less than or equal to 1."),
        (
            CHAT,
            {"messages": MESSAGES, "stop_token_ids": [1, "x"]},
            "stop_token_ids.1: Input should be a valid integer.",
        ),
    ],
)
async def test_a_message_names_fields_as_their_sender_knows_them(
    server: Running, path: str, fields: dict[str, Any], message: str
) -> None:
    assert (await server.http.post(path, json=fields)).json()["error"]["message"] == message


MANY = 5_000
"""Bodies of more are read in another process."""


@pytest.mark.parametrize(
    ("path", "fields", "param", "faults"),
    [
        ("/v1/completions", {"prompt": [0.5] * MANY}, "prompt", 4),
        ("/v1/completions", {"prompt": [[0.5] * MANY]}, "prompt", 4),
        ("/v1/completions", {"prompt": [["x"]] * MANY}, "prompt", 4),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [0.5] * MANY}, "stop_token_ids", 1),
        ("/v1/completions", {"prompt": "x", "logit_bias": {str(i): 200 for i in range(MANY)}}, "logit_bias", 1),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"x" * MANY: 200}}, "logit_bias", 1),
        (CHAT, {"messages": [{}] * MANY}, "messages", 1),
        (CHAT, {"messages": [{"role": "user", "content": [0] * MANY}]}, "messages", 2),
        (CHAT, {"messages": MESSAGES, "stop": [0] * MANY}, "stop", 2),
        ("/detokenize", {"tokens": [0.5] * MANY}, "tokens", 1),
    ],
)
async def test_a_body_of_many_faults_is_refused_for_the_first(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], param: str, faults: int
) -> None:
    seen: list[int] = []
    read = errors.invalid_body

    def counting(found: Sequence[Any]) -> ApiError:
        seen.append(len(found))
        return read(found)

    monkeypatch.setattr(errors, "invalid_body", counting)
    reply = await server.http.post(path, json=fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert len(reply.content) < 500
    assert seen == [faults]


async def test_stream_options_without_a_stream_are_refused(server: Running) -> None:
    for fields in ({}, {"stream": False}, {"stream": None}):
        reply = await server.http.post(CHAT, json=body(stream_options={"include_usage": True}, **fields))
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["param"] == "stream_options"
        assert error["message"] == "stream_options: only allowed with stream: true."
    assert (await server.http.post(CHAT, json=body(stream_options=None))).status_code == 200


async def test_error_of_a_prompt_beyond_the_context_has_its_length(server: Running) -> None:
    messages = [{"role": "user", "content": "日" * 300}]
    reply = await server.http.post(CHAT, json=body(messages=messages))
    assert reply.status_code == 400
    assert "maximum context length is 256 tokens" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("last", "fields", "echoed"),
    [
        ({"role": "assistant", "content": "well, "}, {"continue_final_message": True}, "well, "),
        ({"role": "assistant", "content": [{"type": "text", "text": "well, "}]}, {}, "well, "),
        ({"role": "user", "content": "say "}, {"add_generation_prompt": False}, "say "),
        ({"role": "user", "content": "say "}, {}, ""),
        ({"role": "assistant", "content": "well, "}, {"echo": False}, ""),
    ],
)
async def test_echo_opens_the_answer_with_the_last_message(
    server: Running, last: dict[str, Any], fields: dict[str, Any], echoed: str
) -> None:
    asked = {**body(), "echo": True, "messages": [*MESSAGES, last], **fields}
    whole = (await server.http.post(CHAT, json=asked)).json()["choices"][0]["message"]["content"]
    assert whole == text_of(await events(server.http, CHAT, asked)) == f"{echoed}hello world"


@pytest.mark.parametrize(
    ("content", "place"),
    [('{"model": "base",\n "messages": [}', "line 2, column 15"), ('{"model": nope}', "line 1, column 11")],
)
async def test_invalid_json_is_a_400_with_line_and_column(server: Running, content: str, place: str) -> None:
    reply = await server.http.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert f"Expecting value, at {place}." in reply.json()["error"]["message"]


@pytest.mark.parametrize("role", ["user", "system", "developer", "tool"])
@pytest.mark.parametrize("without", [{}, {"content": None}])
async def test_a_message_without_content_is_refused(server: Running, role: str, without: dict[str, Any]) -> None:
    reply = await server.http.post(CHAT, json={"messages": [*MESSAGES, {"role": role, **without}]})
    assert reply.status_code == 400
    assert f"a message of the role {role} needs content" in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] == "messages"
