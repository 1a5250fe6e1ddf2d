"""FastAPI dependencies of the routes: the service, the sender of a request, a checked JSON body."""

import json
import re
from typing import Annotated, Any

from fastapi import Depends, Request

from lorikeet.api.errors import ApiError, bad_request
from lorikeet.api.service import Sender, Service

_MAYBE_SURROGATE = re.compile(
    rb"\x00"  # UTF-16 or UTF-32, which JSON allows
    rb"|\xed[\xa0-\xbf]"
    rb"|\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F])"
)
"""Bytes without which a body's JSON holds no lone surrogate; most bodies need no further check.

Each alternative begins with another literal byte, so that the search skips to these bytes.
"""


async def _service(request: Request) -> Service:
    # If it were not async, FastAPI would run it in a thread for every request.
    service: Service = request.app.state.service
    return service


async def _is_json(request: Request) -> None:
    """Check the content type, and that no text has a lone surrogate, which UTF-8 cannot encode."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"Only 'application/json' is allowed as Content-Type, not {kind!r}.")
    if _MAYBE_SURROGATE.search(await request.body()):
        body: Any = await request.json()
        for field, value in body.items() if isinstance(body, dict) else ():
            try:
                json.dumps({field: value}, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                name = field.encode(errors="backslashreplace").decode()
                code = ord(error.object[error.start])
                raise bad_request(f"{name}: half a character, the lone surrogate U+{code:04X}.", name) from None


async def _sender(request: Request) -> Sender:
    return Sender(request.state.request_id, request.state.tenant)


ServiceDep = Annotated[Service, Depends(_service)]
SenderDep = Annotated[Sender, Depends(_sender)]
JsonBody = Depends(_is_json)
