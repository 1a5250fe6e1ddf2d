"""Names whose requests are split between versions, over HTTP."""

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from tests.support.api_server import Running, Start
from tests.support.chat_requests import CHAT, body
from tests.support.waiting import until

pytestmark = pytest.mark.slow

SPLIT = {"name": "legal", "versions": {"legal-v2": 0.75, "legal-v3": 0.25}}


@pytest.fixture
async def server(server: Running) -> Running:
    """A server with two versions of an adapter, between which a name is split."""
    for name, source in (("legal-v2", "pirate"), ("legal-v3", "json")):
        await server.http.post("/v1/adapters", json={"name": name, "source": str(server.sources / source)})
    reply = await server.http.post("/v1/adapters", json=SPLIT)
    assert reply.status_code == 201, reply.text
    return server


async def answered_by(server: Running, **fields: Any) -> str:
    reply = await server.http.post(CHAT, json=body(model="legal", **fields))
    assert reply.status_code == 200, reply.text
    return str(reply.json()["model"])


async def count(server: Running, version: str, kind: str = "served") -> float:
    page = (await server.http.get("/metrics")).text
    labels = f'kind="{kind}",model_name="base",split="legal",version="{version}"'
    lines = [line for line in page.splitlines() if "split_requests_total" in line and labels in line]
    return float(lines[0].rpartition(" ")[2]) if lines else 0.0


async def test_requests_go_to_versions_by_shares_and_users_stay(server: Running) -> None:
    by_user = {f"u{number}": await answered_by(server, user=f"u{number}") for number in range(40)}
    assert {*by_user.values()} == {"legal-v2", "legal-v3"}
    for user, version in by_user.items():
        assert await answered_by(server, user=user) == version
    sessions = {f"s{number}": set() for number in range(6)}
    for _ in range(3):
        for session, versions in sessions.items():
            reply = await server.http.post(CHAT, json=body(model="legal"), headers={"X-Session-ID": session})
            versions.add(reply.json()["model"])
    assert all(len(versions) == 1 for versions in sessions.values())
    served = Counter(by_user.values())
    assert await count(server, "legal-v2") >= 2 * served["legal-v2"]
    digests = {request.digest for request in server.engine.submitted}
    assert digests == {server.service.catalog.get(name).digest for name in SPLIT["versions"]}  # type: ignore[union-attr, attr-defined]


async def test_a_version_that_is_removed_costs_no_request(server: Running) -> None:
    users = [f"u{number}" for number in range(30)]
    before = [await answered_by(server, user=user) for user in users]
    asking = [asyncio.create_task(answered_by(server, user=user)) for user in users]
    assert (await server.http.delete("/v1/adapters/legal-v3")).status_code == 200
    await asyncio.gather(*asking)
    after = [await answered_by(server, user=user) for user in users]
    assert set(after) == {"legal-v2"}
    assert "legal-v3" in before
    await server.http.delete("/v1/adapters/legal-v2")
    reply = await server.http.post(CHAT, json=body(model="legal"))
    assert reply.status_code == 404
    assert "legal-v2, legal-v3" in reply.text


async def test_a_split_is_changed_listed_promoted_and_removed(server: Running) -> None:
    assert "legal" in {card["id"] for card in (await server.http.get("/v1/models")).json()["data"]}
    card = (await server.http.get("/v1/adapters/legal")).json()
    assert (card["versions"], card["shadow"]) == (SPLIT["versions"], {})
    assert card in (await server.http.get("/v1/adapters")).json()["data"]
    changed = await server.http.patch("/v1/adapters/legal", json={"versions": {"legal-v3": 1.0}})
    assert changed.json()["versions"] == {"legal-v3": 1.0}
    assert await answered_by(server) == "legal-v3"
    taken = await server.http.post("/v1/load_lora_adapter", json={"lora_name": "legal", "lora_path": "formal"})
    assert "name of a split" in taken.text
    assert (await server.http.delete("/v1/adapters/legal")).json()["deleted"]
    assert (await server.http.post(CHAT, json=body(model="legal"))).status_code == 404
    assert (await server.http.post(CHAT, json=body(model="legal-v3"))).status_code == 200


