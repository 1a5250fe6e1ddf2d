"""Keys, limits, hang-ups, request ids and errors that are nobody's field."""

import asyncio
import json
import socket
from typing import Any

import httpx
import pytest
import structlog

from lorikeet.chat.text_processor import IncrementalDetokenizer
from lorikeet.config import ConfigError
from lorikeet.http.auth import KeyRing
from tests.support.api_server import TOKENIZER, Running, Start
from tests.support.chat_requests import CHAT, bearer, body
from tests.support.waiting import until

pytestmark = pytest.mark.slow

ADMIN_CALLS = [
    ("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "nowhere"}),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "x"}),
    ("POST", "/load_lora_adapter", {"lora_name": "x", "lora_path": "nowhere"}),
    ("POST", "/v1/adapters", {"name": "x", "source": "nowhere"}),
    ("DELETE", "/v1/adapters/x", None),
    ("POST", "/adapters", {"name": "x", "src": "nowhere"}),
    ("DELETE", "/adapters/x", None),
    ("POST", "/v1/loras", {"lora_name": "x", "source": {"uri": "nowhere"}}),
    ("DELETE", "/v1/loras/x", None),
]


async def test_with_api_keys_only_their_holders_are_answered(start: Start) -> None:
    async with start(api_keys=("one", "two")) as server:
        for headers in (
            {},
            bearer("three"),
            {"Authorization": "Bearer"},
            {"Authorization": "one"},
            {"Authorization": "Basic one"},
        ):
            for reply in (
                await server.http.post(CHAT, json=body(), headers=headers),
                await server.http.get("/v1/models", headers=headers),
                await server.http.post("/tokenize", json={"prompt": "x"}, headers=headers),
            ):
                assert reply.status_code == 401
                assert reply.json() == {"error": "Unauthorized"}
        for key in ("one", "two"):
            assert (await server.http.post(CHAT, json=body(), headers=bearer(key))).status_code == 200


@pytest.mark.parametrize("keys", [("",), ("one", " ")])
def test_empty_key_is_refused(keys: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="empty"):
        KeyRing(keys)
    assert not KeyRing(["one"]).holds("")


async def test_health_and_metrics_need_no_key(start: Start) -> None:
    async with start(api_keys=("one",), admin_keys=("boss",)) as server:
        for path in ("/health", "/health/live", "/health/ready", "/ping", "/version", "/load", "/metrics"):
            assert (await server.http.get(path)).status_code == 200


@pytest.mark.parametrize(("method", "path", "content"), ADMIN_CALLS)
async def test_adapters_are_changed_only_with_an_admin_key(
    start: Start, method: str, path: str, content: dict[str, Any] | None
) -> None:
    async with start(api_keys=("user",), admin_keys=("boss",)) as server:
        statuses = [
            (await server.http.request(method, path, json=content, headers=headers)).status_code
            for headers in ({}, bearer("user"), bearer("boss"))
        ]
        assert statuses[:2] == [401, 403]
        assert statuses[2] in (400, 404)  # past the door, and the adapter does not exist


async def test_the_cluster_is_shown_only_to_an_admin_key(start: Start) -> None:
    async with start(api_keys=("user",), admin_keys=("boss",)) as server:
        statuses = [
            (await server.http.get("/v1/cluster", headers=headers)).status_code
            for headers in ({}, bearer("user"), bearer("boss"))
        ]
        assert statuses == [401, 403, 200]


async def test_admin_keys_alone_leave_the_other_routes_open(start: Start) -> None:
    async with start(admin_keys=("boss",)) as server:
        assert (await server.http.post(CHAT, json=body())).status_code == 200
        assert (await server.http.get("/v1/adapters")).status_code == 200
        assert (await server.http.delete("/v1/adapters/x")).status_code == 401


async def test_api_keys_may_change_adapters_without_admin_keys(start: Start) -> None:
    async with start(api_keys=("user",)) as server:
        assert (await server.http.delete("/v1/adapters/x")).status_code == 401
        assert (await server.http.delete("/v1/adapters/x", headers=bearer("user"))).status_code == 404


async def test_a_full_queue_answers_429_and_empties_again(start: Start) -> None:
    async with start(max_queued=2) as server:
        server.engine.open.clear()
        waiting = asyncio.create_task(server.http.post(CHAT, json=body(n=2)))
        await until(lambda: server.service.gate.active == 2, "two requests are active")
        assert (await server.http.get("/load")).json() == {"server_load": 2}
        refused = await server.http.post(CHAT, json=body())
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == 429
        server.engine.open.set()
        assert (await waiting).status_code == 200
        assert (await server.http.post(CHAT, json=body())).status_code == 200


async def test_more_answers_than_the_queue_holds_can_never_be_had(start: Start) -> None:
    async with start(max_queued=2) as server:
        assert (await server.http.post(CHAT, json=body(n=3))).status_code == 400


async def test_while_draining_accepted_requests_finish_and_new_ones_get_503(server: Running) -> None:
    server.engine.open.clear()
    accepted = asyncio.create_task(server.http.post(CHAT, json=body()))
    await until(lambda: server.service.gate.active == 1, "one request is active")
    server.service.gate.draining = True
    assert (await server.http.post(CHAT, json=body())).status_code == 503
    assert (await server.http.get("/health")).status_code == 503
    assert (await server.http.get("/health/live")).status_code == 200
    server.engine.open.set()
    assert (await accepted).json()["choices"][0]["message"]["content"] == "hello world"


async def test_a_server_without_an_engine_is_not_ready(server: Running) -> None:
    server.engine.alive = False
    assert (await server.http.get("/health")).status_code == 503
    assert (await server.http.get("/ping")).status_code == 503
    assert (await server.http.get("/health/live")).status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_disconnect_before_the_first_token_releases_the_ticket(server: Running, stream: bool) -> None:
    server.engine.open.clear()
    asking = asyncio.create_task(server.http.post(CHAT, json=body(stream=stream, n=2, model="formal")))
    await until(lambda: len(server.engine.submitted) == 2, "two requests have been submitted")
    asking.cancel()
    await until(lambda: server.service.gate.active == 0, "no request is active")
    assert len(server.engine.aborted) == 2
    usage = server.service.observer.usage.of("formal")
    assert (usage.running, usage.total.aborted) == (0, 2)


async def test_disconnect_during_a_stream_releases_the_ticket(start: Start) -> None:
    async with start(answer="hello " * 100) as server:
        async with server.http.stream("POST", CHAT, json=body(stream=True)) as reply:
            async for _ in reply.aiter_lines():
                server.engine.open.clear()
                break
        await until(lambda: server.service.gate.active == 0, "no request is active")
        assert len(server.engine.aborted) == 1


async def test_a_body_past_the_limit_is_a_413_announced_or_not(start: Start) -> None:
    async with start(max_body_bytes=1000) as server:
        content = json.dumps(body(user="x" * 2000)).encode()

        async def unannounced() -> Any:
            yield content[:600]
            yield content[600:]

        headers = {"Content-Type": "application/json"}
        for sent in (content, unannounced()):
            reply = await server.http.post(CHAT, content=sent, headers=headers)
            assert reply.status_code == 413
            assert "1000" in reply.json()["error"]["message"]
        assert (await server.http.post(CHAT, json=body())).status_code == 200


@pytest.mark.parametrize("content", [b"{", b"", b"[]", b'"text"', b'{"model": "base"}', b"\xff\xfe"])
async def test_invalid_body_is_a_400(server: Running, content: bytes) -> None:
    reply = await server.http.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


async def test_lone_surrogate_in_any_field_is_a_400(server: Running) -> None:
    halves = (rb"\ud800", rb"\uDC00x", rb"\ud83e\ud83e\udd9c", b"\xed\xa0\x80")
    for path, content in (
        (CHAT, b'{"messages": [{"role": "user", "content": "%s"}]}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "model": "%s"}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "stop": ["%s"]}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"%s": 1}}'),
        ("/v1/completions", b'{"prompt": "%s"}'),
        ("/tokenize", b'{"prompt": "%s"}'),
        ("/v1/adapters", b'{"name": "%s", "source": "formal"}'),
    ):
        for half in halves:
            headers = {"Content-Type": "application/json"}
            reply = await server.http.post(path, content=content % half, headers=headers)
            assert reply.status_code == 400
            assert "surrogate" in reply.json()["error"]["message"]


async def test_escaped_whole_characters_and_escaped_backslashes_are_text(server: Running) -> None:
    content = rb'{"prompt": "\ud83e\udd9c \\ud800"}'
    reply = await server.http.post("/tokenize", content=content, headers={"Content-Type": "application/json"})
    assert TOKENIZER.decode(reply.json()["tokens"]) == "🦜 \\ud800"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/load_lora_adapter", "/v1/adapters", "/tokenize"])
async def test_only_json_is_read(server: Running, path: str) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        reply = await server.http.post(path, content=b"{}", headers={"Content-Type": kind})
        assert reply.status_code == 415
        assert "application/json" in reply.json()["error"]["message"]


async def test_unknown_routes_and_methods_have_openai_shaped_errors(server: Running) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", CHAT, 405)):
        reply = await server.http.request(method, path)
        assert reply.status_code == status
        assert reply.json()["error"]["code"] == status


async def test_unexpected_failure_is_a_500_without_details(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(server.service.models, "cards", broken)
    with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as logged:
        reply = await server.http.get("/v1/models", headers={"X-Request-Id": "abc-3"})
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == 500
    assert reply.headers["x-request-id"] == "abc-3"
    failure, access = logged
    assert (failure["event"], failure["request_id"]) == ("unexpected error", "abc-3")
    assert isinstance(failure["exc_info"], RuntimeError)
    assert (access["event"], access["request_id"], access["status"]) == ("request", "abc-3", 500)
    assert "secret" not in reply.text
    assert (await server.http.get("/health")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_choice_that_fails_in_the_server_is_aborted_in_the_engine(
    server: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def broken(text_stream: IncrementalDetokenizer, token_id: int) -> str:
        raise RuntimeError("secret")

    monkeypatch.setattr(IncrementalDetokenizer, "push", broken)
    reply = await server.http.post(CHAT, json=body(stream=stream))
    assert reply.status_code == 500
    assert "secret" not in reply.text
    await until(lambda: not server.service.gate.active, "no request is active")
    assert server.engine.aborted == [server.engine.submitted[0].request_id]


async def test_a_request_id_is_echoed_or_made(server: Running) -> None:
    given = await server.http.post(CHAT, json=body(), headers={"X-Request-Id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    assert given.json()["id"] == "chatcmpl-abc-1"
    assert server.engine.submitted[0].request_id.startswith("abc-1-")
    made = {(await server.http.get("/version")).headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    refused = await server.http.get("/version", headers={"X-Request-Id": "x" * 500})
    assert len(refused.headers["x-request-id"]) == 32
    missing = await server.http.get("/v1/nothing", headers={"X-Request-Id": "abc-2"})
    assert missing.headers["x-request-id"] == "abc-2"


async def test_equal_request_ids_do_not_meet_in_the_engine(server: Running) -> None:
    headers = {"X-Request-Id": "same"}
    await asyncio.gather(*(server.http.post(CHAT, json=body(), headers=headers) for _ in range(3)))
    assert len({request.request_id for request in server.engine.submitted}) == 3


async def test_incomplete_request_does_not_harm_the_server(server: Running) -> None:
    url = httpx.URL(str(server.http.base_url))
    with socket.create_connection((url.host, url.port or 0)) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert (await server.http.post(CHAT, json=body())).status_code == 200
    assert server.service.gate.active == 0


@pytest.mark.parametrize(
    ("settings", "host", "status"),
    [
        ({}, "evil.example", 403),
        ({}, "evil.example:8000", 403),
        ({}, "localhost.evil.example", 403),
        ({}, "[broken", 403),
        ({}, "10.0.0.1", 403),
        ({}, "localhost:8000", 200),
        ({}, "Localhost.", 200),
        ({}, "app.localhost:3000", 200),
        ({}, "127.0.0.2:8000", 200),
        ({}, "[::1]:8000", 200),
        ({"allowed_origins": ("https://good.example",)}, "good.example", 200),
        ({"allowed_origins": ("https://good.example",)}, "evil.example", 403),
        ({"allowed_origins": ("*",)}, "evil.example", 200),
        ({"api_keys": ("one",)}, "evil.example", 200),
        ({"host": "0.0.0.0"}, "evil.example", 200),
    ],
)
async def test_foreign_host_is_refused_without_keys_on_loopback(
    start: Start, settings: dict[str, Any], host: str, status: int
) -> None:
    async with start(**settings) as server:
        reply = await server.http.get("/v1/models", headers={"Host": host, **bearer("one")})
        assert reply.status_code == status


def preflight(origin: str) -> dict[str, str]:
    """Return what a browser asks before a page of that origin sends a chat completion with a key."""
    headers = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Private-Network": "true"}
    return {"Origin": origin, **headers, "Access-Control-Request-Headers": "authorization,content-type"}


async def test_web_pages_may_use_the_server_only_where_their_origin_is_allowed(start: Start) -> None:
    async with start(allowed_origins=("https://good", "http://localhost:1"), api_keys=("one",)) as server:
        asked = await server.http.options(CHAT, headers=preflight("https://good"))
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == "https://good"
        assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
        for headers, status in (({}, 401), (bearer("one"), 200)):
            reply = await server.http.post(CHAT, json=body(), headers={"Origin": "https://good", **headers})
            assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (status, "https://good")
            assert "X-Request-Id" in reply.headers["access-control-expose-headers"]
        for origin in ("https://bad", "http://localhost:2", "null"):
            asked = await server.http.options(CHAT, headers=preflight(origin))
            assert (asked.status_code, "access-control-allow-origin" in asked.headers) == (400, False)
            reply = await server.http.get("/v1/models", headers={"Origin": origin, **bearer("one")})
            assert "access-control-allow-origin" not in reply.headers
    async with start(allowed_origins=("*",)) as server:
        asked = await server.http.options(CHAT, headers=preflight("https://any"))
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, "*")
        assert "access-control-allow-credentials" not in asked.headers


async def test_web_pages_may_not_use_the_server_by_default(server: Running) -> None:
    asked = await server.http.options(CHAT, headers=preflight("http://localhost:3000"))
    reply = await server.http.get("/v1/models", headers={"Origin": "http://localhost:3000"})
    for one in (asked, reply):
        assert not [name for name in one.headers if name.startswith("access-control")]
    assert asked.status_code == 405


@pytest.mark.parametrize(
    ("allowed", "headers", "status"),
    [
        ((), {}, 200),
        ((), {"Origin": "https://other"}, 403),
        ((), {"Origin": "null"}, 403),
        ((), {"Origin": "http://[broken"}, 403),
        ((), {"Origin": "http://own.localhost:1", "Host": "own.localhost:1"}, 200),
        ((), {"Origin": "http://own.localhost:1", "Host": "own.localhost:2"}, 403),
        ((), {"Origin": "https://proxy", "Host": "own.localhost:1", "Sec-Fetch-Site": "same-origin"}, 200),
        ((), {"Origin": "https://own.localhost:1", "Host": "own.localhost:1", "Sec-Fetch-Site": "cross-site"}, 403),
        ((), {"Sec-Fetch-Site": "same-site"}, 403),
        (("https://other",), {"Origin": "https://other", "Sec-Fetch-Site": "cross-site"}, 200),
        (("https://other",), {"Origin": "https://more"}, 403),
        (("*",), {"Origin": "https://more"}, 200),
    ],
)
async def test_simple_cross_origin_requests_cannot_change_state(
    start: Start, allowed: tuple[str, ...], headers: dict[str, str], status: int
) -> None:
    async with start(allowed_origins=allowed) as server:
        reply = await server.http.post("/v1/cluster/replicas", headers=headers)
        assert reply.status_code == (201 if status == 200 else 403)
        assert len(server.engine.added) == (status == 200)
        if status == 403:
            assert "--allowed-origins" in reply.json()["error"]["message"]
            assert reply.headers["X-Request-Id"]


async def test_unexpected_failure_is_readable_by_web_pages_too(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    async with start(allowed_origins=("*",)) as server:
        monkeypatch.setattr(server.service.models, "cards", broken)
        reply = await server.http.get("/v1/models", headers={"Origin": "https://any"})
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (500, "*")


async def test_polls_are_logged_quietly_and_changes_of_adapters_are_not(server: Running) -> None:
    with structlog.testing.capture_logs() as logged:
        for path in ("/health", "/health/ready", "/load", "/metrics"):
            await server.http.get(path)
        await server.http.post("/load_lora_adapter", json={})
    levels = {line["path"]: line["log_level"] for line in logged if line["event"] == "request"}
    assert levels.pop("/load_lora_adapter") == "info"
    assert set(levels.values()) == {"debug"}
