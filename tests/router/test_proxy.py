"""Requests through a router to healthy backends."""

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import groupby
from typing import Any

import pytest
import structlog
from typer.testing import CliRunner

from lorikeet.cli.app import app
from lorikeet.core.ids import RequestId
from lorikeet.http import body_gate
from lorikeet.http.body_gate import SMALL_BODY_BYTES
from lorikeet.router.proxied_request import CHAT, COMPLETIONS, ProxiedRequest, RequestBody
from tests.router.calls import body
from tests.router.conftest import Routing, Start, adapters, events, requests_at, text_of, write_files
from tests.router.scripted import chat_text, words
from tests.support.waiting import until

JSON = "application/json"
MESSAGES = [{"role": "user", "content": "hello"}]


async def test_bodies_and_answers_are_passed_on_as_they_come(start: Start) -> None:
    async with start() as routing:
        asked = body(frobnicate={"x": [1, None]}, temperature=0)
        reply = await routing.http.post(COMPLETIONS, json=asked, headers={"X-Request-Id": "mine"})
        assert reply.status_code == 200
        assert reply.json()["choices"][0]["text"] == words("base", "once", 5)
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["x-request-id"] == "mine"
        (backend,) = [each for each in routing.backends if each.bodies]
        assert (backend.bodies, backend.request_ids) == ([asked], ["mine"])
        chat = {"model": "base", "messages": MESSAGES, "max_tokens": 3}
        answer = (await routing.http.post(CHAT, json=chat)).json()
        assert answer["choices"][0]["message"]["content"] == words("base", chat_text(MESSAGES), 3)


@pytest.mark.slow
async def test_keys_do_not_share_a_prefix_cache_at_the_backends(start: Start) -> None:
    async def salts(routing: Routing, key: str, **fields: Any) -> set[Any]:
        headers = {"Authorization": f"Bearer {key}"}
        before = len(routing.backends[0].bodies)
        await routing.http.post(COMPLETIONS, json=body(**fields), headers=headers)
        await routing.http.post(COMPLETIONS, json=body(stream=True, **fields), headers=headers)
        await routing.http.post(CHAT, json={"model": "base", "messages": MESSAGES, **fields}, headers=headers)
        return {asked.get("cache_salt") for asked in routing.backends[0].bodies[before:]}

    async with start(count=1, api_keys=("one", "two"), backend_key="its") as routing:
        seen = [
            *await salts(routing, "one"),
            *await salts(routing, "two"),
            *await salts(routing, "one", cache_salt="x"),
            *await salts(routing, "two", cache_salt="x"),
        ]
        assert len(set(seen)) == len(seen) == 4
        assert None not in seen
        assert [*await salts(routing, "one")] == seen[:1]
        headers = {"Authorization": "Bearer one"}
        wrong = await routing.http.post(COMPLETIONS, json=body(cache_salt=5), headers=headers)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "cache_salt")
    async with start(count=1, api_keys=("one", "two"), backend_key="its", shared_prefix_cache=True) as routing:
        assert await salts(routing, "one") | await salts(routing, "two") == {None}


