"""Serves vLLM's routes for training loops, such as TRL's, between two updates of their adapters."""

import asyncio
from typing import Annotated, Literal

from fastapi import Query

from lorikeet.api.dependencies import ServiceDep
from lorikeet.http.logs import log
from lorikeet.http.routes import Callers, Route, Routes
from lorikeet.serving.service import Service

ROUTES = Routes(note="see [training loops](#training-loops)")

PauseMode = Literal["abort", "wait", "keep"]
"""Treatment of running requests: they are ended early, finish first, or stand still."""


@ROUTES.add(Route("POST /pause", Callers.ADMINS))
async def pause(
    service: ServiceDep, mode: Annotated[PauseMode, Query()] = "abort", clear_cache: bool = True
) -> dict[str, str]:
    """Pause generation until ``/resume``; new requests wait.

    ``clear_cache`` has no effect: KV belongs to one version of an adapter, so new weights never use old KV.
    """
    service.resolver.unpaused.clear()
    if mode == "abort":
        for generation in tuple(service.generations):
            generation.abort()
    if mode != "keep":
        await _all_ended(service)
    if not service.resolver.unpaused.is_set():  # Another request may have resumed generation during the wait.
        service.client.set_paused(True)
    log.info("generation paused", mode=mode)
    return {"status": "paused"}


@ROUTES.add(Route("POST /resume", Callers.ADMINS))
async def resume(service: ServiceDep) -> dict[str, str]:
    """Resume generation."""
    service.resolver.unpaused.set()
    service.client.set_paused(False)
    log.info("generation resumed")
    return {"status": "resumed"}


@ROUTES.add(Route("GET /is_paused", Callers.OPERATOR))
async def is_paused(service: ServiceDep) -> dict[str, bool]:
    """Return whether generation is paused."""
    return {"is_paused": not service.resolver.unpaused.is_set()}


@ROUTES.add(Route("GET /get_world_size", Callers.OPERATOR))
async def get_world_size(service: ServiceDep, include_dp: bool = True) -> dict[str, int]:
    """Return the number of ranks of all replicas, or of one replica."""
    return {"world_size": service.ranks * (len(service.client.views) if include_dp else 1)}


async def _all_ended(service: Service) -> None:
    while service.generations:
        ended = [generation.closed.wait() for generation in service.generations]
        await asyncio.gather(*ended)
