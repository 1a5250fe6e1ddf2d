"""What training loops call: pause and resume, and weights in a body."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from safetensors.numpy import load_file, save

from tests.support.api_server import Running, Start
from tests.support.chat_requests import CHAT, body
from tests.support.fakes import write_adapter
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


async def test_running_requests_pause_and_resume(start: Start) -> None:
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


@pytest.mark.slow
async def test_running_requests_end_with_their_present_tokens(start: Start) -> None:
    async with start() as server:
        running = await halfway(server)
        await call(server, "/pause")
        (choice,) = (await running).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "abort")
        await call(server, "/resume")
        assert (await ask(server)).status_code == 200


@pytest.mark.slow
async def test_a_pause_waits_for_running_requests_and_new_ones_get_the_new_weights(start: Start) -> None:
    async with start() as server:
        await server.http.post("/v1/adapters", json={"name": "policy", "source": "pirate"})
        running = await halfway(server)
        pausing = asyncio.create_task(call(server, "/pause", mode="wait"))
        await until(lambda: not server.service.resolver.unpaused.is_set(), "it is being paused")
        late = ask(server, model="policy")
        server.engine.open.set()
        assert (await running).json()["choices"][0]["finish_reason"] == "stop"
        await pausing
        assert not server.engine.open.is_set()
        write_adapter(server.sources / "pirate", seed=99)
        replacing = {"name": "policy", "source": "pirate", "replace": True}
        new = (await server.http.post("/v1/adapters", json=replacing)).json()
        await call(server, "/resume")
        assert (await late).status_code == 200
        assert server.engine.submitted[-1].digest == new["digest"]


async def test_pausing_needs_an_admin_key_if_set(start: Start) -> None:
    async with start(api_keys=("a",), admin_keys=("b",)) as server:
        for route in ("/pause", "/resume"):
            refused = await server.http.post(route, headers={"Authorization": "Bearer a"})
            assert refused.status_code == 403
        wrong = await server.http.post("/pause?mode=stop", headers={"Authorization": "Bearer b"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "mode")


async def test_the_world_has_as_many_ranks_as_all_replicas(server: Running) -> None:
    assert (await server.http.get("/get_world_size")).json() == {"world_size": 1}


UPLOAD = "/v1/adapters/upload"


@pytest.mark.slow
async def test_weights_in_a_body_are_registered_and_replaced(start: Start) -> None:
    async with start() as server:
        folder = server.sources / "pirate"
        config = (folder / "adapter_config.json").read_text()
        weights = folder / "adapter_model.safetensors"

        async def upload(content: bytes, **query: Any) -> Any:
            return await server.http.post(UPLOAD, params={"name": "policy", **query}, content=content)

        lacks = await upload(weights.read_bytes())
        assert (lacks.status_code, lacks.json()["error"]["param"]) == (400, "config")
        first = await upload(weights.read_bytes(), config=config)
        assert first.status_code == 201, first.text
        assert first.json()["source"] == "upload"
        by_route = await server.http.post("/v1/adapters", json={"name": "same", "source": "pirate"})
        assert by_route.json()["digest"] == first.json()["digest"]
        assert (await upload(weights.read_bytes(), config=config)).status_code == 400

        write_adapter(folder, seed=77)
        second = await upload(weights.read_bytes(), replace=True)
        assert second.status_code == 201, second.text
        assert second.json()["digest"] != first.json()["digest"]
        await server.http.post(CHAT, json=body(model="policy"))
        assert server.engine.submitted[-1].digest == second.json()["digest"]

        named = save(load_file(weights), {"adapter_config": config})
        assert (await server.http.post(UPLOAD, params={"name": "other"}, content=named)).status_code == 201

        for content, query, words in (
            (b"no weights", {"config": config}, "safetensors"),
            (weights.read_bytes(), {"config": "[]"}, "JSON object"),
            (weights.read_bytes(), {"config": config.replace('"r": 4', '"r": 8')}, "rank"),
        ):
            refused = await upload(content, replace=True, **query)
            assert refused.status_code == 400
            assert words in refused.json()["error"]["message"]
        assert list((server.sources.parent / "store" / "incoming").iterdir()) == []


async def test_weights_that_are_too_large_are_refused_while_they_arrive(start: Start) -> None:
    async with start(adapters={"max_bytes": 1000}) as server:

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b"x" * 100

        reply = await server.http.post(UPLOAD, params={"name": "policy"}, content=pieces())
        assert reply.status_code == 413


async def test_error_of_an_upload_hides_the_servers_folders(server: Running) -> None:
    folder = server.sources / "formal"
    config = json.loads((folder / "adapter_config.json").read_text()) | {"r": 3}
    reply = await server.http.post(
        UPLOAD,
        params={"name": "policy", "config": json.dumps(config)},
        content=(folder / "adapter_model.safetensors").read_bytes(),
    )
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("adapter 'policy': adapter_model.safetensors: tensor base_model")
