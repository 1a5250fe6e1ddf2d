"""Parameters of route handlers: the service and the sender of a request."""

from typing import Annotated

from fastapi import Depends
from fastapi import Request as HttpRequest

from lorikeet.http.logs import ANSWER_HEADERS
from lorikeet.http.sessions import SESSION_HEADER, session_of
from lorikeet.http.tenancy import RateReport
from lorikeet.serving.requests import Sender
from lorikeet.serving.service import Service
from lorikeet.tenants.keys import Access


async def service_of(request: HttpRequest) -> Service:
    """Return the server's service. A coroutine, since FastAPI would run a plain function in a thread."""
    service: Service = request.app.state.service
    return service


def access_of(request: HttpRequest) -> Access:
    """Return the rights of a request's sender, which the middleware has found."""
    access: Access = request.scope["state"]["access"]
    return access


async def sender_of(request: HttpRequest) -> Sender:
    """Return the sender of a request, which the middleware has found."""
    state = request.scope["state"]
    return Sender(
        state["request_id"],
        state["tenant"],
        state.get("is_batch", False),
        access_of(request),
        state.get("rate_report", RateReport()),
        state.get("is_admin", False),
        state.get(ANSWER_HEADERS),
        session_of(request.headers.get(SESSION_HEADER), state["tenant"]),
    )


ServiceDep = Annotated[Service, Depends(service_of)]
SenderDep = Annotated[Sender, Depends(sender_of)]
