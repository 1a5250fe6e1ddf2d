"""Serves health, version, metrics, models and the tokenizer, and answers 501 for unsupported APIs."""

from typing import Annotated, Any

import msgspec
from fastapi import Query, Request
from starlette.responses import JSONResponse, Response

from lorikeet import __version__
from lorikeet.api.dependencies import SenderDep, ServiceDep
from lorikeet.chat.protocol import SPECIAL_TOKENS, DetokenizeRequest, TokenizeRequest, refuse_unsupported
from lorikeet.http.errors import ApiError, bad_request, not_supported
from lorikeet.http.model_routes import AUTO_MODEL, DETOKENIZE, POOLING, TOKENIZE
from lorikeet.http.routes import Callers, Route, Routes
from lorikeet.http.threads import in_daemon_thread
from lorikeet.observe.request_records import MOST_RECORDS
from lorikeet.serving.large_bodies import prepared_body

MOST_LISTED = 1000
"""Sequences that one call lists."""

ROUTES = Routes()
_HEALTH = (
    "`/health` and `/health/ready`: 200, or 503 while draining, or while the engine restarts or does not answer "
    '(`--heartbeat-timeout`, `--step-timeout`), with `{"status": "ready", "draining", "asleep" or "engine down", '
    '"paused", "kernels", "weights", "engine_restarts"}`; `/health/live`: always 200'
)
_STATE = '`/version`: `{"version"}`; `/load`: `{"server_load"}`, sequences accepted and not finished'
_MODELS = "the base first; `root` (its source; of a folder only the name), `parent`, `max_model_len`, `permission`"

UNSUPPORTED = {
    "/v1/audio/transcriptions": "Audio is not supported.",
    "/v1/audio/translations": "Audio is not supported.",
    "/v1/audio/speech": "Audio is not supported.",
    "/v1/images/generations": "Images are not supported.",
    "/pooling": "Pooling is not supported yet.",
}


@ROUTES.add(
    Route(
        "GET /health/live",
        Callers.ANYONE,
        note=_HEALTH,
    )
)
async def live() -> Response:
    """Answer 200 while the process runs."""
    return Response(status_code=200)


_READY = "/health/ready"


@ROUTES.add(Route(f"GET {_READY} /health", Callers.ANYONE, note=_HEALTH))
async def ready(http: Request, service: ServiceDep) -> JSONResponse:
    """Return whether new requests are served: 200, or 503 while draining or without an engine.

    A server whose engine sleeps is healthy, as vLLM's, but not ready.
    """
    status = "draining" if service.gate.draining else service.engine_status
    restarts = sum(view.restarts for view in service.client.views.values())
    engine = service.client.engine_info
    body: dict[str, Any] = {
        "status": status,
        "paused": service.resolver.pauses.stops_all,
        "kernels": engine.kernels,
        "weights": engine.weights,
        "engine_restarts": restarts,
    }
    if engine.base is not None:
        body["model_impl"] = engine.base.implementation
    is_well = status == "ready" or (status == "asleep" and http.url.path != _READY)
    return JSONResponse(body, 200 if is_well else 503)


@ROUTES.add(
    Route(
        "GET /ping",
        Callers.ANYONE,
        note=_STATE,
    )
)
@ROUTES.add(
    Route(
        "POST /ping",
        Callers.ANYONE,
        note=_STATE,
    ),
    operation_id="ping_by_post",
)
async def ping(http: Request, service: ServiceDep) -> Response:
    """Return the status of ``/health``, under SageMaker's name."""
    return Response(status_code=(await ready(http, service)).status_code)


@ROUTES.add(
    Route(
        "GET /version",
        Callers.ANYONE,
        note=_STATE,
    )
)
async def version() -> dict[str, str]:
    """Return Lorikeet's version."""
    return {"version": __version__}


@ROUTES.add(
    Route(
        "GET /load",
        Callers.ANYONE_WITHOUT_TENANTS,
        note=_STATE,
    )
)
async def load(service: ServiceDep) -> dict[str, int]:
    """Return the number of sequences accepted and not finished."""
    return {"server_load": service.gate.active}


@ROUTES.add(
    Route(
        "GET /metrics",
        Callers.ANYONE_WITHOUT_TENANTS,
        note=_STATE,
    )
)
async def metrics(http: Request, service: ServiceDep) -> Response:
    """Return all metrics in Prometheus's format, or in OpenMetrics for clients that accept it."""
    return service.observer.metrics.page(http.headers.get("accept", ""))


