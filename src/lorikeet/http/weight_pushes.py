"""Refuses the routes by which trainers push weights of the base model, at a server and at a router."""

from lorikeet.http.errors import ApiError, not_supported

WEIGHT_PUSHES = (
    *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
    *("/init_weights_update_group", "/update_weights_from_distributed", "/update_weights_from_tensor"),
    "/collective_rpc",
)
"""Routes of vLLM and SGLang by which trainers push the weights of the base model."""


def push_refused() -> ApiError:
    """Return the error of these routes: 501, with the trainers that send adapters instead."""
    return not_supported(
        "The weights of the base model cannot be replaced: trainers send adapters only. With TRL use AsyncGRPOTrainer "
        "or AsyncDistillationTrainer with a peft_config, which load each version by /v1/load_lora_adapter; GRPOTrainer "
        "in server mode pushes merged weights over NCCL, even with a peft_config.",
        "update_info",
    )
