"""Loads, mixes, pins, replaces and unloads adapters, and follows the changes of other servers."""

import asyncio
import statistics
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import Any

from lorikeet.adapters.catalog import AdapterRecord, Author, FollowedChange, RegisteredAdapter
from lorikeet.adapters.chat import NO_OVERRIDES, ChatOverrides
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
from lorikeet.client.supervisor import EngineError
from lorikeet.core.splits import Split, why_invalid
from lorikeet.costs.model import adapter_elements
from lorikeet.http.errors import ApiError, bad_request, hide_paths
from lorikeet.http.logs import log
from lorikeet.http.threads import in_daemon_thread
from lorikeet.http.vllm_adapter_answers import adapter_not_found, already_loaded, invalid_input
from lorikeet.serving.service import Service
from lorikeet.tenants.keys import OPERATOR, Access

DRAIN_S = 30.0
"""Seconds that an unload waits for running requests of the adapter before it answers; the unload itself goes on."""


async def alias_adapter(service: Service, name: str, of: str, replace: bool, access: Access) -> RegisteredAdapter:
    """Register another name for an adapter's version. See :func:`load_adapter` for errors."""
    check_enabled(service)
    check_may_load(service, access, name)
    target, lease = await service.resolver.lease(of, access=access, generates=False)
    with lease:
        if target.adapter is None:
            raise ApiError(400, f"{of!r} is the base model, which has no alias.", param="alias_of")
        return await register_adapter(
            service,
            name,
            of,
            lambda: service.catalog.alias(name, target.name, replace=replace, author=author_of(access)),
            "replace",
        )


def author_of(access: Access) -> Author:
    """Return the author of the sender's adapters, with the limits of the sender's key."""
    if access.key is None:
        return Author(access.actor)
    limits = access.key.settings
    return Author(access.actor, access.key.key_id, limits.max_adapters, limits.max_adapter_bytes)


def check_may_load(service: Service, access: Access, name: str, source: str = "") -> None:
    """Check that a sender may load an adapter under a name.

    Args:
        service: the server's service.
        access: the sender's rights.
        name: the name that clients will use.
        source: the adapter's folder or URL; empty for an alias or an upload.

    Raises:
        ApiError: 403.
    """
    if access.key is None:
        return
    if not access.may_load(name):
        raise ApiError(403, f"This key may not load an adapter called {name[:200]!r}.", param="name")
    if source and (":" in source or ".." in source or source.startswith("/") or not access.may_load(source)):
        # A folder or URL may belong to another tenant.
        raise ApiError(
            403, "This key may load adapters from folders that it may name, or by uploading them.", param="source"
        )
    check_owner(service, access, name)


def check_owner(service: Service, access: Access, name: str) -> None:
    """Check that a sender may change an adapter. An unknown name passes.

    Raises:
        ApiError: 403 if the adapter belongs to somebody else; 404 if the sender may not see it.
    """
    owner = service.catalog.owner(name)
    if owner is None or access.owns(owner):
        return
    if not access.may_see(name):
        raise adapter_not_found(name)
    raise ApiError(403, f"The adapter {name[:200]!r} is not this key's own.", param="name")


def refuse_pin(access: Access) -> None:
    """Refuse a tenant's pin, which would keep device memory from other tenants.

    Raises:
        ApiError: 403.
    """
    if access.key is not None:
        raise ApiError(403, "Only the operator may pin adapters.", param="pinned")


async def change_split(
    service: Service,
    name: str,
    versions: Mapping[str, float] | None,
    shadow: Mapping[str, float] | None,
    *,
    access: Access,
    replace: bool,
) -> Split:
    """Split the requests of a name between adapters, or change the shares.

    Args:
        service: the server's service.
        name: the name that clients write.
        versions: names of adapters with their shares; None keeps them.
        shadow: names of adapters that get copies of requests, with the share of the requests; None keeps them.
        access: the sender's rights.
        replace: whether the name may be an adapter's, which is then removed, or an existing split's.

    Raises:
        ApiError: 400 if a share or a name is not valid or the name is taken, 403 if the sender may not do this, 404 for
            an adapter that does not exist, 500 if the registry cannot be written.
    """
    check_enabled(service)
    check_may_load(service, access, name)
    splits = service.resolver.splits
    old = splits.get(name)
    split = Split(
        dict(versions if versions is not None else old.versions if old else {}),
        dict(shadow if shadow is not None else old.shadow if old else {}),
    )
    if service.models.is_base(name):
        raise invalid_input(f"A split cannot have the name of the base model, {name!r}.")
    if (old is not None or name in service.catalog) and not replace:
        raise bad_request(f"{name!r} exists already; set 'replace' to True to change it.", "name")
    if reason := why_invalid(name, split.versions, split.shadow):
        raise bad_request(reason, reason.partition(":")[0])
    known = {*await service.resolver.adapter_names(access)}
    for each in {**split.versions, **split.shadow}:
        field = "versions" if each in split.versions else "shadow"
        if splits.get(each) is not None and access.may_see(each):
            raise ApiError(404, f"`{each}` is a split itself; name adapters.", param=field)
        if each not in known:
            raise ApiError(404, f"The adapter `{each}` does not exist.", param=field)
        if each in service.catalog:
            check_owner(service, access, each)
    try:
        await in_daemon_thread(partial(splits.set, name, split, access.actor))
    except AdapterStoreError as error:
        raise _store_error(name, error) from error
    except AdapterError as error:
        raise bad_request(str(error), "name") from error
    log.info("split changed", name=name, versions=split.versions, shadow=split.shadow)
    if name in service.catalog:  # Requests find the split first, so none is lost.
        await unload_adapter(service, name, access)
    return split


