"""Connections to servers with every form of answer that HTTP/1.1 allows, and with some invalid ones."""

import asyncio
import contextlib
import gzip
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from errno import ECONNREFUSED, EHOSTUNREACH, EMFILE, ETIMEDOUT

import pytest

from lorikeet.router.connections import (
    BackendConnectionError,
    BackendUnreachable,
    ConnectFailed,
    ConnectionBroken,
    Connections,
    FileBody,
    LocalSocketError,
)

Script = Callable[[bytes, asyncio.StreamWriter], Awaitable[bool]]
"""What a server does with one request; False if it hangs up afterwards."""


class Server:
    """A server that follows a script.

    Attributes:
        requests: as they came.
        accepted: connections so far.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[bytes] = []
        self.accepted = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length: ")]
                body = await reader.readexactly(int(length[0].split()[1])) if length else b""
                self.requests.append(head + body)
                if not await self.script(head + body, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


@asynccontextmanager
async def talking(script: Script, path: str = "") -> AsyncIterator[tuple[Server, Connections]]:
    server = Server(script)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}{path}"
    connections = Connections(server.url)
    try:
        yield server, connections
    finally:
        await connections.close()
        listening.close()
        await listening.wait_closed()


def answers(*pieces: bytes, keeps: bool = True) -> Script:
    async def script(request: bytes, writer: asyncio.StreamWriter) -> bool:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        return keeps

    return script


async def test_a_file_goes_out_piece_by_piece() -> None:
    content = bytes(range(256)) * 2**13
    async with talking(answers(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")) as (server, connections):
        for _ in range(2):
            with io.BytesIO(content) as file:
                reply = await connections.send("POST", "/v1/files", [], FileBody(file, len(content)))
                assert await reply.read() == b"ok"
        assert [request.partition(b"\r\n\r\n")[2] == content for request in server.requests] == [True, True]
        assert server.accepted == 1


async def test_a_file_that_is_refused_early_ends_its_connection() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while await reader.read(2**16):
                await asyncio.sleep(0)
        writer.close()

    listening = await asyncio.start_server(refuse, "127.0.0.1", 0)
    connections = Connections(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    content = bytes(2**26)
    try:
        for _ in range(2):
            with io.BytesIO(content) as file:
                reply = await connections.send("POST", "/v1/files", [], FileBody(file, len(content)))
                assert (reply.status, await reply.read()) == (413, b"")
    finally:
        await connections.close()
        listening.close()
        await listening.wait_closed()


async def test_a_request_goes_out_as_it_is() -> None:
    async with talking(answers(b"HTTP/1.1 204 No Content\r\n\r\n"), "/base/") as (server, connections):
        reply = await connections.send("POST", "/v1/x", [(b"x-own", b"caf\xc3\xa9")], b'{"a": 1}')
        assert (reply.status, await reply.read()) == (204, b"")
        host = server.url.removeprefix("http://").removesuffix("/base/").encode()
        first, *lines = server.requests[0].split(b"\r\n")
        assert (first, lines[-2:]) == (b"POST /base/v1/x HTTP/1.1", [b"", b'{"a": 1}'])
        assert sorted(map(bytes.lower, lines[:-2])) == [b"content-length: 8", b"host: " + host, b"x-own: caf\xc3\xa9"]
        await connections.send("GET", "/health", [])
        assert b"content-length" not in server.requests[1].lower()
        assert server.accepted == 1


@pytest.mark.parametrize(
    ("answer", "keeps", "accepted"),
    [
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhe", b"llo"), True, 1),
        (
            (b"HTTP/1.1 200 OK\r\nx-a: b\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3", b"\r\nllo\r\n0\r\n\r\n"),
            True,
            1,
        ),
        ((b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nx-a: b\r\ncontent-length: 5\r\n\r\nhello",), True, 1),
        ((b"HTTP/1.1 200 OK\r\nx-a: b\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello",), True, 2),
        ((b"HTTP/1.1 200 OK\r\nx-a: b\r\n\r\nhe", b"llo"), False, 2),
        ((b"HTTP/1.0 200 OK\r\nx-a: b\r\ncontent-length: 5\r\n\r\nhello",), False, 2),
    ],
)
async def test_an_answer_may_end_in_any_way(answer: tuple[bytes, ...], keeps: bool, accepted: int) -> None:
    async with talking(answers(*answer, keeps=keeps)) as (server, connections):
        for _ in range(2):
            reply = await connections.send("GET", "/", [])
            assert (reply.status, dict(reply.headers)[b"x-a"]) == (200, b"b")
            assert await reply.read() == b"hello"
            assert await reply.read() == b"hello"
        assert server.accepted == accepted


async def test_redirects_cookies_and_compression_are_the_clients_own_affair() -> None:
    packed = gzip.compress(b"hello")
    heads = (
        b"HTTP/1.1 307 Temporary Redirect\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nset-cookie: who=me\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n%b" % (len(packed), packed),
    )
    for head, status, content in zip(heads, (307, 200, 200), (b"", b"", packed), strict=True):
        async with talking(answers(head)) as (server, connections):
            for _ in range(2):
                reply = await connections.send("GET", "/", [])
                assert (reply.status, await reply.read()) == (status, content)
            assert len(server.requests) == 2
            assert not any(b"cookie" in request.lower() for request in server.requests)


async def test_pieces_come_as_they_arrive() -> None:
    go_on = asyncio.Event()

    async def script(request: bytes, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n")
        await go_on.wait()
        writer.write(b"1\r\nc\r\n0\r\n\r\n")
        return True

    async with talking(script) as (_, connections):
        reply = await connections.send("GET", "/", [])
        assert await reply.piece() == b"ab"
        go_on.set()
        assert (await reply.piece(), await reply.piece()) == (b"c", b"")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhe",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nnonsense\r\n",
        b"HTTP/1.1 200",
        b"nonsense\r\n\r\n",
        b"",
    ],
)
async def test_response_that_breaks_off_is_an_error(answer: bytes) -> None:
    async with talking(answers(answer, keeps=False)) as (server, connections):
        with pytest.raises(ConnectionBroken):
            await (await connections.send("POST", "/", [], b"once")).read()
        assert len(server.requests) == 1


async def test_response_is_read_until_it_breaks_off() -> None:
    has_read = asyncio.Event()

    async def script(request: bytes, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await has_read.wait()
        return False

    async with talking(script) as (_, connections):
        reply = await connections.send("GET", "/", [])
        assert await reply.piece() == b"hello"
        has_read.set()
        with pytest.raises(ConnectionBroken):
            await reply.piece()


async def test_a_kept_connection_that_was_closed_meanwhile_is_replaced_by_another() -> None:
    times = [0]

    async def script(request: bytes, writer: asyncio.StreamWriter) -> bool:
        times[0] += 1
        if times[0] == 2:
            return False  # it closes instead of answering, as if it had not seen the request
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        return True

    async with talking(script) as (server, connections):
        for _ in range(2):
            assert await (await connections.send("POST", "/", [], b"one")).read() == b"ok"
        assert (server.accepted, len(server.requests)) == (2, 3)


async def test_request_is_resent_once_only_if_a_kept_connection_closed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_well, together = [True], asyncio.Barrier(3)

    async def script(request: bytes, writer: asyncio.StreamWriter) -> bool:
        if is_well[0]:
            await together.wait()  # so that each has a connection of its own
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        return is_well[0]

    async with talking(script) as (server, connections):

        async def ask() -> None:
            await (await connections.send("POST", "/", [], b"one")).read()

        for limit_s, more in ((60.0, 2), (0.0, 1)):
            monkeypatch.setattr("lorikeet.router.connections._STALE_WITHIN_S", limit_s)
            is_well[0] = True
            await asyncio.gather(*(ask() for _ in range(3)))
            asked, is_well[0] = len(server.requests), False
            with pytest.raises(ConnectionBroken):
                await ask()
            assert len(server.requests) == asked + more


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionRefusedError(ECONNREFUSED, "refused"), BackendUnreachable),
        (OSError(EHOSTUNREACH, "no route"), BackendUnreachable),
        (OSError(EMFILE, "too many open files"), LocalSocketError),
        (OSError(ETIMEDOUT, "no answer"), ConnectFailed),
        (OSError("Multiple exceptions: of different kinds"), ConnectFailed),
        (TimeoutError(), ConnectFailed),
    ],
)
async def test_server_counts_as_gone_only_if_its_port_is_closed(
    monkeypatch: pytest.MonkeyPatch, error: OSError, kind: type[Exception]
) -> None:
    async def fails(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("lorikeet.router.connections.aiohappyeyeballs.start_connection", fails)
    connections = Connections("http://127.0.0.1:9")
    with pytest.raises(BackendConnectionError) as caught:
        await connections.send("GET", "/", [])
    assert type(caught.value) is kind
    await connections.close()


async def test_refused_connection_has_its_own_error() -> None:
    async with talking(answers(b"")) as (server, _):
        url = server.url
    with pytest.raises(BackendUnreachable):
        await Connections(url).send("GET", "/", [])


@pytest.mark.parametrize("url", ["localhost:8001", "ftp://host", "http://", "/v1"])
def test_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="must be the address"):
        Connections(url)


async def test_hanging_up_ends_the_request_and_the_next_has_a_connection_of_its_own() -> None:
    gone = asyncio.Event()

    async def script(request: bytes, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n")
        try:
            while b"endless" in request:
                writer.write(b"1\r\nx\r\n")
                await writer.drain()
                await asyncio.sleep(0)
        finally:
            gone.set()
        writer.write(b"0\r\n\r\n")
        return True

    async with talking(script) as (server, connections):
        reply = await connections.send("GET", "/endless", [])
        assert (await reply.piece())[:2] == b"ab"
        reply.close()
        await gone.wait()
        other = await connections.send("GET", "/endless", [])
        await other.piece()
        assert await (await connections.send("GET", "/", [])).read() == b"ab"
        assert server.accepted == 3
        other.close()


async def test_slow_reader_slows_the_server() -> None:
    sent = [0]
    chunk = b"10000\r\n" + b"x" * 2**16 + b"\r\n"

    async def script(request: bytes, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(1000):
            writer.write(chunk)
            await writer.drain()
            sent[0] += 1
        writer.write(b"0\r\n\r\n")
        return True

    async with talking(script) as (_, connections):
        reply = await connections.send("GET", "/", [])
        before = -1
        while before != sent[0]:  # until nothing more is taken
            before = sent[0]
            await asyncio.sleep(0.05)
        assert sent[0] < 900
        assert len(await reply.read()) == 1000 * 2**16
        assert len(await (await connections.send("GET", "/", [])).read()) == 1000 * 2**16
