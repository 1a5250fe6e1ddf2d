"""Other servers' routes for adapters: those of vLLM, SGLang and Dynamo."""

from collections.abc import Awaitable
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, PlainTextResponse, Response

from lorikeet.server.adapter_changes import invalid_input, load_adapter, unload_adapter
from lorikeet.server.dependencies import JsonBody, Parts
from lorikeet.server.errors import ApiError
from lorikeet.server.protocol import DynamoAdapter, LoadAdapter, UnloadAdapter
from lorikeet.server.service import Service

router = APIRouter()


# --- vLLM -----------------------------------------------------------------------------------------


@router.post("/v1/load_lora_adapter", dependencies=[JsonBody])
async def load_lora_adapter(body: LoadAdapter, parts: Parts) -> Response:
    """Load an adapter as vLLM does."""
    if not body.lora_name or not body.lora_path:
        raise invalid_input("Both 'lora_name' and 'lora_path' must be provided.")
    if body.is_3d_lora_weight:
        raise ApiError(501, "Adapters of mixture-of-experts models are not supported.", param="is_3d_lora_weight")
    await load_adapter(parts, body.lora_name, body.lora_path, replace=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", dependencies=[JsonBody])
async def unload_lora_adapter(body: UnloadAdapter, parts: Parts) -> Response:
    """Unload an adapter as vLLM does."""
    if not body.lora_name:
        raise invalid_input("'lora_name' needs to be provided to unload a LoRA adapter.")
    await unload_adapter(parts, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


# --- SGLang ---------------------------------------------------------------------------------------


@router.post("/load_lora_adapter", dependencies=[JsonBody])
async def load_lora_adapter_sglang(body: LoadAdapter, parts: Parts) -> Response:
    """Load an adapter as SGLang does."""
    if not body.lora_name or not body.lora_path:
        return _sglang(parts, "Both lora_name and lora_path must be provided.")
    if body.pinned:
        return _sglang(parts, "Pinned adapters are not supported yet.", 501)
    return await _sglang_outcome(parts, load_adapter(parts, body.lora_name, body.lora_path, replace=False))


@router.post("/unload_lora_adapter", dependencies=[JsonBody])
async def unload_lora_adapter_sglang(body: UnloadAdapter, parts: Parts) -> Response:
    """Unload an adapter as SGLang does."""
    return await _sglang_outcome(parts, unload_adapter(parts, body.lora_name))


async def _sglang_outcome(parts: Service, work: Awaitable[object]) -> Response:
    try:
        await work
    except ApiError as error:
        return _sglang(parts, error.message, error.status if error.status >= 500 else 400)
    return _sglang(parts, None)


def _sglang(parts: Service, error: str | None, status: int = 400) -> Response:
    body = {
        "success": error is None,
        "error_message": error or "",
        "loaded_adapters": {record.name: record.source for record in parts.catalog.list()},
    }
    return JSONResponse(body, 200 if error is None else status)


# --- Dynamo ---------------------------------------------------------------------------------------


@router.get("/v1/loras")
async def list_loras(parts: Parts) -> dict[str, Any]:
    """All adapters as Dynamo lists them."""
    loras = {record.name: int(record.digest[:8], 16) for record in parts.catalog.list()}
    return {"status": "success", "loras": loras, "count": len(loras)}


@router.post("/v1/loras", dependencies=[JsonBody])
async def load_lora(body: DynamoAdapter, parts: Parts) -> dict[str, Any]:
    """Load an adapter as Dynamo does."""
    record = await load_adapter(parts, body.lora_name, body.source.uri, replace=False)
    return {"status": "success", "lora_name": record.name, "lora_id": int(record.digest[:8], 16)}


@router.delete("/v1/loras/{name:path}")
async def delete_lora(name: str, parts: Parts) -> dict[str, Any]:
    """Unload an adapter as Dynamo does."""
    await unload_adapter(parts, name)
    return {"status": "success", "lora_name": name}
