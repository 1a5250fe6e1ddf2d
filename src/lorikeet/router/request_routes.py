"""Answers ``/v1/requests`` at a router: which backend got a request and why, and that backend's own record."""

from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lorikeet.http.errors import ApiError, bad_request
from lorikeet.router.adapter_routes import json_response
from lorikeet.router.backends import Backend
from lorikeet.router.connections import BackendConnectionError
from lorikeet.router.proxy import RouterParts, passed_headers
from lorikeet.router.records import MOST_RECORDS, RouteRecord

MOST_LISTED = 1000
"""Requests that one call lists."""


class RequestRoutes:
    """Answers the routes that show requests.

    Args:
        parts: parts of the router.
    """

    def __init__(self, parts: RouterParts) -> None:
        self._parts = parts

    async def latest(self, http: Request) -> Response:
        """Return the latest requests of the sender's key, the newest first; an admin key finds all."""
        limit = http.query_params.get("limit", "50")
        if not limit.isdecimal() or not 1 <= int(limit) <= MOST_LISTED:
            raise bad_request(f"limit: must be a number from 1 to {MOST_LISTED}.", "limit")
        found = self._parts.records.latest(int(limit), _may_see(http))
        return json_response({"object": "list", "data": [record.summary() for record in found]})

    async def one(self, http: Request) -> Response:
        """Return a request's backends, why each was chosen, and the last backend's own record of it."""
        request_id = http.path_params["request_id"]
        record = self._parts.records.find(request_id, _may_see(http))
        if record is None:
            why = f"The request {request_id[:200]!r} is not among the latest {MOST_RECORDS} of this router."
            raise ApiError(404, why)
        shown = record.as_json()
        shown["known_by_backend"], sequences = await self._at_backend(http, record)
        return json_response({"object": "request", "id": request_id, "route": shown, "sequences": sequences})

    async def _at_backend(self, http: Request, record: RouteRecord) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the last backend has a record of a request, and the record's sequences."""
        backend = None
        if record.placements:
            backend = self._parts.backend_router.backends.get(record.placements[-1].backend)
        if backend is None or not backend.is_up or not backend.is_lorikeet or not record.sent_id:
            return False, []
        ask: Callable[[str], Any] = backend.ask if backend.has_key else partial(_passed, backend, http)
        try:
            reply = await ask(f"/v1/requests/{quote(record.sent_id, safe='')}")
            sequences = msgspec.json.decode(reply.text)["sequences"] if reply.status == 200 else None
        except (BackendConnectionError, msgspec.DecodeError, KeyError, TypeError):
            return False, []
        return isinstance(sequences, list), sequences if isinstance(sequences, list) else []


async def _passed(backend: Backend, http: Request, path: str) -> Any:
    return await backend.call("GET", path, passed_headers(http, backend))


def _may_see(http: Request) -> Callable[[str], bool]:
    """Return a function that returns whether the sender may see requests of a tenant."""
    tenant = http.state.tenant
    is_admin = http.state.is_admin
    return lambda owner: is_admin or owner == tenant
