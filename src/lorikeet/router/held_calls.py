"""Keeps the pauses and sleeps that hold at all backends of a router."""

from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlencode

from lorikeet.http.answer_stream import error_text
from lorikeet.http.logs import log
from lorikeet.router.apis import Reply
from lorikeet.router.backends import Backend
from lorikeet.router.connections import BackendConnectionError, Headers, plain_reason

PAUSE = "/pause"
RESUME = "/resume"
SLEEP = "/sleep"
WAKE = "/wake_up"
SCOPE = ("adapter", "tenant")
"""Fields of a query that limit a pause to some requests."""

Query = Sequence[tuple[str, str]]
"""Pairs of a query; a name may occur several times."""
KEY_HEADERS = (b"authorization", b"x-api-key")


class HeldCall(NamedTuple):
    """A call that stays in force until another call ends it.

    Attributes:
        path: the route.
        query: the query for backends.
        headers: headers of the caller, with the caller's key unless the router sends its own.
    """

    path: str
    query: Query
    headers: Headers

    @property
    def keys(self) -> Headers:
        """The caller's key, if backends get it."""
        return [each for each in self.headers if each[0] in KEY_HEADERS]


class HeldCalls:
    """Keeps the pauses and sleeps in force, and repeats them at backends that come up later.

    A backend that restarts, or joins, knows nothing of them, and would answer while its trainer counts on silence.
    """

    def __init__(self) -> None:
        self._calls: list[HeldCall] = []

    def __bool__(self) -> bool:
        return bool(self._calls)

    @property
    def sleeps(self) -> bool:
        """Whether the backends sleep by a call to this router."""
        return any(call.path == SLEEP for call in self._calls)

    def note(self, call: HeldCall, *, sleeps_on: bool) -> None:
        """Record a call that all backends have accepted.

        Args:
            call: the call.
            sleeps_on: whether a backend still sleeps after it.
        """
        if call.path == RESUME:
            paused = [held for held in self._calls if held.path == PAUSE and _scope(held.query) == _scope(call.query)]
            own = [held for held in paused if held.keys == call.keys]  # A tenant's key pauses its tenant only.
            self._calls = [held for held in self._calls if held not in (own or paused)]
        elif call.path == WAKE and not sleeps_on:
            self._calls = [held for held in self._calls if held.path not in (SLEEP, WAKE)]
        elif call not in self._calls:
            self._calls.append(call)

    async def repeat(self, backend: Backend) -> None:
        """Send all calls in force to a backend that has come up. Failures are logged."""
        for call in self._calls:
            try:
                reply = await backend.call("POST", with_query(call.path, call.query), call.headers)
            except BackendConnectionError as error:
                reply = Reply(502, plain_reason(error).encode())
            if reply.status >= 400:
                reason = error_text(reply.text)
                log.warning("backend is not paused as the others", backend=backend.url, path=call.path, reason=reason)


def _scope(query: Query) -> frozenset[tuple[str, str]]:
    return frozenset(each for each in query if each[0] in SCOPE)


def with_query(path: str, query: Query) -> str:
    """Return a path with its query."""
    return f"{path}?{urlencode(query)}" if query else path
