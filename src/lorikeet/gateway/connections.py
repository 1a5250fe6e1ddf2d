"""HTTP/1.1 to one server, over connections that are kept: a request is one write, an answer comes as it arrives.

Why not a library's client: docs/decisions/the-gateway-speaks-http.md.
"""

import asyncio
import ssl
from collections import deque
from typing import cast
from urllib.parse import urlsplit

import httptools

CONNECT_S = 5.0
_KEEP_ALIVE_S = 4.0
"""Less than the 5 s after which uvicorn, and with it vLLM, closes idle connections."""
_MOST_BUFFERED_BYTES = 2**18
"""Of an answer that its reader does not keep up with; more stays with the server."""

Headers = list[tuple[bytes, bytes]]


class ServerLost(Exception):
    """A server cannot be reached, or its connection broke."""


class Unreachable(ServerLost):
    """Nobody listens there."""


class Broken(ServerLost):
    """A connection ended, or made no sense, before the answer was whole."""


class Reply:
    """An answer, from its head on. It must be read to its end, or closed.

    Attributes:
        status: HTTP status.
        headers: names in lower case, in their order.
        is_complete: all of it has arrived.
    """

    def __init__(self, connection: "_Connection") -> None:
        self.status = 0
        self.headers: Headers = []
        self.is_complete = False
        self._connection = connection
        self._pieces: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._failure: Broken | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._content: bytes | None = None

    async def piece(self) -> bytes:
        """Return what has arrived since the last call, at least one byte; nothing at the end.

        Raises:
            Broken: the connection ended before the answer.
        """
        while not self._pieces and not self.is_complete and self._failure is None:
            await self._wait()
        if self._pieces:
            data = b"".join(self._pieces)
            self._pieces.clear()
            self._buffered_bytes = 0
            self._connection.resume()
            return data
        if self._failure is not None:
            raise self._failure
        return b""

    async def read(self) -> bytes:
        """Return the whole body; a second call returns it again.

        Raises:
            Broken: the connection ended before the answer.
        """
        if self._content is None:
            content = b""
            while piece := await self.piece():
                content += piece
            self._content = content
        return self._content

    def close(self) -> None:
        """Hang up, unless all has arrived."""
        if not self.is_complete:
            self._connection.abort()

    async def head(self) -> None:
        """Wait until the head has come.

        Raises:
            Broken: the connection ended before.
        """
        while not self.status and self._failure is None:
            await self._wait()
        if self._failure is not None:
            raise self._failure

    # --- by the connection ---------------------------------------------------------------------------

    def add(self, piece: bytes) -> bool:
        """Take a piece of the body; return whether there is room for more."""
        self._pieces.append(piece)
        self._buffered_bytes += len(piece)
        self.wake()
        return self._buffered_bytes < _MOST_BUFFERED_BYTES

    def fail(self, failure: Broken) -> None:
        """Nothing more will come."""
        self._failure = failure
        self.wake()

    def wake(self) -> None:
        """Something has changed."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class _Connection(asyncio.Protocol):
    """One connection, with at most one request at a time."""

    def __init__(self, pool: "Connections") -> None:
        self.reply: Reply | None = None
        self.has_answered = False
        """It has begun to answer the present request."""
        self.was_used = False
        self.idle_since_s = 0.0
        self.is_lost = False
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._status = 0
        self._headers: Headers = []
        self._ends_with_connection = False
        self._is_paused = False

    def ask(self, request: bytes) -> Reply:
        """Send a request; the last one must have been answered."""
        assert self._transport is not None
        self.reply = Reply(self)
        self.has_answered = False
        self._transport.write(request)
        return self.reply

    def resume(self) -> None:
        """There is room again."""
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Hang up."""
        self.is_lost = True
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of a type of their own

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self.has_answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"what came is no HTTP: {error}")
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self.is_lost = True
        self._pool.discard(self)
        if self.reply is not None and self._ends_with_connection and exc is None:
            self.on_message_complete()
        self._fail(str(exc) if exc else "the server hung up")

    def _fail(self, why: str) -> None:
        if self.reply is not None:
            reply, self.reply = self.reply, None
            reply.fail(Broken(why))

    # --- httptools -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """See httptools."""
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._status = self._parser.get_status_code()
        if self.reply is None or self._status < 200:
            return
        names = {name for name, _ in self._headers}
        self._ends_with_connection = not names & {b"content-length", b"transfer-encoding"}
        self.reply.status, self.reply.headers = self._status, self._headers
        self.reply.wake()

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        if self.reply is not None and not self.reply.add(body) and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """See httptools."""
        if self.reply is None or self._status < 200:
            return
        reply, self.reply = self.reply, None
        reply.is_complete = True
        reply.wake()
        self.resume()
        self.was_used = True
        if self.is_lost or not self._parser.should_keep_alive():
            self.abort()
        else:
            self._pool.give_back(self)


class Connections:
    """All connections to one server.

    Args:
        url: its address; what follows the host goes before every path.

    Raises:
        ValueError: it is no address of a server.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a server, such as http://127.0.0.1:8001")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/").encode()
        self._host_header = parts.netloc.rpartition("@")[2].encode()
        self._idle: deque[_Connection] = deque()

    async def send(self, method: str, path: str, headers: Headers, content: bytes | None = None) -> Reply:
        """Send a request; return the answer as soon as its head has come.

        A kept connection that turns out to be closed is replaced by another.

        Raises:
            Unreachable: nobody listens.
            Broken: the connection ended before an answer.
        """
        request = self._request(method, path, headers, content)
        while True:
            connection = self._take() or await self._connect()
            reply = connection.ask(request)
            try:
                await reply.head()
                return reply
            except Broken:
                if not connection.was_used or connection.has_answered:
                    raise
            except BaseException:
                connection.abort()
                raise

    def close(self) -> None:
        """Close what is idle."""
        while self._idle:
            self._idle.pop().abort()

    def give_back(self, connection: _Connection) -> None:
        """Keep a connection for later requests."""
        connection.idle_since_s = asyncio.get_running_loop().time()
        self._idle.append(connection)

    def discard(self, connection: _Connection) -> None:
        """A connection is gone."""
        if connection in self._idle:
            self._idle.remove(connection)

    def _take(self) -> _Connection | None:
        """Return the connection that was used last, None if there is none; those idle for too long are closed."""
        oldest_s = asyncio.get_running_loop().time() - _KEEP_ALIVE_S
        while self._idle and self._idle[0].idle_since_s < oldest_s:
            self._idle.popleft().abort()
        return self._idle.pop() if self._idle else None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self), self._host, self._port, ssl=self._ssl
                )
        except (OSError, TimeoutError) as error:
            raise Unreachable(str(error) or type(error).__name__) from error
        return connection

    def _request(self, method: str, path: str, headers: Headers, content: bytes | None) -> bytes:
        lines = [
            method.encode() + b" " + self._prefix + path.encode() + b" HTTP/1.1",
            b"host: " + self._host_header,
            *(name + b": " + value for name, value in headers),
        ]
        if content is not None:
            lines.append(b"content-length: %d" % len(content))
        return b"\r\n".join(lines) + b"\r\n\r\n" + (content or b"")
