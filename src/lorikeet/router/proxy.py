"""Proxies a request to its chosen backend, and resumes it at another backend if the first is lost."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lorikeet.cluster.tasks import BackgroundTasks
from lorikeet.core.ids import RequestId
from lorikeet.http.answer_stream import error_text
from lorikeet.http.anthropic_errors import MESSAGES_PATH, anthropic_error
from lorikeet.http.body_gate import SMALL_BODY_BYTES, BodyGate
from lorikeet.http.errors import ApiError, bad_request, hide_paths
from lorikeet.http.logs import log
from lorikeet.http.sessions import SESSION_HEADER, session_of
from lorikeet.http.streaming import CancelOnDisconnect, DirectBody, EventStream
from lorikeet.http.tenancy import check_use
from lorikeet.http.threads import off_the_loop
from lorikeet.router.accounts import Account, open_account
from lorikeet.router.adapters import RoutedAdapter
from lorikeet.router.backend_router import BackendRouter
from lorikeet.router.backends import Backend, BackendRefused
from lorikeet.router.catalog import ModelCatalog
from lorikeet.router.connections import (
    BackendConnectionError,
    BackendResponse,
    BackendUnreachable,
    ConnectionBroken,
    Headers,
    LocalSocketError,
    plain_reason,
)
from lorikeet.router.health import HealthMonitor
from lorikeet.router.held_calls import KEY_HEADERS, HeldCalls
from lorikeet.router.metrics import RouterMetrics
from lorikeet.router.proxied_request import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    BackendLost,
    PromptLengths,
    ProxiedRequest,
    RequestBody,
)
from lorikeet.router.records import RouteRecord, RouteRecords
from lorikeet.router.resumable_answer import (
    DONE,
    BackendFailed,
    NamedEventsAnswer,
    PassthroughAnswer,
    ReportedUsage,
    ResumableAnswer,
    TokenUsage,
    why_not_resumable,
)
from lorikeet.router.stats import RouterStats
from lorikeet.router.stored_answers import StoredAnswers
from lorikeet.tenants.keys import OPERATOR, Access
from lorikeet.tenants.tenants import Tenants

MAX_BODY_BYTES = 64 * 2**20
"""Most bytes of a request body; a larger one gets 413. Most backends allow less."""
MAX_FAILURES = 3
"""Failures in a row after which a request fails, without lost backends."""
_PAUSE_S = 0.1
"""Seconds before the third attempt; the pause grows with each further one."""
MAX_COPIES = 32
"""Most copies of requests for shadows of splits at a time. Further ones are not sent."""
_NOT_RETRIED = (501, 504)
"""Statuses that are not retried: other backends would not support the request either, or time out again."""
_TOO_MANY_REQUESTS = 429
_NO_ROOM = (_TOO_MANY_REQUESTS, 503)
"""Statuses of a full backend, whose requests another backend may have room for."""
_BUSY_PAUSE_S = 1.0
"""Seconds before a stream is resumed at a busy backend that sends no Retry-After."""
_MAX_BUSY_PAUSE_S = 10.0
"""Most seconds before a stream is resumed at a busy backend."""

_WITHHELD_REQUEST_HEADERS = frozenset(
    b"host connection keep-alive transfer-encoding te trailer upgrade expect content-length accept-encoding "
    b"proxy-authorization proxy-connection x-request-id origin sec-fetch-site".split()
)
"""Request headers that are not passed on. The router itself decides which web pages may use it."""
_WITHHELD_RESPONSE_HEADERS = frozenset(
    b"connection keep-alive transfer-encoding content-length content-encoding date server".split()
)
"""Response headers that are not passed on; nor are those of CORS (``access-control-…``)."""

_T = TypeVar("_T")


class StreamCut(Exception):
    """A backend did not answer, or its stream ended before the end mark.

    Args:
        message: the error message for clients.
        reason: reason under which the failure is counted; empty to count nothing.
    """

    def __init__(self, message: str, reason: str = "broken") -> None:
        super().__init__(message)
        self.reason = reason


class RouterParts(NamedTuple):
    """Holds the parts of a router that its requests share.

    Attributes:
        body_gate: bounds the bytes of large bodies, which are kept until their answers have ended.
        stored: the stored answers, with their backends.
        copies: the tasks that answer copies of requests for the shadows of splits.
        tasks: other work that goes on after its request.
        running: the requests under way.
        held: pauses and sleeps that hold at all backends.
        records: the latest requests.
        tenants: keys of the registry's database, with scopes and limits; None for a router without tenants.
        isolates_keys: whether requests of different API keys must not share KV.
    """

    backend_router: BackendRouter
    catalog: ModelCatalog
    monitor: HealthMonitor
    metrics: RouterMetrics
    stats: RouterStats
    lengths: PromptLengths
    request_numbers: "count[int]"
    body_gate: BodyGate
    stored: StoredAnswers
    copies: BackgroundTasks
    tasks: BackgroundTasks
    running: "set[ProxyTask]"
    held: HeldCalls
    records: RouteRecords
    tenants: Tenants | None
    isolates_keys: bool


class _Whole(msgspec.Struct):
    id: str = ""
    usage: ReportedUsage | None = None


async def forward(http: Request, path: str, parts: RouterParts) -> Response:
    """Proxy a request whose body names a model.

    Raises:
        ApiError: the body is not valid or finds no room beside other bodies, the model or response is unknown, or no
            backend can answer.
    """
    announced = http.headers.get("content-length", "")
    held_bytes = int(announced) if announced.isdigit() else MAX_BODY_BYTES
    if held_bytes > SMALL_BODY_BYTES:
        await parts.body_gate.enter(held_bytes)
    else:
        held_bytes = 0
    try:
        content = await http.body()
        if held_bytes > len(content):  # The client did not announce the length.
            parts.body_gate.leave(held_bytes - len(content))
            held_bytes = len(content)
        tenant = _owner_of_kv(http) if parts.isolates_keys else ""
        body = await off_the_loop(partial(RequestBody, path, content, tenant), len(content) - SMALL_BODY_BYTES)
        session = session_of(http.headers.get(SESSION_HEADER), http.state.tenant)
        split = parts.catalog.without_base(body.model)
        access: Access = http.state.access
        if split in parts.catalog.splits:
            check_use(access, (split,), body.model)
            access = OPERATOR  # A key that may use the split may use its versions by it.
            version = parts.catalog.version_of(split, body.user or session or http.state.request_id)
            whole = body
            body = await off_the_loop(partial(whole.with_fields, model=version), len(content) - SMALL_BODY_BYTES)
            parts.metrics.count_split(split, version, "served")
            _copy_to_shadows(http, split, whole, parts)
        target = parts.catalog.find(body.model, access)
        if target.model != body.model:
            body = await off_the_loop(partial(body.with_fields, model=target.model), len(content) - SMALL_BODY_BYTES)
        adapter = target.adapter
        prompt_tokens = parts.lengths.tokens(body)
        request_id = RequestId(f"{http.state.request_id}-{next(parts.request_numbers)}")
        request = ProxiedRequest(request_id, body, adapter, prompt_tokens, session, target.mixed, target.feature)
        if target.feature is not None:
            if not parts.catalog.has(target.feature):
                why = f"No backend of this router {target.feature}, as `{body.model[:200]}` needs."
                raise bad_request(why, "model")
            backends = parts.backend_router.backends
            request.failed_at = {replica for replica, each in backends.items() if not each.has(target.feature)}
        if body.previous_response:
            keeper = _keeper(parts, body.previous_response, http.state.tenant, "previous_response_id")
            if not keeper.is_open:
                raise ApiError(503, f"{keeper.replica} keeps the previous response and takes no requests now.")
            request.failed_at = parts.backend_router.backends.keys() - {keeper.replica}
        account = await open_account(parts.tenants, http, body, adapter, parts.catalog, parts.metrics, prompt_tokens)
        try:
            task = ProxyTask(http, request, parts, held_bytes, account=account)
        except BaseException:
            if account is not None:
                account.cancel()
            raise
    except BaseException:
        parts.body_gate.leave(held_bytes)
        raise
    if adapter is not None:
        parts.catalog.on_request(adapter, prompt_tokens)
    return CancelOnDisconnect(task.answer, task.close)


def _owner_of_kv(http: Request) -> str:
    """Return the tenant of a request's KV: the group of a key that shares its KV, else the sender."""
    key = http.state.access.key
    if key is not None and key.settings.cache_group:
        return f"\1{key.settings.cache_group}"  # Names of tenants cannot begin with a control character.
    tenant: str = http.state.tenant
    return tenant


