"""Lets TRL's asynchronous trainers run on a CPU, without the package vllm: :func:`run_without_cuda`.

What demands CUDA or that package is replaced; nothing else of TRL is:

* ``packing._flash_attn``: FlashAttention over packed sequences, by torch's attention, one sequence after another;
* ``async_grpo_trainer.get_peak_flops_per_device``: asks the GPU its name; only for a metric;
* ``async_rollout_worker.is_vllm_available``: the check that vllm is installed, whose code this path never calls.
"""

from collections.abc import Iterable
from typing import Any

import torch
from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker, packing


class TorchAttention:
    """Computes on the CPU what TRL takes from a kernel of FlashAttention."""

    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_ends: torch.Tensor,
        key_ends: torch.Tensor,
        *_: int,
        softmax_scale: float | None = None,
        **__: Any,
    ) -> torch.Tensor:
        """Return causal attention ``[tokens, heads, head_dim]`` of packed sequences, aligned at their ends."""

        def parts(packed: torch.Tensor, ends: torch.Tensor) -> Iterable[torch.Tensor]:
            return (part.transpose(0, 1)[None] for part in packed.split(ends.diff().tolist()))

        found = []
        for q, k, v in zip(parts(query, query_ends), parts(key, key_ends), parts(value, key_ends), strict=True):
            rows = q.shape[2]
            columns = k.shape[2]
            mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
            attended = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True
            )
            found.append(attended[0].transpose(0, 1))
        return torch.cat(found)


def run_without_cuda() -> None:
    """Replace what demands CUDA or the package vllm. The process of the rollouts must call it, too."""
    packing._flash_attn = lambda: TorchAttention
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    async_rollout_worker.is_vllm_available = lambda *_, **__: True
