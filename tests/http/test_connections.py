"""Limits of HTTP connections: heads, bodies, slow clients, clients that do not read, and their number."""

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog
import uvicorn

from lorikeet.http.connections import ConnectionLimits, ConnectionStats, limited_http, raise_file_limit
from lorikeet.http.errors import ApiError
from lorikeet.http.logs import RequestIds
from tests.support.api_server import Running
from tests.support.waiting import until


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the length of the body; ``/large`` with 64 MiB."""
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size = size + len(message["body"])
        more = message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(1024 if scope["path"] == "/large" else 0):
        await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})
    await send({"type": "http.response.body", "body": str(size).encode()})


@asynccontextmanager
async def serving(limits: ConnectionLimits, app: Any = echo) -> AsyncIterator[tuple[int, ConnectionStats]]:
    stats = ConnectionStats()
    config = uvicorn.Config(app, port=0, lifespan="off", log_level="error", http=limited_http(limits, stats))  # type: ignore[arg-type]
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield server.servers[0].sockets[0].getsockname()[1], stats
    finally:
        server.should_exit = server.force_exit = True
        await task


async def exchange(port: int, *parts: bytes, pause_s: float = 0.0) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
    try:
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:
        return b""
    finally:
        writer.close()


HEAD = b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"


async def test_ordinary_requests_pass() -> None:
    async with serving(ConnectionLimits()) as (port, stats):
        answer = await exchange(port, HEAD + b"content-length: 5\r\n\r\n", b"hello")
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b"\r\n1\r\n5\r\n0\r\n\r\n")
        two = await exchange(port, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n" + HEAD + b"content-length: 0\r\n\r\n")
        assert two.count(b"HTTP/1.1 200") == 2
        assert not stats.closed


@pytest.mark.slow
@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\n" + (b"a:" + b"b" * 1_000 + b"\r\n") * 100,
        b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 70_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 70_000,
        b"GET / HTTP/1.1\r\nx: " + b"y" * 66_000,
    ],
    ids=["many lines", "one value", "a long path", "not ended"],
)
async def test_large_head_is_answered_with_431(head: bytes) -> None:
    async with serving(ConnectionLimits()) as (port, stats):
        answer = await exchange(port, head)
        assert answer.startswith(b"HTTP/1.1 431") or answer == b""  # a reset may overtake the answer
        assert stats.closed == {"the head of the request is too large": 1}


async def test_many_headers_are_refused_before_they_are_many() -> None:
    async with serving(ConnectionLimits()) as (port, stats):
        assert (await exchange(port, HEAD + b"a:b\r\n" * 254 + b"\r\n")).startswith(b"HTTP/1.1 200")
        assert (await exchange(port, HEAD + b"a:b\r\n" * 255 + b"\r\n")).startswith(b"HTTP/1.1 431")
        assert stats.closed == {"the request has too many headers": 1}


async def test_reading_stops_at_a_refused_head() -> None:
    async with serving(ConnectionLimits()) as (port, stats):
        await exchange(port, b"GET / HTTP/1.1\r\n", *[b"a:" + b"b" * 80_000 + b"\r\n"] * 100)
        assert stats.closed == {"the head of the request is too large": 1}


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost:"])
async def test_connection_without_a_head_is_closed_in_time(sent: bytes) -> None:
    async with serving(ConnectionLimits(head_timeout_s=0.2)) as (port, stats):
        assert (await exchange(port, sent)).startswith(b"HTTP/1.1 408")
        assert stats.closed == {"the head came too slowly": 1}


@pytest.mark.slow
async def test_trickled_head_is_closed_in_time() -> None:
    async with serving(ConnectionLimits(head_timeout_s=0.2)) as (port, stats):
        await exchange(port, b"GET / HTTP/1.1\r\n", *[b"x: y\r\n"] * 40, pause_s=0.02)
        assert stats.closed == {"the head came too slowly": 1}


@pytest.mark.slow
async def test_trickled_body_is_closed_in_time() -> None:
    async with serving(ConnectionLimits(body_timeout_s=0.2)) as (port, stats):
        answer = await exchange(port, HEAD + b"content-length: 1000\r\n\r\n", *[b"x"] * 40, pause_s=0.02)
        assert answer.startswith(b"HTTP/1.1 408") or answer == b""  # a reset may overtake the answer
        assert stats.closed == {"the body came too slowly": 1}


@pytest.mark.slow
async def test_unread_answer_is_aborted() -> None:
    async with serving(ConnectionLimits(write_timeout_s=0.2)) as (port, stats):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(b"GET /large HTTP/1.1\r\nhost: a\r\n\r\n")
        while not stats.closed:
            await asyncio.sleep(0.01)
        assert stats.closed == {"the answer was not read": 1}
        writer.close()


@pytest.mark.slow
async def test_unread_answer_is_aborted_while_more_requests_wait() -> None:
    async with serving(ConnectionLimits(write_timeout_s=0.3)) as (port, stats):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(b"GET /large HTTP/1.1\r\nhost: a\r\n\r\n")
        await reader.readexactly(1)  # the answer fills what is between
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n" * 2)
        await until(lambda: stats.closed, "the connection is closed")
        assert stats.closed == {"the answer was not read": 1}
        writer.close()


@pytest.mark.slow
async def test_log_has_the_clients_status_of_a_slow_body() -> None:
    async def route(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await ApiError(400, "There was an error parsing the body.").response()(scope, receive, send)

    with structlog.testing.capture_logs() as logged:
        async with serving(ConnectionLimits(body_timeout_s=0.2), RequestIds(route)) as (port, _):
            head = HEAD + b"content-length: 1000\r\n\r\n"
            assert (await exchange(port, head)).startswith(b"HTTP/1.1 408")
    assert [each["status"] for each in logged if each["event"] == "request"] == [408]


async def test_connections_beyond_the_limit_get_503_and_others_continue() -> None:
    async with serving(ConnectionLimits(max_connections=2)) as (port, stats):
        first = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        assert (await exchange(port, b"")).startswith(b"HTTP/1.1 503")
        assert stats.closed == {"too many connections": 1}
        first[0][1].close()
        await first[0][1].wait_closed()
        while not (answer := await exchange(port, HEAD + b"content-length: 0\r\n\r\n")).startswith(b"HTTP/1.1 200"):
            assert answer.startswith(b"HTTP/1.1 503")
        first[1][1].close()


def test_limit_on_open_files_is_raised_as_far_as_allowed() -> None:
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before - 1, most))
        assert raise_file_limit() < most
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


async def test_metrics_count_closed_connections_by_reason(server: Running) -> None:
    server.service.connections.note("the head came too slowly", "127.0.0.1")
    lines = (await server.http.get("/metrics")).text.splitlines()
    wanted = 'lorikeet:connections_closed_total{model_name="base",reason="the head came too slowly"} 1.0'
    assert wanted in lines
