"""Keys of tenants at a router before servers of other people: scopes, limits and usage."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorikeet.adapters.registry import sqlite_url
from lorikeet.core.splits import Split
from lorikeet.router.proxied_request import CHAT, COMPLETIONS
from tests.router.conftest import Routing, Start, events

ADMIN = {"Authorization": "Bearer boss"}


@asynccontextmanager
async def tenanted(start: Start, folder: Path, **options: Any) -> AsyncIterator[Routing]:
    given = {"tenants": True, "registry_url": sqlite_url(folder / "registry.sqlite3"), "admin_keys": ("boss",)}
    async with start(**{**given, **options}) as routing:
        yield routing


async def key(http: httpx.AsyncClient, **settings: Any) -> dict[str, str]:
    """Make a key with settings. Return its header."""
    reply = await http.post("/v1/keys", json={"name": "acme", "settings": settings}, headers=ADMIN)
    assert reply.status_code == 201, reply.text
    return {"Authorization": f"Bearer {reply.json()['secret']}"}


def body(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "once", "max_tokens": 5, **fields}


async def test_a_key_names_the_models_of_its_scope(start: Start, tmp_path: Path) -> None:
    split = {"both": Split({"formal": 0.5, "pirate": 0.5}, {})}
    async with tenanted(start, tmp_path, splits=split) as routing:
        http = routing.http
        mine = await key(http, use=["pirate", "both"], see=["formal"])
        for model, status in (
            ("pirate", 200),
            ("base:pirate", 200),
            ("both", 200),
            ("formal", 403),
            ("base:formal", 403),
            ("pirate*0.5+formal*0.5", 403),
            ("base", 404),
            ("", 404),
            ("auto", 404),
            ("nobody", 404),
        ):
            reply = await http.post(COMPLETIONS, json=body(model), headers=mine)
            assert reply.status_code == status, (model, reply.text)
        listed = (await http.get("/v1/models", headers=mine)).json()["data"]
        assert {card["id"] for card in listed} == {"pirate", "formal", "both"}
        adapters = (await http.get("/v1/adapters", headers=mine)).json()["data"]
        assert [card["name"] for card in adapters] == ["both", "formal", "pirate"]
        narrow = await key(http, use=["pirate"])
        assert (await http.get("/v1/adapters/formal", headers=narrow)).status_code == 404
        assert (await http.get("/v1/models/formal", headers=narrow)).status_code == 404
        for path in ("/metrics", "/v1/cluster", "/v1/stats", "/v1/keys", "/server_info"):
            assert (await http.get(path, headers=mine)).status_code == 403, path
        assert (await http.post("/v1/adapters", json={}, headers=mine)).status_code == 403
        assert (await http.get("/v1/files", headers=mine)).status_code == 501
        assert (await http.post(COMPLETIONS, json=body("pirate"))).status_code == 401
        assert (await http.post(COMPLETIONS, json=body("base"), headers=ADMIN)).status_code == 200
        assert {key for backend in routing.backends for key in backend.keys} == {None}, "no secret leaves the router"


async def test_limits_count_at_the_router(start: Start, tmp_path: Path) -> None:
    async with tenanted(start, tmp_path) as routing:
        http = routing.http
        mine = await key(http, tokens_per_day=20)
        reply = await http.post(COMPLETIONS, json=body("pirate"), headers=mine)
        assert reply.status_code == 200
        assert reply.headers["x-ratelimit-limit-tokens"] == "20"
        assert (await http.post("/tokenize", json=body("pirate"), headers=mine)).status_code != 429
        wrong = body("pirate", received={"text": "a", "tokens": 1})  # Only streams continue an answer.
        assert (await http.post(COMPLETIONS, json=wrong, headers=mine)).status_code == 400
        never = await http.post(COMPLETIONS, json=body("pirate", max_tokens=100), headers=mine)
        assert never.status_code == 400
        assert "can never be accepted for this key" in never.json()["error"]["message"]
        spent = [(await http.post(COMPLETIONS, json=body("pirate"), headers=mine)).status_code for _ in range(3)]
        assert spent[-1] == 429
        refused = await http.post(COMPLETIONS, json=body("pirate"), headers=mine)
        assert int(refused.headers["retry-after"]) > 0
        answered = sum(len(backend.bodies) for backend in routing.backends)
        assert answered < 4
        page = (await http.get("/metrics", headers=ADMIN)).text
        name = (await http.get("/v1/keys", headers=ADMIN)).json()["data"][0]["id"]
        assert f'lorikeet:tenant_requests_total{{tenant="{name}"}} {answered}.0' in page
        assert f'lorikeet:tenant_generation_tokens_total{{tenant="{name}"}} {5 * answered}.0' in page
        refusals = 1 + sum(status == 429 for status in spent)
        assert f'lorikeet:tenant_requests_refused_total{{tenant="{name}"}} {refusals}.0' in page
        revoked = (await http.get("/v1/keys", headers=ADMIN)).json()["data"][0]["id"]
        assert (await http.delete(f"/v1/keys/{revoked}", headers=ADMIN)).status_code == 200
        assert (await http.post(COMPLETIONS, json=body("pirate"), headers=mine)).status_code == 401


@pytest.mark.parametrize("choices", [1, 2])
async def test_usage_is_what_backends_count(start: Start, tmp_path: Path, choices: int) -> None:
    async with tenanted(start, tmp_path) as routing:
        http = routing.http
        mine = await key(http)
        http.headers.update(mine)
        assert (await http.post(COMPLETIONS, json=body("pirate", n=choices))).status_code == 200
        await events(http, COMPLETIONS, body("formal", n=choices))
        await events(http, CHAT, {"model": "base", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3})
        for backend in routing.backends:
            backend.fails_with = 422
        assert (await http.post(COMPLETIONS, json=body("pirate"))).status_code == 422
        rows = (await http.get("/v1/usage")).json()["data"]
        found = {row["adapter"]: (row["requests"], row["prompt_tokens"], row["completion_tokens"]) for row in rows}
        prompt = len("once")
        assert found["pirate"] == (choices, prompt, 5)
        assert found["formal"][::2] == (choices, 5), "events count where the backend gives no usage"
        assert found[None][::2] == (1, 3)
        assert {(row["key_name"], row["base"]) for row in rows} == {("acme", "base")}
        only = (await http.get("/v1/usage?model=base")).json()["data"]
        assert [row["adapter"] for row in only] == [None]
        assert (await http.get("/v1/usage?start=tomorrow")).status_code == 400


async def test_keys_of_a_group_share_their_kv(start: Start, tmp_path: Path) -> None:
    async with tenanted(start, tmp_path, count=1) as routing:
        http = routing.http
        headers = [await key(http, cache_group=group) for group in ("team", "team", "")]
        for each in headers:
            assert (await http.post(COMPLETIONS, json=body("pirate"), headers=each)).status_code == 200
        first, second, third = (asked["cache_salt"] for asked in routing.backends[0].bodies)
        assert first == second != third
