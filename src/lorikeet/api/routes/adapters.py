"""Routes that list, load and unload adapters: Lorikeet's own, and those of vLLM, SGLang and Dynamo."""

import asyncio
import bisect
from collections.abc import Callable, Coroutine, Sequence, Set
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from fastapi import Query, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from lorikeet.adapters.catalog import AdapterRecord, Author, FollowedChange, RegisteredAdapter
from lorikeet.adapters.chat import NO_OVERRIDES, ChatOverrides, GenerationDefaults
from lorikeet.adapters.errors import (
    AdapterBusy,
    AdapterError,
    AdapterExists,
    AdapterNotFound,
    AdapterQuotaExceeded,
    AdapterStoreError,
    UnknownAdapter,
)
from lorikeet.adapters.mixture import Part, write_mixture
from lorikeet.adapters.sources import MAX_SOURCE_CHARS
from lorikeet.api.dependencies import SenderDep, ServiceDep
from lorikeet.api.routes.stats import figures_of
from lorikeet.api.uploads import check_config, receive_weights, write_config
from lorikeet.chat.protocol import AdapterChange, DynamoAdapter, LoadAdapter, NewAdapter, UnloadAdapter
from lorikeet.client.supervisor import EngineError
from lorikeet.core.messages import EngineStats
from lorikeet.costs.model import adapter_elements
from lorikeet.http.errors import ApiError, hide_paths
from lorikeet.http.logs import log
from lorikeet.http.routes import BodySize, Callers, Route, Routes
from lorikeet.http.threads import in_daemon_thread
from lorikeet.serving.served_models import describe_chat
from lorikeet.serving.service import Service
from lorikeet.tenants.keys import Access

DRAIN_S = 30.0
"""Seconds that an unload waits for running requests of the adapter before it answers; the unload itself goes on."""


async def _alias(service: Service, name: str, of: str, replace: bool, access: Access) -> RegisteredAdapter:
    """Register a name for the version of another; raises as :func:`load_adapter`."""
    _check_enabled(service)
    _check_may_load(service, access, name)
    target, lease = await service.resolver.lease(of, access=access, generates=False)
    with lease:
        if target.adapter is None:
            raise ApiError(400, f"{of!r} is the base model, which has no alias.", param="alias_of")
        return await _register(
            service,
            name,
            of,
            lambda: service.catalog.alias(name, target.name, replace=replace, author=_author(access)),
            "replace",
        )


def _author(access: Access) -> Author:
    """Return who adds adapters, with what it may own."""
    if access.key is None:
        return Author(access.actor)
    limits = access.key.settings
    return Author(access.actor, access.key.key_id, limits.max_adapters, limits.max_adapter_bytes)


def _check_may_load(service: Service, access: Access, name: str, source: str = "") -> None:
    """Check that a sender may give a name to an adapter of its own.

    Args:
        service: the server.
        access: of the sender.
        name: to be given.
        source: where it comes from; empty if it is not a folder or URL.

    Raises:
        ApiError: 403.
    """
    if access.key is None:
        return
    if not access.may_load(name):
        raise ApiError(403, f"This key may not load an adapter called {name[:200]!r}.", param="name")
    if source and (":" in source or ".." in source or source.startswith("/") or not access.may_load(source)):
        # A folder of the server may be another tenant's, and so may what a URL names.
        raise ApiError(
            403, "This key may load adapters from folders that it may name, or by uploading them.", param="source"
        )
    _check_owner(service, access, name)


def _check_owner(service: Service, access: Access, name: str) -> None:
    """Check that a sender may change an adapter, if there is one.

    Raises:
        ApiError: 403 if it is another's; 404 if the sender may not see it.
    """
    owner = service.catalog.owner(name)
    if owner is None or access.owns(owner):
        return
    if not access.may_see(name):
        raise ApiError(404, f"The lora adapter '{name}' cannot be found.")
    raise ApiError(403, f"The adapter {name[:200]!r} is not this key's own.", param="name")


def refuse_pin(access: Access) -> None:
    """Refuse a tenant that would keep the device's memory from the others.

    Raises:
        ApiError: 403.
    """
    if access.key is not None:
        raise ApiError(403, "Only the operator may pin adapters.", param="pinned")


