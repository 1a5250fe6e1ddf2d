"""Calls the server's own routes inside the process, for the lines of batches."""

import asyncio
from typing import NamedTuple

import structlog
from starlette.types import ASGIApp, Message

from lorikeet.http.errors import ApiError, unexpected_failure
from lorikeet.http.logs import log
from lorikeet.tenants.keys import Access
from lorikeet.tenants.tenants import Tenants


class LineAnswer(NamedTuple):
    """Status and body of an answer."""

    status: int
    body: bytes


class BatchDispatcher:
    """Answers requests of batches through the routes' handlers, without the middleware for connections.

    Args:
        app: the application with the batchable routes.
        tenants: keys of the registry's database, whose limits apply to their batches; None for a server without
            tenants.
    """

    def __init__(self, app: ASGIApp, tenants: Tenants | None = None) -> None:
        self._app = app
        self._tenants = tenants

    async def post(self, path: str, body: bytes, tenant: str, request_id: str) -> LineAnswer:
        """Return the answer to a JSON body. Cancelling the call aborts the request in the engine."""
        access = Access(actor=tenant) if self._tenants is None else self._tenants.access_of(tenant)
        if access is None:
            refusal = ApiError(401, "The key of this batch was revoked.").response()
            return LineAnswer(refusal.status_code, bytes(refusal.body))
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
            "client": None,
            "server": None,
            "state": {"request_id": request_id, "tenant": tenant, "access": access, "is_batch": True},
        }
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        status = 0
        parts = list[bytes]()

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await asyncio.Event().wait()  # A batch has no client that could disconnect.
            raise AssertionError

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send)
            except Exception as error:
                log.error("unexpected error", path=path, exc_info=error)
                failure = unexpected_failure().response()
                return LineAnswer(failure.status_code, bytes(failure.body))
        return LineAnswer(status, b"".join(parts))
