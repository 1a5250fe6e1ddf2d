"""Middleware that decides by the table of routes, and by the key of a request, whether it may call its route."""

import hashlib
import secrets
from collections.abc import Iterable

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorikeet.config import check_keys
from lorikeet.http.errors import ApiError, bad_request
from lorikeet.http.headers import header
from lorikeet.http.routes import Callers, RouteTable
from lorikeet.http.tenancy import RateReport
from lorikeet.http.threads import in_daemon_thread
from lorikeet.tenants.keys import Access, ApiKey
from lorikeet.tenants.store import StoreUnavailable
from lorikeet.tenants.tenants import Tenants

_MAX_TENANT_CHARACTERS = 128
_FOR_ADMINS = (Callers.ADMINS, Callers.ADMINS_AND_TENANTS)
_FOR_TENANTS = (Callers.ANYONE, Callers.KEYS, Callers.ADMINS_AND_TENANTS)


class KeyRing:
    """A set of API keys, compared in constant time.

    Args:
        keys: the keys; only their digests are kept.

    Raises:
        ConfigError: a key is empty.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        known = tuple(keys)
        check_keys(known)
        self._digests = [_digest(key) for key in known]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def holds(self, key: str) -> bool:
        """Return whether the ring holds ``key``. All keys are compared, so that the time reveals nothing."""
        if not self._digests:
            return False
        digest = _digest(key)
        return sum(secrets.compare_digest(digest, known) for known in self._digests) > 0


class Auth:
    """Middleware that checks API keys and sets ``state.tenant`` and ``state.access`` of a request.

    ``state.is_admin`` is True for an admin key.

    Args:
        app: the wrapped application.
        table: the rows of the routes, with the callers of each.
        api_keys: keys for all routes that need a key; empty for open access.
        admin_keys: keys for all routes; if empty, API keys open the routes of admins, too.
        tenant_header: header that names the tenant. Without it the tenant is a name derived from the key.
        tenants: keys of the registry's database, with which every request needs a key; None for no tenants.
    """

    def __init__(
        self,
        app: ASGIApp,
        table: RouteTable,
        api_keys: Iterable[str],
        admin_keys: Iterable[str],
        tenant_header: str = "",
        tenants: Tenants | None = None,
    ) -> None:
        self._app = app
        self._table = table
        self._api = KeyRing(api_keys)
        self._admin = KeyRing(admin_keys)
        self._tenant_header = tenant_header
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        secret = _key(scope)
        row = self._table.find(scope["method"], scope["path"])
        callers = Callers.OPERATOR if row is None else row.callers
        key = await self._tenant_key(secret)
        state = scope.setdefault("state", {})
        if key is not None:
            refusal = self._tenant_refusal(callers)
            state |= {"tenant": key.key_id, "access": Access(key, key.key_id), "is_admin": False}
            if refusal is None:
                state["rate_report"] = report = RateReport()
                send = _with_headers(send, report)
            await (refusal or self._app)(scope, receive, send)
            return
        is_api = self._api.holds(secret)
        is_admin = self._admin.holds(secret)
        refusal = None
        if scope["method"] != "OPTIONS":
            refusal = self._refusal(callers, is_api=is_api, is_admin=is_admin)
        if refusal is None:
            named = header(scope, self._tenant_header.lower().encode()) if self._tenant_header else ""
            # Any key is accepted without keys in the settings, so a key identifies no tenant.
            tenant = named or (key_name(secret) if is_api or is_admin else "")
            state |= {"tenant": tenant, "access": Access(actor=tenant), "is_admin": is_admin}
            if len(tenant) > _MAX_TENANT_CHARACTERS:
                refusal = bad_request(
                    f"{self._tenant_header} is longer than {_MAX_TENANT_CHARACTERS} characters."
                ).response()
        await (refusal or self._app)(scope, receive, send)

    async def _tenant_key(self, secret: str) -> ApiKey | None:
        """Return the tenant's key for a secret, even if another server has just made it."""
        tenants = self._tenants
        if tenants is None or not secret or self._api.holds(secret) or self._admin.holds(secret):
            return None
        key = tenants.find(secret)
        if key is None and tenants.may_look_again():
            try:
                await in_daemon_thread(tenants.refresh)
            except StoreUnavailable:
                return None
            key = tenants.find(secret)
        return key

    def _refusal(self, callers: Callers, *, is_api: bool, is_admin: bool) -> JSONResponse | None:
        """Return the refusal of a request without a tenant's key; None if it may call the route."""
        is_open_without_tenants = callers is Callers.ANYONE_WITHOUT_TENANTS and self._tenants is None
        if callers is Callers.ANYONE or is_open_without_tenants:
            return None
        if self._admin and callers in _FOR_ADMINS:
            if is_admin:
                return None
            if is_api:
                return ApiError(403, "This route needs an admin key.").response()
            return _unauthorized()
        needs_key = bool(self._api) or self._tenants is not None
        return None if not needs_key or is_api or is_admin else _unauthorized()

    def _tenant_refusal(self, callers: Callers) -> JSONResponse | None:
        """Return the refusal of a tenant's request; None if the tenant may call the route."""
        if callers in _FOR_TENANTS:
            return None
        return ApiError(403, "This route needs a key of the operator.").response()


def key_name(key: str) -> str:
    """Return a name that identifies a key in every run and does not reveal it."""
    return f"key-{_digest(key).hex()[:12]}"


def _with_headers(send: Send, report: RateReport) -> Send:
    """Return a ``send`` that adds the headers about limits to an answer."""

    async def send_reported(message: Message) -> None:
        if message["type"] == "http.response.start" and report.headers:
            MutableHeaders(scope=message).update(report.headers)
        await send(message)

    return send_reported


def _key(scope: Scope) -> str:
    """Return the key of a request, from a bearer token or the header of Anthropic's clients."""
    scheme, _, key = header(scope, b"authorization").partition(" ")
    return (key.strip() if scheme.lower() == "bearer" else "") or header(scope, b"x-api-key")


def _unauthorized() -> JSONResponse:
    return JSONResponse({"error": "Unauthorized"}, 401, {"WWW-Authenticate": "Bearer"})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
