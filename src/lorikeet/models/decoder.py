"""The decoder: a Llama-shaped transformer over paged KV, composed of kernels."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lorikeet.kernels.activation import Activation
from lorikeet.kernels.extras import (
    ProductShare,
    adjust_logits,
    embed,
    prepare_product,
    prepare_vocabulary,
    replace_products,
    scaled_inputs,
)
from lorikeet.kernels.interface import (
    Assist,
    Batch,
    HeadNorms,
    Kernels,
    LayersShape,
    LayerWeights,
    RotaryPairs,
    Rotation,
    Weight,
    fits_one_call,
    kv_view,
)
from lorikeet.kernels.lora import LoraBatch, LoraDelta, LoraWeights
from lorikeet.models.architectures import LLAMA_NORMS
from lorikeet.models.config import ROW_PARALLEL, ModelConfig
from lorikeet.models.parallel import NoReduceGroup, RankGroup
from lorikeet.models.rotary import Rotary
from lorikeet.models.weights import DecoderWeights, lora_targets


class Decoder:
    """A decoder-only transformer, or one rank's share of it.

    Attributes:
        fits_graphs: whether its steps can be captured, if the kernels can.
    """

    fits_graphs = True

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, kernels: Kernels, group: RankGroup, kv_bits: int = 0
    ) -> None:
        """Create a decoder.

        Args:
            config: configuration of the whole model, or of the rank's pipeline stage.
            weights: weights of this rank, of one dtype and on one device.
            kernels: kernel backend.
            group: the ranks of the model, for all-reduce and the other stages.
            kv_bits: as of ``ModelGeometry``.
        """
        geometry = config.geometry(dtype_bytes=weights.embedding.element_size(), tensor_parallel=group.size)
        self._config = config
        self._kv_bits = kv_bits
        self._weights = weights
        self._kernels = kernels
        self._group = group
        self._targets = lora_targets(geometry)
        # Layers without rotation have number -1: the last embedding, which rotates nothing.
        still: tuple[None, ...] = (None,) if -1 in config.rotations else ()
        ropes = (*config.ropes, *still)
        self._rotary = Rotary(ropes, config.rotary_dim, config.head_dim, weights.embedding.device)
        # As transformers does, so that its rounding is the same.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=weights.embedding.dtype).item()
        # The residual stream is kept divided by the residual multiplier: what is added to it needs no factor then, and
        # norms give the same with a smaller epsilon.
        self._embedding_factor = config.embedding_multiplier / config.residual_multiplier
        scale = config.attention_multiplier
        self._shape = LayersShape(
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps / config.residual_multiplier**2,
            scale=config.head_dim**-0.5 if scale is None else scale,
            windows=config.windows[: len(weights.layers)],
            targets=tuple(self._targets.values()),
            rotations=tuple(number % len(ropes) for number in config.rotations[: len(weights.layers)]),
            pairs=RotaryPairs(config.rotary_dim, config.rotates_neighbours),
            norm_offset=config.norm_offset,
            has_whole_norms=config.qk_norm == "whole",
            softcap=config.attention_softcap,
            has_gelu=config.activation is not Activation.SILU,
        )
        self._in_one_call = kernels.layers_in_one_call(weights.layers, self._shape) if group.size == 1 else None
        self._norms: dict[tuple[int, str], Tensor] = {}
        self._shares: dict[str, ProductShare] = {}
        if group.size > 1:
            for product, targets in self._targets.items():
                modules = {target.module for target in targets.each}
                outputs = {name: config.module_shard(name, group.rank, group.size).outputs for name in modules}
                splits_inputs = modules <= ROW_PARALLEL
                self._shares[product] = ProductShare(
                    outputs, group.all_reduce if splits_inputs else None, not splits_inputs or group.rank == 0
                )

    def cut(self, layers: int) -> "Decoder":
        """Return a decoder of the first ``layers`` layers with the same tensors, to measure the time of a layer.

        It launches kernel by kernel, and without all-reduce, so it needs no other ranks.
        """
        weights = replace(self._weights, layers=self._weights.layers[:layers])
        cut = Decoder(self._config, weights, self._kernels, NoReduceGroup(self._group), self._kv_bits)
        cut._in_one_call = None
        return cut

    def view_kv(self, arena: Tensor, block_size: int) -> Tensor:
        """View ``arena [blocks, elements]`` as :meth:`hidden` takes it."""
        kv_heads, head_dim = self._shape.kv_heads, self._shape.head_dim
        kv_heads, layers = kv_heads // self._group.size or 1, len(self._weights.layers)
        return kv_view(arena, layers, block_size, kv_heads, head_dim, bits=self._kv_bits)

    def forward(self, batch: Batch, kv: Tensor) -> Tensor:
        """Compute one step; return the logits ``[S, vocab]`` of its sample rows. As :meth:`hidden` and :meth:`head`."""
        return self.head(self.hidden(batch, kv), batch.head_lora)

    @torch.inference_mode()
    def prepare(self, adapter: LoraWeights) -> None:
        """Compute what of an adapter depends on the base, into its blocks; once for each time it is loaded."""
        kernels, weights = self._kernels, self._weights
        for index, layer in enumerate(weights.layers):
            for product, targets in self._targets.items():
                weight: Weight = getattr(layer, product)
                prepare_product(
                    adapter,
                    index,
                    targets,
                    getattr(layer, f"{product}_bias"),
                    partial(self._product, weight),
                    partial(self._row_norms, index, product, weight),
                    self._shares.get(product),
                )
        head = weights.lm_head
        prepare_vocabulary(
            adapter, weights.embedding, lambda x: kernels.logits(x, head), lambda: kernels.row_norms(head)
        )

    def _row_norms(self, index: int, product: str, weight: Weight) -> Tensor:
        """Return the norms of the rows of a weight, computed once."""
        if (index, product) not in self._norms:
            self._norms[index, product] = self._kernels.row_norms(weight)
        return self._norms[index, product]

    def _product(self, weight: Weight, x: Tensor) -> Tensor:
        return self._kernels.linear(x, weight, None)

    @torch.inference_mode()
    def head(self, hidden: Tensor, lora: LoraBatch | None = None) -> Tensor:
        """Return the logits ``[S, vocab]`` of rows of :meth:`hidden`, in the dtype of ``Kernels.logits``.

        ``lora`` has the adapters of these rows, if any has an output layer of its own.
        """
        config = self._config
        logits = self._kernels.logits(hidden, self._weights.lm_head)
        if lora is not None:
            logits = adjust_logits(logits, hidden, lora, is_tied=config.tie_word_embeddings)
        if config.logits_scaling != 1:
            logits = logits / config.logits_scaling
        if cap := config.logits_softcap:
            logits = torch.tanh(logits / cap) * cap
        return logits

    @torch.inference_mode()
    def hidden(self, batch: Batch, kv: Tensor) -> Tensor:
        """Compute the layers of one step, and store its keys and values.

        After the attention of the last layer only the sample rows are needed, so only these are computed.

        Args:
            batch: tokens, positions and block tables of the step.
            kv: ``[layers, blocks, 2, block_size, kv_heads, head_dim]`` (see ``kernels.interface.kv_view``), changed in
                place.

        Returns:
            Input of the output layer, ``[S, hidden]``, for ``batch.sample_rows``. Of all pipeline stages but the last,
            which send the residual stream to the next instead, ``[0, hidden]``.
        """
        config, rows = self._config, len(batch.token_ids)
        if config.is_first:
            x = self._embedded(batch)
        else:
            dtype, device = self._weights.embedding.dtype, batch.token_ids.device
            x = self._group.receive(torch.empty(rows, config.hidden_size, dtype=dtype, device=device))
        if not config.is_last:  # the next stage needs every row
            batch = replace(batch, sample_rows=torch.arange(rows, device=x.device))
        cos, sin = self._rotary(batch.positions, x.dtype)
        in_one_call = self._in_one_call if fits_one_call(batch) else None
        adapted = batch.lora is not None and batch.lora.has_extras and batch.lora.adjusted("vector")
        if adapted and config.norms != LLAMA_NORMS:
            in_one_call = None  # it knows Llama's norms of adapters only
        x, delta = (in_one_call or self._by_kernels)(x, cos, sin, kv, batch)
        if not config.is_last:
            self._group.send(x + delta)
            return x[:0]
        return self._norm(x, delta, self._weights.final_norm, batch.sample_lora, 0, "norm")

    def _embedded(self, batch: Batch) -> Tensor:
        """Return the residual stream before the first layer, ``[T, hidden]``."""
        weights = self._weights
        adapted = batch.lora if batch.lora is not None and batch.lora.has_extras else None
        if adapted is None:
            x = weights.embedding[batch.token_ids]
        else:
            x = weights.embedding[batch.token_ids.clamp(max=len(weights.embedding) - 1)]
            embed(x, batch.token_ids, adapted)
        if self._embedding_scale != 1:
            x *= self._embedding_scale
        if batch.embeds is not None:
            rows, embeds = batch.embeds
            x[rows] = embeds.to(x.dtype)
        return x if self._embedding_factor == 1 else x * self._embedding_factor

    def _norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor | None, lora: LoraBatch | None, layer: int, path: str
    ) -> Tensor:
        """Add ``delta`` to ``x`` in place and return the norm, of some rows with the weight of their adapter.

        Without a weight it is ``x`` itself.
        """
        kernels, eps, offset = self._kernels, self._shape.eps, self._shape.norm_offset
        if weight is None:
            if delta is not None:
                x += delta
            return x
        out = kernels.add_norm(x, delta, weight, eps, offset)
        if lora is not None and lora.has_extras:
            for segment in lora.adjusted("vector"):
                own = segment.extras.vector("vector", layer, f"{path}.weight")
                if own is not None:
                    rows = slice(segment.start, segment.stop)
                    out[rows] = kernels.add_norm(x[rows], None, own, eps, offset)
        return out

    def _by_kernels(self, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute all layers kernel by kernel; arguments and result are those of ``kernels.interface.Layers``.

        Returns:
            The residual stream and the output of the last MLP, which is not added to it yet; both ``[rows, hidden]``.
        """
        weights, shape = self._weights, self._shape
        lora, delta = batch.lora, None
        before, after, before_mlp, after_mlp = (f"layers.{{}}.{name}" for name in self._config.norms)
        for index, (layer, layer_kv) in enumerate(zip(weights.layers, kv, strict=True)):
            normed = self._norm(x, delta, layer.input_norm, lora, index, before)
            number = shape.rotations[index]
            rotation = Rotation(cos[number], sin[number], shape.pairs)
            mixed = self._attention(index, layer, normed, rotation, batch, layer_kv)
            if layer is weights.layers[-1] and len(batch.sample_rows) < len(x):
                x, mixed, lora = x[batch.sample_rows], mixed[batch.sample_rows], batch.sample_lora
            # LoRA's A is split by input features like the weight, so each rank adds its part before the all-reduce.
            out = self._adapted(mixed, layer.o, layer.o_bias, lora, index, "o", batch.assist)
            delta = self._group.all_reduce(out)
            if layer.attention_norm is not None:
                delta = self._norm(delta, None, layer.attention_norm, lora, index, after)
            normed = self._norm(x, delta, layer.post_norm, lora, index, before_mlp)
            delta = self._mlp(index, layer, normed, lora, batch.assist)
            if layer.mlp_norm is not None:
                delta = self._norm(delta, None, layer.mlp_norm, lora, index, after_mlp)
        assert delta is not None, "a decoder has layers"
        return x, delta

    def _attention(
        self, index: int, layer: LayerWeights, x: Tensor, rotation: Rotation, batch: Batch, kv: Tensor
    ) -> Tensor:
        kernels, shape = self._kernels, self._shape
        qkv = self._adapted(x, layer.qkv, layer.qkv_bias, batch.lora, index, "qkv", batch.assist)
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = HeadNorms(layer.q_norm, layer.k_norm, shape.eps, shape.norm_offset, shape.has_whole_norms)
        if norms is not None and batch.lora is not None and batch.lora.has_extras:
            self._rotate_apart(index, qkv, rotation, kv, batch, norms)
        else:
            kernels.rotary_store(qkv, rotation, kv, batch, norms)
        return kernels.attention(qkv, kv, batch, shape.scale, shape.windows[index], shape.softcap)

    def _rotate_apart(
        self, index: int, qkv: Tensor, rotation: Rotation, kv: Tensor, batch: Batch, norms: HeadNorms
    ) -> None:
        """Rotate and store, the rows of each adapter that has head norms of its own for themselves."""
        assert batch.lora is not None
        cuts, done = [], 0
        for segment in batch.lora.adjusted("vector"):
            q, k = (segment.extras.vector("vector", index, f"layers.{{}}.self_attn.{x}_norm.weight") for x in "qk")
            if q is not None or k is not None:
                own = norms._replace(q=norms.q if q is None else q, k=norms.k if k is None else k)
                cuts += [(done, segment.start, norms), (segment.start, segment.stop, own)]
                done = segment.stop
        for start, stop, chosen in [*cuts, (done, len(qkv), norms)]:
            if start < stop:
                rows = slice(start, stop)
                part = replace(batch, slot_blocks=batch.slot_blocks[rows], slot_offsets=batch.slot_offsets[rows])
                own_rows = rotation._replace(cos=rotation.cos[rows], sin=rotation.sin[rows])
                self._kernels.rotary_store(qkv[rows], own_rows, kv, part, chosen)

    def _mlp(self, index: int, layer: LayerWeights, x: Tensor, lora: LoraBatch | None, assist: Assist | None) -> Tensor:
        kernels = self._kernels
        gate_up = self._adapted(x, layer.gate_up, layer.gate_up_bias, lora, index, "gate_up", assist)
        inner = kernels.gelu_mul(gate_up) if self._shape.has_gelu else kernels.silu_mul(gate_up)
        out = self._adapted(inner, layer.down, layer.down_bias, lora, index, "down", assist)
        return self._group.all_reduce(out)

    def _adapted(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        lora: LoraBatch | None,
        index: int,
        product: str,
        assist: Assist | None,
    ) -> Tensor:
        """Return ``x`` times the weight, plus the LoRA delta if an adapter of the batch has one of the modules."""
        if assist is not None:
            lora = assist.begin(product, index, x, lora)
        targets = self._targets[product]
        has_extras = lora is not None and lora.has_extras
        if lora is not None and has_extras:
            x = scaled_inputs(x, lora, index, targets)
        delta = LoraDelta(lora, index, targets) if lora is not None and lora.changes(targets) else None
        out = self._kernels.linear(x, weight, bias, delta)
        if lora is not None and has_extras:
            replace_products(out, x, bias, lora, index, targets)
            self._kernels.scale_and_shift(out, lora, index, targets)
        if assist is not None:
            assist.finish(out)
        return out
