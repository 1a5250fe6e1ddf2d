"""Errors as clients see them: ``{"error": {"message", "type", "param", "code"}}``."""

from collections.abc import Mapping
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
}

_LONGEST_SHOWN = 100
"""Characters of a key of a body, which its sender has chosen."""


class ApiError(HTTPException):
    """An answer other than success. As an HTTPException it also passes through FastAPI's reading of bodies.

    Args:
        status: HTTP status.
        message: for the client; names what is wrong and where.
        param: the field of the body that is at fault.
        type: OpenAI's ``type``; follows from the status if not given.
        headers: extra reply headers.
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
        """Return the JSON body."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.status}}

    def response(self) -> JSONResponse:
        """Return the reply."""
        return JSONResponse(self.body(), self.status, self.headers)


def bad_request(message: str, param: str | None = None) -> ApiError:
    """Return a 400."""
    return ApiError(400, message, param=param)


def not_supported(message: str, param: str | None = None) -> ApiError:
    """Return a 501."""
    return ApiError(501, message, param=param)


def model_not_found(name: str) -> ApiError:
    """Return the 404 that clients of vLLM know."""
    return ApiError(404, f"The model `{name}` does not exist.", param="model")


def unexpected_failure() -> ApiError:
    """Return the 500 that tells nothing but where to look."""
    return ApiError(500, "The server failed to answer this request; its log says why.")


def install_handlers(app: Starlette) -> None:
    """Make errors that routes raise OpenAI-shaped; for those that nobody expects see ``RequestIds``."""

    async def api_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response()

    async def http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}" if error.status_code < 413 else error.detail
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _from_validation(error).response()

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)


def _from_validation(error: RequestValidationError) -> ApiError:
    """Name the first field that is wrong. A union reports each of its members; they are one fault."""
    faults = error.errors()
    first = faults[0]
    if first["type"] == "json_invalid":
        return bad_request(f"The body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}.")
    of_field = [fault for fault in faults if fault["loc"][:2] == first["loc"][:2]]
    where = _common([fault["loc"] for fault in of_field])[1:]  # without "body" or "query"
    if not where:
        return bad_request(f"The body must be a JSON object: {first['msg']}.")
    reasons = " or ".join(dict.fromkeys(fault["msg"] for fault in of_field))
    path = ".".join(str(part)[:_LONGEST_SHOWN] for part in where)
    return bad_request(f"{path}: {reasons}.", str(where[0]))


def _common(paths: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return what all begin with; where they part begin pydantic's names for the members of a union."""
    same = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return tuple(parts[0] for parts in same)