async def load_adapter(
    service: Service,
    name: str,
    source: str,
    *,
    access: Access,
    replace: bool,
    replaced_by: str = "load_inplace",
    overrides: ChatOverrides = NO_OVERRIDES,
    persistent: bool = True,
) -> RegisteredAdapter:
    """Register an adapter.

    Args:
        service: the server.
        name: what clients will write.
        source: where its files are.
        access: of the sender.
        replace: whether an existing name may get the new content.
        replaced_by: the field of the body that says so.
        overrides: what counts instead of what its files say about conversations.
        persistent: whether it is there at the next start; if not, it waits for its turn however many others do.

    Raises:
        ApiError: 400 for a name, source or adapter that is not valid, 403 if the sender may not load it, 404 for a
            source that does not exist, 409 if another call changes the name, 429 if too many are loaded from its host,
            500 if the store cannot be written.
    """
    _check_enabled(service)
    if service.models.is_base(name):
        raise invalid_input(f"The lora adapter {name!r} cannot have the name of the base model.")
    _check_may_load(service, access, name, source)
    async with service.adapter_changes.loads.of(source, may_refuse=persistent):
        return await _register(
            service,
            name,
            source,
            lambda: service.catalog.register(
                name, source, replace=replace, persistent=persistent, overrides=overrides, author=_author(access)
            ),
            replaced_by,
        )


async def make_mixture(service: Service, name: str, parts: Sequence[Part]) -> None:
    """Register a mixture of adapters, which are kept meanwhile; it is not there at the next start.

    Raises:
        ApiError: 400, an adapter cannot be mixed, or the mixture is too large; 500 if the store cannot be written.
    """
    catalog, geometry = service.catalog, service.client.engine_info.geometry

    def register() -> RegisteredAdapter:
        with catalog.receiving() as folder:
            try:
                write_mixture(folder, parts, geometry)
            except OSError as error:
                raise AdapterStoreError(f"the mixture cannot be written: {error}") from error
            return catalog.register(
                name, str(folder), replace=True, trusted=True, persistent=False, shown_source="a mixture"
            )

    await _register(service, name, "a mixture", register, "replace")


async def _register(
    service: Service, name: str, source: str, register: Callable[[], RegisteredAdapter], replaced_by: str
) -> RegisteredAdapter:
    """Register a name, tell the engines, and drop the version that it replaces."""
    with suppress(AdapterStoreError):  # what another server has just added or removed counts
        await _follow_once(service)
    try:
        loaded = await in_daemon_thread(register)
    except AdapterExists:
        raise invalid_input(
            f"The lora adapter '{name}' has already been loaded. If you want to load the LoRA adapter in place, "
            f"set '{replaced_by}' to True."
        ) from None
    except AdapterBusy as error:
        raise ApiError(409, str(error)) from error
    except AdapterQuotaExceeded as error:
        raise ApiError(403, f"{name!r} was not added: {error}.") from error
    except AdapterStoreError as error:
        raise _store_error(name, error) from error
    except AdapterError as error:
        log.warning("adapter not loaded", adapter=name[:200], source=source[:MAX_SOURCE_CHARS], error=str(error))
        raise ApiError(404 if isinstance(error, AdapterNotFound) else 400, _for_client(name, error)) from error
    record, old, warnings = loaded
    if record.persistent:
        service.resolver.loader.forget(name)
    for warning in warnings:
        log.warning("adapter warning", adapter=name, warning=warning)
    log.info("adapter loaded", adapter=name, digest=record.digest, source=record.source)
    _serve(service, record, old)
    return loaded


def _serve(service: Service, record: AdapterRecord, old: AdapterRecord | None) -> None:
    """Tell the engines of a name's version, and drop the one that it replaces."""
    if service.catalog.has(record.digest):  # else it was removed meanwhile
        service.client.register_adapters([record.ref])
    if old is None:
        return
    if record.name in service.resolver.loader.pinned:
        _send_pins(service)
    _in_background(service, _drop_version(service, old))


