"""A stream has the same bytes whether they pass the event loop and all middleware, or go to the connection directly."""

import asyncio
import json
import random
import re
from typing import Any

import pytest
from starlette.types import Message

from lorikeet.api.app import create_app
from lorikeet.http import connections
from lorikeet.http.streaming import DIRECT_BODY
from tests.support.api_server import Running, Start

ANSWER = 'Grüße an die Welt, 日本語 and emoji 🦜🌈 "quoted" \\ and\nlines, then hello world'
CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 200}
COMPLETION = {"model": "base", "prompt": "hi", "stream": True, "max_tokens": 200}


class FitfulBody:
    """Takes parts or not, as a client reads or does not."""

    def __init__(self, draw: random.Random, parts: list[bytes]) -> None:
        self._draw = draw
        self._parts = parts
        self.began = False
        self.written = 0

    @property
    def is_open(self) -> bool:
        return self.began and self._draw.random() < 0.6

    def write(self, part: bytes) -> None:
        self.written += 1
        self._parts.append(part)


async def stream(server: Running, path: str, body: dict[str, Any], draw: random.Random | None) -> tuple[bytes, int]:
    """Return a stream's bytes, and how many parts went directly."""
    parts: list[bytes] = []
    direct = None if draw is None else FitfulBody(draw, parts)
    given = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    never = asyncio.Event()

    async def receive() -> Message:
        if not given:
            await never.wait()
        return given.pop()

    async def send(message: Message) -> None:
        if draw is not None:  # as if the client had to read first
            for _ in range(draw.randrange(4)):
                await asyncio.sleep(0)
        if message["type"] == "http.response.start":
            assert message["status"] == 200
            if direct is not None:
                direct.began = True
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"x-request-id", b"one")],
        "extensions": {} if direct is None else {DIRECT_BODY: direct},
    }
    await create_app(server.service)(scope, receive, send)
    return re.sub(rb'"created":\d+', b"", b"".join(parts)), 0 if direct is None else direct.written


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"stop": ["Welt, 日", "lines"]}),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
        ("/v1/completions", COMPLETION),
        ("/v1/completions", COMPLETION | {"echo": True, "return_token_ids": True}),
    ],
)
async def test_direct_and_other_writes_form_one_stream(start: Start, path: str, body: dict[str, Any]) -> None:
    async with start(answer=ANSWER) as server:
        expected, _ = await stream(server, path, body, None)
        assert expected.endswith(b"data: [DONE]\n\n")
        server.engine.turns = 8
        directly = 0
        for seed in range(5):
            found, written = await stream(server, path, body, random.Random(seed))
            assert found == expected
            directly += written
        assert directly >= 5


async def test_choices_of_a_directly_written_stream_are_complete(start: Start) -> None:
    async with start(answer=ANSWER) as server:
        server.engine.turns = 8
        found, written = await stream(server, "/v1/chat/completions", CHAT | {"n": 3}, random.Random(0))
        texts = ["", "", ""]
        for line in found.decode().split("\n\n"):
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: ").replace(",,", ",").replace("{,", "{"))["choices"]:
                    texts[choice["index"]] += choice["delta"].get("content", "")
        assert texts == [ANSWER] * 3
        assert written > 20


async def test_a_connection_takes_parts_directly(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    direct: list[bytes] = []
    write = connections._AnswerBody.write
    monkeypatch.setattr(connections._AnswerBody, "write", lambda body, part: (direct.append(part), write(body, part)))
    async with start(answer=ANSWER) as server:
        server.engine.turns = 8
        headers = {"x-request-id": "one"}
        answer = await server.http.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert len(direct) > 10
        found = re.sub(rb'"created":\d+', b"", answer.content)
        assert found == (await stream(server, "/v1/chat/completions", CHAT, None))[0]
