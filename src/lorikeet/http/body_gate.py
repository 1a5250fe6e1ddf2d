"""Limits the total size of large request bodies in the process, and checks the content types of bodies."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from lorikeet.http.errors import ApiError

SMALL_BODY_BYTES = 64 * 1024
"""Most bytes of a small body. A larger one would block the event loop, and all streams, for 10 ms or more."""

_LARGEST_HELD = 4
"""Number of bodies of the largest size that are held at once; smaller bodies add up."""
_WAIT_S = 30.0


class BodyGate:
    """Limits the total size of all large bodies in the process. Bodies that must wait enter in order of arrival.

    Args:
        max_body_bytes: most bytes of one body.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.held_bytes = 0
        self._max_bytes = _LARGEST_HELD * max_body_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Hold ``size`` bytes within the context.

        Raises:
            ApiError: 429, the wait for room took too long.
        """
        await self.enter(size)
        try:
            yield
        finally:
            self.leave(size)

    async def enter(self, size: int) -> None:
        """Hold ``size`` bytes until :meth:`leave`; see :meth:`hold` for errors."""
        if self._waiting or self.held_bytes + size > self._max_bytes:
            await self._wait(size)
        else:
            self.held_bytes += size

    async def _wait(self, size: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            async with asyncio.timeout(_WAIT_S):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.leave(size)
            else:
                self._waiting.remove((size, turn))
                self.leave(0)  # Smaller bodies behind it may have room.
            if isinstance(error, TimeoutError):
                raise ApiError(
                    429, "Too many large bodies are being read; try again later.", headers={"Retry-After": "1"}
                ) from None
            raise

    def leave(self, size: int) -> None:
        """Release ``size`` bytes."""
        self.held_bytes -= size
        while self._waiting and self.held_bytes + self._waiting[0][0] <= self._max_bytes:
            waiting, turn = self._waiting.popleft()
            if not turn.done():
                self.held_bytes += waiting
                turn.set_result(None)


def check_content_type(request: Request) -> None:
    """Check that the content type of a body is JSON.

    Raises:
        ApiError: 415, the content type is another.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"Only 'application/json' is allowed as Content-Type, not {kind!r}.")