def _copy_to_shadows(http: Request, split: str, body: RequestBody, parts: RouterParts) -> None:
    """Send copies of a request of a split to the shadows of the split in the background."""
    if not body.generates:
        return
    for shadow in parts.catalog.splits[split].copied_to(split, http.state.request_id):
        adapter = parts.catalog.adapters.get(shadow)
        is_sent = adapter is not None and len(parts.copies) < MAX_COPIES
        parts.metrics.count_split(split, shadow, "shadow" if is_sent else "skipped")
        if adapter is not None and is_sent:
            parts.copies.run(_answer_copy(http, adapter, body, parts))


async def _answer_copy(http: Request, adapter: RoutedAdapter, body: RequestBody, parts: RouterParts) -> None:
    """Answer a copy of a request under another adapter, and drop the answer. Its figures count."""
    changed: dict[str, Any] = {"model": adapter.name, "stream": None, "stream_options": None, "expect_digest": None}
    if body.path in (COMPLETIONS, CHAT):
        changed["service_tier"] = "flex"  # Lorikeet answers such requests when it is idle.
    elif body.path == RESPONSES:
        changed["store"] = False
    number = next(parts.request_numbers)
    size = len(body.content)
    try:
        if size > SMALL_BODY_BYTES:
            await parts.body_gate.enter(size)
        held_bytes = size if size > SMALL_BODY_BYTES else 0
        try:
            copied = await off_the_loop(partial(body.with_fields, **changed), size - SMALL_BODY_BYTES)
            request_id = f"{http.state.request_id}-shadow-{number}"
            request = ProxiedRequest(RequestId(request_id), copied, adapter, parts.lengths.tokens(copied))
            task = ProxyTask(http, request, parts, held_bytes, request_id)
        except BaseException:
            parts.body_gate.leave(held_bytes)
            raise
        try:
            await task.answer()
        finally:
            task.close()
        if task.outcome != "complete":
            log.warning("a copy of a request was not answered", adapter=adapter.name, outcome=task.outcome)
    except ApiError as error:
        log.warning("a copy of a request was not answered", adapter=adapter.name, error=error.message)


