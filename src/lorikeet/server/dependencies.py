"""What routes ask FastAPI for."""

from typing import Annotated

from fastapi import Depends, Request

from lorikeet.server.errors import ApiError
from lorikeet.server.service import Service


def _parts(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _is_json(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"Only 'application/json' is allowed as Content-Type, not {kind!r}.")


Parts = Annotated[Service, Depends(_parts)]
JsonBody = Depends(_is_json)
