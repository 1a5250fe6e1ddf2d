"""Limits HTTP connections: their heads, bodies, time and number.

Uvicorn with httptools lacks such limits (docs/decisions/front-door.md), so this protocol adds them. A client that sends
a large head, sends slowly, does not read its answer, or opens too many connections costs other clients nothing.
"""

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from lorikeet.http.logs import REFUSED, log
from lorikeet.http.streaming import DIRECT_BODY

_MAX_HEADERS = 256
"""Most headers. 64 KiB of the smallest would be 13,000 calls of the parser, which take longer than a body."""
_BODY_BYTES_PER_S = 16 * 1024
"""Slowest rate of a body: it may take ``body_timeout_s`` plus its time at this rate."""
_SPARE_DESCRIPTORS = 256
"""Open files that stay free for files, engines and sources when the process's limit bounds connections."""
_LOG_EVERY_S = 10.0
_CLOSE_GRACE_S = 2.0


class ConnectionLimits(NamedTuple):
    """Limits on the connections of a server.

    Attributes:
        max_connections: most open connections; further ones get 503 and are closed.
        max_head_bytes: most bytes of request line and headers; longer heads get 431.
        head_timeout_s: most seconds from the first byte, or a connection's start, to the end of the head; then 408.
        body_timeout_s: most seconds from the head to the body's end, plus its time at 16 KiB a second; then 408.
        write_timeout_s: most seconds that a client may leave its answer unread; then the connection is closed.
    """

    max_connections: int = 4096
    max_head_bytes: int = 64 * 1024
    head_timeout_s: float = 15.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0


