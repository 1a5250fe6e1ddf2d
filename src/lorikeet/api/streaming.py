"""Responses that end their work at once when the client hangs up, and server-sent events."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lorikeet.api.logs import log

_CLIENT_CLOSED_REQUEST = 499


class CancelOnDisconnect(Response):
    """An answer that is made and sent while its client stays. Making and sending are watched over by one task.

    Args:
        make: returns the answer; the request's body must have been read. It is cancelled when the client hangs up.
        close: called at the end, whatever ended it; ``make`` may have called it before.
    """

    def __init__(self, make: Callable[[], Awaitable[Response]], close: Callable[[], None]) -> None:
        self.background = None
        self._make = make
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Make the answer and send it. What ``make`` raises is raised."""
        has_begun = False

        async def begin(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            async with asyncio.timeout(None) as stay:
                watching = asyncio.create_task(_end_when_gone(receive, stay))
                try:
                    answer = await self._make()
                    await answer(scope, receive, begin)
                finally:
                    watching.cancel()
        except TimeoutError:
            if not stay.expired():
                raise
            if not has_begun:
                await Response(status_code=_CLIENT_CLOSED_REQUEST)(scope, receive, send)  # for the log
        finally:
            self._close()


async def _end_when_gone(receive: Receive, stay: asyncio.Timeout) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stay.reschedule(0.0)


class EventStream(Response):
    """Server-sent events.

    Args:
        events: complete events, blank line included.
        until_s: on the event loop's clock; a client that has not read all by then is given up. None for never.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], until_s: float | None = None) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._until_s = until_s
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until they end, the connection breaks or the client's time is up."""
        try:
            async with asyncio.timeout_at(self._until_s):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            log.warning("gave up a client that does not read its stream")
        except OSError:
            return
