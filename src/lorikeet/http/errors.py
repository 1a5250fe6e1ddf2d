"""Errors in the form that clients receive: ``{"error": {"message", "type", "param", "code"}}``."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowed",
    409: "ConflictError",
    413: "RequestEntityTooLarge",
    415: "UnsupportedMediaType",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
    507: "InsufficientStorageError",
}

_MAY_BE_RETRIED = {408, 409, 429, 500, 503, 504}
"""Statuses after which a retry may succeed. OpenAI's clients retry after others, too, unless a header forbids it."""

_MAX_SHOWN = 100
"""Most characters of a body's key in an error message."""


_PATH = re.compile(r"""'/[^']+'|"/[^"]+"|\b(?:ipc|file|sqlite):/[^\s'"]+|(?<![\w.:/~-])/(?!v1/)[^\s:'"(),;]+""")
"""Matches an absolute path, in quotes or not, or its URL, but no route of this API."""


class ApiError(HTTPException):
    """Reports an error to the client. As an HTTPException it passes FastAPI unchanged while a body is read.

    Args:
        status: HTTP status.
        message: text for the client, which names the fault and its place.
        param: the faulty field of the body.
        type: OpenAI's ``type``; derived from the status if not given.
        headers: extra response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        type: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.status = status
        self.message = message
        self.param = param
        self.type = type or _TYPES.get(status, "Error")

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the answer."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.status}}

    def response(self) -> JSONResponse:
        """Return the response with this error."""
        headers = {} if self.status in _MAY_BE_RETRIED else {"x-should-retry": "false"}
        return JSONResponse(self.body(), self.status, headers | dict(self.headers or {}))


def hide_paths(text: str) -> str:
    """Return an internal error's text for clients, with only the last part of each path of a file or socket.

    Clients need not know the folders of the server. The log has the whole text.
    """
    return _PATH.sub(lambda found: found[0].strip("'\"").rstrip("/").rpartition("/")[2], text)


@contextmanager
def in_words(words: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in errors within the context to the names of the client's body.

    Args:
        words: the body's name of each field of a completion.
    """
    try:
        yield
    except ApiError as error:
        # "prompt" is also an English word, so the text gets new names only for names with an underscore.
        said = re.sub(r"\b\w+_\w+\b", lambda found: words.get(found[0], found[0]), error.message)
        param = None if error.param is None else words.get(error.param, error.param)
        raise ApiError(error.status, said, param=param, type=error.type, headers=error.headers) from error


def bad_request(message: str, param: str | None = None) -> ApiError:
    """Return the 400 for a faulty request."""
    return ApiError(400, message, param=param)


def invalid_json(error: json.JSONDecodeError) -> ApiError:
    """Return the 400 for a body that is not JSON, with the place of the fault."""
    return bad_request(f"The body is not valid JSON: {error.msg}, at line {error.lineno}, column {error.colno}.")


def not_supported(message: str, param: str | None = None) -> ApiError:
    """Return the 501 for a field or route that is not supported."""
    return ApiError(501, message, param=param)


def model_not_found(name: str, hint: str = "") -> ApiError:
    """Return the 404 for an unknown model, in vLLM's words and followed by ``hint``."""
    return ApiError(404, f"The model `{name}` does not exist.{hint}", param="model")


def engine_unavailable(error: Exception) -> ApiError:
    """Return the 503 for a request that no engine can serve, with the cause."""
    return ApiError(503, f"The engine is not available: {hide_paths(str(error))}")


def unexpected_failure() -> ApiError:
    """Return the 500 for an unexpected error, whose text stays in the log."""
    return ApiError(500, "The server failed to answer this request; its log has the cause.")


def install_handlers(app: Starlette) -> None:
    """Answer errors of routes in OpenAI's form; ``RequestIds`` answers unexpected exceptions."""

    async def api_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response()

    async def http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}" if error.status_code < 413 else error.detail
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            reason = first.get("ctx", {}).get("error", first["msg"])
            return invalid_json(json.JSONDecodeError(reason, error.body, first["loc"][1])).response()
        return invalid_body(error.errors()).response()

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)


def invalid_body(faults: Sequence[Any]) -> ApiError:
    """Return the 400 that names the first faulty field. The faults of a union's members count as one.

    Args:
        faults: pydantic's reports; each place begins with the part of the request.
    """
    first = faults[0]
    of_field = [fault for fault in faults if fault["loc"][:2] == first["loc"][:2]]
    where = _common_prefix([fault["loc"] for fault in of_field])[1:]  # The first part is "body" or "query".
    if not where and "field" in first.get("ctx", {}):  # A check of several fields found the fault.
        where = (first["ctx"]["field"],)
    if not where:
        return bad_request(f"The body must be a JSON object: {first['msg']}.")
    reasons = " or ".join(dict.fromkeys(fault["msg"] for fault in of_field))
    path = ".".join(str(part)[:_MAX_SHOWN] for part in where)
    return bad_request(f"{path}: {reasons}.", str(where[0]))


def _common_prefix(paths: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return the common prefix of places; pydantic's names for the members of a union follow it."""
    same = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return tuple(parts[0] for parts in same)
