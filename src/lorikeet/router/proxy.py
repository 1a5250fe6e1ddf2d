"""Sends one request to the backend that is found for it, and on to another one if that backend is lost."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from itertools import count
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lorikeet.api.errors import ApiError
from lorikeet.api.large_bodies import SMALL_BODY_BYTES
from lorikeet.api.streaming import CancelOnDisconnect, EventStream
from lorikeet.api.threads import off_the_loop
from lorikeet.bench.answer_stream import error_text
from lorikeet.core.ids import RequestId
from lorikeet.router.adapters import RoutedAdapter
from lorikeet.router.backend_router import BackendRouter
from lorikeet.router.backends import Backend, BackendRefused
from lorikeet.router.catalog import ModelCatalog
from lorikeet.router.connections import Broken, Headers, Reply, ServerLost, Unreachable
from lorikeet.router.health import HealthMonitor
from lorikeet.router.metrics import RouterMetrics
from lorikeet.router.proxied_request import BackendLost, PromptLengths, ProxiedRequest, RequestBody
from lorikeet.router.resumable_answer import (
    DONE,
    BackendFailed,
    PassthroughAnswer,
    ResumableAnswer,
    TokenUsage,
    why_not_resumable,
)

MOST_FAILURES = 3
"""A request is given up after so many failures in a row that are not the end of a backend."""
_PAUSE_S = 0.1
"""Before a request is tried for the third time; longer before the next."""
_FINAL = (501, 504)
"""Failures that are not tried again: what one backend does not know no other does, and what took too long would only
take that long once more."""
_BUSY = 429
_BUSY_PAUSE_S, _MOST_BUSY_PAUSE_S = 1.0, 10.0
"""Before a stream asks again where a backend was busy: if that does not say how long, and at most."""

_OF_THE_CONNECTION = frozenset(
    b"host connection keep-alive transfer-encoding te trailer upgrade expect content-length accept-encoding "
    b"proxy-authorization proxy-connection x-request-id origin sec-fetch-site".split()
)
"""Headers that are not passed on. What web pages may do is the router's own to say."""
_NOT_ANSWERED = frozenset(
    b"connection keep-alive transfer-encoding content-length content-encoding date server".split()
)
"""Of an answer; nor those by which a backend says what web pages may do."""


class StreamCut(Exception):
    """A stream ended before its end mark."""


class RouterParts(NamedTuple):
    """What the requests of a router share."""

    backend_router: BackendRouter
    catalog: ModelCatalog
    monitor: HealthMonitor
    metrics: RouterMetrics
    lengths: PromptLengths
    numbers: "count[int]"


class _Whole(msgspec.Struct):
    usage: TokenUsage | None = None


async def forward(http: Request, path: str, parts: RouterParts) -> Response:
    """Answer a request of one of the two completion routes.

    Raises:
        ApiError: it makes no sense, asks for an unknown model, or no backend can answer it.
    """
    content = await http.body()
    body = await off_the_loop(partial(RequestBody, path, content), len(content) - SMALL_BODY_BYTES)
    adapter = parts.catalog.find(body.model)
    prompt_tokens = parts.lengths.tokens(body)
    request_id = RequestId(f"{http.state.request_id}-{next(parts.numbers)}")
    passage = ProxyTask(http, ProxiedRequest(request_id, body, adapter, prompt_tokens), parts)
    if adapter is not None:
        parts.catalog.arrived(adapter, prompt_tokens)
    return CancelOnDisconnect(passage.answer, passage.close)


