"""Requests that continue an answer of which the client has received a part."""

from typing import Any

import pytest

from lorikeet.router.proxied_request import CHAT, COMPLETIONS
from tests.router.calls import body
from tests.router.conftest import Start, events, text_of
from tests.router.scripted import chat_text, words

MESSAGES = [{"role": "user", "content": "hello"}]


async def test_the_rest_of_an_answer_is_sent(start: Start) -> None:
    async with start() as routing:
        begun = words("pirate", "once", 3)
        options = {"include_usage": True}
        asked = body("pirate", stream_options=options, received={"text": begun, "tokens": 3})
        chunks = await events(routing.http, COMPLETIONS, asked)
        assert begun + text_of(chunks) == words("pirate", "once", 5)
        assert chunks[-1]["usage"]["completion_tokens"] == 5
        assert not any("received" in each for backend in routing.backends for each in backend.bodies)
        chat = {"model": "pirate", "messages": MESSAGES, "max_tokens": 5}
        whole = words("pirate", chat_text(MESSAGES), 5)
        begun = words("pirate", chat_text(MESSAGES), 2)
        chunks = await events(routing.http, CHAT, {**chat, "received": {"text": begun, "tokens": 2}})
        assert begun + text_of(chunks) == whole


async def test_an_answer_whose_end_mark_alone_is_missing_ends(start: Start) -> None:
    async with start() as routing:
        asked = body("pirate", received={"text": words("pirate", "once", 5), "tokens": 5})
        (chunk,) = await events(routing.http, COMPLETIONS, asked)
        assert chunk["choices"][0]["finish_reason"] == "length"
        assert not any(backend.bodies for backend in routing.backends)


async def test_nothing_received_is_a_new_answer(start: Start) -> None:
    async with start() as routing:
        chunks = await events(routing.http, COMPLETIONS, body(received={"text": "", "tokens": 0}))
        assert text_of(chunks) == words("base", "once", 5)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"received": {"text": "x"}}, "tokens"),
        ({"received": {"text": "x", "tokens": -1}}, "tokens"),
        ({"received": "x"}, "received"),
        ({"received": {"text": "x", "tokens": 1}, "stream": False}, "it is not streamed"),
        ({"received": {"text": "x", "tokens": 1}, "n": 2}, "the request has n"),
    ],
)
async def test_an_answer_that_cannot_be_continued_is_a_400(start: Start, fields: dict[str, Any], reason: str) -> None:
    async with start(count=1) as routing:
        reply = await routing.http.post(COMPLETIONS, json=body(**{"stream": True, **fields}))
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "received")
        assert reason in reply.json()["error"]["message"]
