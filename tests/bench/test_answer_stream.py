import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.http.answer_stream import AnswerStream, EventLines, error_text


def completion(text: str, finish_reason: str | None = None, **more: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], **more}).encode()


def chat(**delta: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}).encode()


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion, **details}


def read(*events: bytes) -> AnswerStream:
    """Take one event a second, the first at 0 s."""
    answer = AnswerStream()
    for second, event in enumerate(events):
        answer.take(event, float(second))
    return answer


@given(st.lists(st.text(st.characters(blacklist_characters="\r\n", codec="utf-8")), max_size=5), st.data())
def test_events_are_the_same_however_the_stream_is_cut(texts: list[str], data: st.DataObject) -> None:
    stream = b"".join(b": comment\r\ndata: [%s]\r\n\r\n" % text.encode() for text in texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    lines = EventLines()
    events = [event for piece in pieces for event in lines.feed(piece)]
    assert events == [b"[%s]" % text.encode() for text in texts]


def test_every_event_with_text_has_a_time_and_the_servers_count_is_believed() -> None:
    end = json.dumps({"choices": [], "usage": usage(7, 5, cached=4)}).encode()
    answer = read(completion("a"), completion(""), completion("bc", "length"), end, b"[DONE]")
    assert answer.token_times_s == [0.0, 2.0]
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (7, 5, 4)
    assert answer.finished


def test_without_a_count_the_events_with_text_are_counted() -> None:
    assert read(completion("a"), completion("b"), b"[DONE]").output_tokens == 2


def test_a_chats_opening_is_no_token_and_reasoning_is() -> None:
    answer = read(chat(role="assistant", content=""), chat(reasoning_content="so"), chat(content="yes"))
    assert answer.token_times_s == [1.0, 2.0]
    assert not answer.finished


def test_with_a_count_in_every_event_tokens_without_text_are_seen() -> None:
    events = [completion("", usage=usage(3, 1)), completion("", usage=usage(3, 1)), completion("x", usage=usage(3, 4))]
    answer = read(*events)
    assert answer.token_times_s == [0.0, 2.0]
    assert answer.output_tokens == 4


def test_a_count_that_comes_only_at_the_end_is_no_token_of_its_own() -> None:
    answer = read(completion("a"), completion("b"), completion("", "length", usage=usage(3, 2)))
    assert answer.token_times_s == [0.0, 1.0]


def test_an_answer_without_visible_text_has_its_time_at_the_end_mark() -> None:
    assert read(completion(""), completion("", "stop")).token_times_s == [1.0]


def test_an_error_in_the_stream_is_kept() -> None:
    answer = read(completion("a"), b'{"error": {"message": "out of luck", "code": 500}}', b"[DONE]")
    assert answer.error == "out of luck"


def test_an_event_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(msgspec.DecodeError):
        read(b"{")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "no such model"}}', "no such model"),
        (b'{"error": "Unauthorized"}', "Unauthorized"),
        (b'{"detail": "Not Found"}', "{'detail': 'Not Found'}"),
        (b"<html>Bad Gateway", "<html>Bad Gateway"),
    ],
)
def test_the_servers_words_are_found_in_every_form_of_error(body: bytes, text: str) -> None:
    assert error_text(body) == text