class ConnectionStats:
    """Counts connections that a limit closed, and logs at most one line per reason in ten seconds.

    Attributes:
        closed: number of closed connections, by reason.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.closed: Counter[str] = Counter()
        self._clock = clock
        self._logged: dict[str, tuple[float, int]] = {}

    def note(self, reason: str, client: str) -> None:
        """Count one closed connection."""
        self.closed[reason] += 1
        last_s, count = self._logged.get(reason, (float("-inf"), 0))
        if self._clock() - last_s >= _LOG_EVERY_S:
            self._logged[reason] = self._clock(), self.closed[reason]
            log.warning("connections closed", reason=reason, count=self.closed[reason] - count, client=client)


class _AnswerBody:
    """Writes parts of a chunked answer as uvicorn's ``send`` does; implements ``DirectBody``."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_open(self) -> bool:
        """Whether a part can be written now."""
        cycle = self._cycle
        return not (
            cycle.disconnected
            or cycle.flow.write_paused
            or cycle.response_complete
            or not cycle.chunked_encoding
            or cycle.scope["method"] == "HEAD"
            or cycle.transport.is_closing()
        )

    def write(self, part: bytes) -> None:
        """Write a part."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


class LimitedHttp(HttpToolsProtocol):
    """One HTTP/1.1 connection within limits.

    Args:
        limits: the limits.
        stats: counts of all connections of the server.
    """

    def __init__(self, limits: ConnectionLimits, stats: ConnectionStats, **uvicorn_args: Any) -> None:
        super().__init__(**uvicorn_args)
        self._limits = limits
        self._stats = stats
        self._head_bytes = 0
        self._body_bytes = 0
        self._refusal: tuple[int, str] | None = None
        self._deadline: tuple[float, int, str] | None = (
            None  # The time limit on reading: time, status of the answer, reason.
        )
        self._unread_until_s: float | None = None  # The time limit on an answer that the client does not read.
        self._timer: asyncio.TimerHandle | None = None

    # Reading.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, unless too many are open."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(503, "too many connections")
            return
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        if self._refusal is not None or self.transport.is_closing():
            return
        # This is the first byte of the next request, not the rest of a body whose request has been answered.
        if self.timeout_keep_alive_task is not None and self._head_bytes >= 0:
            self._await_head()
        in_head = self._head_bytes >= 0
        if in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > self._limits.max_head_bytes and self._refusal is None:
            self._refuse(431, "the head of the request is too large")

    def on_message_begin(self) -> None:
        """Start a request."""
        super().on_message_begin()
        self._head_size = 0

    def on_url(self, url: bytes) -> None:
        """Take a part of the request line."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self._count_head(len(name) + len(value) + 4)
        if len(self.headers) == _MAX_HEADERS:
            self._refuse_head("the request has too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the application and the time limit of the body."""
        self._head_bytes = -1
        self._body_bytes = 0
        self._deadline = time.monotonic() + self._limits.body_timeout_s, 408, "the body came too slowly"
        self._arm()
        super().on_headers_complete()
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and cycle.scope is self.scope:  # An upgrade starts no cycle.
            self.scope["extensions"] = {DIRECT_BODY: _AnswerBody(cycle)}  # type: ignore[dict-item]

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request; the client has sent all of it."""
        self._deadline = None
        super().on_message_complete()
        self._head_bytes = 0  # The next bytes belong to a pipelined request.

    def send_400_response(self, msg: str) -> None:
        """Answer a message that is not HTTP, or a refused head with its own status."""
        if self._refusal is None:
            self._stats.note("not HTTP", self._who())
            self._refuse_with(400, msg)

    # Writing.

    def pause_writing(self) -> None:
        """Start the time limit of a client that does not read."""
        super().pause_writing()
        self._unread_until_s = time.monotonic() + self._limits.write_timeout_s
        self._arm()

    def resume_writing(self) -> None:
        """End the time limit of a client that reads again."""
        super().resume_writing()
        self._unread_until_s = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the open ones."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super().connection_lost(exc)

    # Limits.

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._deadline = time.monotonic() + self._limits.head_timeout_s, 408, "the head came too slowly"
        self._arm()

    def _count_head(self, size: int) -> None:
        self._head_size += size
        if self._head_size > self._limits.max_head_bytes:
            self._refuse_head("the head of the request is too large")

    def _refuse_head(self, reason: str) -> None:
        self._refuse(431, reason)
        raise ValueError(reason)  # The parser stops at it and calls send_400_response.

    def _arm(self) -> None:
        """Keep one timer, which fires by the deadline and checks it again, since deadlines seldom pass."""
        due_s = [each for each in (self._unread_until_s, self._read_until_s()) if each is not None]
        if not due_s:
            return
        left_s = max(0.05, min(due_s) - time.monotonic())
        if self._timer is not None and self._timer.when() > self.loop.time() + left_s:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self.loop.call_later(left_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        now_s = time.monotonic()
        read_until_s = self._read_until_s()
        if self._unread_until_s is not None and now_s >= self._unread_until_s:
            self._refuse(0, "the answer was not read")
        elif read_until_s is not None and now_s >= read_until_s:
            assert self._deadline is not None
            self._refuse(*self._deadline[1:])
        else:
            self._arm()

    def _read_until_s(self) -> float | None:
        """Return the time by which the message being read must be complete; None if no message is being read."""
        if self._deadline is None:
            return None
        until_s = self._deadline[0]
        if self._head_bytes < 0:  # The received part of a body extends its time.
            until_s += self._body_bytes / _BODY_BYTES_PER_S
            if self.flow.read_paused:
                until_s = time.monotonic() + 1.0
        return until_s

    def _refuse(self, status: int, reason: str) -> None:
        self._stats.note(reason, self._who())
        cycle: RequestResponseCycle | None = self.cycle  # It is None before the first request, against its type.
        if status and (cycle is None or not cycle.response_started or cycle.response_complete):
            self._refuse_with(status, reason)
        else:
            self.transport.abort()

    def _refuse_with(self, status: int, reason: str) -> None:
        self._refusal = status, reason
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.scope.setdefault("state", {})[REFUSED] = status
        body = b'{"error":{"message":"%s","type":"BadRequestError","param":null,"code":%d}}' % (reason.encode(), status)
        self.transport.write(
            STATUS_LINE[status] + b"content-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        self.transport.close()
        self.loop.call_later(_CLOSE_GRACE_S, self._abort)  # A client that does not read must not keep the connection.

    def _abort(self) -> None:
        with suppress(RuntimeError):
            self.transport.abort()

    def _who(self) -> str:
        return self.client[0] if self.client else ""


def limited_http(limits: ConnectionLimits, stats: ConnectionStats) -> Callable[..., LimitedHttp]:
    """Return a factory of limited connections, for ``uvicorn.Config(http=...)``."""
    return partial(LimitedHttp, limits, stats)


def raise_file_limit() -> int:
    """Raise the limit on open files as far as the system allows; return the number of connections it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # The limit stays if the system allows less than it states.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return max(16, soft - _SPARE_DESCRIPTORS) if soft != resource.RLIM_INFINITY else 2**20
