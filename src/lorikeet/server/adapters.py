"""Lorikeet's own routes for adapters."""

import bisect
from typing import Annotated, Any

from fastapi import APIRouter, Query

from lorikeet.adapters.catalog import AdapterRecord
from lorikeet.server.adapter_changes import load_adapter, unload_adapter
from lorikeet.server.dependencies import JsonBody, Parts
from lorikeet.server.errors import ApiError
from lorikeet.server.protocol import NewAdapter
from lorikeet.server.service import Service

router = APIRouter()


@router.get("/v1/adapters")
async def list_adapters(
    parts: Parts, limit: Annotated[int, Query(ge=1, le=1000)] = 100, cursor: str = ""
) -> dict[str, Any]:
    """A page of adapters in the order of their names; ``next_cursor`` asks for the next one."""
    records = sorted(parts.catalog.list(), key=lambda record: record.name)
    start = bisect.bisect_right(records, cursor, key=lambda record: record.name) if cursor else 0
    page = records[start : start + limit]
    more = start + limit < len(records)
    return {
        "object": "list",
        "data": [_card(parts, record) for record in page],
        "has_more": more,
        "next_cursor": page[-1].name if more else None,
        "total": len(records),
    }


@router.post("/v1/adapters", dependencies=[JsonBody], status_code=201)
async def add_adapter(body: NewAdapter, parts: Parts) -> dict[str, Any]:
    """Register an adapter, or replace it."""
    return _card(parts, await load_adapter(parts, body.name, body.source, replace=body.replace))


@router.get("/v1/adapters/{name:path}/stats")
async def adapter_stats(name: str, parts: Parts) -> dict[str, Any]:
    """Traffic of one adapter since the server started."""
    record = _record(parts, name)
    usage = parts.observer.usage.peek(name)
    total = usage.total
    return {
        "name": name,
        "digest": record.digest,
        **_residency(parts, record),
        "requests_running": usage.running,
        "requests": total.requests,
        "requests_aborted": total.aborted,
        "requests_failed": total.failed,
        "prompt_tokens": total.prompt_tokens,
        "cached_tokens": total.cached_tokens,
        "generation_tokens": total.completion_tokens,
        "mean_ttft_s": total.ttft_s / total.ttft_count if total.ttft_count else None,
        "mean_e2e_s": total.e2e_s / total.requests if total.requests else None,
        "mean_load_wait_s": total.adapter_wait_s / total.requests if total.requests else None,
        "mean_kv_wait_s": total.kv_wait_s / total.requests if total.requests else None,
    }


@router.get("/v1/adapters/{name:path}")
async def get_adapter(name: str, parts: Parts) -> dict[str, Any]:
    """One adapter."""
    return _card(parts, _record(parts, name))


@router.delete("/v1/adapters/{name:path}")
async def delete_adapter(name: str, parts: Parts) -> dict[str, Any]:
    """Remove an adapter once its running requests have ended."""
    freed_bytes = await unload_adapter(parts, name)
    return {"name": name, "object": "adapter", "deleted": True, "freed_bytes": freed_bytes}


def _record(parts: Service, name: str) -> AdapterRecord:
    record = parts.models.record(name)
    if record is None:
        raise ApiError(404, f"The adapter `{name}` does not exist.", param="name")
    return record


def _card(parts: Service, record: AdapterRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "object": "adapter",
        "digest": record.digest,
        "source": record.source,
        "base": parts.models.base,
        "created": int(record.created_at),
        "rank": record.max_rank,
        "weight_bytes": record.row.weight_bytes,
        **_residency(parts, record),
    }


def _residency(parts: Service, record: AdapterRecord) -> dict[str, Any]:
    stats = [view.stats for view in parts.client.views.values() if view.stats is not None]
    blocks = sum(each.resident_adapters.get(record.digest, 0) for each in stats)
    return {"level": "gpu" if blocks else None, "device_bytes": blocks * parts.client.hello.block_bytes}