async def test_large_bodies_are_counted_until_their_answers_end(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start(count=1) as routing:
        gate, (backend,) = routing.parts.body_gate, routing.backends
        backend.pauses_at = 2
        content = json.dumps(body(stream=True, user="x" * 2 * SMALL_BODY_BYTES)).encode()

        async def unannounced() -> AsyncIterator[bytes]:
            yield content

        running = [
            asyncio.create_task(routing.http.post(COMPLETIONS, content=each, headers={"Content-Type": JSON}))
            for each in (content, unannounced(), json.dumps(body(stream=True)).encode())
        ]
        await until(lambda: backend.paused == 3, "all have begun")
        assert gate.held_bytes == 2 * len(content)
        monkeypatch.setattr(gate, "_max_bytes", gate.held_bytes)
        monkeypatch.setattr(body_gate, "_WAIT_S", 0.0)
        refused = await routing.http.post(COMPLETIONS, content=content, headers={"Content-Type": JSON})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        backend.pauses_at = None
        backend.go_on.set()
        assert {reply.status_code for reply in await asyncio.gather(*running)} == {200}
        await until(lambda: not gate.held_bytes, "all have ended")
        assert (await routing.http.post(COMPLETIONS, content=b"[" * len(content))).status_code == 400
        assert not gate.held_bytes


async def test_stream_equals_the_backends(start: Start) -> None:
    async with start() as routing:
        chunks = await events(routing.http, COMPLETIONS, body())
        assert text_of(chunks) == words("base", "once", 5)
        assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
        options = {"include_usage": True}
        counted = await events(routing.http, COMPLETIONS, body(stream_options=options))
        assert [chunk["usage"]["completion_tokens"] for chunk in counted if "usage" in chunk] == [5]
        chat = await events(routing.http, CHAT, {"model": "base", "messages": MESSAGES, "max_tokens": 3})
        assert [chunk["choices"][0]["delta"].get("role") for chunk in chat] == ["assistant", None, None, None]
        several = await events(routing.http, COMPLETIONS, body(n=2))  # nothing is known of such answers
        assert text_of(several) == words("base", "once", 5)


async def test_an_adapter_is_loaded_by_its_first_request_where_that_goes_and_once(start: Start) -> None:
    async with start() as routing:
        first = await asyncio.gather(*(routing.http.post(COMPLETIONS, json=body("formal")) for _ in range(8)))
        assert {reply.json()["choices"][0]["text"] for reply in first} == {words("formal", "once", 5)}
        assert routing.calls == [["+formal"], ["+formal"]]
        assert [backend.adapters for backend in routing.backends] == [{"formal": "/elsewhere/formal"}] * 2
        await routing.http.post(COMPLETIONS, json=body("pirate"))
        assert sorted(map(len, routing.calls)) == [1, 2]
        cluster = await routing.cluster()
        assert sorted(each["resident"] for each in cluster["replicas"]) == [["formal"], ["formal", "pirate"]]
        assert cluster["copies"]["provisions"] == 3


async def test_status_shows_a_routers_backends(start: Start) -> None:
    async with start(preset="loraserve:random") as routing:
        await routing.http.post(COMPLETIONS, json=body("formal"))
        url = str(routing.http.base_url)
        asked = ["status", "--adapters", "--url", url]
        printed = (await asyncio.to_thread(CliRunner().invoke, app, asked, env={"COLUMNS": "160"})).output
    urls = [backend.url for backend in routing.backends]
    for part in ("backend-1", "open", "1 on device", "formal", "provisions 1", *urls):
        assert part in printed, printed


@pytest.mark.slow
async def test_adapter_with_one_home_is_loaded_only_there(start: Start) -> None:
    names = ("a", "b", "c", "d")
    async with start(preset="loraserve:random", adapters=adapters(*names)) as routing:
        for name in names * 3:
            assert (await routing.http.post(COMPLETIONS, json=body(name))).status_code == 200
        assert sorted(routing.all_calls) == ["+a", "+b", "+c", "+d"]
        assert list(map(len, routing.calls)) == [2, 2]
        cluster = await routing.cluster()
        shares = cluster["shares"]
        for replica in cluster["replicas"]:
            assert replica["resident"] == sorted(name for name in names if shares[name] == {replica["id"]: 1.0})


async def test_models_are_the_backends_bases_and_the_routers_adapters(start: Start) -> None:
    async with start() as routing:
        cards = (await routing.http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
            ("base", "base", None),
            ("formal", "formal", "base"),
            ("pirate", "pirate", "base"),
        ]
        assert (await routing.http.get("/v1/models/formal")).json() == cards[1]
        for path in (COMPLETIONS, CHAT):
            reply = await routing.http.post(path, json=body("klingon", messages=MESSAGES))
            assert (reply.status_code, reply.json()["error"]["param"]) == (404, "model")
        assert not any(backend.bodies for backend in routing.backends)


@pytest.mark.slow
async def test_adapters_come_and_go_while_it_runs(start: Start, tmp_path: Any) -> None:
    folder = str(write_files(tmp_path / "json"))
    asked = {"lora_name": "json", "lora_path": folder}
    async with start() as routing:
        assert (await routing.http.post("/v1/load_lora_adapter", json=asked)).status_code == 200
        assert routing.calls == [[], []]
        assert (await routing.http.post("/v1/load_lora_adapter", json=asked)).status_code == 400
        assert (await routing.http.post(COMPLETIONS, json=body("json"))).status_code == 200
        assert routing.all_calls == ["+json"]
        unknown = {"lora_name": "pascal", "lora_path": "/elsewhere/pascal"}
        assert "rank" in (await routing.http.post("/v1/load_lora_adapter", json=unknown)).text
        assert (await routing.http.post("/v1/load_lora_adapter", json={**unknown, "rank": 4})).status_code == 200
        gone = await routing.http.post("/v1/unload_lora_adapter", json={"lora_name": "json"})
        assert gone.status_code == 200
        assert (await routing.http.post(COMPLETIONS, json=body("json"))).status_code == 404
        await until(lambda: "-json" in routing.all_calls, "the adapter is unloaded from a backend")
        assert (await routing.http.post("/v1/unload_lora_adapter", json={"lora_name": "json"})).status_code == 404
        unnamed = await routing.http.post("/v1/unload_lora_adapter", json={})
        assert unnamed.status_code == 400
        assert unnamed.json()["error"]["type"] == "InvalidUserInput"


@pytest.mark.slow
async def test_removed_adapters_are_forgotten(start: Start) -> None:
    async with start(count=1) as routing:
        backend_router = routing.parts.backend_router
        (backend,) = backend_router.backends.values()
        for name in ("a", "b", "c", "d"):
            asked = {"lora_name": name, "lora_path": f"/elsewhere/{name}", "rank": 4}
            assert (await routing.http.post("/v1/load_lora_adapter", json=asked)).status_code == 200
            assert (await routing.http.post(COMPLETIONS, json=body(name))).status_code == 200
            assert (await routing.http.post("/v1/unload_lora_adapter", json=asked)).status_code == 200
            await until(lambda: not backend.adapters, "the backend has no adapter")
        assert {adapter.name for adapter in backend_router.versions.values()} - {"d"} == {"formal", "pirate"}
        assert not backend._locks
        assert (await routing.cluster())["replicas"][0]["resident"] == []


async def test_a_request_between_two_backends_keeps_an_adapter_that_is_gone(start: Start) -> None:
    async with start(count=1) as routing:
        backend_router = routing.parts.backend_router
        asked = {"lora_name": "late", "lora_path": "/elsewhere/late", "rank": 4}
        await routing.http.post("/v1/load_lora_adapter", json=asked)
        adapter = routing.parts.catalog.adapters["late"]
        await routing.http.post("/v1/unload_lora_adapter", json=asked)
        assert adapter.digest not in backend_router.versions
        request = ProxiedRequest(
            RequestId("request"), RequestBody(COMPLETIONS, b'{"model": "late"}'), adapter, prompt_tokens=1
        )
        assert (await backend_router.place(request)).holds(adapter)
        backend_router.release(request)
        await until(lambda: routing.all_calls == ["+late", "-late"], "the adapter is loaded and unloaded")


@pytest.mark.parametrize("is_lost_first", [False, True])
async def test_a_response_is_closed_when_its_backend_is_lost_before_or_while_it_is_read(is_lost_first: bool) -> None:
    request, closed = ProxiedRequest(RequestId("request"), RequestBody(COMPLETIONS, b"{}"), None, prompt_tokens=1), []
    request.begin()
    steps = [request.mark_lost, lambda: request.close_if_lost(lambda: closed.append(1))]
    for step in steps if is_lost_first else reversed(steps):
        step()
    assert closed == [1]


async def test_an_adapter_in_use_is_unloaded_when_its_last_request_has_ended(start: Start) -> None:
    async with start(count=1) as routing:
        (backend,) = routing.backends
        assert (await routing.http.post(COMPLETIONS, json=body("formal"))).status_code == 200
        backend.open.clear()
        running = asyncio.create_task(events(routing.http, COMPLETIONS, body("formal")))
        await until(lambda: backend.streaming, "the backend streams")
        await routing.http.post("/v1/unload_lora_adapter", json={"lora_name": "formal"})
        assert backend.calls == ["+formal"]
        backend.open.set()
        assert text_of(await running) == words("formal", "once", 5)
        await until(lambda: backend.calls == ["+formal", "-formal"], "the adapter is loaded and unloaded")


async def test_an_adapter_that_the_backend_has_lost_does_not_count_as_unloaded(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorikeet.router.health.MODELS_EVERY", 10**9)  # no list tells the router before
    async with start(count=1) as routing:
        ((backend,), (known,)) = routing.backends, routing.parts.backend_router.backends.values()
        assert (await routing.http.post(COMPLETIONS, json=body("formal"))).status_code == 200
        backend.adapters.clear()
        with structlog.testing.capture_logs() as logged:
            await routing.http.post("/v1/unload_lora_adapter", json={"lora_name": "formal"})
            await until(lambda: backend.calls[-1:] == ["-formal"] and not known.adapters, "the backend was asked")
        assert (known.unloads, known.refusals) == (0, 0)
        assert "adapter unloaded" not in [each["event"] for each in logged]


@pytest.mark.slow
async def test_new_content_under_a_name_takes_the_place_of_the_old(start: Start, tmp_path: Any) -> None:
    asked = {"lora_name": "json", "lora_path": str(write_files(tmp_path / "json"))}
    async with start(count=1) as routing:
        await routing.http.post("/v1/load_lora_adapter", json=asked)
        await routing.http.post(COMPLETIONS, json=body("json"))
        write_files(tmp_path / "json", content=b"better weights")
        again = await routing.http.post("/v1/load_lora_adapter", json={**asked, "load_inplace": True})
        assert again.status_code == 200
        assert (await routing.http.post(COMPLETIONS, json=body("json"))).status_code == 200
        assert routing.calls == [["+json", "-json", "+json"]]


@pytest.mark.slow
async def test_adapter_unreadable_here_is_reloaded_whenever_replaced(start: Start) -> None:
    asked = {"lora_name": "far", "lora_path": "hf://org/far", "rank": 8}
    async with start(count=1) as routing:
        await routing.http.post("/v1/load_lora_adapter", json=asked)
        for _ in range(2):
            assert (await routing.http.post(COMPLETIONS, json=body("far"))).status_code == 200
            again = await routing.http.post("/v1/load_lora_adapter", json={**asked, "load_inplace": True})
            assert again.status_code == 200
        assert (await routing.http.post(COMPLETIONS, json=body("far"))).status_code == 200
        (calls,) = routing.calls
        # A list of models that was on its way meanwhile may still have it; then it is unloaded again.
        assert [call for call, _ in groupby(calls)] == ["+far", "-far", "+far", "-far", "+far"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lists", "is_replaced", "calls"),
    [
        (True, True, ["+json", "-json", "+json"]),
        (True, False, ["+json"]),
        (False, True, ["+json", "+json", "-json", "+json"]),
        (False, False, ["+json", "+json"]),
    ],
)
async def test_adapters_kept_by_a_returning_backend_count_unless_replaced(
    start: Start, tmp_path: Any, lists: bool, is_replaced: bool, calls: list[str]
) -> None:
    asked = {"lora_name": "json", "lora_path": str(write_files(tmp_path / "json"))}
    async with start(count=1) as routing:
        (backend,) = routing.backends
        await routing.http.post("/v1/load_lora_adapter", json=asked)
        await routing.http.post(COMPLETIONS, json=body("json"))
        backend.health = 500
        await routing.up(0)
        if is_replaced:
            write_files(tmp_path / "json", content=b"better weights")
        await routing.http.post("/v1/load_lora_adapter", json={**asked, "load_inplace": True})
        backend.health, backend.lists = 200, lists
        await routing.up(1)
        assert (await routing.http.post(COMPLETIONS, json=body("json"))).status_code == 200
        assert backend.calls == calls


@pytest.mark.slow
async def test_foreign_adapter_at_a_backend_is_replaced_and_its_own_is_kept(start: Start) -> None:
    async with start(count=1) as routing:
        (backend,) = routing.backends
        await backend.kill()
        await routing.up(0)
        backend.adapters = {"formal": "/other/formal", "pirate": "/elsewhere/pirate"}
        await backend.start()
        await routing.up(1)
        for name in ("formal", "pirate"):
            assert (await routing.http.post(COMPLETIONS, json=body(name))).status_code == 200
        assert backend.calls == ["-formal", "+formal"]
        assert backend.adapters == {"formal": "/elsewhere/formal", "pirate": "/elsewhere/pirate"}


async def test_a_backends_refusals_are_passed_on(start: Start) -> None:
    async with start() as routing:
        for backend in routing.backends:
            backend.fails_with = 422
        for stream in (False, True):
            reply = await routing.http.post(COMPLETIONS, json=body(stream=stream))
            assert (reply.status_code, reply.json()["error"]["message"]) == (422, "it is as it is")
        assert sum(len(backend.bodies) for backend in routing.backends) == 2
        for backend in routing.backends:
            backend.fails_with = 429
        assert (await routing.http.post(COMPLETIONS, json=body())).status_code == 429


async def test_a_full_backend_is_left_alone_until_its_retry_after(start: Start) -> None:
    async with start(preset="auto") as routing:
        first = routing.parts.backend_router.dispatcher.fleet.info(0).name  # The first that came up.
        full, idle = sorted(routing.backends, key=lambda each: each.url != first)
        full.busy, full.busy_headers = 9, {"Retry-After": "10"}
        for _ in range(6):
            assert (await routing.http.post(COMPLETIONS, json=body())).status_code == 200
        assert (len(full.bodies), len(idle.bodies)) == (1, 6)


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_backend_passes_requests_to_one_with_room(start: Start, status: int, stream: bool) -> None:
    async with start(count=3) as routing:
        full, other, idle = routing.backends
        full.fails_with, other.fails_with = status, 429
        asking = [routing.http.post(COMPLETIONS, json=body("pirate", stream=stream)) for _ in range(12)]
        replies = await asyncio.gather(*asking)
        assert {reply.status_code for reply in replies} == {200}
        assert all(words("pirate", "once", 1) in reply.text for reply in replies)
        assert len(idle.bodies) == 12
        moved = len(full.bodies) + len(other.bodies)
        assert moved
        await routing.metric(f"lorikeet:route_moved_total {moved}.0")
        await routing.metric('lorikeet:route_requests_total{outcome="complete"} 12.0')


async def test_a_request_that_no_backend_has_room_for_gets_the_last_answer(start: Start) -> None:
    async with start(count=3) as routing:
        for backend in routing.backends:
            backend.busy = 1
        reply = await routing.http.post(COMPLETIONS, json=body())
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "0")
        assert [len(backend.bodies) for backend in routing.backends] == [1, 1, 1]
        assert (await routing.http.post(COMPLETIONS, json=body())).status_code == 200


async def test_a_limit_of_the_clients_key_is_not_evaded(start: Start) -> None:
    async with start() as routing:
        for backend in routing.backends:
            backend.busy, backend.busy_headers = 1, {"x-ratelimit-remaining-requests": "0"}
        assert (await routing.http.post(COMPLETIONS, json=body())).status_code == 429
        assert sum(len(backend.bodies) for backend in routing.backends) == 1


async def test_an_adapter_that_no_backend_can_load_is_a_400_with_the_reason(start: Start) -> None:
    async with start() as routing:
        for backend in routing.backends:
            backend.bad_paths.add("/elsewhere/formal")
        for stream in (False, True):
            reply = await routing.http.post(COMPLETIONS, json=body("formal", stream=stream))
            assert reply.status_code == 400
            assert "no tensors in formal" in reply.json()["error"]["message"]
        assert (await routing.http.post(COMPLETIONS, json=body("pirate"))).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("asked_first", [True, False])
async def test_an_adapter_that_one_backend_cannot_load_is_served_by_the_others(start: Start, asked_first: bool) -> None:
    async with start() as routing:
        first = routing.parts.backend_router.dispatcher.fleet.info(0).replica
        good, bad = routing.backends if (first == "backend-1") == asked_first else reversed(routing.backends)
        bad.bad_paths.add("/elsewhere/formal")
        replies = await asyncio.gather(*(routing.http.post(COMPLETIONS, json=body("formal")) for _ in range(8)))
        replies += [await routing.http.post(COMPLETIONS, json=body("formal")) for _ in range(4)]
        assert {reply.status_code for reply in replies} == {200}
        assert (len(good.bodies), len(bad.bodies)) == (12, 0)
        assert bad.calls == ["+formal"]
        await bad.kill()
        bad.bad_paths.clear()
        await routing.up(1)
        await bad.start()
        await routing.up(2)
        for _ in range(2):
            assert (await routing.http.post(COMPLETIONS, json=body("formal"))).status_code == 200
        assert len(bad.bodies) == 1


@pytest.mark.slow
async def test_a_backend_that_has_lost_an_adapter_and_cannot_load_it_again_is_avoided(start: Start) -> None:
    async with start(health_s=60.0) as routing:
        for _ in range(2):
            await routing.http.post(COMPLETIONS, json=body("formal"))
        bad, good = routing.backends
        bad.adapters.clear()
        bad.bad_paths.add("/elsewhere/formal")
        for _ in range(4):
            assert (await routing.http.post(COMPLETIONS, json=body("formal"))).status_code == 200
        assert len(good.bodies) == 5
        assert bad.calls == ["+formal", "+formal"]


async def test_invalid_json_and_unknown_routes_are_refused(start: Start) -> None:
    async with start() as routing:
        assert (await routing.http.post(COMPLETIONS, content=b"{")).status_code == 400
        for method, path in (("POST", "/v1/fine_tuning/jobs"), ("GET", "/"), ("POST", "/v1/models")):
            reply = await routing.http.request(method, path)
            assert reply.status_code == 404
            assert "is not forwarded" in reply.json()["error"]["message"]
            own = ("/v1/load_lora_adapter", "/health", "/metrics", "docs/router.md")
            assert all(name in reply.json()["error"]["message"] for name in own)
            assert "/v2/rerank" not in reply.json()["error"]["message"], "no list of all routes"


@pytest.mark.slow
async def test_router_checks_keys_and_sends_the_backends_own(start: Start) -> None:
    key = {"Authorization": "Bearer k"}
    async with start(api_keys=("k",), admin_keys=("a",), backend_key="b") as routing:
        assert (await routing.http.post(COMPLETIONS, json=body())).status_code == 401
        assert (await routing.http.post(COMPLETIONS, json=body(), headers=key)).status_code == 200
        refused = await routing.http.post("/v1/unload_lora_adapter", json={"lora_name": "formal"}, headers=key)
        assert refused.status_code == 403
        assert {key for backend in routing.backends for key in backend.keys} == {"Bearer b"}
    async with start(count=1) as routing:
        await routing.http.post(COMPLETIONS, json=body(), headers=key)
        assert routing.backends[0].keys == ["Bearer k"]


@pytest.mark.slow
async def test_router_alone_decides_allowed_origins(start: Start) -> None:
    page = {"Origin": "https://good", "Sec-Fetch-Site": "cross-site"}
    async with start(allowed_origins=("https://good",)) as routing:
        asked = await routing.http.options(COMPLETIONS, headers={**page, "Access-Control-Request-Method": "POST"})
        reply = await routing.http.post(COMPLETIONS, json=body(), headers=page)
        for each in (asked, reply):
            assert each.status_code == 200
            assert each.headers.get_list("access-control-allow-origin") == ["https://good"]
        assert [page for backend in routing.backends for page in backend.pages] == [[]], "the router has asked"
    async with start(count=1) as routing:
        reply = await routing.http.post(COMPLETIONS, json=body(), headers=page)
        assert (reply.status_code, "access-control-allow-origin" in reply.headers) == (403, False)
        (backend,) = routing.backends
        backend.allows = "*"  # whoever asks
        reply = await routing.http.post(COMPLETIONS, json=body())
        assert (reply.status_code, "access-control-allow-origin" in reply.headers) == (200, False)
        reply = await routing.http.post("/v1/unload_lora_adapter", content='{"lora_name": "formal"}', headers=page)
        assert reply.status_code == 403
        assert "formal" in routing.parts.catalog.adapters


async def test_a_client_that_hangs_up_ends_its_request_at_the_backend(start: Start) -> None:
    async with start(count=1) as routing:
        (backend,) = routing.backends
        backend.open.clear()
        for stream in (True, False):
            asking = asyncio.create_task(routing.http.post(COMPLETIONS, json=body(stream=stream)))
            await until(lambda stream=stream: len(backend.bodies) >= 1 + (not stream), "the backend has the request")
            asking.cancel()
            await routing.idle()
        await until(lambda: not backend.streaming, "the backend streams no more")
        assert backend.hung_up == 1
        await routing.metric('lorikeet:route_requests_total{outcome="left"} 2.0')


@pytest.mark.slow
async def test_backend_token_counts_are_shown_and_used(start: Start) -> None:
    async with start(preset="lorikeet:least-loaded") as routing:
        for backend in routing.backends:
            backend.waiting = 3  # of somebody else
            backend.open.clear()
        running = asyncio.create_task(events(routing.http, COMPLETIONS, body()))
        await routing.until_cluster(
            lambda cluster: sorted(map(requests_at, cluster["replicas"])) == [3, 4],
            "the backends have 3 and 4 requests",
        )
        busy, idle = sorted(routing.backends, key=lambda backend: -backend.streaming)
        idle.open.set()
        for _ in range(3):
            await routing.http.post(COMPLETIONS, json=body())
        assert (len(idle.bodies), len(busy.bodies)) == (3, 1)
        busy.open.set()
        assert text_of(await running) == words("base", "once", 5)
        await routing.metric(f'lorikeet:route_backend_up{{backend="{busy.url}"}} 1.0')
        await routing.metric('lorikeet:route_requests_total{outcome="complete"} 4.0')


async def test_default_preset_keeps_a_conversation_at_one_backend(start: Start) -> None:
    async with start(preset="auto") as routing:
        turns = [{"role": "user", "content": "tell me of the lorikeet, the parrot with the brush on its tongue. " * 3}]
        for _ in range(4):
            answer = (await routing.http.post(CHAT, json={"model": "base", "messages": turns, "max_tokens": 3})).json()
            turns += [answer["choices"][0]["message"], {"role": "user", "content": "and then?"}]
        assert sorted(len(backend.bodies) for backend in routing.backends) == [0, 4]