async def remove_split(service: Service, name: str, access: Access) -> None:
    """Remove a split; its adapters stay.

    Raises:
        ApiError: 403 if the sender may not load an adapter of this name, 500 if the registry cannot be written.
    """
    check_may_load(service, access, name)
    try:
        await in_daemon_thread(partial(service.resolver.splits.remove, name, access.actor))
    except AdapterStoreError as error:
        raise _store_error(name, error) from error


async def load_adapter(
    service: Service,
    name: str,
    source: str,
    *,
    access: Access,
    replace: bool,
    replaced_by: str | None = None,
    overrides: ChatOverrides = NO_OVERRIDES,
    persistent: bool = True,
) -> RegisteredAdapter:
    """Register an adapter.

    Args:
        service: the server's service.
        name: the name that clients will use.
        source: the adapter's folder or URL.
        access: the sender's rights.
        replace: whether the adapter may replace a registered adapter of the same name.
        replaced_by: the name of the body's field for ``replace``, for errors; None if the route has no such field.
        overrides: chat settings that replace the settings in the adapter's files.
        persistent: whether the adapter stays registered after a restart. If False, the load always waits and is never
            refused with 429.

    Raises:
        ApiError: 400 for a name, source or adapter that is not valid, 403 if the sender may not load it, 404 for a
            source that does not exist, 409 if another call changes the name, 429 if too many are loaded from its host,
            500 if the store cannot be written.
    """
    check_enabled(service)
    if service.models.is_base(name):
        raise invalid_input(f"The lora adapter {name!r} cannot have the name of the base model.")
    check_may_load(service, access, name, source)
    if access.key is None:  # Only the operator may load from URLs.
        source = service.catalog.locate(source)
    async with service.adapter_changes.loads.of(source, may_refuse=persistent):
        return await register_adapter(
            service,
            name,
            source,
            lambda: service.catalog.register(
                name, source, replace=replace, persistent=persistent, overrides=overrides, author=author_of(access)
            ),
            replaced_by,
        )


async def load_on_demand(service: Service, name: str, source: str) -> None:
    """Load an adapter that a request names, until the server stops. See :func:`load_adapter` for errors."""
    await load_adapter(service, name, source, access=OPERATOR, replace=False, persistent=False)


async def remove_unused(service: Service, name: str) -> None:
    """Remove an expired adapter or mixture. An adapter that cannot be removed now stays registered."""
    try:
        await unload_adapter(service, name, OPERATOR)
    except ApiError as error:
        log.info("adapter not removed", adapter=name, reason=error.message)


async def make_mixture(service: Service, name: str, parts: Sequence[Part]) -> None:
    """Register a mixture of adapters until the server stops. The adapters are kept during the call.

    Raises:
        ApiError: 400 if an adapter cannot be mixed or the mixture is too large; 500 if the store cannot be written.
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

    await register_adapter(service, name, "a mixture", register, "replace")


async def register_adapter(
    service: Service, name: str, source: str, register: Callable[[], RegisteredAdapter], replaced_by: str | None
) -> RegisteredAdapter:
    """Register a name with the catalog and the engines, and drop the version that it replaces."""
    # Read the latest changes of other servers, so that the check below includes them.
    with suppress(AdapterStoreError):
        await _follow_once(service)
    if service.resolver.splits.get(name) is not None:
        raise invalid_input(f"The lora adapter {name!r} cannot have the name of a split; remove the split first.")
    try:
        loaded = await in_daemon_thread(register)
    except AdapterExists:
        raise already_loaded(name, replaced_by) from None
    except AdapterBusy as error:
        raise ApiError(409, str(error)) from error
    except AdapterQuotaExceeded as error:
        raise ApiError(403, f"{name!r} was not added: {error}.") from error
    except AdapterStoreError as error:
        raise _store_error(name, error) from error
    except AdapterError as error:
        log.warning("adapter not loaded", adapter=name[:200], source=source[:MAX_SOURCE_CHARS], error=str(error))
        raise ApiError(404 if isinstance(error, AdapterNotFound) else 400, _for_client(name, error)) from error
    record = loaded.record
    if record.persistent:
        service.resolver.loader.forget(name)
    for warning in loaded.warnings:
        log.warning("adapter warning", adapter=name, warning=warning)
    if not loaded.is_unchanged:
        log.info("adapter loaded", adapter=name, digest=record.digest, source=record.source)
    _serve(service, record, loaded.replaced)
    return loaded


def _serve(service: Service, record: AdapterRecord, old: AdapterRecord | None) -> None:
    """Register a name's new version with the engines and drop the old version."""
    if service.catalog.has(record.digest):  # Another request may have removed the adapter during the registration.
        service.client.register_adapters([record.ref])
    service.send_names()
    if old is None:
        return
    if record.name in service.resolver.loader.pinned:
        _send_pins(service)
    _in_background(service, _drop_version(service, old))


