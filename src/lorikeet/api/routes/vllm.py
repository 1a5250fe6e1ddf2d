"""Serves vLLM's routes beside OpenAI's, and ``/server_info``, which SGLang has, too."""

import json
from pathlib import Path
from typing import Any

from fastapi import Request

from lorikeet import __version__
from lorikeet.api.dependencies import ServiceDep
from lorikeet.chat.protocol import Body, validated
from lorikeet.config import AdapterSettings
from lorikeet.http.errors import ApiError, bad_request
from lorikeet.http.routes import Callers, Route, Routes
from lorikeet.http.threads import in_daemon_thread

ROUTES = Routes(note="vLLM's and SGLang's")

_MANY = 2**16
"""Rank and number of adapters, for trainers that compare theirs with the limits of vLLM; there are none here."""


class ResetCache(Body):
    """Body of ``/reset_prefix_cache``; the query has the same fields.

    ``reset_external`` has no effect: there is no KV outside the engine.
    """

    reset_running_requests: bool = False
    reset_external: bool = False


@ROUTES.add(Route("POST /reset_prefix_cache", Callers.ADMINS))
async def reset_prefix_cache(
    http: Request, service: ServiceDep, reset_running_requests: bool = False
) -> dict[str, bool]:
    """Exclude the present KV from reuse by later requests.

    With ``reset_running_requests`` running requests compute theirs again, from the tokens that they have.
    """
    given = await http.body()
    try:
        fields = validated(ResetCache, json.loads(given)) if given else ResetCache()
    except (ValueError, RecursionError) as error:
        raise bad_request("The body is not valid JSON.") from error
    service.reset_prefix_cache(recompute=fields.reset_running_requests or reset_running_requests)
    return {"success": True}


@ROUTES.add(Route("GET /get_server_info /server_info", Callers.OPERATOR))
async def server_info(service: ServiceDep) -> dict[str, Any]:
    """Return sizes and limits of the server, in ``vllm_config``, where training loops read them."""
    engine = service.client.engine_info
    models = service.models
    root = models.card(models.base)["root"]
    return {
        "version": __version__,
        "model_path": root,
        "tokenizer_path": root,
        "served_model_name": models.base,
        "max_model_len": service.limits.max_model_len,
        "block_size": engine.block_size,
        "num_gpu_blocks": engine.total_blocks,
        "max_total_num_tokens": engine.total_blocks * engine.block_size,
        "max_queued": service.settings.max_queued,
        "max_logprobs": service.settings.max_logprobs,
        "enable_lora": service.adapter_settings.enabled,
        "kernels": engine.kernels,
        "replicas": len(service.client.views),
        "vllm_config": {
            "model_config": {
                "model": root,
                "dtype": f"torch.{service.catalog.dtype}",
                "max_model_len": service.limits.max_model_len,
                "max_logprobs": service.settings.max_logprobs,
                "logprobs_mode": service.settings.logprobs_mode,
            },
            # An adapter reaches all replicas, which vLLM's clients conclude from a size of 1 only.
            "parallel_config": {"data_parallel_size": 1, "world_size": service.ranks},
            "cache_config": {"block_size": engine.block_size, "num_gpu_blocks": engine.total_blocks},
            "lora_config": _lora_config(service.adapter_settings),
            # Trainers that push the weights of the base model over NCCL stop at None, with an error of their own.
            "weight_transfer_config": None,
        },
    }


def _lora_config(settings: AdapterSettings) -> dict[str, Any] | None:
    if not settings.enabled:
        return None
    return {"max_lora_rank": settings.max_rank or _MANY, "max_loras": _MANY, "max_cpu_loras": _MANY}


@ROUTES.add(Route("GET /tokenizer_info", Callers.OPERATOR))
async def tokenizer_info(service: ServiceDep) -> dict[str, Any]:
    """Return the base model's ``tokenizer_config.json``, with the chat template in use."""
    texts = service.text_processor
    if texts.origin is None:
        raise ApiError(404, "The tokenizer was not read from a model's folder.")
    folder = texts.origin[0]
    config = await in_daemon_thread(lambda: _read(folder))
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    return config if texts.template is None else config | {"chat_template": texts.template.source}


def _read(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text())
    except FileNotFoundError:
        return {}
    return config
