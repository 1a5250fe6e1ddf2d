"""Reads the query of ``/v1/stats``, and streams its answers as server-sent events, for a server and a router."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from fastapi import Query
from pydantic import TypeAdapter, ValidationError
from starlette.responses import Response

from lorikeet.http.errors import ApiError, invalid_body
from lorikeet.http.streaming import CancelOnDisconnect, EventStream
from lorikeet.observe.sort_by import SortBy

MOST_STREAMS = 32
"""Streams that may be open at once."""


@dataclass(frozen=True)
class StatsQuery:
    """Selects the adapters to show.

    Attributes:
        adapters: largest number of adapters.
        sort: the figure to sort by.
        ascending: whether the smallest figure comes first.
        match: text that the adapters' names contain.
        history: whether the answer includes samples of the last ten minutes.
    """

    adapters: Annotated[int, Query(ge=0, le=1000)] = 50
    sort: SortBy = SortBy.SLOWNESS
    ascending: bool = False
    match: Annotated[str, Query(max_length=256)] = ""
    history: bool = False


@dataclass(frozen=True)
class StatsStreamQuery(StatsQuery):
    """Selects the adapters and the interval of a stream.

    Attributes:
        interval_s: seconds between two events.
    """

    interval_s: Annotated[float, Query(ge=0.2, le=5)] = 1.0


_STREAM_QUERY = TypeAdapter(StatsStreamQuery)


def read_stats_query(given: Mapping[str, str]) -> StatsStreamQuery:
    """Read the query of a request for statistics, for a server without FastAPI's routes. Other fields are ignored.

    Raises:
        ApiError: 400, which names the first invalid field.
    """
    try:
        return _STREAM_QUERY.validate_python(dict(given))
    except ValidationError as error:
        raise invalid_body([{**fault, "loc": ("query", *fault["loc"])} for fault in error.errors()]) from error


Look = Callable[[StatsQuery], Awaitable[dict[str, Any]]]
"""Returns the body of ``/v1/stats``."""


async def stats_response(look: Look, query: StatsQuery) -> Response:
    """Return the answer of ``/v1/stats``."""
    content = msgspec.json.encode(await look(query))
    return Response(content, media_type="application/json", headers={"Cache-Control": "no-store"})


class StatsStreams:
    """Holds the open streams of ``/v1/stats/stream``.

    Args:
        is_ending: returns whether the server drains, which ends all streams.

    Attributes:
        open: number of open streams.
    """

    def __init__(self, is_ending: Callable[[], bool]) -> None:
        self._is_ending = is_ending
        self.open = 0

    def response(self, look: Look, query: StatsStreamQuery) -> Response:
        """Return a stream of the answers of ``/v1/stats``. Only the first event has the history.

        Raises:
            ApiError: 429, too many streams are open.
        """
        if self.open >= MOST_STREAMS:
            raise ApiError(429, f"{MOST_STREAMS} streams of statistics are open; try again later.")

        async def events() -> AsyncIterator[bytes]:
            shown: StatsQuery = query
            while not self._is_ending():
                yield b"data: " + msgspec.json.encode(await look(shown)) + b"\n\n"
                shown = replace(query, history=False)
                await asyncio.sleep(query.interval_s)

        async def make() -> Response:
            return EventStream(events())

        def close() -> None:
            self.open -= 1

        self.open += 1
        return CancelOnDisconnect(make, close)
