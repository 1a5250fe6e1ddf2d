"""Which part of which checkpoint tensor goes where in one rank's fused weights."""

import re
from typing import NamedTuple

import torch
from torch import Tensor

from lorikeet.kernels.layers import LayerWeights
from lorikeet.models.config import ROW_PARALLEL, ModelConfig
from lorikeet.models.weights import DecoderWeights

_WHOLE = slice(None)
_EMBEDDING = "model.embed_tokens.weight"
_LM_HEAD = "lm_head.weight"

# Some checkpoints carry the rotary frequencies, which follow from the config.
_ALWAYS_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

_PATHS = {
    **{module: f"self_attn.{module}_proj" for module in ("q", "k", "v", "o")},
    **{module: f"mlp.{module}_proj" for module in ("gate", "up", "down")},
}


class Target(NamedTuple):
    """Where a checkpoint tensor goes.

    Attributes:
        view: what it is copied to.
        shape: its shape in the checkpoint.
        part: the slice of it that this rank holds.
    """

    view: Tensor
    shape: tuple[int, ...]
    part: tuple[slice, ...]


class Layout:
    """Uninitialised weights of one rank, and for every checkpoint tensor the place it fills.

    Attributes:
        weights: the tensors, to be filled through ``targets``.
        targets: by name in the checkpoint.
        copies: tensors that the checkpoint may hold though they must equal others, by name: the other's name.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, rank: int, tensor_parallel: int
    ) -> None:
        self._config = config
        self._rank = rank
        self._ranks = tensor_parallel
        self._dtype = dtype
        self._device = device
        self._shapes = config.module_shapes()
        self.targets: dict[str, Target] = {}
        config.check_divides(tensor_parallel)
        self.weights = self._decoder()
        self.copies = {_LM_HEAD: _EMBEDDING} if config.tie_word_embeddings else {}

    def is_ignored(self, name: str) -> bool:
        """Return whether a checkpoint may hold ``name`` though the model does not need it."""
        return name in self.copies or _ALWAYS_IGNORED.fullmatch(name) is not None

    def _decoder(self) -> DecoderWeights:
        config = self._config
        embedding = self._plain(_EMBEDDING, config.vocab_size, config.hidden_size)
        layers = tuple(self._layer(f"model.layers.{layer}.") for layer in range(config.layers))
        final_norm = self._plain("model.norm.weight", config.hidden_size)
        tied = config.tie_word_embeddings
        lm_head = embedding if tied else self._plain(_LM_HEAD, config.vocab_size, config.hidden_size)
        return DecoderWeights(embedding, layers, final_norm, lm_head)

    def _layer(self, prefix: str) -> LayerWeights:
        config = self._config
        qkv, qkv_bias = self._fused(prefix, ("q", "k", "v"), biased=config.qkv_bias)
        o, o_bias = self._fused(prefix, ("o",), biased=config.o_bias)
        gate_up, gate_up_bias = self._fused(prefix, ("gate", "up"), biased=config.mlp_bias)
        down, down_bias = self._fused(prefix, ("down",), biased=config.mlp_bias)
        return LayerWeights(
            input_norm=self._plain(f"{prefix}input_layernorm.weight", config.hidden_size),
            post_norm=self._plain(f"{prefix}post_attention_layernorm.weight", config.hidden_size),
            qkv=qkv,
            o=o,
            gate_up=gate_up,
            down=down,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            q_norm=self._plain(f"{prefix}self_attn.q_norm.weight", config.head_dim) if config.qk_norm else None,
            k_norm=self._plain(f"{prefix}self_attn.k_norm.weight", config.head_dim) if config.qk_norm else None,
        )

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _plain(self, name: str, *shape: int) -> Tensor:
        """Make a tensor that every rank holds whole."""
        view = self._empty(*shape)
        self.targets[name] = Target(view, shape, (_WHOLE,) * len(shape))
        return view

    def _fused(self, prefix: str, modules: tuple[str, ...], *, biased: bool) -> tuple[Tensor, Tensor | None]:
        """Make the weight of ``modules``, one below the other, and their bias; both this rank's share."""
        shards = [self._config.module_shard(module, self._rank, self._ranks) for module in modules]
        rows = [shard.outputs.stop - shard.outputs.start for shard in shards]
        columns = shards[0].inputs.stop - shards[0].inputs.start
        weight = self._empty(sum(rows), columns)
        bias = self._empty(sum(rows)) if biased else None
        holds_bias = self._rank == 0 or not ROW_PARALLEL.intersection(modules)
        for index, (module, shard) in enumerate(zip(modules, shards, strict=True)):
            into = slice(sum(rows[:index]), sum(rows[: index + 1]))
            shape = self._shapes[module]
            path = prefix + _PATHS[module]
            full = (shape.out_features, shape.in_features)
            self.targets[f"{path}.weight"] = Target(weight[into], full, (shard.outputs, shard.inputs))
            if bias is not None:
                self.targets[f"{path}.bias"] = Target(bias[into], (shape.out_features,), (shard.outputs,))
        return weight, bias if holds_bias else None
