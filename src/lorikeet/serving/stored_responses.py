"""Stores answers of the responses API, which clients may retrieve again or continue."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec

from lorikeet.chat.responses_body import joined
from lorikeet.http.errors import ApiError, bad_request


class BackgroundRun:
    """Holds a response that is generated in the background, whether or not a client waits for it.

    Args:
        keeps_events: whether the stream's events are kept, so that clients can read them again.

    Attributes:
        task: the task that generates the response.
        events: the stream's events so far.
        keeps_events: whether the stream's events are kept.
    """

    def __init__(self, *, keeps_events: bool) -> None:
        self.keeps_events = keeps_events
        self.task: asyncio.Task[None] | None = None
        self.events: list[bytes] = []
        self._news = asyncio.Event()
        self._is_done = False

    def add(self, event: bytes) -> None:
        """Add an event to the stream."""
        if self.keeps_events:
            self.events.append(event)
            self._wake()

    def end(self) -> None:
        """End the stream."""
        self._is_done = True
        self._wake()

    async def follow(self, begin: int) -> AsyncIterator[bytes]:
        """Yield the events from number ``begin`` on, including future ones, until the stream ends."""
        at = begin
        while True:
            news = self._news
            while at < len(self.events):
                yield self.events[at]
                at += 1
            if self._is_done:
                return
            await news.wait()

    async def cancel(self) -> None:
        """Stop generating the response."""
        if self.task is not None and not self.task.done():
            self.task.cancel()
            await asyncio.wait([self.task])

    def _wake(self) -> None:
        news = self._news
        self._news = asyncio.Event()
        news.set()


@dataclass
class StoredResponse:
    """A stored response.

    Attributes:
        response_id: the response's id.
        conversation: the conversation that the response answers, as a JSON array of items.
        response: the complete response as JSON; empty while the response is generated.
        run: the background run; None for a response that its client waits for.
        snapshot: returns the present state of the response while it is generated.
        stored_s: time of storage, in seconds.
        counted_bytes: size at the time of storage, in bytes.
    """

    response_id: str
    conversation: bytes
    response: bytes = b""
    run: BackgroundRun | None = None
    snapshot: Callable[[], bytes] | None = None
    stored_s: float = 0.0
    counted_bytes: int = 0

    @property
    def is_running(self) -> bool:
        """Whether the response is still generated."""
        return self.snapshot is not None

    @property
    def size_bytes(self) -> int:
        """Estimated memory of the response in bytes."""
        events = sum(map(len, self.run.events)) if self.run is not None else 0
        return len(self.conversation) + len(self.response) + events

    def as_json(self) -> bytes:
        """Return the present state of the response."""
        return self.response if self.snapshot is None else self.snapshot()


@dataclass
class _Tenant:
    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    size_bytes: int = 0


class _Answer(msgspec.Struct):
    status: str
    output: msgspec.Raw


class StoredResponses:
    """Holds the stored responses of all tenants. A tenant sees only its own.

    Above a limit, the oldest responses of the tenant with the largest memory are dropped, except running ones.

    Args:
        max_number: largest number of responses; 0 for no storage.
        max_bytes: largest memory of all responses, in bytes.
        keep_s: seconds after which a response is dropped.
        now: returns the present time in seconds.
    """

    def __init__(
        self, max_number: int, max_bytes: int, keep_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_number = max_number
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self._now = now
        self._tenants: dict[str, _Tenant] = {}
        self.number = 0
        self.size_bytes = 0

    def put(self, tenant: str, stored: StoredResponse) -> None:
        """Store a response, or update the size of a stored response."""
        self._drop_old()
        self._take(tenant, stored.response_id)
        if not self.max_number or (stored.size_bytes > self._max_bytes and not stored.is_running):
            return
        stored.stored_s = self._now()
        stored.counted_bytes = stored.size_bytes
        mine = self._tenants.setdefault(tenant, _Tenant())
        mine.responses[stored.response_id] = stored
        self._count(mine, 1, stored.counted_bytes)
        while self.number > self.max_number or self.size_bytes > self._max_bytes:
            if not self._drop_one():
                break

    def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Return a stored response.

        Raises:
            ApiError: 404, the tenant has no response of this id.
        """
        self._drop_old()
        mine = self._tenants.get(tenant)
        stored = None if mine is None else mine.responses.get(response_id)
        if stored is None:
            raise ApiError(404, f"Response with id {response_id[:100]!r} not found.", param="response_id")
        return stored

    def delete(self, tenant: str, response_id: str) -> None:
        """Drop a response. An unknown id is ignored."""
        self._take(tenant, response_id)

    def conversation(self, tenant: str, response_id: str | None) -> bytes:
        """Return the conversation to continue, with its answer, as a JSON array of items.

        Raises:
            ApiError: 404, the response does not exist; 400, the response has failed or is still running.
        """
        if response_id is None:
            return b""
        try:
            stored = self.get(tenant, response_id)
        except ApiError as error:
            raise ApiError(404, f"Previous response: {error.message}", param="previous_response_id") from None
        answer = msgspec.json.decode(stored.as_json(), type=_Answer)
        if answer.status not in ("completed", "incomplete"):
            raise bad_request(f"The previous response is {answer.status}.", "previous_response_id")
        return joined(stored.conversation, bytes(answer.output))

    def _drop_old(self) -> None:
        oldest_s = self._now() - self._keep_s
        for tenant in list(self._tenants):
            responses = self._tenants[tenant].responses
            while responses and (first := next(iter(responses.values()))).stored_s < oldest_s:
                self._take(tenant, first.response_id)

    def _drop_one(self) -> bool:
        """Drop the oldest response of the tenant with the largest memory. Return whether a response was dropped."""
        for tenant, mine in sorted(self._tenants.items(), key=lambda each: -each[1].size_bytes):
            for stored in mine.responses.values():
                if not stored.is_running:
                    self._take(tenant, stored.response_id)
                    return True
        return False

    def _take(self, tenant: str, response_id: str) -> None:
        mine = self._tenants.get(tenant)
        stored = None if mine is None else mine.responses.pop(response_id, None)
        if mine is None or stored is None:
            return
        self._count(mine, -1, -stored.counted_bytes)
        if not mine.responses:
            del self._tenants[tenant]

    def _count(self, mine: _Tenant, number: int, size_bytes: int) -> None:
        mine.size_bytes += size_bytes
        self.size_bytes += size_bytes
        self.number += number