@ROUTES.add(
    Route(
        "GET /v1/requests",
        Callers.KEYS,
        note="the latest requests, the newest first, with what each waited for",
    )
)
async def requests(
    service: ServiceDep, sender: SenderDep, limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 50
) -> dict[str, Any]:
    """Return the latest sequences of the sender's key, the newest first; an admin key finds all."""
    found = service.observer.records.latest(limit, sender.may_see)
    return {"object": "list", "data": [record.summary() for record in found]}


@ROUTES.add(
    Route(
        "GET /v1/requests/{request_id}",
        Callers.KEYS,
        note="waits of a recent request, decisions about it, and the seconds that they saved",
    )
)
async def request(request_id: str, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Return the waits of a recent request, the decisions for it, and the time that they saved.

    Raises:
        ApiError: 404, the request is unknown or belongs to another key.
    """
    found = service.observer.records.find(request_id, sender.may_see)
    if not found:
        raise ApiError(404, f"The request {request_id!r} is not among the latest {MOST_RECORDS}.")
    return {"object": "request", "id": request_id, "sequences": [record.as_json() for record in found]}


@ROUTES.add(
    Route(
        "GET /v1/models",
        Callers.KEYS,
        note=_MODELS,
    )
)
async def models(service: ServiceDep, sender: SenderDep) -> Response:
    """Return the models that the sender may see, the base model first.

    FastAPI's own encoder would block the event loop for thousands of cards.
    """
    unloaded = await in_daemon_thread(service.resolver.loader.names) if service.resolver.loader.is_enabled else []
    unloaded = [*unloaded, *service.resolver.splits.names(sender.access)]
    if service.resolver.is_auto(AUTO_MODEL, None):
        unloaded.append(AUTO_MODEL)
    body = {"object": "list", "data": service.models.cards(unloaded, sender.access)}
    return Response(msgspec.json.encode(body), media_type="application/json")


@ROUTES.add(
    Route(
        "GET /v1/models/{name:path}",
        Callers.KEYS,
        note=_MODELS,
    )
)
async def model(name: str, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Return one model."""
    if (
        service.models.missing(name)
        and sender.access.may_see(name)
        and name in await in_daemon_thread(service.resolver.loader.names)
    ):
        return service.models.unloaded_card(name)
    return service.models.card(name, sender.access)


@ROUTES.add(TOKENIZE)
async def tokenize(http: Request, body: TokenizeRequest, service: ServiceDep, sender: SenderDep) -> Any:
    """Return the token ids of a prompt, or of messages in the chat template, as in chat completions."""
    refuse_unsupported(body)
    prepared = prepared_body(http)
    target = prepared.target if prepared else await service.resolve(body, sender, generates=False)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Give either prompt or messages.", "prompt")
    if body.messages is not None and body.add_special_tokens:
        raise not_supported(SPECIAL_TOKENS, "add_special_tokens")
    if prepared and not prepared.images:
        return Response(prepared.answer, media_type="application/json")
    chat = (await service.chats.settings_of(target.chat)).for_body(body)
    texts = chat.text_processor
    if prepared:
        (tokens,) = prepared.prompts
    elif body.messages is not None:
        tokens = (await service.encode_messages(TokenizeRequest, body, body.messages, chat)).token_ids
    else:
        special = body.add_special_tokens is not False
        (tokens,) = await texts.encode([body.prompt or ""], add_special_tokens=special)
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": service.limits.max_model_len,
        "tokens": tokens,
        "token_strs": None,
    }
    if body.return_token_strs:
        answer["token_strs"] = await texts.token_strings(tokens)
    return answer


@ROUTES.add(DETOKENIZE)
async def detokenize(http: Request, body: DetokenizeRequest, service: ServiceDep, sender: SenderDep) -> Any:
    """Return the text of token ids."""
    prepared = prepared_body(http)
    target = prepared.target if prepared else await service.resolve(body, sender, generates=False)
    if prepared:
        return Response(prepared.answer, media_type="application/json")
    if outside := [token for token in body.tokens if token >= service.limits.vocabulary]:
        raise bad_request(f"Token id {outside[0]} is out of vocabulary.", "tokens")
    (text,) = await (await service.chats.settings_of(target.chat)).text_processor.decode_all([body.tokens])
    return {"prompt": text}


async def _unsupported(request: Request) -> Response:
    raise not_supported(UNSUPPORTED[request.url.path])


for _row in (Route(f"POST {_path}", Callers.OPERATOR, is_supported=False) for _path in UNSUPPORTED):
    ROUTES.add(POOLING if POOLING.path == _row.path else _row, include_in_schema=False)(_unsupported)
