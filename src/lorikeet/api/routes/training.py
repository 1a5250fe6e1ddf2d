"""Serves vLLM's routes for training loops, such as TRL's and SkyRL's, between two updates of their adapters."""

import asyncio
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import Depends, Query
from fastapi import Request as HttpRequest
from pydantic import ConfigDict, Field
from starlette.responses import Response

from lorikeet.api.dependencies import SenderDep, ServiceDep
from lorikeet.chat.protocol import Body
from lorikeet.client.supervisor import EngineError
from lorikeet.core.request import Request
from lorikeet.http.errors import ApiError, bad_request, engine_unavailable
from lorikeet.http.logs import log
from lorikeet.http.routes import Callers, Route, Routes
from lorikeet.http.vllm_adapter_answers import adapter_not_found
from lorikeet.http.weight_pushes import WEIGHT_PUSHES, push_refused
from lorikeet.serving.adapter_life import check_owner
from lorikeet.serving.generation import Generation
from lorikeet.serving.pauses import IN_MEMORY, Scope, SleepTag
from lorikeet.serving.requests import Sender
from lorikeet.serving.service import Service

ROUTES = Routes(note="see [training loops](#training-loops)")

_ID_OF_ANSWER = re.compile(r"^(?:chatcmpl-|cmpl-|msg_|generate-|resp_)")

PauseMode = Literal["abort", "wait", "keep"]
"""Treatment of running requests: they are ended early, finish first, or stand still."""


Adapters = Annotated[list[str] | None, Query()]


def _refuse_unknown(http: HttpRequest) -> None:
    """Refuse a query with an unknown name, without which the call would reach further than was meant.

    Raises:
        ApiError: 400.
    """
    known = [field.alias for field in http.scope["route"].dependant.query_params]
    for name in http.query_params:
        if name not in known:
            raise bad_request(f"{http.url.path} has no parameter {name[:100]!r}, only {', '.join(known)}.", name)


KnownQuery = Annotated[None, Depends(_refuse_unknown)]


@ROUTES.add(Route("POST /pause", Callers.ADMINS_AND_TENANTS))
async def pause(
    service: ServiceDep,
    sender: SenderDep,
    known: KnownQuery,
    mode: Annotated[PauseMode, Query()] = "abort",
    wait_for_inflight_requests: bool = False,
    clear_cache: bool = True,
    adapter: Adapters = None,
    tenant: str | None = None,
) -> dict[str, str]:
    """Pause generation until ``/resume``: all of it, or that of adapters or of a tenant; new requests wait.

    A tenant's key pauses its own requests only. With ``keep`` all running requests stand still; those of adapters or a
    tenant go on with the version that they have. ``clear_cache`` has no effect: KV belongs to one version of an
    adapter, so new weights never use old KV. ``wait_for_inflight_requests`` is the mode ``wait`` of older clients.
    """
    scope = _scope(service, sender, adapter, tenant)
    for name in scope.adapters:
        _check_known(service, sender, name)
    if wait_for_inflight_requests:
        mode = "wait"
    pauses = service.resolver.pauses
    pauses.change(lambda held: held.hold(scope))
    await _end_running(service, mode, scope.covers)
    if pauses.stops_all:  # Another request may have resumed generation.
        service.client.set_paused(True)
    log.info("generation paused", mode=mode, **scope.shown())
    return {"status": "paused"}


@ROUTES.add(Route("POST /resume", Callers.ADMINS_AND_TENANTS))
async def resume(
    service: ServiceDep, sender: SenderDep, known: KnownQuery, adapter: Adapters = None, tenant: str | None = None
) -> dict[str, str]:
    """Resume what ``/pause`` with the same query, and key, has paused."""
    scope = _scope(service, sender, adapter, tenant)
    for name in scope.adapters - service.resolver.pauses.adapters:  # A removed adapter may still be paused.
        _check_known(service, sender, name)
    service.resolver.pauses.change(lambda held: held.release(scope))
    service.client.set_paused(service.resolver.pauses.stops_all)
    log.info("generation resumed", **scope.shown())
    return {"status": "resumed"}


@ROUTES.add(Route("GET /is_paused", Callers.KEYS))
async def is_paused(
    service: ServiceDep, sender: SenderDep, known: KnownQuery, adapter: Adapters = None, tenant: str | None = None
) -> dict[str, Any]:
    """Return whether generation is paused, for the same query and key, and for the operator all pauses."""
    pauses = service.resolver.pauses
    found: dict[str, Any] = {"is_paused": pauses.covers(_scope(service, sender, adapter, tenant))}
    if sender.access.key is None:
        found |= {"adapters": sorted(pauses.adapters), "tenants": sorted(filter(None, pauses.tenants))}
    return found


def _check_known(service: Service, sender: Sender, name: str) -> None:
    """Check that a name is the base model's, or that of an adapter which the sender may see.

    Raises:
        ApiError: 404.
    """
    if service.models.is_base(name) or (name in service.catalog and sender.access.may_see(name)):
        return
    raise adapter_not_found(name)


def _scope(service: Service, sender: Sender, adapters: list[str] | None, tenant: str | None) -> Scope:
    """Return the requests that a pause is about; the name of a split stands for its versions.

    Raises:
        ApiError: 403, a tenant names another tenant or somebody else's adapter.
    """
    if sender.access.key is not None:
        if tenant not in (None, sender.tenant):
            raise ApiError(403, "A tenant's key pauses its own requests only.", param="tenant")
        for name in adapters or ():
            check_owner(service, sender.access, name)
        tenant = None if adapters else sender.tenant
    names = set[str]()
    for name in adapters or ():
        split = service.resolver.splits.get(name)
        names.update((name,) if split is None else (*split.versions, *split.shadow))
    return Scope(frozenset(names), tenant)


