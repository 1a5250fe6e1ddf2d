"""The socket of a server: two servers that start at once, and one that is started again."""

import asyncio
import errno
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import psutil
import pytest
import uvicorn

from lorikeet.config import ConfigError
from lorikeet.http.listening import ListeningServer, listen, listen_unix
from tests.http.answers import answer
from tests.support.api_server import Start
from tests.support.waiting import until


def has_ipv6() -> bool:
    """Return whether this machine has the loopback address of IPv6."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def server_on(listener: socket.socket) -> ListeningServer:
    return ListeningServer(uvicorn.Config(answer, lifespan="off", log_level="error"), listener)


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize(
    ("host", "shown"), [("127.0.0.1", r"127\.0\.0\.1"), pytest.param("::1", r"\[::1\]", marks=needs_ipv6)]
)
def test_second_server_on_a_port_is_refused_before_the_first_is_ready(host: str, shown: str) -> None:
    with listen(host, 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on {shown}:{port}: Address already in use"):
            listen(host, port)


@needs_ipv6
def test_ipv6_wildcard_takes_ipv4_connections_and_the_port_of_both() -> None:
    with listen("::", 0) as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port)).close()
        for host in ("0.0.0.0", "127.0.0.1", "::1"):
            with pytest.raises(ConfigError, match="Address already in use"):
                listen(host, port)


def test_one_of_servers_started_together_gets_the_port() -> None:
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    at_once = threading.Barrier(8)

    def start() -> socket.socket | None:
        at_once.wait()
        with suppress(ConfigError):
            return listen("127.0.0.1", port)
        return None

    for _ in range(20):
        with ThreadPoolExecutor(8) as pool:
            listeners = [each.result() for each in [pool.submit(start) for _ in range(8)]]
        got = [listener for listener in listeners if listener is not None]
        for listener in got:
            listener.close()
        assert len(got) == 1


def test_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0: Cannot assign requested address"):
        listen("192.0.2.1", 0)


def states_at(port: int) -> set[str]:
    """Return the states of all TCP sockets of this machine whose own port this is."""
    return {each.status for each in psutil.net_connections("tcp") if each.laddr and each.laddr.port == port}


async def leave_a_lingering_connection(listener: socket.socket) -> None:
    """Serve one connection, which the server closes first: its end of it lingers for a minute."""
    server = server_on(listener)
    serving = asyncio.create_task(server._serve())
    await until(lambda: server.started, "the server has started")
    reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
    writer.write(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    assert await reader.read()
    writer.close()
    server.should_exit = True
    await serving


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
async def test_restart_gets_the_port_while_connections_linger_and_still_only_one(host: str) -> None:
    with listen(host, 0) as first:
        port = first.getsockname()[1]
        await leave_a_lingering_connection(first)
    assert states_at(port) == {"TIME_WAIT"}
    with listen(host, port) as second:
        with pytest.raises(ConfigError):
            listen(host, port)
        await leave_a_lingering_connection(second)


def test_restart_gets_the_port_while_a_connection_is_open() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = first.accept()
    with client, accepted:
        assert "ESTABLISHED" in states_at(port)
        listen("127.0.0.1", port).close()


async def test_clients_that_connect_during_a_start_are_answered_once_the_server_is_ready() -> None:
    with listen("127.0.0.1", 0) as listener:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        server = server_on(listener)
        serving = asyncio.create_task(server._serve())
        assert (await reader.read()).startswith(b"HTTP/1.1 204")
        writer.close()
        server.should_exit = True
        await serving


async def test_unix_socket_is_served_removed_and_replaced_only_if_unused(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    listen_unix(str(path)).close()  # as a server that was killed leaves it
    listener = listen_unix(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match=f"cannot listen on {path}: Address already in use"):
        listen_unix(str(path))  # the first is not ready yet
    server = server_on(listener)
    serving = asyncio.create_task(server._serve())
    await until(lambda: server.started, "the server has started")
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    async with httpx.AsyncClient(base_url="http://localhost", transport=transport) as http:
        assert (await http.get("/")).status_code == 204
        with pytest.raises(ConfigError, match=f"cannot listen on {path}: Address already in use"):
            listen_unix(str(path))
        assert (await http.get("/")).status_code == 204
    server.should_exit = True
    await serving
    assert not path.exists()
    path.write_text("not a socket")
    with pytest.raises(ConfigError):
        listen_unix(str(path))
    assert path.read_text() == "not a socket"


def test_unix_socket_whose_backlog_is_full_is_not_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with ExitStack() as stack:
        stack.enter_context(listen_unix(path)).listen(0)
        result = 0
        while not result:
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            result = client.connect_ex(path)
        assert result == errno.EAGAIN
        with pytest.raises(ConfigError, match="Address already in use"):
            listen_unix(path)


@pytest.mark.slow
async def test_routes_answer_with_and_without_the_root_path_and_keys_count_for_both(start: Start) -> None:
    async with start(root_path="/llm/", api_keys=("user",), admin_keys=("admin",)) as server:
        user = {"Authorization": "Bearer user"}
        http = server.http
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
