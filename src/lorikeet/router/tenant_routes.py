"""Answers the routes of tenants at a router: keys, usage and changes, as a server does."""

from datetime import date
from functools import partial
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lorikeet.http.errors import ApiError, bad_request
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
from lorikeet.router.adapter_routes import json_response, read_body
from lorikeet.router.catalog import ModelCatalog
from lorikeet.tenants.keys import Access, KeySettings
from lorikeet.tenants.tenants import Tenants


class _NewKey(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_NAME)]
    settings: dict[str, Any] | None = None


class _KeyChange(msgspec.Struct):
    settings: dict[str, Any]


class _KeyRotation(msgspec.Struct):
    overlap_s: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_OVERLAP_S)] = DEFAULT_OVERLAP_S


class TenantRoutes:
    """Answers the routes of keys and usage.

    Args:
        tenants: the keys; None for a router without tenants, which answers 404.
        catalog: the models, of which usage names the base.
    """

    def __init__(self, tenants: Tenants | None, catalog: ModelCatalog) -> None:
        self._known = tenants
        self._catalog = catalog

    @property
    def _tenants(self) -> Tenants:
        if self._known is None:
            raise ApiError(404, "This router has no tenants: start it with --tenants.")
        return self._known

    async def create_key(self, http: Request) -> Response:
        """Make a key. Only this answer contains its secret."""
        tenants = self._tenants
        body = await read_body(http, _NewKey)
        settings = changed_settings(body.settings or {}, KeySettings())
        key, secret = await queried(partial(tenants.create, body.name, settings, _access(http).actor))
        return json_response({**key_card(key), "secret": secret}, 201)

    async def list_keys(self, http: Request) -> Response:
        """Return all keys, the oldest first, without their secrets."""
        return json_response({"object": "list", "data": [key_card(key) for key in self._tenants.list()]})

    async def get_key(self, http: Request) -> Response:
        """Return one key."""
        return json_response(key_card(known_key(self._tenants, http.path_params["key_id"])))

    async def change_key(self, http: Request) -> Response:
        """Change the rights of a key; settings that the body does not name stay unchanged."""
        tenants = self._tenants
        key_id = http.path_params["key_id"]
        body = await read_body(http, _KeyChange)
        settings = changed_settings(body.settings, known_key(tenants, key_id).settings)
        return json_response(key_card(await queried(partial(tenants.change, key_id, settings, _access(http).actor))))

    async def rotate_key(self, http: Request) -> Response:
        """Give a key a new secret; the present one stays valid for a while."""
        tenants = self._tenants
        body = await read_body(http, _KeyRotation) if await http.body() else _KeyRotation()
        rotate = partial(tenants.rotate, http.path_params["key_id"], body.overlap_s, _access(http).actor)
        key, secret = await queried(rotate)
        return json_response({**key_card(key), "secret": secret})

    async def revoke_key(self, http: Request) -> Response:
        """Revoke a key. Its usage stays recorded."""
        revoke = partial(self._tenants.revoke, http.path_params["key_id"], _access(http).actor)
        return json_response(key_card(await queried(revoke)))

    async def usage(self, http: Request) -> Response:
        """Return usage by day in UTC, key and model; a tenant sees its own, the operator sees all."""
        query = http.query_params
        model = query.get("model", "")
        adapter = None if not model else "" if self._catalog.is_base(model) else model
        start, end = (_day(query.get(name, ""), name) for name in ("start", "end"))
        page = await usage_page(self._tenants, _access(http), start, end, query.get("key", ""), adapter)
        return Response(page, media_type="application/json")

    async def audit(self, http: Request) -> Response:
        """Return changes of keys with their authors, the latest first; ``before`` selects a page."""
        before, limit = (http.query_params.get(name, usual) for name, usual in (("before", "0"), ("limit", "100")))
        if not before.isdecimal() or not limit.isdecimal() or not 1 <= int(limit) <= MOST_CHANGES:
            raise bad_request(f"limit: must be a number from 1 to {MOST_CHANGES}, and before a number.", "limit")
        read = partial(self._tenants.store.changes, http.query_params.get("subject", ""), int(before), int(limit))
        return json_response({"object": "list", "data": [entry._asdict() for entry in await queried(read)]})


def _access(http: Request) -> Access:
    access: Access = http.state.access
    return access


def _day(text: str, name: str) -> date | None:
    """Return a day of a query; None for an empty text.

    Raises:
        ApiError: 400, the text is not a day.
    """
    try:
        return date.fromisoformat(text) if text else None
    except ValueError as error:
        raise bad_request(f"{name}: {text[:50]!r} must be a day such as 2026-11-29.", name) from error
