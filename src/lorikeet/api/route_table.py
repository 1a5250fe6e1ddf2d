"""Makes the application's routes from the rows in ``lorikeet.api.routes``."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, get_type_hints

from fastapi import Depends, FastAPI, Request
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from lorikeet.api import routes as modules
from lorikeet.api.dependencies import sender_of, service_of
from lorikeet.chat.protocol import may_hold_surrogates, refuse_lone_surrogates
from lorikeet.http.body_gate import check_content_type
from lorikeet.http.errors import ApiError
from lorikeet.http.model_routes import MODEL_ROUTES
from lorikeet.http.routes import BodySize, Forwarding, HandledRoute, Routes, RouteTable
from lorikeet.serving.large_bodies import PromptRoute

_FIRST = (BodySize.PROMPT, BodySize.POOLED)
"""Bodies of the routes that come first: FastAPI tries the routes in their order for each request."""


class RouteError(Exception):
    """A route lacks a row, or its row is wrong."""


def all_routes() -> list[HandledRoute]:
    """Return the routes of every module in ``lorikeet.api.routes``.

    Raises:
        RouteError: a module lacks ``ROUTES``, or a batchable or forwarded row is missing in ``model_routes``.
    """
    found: list[HandledRoute] = []
    for each in pkgutil.iter_modules(modules.__path__, f"{modules.__name__}."):
        routes = getattr(importlib.import_module(each.name), "ROUTES", None)
        if not isinstance(routes, Routes):
            raise RouteError(f"{each.name} lacks ROUTES; move a module without routes to another package.")
        found += routes
    for row, handler, _ in found:
        is_shared = row.is_batchable or row.forwarding is not Forwarding.NEVER
        if is_shared and row not in MODEL_ROUTES:
            raise RouteError(f"{_name(handler)}: a batchable or forwarded row belongs into http/model_routes.py.")
    found.sort(key=lambda each: _FIRST.index(each.row.body) if each.row.body in _FIRST else len(_FIRST))
    return found


def add_routes(app: FastAPI, routes: Iterable[HandledRoute]) -> RouteTable:
    """Add routes to an application, and return the table of their rows.

    A handler with a parameter ``body`` gets JSON only.

    Raises:
        RouteError: a route of the application lacks a row.
        ValueError: an earlier row hides a later one.
    """
    routes = list(routes)
    known = set()
    for row, handler, options in routes:
        takes_json = "body" in inspect.signature(handler).parameters
        for path in row.paths:
            known.add((path, handler))
            app.router.add_api_route(
                path,
                handler,
                methods=list(row.methods),
                dependencies=[Depends(check_json)] if takes_json else [],
                route_class_override=_PromptRoute if row.body is BodySize.PROMPT else None,
                **options,
            )
    for route in app.routes:
        endpoint = getattr(route, "endpoint", route)
        if (getattr(route, "path", ""), endpoint) not in known:
            raise RouteError(f"{_name(endpoint)} lacks a row: register it by ROUTES.add of its module.")
    return RouteTable(row for row, _, _ in routes)


_GIVEN = {"http", "body", "service", "sender"}
"""Parameters that a handler may have to be called directly."""


class DirectRoute(APIRoute):
    """A route that calls its handler directly: FastAPI's search for arguments makes 18 % of a chat's calls.

    FastAPI answers if the body is wrong, and if the handler has other parameters or does not return a response.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the function that answers a request."""
        handle = super().get_route_handler()
        handler = self.endpoint
        hints = get_type_hints(handler, include_extras=True)
        names = set(inspect.signature(handler).parameters)
        if not ("body" in names <= _GIVEN and hints.get("return") is Response):
            return handle
        kind: TypeAdapter[Any] = TypeAdapter(hints["body"])
        has_request = "http" in names

        async def handle_directly(request: Request) -> Response:
            try:
                await check_json(request)
                body = kind.validate_python(await request.json())
            except (ApiError, ClientDisconnect, RecursionError, ValueError):
                return await handle(request)
            given = {"http": request} if has_request else {}
            service = await service_of(request)
            response: Response = await handler(**given, body=body, service=service, sender=await sender_of(request))
            return response

        return handle_directly


class _PromptRoute(PromptRoute, DirectRoute):
    """A direct route that reads large bodies in another process."""


async def check_json(request: Request) -> None:
    """Check the content type of a body, and refuse lone surrogates, which UTF-8 cannot encode.

    Raises:
        ApiError: 415 for another content type, 400 for a lone surrogate.
    """
    check_content_type(request)
    body = await request.body()
    if may_hold_surrogates(body):
        refuse_lone_surrogates(body, await request.json())


def _name(handler: object) -> str:
    return f"{getattr(handler, '__module__', '')}.{getattr(handler, '__qualname__', handler)}"
