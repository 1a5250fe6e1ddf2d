"""Serves SageMaker's routes: a container takes every request at ``/invocations``. ``/ping`` is in ``info.py``.

Routes and headers: https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html and
https://docs.aws.amazon.com/sagemaker/latest/dg/realtime-endpoints-adapt.html. Sessions:
https://docs.aws.amazon.com/sagemaker/latest/dg/stateful-sessions.html.
"""

from typing import Annotated, Any, Literal

from fastapi import Header, Request
from pydantic import ConfigDict, Field
from starlette.responses import PlainTextResponse, Response

from lorikeet.api.dependencies import SenderDep, ServiceDep
from lorikeet.api.routes import tgi
from lorikeet.api.routes.chat import chat_completions
from lorikeet.api.routes.completions import completions
from lorikeet.chat.protocol import Body, ChatCompletionRequest, CompletionRequest, validated
from lorikeet.http.errors import bad_request
from lorikeet.http.routes import Callers, Route, Routes
from lorikeet.http.sessions import Sessions
from lorikeet.serving.adapter_life import load_adapter, refuse_pin, unload_adapter

ROUTES = Routes(note="SageMaker's")


@ROUTES.add(Route("POST /invocations", Callers.KEYS))
async def invocations(
    http: Request,
    body: dict[str, Any],
    service: ServiceDep,
    sender: SenderDep,
    adapter: Annotated[str | None, Header(alias="X-Amzn-SageMaker-Adapter-Identifier")] = None,
    session: Annotated[str | None, Header(alias="X-Amzn-SageMaker-Session-Id")] = None,
) -> Response:
    """Answer a chat, a completion or a body of TGI, by its fields; a header may name the adapter.

    It also begins and ends the sessions by which SageMaker sends requests to the same instance.
    """
    if "requestType" in body:
        return _session(validated(SessionRequest, body), service.sessions, sender.tenant, session)
    if session is not None:
        service.sessions.use(sender.tenant, session)
    if "inputs" in body:
        asked = validated(tgi.TgiRequest, body)
        if adapter:
            asked.parameters = asked.given.model_copy(update={"adapter_id": adapter})
        return await tgi.answer(service, asked, sender, stream=bool(asked.stream), in_a_list=True)
    named = body | ({"model": adapter} if adapter else {})
    if "messages" in body:
        return await chat_completions(http, validated(ChatCompletionRequest, named), service, sender)
    if "prompt" in body:
        return await completions(http, validated(CompletionRequest, named), service, sender)
    raise bad_request("Give messages for a chat, prompt for a completion, or inputs, as in TGI.", "messages")


class SessionRequest(Body):
    """Body of ``POST /invocations`` that begins or ends a session."""

    model_config = ConfigDict(extra="forbid")

    requestType: Literal["NEW_SESSION", "CLOSE"]


def _session(body: SessionRequest, sessions: Sessions, tenant: str, session: str | None) -> Response:
    if body.requestType == "NEW_SESSION":
        begun, until = sessions.begin(tenant)
        expires = until.strftime("%Y-%m-%dT%H:%M:%SZ")
        return PlainTextResponse("", headers={"X-Amzn-SageMaker-New-Session-Id": f"{begun}; Expires={expires}"})
    sessions.end(tenant, session)
    return PlainTextResponse("", headers={"X-Amzn-SageMaker-Closed-Session-Id": session or ""})


class SagemakerAdapter(Body):
    """Body of ``POST /adapters``."""

    name: Annotated[str, Field(min_length=1)]
    src: Annotated[str, Field(min_length=1)]
    preload: bool | None = None
    pin: bool | None = None


@ROUTES.add(Route("POST /adapters", Callers.ADMINS_AND_TENANTS))
async def add_adapter(body: SagemakerAdapter, service: ServiceDep, sender: SenderDep) -> Response:
    """Load an adapter; ``preload`` brings it onto the device."""
    access = sender.access
    if body.pin:
        refuse_pin(access)
    await load_adapter(service, body.name, body.src, access=access, replace=False)
    service.resolver.loader.pin(body.name, bool(body.pin))
    if body.preload:
        await service.warm(body.name, sender)
    return PlainTextResponse(f"Adapter {body.name} loaded.\n")


@ROUTES.add(Route("DELETE /adapters/{name:path}", Callers.ADMINS_AND_TENANTS))
async def delete_adapter(name: str, service: ServiceDep, sender: SenderDep) -> Response:
    """Unload an adapter."""
    await unload_adapter(service, name, sender.access)
    return PlainTextResponse(f"Adapter {name} unloaded.\n")
