"""Sends HTTP requests to one backend over kept-alive connections, and passes responses on as they arrive.

Why an own client: docs/decisions/the-router-speaks-http.md.
"""

import asyncio
import math
import os
import re
import socket
import ssl
import time
from base64 import b64encode
from collections import deque
from collections.abc import Callable
from errno import EADDRNOTAVAIL, ECONNREFUSED, EHOSTUNREACH, EMFILE, ENFILE, ENOBUFS, ENOMEM
from typing import IO, NamedTuple, cast
from urllib.parse import quote, unquote, urlsplit

import aiohappyeyeballs
import httptools

CONNECT_S = 5.0
_ADDRESS_S = 0.25
"""Seconds after which the next address of a name is tried beside the one before."""
_KEEP_ALIVE_S = 4.0
"""Seconds for which idle connections are kept: less than the 5 s of uvicorn, which vLLM uses."""
_MAX_BUFFERED_BYTES = 2**18
"""Most bytes of a response that are buffered for a slow reader; the rest stays with the server."""
_SENT_BYTES = 2**18
"""Bytes of a piece of a file that is sent."""
_WITH_LENGTH = frozenset({"POST", "PUT", "PATCH"})
"""Methods whose requests announce the length of an empty body, too."""
_SAFE_PATH = re.compile(r"[\x21-\x7e]*")

STUCK_S = 600.0
"""Seconds without a piece after which an answer is given up, even if its server answers others."""

_STALE_WITHIN_S = 1.0
"""A kept connection that breaks within these seconds after a request was sent had probably ended before."""
_NO_LISTENER_ERRNOS = (ECONNREFUSED, EHOSTUNREACH)
_LOCAL_ERRNOS = (EMFILE, ENFILE, ENOBUFS, ENOMEM, EADDRNOTAVAIL)

Headers = list[tuple[bytes, bytes]]


class BackendConnectionError(Exception):
    """A backend cannot be reached, or its connection broke."""


class BackendUnreachable(BackendConnectionError):
    """No server listens at the address."""


class ConnectFailed(BackendConnectionError):
    """No connection could be made, for example because the name did not resolve or the attempt took too long."""


class LocalSocketError(ConnectFailed):
    """This machine has no socket or port left; the server may be alive."""


class ConnectionBroken(BackendConnectionError):
    """A connection ended, or sent invalid HTTP, before the response was whole."""


def plain_reason(error: Exception) -> str:
    """Return the reason of a failure for clients, without the server's address."""
    if isinstance(error, TimeoutError):
        return "it does not answer"
    if isinstance(error, LocalSocketError):
        return f"no connection to it could be made: {error}"
    if isinstance(error, BackendUnreachable | ConnectFailed):
        return "it cannot be reached"
    return "its connection broke" if isinstance(error, BackendConnectionError) else str(error) or type(error).__name__


class FileBody(NamedTuple):
    """A request's body in a file, which is sent piece by piece.

    Attributes:
        file: the file; it is read from its beginning.
        size: its bytes.
    """

    file: IO[bytes]
    size: int


class AnswerWatch:
    """Measures the time since one server last sent a piece of any pending answer.

    A busy server answers one request after the other, so a single request that waits long means little. A server that
    sends nothing at all while requests are pending hangs.

    Attributes:
        streams: number of waits for a piece of a stream.
    """

    def __init__(self) -> None:
        self.streams = 0
        self._waits = 0
        self._began_s = self._before_s = 0.0
        self._heard_s = -math.inf

    def begin(self, *, is_stream: bool) -> None:
        """Count one more wait for a piece of an answer."""
        if not self._waits:
            self._began_s = time.monotonic()
        self._waits += 1
        self.streams += is_stream

    def end(self, *, is_stream: bool, has_come: bool) -> None:
        """Count one wait less: the piece has arrived, or the wait was cancelled."""
        self._waits -= 1
        self.streams -= is_stream
        if has_come:
            self.heard()
        elif not self._waits:
            self._before_s += time.monotonic() - self._began_s

    def heard(self) -> None:
        """Record that the server has sent something."""
        self._before_s = 0.0
        self._began_s = time.monotonic()
        self._heard_s = self._began_s

    def has_heard(self, within_s: float) -> bool:
        """Return whether a piece of an answer has arrived in the last ``within_s`` seconds."""
        return time.monotonic() - self._heard_s < within_s

    @property
    def silent_s(self) -> float:
        """Seconds of waiting since the last piece, without times at which no request was pending."""
        return self._before_s + (time.monotonic() - self._began_s if self._waits else 0.0)


