"""Serves keys, usage and the audit log of tenants."""

from datetime import date
from functools import partial
from typing import Annotated, Any

from fastapi import Query
from pydantic import Field
from starlette.responses import Response

from lorikeet.api.dependencies import SenderDep, ServiceDep
from lorikeet.chat.protocol import Body
from lorikeet.http.errors import ApiError
from lorikeet.http.routes import Callers, Route, Routes
from lorikeet.http.tenant_keys import (
    DEFAULT_OVERLAP_S,
    LONGEST_NAME,
    LONGEST_OVERLAP_S,
    MOST_CHANGES,
    changed_settings,
    key_card,
    known_key,
    queried,
    usage_page,
)
from lorikeet.serving.service import Service
from lorikeet.tenants.keys import KeySettings
from lorikeet.tenants.tenants import Tenants

ROUTES = Routes(note="keys of tenants, with an admin key: see [Tenants](tenants.md)")


class NewKey(Body):
    """Body of ``POST /v1/keys``; ``settings`` has the fields of ``KeySettings``."""

    name: Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
    settings: dict[str, Any] | None = None


class KeyChange(Body):
    """Body of ``PATCH /v1/keys/{id}``: fields of ``KeySettings`` that change."""

    settings: dict[str, Any]


class KeyRotation(Body):
    """Body of ``POST /v1/keys/{id}/rotate``."""

    overlap_s: Annotated[float, Field(ge=0, le=LONGEST_OVERLAP_S)] = DEFAULT_OVERLAP_S


@ROUTES.add(
    Route("POST /v1/keys", Callers.ADMINS),
    status_code=201,
)
async def create_key(body: NewKey, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Make a key. Only this answer contains its secret."""
    tenants = _tenants(service)
    settings = changed_settings(body.settings or {}, KeySettings())
    key, secret = await queried(partial(tenants.create, body.name, settings, sender.access.actor))
    return {**key_card(key), "secret": secret}


@ROUTES.add(Route("GET /v1/keys", Callers.ADMINS))
async def list_keys(service: ServiceDep) -> dict[str, Any]:
    """Return all keys, the oldest first, without their secrets."""
    return {"object": "list", "data": [key_card(key) for key in _tenants(service).list()]}


@ROUTES.add(Route("GET /v1/keys/{key_id}", Callers.ADMINS))
async def get_key(key_id: str, service: ServiceDep) -> dict[str, Any]:
    """Return one key."""
    return key_card(known_key(_tenants(service), key_id))


@ROUTES.add(Route("PATCH /v1/keys/{key_id}", Callers.ADMINS))
async def change_key(key_id: str, body: KeyChange, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Change the rights of a key; settings that the body does not name stay unchanged."""
    tenants = _tenants(service)
    settings = changed_settings(body.settings, known_key(tenants, key_id).settings)
    return key_card(await queried(partial(tenants.change, key_id, settings, sender.access.actor)))


@ROUTES.add(Route("POST /v1/keys/{key_id}/rotate", Callers.ADMINS))
async def rotate_key(key_id: str, body: KeyRotation, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Give a key a new secret; the present one stays valid for a while."""
    rotate = partial(_tenants(service).rotate, key_id, body.overlap_s, sender.access.actor)
    key, secret = await queried(rotate)
    return {**key_card(key), "secret": secret}


@ROUTES.add(Route("DELETE /v1/keys/{key_id}", Callers.ADMINS))
async def revoke_key(key_id: str, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Revoke a key. Its usage stays recorded."""
    return key_card(await queried(partial(_tenants(service).revoke, key_id, sender.access.actor)))


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
    adapter = None if not model else "" if service.models.is_base(model) else model
    page = await usage_page(_tenants(service), sender.access, start, end, key, adapter)
    return Response(page, media_type="application/json")


@ROUTES.add(Route("GET /v1/audit", Callers.ADMINS, note="changes of adapters and keys, by author; with an admin key"))
async def audit(
    service: ServiceDep,
    subject: str = "",
    before: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=MOST_CHANGES)] = 100,
) -> dict[str, Any]:
    """Return changes of adapters and keys with their authors, the latest first; ``before`` selects a page."""
    read = partial(_tenants(service).store.changes, subject, before, limit)
    return {"object": "list", "data": [entry._asdict() for entry in await queried(read)]}


def _tenants(service: Service) -> Tenants:
    if service.tenants is None:
        raise ApiError(404, "This server has no tenants: start it with --tenants.")
    return service.tenants
