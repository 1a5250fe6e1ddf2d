"""Backends that fail repeatedly: requests leave them, give up in the end, and do not take others down."""

import asyncio
import threading
from errno import EMFILE
from typing import Any

import pytest
import structlog

from lorikeet.router.adapters import RoutedAdapter, describe_adapter
from lorikeet.router.backends import Backend, BackendHealth
from lorikeet.router.proxied_request import COMPLETIONS, MAX_LOSSES
from tests.router.conftest import Start, adapters, events, text_of
from tests.router.scripted import words
from tests.support.waiting import until


def body(model: str = "base", **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "once", "max_tokens": 12, **fields}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["base", "formal"])
@pytest.mark.parametrize("stream", [True, False])
async def test_failed_request_is_retried_at_another_backend_than_preferred(
    start: Start, model: str, stream: bool
) -> None:
    async with start(preset="auto") as router:
        assert (await router.http.post(COMPLETIONS, json=body(model))).status_code == 200
        preferred, other = sorted(router.backends, key=lambda backend: -len(backend.bodies))
        preferred.fails_with = 500
        reply = await router.http.post(COMPLETIONS, json=body(model, stream=stream))
        assert reply.status_code == 200
        assert (len(preferred.bodies), len(other.bodies)) == (2, 1)


async def test_broken_stream_resumes_at_another_backend_than_preferred(start: Start) -> None:
    async with start(preset="auto") as router:
        await router.http.post(COMPLETIONS, json=body())
        preferred, other = sorted(router.backends, key=lambda backend: -len(backend.bodies))
        preferred.dies_after = 3
        assert text_of(await events(router.http, COMPLETIONS, body())) == words("base", "once", 12)
        assert [each["max_tokens"] for each in other.bodies] == [9]


async def test_request_is_retried_after_all_backends_failed_it(start: Start) -> None:
    async with start(preset="auto") as router:
        for backend in router.backends:
            backend.stream_error = {"object": "error"}
        assert text_of(await events(router.http, COMPLETIONS, body())) == words("base", "once", 12)
        assert sorted(len(backend.bodies) for backend in router.backends) == [1, 2]


async def test_a_stream_that_takes_every_backend_down_is_given_up(start: Start) -> None:
    async with start(count=MAX_LOSSES + 1) as router:
        for backend in router.backends:
            backend.dies_after = 1
        chunks = await events(router.http, COMPLETIONS, body())
        assert f"lost {MAX_LOSSES} times" in chunks[-1]["error"]["message"]
        assert len(chunks) == MAX_LOSSES + 1, "each had said a word"
        assert sum(len(backend.bodies) for backend in router.backends) == MAX_LOSSES
        await router.metric('lorikeet:route_requests_total{outcome="failed"} 1.0')


async def test_an_answer_that_takes_every_backend_down_is_given_up(start: Start) -> None:
    async with start(count=MAX_LOSSES + 1) as router:
        for backend in router.backends:
            backend.open.clear()
        asking = asyncio.create_task(router.http.post(COMPLETIONS, json=body()))
        for _ in range(MAX_LOSSES):
            asked = await until(
                lambda: [backend for backend in router.backends if backend.bodies and backend.health == 200],
                "a healthy backend has the request",
            )
            asked[0].health = 500  # its health is all that tells of its end
        reply = await asking
        assert (reply.status_code, "lost" in reply.json()["error"]["message"]) == (502, True)
        assert sum(len(backend.bodies) for backend in router.backends) == MAX_LOSSES


async def test_an_adapter_that_takes_down_every_backend_that_loads_it_is_given_up(start: Start) -> None:
    async with start(count=MAX_LOSSES + 1) as router:
        for backend in router.backends:
            backend.open.clear()
        asking = asyncio.create_task(router.http.post(COMPLETIONS, json=body("formal")))
        for lost in range(MAX_LOSSES):
            await until(lambda lost=lost: sum(map(len, router.calls)) != lost, "an adapter is loaded")
            (loading,) = [backend for backend in router.backends if backend.calls and backend.health == 200]
            loading.health = 500
            await loading.kill()
        reply = await asking
        assert (reply.status_code, "lost" in reply.json()["error"]["message"]) == (502, True)
        assert router.all_calls == ["+formal"] * MAX_LOSSES
        assert not router.parts.backend_router._requests


