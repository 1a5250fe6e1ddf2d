"""Sets up the log of the API process, and gives every request an id and a log line."""

import logging
import re
import time
import uuid

import structlog
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorikeet.http.errors import unexpected_failure
from lorikeet.http.headers import header
from lorikeet.http.trace_context import TraceHeaders, trace_headers

log: structlog.stdlib.BoundLogger = structlog.get_logger("lorikeet.api")

_CLIENT_CLOSED_REQUEST = 499
REFUSED = "refused_with"
"""Key, in a request's state, of the status with which its connection was closed."""
ANSWER_HEADERS = "answer_headers"
"""Key, in a request's state, of the mapping of headers that its answer gets."""
_USABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")
_QUIET_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/metrics", "/ping", "/load"})


class RequestIds:
    """Middleware that echoes or makes ``X-Request-Id``, binds it to the logs, and logs each ended request.

    It also sends the headers that the handler has put into the request's state.

    An unexpected exception becomes a 500 here, so that its answer and its log lines have the id, too. The log has 499
    for a client that hangs up while it sends its request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        trace_headers.set(TraceHeaders(header(scope, b"traceparent"), header(scope, b"tracestate")))
        given = header(scope, b"x-request-id")
        request_id = given if _USABLE_ID.fullmatch(given) else uuid.uuid4().hex
        added: dict[str, str] = {}
        scope.setdefault("state", {}).update({"request_id": request_id, ANSWER_HEADERS: added})
        status = 0
        started_s = time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update({"X-Request-Id": request_id, **added})
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except ClientDisconnect:
                status = status or _CLIENT_CLOSED_REQUEST
            except Exception as error:
                log.error("unexpected error", path=scope["path"], exc_info=error)
                if status:
                    raise  # The answer has begun, so only the connection can be ended.
                await unexpected_failure().response()(scope, receive, send_with_id)
            finally:
                # The status of the refused connection counts, since the route only saw the connection end.
                status = scope["state"].get(REFUSED, status)
                level = logging.DEBUG if scope["path"] in _QUIET_PATHS else logging.INFO
                log.log(
                    level,
                    "request",
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    seconds=round(time.monotonic() - started_s, 4),
                )