async def test_shadow_gets_copies_whose_answers_are_dropped(server: Running) -> None:
    await server.http.patch("/v1/adapters/legal", json={"versions": {"legal-v2": 1.0}, "shadow": {"legal-v3": 1.0}})
    for _ in range(3):
        assert await answered_by(server) == "legal-v2"
    await until(lambda: not server.service.copies, "the copies have been answered")
    assert await count(server, "legal-v3", "shadow") == 3
    shadow = server.service.catalog.get("legal-v3")
    assert shadow is not None
    assert [request.digest for request in server.engine.submitted].count(shadow.digest) == 3
    assert server.service.observer.usage.of("legal-v3").total.requests == 3


async def test_an_error_names_the_field_of_the_unknown_adapter(server: Running) -> None:
    for field, other in (("versions", {}), ("shadow", {"versions": {"legal-v2": 1.0}})):
        made = {"name": "other", **other, field: {"nobody": 0.5}}
        reply = await server.http.post("/v1/adapters", json=made)
        assert (reply.status_code, reply.json()["error"]["param"]) == (404, field)
        reply = await server.http.post("/v1/adapters", json={**made, field: {"legal-v3": -1.0}})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"versions": {"nobody": 1.0}}, 404),
        ({"versions": {"legal-v2": -1.0}}, 400),
        ({"versions": {"legal": 1.0}}, 404),
        ({"name": "base", "versions": {"legal-v2": 1.0}}, 400),
        ({"name": "formal", "versions": {"legal-v2": 1.0}}, 400),
        ({"name": "legal", "versions": {"legal-v2": 1.0}}, 400),
        ({"versions": {"legal-v2": 1.0}, "source": "formal"}, 400),
    ],
)
async def test_a_split_that_is_not_valid_is_refused(server: Running, fields: dict[str, Any], status: int) -> None:
    await server.http.post("/v1/adapters", json={"name": "formal", "source": str(server.sources / "formal")})
    reply = await server.http.post("/v1/adapters", json={"name": "other", **fields})
    assert reply.status_code == status, reply.text


async def test_split_is_named_as_such_where_an_adapter_is_needed(server: Running) -> None:
    reply = await server.http.post("/v1/adapters", json={"name": "other", "versions": {"legal": 1.0}})
    assert reply.json()["error"]["message"] == "`legal` is a split itself; name adapters."
    for part in ("stats", "content"):
        reply = await server.http.get(f"/v1/adapters/legal/{part}")
        assert (reply.status_code, "is a split" in reply.text) == (404, True), reply.text


async def test_an_adapter_becomes_a_split_without_a_lost_request(server: Running) -> None:
    await server.http.post("/v1/adapters", json={"name": "contract", "source": str(server.sources / "formal")})
    await server.http.post("/v1/adapters", json={"name": "contract-v1", "alias_of": "contract"})
    made = {"name": "contract", "versions": {"contract-v1": 1.0}, "replace": True}
    assert (await server.http.post("/v1/adapters", json=made)).status_code == 201
    reply = await server.http.post(CHAT, json=body(model="contract"))
    assert reply.json()["model"] == "contract-v1"


async def test_splits_are_there_after_a_restart_and_on_other_servers(start: Start) -> None:
    async with start() as first, start() as second:
        await first.http.post("/v1/adapters", json={"name": "v2", "source": str(first.sources / "pirate")})
        await first.http.post("/v1/adapters", json={"name": "legal", "versions": {"v2": 1.0}})
        # A change of adapters makes the other server read the registry.
        await second.http.post("/v1/adapters", json={"name": "x", "source": str(first.sources / "json")})
        assert await answered_by(second) == "v2"
    async with start() as third:
        assert await answered_by(third) == "v2"


async def test_a_large_body_is_answered_by_the_version_of_its_user(server: Running) -> None:
    long = "hello world " * 8000
    for user in ("u1", "u2", "u3", "u4"):
        small = await answered_by(server, user=user)
        content = json.dumps(body(model="legal", user=user, messages=[{"role": "user", "content": long}]))
        reply = await server.http.post(CHAT, content=content, headers={"Content-Type": "application/json"})
        assert reply.status_code == 400 or reply.json()["model"] == small
