"""What web pages of elsewhere may not do with a server, though their readers' browsers can reach it."""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from lorikeet.server.errors import ApiError

_CHANGES_NOTHING = frozenset({"GET", "HEAD", "OPTIONS"})
_OWN_PAGE = frozenset({"same-origin", "none"})
"""Of ``Sec-Fetch-Site``: a page of the server itself, also behind a proxy; the reader by hand."""


class ForeignPages:
    """Middleware that refuses what may change something and comes from a page of an origin that is not allowed.

    Browsers send some requests without asking the server first (no-cors), and keep but the answer from the page. Who
    sends neither header is no browser. As in Go's ``http.CrossOriginProtection``, https://pkg.go.dev/net/http.

    Args:
        app: what it guards.
        allowed_origins: of pages that may use the server; ``*`` for any.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Sequence[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        is_refused = scope["type"] == "http" and self._is_refused(scope["method"], Headers(scope=scope))
        await (_refusal(Headers(scope=scope)) if is_refused else self._app)(scope, receive, send)

    def _is_refused(self, method: str, headers: Headers) -> bool:
        origin, site = headers.get("origin", ""), headers.get("sec-fetch-site", "")
        if method in _CHANGES_NOTHING or "*" in self._allowed or origin in self._allowed:
            return False
        if site:
            return site not in _OWN_PAGE
        return bool(origin) and origin.partition("://")[2] != headers.get("host", "")


def _refusal(headers: Headers) -> ASGIApp:
    origin = headers.get("origin", "")
    said = f"Pages of {origin or 'another origin'} may not use this server; start it with --allowed-origins ORIGIN."
    return ApiError(403, said).response()
