"""Sends HTTP requests to one backend over kept-alive connections, and passes responses on as they arrive.

Why aiohttp's client: docs/decisions/the-router-speaks-http.md.
"""

import asyncio
import math
import os
import time
from errno import EADDRNOTAVAIL, ECONNREFUSED, EHOSTUNREACH, EMFILE, ENFILE, ENOBUFS, ENOMEM
from types import SimpleNamespace
from urllib.parse import urlsplit

import aiohttp
from multidict import CIMultiDict
from yarl import URL

CONNECT_S = 5.0
_KEEP_ALIVE_S = 4.0
"""Seconds for which idle connections are kept: less than the 5 s of uvicorn, which vLLM uses."""
_MAX_BUFFERED_BYTES = 2**18
"""Most bytes of a response that are buffered for a slow reader; the rest stays with the server."""
_SKIPPED_AUTO_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers that aiohttp must not add. The client's headers are passed on unchanged."""

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
        response: the response of the client library.
        watch: counts each wait for a piece.
        is_stream: whether the answer comes in pieces.

    Attributes:
        status: HTTP status.
        headers: headers in the order received, names in lower case.
    """

    def __init__(
        self, response: aiohttp.ClientResponse, watch: AnswerWatch | None = None, *, is_stream: bool = False
    ) -> None:
        self._watch = watch
        self._is_stream = is_stream
        self.status = response.status
        self.headers: Headers = [(name.lower(), value) for name, value in response.raw_headers]
        self._response = response
        self._content: bytes | None = None

    async def piece(self) -> bytes:
        """Return the bytes that have arrived since the last call, at least one byte; empty at the end.

        Raises:
            ConnectionBroken: the connection ended before the response. Unread bytes are lost.
        """
        watch = self._watch
        has_come = False
        if watch is not None:
            watch.begin(is_stream=self._is_stream)
        try:
            piece = await self._response.content.readany()
            has_come = True
        except aiohttp.ClientError as error:
            raise ConnectionBroken(_why(error)) from error
        finally:
            if watch is not None:
                watch.end(is_stream=self._is_stream, has_come=has_come)
        return piece

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
        self._response.close()


class Connections:
    """Holds all connections to one server.

    Args:
        url: the server's address. A path in the address precedes the path of every request.

    Raises:
        ValueError: the address is not an http or https URL.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} must be the address of a server, such as http://127.0.0.1:8001")
        self._url = url.rstrip("/")
        self._opened: aiohttp.ClientSession | None = None

    async def send(
        self,
        method: str,
        path: str,
        headers: Headers,
        content: bytes | None = None,
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
        """
        url = URL(self._url + path, encoded=True)
        given = CIMultiDict((name.decode(), value.decode(errors="replace")) for name, value in headers)
        may_resend = True
        while True:
            attempt = SimpleNamespace(reused_at_s=None)
            has_come = False
            if watch is not None:
                watch.begin(is_stream=is_stream)
            try:
                response = await self._session.request(
                    method, url, headers=given, data=content, allow_redirects=False, trace_request_ctx=attempt
                )
                has_come = True
                return BackendResponse(response, watch, is_stream=is_stream)
            except aiohttp.ClientConnectorError as error:
                raise _not_connected(error) from error
            except aiohttp.ConnectionTimeoutError as error:
                raise ConnectFailed(_why(error)) from error
            except aiohttp.ClientError as error:
                if not (may_resend and _was_stale(attempt, error)):
                    raise ConnectionBroken(_why(error)) from error
                may_resend = False
            finally:
                if watch is not None:
                    watch.end(is_stream=is_stream, has_come=has_come)

    async def close(self) -> None:
        """Close all connections."""
        if self._opened is not None:
            await self._opened.close()

    @property
    def _session(self) -> aiohttp.ClientSession:
        """The client session, which belongs to the event loop of the first request."""
        if self._opened is None:
            tracing = aiohttp.TraceConfig()
            tracing.on_connection_reuseconn.append(_note_reused)
            self._opened = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=STUCK_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=_SKIPPED_AUTO_HEADERS,
                auto_decompress=False,
                read_bufsize=_MAX_BUFFERED_BYTES // 2,  # aiohttp stops reading at twice this size.
                trace_configs=[tracing],
            )
        return self._opened


async def _note_reused(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
    context.trace_request_ctx.reused_at_s = asyncio.get_running_loop().time()


def _was_stale(attempt: SimpleNamespace, error: aiohttp.ClientError) -> bool:
    """Return whether a reused connection broke immediately."""
    if attempt.reused_at_s is None or not isinstance(error, aiohttp.ClientOSError | aiohttp.ServerDisconnectedError):
        return False
    return bool(asyncio.get_running_loop().time() - attempt.reused_at_s < _STALE_WITHIN_S)


def _not_connected(error: aiohttp.ClientConnectorError) -> BackendConnectionError:
    number = error.os_error.errno
    why = _why(error)
    if number in _NO_LISTENER_ERRNOS:
        return BackendUnreachable(why)
    return LocalSocketError(os.strerror(number)) if number in _LOCAL_ERRNOS else ConnectFailed(why)


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
