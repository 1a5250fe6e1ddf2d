"""Writes errors of ``/v1/messages`` in Anthropic's form."""

import json

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MESSAGES_PATH = "/v1/messages"
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's type of an error, by HTTP status; other statuses have ``invalid_request_error``."""


def anthropic_error(status: int, message: str) -> dict[str, str]:
    """Return the ``error`` object of an answer with an HTTP status."""
    return {"type": _ERROR_TYPES.get(status, "invalid_request_error"), "message": message}


class AnthropicErrors:
    """Middleware that writes all errors of these routes in Anthropic's form.

    Args:
        app: the wrapped application, whose errors are in OpenAI's form.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        path = scope.get("path", "")
        if scope["type"] != "http" or not (path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")):
            await self._app(scope, receive, send)
            return
        start: Message = {}
        parts: list[bytes] = []

        async def send_in_form(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["request-id"] = headers.get("x-request-id", "")
                if message["status"] >= 400:
                    start = message
                    return
            if not start:
                await send(message)
                return
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                content = _in_form(start["status"], b"".join(parts), MutableHeaders(scope=start)["request-id"])
                MutableHeaders(scope=start)["content-length"] = str(len(content))
                await send(start)
                await send({"type": "http.response.body", "body": content})

        await self._app(scope, receive, send_in_form)


def _in_form(status: int, content: bytes, request_id: str) -> bytes:
    try:
        error = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        return content
    message = error["message"] if isinstance(error, dict) else str(error)
    return msgspec.json.encode({"type": "error", "error": anthropic_error(status, message), "request_id": request_id})
