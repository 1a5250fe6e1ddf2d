"""Middleware of the server and the router, and the admission gate.

Requests pass, in this order: request ids, the name that the server is called by, keys and tenants, the check of a web
page's origin, the limit on bodies. Routes enter the admission gate, which counts accepted sequences and closes for a
drain, once they know how many sequences a body asks for.
"""

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorikeet.config import check_keys
from lorikeet.http.errors import ApiError, bad_request
from lorikeet.http.listening import is_loopback
from lorikeet.http.logs import RequestIds
from lorikeet.http.tenancy import RATE_HEADERS, RateReport
from lorikeet.http.threads import in_daemon_thread
from lorikeet.tenants.keys import Access, ApiKey
from lorikeet.tenants.store import StoreUnavailable
from lorikeet.tenants.tenants import Tenants

_RETRY_AFTER_S = 1
_LONGEST_SHOWN = 100


class AdmissionGate:
    """Counts accepted sequences and closes for a drain.

    Args:
        max_queued: sequences accepted and not finished, beyond which new ones are refused.
    """

    def __init__(self, max_queued: int) -> None:
        self.max_queued = max_queued
        self.active = 0
        self.draining = False

    def enter(self, sequences: int) -> "Ticket":
        """Accept a request of that many sequences.

        Raises:
            ApiError: 503 while draining, 429 if too many are running, 400 if it could never be accepted.
        """
        if self.draining:
            raise ApiError(503, "The server is shutting down and takes no new requests.", headers={"Retry-After": "5"})
        if sequences > self.max_queued:
            raise ApiError(400, f"The request asks for {sequences} answers; at most {self.max_queued} are allowed.")
        if self.active + sequences > self.max_queued:
            raise ApiError(
                429,
                f"{self.active} requests are unfinished, and at most {self.max_queued} are accepted; try again later.",
                headers={"Retry-After": str(_RETRY_AFTER_S)},
            )
        return Ticket(self, sequences)


class Ticket:
    """The place of a request among the accepted ones, released once."""

    def __init__(self, gate: AdmissionGate, sequences: int) -> None:
        self._gate = gate
        self._sequences = sequences
        gate.active += sequences

    def release(self) -> None:
        """Release the place; a second call does nothing."""
        self._gate.active -= self._sequences
        self._sequences = 0


class RootPath:
    """Middleware, the outermost, that takes a prefix off the path, so that all others see the route.

    Args:
        app: the wrapped application.
        prefix: without a slash at its end.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            path = scope["path"]
            if path.startswith(f"{self._prefix}/"):
                path = path.removeprefix(self._prefix)
            # The root path is for links in the page of the routes.
            scope = {**scope, "path": path, "raw_path": path.encode(), "root_path": self._prefix}
        await self._app(scope, receive, send)


class BodyLimit:
    """Refuses bodies above a size with 413, by their Content-Length or while they arrive.

    Args:
        app: what it guards.
        max_bytes: the size.
        larger: the size for some paths.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, larger: Mapping[str, int]) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._larger = larger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._larger.get(scope["path"], self._max_bytes)
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and int(announced) > most:
            await _too_large(most).response()(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                raise _too_large(most)
            return message

        await self._app(scope, counted, send)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"The body is larger than {most} bytes.")


_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_SAME_SITE = frozenset({"same-origin", "none"})
"""Values of ``Sec-Fetch-Site`` for a page of the server itself, also behind a proxy, and for a user's own request."""


class CrossOriginGuard:
    """Middleware that refuses requests that may change state and come from a web page of an origin not allowed.

    Browsers send some requests without a preflight (no-cors) and only hide the answer from the page. A request without
    an Origin or Sec-Fetch-Site header does not come from a browser. The rules are those of
    ``CrossOriginProtection`` of Go (https://pkg.go.dev/net/http).

    Args:
        app: the wrapped application.
        allowed_origins: of pages that may use the server; ``*`` for any.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Sequence[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        is_refused = scope["type"] == "http" and self._is_refused(scope["method"], Headers(scope=scope))
        await (_cross_origin_refusal(Headers(scope=scope)) if is_refused else self._app)(scope, receive, send)

    def _is_refused(self, method: str, headers: Headers) -> bool:
        origin, site = headers.get("origin", ""), headers.get("sec-fetch-site", "")
        if method in _SAFE_METHODS or "*" in self._allowed or origin in self._allowed:
            return False
        if site:
            return site not in _SAME_SITE
        return bool(origin) and origin.partition("://")[2] != headers.get("host", "")


def _cross_origin_refusal(headers: Headers) -> ASGIApp:
    origin = headers.get("origin", "")
    said = f"Pages of {origin or 'another origin'} may not use this server; start it with --allowed-origins ORIGIN."
    return ApiError(403, said).response()


class HostGuard:
    """Middleware for a server without keys that only its own machine reaches: refuses foreign names in ``Host``.

    A web page that has its own name point at 127.0.0.1 (DNS rebinding) would be of the server's origin to the browser.
    What has no ``Host`` is no browser.

    Args:
        app: what it guards.
        names: that are answered beside ``localhost``, the names below it, and loopback addresses.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        self._app = app
        self._names = frozenset(map(str.lower, names))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        await (self._app if not host or self._is_known(host) else _foreign_host(host))(scope, receive, send)

    def _is_known(self, host: str) -> bool:
        name = _host_of_origin(f"http://{host}").rstrip(".")
        return name in self._names or name.endswith(".localhost") or is_loopback(name)


