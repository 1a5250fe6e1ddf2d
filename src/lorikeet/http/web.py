"""Serves the files of ``/ui`` and ``/docs``, built from ``ui/``, and adds headers for browsers.

The pages load nothing from another server.
"""

import hashlib
from functools import cache
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorikeet.http.errors import ApiError

FILES = Path(__file__).with_name("web")
"""Folder of the files that ``make ui`` builds."""
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_OWN_FILES_ONLY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_NOTHING = "default-src 'none'; frame-ancestors 'none'"


class SecurityHeaders:
    """Middleware that adds the headers against guessed types, sent referrers and foreign scripts.

    Args:
        app: the wrapped application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("X-Content-Type-Options", "nosniff")
                headers.setdefault("Referrer-Policy", "no-referrer")
                headers.setdefault("Content-Security-Policy", _NOTHING)
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)


def page_file(http: Request, name: str) -> Response:
    """Return a file of the built pages.

    Raises:
        ApiError: 404, no file has this name.
    """
    found = _files().get(name)
    if found is None:
        raise ApiError(404, f"The file {name[:100]!r} does not exist here.")
    content, tag = found
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if name.endswith(".html"):
        headers["Content-Security-Policy"] = _OWN_FILES_ONLY
    if tag in http.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=_TYPES[Path(name).suffix], headers=headers)


@cache
def _files() -> dict[str, tuple[bytes, str]]:
    """Return the content and ETag of each file, by name."""
    contents = {path.name: path.read_bytes() for path in FILES.iterdir() if path.suffix in _TYPES}
    return {name: (content, f'"{hashlib.sha256(content).hexdigest()[:16]}"') for name, content in contents.items()}
