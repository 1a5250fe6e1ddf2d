"""Backends that break, lose adapters, drain and return: every request is answered, and no text is repeated."""

import asyncio
from typing import Any

import pytest
import structlog

from lorikeet.config import ConfigError
from lorikeet.router.proxied_request import CHAT, COMPLETIONS
from lorikeet.router.proxy import MAX_FAILURES
from lorikeet.router.run import RouterOptions, open_router
from tests.router.conftest import Start, adapters, events, routing, text_of
from tests.router.scripted import ScriptedBackend, chat_text, words
from tests.support.waiting import until

MESSAGES = [{"role": "user", "content": "hello"}]
COUNTED = {"stream_options": {"include_usage": True}}


def body(model: str = "base", **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "once", "max_tokens": 12, **fields}


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["once", list(b"once")])
@pytest.mark.parametrize("dies_after", [0, 1, 5])
async def test_a_cut_completion_goes_on_where_it_broke_off(start: Start, prompt: Any, dies_after: int) -> None:
    async with start() as router:
        for backend in router.backends:
            backend.dies_after = dies_after
        chunks = await events(router.http, COMPLETIONS, body("formal", prompt=prompt, **COUNTED))
        assert text_of(chunks) == words("formal", "once", 12)
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert chunks[-1]["usage"] == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}
        assert sum("usage" in chunk for chunk in chunks) == 1
        asked = [each["max_tokens"] for backend in router.backends for each in backend.bodies]
        assert sorted(asked) == sorted([12, 12 - dies_after, 12 - 2 * dies_after])


async def test_a_cut_conversation_goes_on_in_the_same_message(start: Start) -> None:
    async with start() as router:
        for backend, words_said in zip(router.backends, (3, 2), strict=True):
            backend.dies_after = words_said
        asked = {"model": "base", "messages": MESSAGES, "max_tokens": 12, **COUNTED}
        chunks = await events(router.http, CHAT, asked)
        assert text_of(chunks) == words("base", chat_text(MESSAGES), 12)
        assert sum(chunk["choices"][0]["delta"].get("role") is not None for chunk in chunks if chunk["choices"]) == 1
        assert chunks[-1]["usage"]["completion_tokens"] == 12
        ids = [name for backend in router.backends for name in backend.request_ids]
        assert len(set(ids)) == 3


async def test_router_counts_tokens_for_backends_without_usage(start: Start) -> None:
    async with start() as router:
        for backend in router.backends:
            backend.counts, backend.dies_after = False, 4
        assert text_of(await events(router.http, COMPLETIONS, body())) == words("base", "once", 12)


@pytest.mark.slow
@pytest.mark.parametrize("error", [{"error": {"message": "engine dead", "code": 500}}, {"object": "error"}])
async def test_an_answer_goes_on_after_an_error_in_its_stream(start: Start, error: dict[str, Any]) -> None:
    async with start() as router:
        for backend in router.backends:
            backend.stream_error = error
        assert text_of(await events(router.http, COMPLETIONS, body())) == words("base", "once", 12)
        assert sum(len(backend.bodies) for backend in router.backends) == 3


async def test_unstreamed_answers_are_requested_again(start: Start) -> None:
    async with start() as router:
        killed, _ = router.backends
        killed.open.clear()
        asking = [asyncio.create_task(router.http.post(COMPLETIONS, json=body())) for _ in range(6)]
        await until(lambda: len(killed.bodies) >= 3, "the backend has three requests")
        await killed.kill()
        replies = await asyncio.gather(*asking)
        assert {reply.json()["choices"][0]["text"] for reply in replies} == {words("base", "once", 12)}


@pytest.mark.slow
async def test_streams_of_a_killed_backend_go_on_and_it_comes_back_with_its_adapters(start: Start) -> None:
    async with start() as router:
        killed, other = router.backends
        models = ["base", "formal", "pirate"]
        for model in models:  # adapters are there before
            await asyncio.gather(*(router.http.post(COMPLETIONS, json=body(model)) for _ in range(2)))
        killed.open.clear()
        asking = [
            asyncio.create_task(events(router.http, COMPLETIONS, body(models[number % 3], prompt=f"p{number}")))
            for number in range(24)
        ]
        await until(lambda: killed.streaming >= 12, "the backend streams twelve answers")
        await killed.kill()
        for number, chunks in enumerate(await asyncio.gather(*asking)):
            assert text_of(chunks) == words(models[number % 3], f"p{number}", 12)
        await router.up(1)
        said = len(other.bodies)
        assert (await router.http.post(COMPLETIONS, json=body("formal"))).status_code == 200
        assert len(other.bodies) == said + 1
        killed.open.set()
        killed.calls.clear()
        await killed.start()
        await router.up(2)
        for _ in range(4):
            assert (await router.http.post(COMPLETIONS, json=body("formal"))).status_code == 200
        assert killed.calls == ["+formal"]


