"""What may be asked of ``/v1/stats``, and its answers as server-sent events: those of a server and of a router."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from fastapi import Query
from starlette.responses import Response

from lorikeet.http.errors import ApiError
from lorikeet.http.streaming import CancelOnDisconnect, EventStream
from lorikeet.observe.sort_by import SortBy

MOST_STREAMS = 32
"""Streams that may be open at once."""


@dataclass(frozen=True)
class StatsQuery:
    """Which adapters are shown.

    Attributes:
        adapters: most of them.
        sort: by what.
        ascending: the least first.
        match: part of their names.
        history: whether samples of the last ten minutes are added.
    """

    adapters: Annotated[int, Query(ge=0, le=1000)] = 50
    sort: SortBy = SortBy.SLOWNESS
    ascending: bool = False
    match: Annotated[str, Query(max_length=256)] = ""
    history: bool = False


Look = Callable[[StatsQuery], Awaitable[dict[str, Any]]]
"""Returns the body of ``/v1/stats``."""


async def stats_response(look: Look, query: StatsQuery) -> Response:
    """Return the answer of ``/v1/stats``."""
    content = msgspec.json.encode(await look(query))
    return Response(content, media_type="application/json", headers={"Cache-Control": "no-store"})


class StatsStreams:
    """The open streams of ``/v1/stats/stream``.

    Args:
        is_ending: whether the server drains; then all of them end.

    Attributes:
        open: their number.
    """

    def __init__(self, is_ending: Callable[[], bool]) -> None:
        self._is_ending = is_ending
        self.open = 0

    def response(self, look: Look, query: StatsQuery, interval_s: float) -> Response:
        """Return a stream of what ``/v1/stats`` answers; only the first event has the history.

        Raises:
            ApiError: 429, too many are open.
        """
        if self.open >= MOST_STREAMS:
            raise ApiError(429, f"{MOST_STREAMS} streams of statistics are open; try again later.")

        async def events() -> AsyncIterator[bytes]:
            shown = query
            while not self._is_ending():
                yield b"data: " + msgspec.json.encode(await look(shown)) + b"\n\n"
                shown = replace(query, history=False)
                await asyncio.sleep(interval_s)

        async def make() -> Response:
            return EventStream(events())

        def close() -> None:
            self.open -= 1

        self.open += 1
        return CancelOnDisconnect(make, close)