def _keeper(parts: RouterParts, answer_id: str, tenant: str, param: str) -> Backend:
    """Return the backend that keeps an answer of a tenant.

    Raises:
        ApiError: 404, the backend is unknown or no longer exists.
    """
    replica = parts.stored.find(answer_id, tenant)
    backend = None if replica is None else parts.backend_router.backends.get(replica)
    if backend is not None:
        return backend
    why = (
        "this router knows only those that it has forwarded" if replica is None else "the backend that kept it is gone"
    )
    raise ApiError(404, f"Response with id {answer_id[:100]!r} not found; {why}.", param=param)


async def forward_stored(http: Request, parts: RouterParts) -> Response:
    """Proxy a request for a stored answer of ``/v1/responses`` to the backend that stores the answer.

    Raises:
        ApiError: 404, the backend is unknown; 502, the backend cannot be reached.
    """
    backend = _keeper(parts, http.path_params["response_id"], http.state.tenant, "response_id")
    headers = [*passed_headers(http, backend), (b"x-request-id", http.state.request_id.encode())]
    path = f"{http.url.path}?{http.url.query}" if http.url.query else http.url.path
    wants_stream = http.query_params.get("stream") == "true"
    content = await http.body()
    reply: BackendResponse | None = None

    def close() -> None:
        if reply is not None:
            reply.close()

    async def make() -> Response:
        nonlocal reply
        try:
            reply = await backend.open(http.method, path, headers, content, is_stream=wants_stream)
            if wants_stream and reply.status == 200:
                return EventStream(_pieces(reply))
            answer = Response(await reply.read(), reply.status)
        except BackendConnectionError as error:
            raise ApiError(502, f"The backend that keeps this response: {plain_reason(error)}.") from error
        answer.raw_headers += [each for each in reply.headers if not is_withheld(each[0])]
        return answer

    return CancelOnDisconnect(make, close)