async def test_resumed_streams_of_a_killed_backend_repeat_no_text(start: Start) -> None:
    async with start() as router:
        killed, _ = router.backends
        killed.pauses_at = 5
        heard: list[list[str]] = [[] for _ in range(8)]
        asking = [
            asyncio.create_task(events(router.http, COMPLETIONS, body(prompt=f"p{number}"), lines))
            for number, lines in enumerate(heard)
        ]
        # What a backend has sent may be lost with it on a busy machine.
        await until(lambda: killed.paused >= 4 and all(heard), "four answers have paused and all have begun")
        await killed.kill()
        for number, chunks in enumerate(await asyncio.gather(*asking)):
            assert text_of(chunks) == words("base", f"p{number}", 12)
        await router.metric("lorikeet:route_continued_total 4.0")


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, MAX_FAILURES + 1])
async def test_a_cut_stream_asks_a_busy_backend_again_but_not_for_ever(start: Start, times: int) -> None:
    async with start() as router:
        for backend in router.backends:
            backend.pauses_at = 5
        heard: list[str] = []
        asking = asyncio.create_task(events(router.http, COMPLETIONS, body(), heard))
        await until(
            lambda: any(backend.paused for backend in router.backends) and heard, "an answer has paused and has begun"
        )
        other, killed = sorted(router.backends, key=lambda backend: backend.paused)
        other.pauses_at, other.busy = None, times
        await killed.kill()
        chunks = await asking
        if times == 1:
            assert text_of(chunks) == words("base", "once", 12)
            assert len(other.bodies) == 2
        else:
            assert chunks[-1]["error"]["message"] == "busy"
            assert len(other.bodies) <= MAX_FAILURES + 1


@pytest.mark.slow
async def test_streams_leave_a_silent_backend_with_failed_health(start: Start) -> None:
    async with start() as router:
        frozen, other = router.backends
        frozen.pauses_at = 5
        asking = [
            asyncio.create_task(events(router.http, COMPLETIONS, body(prompt=f"p{number}"))) for number in range(4)
        ]
        await until(lambda: frozen.paused >= 2, "two answers have paused")
        frozen.health = 500
        for number, chunks in enumerate(await asyncio.gather(*asking)):
            assert text_of(chunks) == words("base", f"p{number}", 12)
        assert len(other.bodies) == 4
        assert frozen.paused == 2


@pytest.mark.slow
async def test_a_backend_that_cannot_be_reached_is_out_at_once(start: Start) -> None:
    async with start(health_s=60.0) as router:
        await router.backends[0].kill()
        for _ in range(2):
            assert (await router.http.post(COMPLETIONS, json=body())).status_code == 200
        assert sum(each["is_open"] for each in (await router.cluster())["replicas"]) == 1


@pytest.mark.slow
async def test_a_request_waits_while_no_backend_is_there(start: Start) -> None:
    async with start(count=1) as router:
        (backend,) = router.backends
        await backend.kill()
        await router.up(0)
        assert (await router.http.get("/health")).status_code == 503
        asking = asyncio.create_task(router.http.post(COMPLETIONS, json=body("formal")))
        await router.until_cluster(lambda cluster: cluster["unrouted"], "a request waits for a backend")
        await backend.start()
        assert (await asking).json()["choices"][0]["text"] == words("formal", "once", 12)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
async def test_a_backend_that_has_forgotten_an_adapter_loads_it_again(start: Start, stream: bool) -> None:
    async with start(count=1, health_s=60.0) as router:
        (backend,) = router.backends
        await router.http.post(COMPLETIONS, json=body("formal"))
        backend.adapters.clear()
        reply = await router.http.post(COMPLETIONS, json=body("formal", stream=stream))
        assert reply.status_code == 200
        assert backend.calls == ["+formal", "+formal"]


async def test_requests_for_a_forgotten_adapter_share_a_load(start: Start) -> None:
    async with start(count=1, health_s=60.0) as router:
        (backend,) = router.backends
        await router.http.post(COMPLETIONS, json=body("formal"))
        backend.adapters.clear()
        backend.open.clear()
        asking = [asyncio.create_task(router.http.post(COMPLETIONS, json=body("formal"))) for _ in range(8)]
        await until(
            lambda: len(backend.calls) >= 2 and len(router.parts.backend_router._requests) >= 8,
            "two loads and eight requests are under way",
        )
        backend.open.set()
        assert {reply.status_code for reply in await asyncio.gather(*asking)} == {200}
        assert len(backend.calls) < 1 + 8  # those who hear of the loss after the load may ask again


