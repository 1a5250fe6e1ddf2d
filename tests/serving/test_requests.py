"""Which requests may reuse each other's KV."""

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.api_server import TOKENIZER, Start
from tests.support.chat_requests import CHAT, bearer, body
from tests.support.live import write_adapter
from tests.support.served import make_model, serving


async def salts(start: Start, settings: dict[str, Any], asked: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return the salts of requests, each with a key and fields."""
    async with start(**settings) as server:
        for key, fields in asked:
            reply = await server.http.post(CHAT, json={**body(), **fields}, headers=bearer(key))
            assert reply.status_code == 200, reply.text
        return [request.cache_salt for request in server.engine.submitted]


async def test_keys_and_the_salts_of_bodies_keep_kv_apart(start: Start) -> None:
    salt = {"cache_salt": "x"}
    asked = [("one", {}), ("two", {}), ("one", {}), ("one", salt), ("two", salt), ("one", salt)]
    first, second, again, salted, other, same = await salts(start, {"api_keys": ("one", "two")}, asked)
    assert first == again
    assert salted == same
    assert len({first, second, salted, other}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"api_keys": ("one", "two"), "shared_prefix_cache": True}])
async def test_kv_is_shared_without_keys_or_by_the_operators_setting(start: Start, settings: dict[str, Any]) -> None:
    found = await salts(start, settings, [("one", {}), ("two", {}), ("one", {"cache_salt": "x"})])
    assert found[:2] == ["", ""]
    assert found[2]


async def test_empty_salt_is_refused(start: Start) -> None:
    async with start() as server:
        reply = await server.http.post(CHAT, json={**body(), "cache_salt": ""})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "cache_salt")


@pytest.mark.slow
async def test_a_key_prefills_and_reuses_as_much_as_if_the_other_key_were_not_there(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny")
    random = Random(0)
    adapter = write_adapter(tmp_path / "red", model, seed=1)
    vocabulary = range(TOKENIZER.get_vocab_size())
    beginnings = [random.choices(vocabulary, k=64) for _ in range(3)]
    asked = [
        (
            random.choice(("tiny", "red")),
            random.choice(beginnings) + random.choices(vocabulary, k=random.randint(1, 40)),
        )
        for _ in range(24)
    ]
    flags = ("--api-key", "one", "--api-key", "two", "--admin-key", "boss", "--lora-modules", f"red={adapter}")
    async with serving(model, tmp_path / "home", *flags) as server:

        async def counts(key: str) -> list[tuple[int, int]]:
            """Ask one after the other; return the tokens that each request prefilled and found."""
            found = []
            for name, prompt in asked:
                fields = {"model": name, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
                reply = await server.http.post("/v1/completions", json=fields, headers=bearer(key))
                assert reply.status_code == 200, reply.text
                cached = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                found.append((len(prompt) - cached, cached))
            return found

        async def both(*keys: str) -> list[list[tuple[int, int]]]:
            assert (await server.http.post("/flush_cache", headers=bearer("boss"))).status_code == 200
            return await asyncio.gather(*map(counts, keys))

        (alone,) = await both("one")
        assert await both("one", "two") == [alone, alone]
        assert sum(cached for _, cached in alone) > 1000
        assert await counts("one") != alone, "the check would notice KV of another key"
