"""Names whose requests a router splits between adapters."""

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
from typer.testing import CliRunner

from lorikeet.cli.app import app
from lorikeet.core.splits import Split
from lorikeet.router import proxy
from lorikeet.router.proxied_request import CHAT, COMPLETIONS
from tests.router.calls import body
from tests.router.conftest import Routing, Start, events
from tests.support.waiting import until

SPLIT = {"name": "tone", "versions": {"formal": 0.75, "pirate": 0.25}}


async def answered_by(routing: Routing, headers: dict[str, str] | None = None, **fields: Any) -> str:
    """Return the version that answers a request of the split."""
    before = [len(backend.bodies) for backend in routing.backends]
    reply = await routing.http.post(COMPLETIONS, json=body("tone", **fields), headers=headers)
    assert reply.status_code == 200, reply.text
    (asked,) = [
        asked for backend, count in zip(routing.backends, before, strict=True) for asked in backend.bodies[count:]
    ]
    return str(asked["model"])


async def test_requests_go_to_versions_as_in_a_server_and_users_stay(start: Start) -> None:
    async with start() as routing, start() as other:
        for each in (routing, other):
            assert (await each.http.post("/v1/adapters", json=SPLIT)).status_code == 201
        by_user = {f"u{number}": await answered_by(routing, user=f"u{number}") for number in range(24)}
        expected = {user: Split({"formal": 0.75, "pirate": 0.25}).ranked("tone", user)[0] for user in by_user}
        assert by_user == expected
        assert {*by_user.values()} == {"formal", "pirate"}
        assert {user: await answered_by(other, user=user) for user in by_user} == by_user
        for session in ("a", "b", "c"):
            of = [await answered_by(each, {"X-Session-ID": session}) for each in (routing, routing, other)]
            assert len(set(of)) == 1
        count = Counter(by_user.values())["pirate"]
        page = (await routing.http.get("/metrics")).text
        (line,) = [line for line in page.splitlines() if 'version="pirate"' in line and "requests_total" in line]
        assert line.startswith('lorikeet:split_requests_total{kind="served",split="tone"')
        assert float(line.rpartition(" ")[2]) >= count


async def test_a_version_that_is_removed_costs_no_request(start: Start) -> None:
    async with start() as routing:
        await routing.http.post("/v1/adapters", json=SPLIT)
        asking = [routing.http.post(COMPLETIONS, json=body("tone", user=f"u{number}")) for number in range(20)]
        running = [asyncio.create_task(each) for each in asking]
        assert (await routing.http.delete("/v1/adapters/pirate")).json()["deleted"]
        assert {reply.status_code for reply in await asyncio.gather(*running)} == {200}
        assert {await answered_by(routing, user=f"u{number}") for number in range(20)} == {"formal"}
        await routing.http.delete("/v1/adapters/formal")
        reply = await routing.http.post(COMPLETIONS, json=body("tone"))
        assert reply.status_code == 404
        assert "formal, pirate" in reply.text


async def test_a_split_is_listed_changed_and_removed(start: Start) -> None:
    async with start() as routing:
        card = (await routing.http.post("/v1/adapters", json=SPLIT)).json()
        assert (card["versions"], card["shadow"]) == (SPLIT["versions"], {})
        listed = (await routing.http.get("/v1/adapters")).json()
        assert [each["name"] for each in listed["data"]] == ["formal", "pirate", "tone"]
        nested = await routing.http.post("/v1/adapters", json={"name": "other", "versions": {"tone": 1.0}})
        assert nested.json()["error"]["message"] == "`tone` is a split itself; name adapters."
        assert card in listed["data"]
        page = (await routing.http.get("/v1/adapters?limit=2")).json()
        assert (page["has_more"], page["next_cursor"]) == (True, "pirate")
        assert "tone" in {each["id"] for each in (await routing.http.get("/v1/models")).json()["data"]}
        changed = await routing.http.patch("/v1/adapters/tone", json={"versions": {"pirate": 1.0}})
        assert changed.json()["versions"] == {"pirate": 1.0}
        assert await answered_by(routing) == "pirate"
        taken = await routing.http.post("/v1/load_lora_adapter", json={"lora_name": "tone", "lora_path": "x"})
        assert "name of a split" in taken.text
        assert (await routing.http.delete("/v1/adapters/tone")).json()["deleted"]
        assert (await routing.http.post(COMPLETIONS, json=body("tone"))).status_code == 404


async def test_adapters_are_added_aliased_and_removed_by_lorikeets_route(start: Start) -> None:
    async with start() as routing:
        new = {"name": "legal", "source": "/elsewhere/legal", "rank": 4}
        added = await routing.http.post("/v1/adapters", json=new)
        assert (added.status_code, added.json()["rank"], added.json()["level"]) == (201, 4, None)
        assert (await routing.http.post("/v1/adapters", json=new)).status_code == 400
        assert (await routing.http.post("/v1/adapters", json={"name": "law", "alias_of": "legal"})).status_code == 201
        assert (await routing.http.post(COMPLETIONS, json=body("law"))).status_code == 200
        card = (await routing.http.get("/v1/adapters/law")).json()
        assert (card["level"], len(card["replicas"])) == ("gpu", 1)
        assert (await routing.http.delete("/v1/adapters/law")).json()["freed_bytes"] is None
        assert (await routing.http.get("/v1/adapters/law")).status_code == 404
        warm = await routing.http.patch("/v1/adapters/legal", json={"warm": True})
        assert warm.status_code == 501