@pytest.mark.slow
async def test_adapters_lost_by_a_backend_are_reloaded_before_the_next_request(start: Start) -> None:
    async with start(count=1) as router:
        (backend,) = router.backends
        await router.http.post(COMPLETIONS, json=body("formal"))
        backend.adapters.clear()
        await router.until_cluster(lambda cluster: not cluster["replicas"][0]["resident"], "no adapter is resident")
        asked = len(backend.bodies)
        assert (await router.http.post(COMPLETIONS, json=body("formal"))).status_code == 200
        assert len(backend.bodies) == asked + 1


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"n": 2}, {"logprobs": 1}, {"prompt": ["once"]}])
async def test_an_answer_of_several_parts_ends_with_an_error_once_it_has_begun(
    start: Start, fields: dict[str, Any]
) -> None:
    async with start() as router:
        for backend in router.backends:
            backend.dies_after = 3
        chunks = await events(router.http, COMPLETIONS, body(**fields))
        assert "cannot be resumed at another" in chunks[-1]["error"]["message"]
        assert len(chunks) == 4
        for backend in router.backends:
            backend.dies_after = 0
        again = await events(router.http, COMPLETIONS, body(**fields))
        assert all("error" not in chunk for chunk in again)


@pytest.mark.slow
async def test_repeatedly_failing_backend_is_not_retried_forever(start: Start) -> None:
    async with start(count=1) as router:
        (backend,) = router.backends
        backend.fails_with = 500
        reply = await router.http.post(COMPLETIONS, json=body())
        assert (reply.status_code, reply.json()["error"]["message"]) == (500, "it is as it is")
        assert len(backend.bodies) == MAX_FAILURES + 1


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [501, 504])
async def test_501_and_504_are_not_retried(start: Start, status: int, stream: bool) -> None:
    async with start() as router:
        for backend in router.backends:
            backend.fails_with = status
        reply = await router.http.post(COMPLETIONS, json=body(stream=stream))
        assert (reply.status_code, reply.json()["error"]["message"]) == (status, "it is as it is")
        assert sum(len(backend.bodies) for backend in router.backends) == 1


@pytest.mark.slow
async def test_draining_backend_finishes_its_requests_and_gets_no_new_ones(start: Start) -> None:
    async with start() as router:
        for backend in router.backends:
            backend.open.clear()
        running = asyncio.create_task(events(router.http, COMPLETIONS, body()))
        await until(lambda: any(backend.streaming for backend in router.backends), "a backend streams")
        other, draining = sorted(router.backends, key=lambda backend: backend.streaming)
        other.open.set()
        draining.health = 503
        await router.up(1)
        for _ in range(4):
            assert (await router.http.post(COMPLETIONS, json=body())).status_code == 200
        assert len(other.bodies) == 4
        draining.open.set()
        assert text_of(await running) == words("base", "once", 12)
        assert len(draining.bodies) == 1
        draining.health = 200
        await router.up(2)
        for _ in range(2):
            await router.http.post(COMPLETIONS, json=body())
        assert len(draining.bodies) == 2


@pytest.mark.slow
async def test_reopened_backend_keeps_its_requests(start: Start) -> None:
    async with start(count=1) as router:
        (backend,) = router.backends
        backend.pauses_at = 3
        running = asyncio.create_task(events(router.http, COMPLETIONS, body(n=2)))
        await until(lambda: backend.paused, "an answer has paused")
        backend.health = 503
        await router.up(0)
        waiting = asyncio.create_task(router.http.post(COMPLETIONS, json=body()))
        await router.until_cluster(lambda cluster: cluster["unrouted"], "a request waits for a backend")
        backend.health = 200
        assert (await waiting).status_code == 200
        backend.go_on.set()
        assert text_of(await running) == words("base", "once", 12)
        assert len(backend.bodies) == 2


@pytest.mark.slow
async def test_adapters_have_their_homes_again_when_their_backend_is_back(start: Start) -> None:
    names = ("a", "b", "c", "d")
    async with start(preset="loraserve:random", adapters=adapters(*names)) as router:
        homes = (await router.cluster())["shares"]
        killed, other = router.backends
        await killed.kill()
        await router.up(1)
        for name in names:
            assert (await router.http.post(COMPLETIONS, json=body(name))).status_code == 200
        assert len(other.bodies) == 4
        await killed.start()
        await router.up(2)
        for name in names:
            assert (await router.http.post(COMPLETIONS, json=body(name))).status_code == 200
        assert (await router.cluster())["shares"] == homes
        assert len(killed.bodies) == 2


