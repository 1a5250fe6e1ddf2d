"""The decoder: a Llama-like transformer over paged KV, composed of kernels.

This file has only the model. Adapters replace the operations of ``models.layer_ops``.
"""

from dataclasses import replace
from itertools import count

import torch
from torch import Tensor

from lorikeet.kernels.activation import Activation
from lorikeet.kernels.interface import (
    Assist,
    Batch,
    Kernels,
    Layers,
    LayersShape,
    RecurrenceShape,
    RecurrenceStates,
    RotaryPairs,
    Rotation,
    fits_one_call,
    kv_view,
)
from lorikeet.kernels.lora import LoraBatch, LoraTargets, LoraWeights
from lorikeet.kernels.reference import attend_plainly
from lorikeet.models.adapted_ops import adapted_ops
from lorikeet.models.adapter_preparation import AdapterPreparation, product_shares
from lorikeet.models.architectures import LLAMA_NORMS
from lorikeet.models.config import ModelConfig
from lorikeet.models.layer_ops import DecoderLayer, LayerOps, Norm, decoder_layer
from lorikeet.models.parallel import NoReduceGroup, RankGroup
from lorikeet.models.recurrence_layers import RecurrenceArena, RecurrenceMixer, split_gates
from lorikeet.models.rotary import Rotary
from lorikeet.models.weights import DecoderWeights, lora_targets, recurrence_targets


