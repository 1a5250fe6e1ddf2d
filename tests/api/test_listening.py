"""The socket of a server: two that start at once, and one that is started again."""

import asyncio
import socket
from typing import Any

import pytest
import uvicorn

from lorikeet.api.listening import BoundServer, bind
from lorikeet.config import ConfigError


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def server_on(listener: socket.socket) -> BoundServer:
    return BoundServer(uvicorn.Config(answer, lifespan="off", log_level="error"), listener)


def test_second_server_that_starts_meanwhile_cannot_bind() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"):
            bind("127.0.0.1", port)


async def leave_a_lingering_connection(listener: socket.socket) -> None:
    """Serve one connection, which the server closes first: its end of it lingers for a minute."""
    server = server_on(listener)
    serving = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.005)
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    assert await reader.read()
    writer.close()
    server.should_exit = True
    await serving


async def test_restart_binds_while_connections_linger_and_still_only_one() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        await leave_a_lingering_connection(first)
    with bind("127.0.0.1", port), pytest.raises(ConfigError):
        bind("127.0.0.1", port)


async def test_port_that_another_listens_on_when_ready_is_an_error() -> None:
    with socket.socket() as other, socket.socket() as mine:
        for each in (other, mine):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        mine.bind(other.getsockname())
        other.listen()
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1"):
            await server_on(mine)._serve()
