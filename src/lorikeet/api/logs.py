"""Structured logs with request ids, and the middleware that gives every request one."""

import logging
import re
import sys
import time
import uuid
from collections.abc import Mapping, MutableMapping
from typing import Any

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorikeet.api.errors import unexpected_failure

log: structlog.stdlib.BoundLogger = structlog.get_logger("lorikeet.api")

_CLIENT_CLOSED_REQUEST = 499
_USABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""But for tabs and ends of lines, which are shown as such."""
_QUIET_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/metrics", "/ping", "/load"})


def configure_logs(level: str, *, as_json: bool) -> None:
    """Set up structlog for this process.

    Args:
        level: name of the least severe level that is shown.
        as_json: one JSON object per line instead of text.

    Raises:
        ValueError: no level has that name.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"log level {level!r} is not one of {', '.join(logging.getLevelNamesMapping()).lower()}")
    # Plain tracebacks: those of rich show local variables, among them keys and prompts.
    console = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
    )
    renderer: Any = structlog.processors.JSONRenderer() if as_json else console
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            _without_control_characters,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([structlog.processors.format_exc_info] if as_json else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


def _without_control_characters(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Write control characters as escapes: paths and names are others' words, and a terminal would obey them."""
    return {
        key: _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", value) if isinstance(value, str) else value
        for key, value in event.items()
    }


class RequestIds:
    """Echo or make ``X-Request-Id``, bind it to the logs, and log each request when it ends.

    What nobody expected to fail becomes a 500 here, so that it too has the id in its answer and its log lines. A client
    that hangs up while it sends its request is no such failure: it is logged as 499.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _USABLE_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        status, started_s = 0, time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except ClientDisconnect:
                status = status or _CLIENT_CLOSED_REQUEST
            except Exception as error:
                log.error("unexpected error", path=scope["path"], exc_info=error)
                if status:
                    raise  # an answer has begun: all that is left is to end the connection
                await unexpected_failure().response()(scope, receive, send_with_id)
            finally:
                level = logging.DEBUG if scope["path"] in _QUIET_PATHS else logging.INFO
                log.log(
                    level,
                    "request",
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    seconds=round(time.monotonic() - started_s, 4),
                )
