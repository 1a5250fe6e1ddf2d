"""Answers the router's routes for adapters and splits: Lorikeet's ``/v1/adapters``, and vLLM's."""

import asyncio
import bisect
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.registry import check_name
from lorikeet.adapters.sources import shown_source
from lorikeet.core.splits import Split
from lorikeet.http.errors import ApiError, bad_request, hide_paths, not_supported
from lorikeet.http.logs import log
from lorikeet.http.vllm_adapter_answers import (
    adapter_not_found,
    already_loaded,
    check_load,
    check_unload,
    invalid_input,
    load_answer,
    unload_answer,
)
from lorikeet.router.adapters import RoutedAdapter, describe_adapter
from lorikeet.router.backend_router import BackendRouter
from lorikeet.router.catalog import ModelCatalog

_MOST_CARDS = 1000


class _Load(msgspec.Struct):
    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False
    rank: int | None = None


class _Unload(msgspec.Struct):
    lora_name: str = ""


class _NewAdapter(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``POST /v1/adapters``: a source, another adapter's name, or the versions of a split."""

    name: str
    source: str | None = None
    alias_of: str | None = None
    versions: dict[str, float] | None = None
    shadow: dict[str, float] | None = None
    replace: bool = False
    rank: int | None = None


class _Change(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``PATCH /v1/adapters/{name}``; None changes nothing."""

    versions: dict[str, float] | None = None
    shadow: dict[str, float] | None = None
    pinned: bool | None = None
    warm: bool | None = None


class AdapterRoutes:
    """Answers the routes that list and change adapters.

    Args:
        catalog: the adapters and splits.
        backend_router: the backends, whose adapters the cards show.
    """

    def __init__(self, catalog: ModelCatalog, backend_router: BackendRouter) -> None:
        self._catalog = catalog
        self._backend_router = backend_router

    # --- Lorikeet's ----------------------------------------------------------------------------------

    async def list(self, http: Request) -> Response:
        """Return a page of adapters and splits, sorted by name, as a server's own route does."""
        limit = http.query_params.get("limit", "100")
        if not limit.isdecimal() or not 1 <= int(limit) <= _MOST_CARDS:
            raise bad_request(f"limit: must be a number from 1 to {_MOST_CARDS}.", "limit")
        names = sorted(filter(http.state.access.may_see, {*self._catalog.adapters, *self._catalog.splits}))
        cursor = http.query_params.get("cursor", "")
        start = bisect.bisect_right(names, cursor) if cursor else 0
        page = names[start : start + int(limit)]
        more = start + len(page) < len(names)
        return json_response(
            {
                "object": "list",
                "data": [self._card(name) for name in page],
                "has_more": more,
                "next_cursor": page[-1] if more else None,
                "total": len(names),
                "left_out": [],
            }
        )

    async def one(self, http: Request) -> Response:
        """Return one adapter or split."""
        name = http.path_params["name"]
        if not http.state.access.may_see(name):
            raise _unknown(name)
        return json_response(self._card(name))

    async def add(self, http: Request) -> Response:
        """Serve an adapter, or split a name between adapters."""
        body = await read_body(http, _NewAdapter)
        if sum(each is not None for each in (body.source, body.alias_of, body.versions)) != 1:
            raise bad_request("Give one of source, alias_of and versions.", "source")
        if body.versions is not None:
            is_taken = body.name in self._catalog.splits or body.name in self._catalog.adapters
            if is_taken and not body.replace:
                raise bad_request(f"{body.name!r} exists already; set 'replace' to True to change it.", "name")
            await self._split(body.name, Split(body.versions, body.shadow or {}))
        else:
            source = body.source
            rank = body.rank
            if body.alias_of is not None:
                known = self._adapter(body.alias_of)
                source = known.source
                rank = known.rank
            await self._serve(body.name, source or "", rank, "replace", replace=body.replace)
        return json_response(self._card(body.name), 201)

    async def change(self, http: Request) -> Response:
        """Change the shares of a split."""
        name = http.path_params["name"]
        body = await read_body(http, _Change)
        if body.pinned is not None or body.warm is not None:
            raise not_supported("A router does not pin or warm adapters; do so at a backend's own address.", "pinned")
        if (old := self._catalog.splits.get(name)) is None:
            raise ApiError(404, f"`{name}` is not split between versions.", param="name")
        versions = old.versions if body.versions is None else body.versions
        await self._split(name, Split(versions, old.shadow if body.shadow is None else body.shadow))
        return json_response(self._card(name))

    async def delete(self, http: Request) -> Response:
        """Stop serving an adapter, which backends unload after its running requests; or remove a split at once."""
        name = http.path_params["name"]
        is_split = name in self._catalog.splits
        if is_split:
            self._catalog.remove_split(name)
            log.info("split removed", name=name)
        else:
            await self._remove(self._adapter(name).name)
        freed_bytes = 0 if is_split else None
        return json_response({"name": name, "object": "adapter", "deleted": True, "freed_bytes": freed_bytes})

    # --- vLLM's --------------------------------------------------------------------------------------

    async def load(self, http: Request) -> Response:
        """Serve an adapter, as vLLM's route does. A backend loads it with its first request."""
        body = await read_body(http, _Load)
        check_load(body.lora_name, body.lora_path)
        await self._serve(body.lora_name, body.lora_path, body.rank, "load_inplace", replace=body.load_inplace)
        return load_answer(body.lora_name)

    async def unload(self, http: Request) -> Response:
        """Stop serving an adapter."""
        name = (await read_body(http, _Unload)).lora_name
        check_unload(name)
        if name not in self._catalog.adapters:
            raise adapter_not_found(name)
        await self._remove(name)
        return unload_answer(name)

    # --- both ----------------------------------------------------------------------------------------

    async def _serve(self, name: str, source: str, rank: int | None, replaced_by: str, *, replace: bool) -> None:
        """Read an adapter and serve it. ``replaced_by`` is the field for ``replace``, for errors."""
        self._check_is_free(name, replaced_by, replace=replace)
        try:
            check_name(name, {card["id"] for card in self._catalog.base_cards()})
            adapter = await asyncio.to_thread(describe_adapter, name, source, rank)
        except AdapterError as error:
            raise bad_request(hide_paths(str(error))) from error
        self._check_is_free(name, replaced_by, replace=replace)  # Another call may have taken the name meanwhile.
        await self._catalog.add(adapter)
        log.info("adapter added", adapter=name, source=adapter.source, rank=adapter.rank)

    def _check_is_free(self, name: str, replaced_by: str, *, replace: bool) -> None:
        if name in self._catalog.splits:
            raise invalid_input(f"The lora adapter {name!r} cannot have the name of a split; remove the split first.")
        if name in self._catalog.adapters and not replace:
            raise already_loaded(name, replaced_by)

    async def _remove(self, name: str) -> None:
        await self._catalog.remove(name)
        log.info("adapter removed", adapter=name)

    async def _split(self, name: str, split: Split) -> None:
        try:
            check_name(name, {card["id"] for card in self._catalog.base_cards()})
        except AdapterError as error:
            raise bad_request(str(error), "name") from error
        self._catalog.set_split(name, split)
        log.info("split changed", name=name, versions=split.versions, shadow=split.shadow)
        if name in self._catalog.adapters:  # Requests find the split first, so none is lost.
            await self._remove(name)

    def _adapter(self, name: str) -> RoutedAdapter:
        adapter = self._catalog.adapters.get(name)
        if adapter is None:
            raise _unknown(name)
        return adapter

    def _card(self, name: str) -> dict[str, Any]:
        """Return the card of an adapter or a split, with the fields of a server's own."""
        base_cards = self._catalog.base_cards()
        base = base_cards[0]["id"] if base_cards else ""
        card: dict[str, Any] = {"name": name, "object": "adapter", "base": base, "created": None, "pinned": False}
        if (split := self._catalog.splits.get(name)) is not None:
            unknown = dict.fromkeys(("digest", "rank", "weight_bytes", "level"))
            shares = {"versions": split.versions, "shadow": split.shadow}
            return {**card, **unknown, **shares, "source": "a split", "loaded": True, "device_bytes": 0}
        adapter = self._adapter(name)
        holders = [each for each in self._backend_router.backends.values() if each.adapters.get(name) == adapter.digest]
        return card | {
            "digest": self._catalog.version(adapter),
            "source": shown_source(adapter.source),
            "rank": adapter.rank,
            "weight_bytes": adapter.size_bytes,
            "loaded": True,
            "level": "gpu" if holders else None,
            "device_bytes": adapter.size_bytes * len(holders),
            "replicas": [each.replica for each in holders],
        }


def _unknown(name: str) -> ApiError:
    return ApiError(404, f"The adapter `{name}` does not exist.", param="name")


async def read_body(http: Request, kind: Any) -> Any:
    """Return the body of a route as ``kind``.

    Raises:
        ApiError: 400, the body does not fit.
    """
    try:
        return msgspec.json.decode(await http.body(), type=kind)
    except msgspec.DecodeError as error:
        raise bad_request(f"The body does not fit this route: {error}.") from error


def json_response(body: dict[str, Any], status: int = 200) -> Response:
    """Return a body as JSON."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")
