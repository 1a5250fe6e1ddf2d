"""A router before two real servers, with one killed while it answers."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorikeet.router.adapters import describe_adapter
from lorikeet.router.proxied_request import CHAT, COMPLETIONS
from tests.router.conftest import requests_at, routing, text_of
from tests.support.api_server import TOKENIZER
from tests.support.fakes import write_adapter
from tests.support.served import make_model, serving

TOKENS = 3000
"""So many that an answer is under way for seconds, and is not over when its server is killed."""
MESSAGES = [{"role": "user", "content": "hello world"}]


def plain_text() -> dict[str, float]:
    """Return a bias that leaves a model of random weights nothing but ASCII to say, so that every token has text."""
    vocabulary = TOKENIZER.get_vocab()
    return {
        str(number): -100.0
        for text, number in vocabulary.items()
        if text.startswith("<|") or not all("!" <= letter <= "~" or letter == "\u0120" for letter in text)
    }


@pytest.mark.slow
async def test_streams_of_a_killed_server_go_on_at_the_other(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny", positions=4096)
    write_adapter(tmp_path / "sources" / "one", layers=3, hidden=48)
    flags = ("--adapter-dir", str(tmp_path / "sources"))
    adapter = describe_adapter("one", str(tmp_path / "sources" / "one"))
    common = {"model": "one", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "logit_bias": plain_text()}
    asked = {
        CHAT: {**common, "messages": MESSAGES},
        COMPLETIONS: {**common, "prompt": TOKENIZER.encode("hello world").ids},
    }
    async with AsyncExitStack() as stack:
        starting = (stack.enter_async_context(serving(model, tmp_path / name, *flags)) for name in "ab")
        servers = await asyncio.gather(*starting)
        urls = [str(server.http.base_url) for server in servers]
        async with routing(urls, adapters=(adapter,), preset="toppings:first-fit") as router:
            router.http.timeout = httpx.Timeout(120)
            replies = await asyncio.gather(*(router.http.post(path, json=body) for path, body in asked.items()))
            whole = {path: reply.json() for path, reply in zip(asked, replies, strict=True)}
            version = (await router.http.get("/v1/adapters/one")).json()["digest"]
            cards = [(await server.http.get("/v1/adapters/one")).json() for server in servers]
            assert {card["digest"] for card in cards} - {None} == {version}, "one of them has loaded it"
            named = {**common, "model": f"one@{version[:12]}", "expect_digest": version, "prompt": "a", "max_tokens": 1}
            assert (await router.http.post(COMPLETIONS, json=named)).status_code == 200
            refused = await router.http.post(COMPLETIONS, json={**named, "expect_digest": "0" * 64})
            assert refused.status_code == 409
            (made_by,) = {reply.headers["x-lorikeet-digest"] for reply in replies}
            assert {answer["system_fingerprint"] for answer in whole.values()} == {
                "-".join(digest[:12] for digest in made_by.split("-"))
            }, "both servers have the same weights, and the router passes their digests on"
            begun = asyncio.Queue[str]()
            reading = [asyncio.create_task(_read(router.http, path, body, begun)) for path, body in asked.items()]
            for _ in asked:
                await begun.get()
            (busy,) = [each for each in (await router.cluster())["replicas"] if requests_at(each)]
            (killed,) = [server for server in servers if str(server.http.base_url).startswith(busy["address"])]
            killed.process.kill()
            for path, chunks in zip(asked, await asyncio.gather(*reading), strict=True):
                expected = whole[path]["choices"][0]
                expected = expected["text"] if path == COMPLETIONS else expected["message"]["content"]
                said = text_of(chunks)
                assert said[:20] == expected[:20]
                assert chunks[-1]["usage"]["completion_tokens"] == TOKENS
                assert chunks[-1]["usage"]["prompt_tokens"] == whole[path]["usage"]["prompt_tokens"]
                assert [chunk for chunk in chunks if "error" in chunk] == []
            await router.metric("lorikeet:route_continued_total 2.0")
            await router.up(1)


async def _read(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], begun: "asyncio.Queue[str]"
) -> list[dict[str, Any]]:
    """Read a stream to its end; tell when some of it has come."""
    content = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", path, json=content) as reply:
        assert reply.status_code == 200
        lines: list[str] = []
        async for line in _data(reply):
            lines.append(line)
            if len(lines) == 30:
                begun.put_nowait(path)
    assert lines.index("[DONE]") == len(lines) - 1
    return [json.loads(line) for line in lines[:-1]]


async def _data(reply: httpx.Response) -> AsyncIterator[str]:
    async for line in reply.aiter_lines():
        if line:
            yield line.removeprefix("data: ")
