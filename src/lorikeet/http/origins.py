"""Protects the server from web pages: of other origins, or with a foreign name that points to the server."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from lorikeet.http.errors import ApiError
from lorikeet.http.headers import header
from lorikeet.http.listening import is_loopback

_LONGEST_SHOWN = 100
_MAX_HOSTS = 64

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_SAME_SITE = frozenset({"same-origin", "none"})
"""Values of ``Sec-Fetch-Site`` for a page of the server, even behind a proxy, and for a user's own request."""


class CrossOriginGuard:
    """Middleware that refuses requests from web pages of other origins if they may change state.

    Browsers send some requests without a preflight (no-cors) and only hide the answer from the page. A request without
    an Origin or Sec-Fetch-Site header does not come from a browser. The rules follow ``CrossOriginProtection`` of Go
    (https://pkg.go.dev/net/http).

    Args:
        app: the wrapped application.
        allowed_origins: origins of pages that may use the server; ``*`` for any.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Sequence[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        is_refused = scope["type"] == "http" and self._is_refused(scope)
        await (_cross_origin_refusal(header(scope, b"origin")) if is_refused else self._app)(scope, receive, send)

    def _is_refused(self, scope: Scope) -> bool:
        origin = header(scope, b"origin")
        site = header(scope, b"sec-fetch-site")
        if scope["method"] in _SAFE_METHODS or "*" in self._allowed or origin in self._allowed:
            return False
        if site:
            return site not in _SAME_SITE
        return bool(origin) and origin.partition("://")[2] != header(scope, b"host")


def _cross_origin_refusal(origin: str) -> ASGIApp:
    message = f"Pages of {origin or 'another origin'} may not use this server; start it with --allowed-origins ORIGIN."
    return ApiError(403, message).response()


class HostGuard:
    """Middleware for a server without keys that only its own machine reaches: refuses foreign names in ``Host``.

    A web page whose own name points to 127.0.0.1 (DNS rebinding) has the server's origin for the browser. A client
    that sends no ``Host`` is not a browser.

    Args:
        app: the wrapped application.
        names: accepted names beside ``localhost``, the names below it, and loopback addresses.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        self._app = app
        self._names = frozenset(map(str.lower, names))
        self._is_known = lru_cache(maxsize=_MAX_HOSTS)(self._is_own)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        host = header(scope, b"host") if scope["type"] == "http" else ""
        await (self._app if not host or self._is_known(host) else _foreign_host(host))(scope, receive, send)

    def _is_own(self, host: str) -> bool:
        name = host_of_origin(f"http://{host}").rstrip(".")
        return name in self._names or name.endswith(".localhost") or is_loopback(name)


def host_of_origin(origin: str) -> str:
    """Return the host of an origin; empty for an origin without a host."""
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:  # The brackets contain no address.
        return ""


def _foreign_host(host: str) -> ASGIApp:
    message = (
        f"Without --api-key, this server answers only as localhost, not as {host[:_LONGEST_SHOWN]!r}; start it with a "
        "key, or with the origin of that name as --allowed-origins."
    )
    return ApiError(403, message).response()
