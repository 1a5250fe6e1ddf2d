"""Bearer keys: API keys for everything but health and metrics, admin keys for what changes adapters. And tenants."""

import hashlib
import secrets
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from lorikeet.config import check_keys
from lorikeet.server.errors import ApiError, bad_request

_OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping", "/load", "/version", "/metrics"})
_ADMIN_POSTS = frozenset(
    {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/unload_lora_adapter"}
)
_ADMIN_TREES = ("/v1/adapters", "/v1/loras", "/v1/cluster")
_LONGEST_TENANT = 128


class KeyRing:
    """A set of keys, compared in constant time.

    Args:
        keys: the keys; only their digests are kept.

    Raises:
        ConfigError: one of them is empty.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        known = tuple(keys)
        check_keys(known)
        self._digests = [_digest(key) for key in known]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def holds(self, key: str) -> bool:
        """Tell whether ``key`` is one of them. All are compared, so that the time tells nothing."""
        digest = _digest(key)
        return sum(secrets.compare_digest(digest, known) for known in self._digests) > 0


class Auth:
    """Middleware that asks for a key where one is needed, and tells routes whose request it is (``state.tenant``).

    Args:
        app: what it guards.
        api_keys: keys for all routes but health, version and metrics; empty for open access.
        admin_keys: keys for the routes that change adapters; they open the other routes too. Empty: the API keys do.
        tenant_header: whose value names the tenant; empty, or a request without it: a name for the key.
    """

    def __init__(
        self, app: ASGIApp, api_keys: Iterable[str], admin_keys: Iterable[str], tenant_header: str = ""
    ) -> None:
        self._app = app
        self._api, self._admin = KeyRing(api_keys), KeyRing(admin_keys)
        self._tenant_header = tenant_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if scope["type"] == "http" and refusal is None:
            tenant = self._tenant(Headers(scope=scope))
            scope.setdefault("state", {})["tenant"] = tenant
            if len(tenant) > _LONGEST_TENANT:
                refusal = bad_request(f"{self._tenant_header} is longer than {_LONGEST_TENANT} characters.").response()
        await (refusal or self._app)(scope, receive, send)

    def _tenant(self, headers: Headers) -> str:
        named = headers.get(self._tenant_header, "") if self._tenant_header else ""
        key = _bearer(headers.get("authorization", ""))
        # A key that nobody asked for proves nothing, and whoever likes to could have a new one for each request.
        return named or (key_name(key) if self._api.holds(key) or self._admin.holds(key) else "")

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        path = scope["path"].rstrip("/")
        if path in _OPEN_PATHS or scope["method"] == "OPTIONS":
            return None
        key = _bearer(Headers(scope=scope).get("authorization", ""))
        is_api, is_admin = self._api.holds(key), self._admin.holds(key)
        if self._admin and _changes_adapters(scope["method"], path):
            if is_admin:
                return None
            if is_api:
                return ApiError(403, "This route needs an admin key.").response()
            return _unauthorized()
        return None if not self._api or is_api or is_admin else _unauthorized()


def key_name(key: str) -> str:
    """Return a name for a key that does not tell the key: the same in every run, and another for every other key."""
    return f"key-{_digest(key).hex()[:12]}"


def _changes_adapters(method: str, path: str) -> bool:
    if path in _ADMIN_POSTS:
        return True
    return method not in ("GET", "HEAD") and any(path == tree or path.startswith(f"{tree}/") for tree in _ADMIN_TREES)


def _bearer(header: str) -> str:
    scheme, _, key = header.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _unauthorized() -> JSONResponse:
    return JSONResponse({"error": "Unauthorized"}, 401, {"WWW-Authenticate": "Bearer"})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