async def test_adapters_of_a_backend_that_stays_away_get_other_homes(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorikeet.router.catalog.AWAY_S", 0.0)
    async with start(preset="loraserve:random", adapters=adapters("a", "b", "c", "d")) as router:
        killed, other = router.backends
        await killed.kill()
        (home,) = [each["id"] for each in (await router.cluster())["replicas"] if each["address"] == other.url]
        await router.until_cluster(
            lambda cluster: all(shares == {home: 1.0} for shares in cluster["shares"].values()),
            "every adapter has one home",
        )


@pytest.mark.slow
async def test_placed_adapters_are_loaded_when_a_backend_is_back(start: Start) -> None:
    async with start(preset="lorikeet:round-robin,pool_prefetch=true") as router:
        killed, other = router.backends
        await until(lambda: min(len(killed.adapters), len(other.adapters)) >= 2, "both backends have two adapters")
        await killed.kill()
        await router.up(1)
        await killed.start()
        await until(lambda: len(killed.adapters) >= 2, "the backend has its two adapters again")


async def test_a_backend_that_dies_while_it_loads_an_adapter_is_replaced_by_another(start: Start) -> None:
    async with start() as router:
        for backend in router.backends:
            backend.open.clear()
        asking = [asyncio.create_task(router.http.post(COMPLETIONS, json=body("formal"))) for _ in range(4)]
        await until(lambda: any(router.calls), "a backend loads an adapter")
        (loading,) = [backend for backend in router.backends if backend.calls]
        for backend in router.backends:
            if backend is not loading:
                backend.open.set()
        await loading.kill()
        replies = await asyncio.gather(*asking)
        assert {reply.json()["choices"][0]["text"] for reply in replies} == {words("formal", "once", 12)}


async def test_a_router_starts_before_its_backends() -> None:
    backend = ScriptedBackend()
    await backend.start()
    await backend.kill()
    async with routing([backend.url], [backend]) as router:
        reply = await router.http.post(COMPLETIONS, json=body())
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        await backend.start()
        await router.up(1)
        assert (await router.http.post(COMPLETIONS, json=body())).status_code == 200
        await backend.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "reason"),
    [("", "it wants a key; --backend-key gives it"), ("other", "it does not take the key of --backend-key")],
)
async def test_backend_without_key_differs_from_a_missing_one(
    monkeypatch: pytest.MonkeyPatch, key: str, reason: str
) -> None:
    monkeypatch.setattr("lorikeet.router.backend_router.WAIT_S", 0.05)
    backend = ScriptedBackend()
    await backend.start()
    await backend.kill()
    backend.key = "secret"
    with structlog.testing.capture_logs() as logged:
        async with routing([backend.url], [backend], backend_key=key, adapters=adapters("formal")) as router:
            assert reason not in (await router.http.post(COMPLETIONS, json=body())).json()["error"]["message"]
            await backend.start()
            told = f"backend-0: /v1/models answers 401: {reason}"
            for model in ("base", "formal"):
                while told not in (reply := await router.http.post(COMPLETIONS, json=body(model))).text:
                    assert reply.status_code == 503
            assert reply.json()["error"]["message"] == f"No backend has been available for 0.05 s ({told})."
            backend.key = key or None
            await router.up(1)
            assert router.parts.backend_router.backend_errors() == ""
            await backend.kill()
    warnings = [entry for entry in logged if entry["event"] == "backend cannot be reached"]
    assert len(warnings) == 2, "each reason once"
    assert reason in warnings[1]["reason"]


async def test_error_names_a_backend_that_takes_no_requests_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorikeet.router.backend_router.WAIT_S", 0.05)
    backend = ScriptedBackend()
    backend.health = 503
    await backend.start()
    async with routing([backend.url], [backend]) as router:
        reply = await router.http.post(COMPLETIONS, json=body())
        assert (reply.status_code, "(backend-0: it takes no requests)." in reply.text) == (503, True)
    await backend.kill()


@pytest.mark.slow
async def test_nothing_is_left_behind_when_all_is_over(start: Start) -> None:
    async with start() as router:
        for backend in router.backends:
            backend.dies_after = 2
        await asyncio.gather(*(events(router.http, COMPLETIONS, body("formal")) for _ in range(6)))
        await router.idle()
        backend_router = router.parts.backend_router
        assert not backend_router._requests
        assert not backend_router.dispatcher._requests
        assert backend_router.dispatcher.fleet.loads.requests.sum() == sum(backend_router.dispatcher.fleet.loads.others)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"preset": "nonsense"}, "unknown preset"),
        ({"backends": ("http://a", "http://a/v1")}, "twice"),
        ({"backends": ("localhost:8001",)}, "must be the address"),
    ],
)
async def test_invalid_options_are_refused_before_the_start(options: dict[str, Any], reason: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=reason):
        async with open_router(RouterOptions(**{"backends": ("http://127.0.0.1:9",), **options})):
            pass
