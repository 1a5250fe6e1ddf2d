"""Sends responses whose work ends when the client disconnects, and server-sent events."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lorikeet.http.logs import log

_CLIENT_CLOSED_REQUEST = 499


class CancelOnDisconnect(Response):
    """Computes and sends a response while its client stays connected. One task watches the connection.

    Args:
        make: returns the response of a request whose body has been read. A disconnect of the client cancels it.
        close: function that is always called at the end; ``make`` may have called it before.
    """

    def __init__(self, make: Callable[[], Awaitable[Response]], close: Callable[[], None]) -> None:
        self.background = None
        self._make = make
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compute the response and send it; raise exceptions of ``make``."""
        has_begun = False

        async def begin(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            async with asyncio.timeout(None) as connected:
                watching = asyncio.create_task(_expire_on_disconnect(receive, connected))
                try:
                    answer = await self._make()
                    await answer(scope, receive, begin)
                finally:
                    watching.cancel()
        except TimeoutError:
            if not connected.expired():
                raise
            if not has_begun:
                # Only the log sees this status.
                await Response(status_code=_CLIENT_CLOSED_REQUEST)(scope, receive, send)
        finally:
            self._close()


async def _expire_on_disconnect(receive: Receive, connected: asyncio.Timeout) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    connected.reschedule(0.0)


class DirectBody(Protocol):
    """Writes parts of an answer's body to its connection, past the event loop and all middleware.

    A server offers it in the scope's extensions (``DIRECT_BODY``), for the answer that has begun.
    """

    @property
    def is_open(self) -> bool:
        """Whether a part can be written now: the answer has begun, and its client reads."""
        ...

    def write(self, part: bytes) -> None:
        """Write a part. Call it only while the body is open."""
        ...


DIRECT_BODY = "lorikeet.direct_body"


class EventStream(Response):
    """Sends server-sent events.

    Args:
        events: complete events, blank line included.
        until_s: time, on the event loop's clock, by which a client must have read all events; None for no limit.
        write_to: takes a direct body once, after the headers, if the server offers one; ``events`` need not yield the
            events written there. None for no direct writes.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        until_s: float | None = None,
        write_to: Callable[[DirectBody], None] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._until_s = until_s
        self._write_to = write_to
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until they end, the connection breaks or the client's time has passed."""
        try:
            async with asyncio.timeout_at(self._until_s):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                body = scope.get("extensions", {}).get(DIRECT_BODY)
                if body is not None and self._write_to is not None:
                    self._write_to(body)
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            log.warning("disconnected a client that does not read its stream")
        except OSError:
            return


async def begun(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Wait for the first event and return all, so that an error before it can still have an HTTP status."""
    first = await anext(events)

    async def all_of_them() -> AsyncIterator[bytes]:
        yield first
        async for event in events:
            yield event

    return all_of_them()