async def test_an_adapter_becomes_a_split(start: Start) -> None:
    async with start() as routing:
        await routing.http.post("/v1/adapters", json={"name": "formal-v1", "alias_of": "formal"})
        made = {"name": "formal", "versions": {"formal-v1": 1.0}, "replace": True}
        assert (await routing.http.post("/v1/adapters", json=made)).status_code == 201
        reply = await routing.http.post(COMPLETIONS, json=body("formal"))
        assert reply.status_code == 200
        assert any("formal-v1" in backend.adapters for backend in routing.backends)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_shadow_gets_copies_whose_answers_are_dropped(start: Start, path: str) -> None:
    async with start() as routing:
        shares = {"name": "tone", "versions": {"formal": 1.0}, "shadow": {"pirate": 1.0}}
        await routing.http.post("/v1/adapters", json=shares)
        asked = {**body("tone"), "messages": [{"role": "user", "content": "hello"}]}
        if path == CHAT:
            del asked["prompt"]
        for _ in range(2):
            await events(routing.http, path, asked)
        await until(lambda: not len(routing.parts.copies), "the copies have been answered")
        bodies = [each for backend in routing.backends for each in backend.bodies]
        assert Counter(each["model"] for each in bodies) == {"formal": 2, "pirate": 2}
        copies = [each for each in bodies if each["model"] == "pirate"]
        assert all("stream" not in each and each["service_tier"] == "flex" for each in copies)
        labels = 'kind="shadow",split="tone",version="pirate"'
        await routing.metric(f"lorikeet:split_requests_total{{{labels}}} 2.0")


async def test_a_failed_or_excess_copy_disturbs_nobody(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start() as routing:
        await routing.http.post("/v1/adapters", json={**SPLIT, "versions": {"formal": 1.0}, "shadow": {"pirate": 1.0}})
        for backend in routing.backends:
            backend.bad_paths.add("/elsewhere/pirate")
        assert await answered_by_formal(routing)
        await until(lambda: not len(routing.parts.copies), "the copy has ended")
        monkeypatch.setattr(proxy, "MAX_COPIES", 0)
        assert await answered_by_formal(routing)
        labels = 'kind="skipped",split="tone",version="pirate"'
        await routing.metric(f"lorikeet:split_requests_total{{{labels}}} 1.0")


async def answered_by_formal(routing: Routing) -> bool:
    return (await routing.http.post(COMPLETIONS, json=body("tone"))).status_code == 200


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"versions": {"nobody": 1.0}}, 404),
        ({"versions": {"formal": -1.0}}, 400),
        ({"versions": {"formal": 0.0}}, 400),
        ({"versions": {"other": 1.0}}, 400),
        ({"name": "base", "versions": {"formal": 1.0}}, 400),
        ({"name": "formal", "versions": {"pirate": 1.0}}, 400),
        ({"versions": {"formal": 1.0}, "source": "/x"}, 400),
        ({"versions": "formal"}, 400),
        ({}, 400),
    ],
)
async def test_a_split_that_is_not_valid_is_refused(start: Start, fields: dict[str, Any], status: int) -> None:
    async with start(count=1) as routing:
        reply = await routing.http.post("/v1/adapters", json={"name": "other", **fields})
        assert reply.status_code == status, reply.text
        assert (await routing.http.patch("/v1/adapters/formal", json={"versions": {}})).status_code == 404


async def test_only_admins_change_splits(start: Start) -> None:
    async with start(count=1, api_keys=("client",), admin_keys=("admin",), backend_key="own") as routing:
        client = {"Authorization": "Bearer client"}
        assert (await routing.http.post("/v1/adapters", json=SPLIT, headers=client)).status_code in (401, 403)
        assert (await routing.http.get("/v1/adapters", headers=client)).status_code == 200
        admin = {"Authorization": "Bearer admin"}
        assert (await routing.http.post("/v1/adapters", json=SPLIT, headers=admin)).status_code == 201


async def test_splits_are_there_from_the_start(start: Start) -> None:
    async with start(splits={"tone": Split({"pirate": 1.0})}) as routing:
        assert await answered_by(routing) == "pirate"


@pytest.mark.parametrize(
    ("split", "reason"),
    [
        ("tone=pirate", "must be NAME=ADAPTER:SHARE"),
        ("tone=nobody:1", "not a name of --lora-modules"),
        ("tone=pirate:0", "at least one version"),
        ("pirate=pirate:1", "cannot be a version of itself"),
        ("formal=pirate:1", "empty or in use"),
    ],
)
def test_a_split_of_the_command_line_that_is_not_valid_is_named(split: str, reason: str) -> None:
    modules = [part for name in ("pirate", "formal") for part in ("--lora-modules", f"{name}=hf://org/{name},rank=8")]
    result = CliRunner().invoke(app, ["router", "--backend", "http://127.0.0.1:1", *modules, "--split", split])
    assert result.exit_code == 2
    assert reason in json.dumps(result.output.replace("\n", " "))
