"""What training loops call: pause and resume, and weights in a body."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from safetensors.numpy import load_file, save

from lorikeet.cli.status import paused_words
from lorikeet.config import LogprobsMode
from tests.support.api_server import Running, Start
from tests.support.chat_requests import CHAT, body
from tests.support.fakes import write_adapter
from tests.support.waiting import until


async def call(server: Running, route: str, **query: Any) -> Any:
    reply = await server.http.post(route, params=query)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def call_get(server: Running, route: str, **query: Any) -> Any:
    return (await server.http.get(route, params=query)).json()


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
        await until(lambda: server.service.resolver.pauses.everything, "it is being paused")
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


async def test_a_paused_loop_does_not_pause_the_others(start: Start) -> None:
    async with start() as server:
        for name in ("one", "two"):
            await server.http.post("/v1/adapters", json={"name": name, "source": "pirate"})
        await call(server, "/pause", adapter="one", mode="keep")
        waiting = ask(server, model="one")
        large = ask(server, model="one", padding="x" * 70_000)
        assert (await ask(server, model="two", padding="x" * 70_000)).status_code == 200
        assert not waiting.done()
        assert not large.done()
        assert not await is_paused(server)
        assert (await call_get(server, "/is_paused", adapter="one"))["is_paused"]
        await call(server, "/resume", adapter="one")
        assert [(await each).status_code for each in (waiting, large)] == [200, 200]


async def test_a_mistyped_pause_or_abort_reaches_nothing(start: Start) -> None:
    async with start() as server:
        running = await halfway(server)
        for path, name in (("/pause?adaptor=one", "adaptor"), ("/sleep?tag=weights", "tag"), ("/resume?x=1", "x")):
            wrong = await server.http.post(path)
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, name)
        wrong = await server.http.post("/abort_requests", json={"request_id": ["a"]})
        assert wrong.status_code == 400
        assert "request_id" in wrong.text
        for path in ("/pause?adapter=nobody", "/resume?adapter=nobody"):
            assert (await server.http.post(path)).status_code == 404
        assert not await is_paused(server)
        assert not running.done()
        server.engine.open.set()
        assert (await running).json()["choices"][0]["finish_reason"] == "stop"


async def test_an_operator_sees_every_pause(start: Start) -> None:
    async with start() as server:
        await server.http.post("/v1/adapters", json={"name": "one", "source": "pirate"})
        await call(server, "/pause", adapter="one", mode="keep")
        await call(server, "/pause", tenant="a", mode="keep")
        found = await call_get(server, "/is_paused")
        assert found == {"is_paused": False, "adapters": ["one"], "tenants": ["a"]}
        await call(server, "/pause", mode="keep")
        assert (await call_get(server, "/health"))["paused"]
        shown = (await call_get(server, "/v1/cluster"))["paused"]
        assert shown == {"all": True, "asleep": [], "adapters": ["one"], "tenants": ["a"]}
        assert paused_words(shown) == "all requests; adapters one; tenants a"


async def test_a_pause_of_an_adapter_ends_its_requests_alone(start: Start) -> None:
    async with start() as server:
        await server.http.post("/v1/adapters", json={"name": "one", "source": "pirate"})
        server.engine.open.clear()
        own = ask(server, model="one")
        other = ask(server)
        await until(lambda: len(server.service.generations) == 2, "both run")
        await call(server, "/pause", adapter="one")
        assert (await own).json()["choices"][0]["finish_reason"] == "abort"
        assert not other.done()
        server.engine.open.set()
        assert (await other).json()["choices"][0]["finish_reason"] == "stop"


async def test_a_tenant_is_paused_alone(start: Start) -> None:
    async with start(tenant_header="X-Tenant") as server:
        await call(server, "/pause", tenant="a", mode="wait")
        waiting = asyncio.create_task(server.http.post(CHAT, json=body(), headers={"X-Tenant": "a"}))
        assert (await server.http.post(CHAT, json=body(), headers={"X-Tenant": "b"})).status_code == 200
        assert not waiting.done()
        await call(server, "/resume", tenant="a")
        assert (await waiting).status_code == 200


async def test_a_sleeping_server_gives_its_engine_back_and_requests_wait(start: Start) -> None:
    async with start() as server:
        assert await call(server, "/sleep", level=1, tags=["weights", "kv_cache"]) == {
            "status": "asleep",
            "asleep": ["kv_cache", "weights"],
        }
        assert not server.engine.alive
        assert (await server.http.get("/is_sleeping")).json()["is_sleeping"]
        assert (await server.http.get("/health")).json()["status"] == "asleep"
        assert (await server.http.get("/health/ready")).status_code == 503
        late = ask(server)
        assert (await call(server, "/wake_up", tags=["weights"]))["asleep"] == ["kv_cache"]
        assert not server.engine.alive
        assert not late.done()
        assert server.engine.wakes == [False], "the weights are loaded"
        assert (await call(server, "/wake_up", tags=["kv_cache"]))["status"] == "awake"
        assert server.engine.wakes == [False, True]
        assert (await late).status_code == 200


async def test_a_pool_sleeps_without_its_weights_and_weights_never_without_their_pool(start: Start) -> None:
    async with start() as server:
        assert (await call(server, "/sleep", tags=["kv_cache"]))["asleep"] == ["kv_cache"]
        assert server.engine.wakes == [False], "the engine starts with its weights alone"
        assert (await server.http.get("/health")).json()["status"] == "asleep"
        metrics = (await server.http.get("/metrics")).text
        assert any(
            each.startswith("lorikeet:engine_asleep{") and each.endswith(" 1.0") for each in metrics.splitlines()
        )
        await call(server, "/sleep", tags=["weights"])
        assert (await call(server, "/wake_up", tags=["kv_cache"]))["asleep"] == ["weights"]
        assert server.engine.wakes == [False]
        assert (await call(server, "/wake_up", tags=["weights"]))["status"] == "awake"
        assert server.engine.wakes == [False, True]


async def test_a_pause_outlasts_a_sleep_within_it(start: Start) -> None:
    async with start() as server:
        await call(server, "/pause", mode="keep")
        await call(server, "/sleep", mode="wait")
        await call(server, "/wake_up")
        assert server.engine.alive
        assert await is_paused(server)
        assert not server.engine.open.is_set()


async def test_level_0_keeps_the_engine(start: Start) -> None:
    async with start() as server:
        await call(server, "/sleep", level=0)
        assert server.engine.alive
        assert not server.engine.open.is_set()
        await call(server, "/wake_up", tags=["scheduling"])
        assert server.engine.open.is_set()
        wrong = await server.http.post("/sleep?tags=kv")
        assert (wrong.status_code, "kv_cache" in wrong.text) == (400, True)


async def test_requests_are_aborted_by_id_or_all_together(start: Start) -> None:
    async with start() as server:
        server.engine.open.clear()
        named = [
            asyncio.create_task(server.http.post(CHAT, json=body(), headers={"X-Request-Id": each})) for each in "ab"
        ]
        await until(lambda: len(server.service.generations) == 2, "they run")
        one = await server.http.post("/abort_requests", json={"request_ids": ["chatcmpl-a", "unknown"]})
        assert one.json() == {"status": "aborted", "aborted": 1}
        assert (await named[0]).json()["choices"][0]["finish_reason"] == "abort"
        assert not named[1].done()
        assert (await server.http.post("/abort_requests", json={})).json()["aborted"] == 1
        assert (await named[1]).json()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize(
    ("given", "recomputes"),
    [
        ({}, False),
        ({"json": {"reset_running_requests": True}}, True),
        ({"params": {"reset_running_requests": 1}}, True),
    ],
)
async def test_a_reset_of_the_cache_recomputes_running_requests_on_demand(
    start: Start, given: dict[str, Any], recomputes: bool
) -> None:
    async with start() as server:
        reply = await server.http.post("/reset_prefix_cache", **given)
        assert reply.json() == {"success": True}
        assert bool(server.engine.recomputed) == recomputes
        assert (await server.http.post("/reset_prefix_cache", content=b"[")).status_code == 400


@pytest.mark.parametrize("path", ["/init_weight_transfer_engine", "/update_weights", "/collective_rpc"])
async def test_pushed_weights_of_the_base_get_an_error_that_names_the_way(server: Running, path: str) -> None:
    reply = await server.http.post(path, json={"init_info": {}})
    assert reply.status_code == 501
    assert "AsyncGRPOTrainer" in reply.json()["error"]["message"]


async def test_server_info_has_what_trainers_compare(start: Start) -> None:
    async with start(adapters={"max_rank": 16}, logprobs_mode=LogprobsMode.PROCESSED, max_logprobs=-1) as server:
        config = (await server.http.get("/server_info?config_format=json")).json()["vllm_config"]
        assert config["parallel_config"]["data_parallel_size"] == 1
        assert config["lora_config"]["max_lora_rank"] == 16
        assert config["lora_config"]["max_loras"] > 1000
        assert config["model_config"]["logprobs_mode"] == "processed_logprobs"
        assert config["weight_transfer_config"] is None
    async with start(lora=False) as server:
        assert (await server.http.get("/server_info")).json()["vllm_config"]["lora_config"] is None


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
        assert (await upload(weights.read_bytes(), config=config)).status_code == 200, "the same again"

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