async def _pieces(reply: BackendResponse) -> AsyncIterator[bytes]:
    try:
        while piece := await reply.piece():
            yield piece
    except BackendConnectionError as error:
        yield b"\n" + _last_events(ApiError(502, f"The backend was lost: {plain_reason(error)}."), RESPONSES)


def passed_headers(http: Request, backend: Backend) -> Headers:
    """Return the client's headers that are passed to a backend, and the client's tenant if the backend wants it."""
    passed = [
        each
        for each in http.headers.raw
        if each[0] not in _WITHHELD_REQUEST_HEADERS and not (backend.replaces_keys and each[0] in KEY_HEADERS)
    ]
    if name := backend.tenant_header:
        passed = [each for each in passed if each[0] != name]  # The backend trusts it.
        if http.state.tenant:
            passed.append((name, http.state.tenant.encode()))
    return passed


class ProxyTask:
    """Proxies one request and its answer. The caller must call :meth:`close` at the end.

    Args:
        http: the client's request, whose body has been read.
        request: state of the request, shared with the backend router.
        parts: parts of the router.
        held_bytes: number of bytes of the body, which the gate counts until the end.
        request_id: id of the request at the backends; empty for the client's.
        account: the account of a tenant's request; None for others.

    Attributes:
        outcome: the outcome in the metrics: ``complete``, ``refused`` or ``failed``; ``left`` if never set.
    """

    def __init__(
        self,
        http: Request,
        request: ProxiedRequest,
        parts: RouterParts,
        held_bytes: int,
        request_id: str = "",
        account: Account | None = None,
    ) -> None:
        self.outcome = "left"
        self._account = account
        self._prompt_tokens = request.prompt_tokens
        self._held_bytes = held_bytes
        self._request = request
        self._parts = parts
        self._backend_router = parts.backend_router
        self._stream = _stream_of(request.body, is_counted=account is not None)
        self._http = http
        self._request_id: str = request_id or http.state.request_id
        self._attempts = self._failures = 0
        self._is_sent = self._has_sent = self._is_closed = False
        self._reply: BackendResponse | None = None
        self._client: DirectBody | None = None
        self._output_tokens = 0
        self._sent_id = ""
        adapter = None if request.adapter is None else request.adapter.name
        request.record = RouteRecord(self._request_id, self.tenant, request.body.model, adapter, request.body.path)
        parts.records.begin(request.record)
        parts.stats.begin(request)
        parts.running.add(self)

    @property
    def tenant(self) -> str:
        """Tenant of the client."""
        tenant: str = self._http.state.tenant
        return tenant

    @property
    def ids(self) -> set[str]:
        """Ids by which the client may name the request."""
        return {self._request_id, self.sent_id} - {""}

    @property
    def sent_id(self) -> str:
        """Id of the request at its backend; empty before it is sent."""
        own = self._request.body.fields.get("request_id")
        return own if isinstance(own, str) and self._sent_id else self._sent_id

    @property
    def backend(self) -> Backend | None:
        """The backend that has the request; None before it is sent."""
        return self._request.backend if self._sent_id else None

    def close(self) -> None:
        """Release the backend and count the outcome. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._parts.running.discard(self)
        self._parts.body_gate.leave(self._held_bytes)
        if self._stream.is_done:
            self._finish(self._stream.counts)
        self._backend_router.release(self._request)
        self._parts.metrics.ended(self.outcome)
        if self._account is not None:
            self._account.close(self.outcome, self._prompt_tokens, self._output_tokens or self._stream.tokens)
        tokens = self._output_tokens or self._stream.tokens
        self._parts.stats.end(self._request, self.outcome, tokens)
        if self._request.record is not None:
            self._request.record.on_ended(self.outcome, tokens)
        if self._reply is not None:
            self._reply.close()

    async def answer(self) -> Response:
        """Return the whole answer, or a stream that a backend has begun.

        Raises:
            ApiError: no backend can answer.
        """
        streams = self._request.body.streams
        if streams and self._stream.is_whole:  # The client lacks only the last events.
            self.outcome = "complete"
            return Response(self._stream.closing(), media_type="text/event-stream")
        try:
            reply = await (self.open_response() if streams else self.read_whole())
        except Exception as error:
            self.outcome = _outcome_of(error.status if isinstance(error, ApiError) else 500)
            raise
        if streams and reply.status == 200:
            return EventStream(self.events(reply), write_to=self._write_to)
        if reply.status != 200:
            self.outcome = _outcome_of(reply.status)
        self.close()  # A slow client may still be reading the response.
        answer = Response(await reply.read(), reply.status)  # The response has been read already.
        headers = [each for each in reply.headers if not is_withheld(each[0])]
        if self._request.backend is not None:
            headers = [_without_address(each, self._request.backend.url) for each in headers]
        answer.raw_headers += headers
        return answer

    # --- one backend after the other -----------------------------------------------------------------

    async def open_response(self) -> BackendResponse:
        """Send the body, or the rest of it, to a backend. Return the response after its headers.

        Raises:
            ApiError: no backend can answer.
        """
        while True:
            backend = await self._backend_router.place(self._request)
            self._is_sent = False
            try:
                reply = self._reply = await self._request.run_unless_lost(partial(self._ask, backend))
                if reply.status != 200:
                    await self._request.run_unless_lost(reply.read)
            except (BackendLost, BackendConnectionError) as error:
                await self._give_up_backend(error)
                continue
            if self._move_on(backend, reply):
                continue
            if reply.status < 500 or reply.status in _NOT_RETRIED or self._failures == MAX_FAILURES:
                return reply
            await self._give_up_backend(StreamCut(f"{backend.replica} answers {reply.status}", "status"))

    def _move_on(self, backend: Backend, reply: BackendResponse) -> bool:
        """Take a request away from a full backend if another one may have room. Return whether it was taken away."""
        if reply.status not in _NO_ROOM or any(name.startswith(b"x-ratelimit-") for name, _ in reply.headers):
            return False  # Limits of the client's key hold at the other backends, too.
        self._request.failed_at.add(backend.replica)
        self._backend_router.on_full(backend, time.monotonic() + _busy_pause_s(reply.headers))
        if not self._backend_router.has_other(self._request):
            return False
        self._backend_router.release(self._request)
        reply.close()
        if reply.status != _TOO_MANY_REQUESTS:
            self._parts.monitor.check_soon(backend)  # It may be draining.
        self._parts.metrics.moved.inc()
        return True

    async def _ask(self, backend: Backend) -> BackendResponse:
        """Send the body. If the backend has lost the adapter, load it there and send the body again."""
        adapter = self._request.adapter
        feature = self._request.feature
        if feature is not None and not backend.has(feature):
            raise ApiError(503, f"No backend that {feature} takes requests now.", headers={"Retry-After": "1"})
        try:
            for each in self._request.adapters:
                if not backend.holds(each):
                    await self._load(backend, each)
            reply = await self._send(backend)
            if reply.status != 404 or adapter is None:
                return reply
            reply.close()
            self._is_sent = False
            for each in self._request.adapters:
                backend.forget(each)
                await self._load(backend, each)
            return await self._send(backend)
        except BackendRefused as error:
            raise ApiError(400 if error.status < 500 else 502, hide_paths(str(error))) from error

    async def _load(self, backend: Backend, adapter: RoutedAdapter) -> None:
        """Load the request's adapter again at a backend that was expected to have it.

        Raises:
            BackendLost: this backend cannot load the adapter, but another backend may.
            BackendRefused: no backend can load the adapter.
        """
        try:
            await backend.load(adapter)
        except BackendRefused as error:
            if self._backend_router.on_adapter_refused(backend, adapter, error):
                self._request.failed_at.add(backend.replica)
                if not self._request.mixed or self._backend_router.has_other(self._request):
                    raise BackendLost from error
            raise

    async def _send(self, backend: Backend) -> BackendResponse:
        body = self._request.body
        stream = self._stream
        content = body.content
        if body.streams:
            if body.is_chat and stream.text and not backend.api.continues_chats:
                raise ApiError(503, f"The backend of this answer was lost, and {backend.replica} cannot resume a chat.")
            tokens = await backend.tokenize(body.model, stream.text) if stream.needs_tokens else None
            content = stream.next_body(tokens)
        content = backend.body_for(content, body.model, self._request.adapter)
        # Each attempt has a new id, since the backend may still have the id of the previous attempt.
        request_id = f"{self._request_id}-{self._attempts}" if self._attempts else self._request_id
        self._attempts += 1
        headers = [*passed_headers(self._http, backend), (b"x-request-id", request_id.encode())]
        self._sent_id = request_id
        if self._request.record is not None:
            self._request.record.sent_id = self.sent_id
        self._is_sent = True
        return await backend.open("POST", body.path, headers, content, is_stream=body.streams)

    async def _give_up_backend(self, error: Exception) -> None:
        """Remove the request from its backend after ``error``, and mark the backend as down or as avoided.

        Raises:
            ApiError: 502, the request has failed too often.
        """
        backend = self._request.backend
        self._backend_router.release(self._request)
        if self._reply is not None:
            self._reply.close()
        if backend is not None:
            _count_failure(backend, error)
        if self._is_sent and isinstance(error, BackendLost | ConnectionBroken):
            self._request.count_loss()
        if isinstance(error, BackendUnreachable) and backend is not None:
            self._backend_router.on_backend_down(backend, f"cannot be reached: {error}")
        elif not isinstance(error, BackendLost):
            if backend is not None:
                self._request.failed_at.add(backend.replica)
                self._parts.monitor.check_soon(backend)
            self._failures += 1
            if self._failures > MAX_FAILURES:
                raise ApiError(502, f"No backend could answer this request; the last error: {plain_reason(error)}.")
            await asyncio.sleep(_PAUSE_S * (self._failures - 1))
        if not self._has_sent:
            self._parts.metrics.retried.inc()

    # --- whole answers -------------------------------------------------------------------------------

    async def read_whole(self) -> BackendResponse:
        """Return a whole response. If the response breaks off, send the request again."""
        while True:
            reply = await self.open_response()
            try:
                content = await self._request.run_unless_lost(reply.read)
            except (BackendLost, BackendConnectionError) as error:
                await self._give_up_backend(error)
                continue
            if reply.status == 200:
                whole = _read_whole(content)
                self._keep(whole.id)
                self._finish(_counts(whole.usage))
            return reply

    def _keep(self, answer_id: str) -> None:
        """Record the backend that keeps a stored answer."""
        body = self._request.body
        backend = self._request.backend
        if answer_id and backend is not None and body.path == RESPONSES and body.fields.get("store") is not False:
            self._parts.stored.put(answer_id, self._http.state.tenant, backend.replica)

    def _finish(self, counts: TokenUsage | None) -> None:
        """Count a complete answer. A second call does nothing."""
        if self.outcome == "complete":
            return
        self.outcome = "complete"
        if counts is not None:
            self._parts.lengths.learn(self._request.body, counts.prompt_tokens)
            if self._request.adapter is not None:
                self._parts.catalog.on_answer(self._request.adapter, counts.completion_tokens)
            self._output_tokens = counts.completion_tokens
            self._prompt_tokens = counts.prompt_tokens
            self._backend_router.on_finished(self._request, counts.completion_tokens)

    # --- streams -------------------------------------------------------------------------------------

    def _write_to(self, client: DirectBody) -> None:
        self._client = client

    async def events(self, reply: BackendResponse) -> AsyncIterator[bytes]:
        """Yield the client's events, beginning with an opened response, or write them to the client's connection."""
        stream = self._stream
        while True:
            error: Exception | None = None
            try:
                async for piece in self._read_events(reply):
                    yield piece
            except (BackendLost, StreamCut, BackendFailed, BackendConnectionError) as failure:
                error = failure
            if error is None or stream.is_done:
                return
            if stream.is_whole:
                self._finish(stream.counts)
                yield stream.closing()
                return
            try:
                reply = await self._resume(error)
            except ApiError as refusal:
                self.outcome = "failed"
                own = _last_events(refusal, self._request.body.path)
                yield b"\n" + (error.event + DONE if isinstance(error, BackendFailed) else own)
                return

    async def _read_events(self, reply: BackendResponse) -> AsyncIterator[bytes]:
        """Yield the client's events from one backend's response, or write them directly while the client reads.

        Raises:
            StreamCut: the response ended before its end mark.
            BackendFailed: the backend reported an error.
            BackendLost, BackendConnectionError: the backend was lost.
        """
        stream = self._stream
        request = self._request
        client = self._client
        request.close_if_lost(reply.close)
        while piece := await self._piece(reply):
            if out := self._fed(piece):
                if client is not None and client.is_open:
                    client.write(out)
                else:
                    yield out
                if not request.is_started:
                    self._backend_router.on_first_token(request)
                    self._parts.stats.first_token(request)
                    if request.record is not None:
                        request.record.on_first_token()
            if stream.failure is None and request.is_started and client is not None and client.is_open:
                await self._unless_lost(partial(reply.pass_on, partial(self._pass_on, client)))
            if stream.failure is not None:
                raise stream.failure
        if not stream.is_done:
            raise StreamCut("the stream ended before its end mark")

    def _fed(self, piece: bytes) -> bytes:
        """Add bytes from a backend. Return the completed events for the client."""
        stream = self._stream
        if out := stream.feed(piece):
            self._has_sent = True
            self._failures = 0
            if isinstance(stream, NamedEventsAnswer) and stream.answer_id:
                self._keep(stream.answer_id)
        return out

    def _pass_on(self, client: DirectBody, piece: bytes) -> bool:
        """Write the events of a piece to the client. Return whether the next piece may follow directly."""
        if out := self._fed(piece):
            client.write(out)
        return self._stream.failure is None and client.is_open

    async def _piece(self, reply: BackendResponse) -> bytes:
        """Return the next bytes of a response; empty at the end. The response is closed if its backend is lost."""
        return await self._unless_lost(reply.piece)

    async def _unless_lost(self, read: Callable[[], Awaitable[_T]]) -> _T:
        """Read from a response, and return what was read.

        Raises:
            BackendLost: the backend was lost, which closed the response.
        """
        try:
            found = await read()
        except BackendConnectionError:
            if not self._request.is_lost:
                raise
            raise BackendLost from None
        if self._request.is_lost:
            raise BackendLost
        return found

    async def _resume(self, error: Exception) -> BackendResponse:
        """Send the rest of the body to another backend, and return its response.

        Raises:
            ApiError: the answer cannot be resumed.
        """
        self._request.output_tokens = self._stream.tokens
        pause_s = 0.0
        while True:
            await self._give_up_backend(error)
            if self._stream.stuck is not None:
                why = self._stream.stuck
                raise ApiError(
                    503, f"The backend of this answer was lost, and the answer cannot be resumed at another: {why}."
                )
            await asyncio.sleep(pause_s)
            reply = await self.open_response()
            if reply.status == 200:
                break
            said = error_text(await reply.read())
            if reply.status != _TOO_MANY_REQUESTS or self._failures == MAX_FAILURES:
                raise ApiError(reply.status, said)
            error = StreamCut(said, "")
            pause_s = _busy_pause_s(reply.headers)
        if self._has_sent:
            self._parts.metrics.continued.inc()
        return reply


def _outcome_of(status: int) -> str:
    """Return the outcome of a request whose answer has a status other than 200."""
    return "refused" if 400 <= status < 500 or status == 501 else "failed"


def is_withheld(header: bytes) -> bool:
    """Return whether a header of a backend's answer is not passed on."""
    return header in _WITHHELD_RESPONSE_HEADERS or header.startswith(b"access-control-")


