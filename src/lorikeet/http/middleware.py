"""Adds the middleware of the server and the router.

A request passes, in this order: request ids, the check of ``Host``, keys and tenants, the check of a web page's origin,
the limit on bodies.
"""

from collections.abc import Mapping, Sequence

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorikeet.core.provenance import DIGEST_HEADER
from lorikeet.http.auth import Auth
from lorikeet.http.errors import ApiError
from lorikeet.http.headers import header
from lorikeet.http.listening import is_loopback
from lorikeet.http.logs import RequestIds
from lorikeet.http.origins import CrossOriginGuard, HostGuard, host_of_origin
from lorikeet.http.routes import BodySize, RouteTable
from lorikeet.http.tenancy import RATE_HEADERS
from lorikeet.tenants.tenants import Tenants


class RootPath:
    """Outermost middleware, which removes a prefix from the path, so that all others see the route.

    Args:
        app: the wrapped application.
        prefix: the prefix, without a slash at its end.
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
            # Links in the page of the routes need the root path.
            scope = {**scope, "path": path, "raw_path": path.encode(), "root_path": self._prefix}
        await self._app(scope, receive, send)


class BodyLimit:
    """Middleware that answers 413 to bodies above the limit of their route.

    It reads their Content-Length, or else counts their bytes while they arrive.

    Args:
        app: the wrapped application.
        table: the rows of the routes, with the size of each body.
        max_bytes: the limit of each size, in bytes.
    """

    def __init__(self, app: ASGIApp, table: RouteTable, max_bytes: Mapping[BodySize, int]) -> None:
        self._app = app
        self._table = table
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        row = self._table.find(scope["method"], scope["path"])
        most = self._max_bytes[BodySize.SMALL if row is None else row.body]
        announced = header(scope, b"content-length")
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


def add_middleware(
    app: Starlette,
    table: RouteTable,
    max_body_bytes: Mapping[BodySize, int],
    *,
    api_keys: Sequence[str] = (),
    admin_keys: Sequence[str] = (),
    tenant_header: str = "",
    tenants: Tenants | None = None,
    allowed_origins: Sequence[str] = (),
    host: str = "",
) -> None:
    """Add the middleware: request ids, keys, the origin check, the limit on bodies, and CORS.

    Args:
        app: the application.
        table: the rows of its routes.
        max_body_bytes: the limit of each body size, in bytes.
        api_keys, admin_keys, tenant_header, tenants: see ``Auth``.
        allowed_origins: origins of web pages that may use the server; ``*`` for any, empty for the server's own.
        host: address that the server listens on.

    Raises:
        ConfigError: a key is empty.
    """
    # A request reaches the middleware added last first.
    app.add_middleware(BodyLimit, table=table, max_bytes=max_body_bytes)
    app.add_middleware(CrossOriginGuard, allowed_origins=allowed_origins)
    app.add_middleware(
        Auth, table=table, api_keys=api_keys, admin_keys=admin_keys, tenant_header=tenant_header, tenants=tenants
    )
    if is_loopback(host) and not api_keys and tenants is None and "*" not in allowed_origins:
        app.add_middleware(HostGuard, names=(host, *filter(None, map(host_of_origin, allowed_origins))))
    app.add_middleware(RequestIds)
    if allowed_origins:
        # Cookies are not allowed: keys are sent in a header, so a page must have its own key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=("*",),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After", DIGEST_HEADER, *RATE_HEADERS),
            allow_private_network=True,
        )