def _host_of_origin(origin: str) -> str:
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:  # brackets that hold no address
        return ""


def _foreign_host(host: str) -> ASGIApp:
    said = (
        f"Without --api-key, this server answers only as localhost, not as {host[:_LONGEST_SHOWN]!r}; start it with a "
        "key, or with the origin of that name as --allowed-origins."
    )
    return ApiError(403, said).response()


_OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping", "/load", "/version", "/metrics"})
_PAGES = frozenset({"ui", "docs"})
"""First part of the paths of pages and their files, which hold nothing of this server and ask for a key themselves."""
_ADMIN_POSTS = frozenset(
    {
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/reset_prefix_cache",
        "/flush_cache",
        "/pause",
        "/resume",
    }
)
_ADMIN_GETS = frozenset({"/v1/cluster", "/v1/stats", "/v1/stats/stream"})
"""What names machines, processes and digests, and the requests of all tenants."""
_ADMIN_PREFIXES = ("/v1/adapters", "/v1/loras", "/v1/cluster", "/adapters")
_KEY_PREFIXES = ("/v1/keys", "/v1/audit")
"""Reading them is for admins, too."""
_TENANT_PATHS = frozenset(
    {
        "",
        "/detokenize",
        "/docs",
        "/generate",
        "/generate_stream",
        "/get_model_info",
        "/info",
        "/invocations",
        "/load_lora_adapter",
        "/abort_request",
        "/classify",
        "/model_info",
        "/openapi.json",
        "/rerank",
        "/score",
        "/tokenize",
        "/unload_lora_adapter",
        "/v1/classify",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/load_lora_adapter",
        "/v1/moderations",
        "/v1/rerank",
        "/v1/score",
        "/v1/unload_lora_adapter",
        "/v1/usage",
        "/v2/rerank",
    }
)
_TENANT_PREFIXES = (
    "/adapters",
    "/v1/adapters",
    "/v1/batches",
    "/v1/chat/completions",
    "/v1/files",
    "/v1/loras",
    "/v1/messages",
    "/v1/models",
    "/v1/requests",
    "/v1/responses",
)
"""What tenants may call; the routes look after what each sees. A new route is the operator's until it is listed."""
_CLOSED_WITH_TENANTS = frozenset({"/metrics", "/load"})
"""Open paths that tell of everybody's adapters or traffic: with tenants, they need an operator's key."""
_MAX_TENANT_CHARACTERS = 128


