"""The socket of a server: two that start at once, and one that is started again."""

import asyncio
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import uvloop

from lorikeet.config import ConfigError
from lorikeet.http.listening import BoundServer, bind, bind_unix
from tests.support.api_server import Start
from tests.support.waiting import until


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
    await until(lambda: server.started, "the server has started")
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


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_port_that_another_listens_on_when_ready_is_an_error(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with socket.socket() as other, socket.socket() as mine:
        for each in (other, mine):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        mine.bind(other.getsockname())
        other.listen()
        with (
            asyncio.Runner(loop_factory=loop) as runner,
            pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already in use"),
        ):
            runner.run(server_on(mine)._serve())


async def test_a_unix_socket_is_answered_removed_and_replaced_only_if_nobody_listens(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    bind_unix(str(path)).close()  # as a server that was killed leaves it
    listener = bind_unix(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    server = server_on(listener)
    serving = asyncio.create_task(server._serve())
    await until(lambda: server.started, "the server has started")
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    async with httpx.AsyncClient(base_url="http://localhost", transport=transport) as http:
        assert (await http.get("/")).status_code == 204
        with pytest.raises(ConfigError, match=f"cannot listen on {path}: Address already in use"):
            bind_unix(str(path))
        assert (await http.get("/")).status_code == 204
    server.should_exit = True
    await serving
    assert not path.exists()
    path.write_text("not a socket")
    with pytest.raises(ConfigError):
        bind_unix(str(path))
    assert path.read_text() == "not a socket"


@pytest.mark.slow
async def test_routes_answer_with_and_without_the_root_path_and_keys_count_for_both(start: Start) -> None:
    async with start(root_path="/llm/", api_keys=("user",), admin_keys=("admin",)) as server:
        user, http = {"Authorization": "Bearer user"}, server.http
        for prefix in ("", "/llm"):
            assert (await http.get(f"{prefix}/health")).status_code == 200
            assert (await http.get(f"{prefix}/v1/models")).status_code == 401
            assert (await http.get(f"{prefix}/v1/models", headers=user)).status_code == 200
            assert (await http.delete(f"{prefix}/v1/adapters/x", headers=user)).status_code == 403
            body = {"model": "base", "prompt": "a"}
            assert (await http.post(f"{prefix}/v1/completions", headers=user, json=body)).status_code == 200
        assert (await http.get("/llmv1/models", headers=user)).status_code == 404
        assert (await http.get("/llm/docs", headers=user)).status_code == 200
        described = (await http.get("/llm/openapi.json", headers=user)).json()
        assert described["servers"] == [{"url": "/llm"}]
