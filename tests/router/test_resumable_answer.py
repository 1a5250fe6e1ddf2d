"""Answers that break off: the body that resumes them, and the events that the client gets."""

import json
from typing import Any

import pytest

from lorikeet.http.errors import ApiError
from lorikeet.router.proxied_request import CHAT, COMPLETIONS, RequestBody
from lorikeet.router.resumable_answer import DONE, PassthroughAnswer, ResumableAnswer, why_not_resumable

MESSAGES = [{"role": "user", "content": "hello"}]


def completion(**fields: Any) -> RequestBody:
    return RequestBody(COMPLETIONS, json.dumps({"model": "m", "prompt": "once", "stream": True, **fields}).encode())


def chat(**fields: Any) -> RequestBody:
    return RequestBody(CHAT, json.dumps({"model": "m", "messages": MESSAGES, "stream": True, **fields}).encode())


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps({"id": "a", "created": 1, "object": "o", **fields}).encode() + b"\n\n"


def text_event(text: str, tokens: int | None = None, reason: str | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": reason}
    return event(choices=[choice], **({} if tokens is None else {"usage": usage(tokens)}), **fields)


def delta_event(tokens: int | None = None, reason: str | None = None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return event(choices=[choice], **({} if tokens is None else {"usage": usage(tokens)}))


def usage(tokens: int, prompt: int = 7) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def read(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in data.split(b"\n\n") if line and line != b"data: [DONE]"]


def body(answer: ResumableAnswer, text_tokens: list[int] | None = None) -> dict[str, Any]:
    return dict(json.loads(answer.next_body(text_tokens)))


def test_first_backend_gets_the_request_with_usage_enabled() -> None:
    question = chat(frobnicate={"x": [1]}, stream_options={"include_usage": False, "other": 1}, max_tokens=9)
    sent = body(ResumableAnswer(question))
    options = {"include_usage": True, "continuous_usage_stats": True, "other": 1}
    assert sent == {**question.fields, "stream_options": options}


def test_the_next_backend_must_have_the_expected_weights_too() -> None:
    answer = ResumableAnswer(completion(max_tokens=9, expect_digest="05d07048"))
    assert body(answer)["expect_digest"] == "05d07048"
    chunk = read(answer.feed(text_event(" upon", 1, system_fingerprint="base-05d07048")))
    assert chunk[0]["system_fingerprint"] == "base-05d07048"
    assert body(answer)["expect_digest"] == "05d07048"
    chunk = read(answer.feed(text_event(" a", 1, system_fingerprint="other-05d07048")))
    assert chunk[0]["system_fingerprint"] == "other-05d07048", "each chunk names the weights that made it"


def test_the_next_backend_gets_the_text_behind_the_prompt_and_fewer_tokens() -> None:
    answer = ResumableAnswer(completion(max_tokens=9, min_tokens=4, temperature=0, seed=3))
    answer.next_body()
    answer.feed(text_event(" upon", 1) + text_event(" a", 3) + text_event("", 4))
    sent = body(answer)
    assert (sent["prompt"], sent["max_tokens"], sent["min_tokens"], sent["seed"]) == ("once upon a", 6, 1, 3)
    answer.feed(text_event(" time", 1))
    assert (body(answer)["prompt"], body(answer)["max_tokens"]) == ("once upon a time", 5)
    assert answer.tokens == 4


def test_a_completion_without_a_limit_has_the_default_one() -> None:
    answer = ResumableAnswer(completion())
    answer.feed(text_event(" upon", 5))
    assert body(answer)["max_tokens"] == 11
    unlimited = ResumableAnswer(chat())
    unlimited.feed(delta_event(5, content="hi"))
    assert "max_tokens" not in body(unlimited)


@pytest.mark.parametrize("limits", [{"max_tokens": 9}, {"max_completion_tokens": 9}])
def test_a_conversation_goes_on_in_its_last_message(limits: dict[str, int]) -> None:
    answer = ResumableAnswer(chat(**limits))
    answer.feed(delta_event(0, role="assistant", content="") + delta_event(2, content="hi "))
    sent = body(answer)
    assert sent["messages"] == [*MESSAGES, {"role": "assistant", "content": "hi "}]
    assert (sent["continue_final_message"], sent["add_generation_prompt"]) == (True, False)
    assert {name: sent[name] for name in limits} == dict.fromkeys(limits, 7)


def test_message_prefix_of_the_client_is_extended() -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Well, "}]
    answer = ResumableAnswer(chat(messages=messages, continue_final_message=True, add_generation_prompt=False))
    answer.feed(delta_event(1, content="hi"))
    assert body(answer)["messages"] == [*MESSAGES, {"role": "assistant", "content": "Well, hi"}]


def test_a_prompt_of_tokens_goes_on_with_the_tokens_of_the_text() -> None:
    answer = ResumableAnswer(completion(prompt=[1, 2], max_tokens=9))
    assert not answer.needs_tokens
    answer.feed(text_event(" upon", 1))
    assert answer.needs_tokens
    assert body(answer, [8, 9])["prompt"] == [1, 2, 8, 9]


def test_chunks_count_as_tokens_without_usage() -> None:
    answer = ResumableAnswer(completion(max_tokens=9))
    answer.feed(text_event("a") + text_event("b") + text_event(""))
    assert body(answer)["max_tokens"] == 7
    assert answer.counts is None


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("asked", [{}, {"include_usage": None}, {"include_usage": False}])
def test_continuous_usage_also_comes_at_the_end_unless_refused(asked: dict[str, bool | None], counts: bool) -> None:
    answer = ResumableAnswer(completion(stream_options={**asked, "continuous_usage_stats": counts}))
    answer.next_body()
    chunks = read(answer.feed(text_event("a", 1, "length") + event(choices=[], usage=usage(1)) + DONE))
    wanted = counts and asked.get("include_usage") is None
    assert ["usage" in chunk for chunk in chunks] == ([True, True] if wanted else [False])


def test_client_sees_one_answer_with_one_id_and_no_unrequested_usage() -> None:
    answer = ResumableAnswer(chat(max_tokens=9))
    answer.next_body()
    seen = answer.feed(delta_event(0, role="assistant", content="") + delta_event(1, content="a") + delta_event(2))
    answer.next_body()
    other = b"".join([delta_event(0, role="assistant", content=""), delta_event(1, "stop", content="b")])
    seen += answer.feed(other.replace(b'"id": "a", "created": 1', b'"id": "z", "created": 5'))
    seen += answer.feed(event(choices=[], usage=usage(1)) + DONE)
    chunks = read(seen)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "a", "b"]
    assert {(chunk["id"], chunk["created"], "usage" in chunk) for chunk in chunks} == {("a", 1, False)}
    assert answer.is_done


def test_counts_are_of_the_whole_answer() -> None:
    answer = ResumableAnswer(
        completion(max_tokens=9, stream_options={"include_usage": True, "continuous_usage_stats": True})
    )
    answer.next_body()
    answer.feed(text_event("a", 2))
    answer.next_body()
    seen = text_event("b", 3, "stop").replace(b'"prompt_tokens": 7', b'"prompt_tokens": 9')
    chunks = read(answer.feed(seen + event(choices=[], usage={**usage(3, 9), "prompt_tokens_details": None}) + DONE))
    assert [chunk["usage"] for chunk in chunks] == [usage(5), {**usage(5), "prompt_tokens_details": None}]
    assert answer.counts is not None
    assert (answer.counts.prompt_tokens, answer.counts.completion_tokens) == (7, 5)


def test_whole_answer_needs_only_its_last_events() -> None:
    answer = ResumableAnswer(completion(max_tokens=2, stream_options={"include_usage": True}))
    answer.next_body()
    answer.feed(text_event("a", 1))
    assert not answer.is_whole
    answer.feed(text_event("b", 2))
    assert answer.is_whole
    closing = answer.closing()
    assert closing.endswith(DONE)
    last, counts = read(closing)
    assert (last["id"], last["choices"][0]["finish_reason"], last["choices"][0]["text"]) == ("a", "length", "")
    assert (counts["choices"], counts["usage"]) == ([], usage(2))


def test_last_events_are_sent_once() -> None:
    answer = ResumableAnswer(chat(stream_options={"include_usage": True}))
    answer.feed(delta_event(1, "stop", content="a"))
    assert answer.is_whole
    assert len(read(answer.closing())) == 1
    answer.feed(event(choices=[], usage=usage(1)))
    assert answer.closing() == DONE


@pytest.mark.parametrize("asked", [True, False])
def test_usage_in_the_last_chunk_counts(asked: bool) -> None:
    """As llama.cpp does in completions: no event of its own has the usage."""
    answer = ResumableAnswer(completion(max_tokens=9, stream_options={"include_usage": asked}))
    answer.feed(text_event("a", 1) + text_event("b", 2))
    assert body(answer)["max_tokens"] == 7
    seen = answer.feed(text_event("cde") + text_event("", 7, "length") + DONE)
    assert seen.endswith(DONE)
    last = [{"usage": usage(9), "choices": []}] if asked else []
    assert [{k: v for k, v in chunk.items() if k in ("usage", "choices")} for chunk in read(seen)[2:]] == last
    assert answer.tokens == 9


def test_pieces_may_end_anywhere() -> None:
    answer = ResumableAnswer(completion())
    data = text_event("ä", 1) + text_event("ö", 2, "stop") + DONE
    seen = b"".join(answer.feed(data[at : at + 1]) for at in range(len(data)))
    assert [chunk["choices"][0]["text"] for chunk in read(seen)] == ["ä", "ö"]
    assert answer.is_done


def test_a_half_event_of_a_lost_backend_is_forgotten() -> None:
    answer = ResumableAnswer(completion())
    answer.feed(text_event("a", 1) + text_event("b", 2)[:20])
    answer.next_body()
    assert [chunk["choices"][0]["text"] for chunk in read(answer.feed(text_event("b", 1)))] == ["b"]


@pytest.mark.parametrize(
    "bad", [b'data: {"error": {"code": 500}}\n\n', b"data: {half\n\n", b"data: 3\n\n", b'data: {"choices": [1]}\n\n']
)
def test_an_error_in_the_stream_is_a_failure_of_the_backend(bad: bytes) -> None:
    answer = ResumableAnswer(completion())
    seen = answer.feed(text_event("a", 1) + bad + text_event("b", 2))
    assert answer.failure is not None
    assert answer.text == "a"
    assert len(read(seen)) == 1
    answer.next_body()
    assert answer.failure is None


@pytest.mark.parametrize("delta", [{"tool_calls": [{"index": 0}]}, {"reasoning_content": "hm"}])
def test_answers_beyond_text_cannot_be_resumed(delta: dict[str, Any]) -> None:
    answer = ResumableAnswer(chat(tools=[{}]))
    answer.feed(delta_event(1, content="a"))
    assert answer.stuck is None
    assert len(read(answer.feed(delta_event(2, **delta)))) == 1
    assert answer.stuck == f"it holds {next(iter(delta))}"


@pytest.mark.parametrize(
    "question",
    [
        completion(n=2),
        completion(logprobs=0),
        completion(echo=True),
        completion(prompt=["a", "b"]),
        completion(prompt=[[1], [2]]),
        completion(response_format={"type": "json_object"}),
        completion(stream_options="all"),
        completion(return_weight_versions=True),
        chat(logprobs=True),
        chat(messages=[]),
        chat(add_generation_prompt=False),
        chat(continue_final_message=True, messages=[{"role": "user", "content": [{"type": "text", "text": "a"}]}]),
    ],
)
def test_some_requests_cannot_be_resumed(question: RequestBody) -> None:
    assert why_not_resumable(question) is not None


@pytest.mark.parametrize(
    "question",
    [
        completion(n=1, echo=False, logprobs=None, response_format={"type": "text"}, stop=["x"]),
        completion(prompt=[1, 2]),
        completion(return_weight_versions=False, expect_digest="05d07048"),
        chat(logprobs=False, tools=[{}], temperature=1),
    ],
)
def test_most_can(question: RequestBody) -> None:
    assert why_not_resumable(question) is None


@pytest.mark.parametrize("space", [b" ", b""])
def test_passed_through_answer_keeps_its_lines(space: bytes) -> None:
    answer = PassthroughAnswer(completion(n=2), "n")
    assert answer.next_body() == completion(n=2).content
    assert (answer.feed(b"data: {"), answer.stuck) == (b"", None)
    assert answer.feed(b"}\r\n\r\ndata:" + space + b"[DO") == b"data: {}\r\n\r\n"
    assert (answer.stuck, answer.is_done) == ("n", False)
    assert answer.feed(b"NE]\r\n\r\n") == b"data:" + space + b"[DONE]\r\n\r\n"
    assert answer.is_done


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"model": 3}'])
def test_a_body_that_names_no_model_is_refused(content: bytes) -> None:
    with pytest.raises(ApiError) as refusal:
        RequestBody(COMPLETIONS, content)
    assert refusal.value.status == 400


