"""Backends with a good health check that answer no request: they are excluded, and others get their requests."""

import asyncio
import time
from typing import Any

import pytest
import structlog

from lorikeet.core.ids import ReplicaId
from lorikeet.router.apis import APIS, BackendSpec
from lorikeet.router.backends import Backend
from lorikeet.router.connections import AnswerWatch
from lorikeet.router.proxied_request import COMPLETIONS
from tests.router.conftest import Routing, Start, events, text_of
from tests.router.scripted import ScriptedBackend, words
from tests.support.waiting import until

TIMEOUT_S = 0.3


def body(model: str = "base", **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "once", "max_tokens": 12, **fields}


def hang(backend: ScriptedBackend, where: str) -> None:
    if where == "before the head":
        backend.holds_heads = True
    else:
        backend.pauses_at = 3


async def taken_out(router: Routing, backend: ScriptedBackend, logged: Any) -> None:
    """Check that one backend was taken out, and that log, metrics and ``/v1/cluster`` name it."""
    await router.metric(f'lorikeet:backend_failures_total{{backend="{backend.url}",reason="hangs"}} 1.0')
    lines = [entry for entry in logged if entry["event"] == "backend failed"]
    assert [(entry["backend"], entry["reason"]) for entry in lines] == [(backend.url, "hangs")]
    states = {each["address"]: each["is_open"] for each in (await router.cluster())["replicas"]}
    assert not states[backend.url]
    assert sum(states.values()) == len(states) - 1


@pytest.mark.slow
@pytest.mark.parametrize("where", ["before the head", "mid-stream"])
async def test_a_backend_that_hangs_loses_its_streams_to_another_and_gets_no_new_ones(start: Start, where: str) -> None:
    with structlog.testing.capture_logs() as logged:
        async with start(backend_timeout_s=TIMEOUT_S) as router:
            hanging, other = router.backends
            hang(hanging, where)
            streams = [asyncio.create_task(events(router.http, COMPLETIONS, body())) for _ in range(6)]
            assert {text_of(each) for each in await asyncio.gather(*streams)} == {words("base", "once", 12)}
            assert len(hanging.bodies) == 3, "each was tried there once"
            for _ in range(4):
                assert text_of(await events(router.http, COMPLETIONS, body())) == words("base", "once", 12)
            assert (len(hanging.bodies), len(other.bodies)) == (3, 10)
            await taken_out(router, hanging, logged)