def _stop_serving(service: Service, record: AdapterRecord) -> "asyncio.Task[int]":
    """Unpin a removed name, drop its version in the background, and delete its counts."""
    if record.name in service.resolver.loader.pinned:
        set_pinned(service, record.name, False)
    service.send_names()
    freeing = _in_background(service, _drop_version(service, record))
    freeing.add_done_callback(lambda _: _forget_counts(service, record.name))
    return freeing


_PINNED_SHARE = 0.5
"""Share of the device's blocks that pinned adapters may take."""


def set_pinned(service: Service, name: str, is_pinned: bool) -> None:
    """Pin or unpin an adapter. The current version of a pinned name is evicted last, also after a replacement.

    Raises:
        ApiError: 409, pinned adapters would take too much device memory.
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
    """Estimate the number of blocks that an adapter takes on the device of one rank."""
    info = service.client.engine_info
    elements = adapter_elements(record.ref.ranks, info.geometry, record.ref.extras)
    return -(-elements * info.geometry.dtype_bytes // (service.ranks * info.block_bytes))


def median_blocks(service: Service) -> float:
    """Return the device blocks of the median registered adapter; 1 if none is registered."""
    blocks = [_blocks(service, record) for record in service.catalog.list()]
    return statistics.median(blocks) if blocks else 1.0


async def unload_adapter(service: Service, name: str, access: Access) -> int | None:
    """Remove an adapter, so that new requests cannot name it, and free its memory after its running requests.

    Returns:
        Bytes freed on device and host, including the adapter's KV; None if requests still ran after ``DRAIN_S``.

    Raises:
        ApiError: 404 for an unknown name or an adapter of ``--adapter-dir``, 403 for an adapter of somebody else, 409
            if another call changes it, 500 if the registry cannot be written.
    """
    check_enabled(service)
    check_owner(service, access, name)
    try:
        async with service.adapter_changes.removals:
            record = await in_daemon_thread(lambda: service.catalog.remove(name, access.actor))
    except UnknownAdapter:
        if name in await service.resolver.unloaded_names(access):
            raise ApiError(
                404,  # The router unloads names without checking them first, and treats a 404 as success.
                f"The adapter {name!r} is not registered: the folder of --adapter-dir serves it. Move its folder away "
                "to serve it no longer.",
            ) from None
        raise adapter_not_found(name) from None
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
    """Apply the changes of other servers with the same registry, until the server stops."""
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
    """Apply the changes that other servers have made to the registry.

    Raises:
        AdapterStoreError: the registry cannot be read.
    """
    for change in await in_daemon_thread(service.catalog.follow):
        _follow(service, change)
    await in_daemon_thread(service.resolver.splits.reload)


def _follow(service: Service, change: FollowedChange) -> None:
    """Apply another server's change of a name to the engines."""
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
    """Delete the counts of a removed adapter, unless its name was loaded again."""
    if name not in service.catalog.names():
        service.observer.usage.forget(name)
        service.observer.live.forget(name)


async def _drop_version(service: Service, record: AdapterRecord) -> int:
    """Free a version's memory on every tier unless another name points to the version. Return the bytes freed."""
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
    """Run ``work`` to its end, even if the caller is cancelled. The service keeps the task alive."""
    task = asyncio.create_task(work)
    service.adapter_changes.drops.add(task)
    task.add_done_callback(service.adapter_changes.drops.discard)
    return task


def check_enabled(service: Service) -> None:
    """Check that the server serves adapters.

    Raises:
        ApiError: 400, LoRA is disabled.
    """
    if not service.adapter_settings.enabled:
        raise ApiError(400, "LoRA is disabled on this server; start it with --enable-lora.")


def _store_error(name: str, error: AdapterStoreError) -> ApiError:
    log.error("adapter store failed", adapter=name, error=str(error))
    return ApiError(500, _for_client(name, error))


def _for_client(name: str, error: AdapterError) -> str:
    """Return an error text for clients: the adapter's name and the cause, without the server's paths."""
    # Most folders have their adapter's name, which the text contains only once.
    cause, shown = hide_paths(str(error)).removeprefix(f"{name}: "), repr(name[:200])
    return cause if shown in cause else f"adapter {shown}: {cause}"
