"""Defines the rows of the table of routes: the callers, body size and forwarding of a route.

A row stands beside its handler (``lorikeet/api/routes``, ``lorikeet/router/app.py``). Rows that the server and the
router both read stand in ``http/model_routes.py``. The application, the middleware, batches and the docs page are made
from rows; see docs/decisions/route-table.md.
"""

import enum
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from re import Pattern
from typing import Any, NamedTuple, TypeVar

from starlette.routing import compile_path


class Callers(enum.Enum):
    """Callers of a route. Anybody may call every route if the settings have no keys and no tenants."""

    ANYONE = enum.auto()
    """No key is needed."""
    ANYONE_WITHOUT_TENANTS = enum.auto()
    """No key is needed without tenants. Tenants make it the operator's route, since it shows others' requests."""
    KEYS = enum.auto()
    """Any key is accepted. The handler shows a tenant only its own data."""
    OPERATOR = enum.auto()
    """Any key of the settings is accepted, but no tenant's key."""
    ADMINS_AND_TENANTS = enum.auto()
    """An admin key or a tenant's key is accepted. The handler lets a tenant change only its own data."""
    ADMINS = enum.auto()
    """Only an admin key of the settings is accepted."""


_WITHOUT_KEY = (Callers.ANYONE, Callers.ANYONE_WITHOUT_TENANTS)


class BodySize(enum.Enum):
    """Size of a request's body; the application sets the limit of each size in bytes."""

    SMALL = enum.auto()
    """A small body, which is read and parsed on the event loop."""
    PROMPT = enum.auto()
    """A body that another process reads if it is large (``serving/large_bodies.py``)."""
    POOLED = enum.auto()
    """A body of many texts, which is parsed on the event loop."""
    WEIGHTS = enum.auto()
    """The weights of an adapter, which are written to a file while they arrive."""
    FILE = enum.auto()
    """The requests of a batch, which are written to a file while they arrive."""


class Forwarding(enum.Enum):
    """Treatment of a request by the router, on a route that it shares with the server."""

    NEVER = enum.auto()
    """The router does not forward the request."""
    GENERATED = enum.auto()
    """To a backend that has the model and generates the answer, as a stream if the body requests one."""
    GENERATED_WHOLE = enum.auto()
    """To a backend that has the model and generates the answer, never as a stream."""
    POOLED = enum.auto()
    """To a backend that has the model, which runs the prompt and generates nothing."""
    COUNTED = enum.auto()
    """To a backend that has the model, which runs nothing."""
    BY_RESPONSE = enum.auto()
    """To the backend that stores the response named in the path."""


@dataclass(frozen=True)
class Route:
    """One row of the table.

    Attributes:
        call: methods and paths in FastAPI's form, ``GET/POST /path /other-path``.
        callers: the callers that are accepted.
        body: the size of its body.
        is_batchable: whether lines of batches may name it.
        forwarding: its treatment by the router.
        note: note in the table of docs/api.md. Routes with the same note share a line.
        is_supported: False for a route that only refuses, with 501.
    """

    call: str
    callers: Callers
    body: BodySize = BodySize.SMALL
    is_batchable: bool = False
    forwarding: Forwarding = Forwarding.NEVER
    note: str = ""
    is_supported: bool = True

    @cached_property
    def methods(self) -> tuple[str, ...]:
        """Methods of the route."""
        return tuple(self.call.split(" ")[0].split("/"))

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Paths of the route."""
        return tuple(self.call.split(" ")[1:])

    @property
    def path(self) -> str:
        """The only path of the route.

        Raises:
            ValueError: the route has several paths.
        """
        (path,) = self.paths
        return path

    def answers(self, method: str) -> bool:
        """Return whether the route answers this method; GET includes HEAD."""
        return ("GET" if method == "HEAD" else method) in self.methods


Handler = Callable[..., Awaitable[Any]]
_H = TypeVar("_H", bound=Handler)


class HandledRoute(NamedTuple):
    """Row with its handler and further arguments of ``FastAPI.add_api_route``."""

    row: Route
    handler: Handler
    options: dict[str, Any]


class Routes(list[HandledRoute]):
    """Collects the routes of a module, in the order of their handlers.

    Args:
        note: the note of all rows without their own note.
    """

    def __init__(self, note: str = "") -> None:
        super().__init__()
        self._note = note

    def add(self, row: Route, **options: Any) -> Callable[[_H], _H]:
        """Return a decorator that makes a function the handler of a row.

        Args:
            row: the row of the handler.
            options: further arguments of ``FastAPI.add_api_route``.
        """
        row = row if row.note else replace(row, note=self._note)

        def register(handler: _H) -> _H:
            self.append(HandledRoute(row, handler, options))
            return handler

        return register


class RouteTable:
    """Finds the row of a request in the same way as the application finds its handler.

    Args:
        rows: the rows, in the order in which the application searches for a handler.

    Raises:
        ValueError: an earlier row answers the path and method of a later one.
    """

    def __init__(self, rows: Iterable[Route]) -> None:
        self._by_path: dict[str, list[Route]] = {}
        self._patterns: list[tuple[Pattern[str], Route]] = []
        for row in rows:
            for path in row.paths:
                self._check_reached(row, path)
                if "{" in path:
                    self._patterns.append((compile_path(path)[0], row))
                else:
                    self._by_path.setdefault(path, []).append(row)

    def find(self, method: str, path: str) -> Route | None:
        """Return the row of a request.

        A method that no row of the path has gets 405. Its row is the one with the fewest callers, or None if that one
        needs no key. A path with slashes at its end is redirected and has the row of the path without them.
        """
        return self._find(method, path) or self._find(method, path.rstrip("/"))

    def _find(self, method: str, path: str) -> Route | None:
        rows = self._by_path.get(path, [])
        for row in rows:
            if row.answers(method):
                return row
        rows = rows + [row for pattern, row in self._patterns if pattern.match(path)]
        for row in rows:
            if row.answers(method):
                return row
        closed = (row for row in rows if row.callers not in _WITHOUT_KEY)
        return max(closed, key=lambda row: row.callers.value, default=None)

    def _check_reached(self, row: Route, path: str) -> None:
        for method in row.methods:
            found = self._find(method, path)
            if found is not None and found.answers(method):
                raise ValueError(f"{method} {path} is never reached: {found.call} comes before it.")
