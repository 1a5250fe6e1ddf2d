"""One decoder for Llama, SmolLM2, Mistral, Qwen2 and Qwen3: what differs is in the config and the weights.

It knows nothing of batching, scheduling or sampling; how attention finds its keys is the kernels' business.
"""

import torch
from torch import Tensor

from lorikeet.kernels.base import Batch, Kernels
from lorikeet.models.config import ModelConfig
from lorikeet.models.parallel import Group
from lorikeet.models.rotary import Rotary
from lorikeet.models.weights import DecoderWeights, LayerWeights


class Decoder:
    """A decoder-only transformer, whole or one tensor-parallel rank of it."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, kernels: Kernels, group: Group) -> None:
        """Compose a decoder.

        Args:
            config: the whole model's.
            weights: this rank's, of one dtype and device.
            kernels: what computes.
            group: the ranks that hold the other shares.
        """
        geometry = config.geometry(dtype_bytes=weights.embedding.element_size(), tensor_parallel=group.size)
        self._config = config
        self._weights = weights
        self._kernels = kernels
        self._group = group
        self._columns = {module: geometry.modules[module].out_features for module in ("q", "k", "gate")}
        self._split = [geometry.modules[module].out_features for module in ("q", "k", "v")]
        self._rotary = Rotary(config.rope, config.head_dim, weights.embedding.device)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: Tensor) -> Tensor:
        """Compute one step and store its keys and values.

        Args:
            batch: what to compute.
            kv: ``[layers, blocks, 2, block_tokens, kv_heads, head_dim]`` (see ``kernels.base.kv_view``), changed.

        Returns:
            fp32 logits ``[S, vocab]`` of ``batch.sample_rows``.
        """
        weights = self._weights
        x = weights.embedding[batch.token_ids]
        cos, sin = self._rotary(batch.positions, x.dtype)
        for index, layer in enumerate(weights.layers):
            x = x + self._attention(index, layer, x, cos, sin, batch, kv[index])
            x = x + self._mlp(index, layer, x, batch)
        x = self._kernels.rms_norm(x[batch.sample_rows], weights.final_norm, self._config.rms_norm_eps)
        return self._kernels.linear(x, weights.lm_head, None).float()

    def _attention(
        self, index: int, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch, kv: Tensor
    ) -> Tensor:
        config, kernels = self._config, self._kernels
        x = kernels.rms_norm(x, layer.input_norm, config.rms_norm_eps)
        qkv = kernels.linear(x, layer.qkv, layer.qkv_bias)
        if batch.lora:
            kernels.add_lora(qkv, x, batch.lora, index, "q", 0)
            kernels.add_lora(qkv, x, batch.lora, index, "k", self._columns["q"])
            kernels.add_lora(qkv, x, batch.lora, index, "v", self._columns["q"] + self._columns["k"])
        q, k, v = (part.unflatten(-1, (-1, config.head_dim)) for part in qkv.split(self._split, dim=-1))
        if layer.q_norm is not None and layer.k_norm is not None:
            q = kernels.rms_norm(q, layer.q_norm, config.rms_norm_eps)
            k = kernels.rms_norm(k, layer.k_norm, config.rms_norm_eps)
        q, k = kernels.rotary(q, cos, sin), kernels.rotary(k, cos, sin)
        kernels.store_kv(k, v, kv, batch)
        mixed = kernels.attention(q, kv, batch, config.head_dim**-0.5, config.windows[index])
        out = kernels.linear(mixed, layer.o, layer.o_bias)
        if batch.lora:
            # A is split by input as the weight is, so each rank adds its part before the parts are summed.
            kernels.add_lora(out, mixed, batch.lora, index, "o", 0)
        return self._group.all_reduce(out)

    def _mlp(self, index: int, layer: LayerWeights, x: Tensor, batch: Batch) -> Tensor:
        kernels = self._kernels
        x = kernels.rms_norm(x, layer.post_norm, self._config.rms_norm_eps)
        gate_up = kernels.linear(x, layer.gate_up, layer.gate_up_bias)
        if batch.lora:
            kernels.add_lora(gate_up, x, batch.lora, index, "gate", 0)
            kernels.add_lora(gate_up, x, batch.lora, index, "up", self._columns["gate"])
        inner = kernels.silu_mul(gate_up)
        out = kernels.linear(inner, layer.down, layer.down_bias)
        if batch.lora:
            kernels.add_lora(out, inner, batch.lora, index, "down", 0)
        return self._group.all_reduce(out)