class Decoder:
    """A decoder-only transformer, or one rank's share of it.

    Args:
        config: configuration of the whole model, or of the rank's pipeline stage.
        weights: weights of this rank, of one dtype and on one device.
        kernels: kernel backend.
        group: the ranks of the model, for all-reduce and for other stages.
        kv_bits: bits of an element of keys and values, see ``ModelGeometry``.

    Attributes:
        fits_graphs: whether the decoder's steps can be captured in CUDA graphs, if the kernels can.
    """

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, kernels: Kernels, group: RankGroup, kv_bits: int = 0
    ) -> None:
        geometry = config.geometry(dtype_bytes=weights.embedding.element_size(), tensor_parallel=group.size)
        targets = lora_targets(geometry)
        of_recurrence = recurrence_targets(geometry)
        self.fits_graphs = config.recurrence is None  # The graphs' inputs have no blocks of states.
        self._states = geometry.states
        self._config = config
        self._kv_bits = kv_bits
        self._weights = weights
        self._kernels = kernels
        self._group = group
        # Layers without rotation have number -1, which is the last embedding. It rotates nothing.
        still: tuple[None, ...] = (None,) if -1 in config.rotations else ()
        ropes = (*config.ropes, *still)
        self._rotary = Rotary(ropes, config.rotary_dim, config.head_dim, weights.embedding.device, config.rope_axes)
        # The factor is rounded like in transformers.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=weights.embedding.dtype).item()
        # The residual stream is stored divided by the residual multiplier. Then the outputs that are added need no
        # factor, and norms give the same result with a smaller epsilon.
        self._embedding_factor = config.embedding_multiplier / config.residual_multiplier
        scale = config.attention_multiplier
        self._shape = LayersShape(
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps / config.residual_multiplier**2,
            scale=config.head_dim**-0.5 if scale is None else scale,
            windows=config.windows[: len(weights.layers)],
            targets=tuple(targets.values()),
            rotations=tuple(number % len(ropes) for number in config.rotations[: len(weights.layers)]),
            pairs=RotaryPairs(config.rotary_dim, config.rotates_neighbours),
            norm_offset=config.norm_offset,
            has_whole_norms=config.qk_norm == "whole",
            softcap=config.attention_softcap,
            activation=config.activation,
            has_gated_attention=config.has_gated_attention,
            recurrence=_recurrence_shape(config, group.size, tuple(of_recurrence.values())),
        )
        places = {True: count(), False: count()}
        self._layers = tuple(
            decoder_layer(
                index,
                next(places[layer.recurrence is None]),
                layer,
                self._shape,
                targets if layer.recurrence is None else of_recurrence,
                config.norms,
            )
            for index, layer in enumerate(weights.layers)
        )
        self._kv_layers = next(places[True])
        self._mixer = None
        if config.recurrence is not None and self._shape.recurrence is not None:
            self._mixer = RecurrenceMixer(kernels, self._shape.recurrence, config.recurrence, group.rank, group.size)
        self._block_size = 0
        self._views: tuple[tuple[int, torch.Size], Tensor, RecurrenceArena] | None = None
        self._final_norm = Norm(weights.final_norm, "norm.weight", 0)
        self._ops = LayerOps(kernels, self._shape)
        gates = {Activation.SILU: kernels.silu_mul, Activation.GELU_TANH: kernels.gelu_mul}
        self._gate = gates[config.activation]
        self._in_one_call = kernels.layers_in_one_call(weights.layers, self._shape) if group.size == 1 else None
        shares = product_shares(config, targets | of_recurrence, group)
        self._preparation = AdapterPreparation(self._layers, weights, kernels, shares)

    def cut(self, layers: int) -> "Decoder":
        """Return a decoder of only the first ``layers`` layers, with the same tensors, to measure the time of a layer.

        This decoder launches single kernels without all-reduce, so it needs no other ranks.
        """
        weights = replace(self._weights, layers=self._weights.layers[:layers])
        cut = Decoder(self._config, weights, self._kernels, NoReduceGroup(self._group), self._kv_bits)
        cut._in_one_call = None
        return cut

    def view_kv(self, arena: Tensor, block_size: int) -> Tensor:
        """Return a view of ``arena [blocks, elements]`` in the shape that :meth:`hidden` takes as ``kv``.

        If layers have a state, it is the arena itself.
        """
        self._block_size = block_size
        return arena if self._states else self._view(arena)

    def _view(self, arena: Tensor) -> Tensor:
        kv_heads = self._shape.kv_heads // self._group.size or 1
        return kv_view(arena, self._kv_layers, self._block_size, kv_heads, self._shape.head_dim, bits=self._kv_bits)

    def _state_views(self, arena: Tensor, batch: Batch) -> tuple[Tensor, RecurrenceStates]:
        """Return the keys and values in the arena, and the states of a batch."""
        key = arena.data_ptr(), arena.shape
        if self._views is None or self._views[0] != key:
            self._views = key, self._view(arena), RecurrenceArena(self._states, arena)
        _, kv, states = self._views
        return kv, states.of(batch)

    def prepare(self, adapter: LoraWeights) -> None:
        """Compute the extras of a newly loaded adapter that depend on the base, and write them to its blocks."""
        self._preparation.prepare(adapter)

    def forward(self, batch: Batch, kv: Tensor) -> Tensor:
        """Compute a step, and return the logits ``[S, vocab]`` of its sample rows. See :meth:`hidden`."""
        return self.head(self.hidden(batch, kv), batch.head_lora)

    @torch.inference_mode()
    def head(self, hidden: Tensor, lora: LoraBatch | None = None) -> Tensor:
        """Return the logits ``[S, vocab]`` of rows of :meth:`hidden`, in the dtype of ``Kernels.logits``.

        Args:
            hidden: ``[S, hidden]``.
            lora: the rows' adapters, if any of them has a trained output layer.
        """
        config = self._config
        logits = self._kernels.logits(hidden, self._weights.lm_head)
        logits = self._ops_for(lora).adjust_logits(logits, hidden, is_tied=config.tie_word_embeddings)
        if config.logits_scaling != 1:
            logits = logits / config.logits_scaling
        if cap := config.logits_softcap:
            logits = torch.tanh(logits / cap) * cap
        return logits

    @torch.inference_mode()
    def hidden(self, batch: Batch, kv: Tensor) -> Tensor:
        """Compute the layers of one step, and store keys and values.

        After the attention of the last layer, only the sample rows are computed.

        Args:
            batch: tokens, positions and block tables of the step.
            kv: ``[layers, blocks, 2, block_size, kv_heads, head_dim]`` (see ``kernels.interface.kv_view``), or the
                arena (see :meth:`view_kv`), changed in place.

        Returns:
            Input of the output layer, ``[S, hidden]``, for ``batch.sample_rows``. Other pipeline stages than the last
            send the residual stream to the next stage and return ``[0, hidden]``.
        """
        rows = len(batch.token_ids)
        x = self._embedded(batch) if self._config.is_first else self._received(batch)
        if not self._config.is_last:  # The next stage needs every row.
            batch = replace(batch, sample_rows=torch.arange(rows, device=x.device))
        cos, sin = self._rotary(batch.positions if batch.axes is None else batch.axes[-3:], x.dtype)
        states = None
        if self._states:
            kv, states = self._state_views(kv, batch)
        compute: Layers = self._by_kernels
        if self._in_one_call is not None and self._fits_one_call(batch):
            compute = self._in_one_call
        x, delta = compute(x, cos, sin, kv, batch, states)
        if not self._config.is_last:
            self._group.send(x + delta)
            return x[:0]
        return self._ops_for(batch.sample_lora).norm(x, delta, self._final_norm)

    def _ops_for(self, lora: LoraBatch | None, assist: Assist | None = None) -> LayerOps:
        if lora is None and assist is None:
            return self._ops
        return adapted_ops(self._kernels, self._shape, lora, assist)

    def _fits_one_call(self, batch: Batch) -> bool:
        """Return whether one call can compute all layers with the batch's adapters.

        The call supports only trained norms of Llama's kinds, and no rows that see later tokens.
        """
        if batch.seen is not None:
            return False
        lora = batch.lora
        if lora is not None and lora.has_extras and self._config.norms != LLAMA_NORMS and lora.segments_with("vector"):
            return False
        return fits_one_call(batch)

    def _received(self, batch: Batch) -> Tensor:
        """Return the residual stream of the previous pipeline stage, ``[T, hidden]``."""
        shape = (len(batch.token_ids), self._config.hidden_size)
        return self._group.receive(
            torch.empty(shape, dtype=self._weights.embedding.dtype, device=batch.token_ids.device)
        )

    def _embedded(self, batch: Batch) -> Tensor:
        """Return the residual stream before the first layer, ``[T, hidden]``."""
        x = self._ops_for(batch.lora).embed(self._weights.embedding, batch.token_ids)
        if self._embedding_scale != 1:
            x *= self._embedding_scale
        if batch.embeds is not None:
            rows, embeds = batch.embeds
            x[rows] = embeds.to(x.dtype)
        return x if self._embedding_factor == 1 else x * self._embedding_factor

    def _by_kernels(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, batch: Batch, states: RecurrenceStates | None
    ) -> tuple[Tensor, Tensor]:
        """Compute all layers kernel by kernel, with the arguments of ``kernels.interface.Layers``.

        Returns:
            The residual stream and the output of the last MLP, which is not added to it yet; both ``[rows, hidden]``.
        """
        ops = self._ops_for(batch.lora, batch.assist)
        delta = None
        for layer in self._layers:
            normed = ops.norm(x, delta, layer.input_norm)
            if layer.recurrence is not None:
                assert states is not None
                assert self._mixer is not None
                mixed = self._mixer.mix(ops.linear(normed, layer.qkv), layer, states, batch.lora)
            else:
                number = self._shape.rotations[layer.number]
                rotation = Rotation(cos[number], sin[number], self._shape.pairs)
                mixed = self._attention(ops, layer, normed, rotation, batch, kv[layer.place])
            if layer is self._layers[-1] and len(batch.sample_rows) < len(x):
                x = x[batch.sample_rows]
                mixed = mixed[batch.sample_rows]
                ops = self._ops_for(batch.sample_lora, batch.assist)
            # LoRA's A is split by input features like the weight, so each rank adds its part before the all-reduce.
            delta = self._group.all_reduce(ops.linear(mixed, layer.o))
            delta = ops.norm(delta, None, layer.attention_norm)
            normed = ops.norm(x, delta, layer.post_norm)
            delta = self._group.all_reduce(self._mlp(ops, layer, normed))
            delta = ops.norm(delta, None, layer.mlp_norm)
        assert delta is not None, "a decoder has layers"
        return x, delta

    def _attention(
        self, ops: LayerOps, layer: DecoderLayer, x: Tensor, rotation: Rotation, batch: Batch, kv: Tensor
    ) -> Tensor:
        qkv = ops.linear(x, layer.qkv)
        gates = None
        if self._shape.has_gated_attention:
            qkv, gates = split_gates(qkv, self._shape.heads // self._group.size, self._shape.head_dim)
        ops.rotary_store(qkv, layer, rotation, kv, batch)
        window = self._shape.windows[layer.number]
        if batch.seen is not None:
            queries = qkv.view(len(qkv), -1, self._shape.head_dim)[:, : self._shape.heads // self._group.size]
            keys, values = kv.unbind(1)
            scale = self._shape.scale
            found = attend_plainly(queries, keys, values, batch, scale, window, self._shape.softcap or None, None)
            mixed = found.flatten(1)
        else:
            mixed = self._kernels.attention(qkv, kv, batch, self._shape.scale, window, self._shape.softcap)
        return mixed if gates is None else self._kernels.sigmoid_mul(mixed, gates)

    def _mlp(self, ops: LayerOps, layer: DecoderLayer, x: Tensor) -> Tensor:
        gate_up = ops.linear(x, layer.gate_up)
        return ops.linear(self._gate(gate_up), layer.down)


def _recurrence_shape(config: ModelConfig, ranks: int, targets: tuple[LoraTargets, ...]) -> RecurrenceShape | None:
    if config.recurrence is None:
        return None
    share = config.recurrence.share(ranks)
    return RecurrenceShape(
        is_delta=share.is_delta,
        key_heads=share.key_heads,
        value_heads=share.value_heads,
        key_dim=share.key_dim,
        value_dim=share.value_dim,
        norm_group=share.norm_group,
        eps=config.rms_norm_eps,
        limits=share.step_limits,
        targets=targets,
    )