def test_events_of_the_next_backend_keep_the_ids_of_the_first() -> None:
    answer = ResumableAnswer(chat(max_tokens=9))
    answer.next_body()
    answer.feed(delta_event(0, role="assistant", content=""))
    answer.next_body()
    for word in ("a", "b", "c"):
        choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
        data = json.dumps({"id": "other", "created": 2, "choices": [choice], "usage": usage(1)}).encode()
        (chunk,) = read(answer.feed(b"data: " + data + b"\n\n"))
        assert (chunk["id"], chunk["created"]) == ("a", 1)


@pytest.mark.parametrize("is_compact", [True, False])
@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize("has_counts", [True, False])
def test_copied_events_are_those_that_parsing_gives(is_chat: bool, has_counts: bool, is_compact: bool) -> None:
    """Pieces of one whole event are copied as bytes; the same stream in pieces of one byte is parsed."""
    texts = [" once", ' "a"', "\\", '\\"', "", " ü\n", '", "usage": {}', " b"]
    events = [delta_event(0, role="assistant", content="")] if is_chat else []
    for number, text in enumerate(texts, 1):
        tokens = number if has_counts else None
        events.append(delta_event(tokens, content=text) if is_chat else text_event(text, tokens))
    events.append(
        event(choices=[{"index": 0, **({"delta": {}} if is_chat else {"text": ""}), "finish_reason": "stop"}])
    )
    if is_compact:
        events = [b"data: " + json.dumps(read(each)[0], separators=(",", ":")).encode() + b"\n\n" for each in events]
    stream = [*events, DONE]
    copied, parsed = (ResumableAnswer(chat() if is_chat else completion()) for _ in range(2))
    for answer in (copied, parsed):
        answer.next_body()
    given = b"".join(copied.feed(piece) for piece in stream)
    expected = b"".join(parsed.feed(bytes([byte])) for piece in stream for byte in piece)
    assert read(given) == read(expected)
    assert (copied.text, copied.tokens, copied.is_done) == (parsed.text, parsed.tokens, True)
    assert copied.text == "".join(texts)
    assert copied.counts == parsed.counts


def test_an_event_that_holds_more_than_text_is_not_copied() -> None:
    answer = ResumableAnswer(chat(max_tokens=9))
    answer.next_body()
    for number in (1, 2):
        answer.feed(delta_event(number, content="a"))
    answer.feed(delta_event(3, content="a", tool_calls=[{"index": 0}]))
    assert answer.stuck == "it holds tool_calls"
    assert (answer.text, answer.tokens) == ("aaa", 3)
    answer.feed(event(choices=[], error={"message": "broken"}))
    assert answer.failure is not None