def _stop_serving(service: Service, record: AdapterRecord) -> "asyncio.Task[int]":
    """Unpin a name that was removed, drop its version in the background, and forget its counts."""
    if record.name in service.resolver.loader.pinned:
        set_pinned(service, record.name, False)
    freeing = _in_background(service, _drop_version(service, record))
    freeing.add_done_callback(lambda _: _forget_counts(service, record.name))
    return freeing


_PINNED_SHARE = 0.5
"""Share of the device's blocks that pinned adapters may take."""


def set_pinned(service: Service, name: str, is_pinned: bool) -> None:
    """Pin an adapter, or no longer. The version that its name has is evicted last, also after a replacement.

    Raises:
        ApiError: 409, pinned adapters would take too much of the device.
    """
    pinned = service.resolver.loader.pinned
    if is_pinned and name not in pinned:
        info = service.client.engine_info
        wanted = {record.digest: _blocks(service, record) for record in _records(service, {*pinned, name})}
        most = int(_PINNED_SHARE * info.total_blocks)
        if sum(wanted.values()) > most:
            mib = info.block_bytes / 2**20
            raise ApiError(
                409,
                f"With {name!r}, pinned adapters would take {sum(wanted.values()) * mib:.1f} MiB of the device; "
                f"they may take {most * mib:.1f} MiB, half of it.",
                param="pinned",
            )
    service.resolver.loader.pin(name, is_pinned)
    _send_pins(service)


def _send_pins(service: Service) -> None:
    service.client.pin_adapters(sorted({record.digest for record in _records(service, service.resolver.loader.pinned)}))


def _records(service: Service, names: Set[str]) -> list[AdapterRecord]:
    return [record for record in service.catalog.list() if record.name in names]