class BackendResponse:
    """A response whose head has arrived. The caller reads it to its end, or closes it.

    Args:
        connection: the connection on which the response arrives.
        watch: counts each wait for a piece.
        is_stream: whether the answer comes in pieces.

    Attributes:
        status: HTTP status; 0 before the head has arrived.
        headers: headers in the order received, names in lower case.
        has_begun: whether a byte of the response has arrived.
        is_complete: whether the whole response has arrived.
    """

    def __init__(self, connection: "_Connection", watch: AnswerWatch | None, *, is_stream: bool) -> None:
        self.status = 0
        self.headers: Headers = []
        self.has_begun = False
        self.is_complete = False
        self._connection = connection
        self._watch = watch
        self._is_stream = is_stream
        self._pieces: list[bytes] = []
        self._buffered_bytes = 0
        self._failure: BackendConnectionError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[bytes], bool] | None = None
        self._content: bytes | None = None

    async def head(self) -> None:
        """Wait for the head.

        Raises:
            ConnectionBroken: the connection ended before the head.
        """
        while not self.status:
            await self._wait()

    async def piece(self) -> bytes:
        """Return the bytes that have arrived since the last call, at least one byte; empty at the end.

        Raises:
            ConnectionBroken: the connection ended before the response. Unread bytes are lost.
        """
        while not self._pieces and not self.is_complete:
            await self._wait()
        return self._taken()

    async def pass_on(self, take: Callable[[bytes], bool]) -> None:
        """Call ``take`` with each piece in the moment in which it arrives, until the end or until it returns False.

        No task runs between the two connections. The next call of :meth:`piece` returns what arrives later.

        Raises:
            ConnectionBroken: the connection ended before the response.
        """
        if self._pieces and not take(self._taken()):
            return
        self._take = take
        try:
            while not self._is_idle():
                await self._wait()
        finally:
            self._take = None

    async def read(self) -> bytes:
        """Return the whole body. A second call returns the same body.

        Raises:
            ConnectionBroken: the connection ended before the response.
        """
        if self._content is None:
            content = bytearray()
            while piece := await self.piece():
                content += piece
            self._content = bytes(content)
        return self._content

    def close(self) -> None:
        """Close the connection unless the whole response has arrived."""
        if not self.is_complete:
            self._connection.abort("the request was given up")

    # --- called by the connection --------------------------------------------------------------------

    def add(self, piece: bytes) -> bool:
        """Add a piece of the body. Return whether there is room for more."""
        self._pieces.append(piece)
        self._buffered_bytes += len(piece)
        return self._buffered_bytes < _MAX_BUFFERED_BYTES

    def on_data(self) -> None:
        """Pass on what one read of the socket has brought, and wake the reader."""
        if self._take is not None and self._pieces:
            if self._watch is not None:
                self._watch.heard()
            try:
                if not self._take(self._taken()):
                    self._take = None
            except Exception as error:
                self._take = None
                self._wake(error)
                return
            if self._take is not None and not self.is_complete:
                return
        if self.status:
            self._wake(None)

    def fail(self, failure: BackendConnectionError) -> None:
        """End the response before it is whole."""
        if not self.is_complete and self._failure is None:
            self._failure = failure
            self._wake(failure)

    def _is_idle(self) -> bool:
        """Return whether no further piece goes to the taker."""
        return self._take is None or self.is_complete

    def _taken(self) -> bytes:
        pieces = self._pieces
        piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._buffered_bytes = 0
        self._connection.resume()
        return piece

    def _wake(self, error: Exception | None) -> None:
        if self._waiter is not None and not self._waiter.done():
            if error is None:
                self._waiter.set_result(None)
            else:
                self._waiter.set_exception(error)

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        watch = self._watch
        has_come = False
        if watch is not None:
            watch.begin(is_stream=self._is_stream)
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
            has_come = True
        finally:
            self._waiter = None
            if watch is not None:
                watch.end(is_stream=self._is_stream, has_come=has_come)


