"""Loading and unloading adapters, as all the routes for it do."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from anyio import CapacityLimiter

from lorikeet.adapters.catalog import AdapterRecord
from lorikeet.adapters.errors import (
    AdapterBusy,
    AdapterError,
    AdapterExists,
    AdapterNotFound,
    AdapterStoreError,
    UnknownAdapter,
)
from lorikeet.engine.connection import EngineError
from lorikeet.server.errors import ApiError
from lorikeet.server.logs import log
from lorikeet.server.service import Service
from lorikeet.server.threads import in_daemon_thread

_T = TypeVar("_T")

DRAIN_S = 30.0
"""How long an unload waits for running requests of the adapter before it answers; it goes on afterwards."""


async def load_adapter(parts: Service, name: str, source: str, *, replace: bool) -> AdapterRecord:
    """Register an adapter.

    Raises:
        ApiError: 400 for a name, source or adapter that will not do, 404 for a source that does not exist,
            409 if another call changes the name, 500 if the store cannot be written.
    """
    _check_enabled(parts)
    if parts.models.is_base(name):
        raise invalid_input(f"The lora adapter {name!r} cannot have the name of the base model.")
    try:
        record, old = await _in_thread(parts.loads, lambda: parts.catalog.register(name, source, replace=replace))
    except AdapterExists:
        raise invalid_input(
            f"The lora adapter '{name}' has already been loaded. If you want to load the LoRA adapter in place, "
            "set 'load_inplace' to True."
        ) from None
    except AdapterBusy as error:
        raise ApiError(409, str(error)) from error
    except AdapterNotFound as error:
        raise ApiError(404, str(error)) from error
    except AdapterStoreError as error:
        raise _store_failed(name, error) from error
    except AdapterError as error:
        raise ApiError(400, str(error)) from error
    log.info("adapter loaded", adapter=name, digest=record.digest, source=record.source)
    if parts.catalog.has(record.digest):  # else it was removed meanwhile, and dropped
        parts.client.know_adapters([record.ref])
    if old is not None:
        _in_background(parts, _free(parts, old))
    return record


async def unload_adapter(parts: Service, name: str) -> int | None:
    """Remove an adapter: no new request gets it, running ones finish, then its memory is free on every tier.

    Returns:
        Bytes freed, of its weights and its KV on device and host; None if requests still ran after a while.

    Raises:
        ApiError: 404 for an unknown name, 409 if another call changes it, 500 if the registry cannot be written.
    """
    _check_enabled(parts)
    try:
        record = await _in_thread(parts.removals, lambda: parts.catalog.remove(name))
    except UnknownAdapter:
        raise ApiError(404, f"The lora adapter '{name}' cannot be found.") from None
    except AdapterBusy as error:
        raise ApiError(409, str(error)) from error
    except AdapterStoreError as error:
        raise _store_failed(name, error) from error
    log.info("adapter unloaded", adapter=name, digest=record.digest)
    freeing = _in_background(parts, _free(parts, record))
    freeing.add_done_callback(lambda _: _forget(parts, name))
    try:
        return await asyncio.wait_for(asyncio.shield(freeing), DRAIN_S)
    except TimeoutError:
        return None


async def _in_thread(limiter: CapacityLimiter, work: Callable[[], _T]) -> _T:
    async with limiter:
        return await in_daemon_thread(work)


def _forget(parts: Service, name: str) -> None:
    """Drop the counts of an adapter that is gone, unless its name was loaded again in the meantime."""
    if name not in parts.catalog.names():
        parts.observer.usage.forget(name)


async def _free(parts: Service, record: AdapterRecord) -> int:
    """Free a version on every tier unless another name still points to it."""
    if parts.catalog.has(record.digest):
        return 0
    try:
        freed_bytes = await parts.client.drop_adapter(record.digest)
    except EngineError as error:
        log.warning("adapter not dropped: the engine is gone", digest=record.digest, error=str(error))
        return 0
    parts.used_adapters.pop(record.digest, None)
    return freed_bytes


def _in_background(parts: Service, work: Coroutine[Any, Any, int]) -> asyncio.Task[int]:
    """Run ``work`` to its end whoever waits for it; the service keeps the task alive."""
    task = asyncio.create_task(work)
    parts.background.add(task)
    task.add_done_callback(parts.background.discard)
    return task


def _check_enabled(parts: Service) -> None:
    if not parts.adapter_settings.enabled:
        raise ApiError(400, "LoRA is disabled on this server; start it with --enable-lora.")


def _store_failed(name: str, error: AdapterStoreError) -> ApiError:
    log.error("an adapter was not changed: its store has failed", adapter=name, error=str(error))
    return ApiError(500, str(error))


def invalid_input(message: str) -> ApiError:
    """Return a 400 of the type that vLLM's adapter routes give."""
    return ApiError(400, message, type="InvalidUserInput")