def test_a_backend_is_occupied_while_its_answers_come(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    backend = Backend(ReplicaId("backend-0"), BackendSpec("http://127.0.0.1:9", "llamacpp"))
    backend.is_up = True
    assert not backend.is_occupied(60.0), "nothing has come yet"
    backend.watch.begin(is_stream=True)
    assert not backend.is_occupied(60.0)
    backend.watch.end(is_stream=True, has_come=True)
    assert backend.is_occupied(60.0), "also between two pieces"
    now_s += 59.0
    assert backend.is_occupied(60.0), "llama.cpp answers about its health once a connection is free"
    backend.api = APIS["vllm"]("")
    assert not backend.is_occupied(60.0), "others do so at once"


async def test_a_backend_that_somebody_has_paused_is_not_taken_out(start: Start) -> None:
    async with start(backend_timeout_s=0.05, count=1) as router:
        (backend,) = router.backends
        backend.loop_answers["/is_paused"] = {"is_paused": False, "adapters": ["formal"]}
        hang(backend, "before the head")
        asking = asyncio.create_task(events(router.http, COMPLETIONS, body()))
        await until(lambda: len(backend.loop_calls) > 2, "the router has found it silent several times")
        assert not router.parts.backend_router.backends["backend-0"].failures  # type: ignore[index]
        backend.go_on.set()
        assert text_of(await asking) == words("base", "once", 12)
        assert len(backend.bodies) == 1


async def test_a_router_is_ready_while_a_backend_is_open_and_awake(start: Start) -> None:
    async with start() as router:

        async def statuses() -> list[tuple[int, str]]:
            replies = [await router.http.get(path) for path in ("/health", "/health/ready")]
            return [(reply.status_code, reply.json()["status"]) for reply in replies]

        async def becomes(*expected: tuple[int, str]) -> None:
            async def is_so() -> bool:
                return await statuses() == [*expected]

            await until(is_so, f"its health is {expected}")

        first, second = router.backends
        await becomes((200, "ready"), (200, "ready"))
        first.sleeps = True
        known = router.parts.backend_router.backends
        await until(lambda: any(each.is_asleep for each in known.values()), "the router has seen the sleep")
        assert await statuses() == [(200, "ready"), (200, "ready")]
        second.sleeps = True
        await becomes((200, "asleep"), (503, "asleep"))
        first.sleeps = second.sleeps = False
        await becomes((200, "ready"), (200, "ready"))
        assert (await router.http.post("/sleep")).status_code == 200
        assert await statuses() == [(200, "asleep"), (503, "asleep")], "other servers do not tell by their health"
        assert (await router.http.post("/wake_up")).status_code == 200
        first.health = second.health = 503
        await becomes((503, "no backend"), (503, "no backend"))
        assert (await router.http.get("/health/live")).status_code == 200


@pytest.mark.slow
async def test_backend_that_hung_gets_requests_again_after_its_rest(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorikeet.router.backends.REST_S", 0.5)
    async with start(backend_timeout_s=TIMEOUT_S, count=1) as router:
        (backend,) = router.backends
        hang(backend, "before the head")
        asking = asyncio.create_task(events(router.http, COMPLETIONS, body()))
        await router.up(0)
        backend.holds_heads = False
        assert text_of(await asking) == words("base", "once", 12)
        assert len(backend.bodies) == 2


@pytest.mark.slow
async def test_a_busy_backend_is_left_alone_however_long_an_answer_takes(start: Start) -> None:
    async with start(backend_timeout_s=TIMEOUT_S, count=1) as router:
        (backend,) = router.backends
        backend.computed = 0
        hang(backend, "before the head")
        asking = asyncio.create_task(router.http.post(COMPLETIONS, json=body()))
        await until(lambda: backend.bodies, "the request is there")
        for _ in range(10):  # of others
            await asyncio.sleep(TIMEOUT_S / 4)
            backend.computed += 1
        assert not asking.done()
        backend.go_on.set()
        assert (await asking).status_code == 200
        assert not router.parts.backend_router.backends["backend-0"].failures  # type: ignore[index]


@pytest.mark.slow
async def test_a_load_that_hangs_is_tried_at_another_backend(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorikeet.router.backends.LOAD_S", TIMEOUT_S)
    async with start() as router:
        hanging, other = router.backends
        hanging.open.clear()
        for _ in range(3):
            reply = await router.http.post(COMPLETIONS, json=body("formal"))
            assert reply.status_code == 200, reply.text
        assert (hanging.calls, other.calls) == (["+formal"], ["+formal"])
        await router.metric(f'lorikeet:backend_failures_total{{backend="{hanging.url}",reason="load"}} 1.0')


@pytest.mark.parametrize("stream", [True, False])
async def test_a_redirect_is_passed_on_without_the_backends_address(start: Start, stream: bool) -> None:
    async with start(count=1) as router:
        (backend,) = router.backends
        for told, passed in ((f"{backend.url}/v1/x", "/v1/x"), ("https://example.org/y", "https://example.org/y")):
            backend.redirects_to = told
            reply = await router.http.post(COMPLETIONS, json=body(stream=stream))
            assert (reply.status_code, reply.headers["location"]) == (307, passed)


@pytest.mark.slow
async def test_errors_for_clients_name_no_address(start: Start) -> None:
    async with start(count=1) as router:
        (backend,) = router.backends
        for status in (500, 503):
            backend.fails_with = status
            reply = await router.http.post(COMPLETIONS, json=body(stream=True))
            assert reply.status_code == status
        backend.fails_with = None
        backend.bad_paths.add("/elsewhere/formal")
        reply = await router.http.post(COMPLETIONS, json=body("formal"))
        assert reply.json()["error"]["message"] == "backend-0 cannot load adapter 'formal': no tensors in formal"
        await router.metric(f'lorikeet:backend_failures_total{{backend="{backend.url}",reason="status"}} 6.0')


def test_silence_counts_only_time_with_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("lorikeet.router.connections.time.monotonic", lambda: now[0])
    watch = AnswerWatch()
    now[0] = 100.0
    assert watch.silent_s == 0, "nothing was asked"
    watch.begin(is_stream=True)
    now[0] = 110.0
    watch.begin(is_stream=False)
    now[0] = 120.0
    assert (watch.silent_s, watch.streams) == (20, 1)
    watch.end(is_stream=True, has_come=False)
    watch.end(is_stream=False, has_come=False)
    now[0] = 200.0
    assert (watch.silent_s, watch.streams) == (20, 0), "clients that lose patience do not hide a backend that hangs"
    watch.begin(is_stream=False)
    now[0] = 205.0
    assert watch.silent_s == 25
    watch.end(is_stream=False, has_come=True)
    assert watch.silent_s == 0