def _without_address(header: tuple[bytes, bytes], url: str) -> tuple[bytes, bytes]:
    """Return a header. A redirect loses the backend's address, which clients cannot use."""
    name, value = header
    return (name, value.removeprefix(url.encode()) or b"/") if name == b"location" else header


def _count_failure(backend: Backend, error: Exception) -> None:
    """Count a failure of a backend, except an already counted one, or a failure of this machine."""
    if isinstance(error, StreamCut):
        reason = error.reason
    elif isinstance(error, BackendFailed):
        reason = "error"
    elif isinstance(error, BackendLost | LocalSocketError):
        reason = ""
    else:
        reason = "broken" if isinstance(error, ConnectionBroken) else "unreachable"
    if reason:
        backend.failed(reason, str(error))


def _stream_of(body: RequestBody, *, is_counted: bool) -> ResumableAnswer | PassthroughAnswer:
    why_not = why_not_resumable(body)
    if body.received is not None:
        why_not = why_not if body.streams else "it is not streamed"
        if why_not is not None:
            raise bad_request(f"received: this answer cannot be continued: {why_not}.", "received")
    if why_not is None:
        return ResumableAnswer(body)
    is_named = body.path in (MESSAGES_PATH, RESPONSES)
    return NamedEventsAnswer(body, why_not) if is_named else PassthroughAnswer(body, why_not, is_counted=is_counted)


def _read_whole(content: bytes) -> _Whole:
    try:
        return msgspec.json.decode(content, type=_Whole)
    except msgspec.DecodeError:
        return _Whole()  # The server does not report usage.


def _counts(usage: ReportedUsage | None) -> TokenUsage | None:
    """Return the token counts of an answer; None if the backend has not counted."""
    if usage is None or usage.prompt is None:
        return None
    return TokenUsage(usage.prompt, usage.answer or 0)


def _busy_pause_s(headers: Headers) -> float:
    """Return the seconds to wait for a busy backend, from its Retry-After."""
    said = next((value for name, value in headers if name == b"retry-after"), b"")
    return min(float(said), _MAX_BUSY_PAUSE_S) if said.isdigit() else _BUSY_PAUSE_S


def _last_events(error: ApiError, path: str) -> bytes:
    """Return the last events of a stream that has failed, in the form of its route."""
    if path == MESSAGES_PATH:
        event: dict[str, Any] = {"type": "error", "error": anthropic_error(error.status, error.message)}
    elif path == RESPONSES:
        event = {"type": "error", "code": error.type, "message": error.message, "param": error.param}
    else:
        return b"data: " + msgspec.json.encode(error.body()) + b"\n\n" + DONE
    return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"
