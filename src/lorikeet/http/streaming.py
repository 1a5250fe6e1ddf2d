"""Responses that cancel their work when the client disconnects, and server-sent events."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lorikeet.http.logs import log

_CLIENT_CLOSED_REQUEST = 499


class CancelOnDisconnect(Response):
    """A response that is computed and sent while its client stays connected. One task watches the connection.

    Args:
        make: returns the response; the request's body must have been read. It is cancelled when the client disconnects.
        close: called at the end in every case; ``make`` may have called it before.
    """

    def __init__(self, make: Callable[[], Awaitable[Response]], close: Callable[[], None]) -> None:
        self.background = None
        self._make = make
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compute the response and send it. Exceptions of ``make`` are raised."""
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
                await Response(status_code=_CLIENT_CLOSED_REQUEST)(scope, receive, send)  # the status is for the log
        finally:
            self._close()


async def _expire_on_disconnect(receive: Receive, connected: asyncio.Timeout) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    connected.reschedule(0.0)


class DirectBody(Protocol):
    """Writes parts of an answer's body to its connection, past the event loop and all middleware.

    A server offers one in the scope's extensions (``DIRECT_BODY``); it is of the answer that has begun.
    """

    @property
    def is_open(self) -> bool:
        """Whether a part can be written now: the answer has begun, and its client is there and reads."""
        ...

    def write(self, part: bytes) -> None:
        """Write a part. Call it only while the body is open."""
        ...


DIRECT_BODY = "lorikeet.direct_body"


class EventStream(Response):
    """Server-sent events.

    Args:
        events: complete events, blank line included.
        until_s: on the event loop's clock; a client that has not read all by then is disconnected. None for never.
        write_to: called once, when the headers are sent, if the server has a direct way to write: what is written there
            ``events`` need not yield. None for none.
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
    """Return the events once the first is there, so that an error before it can still have a status of HTTP."""
    first = await anext(events)

    async def all_of_them() -> AsyncIterator[bytes]:
        yield first
        async for event in events:
            yield event

    return all_of_them()
