"""Which requests may reuse each other's KV."""

from typing import Any

import pytest

from tests.api.conftest import Start
from tests.api.test_chat import CHAT, body
from tests.api.test_operations import bearer


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
async def test_kv_is_shared_without_keys_or_where_the_operator_says_so(start: Start, settings: dict[str, Any]) -> None:
    found = await salts(start, settings, [("one", {}), ("two", {}), ("one", {"cache_salt": "x"})])
    assert found[:2] == ["", ""]
    assert found[2]


async def test_empty_salt_is_refused(start: Start) -> None:
    async with start() as server:
        reply = await server.http.post(CHAT, json={**body(), "cache_salt": ""})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "cache_salt")