def _blocks(service: Service, record: AdapterRecord) -> int:
    """Return the blocks of an adapter on the device of one rank, nearly."""
    info = service.client.engine_info
    elements = adapter_elements(record.ref.ranks, info.geometry, record.ref.extras)
    return -(-elements * info.geometry.dtype_bytes // (service.ranks * info.block_bytes))


async def unload_adapter(service: Service, name: str, access: Access) -> int | None:
    """Remove an adapter: new requests cannot name it, running ones finish, then its memory is freed on every tier.

    Returns:
        Bytes freed on device and host, its KV included; None if requests still ran after ``DRAIN_S``.

    Raises:
        ApiError: 404 for an unknown name, 403 for another's, 409 if another call changes it or if only a folder
            serves it, 500 if the registry cannot be written.
    """
    _check_enabled(service)
    _check_owner(service, access, name)
    try:
        async with service.adapter_changes.removals:
            record = await in_daemon_thread(lambda: service.catalog.remove(name, access.actor))
    except UnknownAdapter:
        if name in await service.resolver.unloaded_names(access):
            raise ApiError(
                409,
                f"The adapter {name!r} is not registered: the folder of --adapter-dir serves it. Move its folder away "
                "to serve it no longer.",
            ) from None
        raise ApiError(404, f"The lora adapter '{name}' cannot be found.") from None
    except AdapterBusy as error:
        raise ApiError(409, str(error)) from error
    except AdapterStoreError as error:
        raise _store_error(name, error) from error
    log.info("adapter unloaded", adapter=name, digest=record.digest)
    freeing = _stop_serving(service, record)
    try:
        return await asyncio.wait_for(asyncio.shield(freeing), DRAIN_S)
    except TimeoutError:
        return None


FOLLOW_S = 2.0
"""Seconds between two looks at what other servers have changed in the registry."""


async def follow_registry(service: Service) -> None:
    """Serve for ever what other servers with the same registry add, replace and remove."""
    is_lost = False
    while True:
        await asyncio.sleep(FOLLOW_S)
        try:
            await _follow_once(service)
        except AdapterStoreError as error:
            if not is_lost:
                log.warning("adapters of other servers are not seen", reason=str(error))
            is_lost = True
        except Exception:
            log.exception("adapters of other servers are not followed")
        else:
            is_lost = False


async def _follow_once(service: Service) -> None:
    """Serve what other servers have changed.

    Raises:
        AdapterStoreError: the registry cannot be read.
    """
    for change in await in_daemon_thread(service.catalog.follow):
        _follow(service, change)


def _follow(service: Service, change: FollowedChange) -> None:
    """Tell the engines what another server has done to a name."""
    name, record, old, why_not = change
    if record is None:
        assert old is not None, "a name that is gone was there"
        log.info("adapter unloaded by another server", adapter=name)
        _stop_serving(service, old)
    elif why_not:
        log.warning("adapter of another server cannot be served", adapter=name, reason=why_not)
        if old is not None:
            _in_background(service, _drop_version(service, old))
    else:
        service.resolver.loader.forget(name)
        log.info("adapter loaded by another server", adapter=name, digest=record.digest)
        _serve(service, record, old)


def _forget_counts(service: Service, name: str) -> None:
    """Drop what is kept of a removed adapter, unless its name was loaded again meanwhile."""
    if name not in service.catalog.names():
        service.observer.usage.forget(name)
        service.observer.live.forget(name)


async def _drop_version(service: Service, record: AdapterRecord) -> int:
    """Free a version on every tier unless another name still points to it; return the bytes freed."""
    await service.resolver.leases.all_submitted(record.digest)
    if service.catalog.has(record.digest):
        return 0
    try:
        freed_bytes = await service.client.drop_adapter(record.digest)
    except EngineError as error:
        log.warning("adapter not dropped: the engine is gone", digest=record.digest, error=str(error))
        return 0
    service.used_adapters.pop(record.digest, None)
    return freed_bytes


def _in_background(service: Service, work: Coroutine[Any, Any, int]) -> asyncio.Task[int]:
    """Run ``work`` to its end even if the caller is cancelled; the service keeps the task alive."""
    task = asyncio.create_task(work)
    service.adapter_changes.drops.add(task)
    task.add_done_callback(service.adapter_changes.drops.discard)
    return task


def _check_enabled(service: Service) -> None:
    if not service.adapter_settings.enabled:
        raise ApiError(400, "LoRA is disabled on this server; start it with --enable-lora.")


def _store_error(name: str, error: AdapterStoreError) -> ApiError:
    log.error("adapter store failed", adapter=name, error=str(error))
    return ApiError(500, _for_client(name, error))


def _for_client(name: str, error: AdapterError) -> str:
    """Return the adapter's name and the cause, without paths of the server."""
    # Most folders are called as their adapter, which is said once.
    cause, shown = hide_paths(str(error)).removeprefix(f"{name}: "), repr(name[:200])
    return cause if shown in cause else f"adapter {shown}: {cause}"


def invalid_input(message: str) -> ApiError:
    """Return a 400 of the type that vLLM's adapter routes give."""
    return ApiError(400, message, type="InvalidUserInput")


ROUTES = Routes(note="see [Adapters](#adapters)")


@ROUTES.add(Route("GET /v1/adapters", Callers.KEYS))
async def list_adapters(
    service: ServiceDep, sender: SenderDep, limit: Annotated[int, Query(ge=1, le=1000)] = 100, cursor: str = ""
) -> dict[str, Any]:
    """Return a page of adapters, sorted by name; pass ``next_cursor`` as ``cursor`` for the next page.

    Those in the folder that is served are among them, also before a request has named them. The first page tells the
    operator which folders are left out, and why.
    """
    records: dict[str, AdapterRecord] = {record.name: record for record in _visible(service, sender.access)}
    names = await service.resolver.adapter_names(sender.access)
    start = bisect.bisect_right(names, cursor) if cursor else 0
    page = names[start : start + limit]
    more = start + limit < len(names)
    cards = [_card(service, records[name]) if name in records else _unloaded_card(service, name) for name in page]
    answer = {
        "object": "list",
        "data": cards,
        "has_more": more,
        "next_cursor": page[-1] if more else None,
        "total": len(names),
    }
    if not cursor and sender.access.key is None:
        left_out = await in_daemon_thread(service.resolver.loader.left_out)
        answer["left_out"] = [each._asdict() for each in left_out]
    return answer


@ROUTES.add(Route("POST /v1/adapters", Callers.ADMINS_AND_TENANTS), status_code=201)
async def add_adapter(body: NewAdapter, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Register an adapter, or replace it."""
    if (body.source is None) == (body.alias_of is None):
        raise ApiError(400, "Give either source or alias_of.", param="source")
    if body.source is None:
        loaded = await _alias(service, body.name, body.alias_of or "", body.replace, sender.access)
        return _card(service, loaded.record)
    loaded = await load_adapter(
        service,
        body.name,
        body.source,
        access=sender.access,
        replace=body.replace,
        replaced_by="replace",
        overrides=_overrides(body),
    )
    return {**_card(service, loaded.record), **_warnings(loaded.warnings)}


@ROUTES.add(
    Route("POST /v1/adapters/upload", Callers.ADMINS_AND_TENANTS, BodySize.WEIGHTS, note="weights in the body"),
    status_code=201,
)
async def upload_adapter(
    http: Request,
    service: ServiceDep,
    sender: SenderDep,
    name: Annotated[str, Query(min_length=1)],
    replace: bool = False,
    config: str | None = None,
) -> dict[str, Any]:
    """Register an adapter whose weights, a safetensors file, are the body.

    Its config is the query's, else in the file's metadata under ``adapter_config``, else that of the version that it
    replaces.
    """
    _check_enabled(service)
    _check_may_load(service, sender.access, name)
    check_config(config)
    source = "upload"
    async with service.adapter_changes.loads.of(source):
        with service.catalog.receiving() as folder:
            await receive_weights(http.stream(), folder)

            def register() -> RegisteredAdapter:
                write_config(folder, config, service.catalog.get(name) if replace else None)
                try:
                    return service.catalog.register(
                        name,
                        str(folder),
                        replace=replace,
                        trusted=True,
                        persistent=True,
                        shown_source=source,
                        author=_author(sender.access),
                    )
                except AdapterError as error:  # its folder means nothing to the client
                    raise type(error)(str(error).replace(f"{folder}: ", "")) from error

            loaded = await _register(service, name, source, register, "replace")
    return {**_card(service, loaded.record), **_warnings(loaded.warnings)}


def _overrides(body: NewAdapter) -> ChatOverrides:
    """Return what a body says about conversations.

    Raises:
        ApiError: 400, the defaults of sampling fields are not valid.
    """
    try:
        generation = msgspec.convert(body.generation_config or {}, GenerationDefaults)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"generation_config: {error}", param="generation_config") from error
    return ChatOverrides(
        body.chat_template, body.system_prompt, generation, body.tool_call_parser, body.reasoning_parser
    )


def _warnings(warnings: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return the field of an answer that lists warnings, if there are any."""
    return {"warnings": warnings} if warnings else {}


@ROUTES.add(
    Route(
        "GET /v1/adapters/{name:path}/stats",
        Callers.KEYS,
        note="its figures of [Statistics](#statistics), means, latest requests",
    )
)
async def adapter_stats(name: str, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Return the traffic of one adapter, and its latest requests and errors; to a tenant only of its own ones."""
    record = _record(service, name, sender.access)
    _check_owner(service, sender.access, name)
    total = service.observer.usage.peek(name).total
    return {
        **figures_of(service, record).details(sender),
        "level": _level(service, record),
        "mean_ttft_s": total.ttft_s / total.ttft_count if total.ttft_count else None,
        "mean_e2e_s": total.e2e_s / total.requests if total.requests else None,
        "mean_load_wait_s": total.adapter_wait_s / total.requests if total.requests else None,
        "mean_kv_wait_s": total.kv_wait_s / total.requests if total.requests else None,
    }


@ROUTES.add(Route("GET /v1/adapters/{name:path}", Callers.KEYS))
async def get_adapter(name: str, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Return one adapter; to its owner and the operator also its figures, latest requests and errors."""
    if service.models.missing(name) and name in await service.resolver.unloaded_names(sender.access):
        return _unloaded_card(service, name)
    record = _record(service, name, sender.access)
    card = _card(service, record)
    if not sender.access.owns(service.catalog.owner(name) or ""):
        return card
    names = {each.name for each in service.catalog.list() if each.digest == record.digest} - {record.name}
    return {
        **card,
        "also_named": sorted(filter(sender.access.may_see, names)),
        "replicas": [str(replica) for replica, view in service.client.views.items() if _holds(view.stats, record)],
        "stats": figures_of(service, record).details(sender),
    }


@ROUTES.add(Route("PATCH /v1/adapters/{name:path}", Callers.ADMINS_AND_TENANTS))
async def change_adapter(name: str, body: AdapterChange, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Pin an adapter, or bring it onto the device; it is loaded if it is only named so far."""
    if body.pinned is not None:
        refuse_pin(sender.access)
    target = await service.resolver.resolve(name, access=sender.access, generates=bool(body.warm))
    if target.adapter is None:
        raise ApiError(400, f"{name!r} is the base model.", param="name")
    if body.pinned is not None:
        set_pinned(service, target.name, body.pinned)
        action = "adapter pinned" if body.pinned else "adapter unpinned"
        await in_daemon_thread(lambda: service.catalog.note_change(sender.access.actor, action, target.name, {}))
    if body.warm:
        await service.warm(name, sender)
    return _card(service, _record(service, target.name, sender.access))


@ROUTES.add(Route("DELETE /v1/adapters/{name:path}", Callers.ADMINS_AND_TENANTS))
async def delete_adapter(name: str, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Remove an adapter once its running requests have ended."""
    freed_bytes = await unload_adapter(service, name, sender.access)
    answer = {"name": name, "object": "adapter", "deleted": True, "freed_bytes": freed_bytes}
    if name in await service.resolver.unloaded_names(sender.access):
        answer |= _warnings(("the folder of --adapter-dir serves it: a request that names it loads it again",))
    return answer


def _visible(service: Service, access: Access) -> list[AdapterRecord]:
    return [record for record in service.catalog.list() if access.may_see(record.name)]


def _record(service: Service, name: str, access: Access) -> AdapterRecord:
    record = service.models.record(name) if access.may_see(name) else None
    if record is None:
        raise ApiError(404, f"The adapter `{name}` does not exist.", param="name")
    return record


def _unloaded_card(service: Service, name: str) -> dict[str, Any]:
    """Return the card of an adapter that is loaded when a request first names it; its files were not read."""
    unknown = dict.fromkeys(("digest", "created", "rank", "weight_bytes", "level"))
    known = {"source": name, "base": service.models.base, "loaded": False, "device_bytes": 0, "pinned": False}
    reason = service.resolver.loader.why_refused(name)
    return {"name": name, "object": "adapter", **known, **unknown, **({"error": reason} if reason else {})}


def _card(service: Service, record: AdapterRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "object": "adapter",
        "digest": record.digest,
        "source": record.shown_source,
        "base": service.models.base,
        "created": int(record.created_at),
        "rank": record.max_rank,
        "weight_bytes": record.row.weight_bytes,
        "loaded": True,
        **_residency(service, record),
        "pinned": record.name in service.resolver.loader.pinned,
        **({"owner": record.row.owner} if record.row.owner else {}),
        **({"chat": describe_chat(record.chat)} if record.row.chat else {}),
    }


def _residency(service: Service, record: AdapterRecord) -> dict[str, Any]:
    stats = [view.stats for view in service.client.views.values() if view.stats is not None]
    blocks = sum(each.resident_adapters.get(record.digest, 0) for each in stats)
    return {
        "level": _level(service, record),
        "device_bytes": blocks * service.client.engine_info.block_bytes,
    }


def _level(service: Service, record: AdapterRecord) -> str | None:
    """Return where the weights are: ``gpu``, ``cpu`` for the host tier, or None."""
    stats = [view.stats for view in service.client.views.values() if view.stats is not None]
    if any(_holds(each, record) for each in stats):
        return "gpu"
    return "cpu" if any(record.digest in each.hosted_adapters for each in stats) else None


def _holds(stats: EngineStats | None, record: AdapterRecord) -> bool:
    return stats is not None and record.digest in stats.resident_adapters


# --- vLLM -----------------------------------------------------------------------------------------


@ROUTES.add(Route("POST /v1/load_lora_adapter", Callers.ADMINS_AND_TENANTS, note="vLLM's"))
async def load_lora_adapter(body: LoadAdapter, service: ServiceDep, sender: SenderDep) -> Response:
    """Load an adapter as vLLM does."""
    if not body.lora_name or not body.lora_path:
        raise invalid_input("Both 'lora_name' and 'lora_path' must be provided.")
    loaded = await load_adapter(
        service, body.lora_name, body.lora_path, access=sender.access, replace=body.load_inplace
    )
    lines = [f"Success: LoRA adapter '{body.lora_name}' added successfully."]
    return PlainTextResponse("\n".join(lines + [f"Warning: {warning}" for warning in loaded.warnings]))


@ROUTES.add(Route("POST /v1/unload_lora_adapter", Callers.ADMINS_AND_TENANTS, note="vLLM's"))
async def unload_lora_adapter(body: UnloadAdapter, service: ServiceDep, sender: SenderDep) -> Response:
    """Unload an adapter as vLLM does."""
    if not body.lora_name:
        raise invalid_input("'lora_name' needs to be provided to unload a LoRA adapter.")
    await unload_adapter(service, body.lora_name, sender.access)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


# --- SGLang ---------------------------------------------------------------------------------------


@ROUTES.add(Route("POST /load_lora_adapter", Callers.ADMINS_AND_TENANTS, note="SGLang's"))
async def load_lora_adapter_sglang(body: LoadAdapter, service: ServiceDep, sender: SenderDep) -> Response:
    """Load an adapter as SGLang does."""
    access = sender.access
    if not body.lora_name or not body.lora_path:
        return _sglang(service, access, "Both lora_name and lora_path must be provided.")
    try:
        if body.pinned:
            refuse_pin(access)
        loaded = await load_adapter(service, body.lora_name, body.lora_path, access=access, replace=False)
    except ApiError as error:
        return _sglang_refused(service, access, error)
    try:
        set_pinned(service, body.lora_name, body.pinned)
    except ApiError as error:
        await unload_adapter(service, body.lora_name, access)
        return _sglang_refused(service, access, error)
    return _sglang(service, access, None, warnings=loaded.warnings)


@ROUTES.add(Route("POST /unload_lora_adapter", Callers.ADMINS_AND_TENANTS, note="SGLang's"))
async def unload_lora_adapter_sglang(body: UnloadAdapter, service: ServiceDep, sender: SenderDep) -> Response:
    """Unload an adapter as SGLang does."""
    try:
        await unload_adapter(service, body.lora_name, sender.access)
    except ApiError as error:
        return _sglang_refused(service, sender.access, error)
    return _sglang(service, sender.access, None)


def _sglang_refused(service: Service, access: Access, error: ApiError) -> Response:
    return _sglang(service, access, error.message, error.status if error.status >= 500 else 400)


def _sglang(
    service: Service, access: Access, error: str | None, status: int = 400, warnings: Sequence[str] = ()
) -> Response:
    body = {
        **_warnings(warnings),
        "success": error is None,
        "error_message": error or "",
        "loaded_adapters": {record.name: record.shown_source for record in _visible(service, access)},
    }
    return JSONResponse(body, 200 if error is None else status)


# --- Dynamo ---------------------------------------------------------------------------------------


@ROUTES.add(Route("GET /v1/loras", Callers.KEYS, note="Dynamo's"))
async def list_loras(service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Return all adapters as Dynamo lists them."""
    loras = {record.name: int(record.digest[:8], 16) for record in _visible(service, sender.access)}
    return {"status": "success", "loras": loras, "count": len(loras)}


@ROUTES.add(Route("POST /v1/loras", Callers.ADMINS_AND_TENANTS, note="Dynamo's"))
async def load_lora(body: DynamoAdapter, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Load an adapter as Dynamo does."""
    record, _, warnings = await load_adapter(
        service, body.lora_name, body.source.uri, access=sender.access, replace=False
    )
    lora_id = int(record.digest[:8], 16)
    return {"status": "success", "lora_name": record.name, "lora_id": lora_id, **_warnings(warnings)}


@ROUTES.add(Route("DELETE /v1/loras/{name:path}", Callers.ADMINS_AND_TENANTS, note="Dynamo's"))
async def delete_lora(name: str, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Unload an adapter as Dynamo does."""
    await unload_adapter(service, name, sender.access)
    return {"status": "success", "lora_name": name}
