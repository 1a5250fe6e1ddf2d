"""HTTP to one server, over connections that are kept; an answer is handed on as it arrives.

Why aiohttp's client: docs/decisions/the-gateway-speaks-http.md.
"""

from types import SimpleNamespace
from urllib.parse import urlsplit

import aiohttp
from multidict import CIMultiDict
from yarl import URL

CONNECT_S = 5.0
_KEEP_ALIVE_S = 4.0
"""Less than the 5 s after which uvicorn, and with it vLLM, closes idle connections."""
_MOST_BUFFERED_BYTES = 2**18
"""Of an answer that its reader does not keep up with; more stays with the server."""
_OWN_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Which aiohttp would add, to what is to be passed on as it came."""

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
    """

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.headers: Headers = [(name.lower(), value) for name, value in response.raw_headers]
        self._response = response
        self._content: bytes | None = None

    async def piece(self) -> bytes:
        """Return what has arrived since the last call, at least one byte; nothing at the end.

        Raises:
            Broken: the connection ended before the answer. What had arrived by then and was not read is lost.
        """
        try:
            return await self._response.content.readany()
        except aiohttp.ClientError as error:
            raise Broken(_why(error)) from error

    async def read(self) -> bytes:
        """Return the whole body; a second call returns it again.

        Raises:
            Broken: the connection ended before the answer.
        """
        if self._content is None:
            content = bytearray()
            while piece := await self.piece():
                content += piece
            self._content = bytes(content)
        return self._content

    def close(self) -> None:
        """Hang up, unless all has arrived."""
        self._response.close()


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
        self._url = url.rstrip("/")
        self._opened: aiohttp.ClientSession | None = None

    async def send(self, method: str, path: str, headers: Headers, content: bytes | None = None) -> Reply:
        """Send a request; return the answer as soon as its head has come.

        A kept connection that ends before an answer is replaced by another: as a rule it was closed while it was idle.

        Raises:
            Unreachable: nobody listens.
            Broken: the connection ended before an answer.
        """
        url = URL(self._url + path, encoded=True)
        given = CIMultiDict((name.decode(), value.decode(errors="replace")) for name, value in headers)
        while True:
            attempt = SimpleNamespace(was_kept=False)
            try:
                return Reply(
                    await self._session.request(
                        method, url, headers=given, data=content, allow_redirects=False, trace_request_ctx=attempt
                    )
                )
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                raise Unreachable(_why(error)) from error
            except aiohttp.ClientError as error:
                was_closed = isinstance(error, aiohttp.ClientOSError | aiohttp.ServerDisconnectedError)
                if not (attempt.was_kept and was_closed):
                    raise Broken(_why(error)) from error

    async def close(self) -> None:
        """Close all of them."""
        if self._opened is not None:
            await self._opened.close()

    @property
    def _session(self) -> aiohttp.ClientSession:
        """What keeps the connections; belongs to the event loop that first sends."""
        if self._opened is None:
            tracing = aiohttp.TraceConfig()
            tracing.on_connection_reuseconn.append(_note_kept)
            self._opened = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=_OWN_HEADERS,
                auto_decompress=False,
                read_bufsize=_MOST_BUFFERED_BYTES // 2,  # it stops reading at twice as much
                trace_configs=[tracing],
            )
        return self._opened


async def _note_kept(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
    context.trace_request_ctx.was_kept = True


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