class KeyRing:
    """A set of API keys, compared in constant time.

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
        """Return whether ``key`` is one of them. All are compared, so that the time reveals nothing."""
        digest = _digest(key)
        return sum(secrets.compare_digest(digest, known) for known in self._digests) > 0


class Auth:
    """Middleware that checks API keys and sets the tenant of a request, and its access (``state.tenant``, ``.access``).

    ``state.is_admin`` says whether it has an admin key.

    Args:
        app: the wrapped application.
        api_keys: keys for all routes but health, version and metrics; empty for open access.
        admin_keys: keys for the routes that change adapters or show the cluster, and for all others; if empty, API
            keys are for these, too.
        tenant_header: header that names the tenant. Without it the tenant is a name derived from the key.
        tenants: keys of the registry's database; None for none. With them every request needs a key.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Iterable[str],
        admin_keys: Iterable[str],
        tenant_header: str = "",
        tenants: Tenants | None = None,
    ) -> None:
        self._app = app
        self._api, self._admin = KeyRing(api_keys), KeyRing(admin_keys)
        self._tenant_header = tenant_header
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        secret, method, path = _key(headers), scope["method"], scope["path"].rstrip("/")
        key = await self._tenant_key(secret)
        state = scope.setdefault("state", {})
        if key is not None:
            refusal = self._tenant_refusal(method, path)
            state |= {"tenant": key.key_id, "access": Access(key, key.key_id), "is_admin": False}
            if refusal is None:
                state["rate_report"] = report = RateReport()
                send = _with_headers(send, report)
            await (refusal or self._app)(scope, receive, send)
            return
        is_api, is_admin = self._api.holds(secret), self._admin.holds(secret)
        refusal = self._refusal(method, path, is_api=is_api, is_admin=is_admin)
        if refusal is None:
            named = headers.get(self._tenant_header, "") if self._tenant_header else ""
            # Without keys in the settings any key is accepted, so it identifies no tenant.
            tenant = named or (key_name(secret) if is_api or is_admin else "")
            state |= {"tenant": tenant, "access": Access(actor=tenant), "is_admin": is_admin}
            if len(tenant) > _MAX_TENANT_CHARACTERS:
                refusal = bad_request(
                    f"{self._tenant_header} is longer than {_MAX_TENANT_CHARACTERS} characters."
                ).response()
        await (refusal or self._app)(scope, receive, send)

    async def _tenant_key(self, secret: str) -> ApiKey | None:
        """Return the tenant's key of a secret, also if another server has just made it."""
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

    def _is_open(self, method: str, path: str) -> bool:
        """Return whether a route needs no key."""
        is_closed = self._tenants is not None and path in _CLOSED_WITH_TENANTS
        return _is_page(method, path) or (path in _OPEN_PATHS and not is_closed)

    def _refusal(self, method: str, path: str, *, is_api: bool, is_admin: bool) -> JSONResponse | None:
        """Return the answer to a request that is not a tenant's and may not call the route."""
        if method == "OPTIONS" or self._is_open(method, path):
            return None
        if self._admin and _is_for_admins(method, path):
            if is_admin:
                return None
            if is_api:
                return ApiError(403, "This route needs an admin key.").response()
            return _unauthorized()
        needs_key = bool(self._api) or self._tenants is not None
        return None if not needs_key or is_api or is_admin else _unauthorized()

    def _tenant_refusal(self, method: str, path: str) -> JSONResponse | None:
        """Return the answer to a tenant who may not call the route."""
        if self._is_open(method, path) or path in _TENANT_PATHS or _is_below(path, _TENANT_PREFIXES):
            return None
        return ApiError(403, "This route needs a key of the operator.").response()


def key_name(key: str) -> str:
    """Return a name for a key that does not reveal it: the same in every run, and different for different keys."""
    return f"key-{_digest(key).hex()[:12]}"


def _is_page(method: str, path: str) -> bool:
    return method in ("GET", "HEAD") and path.removeprefix("/").partition("/")[0] in _PAGES


def _is_for_admins(method: str, path: str) -> bool:
    if path in _ADMIN_POSTS or path in _ADMIN_GETS:
        return True
    if _is_below(path, _KEY_PREFIXES):
        return True
    return method not in ("GET", "HEAD") and _is_below(path, _ADMIN_PREFIXES)


def _is_below(path: str, prefixes: Iterable[str]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in prefixes)


def _with_headers(send: Send, report: RateReport) -> Send:
    """Return ``send`` with the headers of limits on an answer."""

    async def send_reported(message: Message) -> None:
        if message["type"] == "http.response.start" and report.headers:
            MutableHeaders(scope=message).update(report.headers)
        await send(message)

    return send_reported


def _key(headers: Headers) -> str:
    """Return the key of a request: a bearer token, or as Anthropic's clients send it."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return (key.strip() if scheme.lower() == "bearer" else "") or headers.get("x-api-key", "")


def _unauthorized() -> JSONResponse:
    return JSONResponse({"error": "Unauthorized"}, 401, {"WWW-Authenticate": "Bearer"})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def add_middleware(
    app: Starlette,
    *,
    max_body_bytes: int,
    larger_bodies: Mapping[str, int],
    api_keys: Sequence[str] = (),
    admin_keys: Sequence[str] = (),
    tenant_header: str = "",
    tenants: Tenants | None = None,
    allowed_origins: Sequence[str] = (),
    host: str = "",
) -> None:
    """Add the middleware: request ids, keys, the origin check, the limit on bodies, and CORS.

    Args:
        app: has its routes.
        max_body_bytes: longer bodies get 413.
        larger_bodies: the same for some paths.
        api_keys, admin_keys, tenant_header, tenants: as of ``Auth``.
        allowed_origins: of web pages that may use the server; ``*`` for any, empty for the server's own only.
        host: address that the server listens on.

    Raises:
        ConfigError: a key is empty.
    """
    # The middleware added last gets a request first.
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes, larger=larger_bodies)
    app.add_middleware(CrossOriginGuard, allowed_origins=allowed_origins)
    app.add_middleware(Auth, api_keys=api_keys, admin_keys=admin_keys, tenant_header=tenant_header, tenants=tenants)
    if is_loopback(host) and not api_keys and tenants is None and "*" not in allowed_origins:
        app.add_middleware(HostGuard, names=(host, *filter(None, map(_host_of_origin, allowed_origins))))
    app.add_middleware(RequestIds)
    if allowed_origins:
        # No cookies: keys are sent in a header, so a page must have its own key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=("*",),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After", *RATE_HEADERS),
            allow_private_network=True,
        )
