"""Lists, loads and unloads adapters by the routes of Lorikeet, vLLM, SGLang and Dynamo."""

import bisect
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from fastapi import Query, Request
from starlette.responses import JSONResponse, Response

from lorikeet.adapters.catalog import AdapterRecord, RegisteredAdapter
from lorikeet.adapters.chat import ChatOverrides, Examples, GenerationDefaults
from lorikeet.adapters.content import read_content
from lorikeet.adapters.description import WEIGHTS_FILE
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.shared_memory import FOLDER, opened_shared
from lorikeet.api.dependencies import SenderDep, ServiceDep
from lorikeet.api.routes.stats import figures_of
from lorikeet.api.uploads import check_config, receive_weights, write_config
from lorikeet.chat.protocol import AdapterChange, DynamoAdapter, LoadAdapter, NewAdapter, UnloadAdapter
from lorikeet.core.ids import number_of
from lorikeet.core.messages import EngineStats
from lorikeet.core.splits import Split
from lorikeet.http.errors import ApiError
from lorikeet.http.routes import BodySize, Callers, Route, Routes
from lorikeet.http.threads import in_daemon_thread
from lorikeet.http.vllm_adapter_answers import check_load, check_unload, load_answer, unload_answer
from lorikeet.serving.adapter_life import (
    alias_adapter,
    author_of,
    change_split,
    check_enabled,
    check_may_load,
    check_owner,
    load_adapter,
    refuse_pin,
    register_adapter,
    remove_split,
    set_pinned,
    unload_adapter,
)
from lorikeet.serving.served_models import describe_chat
from lorikeet.serving.service import Service
from lorikeet.tenants.keys import Access

ROUTES = Routes(note="see [Adapters](#adapters)")


@ROUTES.add(Route("GET /v1/adapters", Callers.KEYS))
async def list_adapters(
    service: ServiceDep, sender: SenderDep, limit: Annotated[int, Query(ge=1, le=1000)] = 100, cursor: str = ""
) -> dict[str, Any]:
    """Return a page of adapters, sorted by name; pass ``next_cursor`` as ``cursor`` for the next page.

    The list includes the adapters of ``--adapter-dir`` before a request has named them. The first page shows the
    operator the skipped folders and the reasons.
    """
    records: dict[str, AdapterRecord] = {record.name: record for record in _visible(service, sender.access)}
    splits = service.resolver.splits
    names = sorted({*await service.resolver.adapter_names(sender.access), *splits.names(sender.access)})
    start = bisect.bisect_right(names, cursor) if cursor else 0
    page = names[start : start + limit]
    more = start + limit < len(names)
    cards = [_card_of(service, name, records) for name in page]
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
async def add_adapter(body: NewAdapter, service: ServiceDep, sender: SenderDep, response: Response) -> dict[str, Any]:
    """Register or replace an adapter, or split a name between adapters.

    The status is 200 if the name had this content already.
    """
    if body.versions is not None:
        if body.source is not None or body.alias_of is not None:
            raise ApiError(400, "Give source, alias_of or versions, not two of them.", param="versions")
        access = sender.access
        split = await change_split(
            service, body.name, body.versions, body.shadow or {}, access=access, replace=body.replace
        )
        return _split_card(service, body.name, split)
    if (body.source is None) == (body.alias_of is None):
        raise ApiError(400, "Give either source or alias_of.", param="source")
    if body.source is None:
        loaded = await alias_adapter(service, body.name, body.alias_of or "", body.replace, sender.access)
    else:
        loaded = await load_adapter(
            service,
            body.name,
            body.source,
            access=sender.access,
            replace=body.replace,
            replaced_by="replace",
            overrides=_overrides(body),
        )
    response.status_code = 200 if loaded.is_unchanged else 201
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
    response: Response,
    replace: bool = False,
    config: str | None = None,
    shm: str | None = None,
) -> dict[str, Any]:
    """Register an adapter whose weights, a safetensors file, are the body, or in shared memory of this machine.

    The config comes from the query, else from ``adapter_config`` in the file's metadata, else from the version that
    the upload replaces. Weights from shared memory (``lorikeet.training``) stay registered until the server stops.
    """
    check_enabled(service)
    check_may_load(service, sender.access, name)
    check_config(config)
    source = "upload" if shm is None else "shared memory"
    async with service.adapter_changes.loads.of(source):
        with service.catalog.receiving() as folder:
            if shm is None:
                await receive_weights(http.stream(), folder)

            def register() -> RegisteredAdapter:
                known = service.catalog.get(name) if replace else None
                if shm is None:
                    write_config(folder, config, known, folder / WEIGHTS_FILE)
                else:
                    with opened_shared(shm, service.adapter_settings.max_bytes):  # The reader opens it again.
                        write_config(folder, config, known, FOLDER / shm)
                try:
                    return service.catalog.register(
                        name,
                        str(folder),
                        replace=replace,
                        trusted=True,
                        persistent=shm is None,
                        shown_source=source,
                        author=author_of(sender.access),
                        takes_over=True,
                        shared=shm or "",
                    )
                except AdapterError as error:  # The client does not know its folder.
                    raise type(error)(str(error).replace(f"{folder}: ", "")) from error

            loaded = await register_adapter(service, name, source, register, "replace")
    response.status_code = 200 if loaded.is_unchanged else 201
    return {**_card(service, loaded.record), **_warnings(loaded.warnings)}


