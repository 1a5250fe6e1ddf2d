"""Serves the console at ``/ui``, the page of the routes at ``/docs``, and the routes' description.

The pages load without a key, since browsers cannot send one with a link. They fetch their data with the key that
the user types into the console.
"""

from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from lorikeet.http.routes import Callers, Route, Routes
from lorikeet.http.web import page_file

ROUTES = Routes(note="the routes, for browsers and client generators")


@ROUTES.add(Route("GET /ui", Callers.ANYONE, note="the console: see [console.md](console.md)"), include_in_schema=False)
async def console(http: Request) -> Response:
    """Return the console's page."""
    return page_file(http, "ui.html")


@ROUTES.add(Route("GET /docs", Callers.ANYONE), include_in_schema=False)
async def docs(http: Request) -> Response:
    """Return the page of the routes."""
    return page_file(http, "docs.html")


@ROUTES.add(Route("GET /docs/{name} /ui/{name}", Callers.ANYONE, note="files of these pages"), include_in_schema=False)
async def file(http: Request, name: str) -> Response:
    """Return a file of these pages."""
    return page_file(http, name)


@ROUTES.add(Route("GET /openapi.json", Callers.KEYS), include_in_schema=False)
async def openapi(http: Request) -> Response:
    """Return the description of the routes in OpenAPI's format."""
    described: dict[str, Any] = http.app.openapi()
    root_path = http.scope.get("root_path", "")
    if root_path:
        described = {**described, "servers": [{"url": root_path}]}
    return JSONResponse(described)