@ROUTES.add(Route("POST /sleep", Callers.ADMINS))
async def sleep(
    service: ServiceDep,
    known: KnownQuery,
    level: Annotated[int, Query(ge=0, le=2)] = 1,
    mode: Annotated[PauseMode, Query()] = "abort",
    tags: Annotated[list[SleepTag] | None, Query()] = None,
) -> dict[str, Any]:
    """Give back the memory of the weights, of the pool on all tiers, or of both; new requests wait.

    Level 0 pauses only. Levels 1 and 2 are the same: the weights are read from the model's folder again. The engine
    ends; with the tag ``kv_cache`` alone it starts again with its weights, but without its pool. With ``weights`` alone
    the pool sleeps, too.
    """
    pauses = service.resolver.pauses
    before = pauses.asleep
    asleep = frozenset(tags or (IN_MEMORY if level else {SleepTag.SCHEDULING}))
    pauses.change(lambda held: setattr(held, "asleep", held.asleep | asleep))
    await _end_running(service, mode, Scope().covers)
    if pauses.pool_sleeps:  # It may have been woken meanwhile.
        if pauses.weights_sleep or not before & IN_MEMORY:
            await service.client.sleep()
        if not pauses.weights_sleep:
            await _wake(service, pool=False)
    elif pauses.stops_all:
        service.client.set_paused(True)
    log.info("asleep", asleep=" ".join(sorted(pauses.asleep)), level=level, mode=mode)
    return {"status": "asleep", "asleep": sorted(pauses.asleep)}


@ROUTES.add(Route("POST /wake_up", Callers.ADMINS))
async def wake_up(
    service: ServiceDep, known: KnownQuery, tags: Annotated[list[SleepTag] | None, Query()] = None
) -> dict[str, Any]:
    """Load the weights again, or allocate the pool; requests in flight go on with the tokens they have.

    ``weights`` alone loads the weights, and ``kv_cache`` allocates the pool once the weights are there.

    Raises:
        ApiError: 503, the engine does not start.
    """
    pauses = service.resolver.pauses
    asleep = pauses.asleep - frozenset(tags or SleepTag)
    if pauses.pool_sleeps and SleepTag.WEIGHTS not in asleep:
        await _wake(service, pool=not asleep & IN_MEMORY)
    pauses.change(lambda held: setattr(held, "asleep", asleep))
    service.client.set_paused(pauses.stops_all)
    log.info("woken", asleep=" ".join(sorted(asleep)))
    return {"status": "asleep" if asleep else "awake", "asleep": sorted(asleep)}


async def _wake(service: Service, *, pool: bool) -> None:
    try:
        await service.client.wake(pool=pool)
    except EngineError as error:
        raise engine_unavailable(error) from error


@ROUTES.add(Route("GET /is_sleeping", Callers.OPERATOR))
async def is_sleeping(service: ServiceDep) -> dict[str, Any]:
    """Return whether the engine sleeps."""
    return {"is_sleeping": bool(service.resolver.pauses.asleep), "asleep": sorted(service.resolver.pauses.asleep)}


@ROUTES.add(Route("POST /finish_session", Callers.KEYS))
async def finish_session(session_id: str) -> dict[str, str]:
    """Accept the end of a trajectory; a session holds nothing here but its place, which is forgotten by itself."""
    return {"status": "finished", "session_id": session_id}


@ROUTES.add(Route("GET /get_world_size", Callers.OPERATOR))
async def get_world_size(service: ServiceDep, include_dp: bool = True) -> dict[str, int]:
    """Return the number of ranks of all replicas, or of one replica."""
    return {"world_size": service.ranks * (len(service.client.views) if include_dp else 1)}


class AbortRequests(Body):
    """Body of ``/abort_requests``; without ids all requests that the sender may see are aborted."""

    model_config = ConfigDict(extra="forbid")  # A mistyped field would abort all.

    request_ids: Annotated[list[str], Field(max_length=65536)] | None = None


@ROUTES.add(Route("POST /abort_requests", Callers.KEYS))
async def abort_requests(body: AbortRequests, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """End requests with the tokens that they have; ignore unknown ids and those of other tenants."""
    wanted = None if not body.request_ids else {_ID_OF_ANSWER.sub("", each) for each in body.request_ids}

    def is_meant(generation: Generation) -> bool:
        request = generation.choices[0].handle.request
        is_named = wanted is None or request.request_id.rsplit("-", 2)[0] in wanted
        return is_named and sender.may_see(request.tenant)

    found = [generation for generation in service.generations if is_meant(generation)]
    for generation in found:
        generation.abort()
    return {"status": "aborted", "aborted": len(found)}


async def _refuse_push() -> Response:
    raise push_refused()


for _path in WEIGHT_PUSHES:
    ROUTES.add(Route(f"POST {_path}", Callers.ADMINS, is_supported=False), include_in_schema=False)(_refuse_push)


async def _end_running(service: Service, mode: PauseMode, is_meant: Callable[[Request], bool]) -> None:
    """Treat running requests as a mode wants; with ``abort`` and ``wait`` return when they have ended."""
    if mode == "keep":
        return

    def meant() -> list[Generation]:
        return [each for each in service.generations if is_meant(each.choices[0].handle.request)]

    if mode == "abort":
        for generation in meant():
            generation.abort()
    while running := meant():
        await asyncio.gather(*(generation.closed.wait() for generation in running))
