"""A client that hangs up: its work ends at once."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lorikeet.server.logs import log

_T = TypeVar("_T")


class ClientGone(Exception):
    """The client hung up before the answer was complete."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Run ``work`` while the client stays; the request's body must have been read.

    Raises:
        ClientGone: the client hung up first; ``work`` was cancelled.
    """
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. Unlike Starlette's streaming response it always closes its source, started or not.

    Args:
        events: complete events, blank line included.
        close: called once at the end, whatever ended it.
        until_s: on the event loop's clock; a client that has not read all by then is given up. None for never.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], until_s: float | None = None) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._close = close
        self._until_s = until_s
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until they end, the client is gone or its time is up."""

        async def stream() -> None:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            async with asyncio.timeout_at(self._until_s):
                await unless_gone(receive, stream())
        except TimeoutError:
            log.warning("gave up a client that does not read its stream")
        except (ClientGone, OSError):
            return
        finally:
            self._close()