async def cannot_connect(*args: Any, **kwargs: Any) -> None:
    raise OSError(EMFILE, "Too many open files")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["base", "formal"])
async def test_gateway_unable_to_connect_takes_no_requests_from_healthy_backends(
    start: Start, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setattr("lorikeet.router.connections._KEEP_ALIVE_S", -1.0)  # so that no connection is kept
    async with start(count=1) as router:
        (backend,) = router.backends
        backend.pauses_at = 3
        running = asyncio.create_task(events(router.http, COMPLETIONS, body(n=2)))  # which cannot go on elsewhere
        await until(lambda: backend.paused, "an answer has paused")
        with monkeypatch.context() as patched, structlog.testing.capture_logs() as logged:
            patched.setattr("lorikeet.router.connections.aiohappyeyeballs.start_connection", cannot_connect)
            reply = await router.http.post(COMPLETIONS, json=body(model))
            assert reply.status_code == 502, reply.text
            assert "Too many open files" in reply.text
            await until(
                lambda: any(entry["event"] == "backend cannot be checked" for entry in logged), "the failure is logged"
            )
            assert sum(each["is_open"] for each in (await router.cluster())["replicas"]) == 1
        backend.go_on.set()
        assert text_of(await running) == words("base", "once", 12)


async def test_backend_is_checked_whatever_its_health_reports(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    check, failures = Backend.check, [RuntimeError("nobody foresaw this")]

    async def check_or_fail(backend: Backend) -> BackendHealth:
        if failures:
            raise failures.pop()
        return await check(backend)

    async with start(count=1) as router:
        (backend,) = router.backends
        (known,) = router.parts.backend_router.backends.values()
        for told in ("NaN", "+Inf", "many"):
            backend.waiting = told
            assert await known.check() == BackendHealth(True, None)
        with structlog.testing.capture_logs() as logged:
            monkeypatch.setattr(Backend, "check", check_or_fail)
            await until(lambda: not failures, "the failures are used up")
            backend.health = 503
            await router.up(0)
        assert [entry["event"] for entry in logged if entry["log_level"] == "error"]


async def test_error_of_a_long_wait_names_the_reason(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorikeet.router.backend_router.WAIT_S", 0.05)
    async with start(count=1) as router:
        (backend,) = router.backends
        backend.open.clear()
        reply = await router.http.post(COMPLETIONS, json=body("formal"))
        said = "This request has waited for a backend to load its adapter for 0.05 s."
        assert (reply.status_code, reply.json()["error"]["message"]) == (503, said)
        monkeypatch.setattr(router.parts.backend_router.dispatcher.routing, "route", lambda *args: None)
        reply = await router.http.post(COMPLETIONS, json=body())
        said = "No backend has had room for this request for 0.05 s."
        assert (reply.status_code, reply.json()["error"]["message"]) == (503, said)


async def test_one_of_two_concurrent_loads_of_a_name_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(2, timeout=30)

    def describe_together(name: str, source: str, rank: int | None) -> RoutedAdapter:
        together.wait()
        return describe_adapter(name, source, rank)

    monkeypatch.setattr("lorikeet.router.adapter_routes.describe_adapter", describe_together)
    async with start() as router:
        asked = [{"lora_name": "json", "lora_path": f"/elsewhere/{name}", "rank": 4} for name in ("a", "b")]
        replies = await asyncio.gather(*(router.http.post("/v1/load_lora_adapter", json=each) for each in asked))
        assert sorted(reply.status_code for reply in replies) == [200, 400]


async def test_an_answer_that_went_on_elsewhere_counts_each_of_its_tokens_once(start: Start) -> None:
    async with start(adapters=adapters("formal")) as router:
        for backend in router.backends:
            backend.dies_after = 5
        assert text_of(await events(router.http, COMPLETIONS, body("formal"))) == words("formal", "once", 12)
        await router.idle()
        assert router.parts.backend_router.dispatcher.fleet.averages.output_tokens == 12
