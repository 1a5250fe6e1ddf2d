"""Reads single headers of a request."""

from starlette.types import Scope


def header(scope: Scope, name: bytes) -> str:
    """Return a request's header; empty without it.

    Every middleware reads a few. Starlette's mapping raises and catches an exception for each that is missing.

    Args:
        scope: the request's scope.
        name: name in lower case.
    """
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return ""