def _overrides(body: NewAdapter) -> ChatOverrides:
    """Return a body's settings for conversations.

    Raises:
        ApiError: 400, a default of a sampling field, or an example, is not valid.
    """
    try:
        generation = msgspec.convert(body.generation_config or {}, GenerationDefaults)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"generation_config: {error}", param="generation_config") from error
    try:
        examples = None if body.examples is None else msgspec.convert(body.examples, Examples)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"examples: {error}", param="examples") from error
    return ChatOverrides(
        body.chat_template, body.system_prompt, generation, body.tool_call_parser, body.reasoning_parser, examples
    )


def _warnings(warnings: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return the answer's field of warnings; no field without warnings."""
    return {"warnings": warnings} if warnings else {}


@ROUTES.add(
    Route(
        "GET /v1/adapters/{name:path}/stats",
        Callers.KEYS,
        note="the adapter's [statistics](#statistics), means, latest requests",
    )
)
async def adapter_stats(name: str, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Return the traffic of one adapter, its latest requests and errors; a tenant sees only its own."""
    record = await _record(service, name, sender.access)
    check_owner(service, sender.access, name)
    total = service.observer.usage.peek(name).total
    return {
        **figures_of(service, record).details(sender),
        "level": _level(service, record),
        "mean_ttft_s": total.ttft_s / total.ttft_count if total.ttft_count else None,
        "mean_e2e_s": total.e2e_s / total.requests if total.requests else None,
        "mean_load_wait_s": total.adapter_wait_s / total.requests if total.requests else None,
        "mean_kv_wait_s": total.kv_wait_s / total.requests if total.requests else None,
    }


@ROUTES.add(
    Route(
        "GET /v1/adapters/{name:path}/content",
        Callers.KEYS,
        note="digest of each tensor: see [Proof](#proof)",
    )
)
async def adapter_content(name: str, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Return the settings and the digest of each tensor of one adapter, as its files have them."""
    record = await _record(service, name, sender.access)
    check_owner(service, sender.access, name)
    with service.resolver.leases.take(record.ref):  # The files stay while they are read.
        content = await in_daemon_thread(partial(read_content, Path(record.ref.folder)))
    return {"name": record.name, "digest": record.digest, **msgspec.to_builtins(content)}


@ROUTES.add(Route("GET /v1/adapters/{name:path}", Callers.KEYS))
async def get_adapter(name: str, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Return one adapter; its owner and the operator also get its figures, latest requests and errors."""
    if (split := service.resolver.splits.get(name)) is not None and sender.access.may_see(name):
        return _split_card(service, name, split)
    if service.models.missing(name) and name in await service.resolver.unloaded_names(sender.access):
        return _unloaded_card(service, name)
    record = await _record(service, name, sender.access)
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
    """Pin an adapter, bring it onto the device after loading it if necessary, or change the shares of a split."""
    if body.versions is not None or body.shadow is not None:
        if service.resolver.splits.get(name) is None:
            raise ApiError(404, f"`{name}` is not split between versions.", param="name")
        split = await change_split(service, name, body.versions, body.shadow, access=sender.access, replace=True)
        return _split_card(service, name, split)
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
    return _card(service, await _record(service, target.name, sender.access))


@ROUTES.add(Route("DELETE /v1/adapters/{name:path}", Callers.ADMINS_AND_TENANTS))
async def delete_adapter(name: str, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Remove an adapter once its running requests have ended, or a split at once."""
    if service.resolver.splits.get(name) is not None:
        await remove_split(service, name, sender.access)
        return {"name": name, "object": "adapter", "deleted": True, "freed_bytes": 0}
    freed_bytes = await unload_adapter(service, name, sender.access)
    answer = {"name": name, "object": "adapter", "deleted": True, "freed_bytes": freed_bytes}
    if name in await service.resolver.unloaded_names(sender.access):
        answer |= _warnings(
            ("the adapter is still in the folder of --adapter-dir: a request that names it loads it again",)
        )
    return answer


def _card_of(service: Service, name: str, records: Mapping[str, AdapterRecord]) -> dict[str, Any]:
    split = service.resolver.splits.get(name)
    if split is not None:
        return _split_card(service, name, split)
    return _card(service, records[name]) if name in records else _unloaded_card(service, name)


def _split_card(service: Service, name: str, split: Split) -> dict[str, Any]:
    """Return the card of a name whose requests are split between adapters."""
    shares = {"versions": split.versions, "shadow": split.shadow}
    unknown = dict.fromkeys(("digest", "created", "rank", "weight_bytes", "level"))
    known = {"source": "a split", "base": service.models.base, "loaded": True, "device_bytes": 0, "pinned": False}
    return {"name": name, "object": "adapter", **shares, **known, **unknown}


def _visible(service: Service, access: Access) -> list[AdapterRecord]:
    return [record for record in service.catalog.list() if access.may_see(record.name)]


async def _record(service: Service, name: str, access: Access) -> AdapterRecord:
    """Return a loaded adapter.

    Raises:
        ApiError: 404, the name is unknown, a split's, or that of an adapter which no request has named yet.
    """
    record = service.models.record(name) if access.may_see(name) else None
    if record is not None:
        return record
    reason = "does not exist"
    if access.may_see(name) and service.resolver.splits.get(name) is not None:
        reason = "is a split, which has no weights; name one of its adapters"
    elif name in await service.resolver.unloaded_names(access):
        reason = "is not loaded yet; the first request that names it loads it"
    raise ApiError(404, f"The adapter `{name}` {reason}.", param="name")


def _unloaded_card(service: Service, name: str) -> dict[str, Any]:
    """Return the card of an adapter that the first request will load; its files have not been read."""
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
    """Return the tier of the weights: ``gpu``, ``cpu`` for the host tier, or None for neither."""
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
    check_load(body.lora_name, body.lora_path)
    loaded = await load_adapter(
        service,
        body.lora_name,
        body.lora_path,
        access=sender.access,
        replace=body.load_inplace,
        replaced_by="load_inplace",
    )
    return load_answer(body.lora_name, *loaded.warnings)


@ROUTES.add(Route("POST /skyrl/v1/load_lora_adapter", Callers.ADMINS_AND_TENANTS, note="SkyRL's"))
async def load_lora_adapter_skyrl(body: LoadAdapter, service: ServiceDep, sender: SenderDep) -> Response:
    """Load or replace an adapter as SkyRL's servers do."""
    return await load_lora_adapter(body.model_copy(update={"load_inplace": True}), service, sender)


@ROUTES.add(Route("POST /v1/unload_lora_adapter", Callers.ADMINS_AND_TENANTS, note="vLLM's"))
async def unload_lora_adapter(body: UnloadAdapter, service: ServiceDep, sender: SenderDep) -> Response:
    """Unload an adapter as vLLM does."""
    check_unload(body.lora_name)
    await unload_adapter(service, body.lora_name, sender.access)
    return unload_answer(body.lora_name)


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
        if not loaded.is_unchanged:
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
    loras = {record.name: number_of(record.digest) for record in _visible(service, sender.access)}
    return {"status": "success", "loras": loras, "count": len(loras)}


@ROUTES.add(Route("POST /v1/loras", Callers.ADMINS_AND_TENANTS, note="Dynamo's"))
async def load_lora(body: DynamoAdapter, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Load an adapter as Dynamo does."""
    loaded = await load_adapter(service, body.lora_name, body.source.uri, access=sender.access, replace=False)
    lora_id = number_of(loaded.record.digest)
    return {"status": "success", "lora_name": loaded.record.name, "lora_id": lora_id, **_warnings(loaded.warnings)}


@ROUTES.add(Route("DELETE /v1/loras/{name:path}", Callers.ADMINS_AND_TENANTS, note="Dynamo's"))
async def delete_lora(name: str, service: ServiceDep, sender: SenderDep) -> dict[str, Any]:
    """Unload an adapter as Dynamo does."""
    await unload_adapter(service, name, sender.access)
    return {"status": "success", "lora_name": name}