class _Connection(asyncio.Protocol):
    """One connection, with at most one request at a time."""

    def __init__(self, pool: "Connections") -> None:
        self.was_used = False
        self.idle_since_s = 0.0
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._response: BackendResponse | None = None
        self._status = 0
        self._headers: Headers = []
        self._ends_with_connection = False
        self._is_paused = False
        self._room: asyncio.Future[None] | None = None
        """Future that is set when more of a body can be written; None while it can."""
        self._lacks_body = False
        """Whether a part of the last request's body is not sent, so that no request can follow."""
        self._heard_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def send(self, request: bytes, watch: AnswerWatch | None, *, is_stream: bool) -> BackendResponse:
        """Send a request. The response to the last one must be complete."""
        assert self._transport is not None
        response = self._response = BackendResponse(self, watch, is_stream=is_stream)
        loop = asyncio.get_running_loop()
        self._heard_s = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(STUCK_S, self._give_up_stuck)
        self._transport.write(request)
        return response

    async def send_file(self, body: FileBody, response: BackendResponse) -> None:
        """Send a body. Stop when the connection ends, or when the server answers before the end."""
        assert self._transport is not None
        body.file.seek(0)
        self._lacks_body = True
        while piece := body.file.read(_SENT_BYTES):
            if self._transport.is_closing() or response.has_begun:
                return
            self._transport.write(piece)
            if self._room is not None:
                await self._room
        self._lacks_body = False

    def pause_writing(self) -> None:
        """Wait with further pieces of a body."""
        self._room = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """Send further pieces of a body."""
        if self._room is not None:
            if not self._room.done():
                self._room.set_result(None)
            self._room = None

    def resume(self) -> None:
        """Read on, if reading was paused."""
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()

    def abort(self, why: str) -> None:
        """Close the connection at once."""
        self._pool.discard(self)
        self._fail(ConnectionBroken(why))
        if self._transport is not None:
            self._transport.abort()

    def _give_up_stuck(self) -> None:
        """Fail a response of which nothing has arrived for too long. One timer serves all requests."""
        loop = asyncio.get_running_loop()
        if self._response is None or self._is_paused:
            self._heard_s = loop.time()
        left_s = self._heard_s + STUCK_S - loop.time()
        if left_s > 0:
            self._timer = loop.call_later(left_s, self._give_up_stuck)
        else:
            self._timer = None
            self.abort(f"nothing has arrived for {STUCK_S:g} s")

    def _fail(self, failure: BackendConnectionError) -> None:
        if self._response is not None:
            response, self._response = self._response, None
            response.fail(failure)

    # --- asyncio -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's have a type of their own.

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and pass on what they hold."""
        response = self._response
        if response is None:  # The server sends what nobody has requested.
            self.abort("bytes arrived without a request")
            return
        response.has_begun = True
        self._heard_s = asyncio.get_running_loop().time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.abort(f"the answer is not HTTP: {error}")
        except httptools.HttpParserUpgrade:
            self.abort("the server wants another protocol")
        response.on_data()

    def connection_lost(self, exc: Exception | None) -> None:
        """End a response that has no other end; fail any other."""
        self._pool.discard(self)
        self.resume_writing()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        response = self._response
        if response is not None and response.status and self._ends_with_connection and exc is None:
            self._response = None
            response.is_complete = True
            response.on_data()
        self._fail(ConnectionBroken(str(exc) if exc else "the server closed the connection"))

    # --- httptools -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin a head; one beyond the requested response ends the connection."""
        self._headers = []
        if self._response is None:
            self.abort("a second answer arrived")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Give the head to the response, unless it is a preliminary one (1xx)."""
        self._status = self._parser.get_status_code()
        response = self._response
        if response is None or self._status < 200:
            return
        self._ends_with_connection = not any(
            name in (b"content-length", b"transfer-encoding") for name, _ in self._headers
        )
        response.headers = self._headers
        response.status = self._status

    def on_body(self, body: bytes) -> None:
        """Add a piece to the response. A slow reader pauses the connection."""
        if self._response is not None and not self._response.add(body) and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """End the response, and keep the connection if the server does."""
        response = self._response
        if response is None or self._status < 200:
            return
        self._response = None
        response.is_complete = True
        self.resume()
        self.was_used = True
        if self._parser.should_keep_alive() and not self._lacks_body:
            self._pool.give_back(self)
        else:
            self.abort("")


class Connections:
    """Holds all connections to one server.

    Args:
        url: the server's address. A path in the address precedes the path of every request, and a user and a password
            in it are sent with requests that have no other.

    Raises:
        ValueError: the address is not an http or https URL.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} must be the address of a server, such as http://127.0.0.1:8001")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        named = parts.netloc.rpartition("@")[2].encode("idna" if parts.netloc.isascii() is False else "ascii")
        self._host_line = b"host: " + named
        self._login = b""
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._login = b"authorization: Basic " + b64encode(login.encode())
        self._idle: deque[_Connection] = deque()
        self._all: set[_Connection] = set()
        self._is_closed = False

    async def send(
        self,
        method: str,
        path: str,
        headers: Headers,
        content: bytes | FileBody | None = None,
        watch: AnswerWatch | None = None,
        *,
        is_stream: bool = False,
    ) -> BackendResponse:
        """Send a request. Return the answer as soon as its head has arrived. ``watch`` counts each wait.

        If a reused connection ends immediately, without a response, the request is sent once more: the server has most
        likely closed the idle connection and not seen the request. If it ends later, the request may be the cause.

        Raises:
            BackendUnreachable: nothing listens.
            ConnectFailed: no connection could be made for another reason.
            ConnectionBroken: the connection ended before a response.
            ValueError: a header holds a line break.
        """
        request = self._request(method, path, headers, content)
        may_resend = True
        while True:
            connection = self._kept() or await self._connect(watch, is_stream=is_stream)
            sent_s = asyncio.get_running_loop().time()
            response = connection.send(request, watch, is_stream=is_stream)
            try:
                if isinstance(content, FileBody):
                    await connection.send_file(content, response)
                await response.head()
                return response
            except ConnectionBroken:
                is_stale = connection.was_used and not response.has_begun
                if not (may_resend and is_stale and asyncio.get_running_loop().time() - sent_s < _STALE_WITHIN_S):
                    raise
                may_resend = False
            except BaseException:
                response.close()
                raise

    async def close(self) -> None:
        """Close all connections."""
        self._is_closed = True
        for connection in list(self._all):
            connection.abort("the router ends")

    def give_back(self, connection: _Connection) -> None:
        """Keep a connection for later requests."""
        connection.idle_since_s = asyncio.get_running_loop().time()
        self._idle.append(connection)

    def discard(self, connection: _Connection) -> None:
        """Forget a connection."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _kept(self) -> _Connection | None:
        """Return the connection that was used last; None without one. Connections that idled too long are closed."""
        oldest_s = asyncio.get_running_loop().time() - _KEEP_ALIVE_S
        while self._idle and self._idle[0].idle_since_s < oldest_s:
            self._idle[0].abort("")
        return self._idle.pop() if self._idle else None

    async def _connect(self, watch: AnswerWatch | None, *, is_stream: bool) -> _Connection:
        loop = asyncio.get_running_loop()
        if watch is not None:
            watch.begin(is_stream=is_stream)
        try:
            async with asyncio.timeout(CONNECT_S):
                addresses = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                opened = await aiohappyeyeballs.start_connection(addresses, happy_eyeballs_delay=_ADDRESS_S)
                try:
                    name = self._host if self._ssl is not None else None
                    _, connection = await loop.create_connection(
                        lambda: _Connection(self), sock=opened, ssl=self._ssl, server_hostname=name
                    )
                except BaseException:
                    opened.close()
                    raise
        except TimeoutError as error:
            raise ConnectFailed(f"no connection within {CONNECT_S:g} s") from error
        except OSError as error:
            raise _not_connected(error) from error
        finally:
            if watch is not None:
                watch.end(is_stream=is_stream, has_come=False)
        self._all.add(connection)
        if self._is_closed:
            connection.abort("the router ends")
            raise ConnectFailed("the router ends")
        return connection

    def _request(self, method: str, path: str, headers: Headers, content: bytes | FileBody | None) -> bytes:
        target = self._prefix + path
        if _SAFE_PATH.fullmatch(target) is None:
            target = quote(target, safe="/%?&=:@,;+$!*'()~#[]")
        lines = [f"{method} {target} HTTP/1.1".encode(), self._host_line]
        lines += [name + b": " + value for name, value in headers]
        if self._login and not any(name == b"authorization" for name, _ in headers):
            lines.append(self._login)
        length = content.size if isinstance(content, FileBody) else len(content or b"")
        if length or method in _WITH_LENGTH:
            lines.append(b"content-length: %d" % length)
        head = b"\r\n".join(lines)
        if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1:
            raise ValueError("a header holds a line break")
        return head + b"\r\n\r\n" + (content if isinstance(content, bytes) else b"")


def _not_connected(error: OSError) -> BackendConnectionError:
    why = str(error) or type(error).__name__
    if error.errno in _NO_LISTENER_ERRNOS:
        return BackendUnreachable(why)
    if error.errno in _LOCAL_ERRNOS:
        return LocalSocketError(os.strerror(error.errno))
    return ConnectFailed(why)
