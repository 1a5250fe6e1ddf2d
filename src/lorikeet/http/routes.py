"""The rows of the table of routes: who may call a route, how large its body may be, and where it is answered.

A row stands beside its handler (``lorikeet/api/routes``, ``lorikeet/router/app.py``). Rows that the server and the
router both read stand in ``http/model_routes.py``. The application, the middleware, batches and the docs page are made
from rows: docs/decisions/route-table.md.
"""

import enum
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from re import Pattern
from typing import Any, NamedTuple, TypeVar

from starlette.routing import compile_path


class Callers(enum.Enum):
    """Who may call a route. Without keys in the settings and without tenants, anybody may call every route."""

    ANYONE = enum.auto()
    """No key is needed."""
    ANYONE_WITHOUT_TENANTS = enum.auto()
    """No key is needed. With tenants an operator's key is, since the answer shows what others do."""
    KEYS = enum.auto()
    """Any key. The handler shows a tenant only what is its own."""
    OPERATOR = enum.auto()
    """Any key of the settings; no tenant's."""
    ADMINS_AND_TENANTS = enum.auto()
    """An admin key of the settings, or a tenant's key. The handler lets a tenant change only what is its own."""
    ADMINS = enum.auto()
    """An admin key of the settings."""


_WITHOUT_KEY = (Callers.ANYONE, Callers.ANYONE_WITHOUT_TENANTS)


class BodySize(enum.Enum):
    """How large the body of a request may be; the application says how many bytes each value stands for."""

    SMALL = enum.auto()
    """Read and parsed on the event loop."""
    PROMPT = enum.auto()
    """Small, or read in another process (``serving/large_bodies.py``)."""
    POOLED = enum.auto()
    """Many texts, parsed on the event loop."""
    WEIGHTS = enum.auto()
    """An adapter, written to a file while it arrives."""
    FILE = enum.auto()
    """The requests of a batch, written to a file while they arrive."""


class Forwarding(enum.Enum):
    """How the router treats a request of a route that it shares with the server."""

    NEVER = enum.auto()
    """It does not forward the request."""
    GENERATED = enum.auto()
    """To a backend that has the model; the answer is generated, as a stream if the body wants one."""
    GENERATED_WHOLE = enum.auto()
    """The same, never as a stream."""
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
        call: methods and paths, ``GET/POST /path /other-path``; paths as FastAPI writes them.
        callers: who may call it.
        body: how large its body may be.
        is_batchable: whether lines of batches may name it.
        forwarding: how the router treats it.
        note: for the table in docs/api.md. Routes with the same note share a line.
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
            ValueError: it has several.
        """
        (path,) = self.paths
        return path

    def answers(self, method: str) -> bool:
        """Return whether the route has this method; GET answers HEAD too."""
        return ("GET" if method == "HEAD" else method) in self.methods


Handler = Callable[..., Awaitable[Any]]
_H = TypeVar("_H", bound=Handler)


class HandledRoute(NamedTuple):
    """A row, its handler, and further arguments of ``FastAPI.add_api_route``."""

    row: Route
    handler: Handler
    options: dict[str, Any]


class Routes(list[HandledRoute]):
    """The routes of a module, in the order of their handlers.

    Args:
        note: of all rows that have no note of their own.
    """

    def __init__(self, note: str = "") -> None:
        super().__init__()
        self._note = note

    def add(self, row: Route, **options: Any) -> Callable[[_H], _H]:
        """Return a decorator that makes a function the handler of a row.

        Args:
            row: the row.
            options: further arguments of ``FastAPI.add_api_route``.
        """
        row = row if row.note else replace(row, note=self._note)

        def register(handler: _H) -> _H:
            self.append(HandledRoute(row, handler, options))
            return handler

        return register


class RouteTable:
    """Finds the row of a request, as the application finds its handler.

    Args:
        rows: in the order in which the application looks for a handler.

    Raises:
        ValueError: a row would never be reached, since an earlier one answers its path and method.
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

        For a method that no row of the path has, which gets 405, this is the row with the fewest callers; None if they
        need no key. A path with slashes at its end, which is redirected, has the row of the path without them.
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
