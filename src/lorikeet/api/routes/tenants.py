"""Serves keys, usage and the audit log of tenants."""

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Query
from pydantic import Field
from starlette.responses import Response

from lorikeet.api.dependencies import SenderDep, ServiceDep
from lorikeet.chat.protocol import Body
from lorikeet.http.errors import ApiError, bad_request
from lorikeet.http.routes import Callers, Route, Routes
from lorikeet.http.threads import in_daemon_thread
from lorikeet.serving.service import Service
from lorikeet.tenants.keys import ApiKey, KeySettings
from lorikeet.tenants.store import StoreUnavailable, UnknownKey
from lorikeet.tenants.tenants import Tenants

ROUTES = Routes(note="keys of tenants, with an admin key: see [Tenants](tenants.md)")

_USAGE_DAYS = 31
_MOST_CHANGES = 1000
_LONGEST_OVERLAP_S = 30 * 86400
DEFAULT_OVERLAP_S = 3600.0

_T = TypeVar("_T")


class NewKey(Body):
    """Body of ``POST /v1/keys``; ``settings`` has the fields of ``KeySettings``."""

    name: Annotated[str, Field(min_length=1, max_length=100)]
    settings: dict[str, Any] | None = None


class KeyChange(Body):
    """Body of ``PATCH /v1/keys/{id}``: fields of ``KeySettings`` that change."""

    settings: dict[str, Any]


class KeyRotation(Body):
    """Body of ``POST /v1/keys/{id}/rotate``."""

    overlap_s: Annotated[float, Field(ge=0, le=_LONGEST_OVERLAP_S)] = DEFAULT_OVERLAP_S


@ROUTES.add(
    Route("POST /v1/keys", Callers.ADMINS),
    status_code=201,
)
async def create_key(body: NewKey, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Make a key. Only this answer contains its secret."""
    tenants = _tenants(service)
    settings = _settings(body.settings or {}, KeySettings())
    key, secret = await _queried(partial(tenants.create, body.name, settings, sender.access.actor))
    return {**_card(key), "secret": secret}


@ROUTES.add(Route("GET /v1/keys", Callers.ADMINS))
async def list_keys(service: ServiceDep) -> dict[str, Any]:
    """Return all keys, the oldest first, without their secrets."""
    return {"object": "list", "data": [_card(key) for key in _tenants(service).list()]}


@ROUTES.add(Route("GET /v1/keys/{key_id}", Callers.ADMINS))
async def get_key(key_id: str, service: ServiceDep) -> dict[str, Any]:
    """Return one key."""
    key = _tenants(service).by_id(key_id)
    if key is None:
        raise _unknown(key_id)
    return _card(key)


@ROUTES.add(Route("PATCH /v1/keys/{key_id}", Callers.ADMINS))
async def change_key(key_id: str, body: KeyChange, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Change the rights of a key; settings that the body does not name stay unchanged."""
    tenants = _tenants(service)
    key = tenants.by_id(key_id)
    if key is None:
        raise _unknown(key_id)
    settings = _settings(body.settings, key.settings)
    return _card(await _queried(partial(tenants.change, key_id, settings, sender.access.actor)))


@ROUTES.add(Route("POST /v1/keys/{key_id}/rotate", Callers.ADMINS))
async def rotate_key(key_id: str, body: KeyRotation, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Give a key a new secret; the present one stays valid for a while."""
    rotate = partial(_tenants(service).rotate, key_id, body.overlap_s, sender.access.actor)
    key, secret = await _queried(rotate)
    return {**_card(key), "secret": secret}


@ROUTES.add(Route("DELETE /v1/keys/{key_id}", Callers.ADMINS))
async def revoke_key(key_id: str, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Revoke a key. Its usage stays recorded."""
    return _card(await _queried(partial(_tenants(service).revoke, key_id, sender.access.actor)))


@ROUTES.add(Route("GET /v1/usage", Callers.KEYS, note="usage by day, key and model; a tenant sees its own"))
async def usage(
    service: ServiceDep,
    sender: SenderDep,
    start: date | None = None,
    end: date | None = None,
    key: str = "",
    model: str = "",
) -> Response:
    """Return usage by day in UTC, key and model; a tenant sees its own, the operator sees all.

    Args:
        service: the server's service.
        sender: the request's sender.
        start, end: the first and the last day; by default the last 31 days.
        key: limits the answer to this key.
        model: limits the answer to this adapter, or to the base model.
    """
    tenants = _tenants(service)
    last = end or datetime.now(UTC).date()
    first = start or last - timedelta(days=_USAGE_DAYS - 1)
    if first > last:
        raise bad_request(f"start is {first}, which is after the end, {last}.", "start")
    if sender.access.key is not None:
        key = sender.access.key.key_id
    adapter = None if not model else "" if service.models.is_base(model) else model

    def read() -> bytes:
        tenants.ledger.flush().result()
        rows = tenants.store.usage(str(first), str(last), key, adapter)
        return msgspec.json.encode({"object": "list", "data": [_usage_row(tenants, row._asdict()) for row in rows]})

    return Response(await _queried(read), media_type="application/json")


def _usage_row(tenants: Tenants, row: dict[str, Any]) -> dict[str, Any]:
    key_id = row.pop("key_id")
    adapter = row.pop("adapter")
    key = tenants.by_id(key_id)
    return {
        "day": row.pop("day"),
        "key": key_id,
        "key_name": "" if key is None else key.name,
        "base": row.pop("base"),
        "adapter": adapter or None,
        **row,
    }


@ROUTES.add(Route("GET /v1/audit", Callers.ADMINS, note="changes of adapters and keys, by author; with an admin key"))
async def audit(
    service: ServiceDep,
    subject: str = "",
    before: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=_MOST_CHANGES)] = 100,
) -> dict[str, Any]:
    """Return changes of adapters and keys with their authors, the latest first; ``before`` selects a page."""
    read = partial(_tenants(service).store.changes, subject, before, limit)
    return {"object": "list", "data": [entry._asdict() for entry in await _queried(read)]}


def _tenants(service: Service) -> Tenants:
    if service.tenants is None:
        raise ApiError(404, "This server has no tenants: start it with --tenants.")
    return service.tenants


def _card(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.key_id,
        "object": "key",
        "name": key.name,
        "created": int(key.created_at),
        "revoked": None if key.revoked_at is None else int(key.revoked_at),
        "settings": msgspec.to_builtins(key.settings),
    }


def _settings(given: dict[str, Any], present: KeySettings) -> KeySettings:
    """Return settings with some fields changed; null stands for the default.

    Raises:
        ApiError: 400, a field is unknown or its value is wrong.
    """
    fields = msgspec.to_builtins(present) | given
    try:
        return msgspec.convert({name: value for name, value in fields.items() if value is not None}, KeySettings)
    except msgspec.ValidationError as error:
        raise bad_request(f"settings: {error}.", "settings") from error


def _unknown(key_id: str) -> ApiError:
    return ApiError(404, f"The key {key_id[:100]!r} does not exist, or is revoked.", param="key_id")


async def _queried(work: Callable[[], _T]) -> _T:
    """Run work on the database in a thread.

    Raises:
        ApiError: 404 for an unknown key, 503 if the database cannot be reached.
    """
    try:
        return await in_daemon_thread(work)
    except UnknownKey as error:
        raise _unknown(str(error)) from error
    except StoreUnavailable as error:
        raise ApiError(503, "The database of keys cannot be reached now.", headers={"Retry-After": "5"}) from error
