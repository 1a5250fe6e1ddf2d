"""Routes of training loops through a router: they reach every backend, and those that come up later."""

import asyncio

import httpx

from lorikeet.core.splits import Split
from tests.router.calls import body
from tests.router.conftest import Routing, Start
from tests.router.scripted import ScriptedBackend
from tests.support.waiting import until


def called(backend: ScriptedBackend) -> list[str]:
    return [path for path, _ in backend.loop_calls]


async def post(routing: Routing, path: str) -> dict[str, object]:
    reply = await routing.http.post(path)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


async def test_pauses_reach_all_backends_and_those_that_come_up_later(start: Start) -> None:
    async with start() as routing:
        for backend in routing.backends:
            backend.loop_answers["/pause"] = {"status": "paused"}
        assert await post(routing, "/pause?mode=keep") == {"status": "paused"}
        await post(routing, "/sleep?level=1")
        first, second = routing.backends
        assert called(first) == called(second) == ["/pause?mode=keep", "/sleep?level=1"]
        await second.kill()
        await routing.up(1)
        second.loop_calls.clear()
        await second.start()
        await routing.up(2)
        assert called(second) == ["/pause?mode=keep", "/sleep?level=1"]

        await post(routing, "/wake_up")
        await post(routing, "/resume")
        await second.kill()
        await routing.up(1)
        second.loop_calls.clear()
        await second.start()
        await routing.up(2)
        assert called(second) == []


async def test_a_part_that_sleeps_on_stays_asleep_at_a_new_backend(start: Start) -> None:
    async with start(count=1) as routing:
        (backend,) = routing.backends
        backend.loop_answers["/wake_up"] = {"status": "asleep", "asleep": ["kv_cache"]}
        await post(routing, "/sleep")
        assert await post(routing, "/wake_up?tags=weights") == {"status": "asleep", "asleep": ["kv_cache"]}
        await backend.kill()
        await routing.up(0)
        backend.loop_calls.clear()
        await backend.start()
        await routing.up(1)
        assert called(backend) == ["/sleep", "/wake_up?tags=weights"]


async def test_weights_of_the_base_cannot_be_pushed(start: Start) -> None:
    async with start(count=1) as routing:
        reply = await routing.http.post("/update_weights", json={})
        assert reply.status_code == 501
        assert "trainers send adapters only" in reply.json()["error"]["message"]


async def test_a_pause_names_adapters_as_backends_know_them(start: Start) -> None:
    split = {"both": Split({"formal": 0.5, "pirate": 0.5}, {})}
    async with start(splits=split) as routing:
        refused = await routing.http.post("/pause?adapter=formal")
        assert (refused.status_code, refused.json()["error"]["param"]) == (501, "adapter")
        assert "it cannot pause single adapters" in refused.json()["error"]["message"]
    async with start(splits=split, count=1) as routing:
        (backend,) = routing.backends
        backend.owner = "lorikeet"
        await until(lambda: next(iter(routing.parts.backend_router.backends.values())).is_lorikeet, "its kind is known")
        await post(routing, "/pause?adapter=both&mode=keep")
        await post(routing, "/pause?adapter=base:formal&tenant=loop-1")
        assert called(backend) == [
            "/pause?adapter=formal&adapter=pirate&mode=keep",
            "/pause?adapter=formal&tenant=loop-1",
        ]
        assert (await routing.http.post("/pause?adapter=nobody")).status_code == 404


async def test_answers_of_backends_are_joined_and_refusals_name_their_backend(start: Start) -> None:
    async with start() as routing:
        first, second = routing.backends
        for backend, is_paused in ((first, True), (second, False)):
            backend.loop_answers["/is_paused"] = {"is_paused": is_paused}
            backend.loop_answers["/get_world_size"] = {"world_size": 2}
            backend.loop_answers["/server_info"] = {"vllm_config": {}}
        first.loop_answers["/is_sleeping"] = {"is_sleeping": True, "asleep": ["weights"]}
        http = routing.http
        assert (await http.get("/is_paused")).json() == {"is_paused": False}
        assert (await http.get("/get_world_size")).json() == {"world_size": 4}
        assert (await http.get("/server_info")).json() == {"vllm_config": {}}
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True, "asleep": ["weights"]}
        assert (await http.post("/reset_prefix_cache", json={"reset_running_requests": True})).status_code == 200
        assert second.loop_calls[-1] == ("/reset_prefix_cache", b'{"reset_running_requests":true}')
        assert (await http.post("/finish_session?session_id=a")).json() == {"status": "finished", "session_id": "a"}
        assert (await http.post("/finish_session")).status_code == 400
        second.loop_status = 503
        refused = await http.post("/pause")
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, "backend-1: not now")
        assert not routing.parts.held


async def test_a_request_is_aborted_at_its_backend_and_only_by_its_sender(start: Start) -> None:
    async with start(api_keys=("one", "two"), backend_key="its") as routing:
        for backend in routing.backends:
            backend.pauses_at = 1
        one = {"Authorization": "Bearer one", "X-Request-ID": "mine"}

        async def read() -> None:
            async with routing.http.stream("POST", "/v1/completions", json=body(stream=True), headers=one) as reply:
                await reply.aread()

        reading = asyncio.create_task(read())
        await until(lambda: sum(backend.paused for backend in routing.backends) == 1, "an answer stands still")
        ask = {"request_ids": ["cmpl-mine"]}
        two = {"Authorization": "Bearer two"}
        for headers, aborted in ((two, 0), (one, 1)):
            reply = await routing.http.post("/abort_requests", json=ask, headers=headers)
            assert reply.json() == {"status": "aborted", "aborted": aborted}
        other = await routing.http.post("/abort_requests", json={"request_ids": ["other"]}, headers=one)
        assert other.json()["aborted"] == 0
        calls = [call for backend in routing.backends for call in backend.loop_calls]
        assert calls == [("/abort_requests", b'{"request_ids":["mine"]}')]
        assert next(backend for backend in routing.backends if backend.loop_calls).paused == 1
        for backend in routing.backends:
            backend.go_on.set()
        await reading
        assert not routing.parts.running


async def test_pauses_need_the_admin_key_unless_backends_check_keys(start: Start) -> None:
    tenant = {"Authorization": "Bearer of-a-tenant"}
    async with start(admin_keys=("a",), backend_key="its") as routing:
        assert (await routing.http.post("/pause", headers=tenant)).status_code == 401
        assert (await routing.http.post("/sleep", headers=tenant)).status_code == 401
    async with start(admin_keys=("a",), backend_key="its", passes_keys=True) as routing:
        reply: httpx.Response = await routing.http.post("/pause", headers=tenant)
        assert reply.status_code == 200
        assert all(backend.keys[-1] == "Bearer of-a-tenant" for backend in routing.backends)
        assert (await routing.http.post("/sleep", headers=tenant)).status_code == 401