class ProxyTask:
    """One request with its answer. Whoever makes one must call :meth:`close` in the end.

    Args:
        http: the request, its body read.
        request: the same for the head.
        parts: of the router.

    Attributes:
        outcome: as it counts: ``complete``, ``failed``, or ``left`` if neither has been set.
    """

    def __init__(self, http: Request, request: ProxiedRequest, parts: RouterParts) -> None:
        self.outcome = "left"
        self._request = request
        self._parts = parts
        self._backend_router = parts.backend_router
        why_not = why_not_resumable(request.body)
        self._stream = ResumableAnswer(request.body) if why_not is None else PassthroughAnswer(request.body, why_not)
        self._request_id: str = http.state.request_id
        self._headers: Headers = [each for each in http.headers.raw if each[0] not in _OF_THE_CONNECTION]
        self._attempts = self._failures = 0
        self._is_there = self._has_sent = self._is_closed = False
        self._reply: Reply | None = None

    def close(self) -> None:
        """End it, whatever has come of it. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._stream.is_done:
            self._finish(self._stream.counts)
        self._backend_router.release(self._request)
        self._parts.metrics.ended(self.outcome)
        if self._reply is not None:
            self._reply.close()

    async def answer(self) -> Response:
        """Return the answer: whole, or a stream that has begun at a backend.

        Raises:
            ApiError: no backend can answer.
        """
        streams = self._request.body.streams
        try:
            reply = await (self.open() if streams else self.read_whole())
        except Exception:
            self.outcome = "failed"
            raise
        if streams and reply.status == 200:
            return EventStream(self.events(reply))
        if streams:
            self.outcome = "failed"
        self.close()  # before a client that reads slowly has read it
        answer = Response(await reply.read(), reply.status)  # which has been read
        answer.raw_headers += [each for each in reply.headers if not _is_withheld(each[0])]
        return answer

    # --- one backend after the other -----------------------------------------------------------------

    async def open(self) -> Reply:
        """Have a backend take the body, or what is left of it; return its answer with nothing read but the head.

        Raises:
            ApiError: none can.
        """
        while True:
            backend = await self._backend_router.place(self._request)
            self._is_there = False
            try:
                reply = self._reply = await self._request.unless_lost(partial(self._ask, backend))
                if reply.status >= 400:
                    await self._request.unless_lost(reply.read)
            except (BackendLost, ServerLost) as error:
                await self._leave(error)
                continue
            if reply.status < 500 or reply.status in _FINAL or self._failures == MOST_FAILURES:
                return reply
            await self._leave(StreamCut(f"{backend.url} answers {reply.status}"))

    async def _ask(self, backend: Backend) -> Reply:
        """Send the body. A backend that has lost the adapter is asked again after it has loaded it."""
        adapter = self._request.adapter
        try:
            if adapter is not None and not backend.holds(adapter):
                await self._load(backend, adapter)
            reply = await self._send(backend)
            if reply.status != 404 or adapter is None:
                return reply
            reply.close()
            self._is_there = False
            backend.forget(adapter)
            await self._load(backend, adapter)
            return await self._send(backend)
        except BackendRefused as error:
            raise ApiError(400 if error.status < 500 else 502, str(error)) from error

    async def _load(self, backend: Backend, adapter: RoutedAdapter) -> None:
        """Have a backend load the adapter that it was to have.

        Raises:
            Lost: it does not, and another may.
            Refused: no backend does.
        """
        try:
            await backend.load(adapter)
        except BackendRefused as error:
            if self._backend_router.refused(self._request, error):
                raise BackendLost from error
            raise

    async def _send(self, backend: Backend) -> Reply:
        body, stream = self._request.body, self._stream
        content = body.content
        if body.streams:
            tokens = await backend.tokenize(body.model, stream.text) if stream.needs_tokens else None
            content = stream.next_body(tokens)
        # Of its own for every attempt: the one before may still be known at the same backend.
        request_id = f"{self._request_id}-{self._attempts}" if self._attempts else self._request_id
        self._attempts += 1
        headers = [*self._headers, (b"x-request-id", request_id.encode())]
        if backend.has_own_key:
            headers = [each for each in headers if each[0] != b"authorization"]
        self._is_there = True
        return await backend.open("POST", body.path, headers, content)

    async def _leave(self, error: Exception) -> None:
        """Give a backend up for this request, after what went wrong there.

        Raises:
            ApiError: too much has gone wrong.
        """
        backend = self._request.backend
        self._backend_router.release(self._request)
        if self._reply is not None:
            self._reply.close()
        if self._is_there and isinstance(error, BackendLost | Broken):
            self._request.count_loss()
        if isinstance(error, Unreachable) and backend is not None:
            self._backend_router.down(backend, f"cannot be reached: {error}")
        elif not isinstance(error, BackendLost):
            if backend is not None:
                self._request.failed_at.add(backend.replica)
                self._parts.monitor.suspect(backend)
            self._failures += 1
            if self._failures > MOST_FAILURES:
                raise ApiError(502, f"No backend could answer this request; at last: {error!r}")
            await asyncio.sleep(_PAUSE_S * (self._failures - 1))
        if not self._has_sent:
            self._parts.metrics.retried.inc()

    # --- whole answers -------------------------------------------------------------------------------

    async def read_whole(self) -> Reply:
        """Return an answer that has been read; one that breaks off is asked for anew."""
        while True:
            reply = await self.open()
            try:
                content = await self._request.unless_lost(reply.read)
            except (BackendLost, ServerLost) as error:
                await self._leave(error)
                continue
            if reply.status == 200:
                self._finish(_read_usage(content))
            else:
                self.outcome = "failed"
            return reply

    def _finish(self, counts: TokenUsage | None) -> None:
        """The answer is whole. A second call does nothing."""
        if self.outcome == "complete":
            return
        self.outcome = "complete"
        if counts is not None:  # else there is nothing to learn
            self._parts.lengths.learn(self._request.body, counts.prompt_tokens)
            if self._request.adapter is not None:
                self._parts.catalog.answered(self._request.adapter, counts.completion_tokens)
            self._backend_router.finished(self._request, counts.completion_tokens)

    # --- streams -------------------------------------------------------------------------------------

    async def events(self, reply: Reply) -> AsyncIterator[bytes]:
        """Yield what the client gets, beginning with a reply that has been opened."""
        stream = self._stream
        while True:
            error: Exception | None = None
            try:
                async for piece in self._read_events(reply):
                    yield piece
            except (BackendLost, StreamCut, BackendFailed, ServerLost) as failure:
                error = failure
            if error is None or stream.is_done:
                return
            if stream.is_whole:
                self._finish(stream.counts)
                yield stream.closing()
                return
            try:
                reply = await self._go_on(error)
            except ApiError as refusal:
                self.outcome = "failed"
                yield b"\n" + (error.event if isinstance(error, BackendFailed) else _error_event(refusal)) + DONE
                return

    async def _read_events(self, reply: Reply) -> AsyncIterator[bytes]:
        """Yield what one backend's answer adds.

        Raises:
            Cut: it ended before its end mark; further errors as they come.
        """
        stream = self._stream
        while piece := await self._request.unless_lost(reply.piece):
            if out := stream.feed(piece):
                self._has_sent, self._failures = True, 0
                yield out
                self._backend_router.started(self._request)
            if stream.failure is not None:
                raise stream.failure
        if not stream.is_done:
            raise StreamCut("its stream ended before its end mark")

    async def _go_on(self, error: Exception) -> Reply:
        """Return another backend's answer to what is left of the body.

        Raises:
            ApiError: the answer cannot go on.
        """
        self._request.output_tokens = self._stream.tokens
        pause_s = 0.0
        while True:
            await self._leave(error)
            if self._stream.stuck is not None:
                why = self._stream.stuck
                raise ApiError(503, f"The backend of this answer was lost, and it cannot go on at another: {why}.")
            await asyncio.sleep(pause_s)
            reply = await self.open()
            if reply.status == 200:
                break
            said = error_text(await reply.read())
            if reply.status != _BUSY or self._failures == MOST_FAILURES:
                raise ApiError(reply.status, said)
            error, pause_s = StreamCut(said), _busy_pause_s(reply.headers)
        if self._has_sent:
            self._parts.metrics.continued.inc()
        return reply


def _is_withheld(header: bytes) -> bool:
    return header in _NOT_ANSWERED or header.startswith(b"access-control-")


def _read_usage(content: bytes) -> TokenUsage | None:
    try:
        return msgspec.json.decode(content, type=_Whole).usage
    except msgspec.DecodeError:
        return None  # a server that does not count


def _busy_pause_s(headers: Headers) -> float:
    """Return how long a busy backend asks to be left alone."""
    said = next((value for name, value in headers if name == b"retry-after"), b"")
    return min(float(said), _MOST_BUSY_PAUSE_S) if said.isdigit() else _BUSY_PAUSE_S


def _error_event(error: ApiError) -> bytes:
    return b"data: " + msgspec.json.encode(error.body()) + b"\n\n"
