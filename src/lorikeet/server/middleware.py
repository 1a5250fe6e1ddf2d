"""What every request of a server or a gateway passes before its route."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

from lorikeet.server.auth import Auth
from lorikeet.server.limits import BodyLimit
from lorikeet.server.logs import RequestIds
from lorikeet.server.pages import ForeignPages


def add_middleware(
    app: Starlette,
    *,
    max_body_bytes: int,
    api_keys: Sequence[str] = (),
    admin_keys: Sequence[str] = (),
    tenant_header: str = "",
    allowed_origins: Sequence[str] = (),
) -> None:
    """Give requests their ids, check their keys, and limit their bodies.

    Args:
        app: has its routes.
        max_body_bytes: longer bodies get 413.
        api_keys, admin_keys, tenant_header: see ``Auth``.
        allowed_origins: of web pages that may use the server; ``*`` for any, empty for none but its own.

    Raises:
        ConfigError: a key is empty.
    """
    # The last one added sees a request first.
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(ForeignPages, allowed_origins=allowed_origins)
    app.add_middleware(Auth, api_keys=api_keys, admin_keys=admin_keys, tenant_header=tenant_header)
    app.add_middleware(RequestIds)
    if allowed_origins:
        # No cookies: keys are in a header, which a page of an allowed origin must hold itself.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=("*",),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After"),
            allow_private_network=True,
        )
