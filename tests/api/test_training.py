"""What training loops call: pause and resume, and weights in a body."""

import asyncio
from typing import Any

from tests.api.conftest import Running, Start
from tests.api.fakes import write_adapter
from tests.api.test_chat import CHAT, body
from tests.support.waiting import until


async def call(server: Running, route: str, **query: Any) -> Any:
    reply = await server.http.post(route, params=query)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def is_paused(server: Running) -> bool:
    paused: bool = (await server.http.get("/is_paused")).json()["is_paused"]
    return paused


def ask(server: Running, **fields: Any) -> "asyncio.Task[Any]":
    return asyncio.create_task(server.http.post(CHAT, json=body(**fields)))


async def halfway(server: Running) -> "asyncio.Task[Any]":
    """Start a request that stands still before its first token."""
    server.engine.open.clear()
    asking = ask(server)
    await until(lambda: server.service.generations, "it runs")
    return asking


async def test_running_requests_stand_still_and_go_on(start: Start) -> None:
    async with start() as server:
        running = await halfway(server)
        assert await call(server, "/pause", mode="keep") == {"status": "paused"}
        assert await is_paused(server)
        late = ask(server)
        assert not running.done()
        assert await call(server, "/resume") == {"status": "resumed"}
        for each in (running, late):
            assert (await each).json()["choices"][0]["message"]["content"] == "hello world"
        assert not await is_paused(server)


async def test_running_requests_end_with_what_they_have(start: Start) -> None:
    async with start() as server:
        running = await halfway(server)
        await call(server, "/pause")
        (choice,) = (await running).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "abort")
        await call(server, "/resume")
        assert (await ask(server)).status_code == 200


async def test_a_pause_waits_for_running_requests_and_new_ones_get_the_new_weights(start: Start) -> None:
    async with start() as server:
        await server.http.post("/v1/adapters", json={"name": "policy", "source": "pirate"})
        running = await halfway(server)
        pausing = asyncio.create_task(call(server, "/pause", mode="wait"))
        await until(lambda: not server.service.unpaused.is_set(), "it is being paused")
        late = ask(server, model="policy")
        server.engine.open.set()
        assert (await running).json()["choices"][0]["finish_reason"] == "stop"
        await pausing
        assert not server.engine.open.is_set()
        write_adapter(server.sources / "pirate", seed=99)
        new = (
            await server.http.post("/v1/adapters", json={"name": "policy", "source": "pirate", "replace": True})
        ).json()
        await call(server, "/resume")
        assert (await late).status_code == 200
        assert server.engine.submitted[-1].digest == new["digest"]


async def test_pausing_needs_an_admin_key_where_there_is_one(start: Start) -> None:
    async with start(api_keys=("a",), admin_keys=("b",)) as server:
        for route in ("/pause", "/resume"):
            refused = await server.http.post(route, headers={"Authorization": "Bearer a"})
            assert refused.status_code == 403
        wrong = await server.http.post("/pause?mode=stop", headers={"Authorization": "Bearer b"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "mode")


async def test_the_world_has_as_many_ranks_as_all_replicas(server: Running) -> None:
    assert (await server.http.get("/get_world_size")).json() == {"world_size": 1}
