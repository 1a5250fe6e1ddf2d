"""The operations of a decoder's layers, for steps with adapters."""

from dataclasses import replace

from torch import Tensor

from lorikeet.kernels.extras import adjust_logits, embed, replace_products, scaled_inputs
from lorikeet.kernels.interface import Assist, Batch, HeadNorms, Kernels, LayersShape, Rotation
from lorikeet.kernels.lora import LoraBatch, LoraDelta
from lorikeet.models.layer_ops import DecoderLayer, LayerOps, Norm, Product


def adapted_linear(kernels: Kernels, x: Tensor, product: Product, lora: LoraBatch | None) -> Tensor:
    """Return ``x [T, in]`` times a product's weight, plus the LoRA deltas and extras of the rows' adapters."""
    targets = product.targets
    if lora is None or targets is None:
        return kernels.linear(x, product.weight, product.bias)
    if lora.has_extras:
        x = scaled_inputs(x, lora, product.layer, targets)
    delta = LoraDelta(lora, product.layer, targets) if lora.changes(targets) else None
    out = kernels.linear(x, product.weight, product.bias, delta)
    if lora.has_extras:
        replace_products(out, x, product.bias, lora, product.layer, targets)
        kernels.scale_and_shift(out, lora, product.layer, targets)
    return out


class LoraOps(LayerOps):
    """The operations of a step in which some rows have LoRA adapters.

    Args:
        kernels: the kernel backend.
        shape: parameters of the layers.
        lora: the rows' adapters; None if no row has an adapter.
        assist: host LoRA; None if all adapters are loaded.
    """

    def __init__(self, kernels: Kernels, shape: LayersShape, lora: LoraBatch | None, assist: Assist | None) -> None:
        super().__init__(kernels, shape)
        self._lora = lora
        self._assist = assist

    def linear(self, x: Tensor, product: Product) -> Tensor:
        """Return ``x`` times the weight, plus the changes of adapters on the device and on the host."""
        if self._assist is None:
            return adapted_linear(self._kernels, x, product, self._lora)
        on_device = self._assist.begin(product.name, product.layer, x, self._lora)
        out = adapted_linear(self._kernels, x, product, on_device)
        self._assist.finish(out)
        return out


class ExtrasOps(LoraOps):
    """The operations of a step in which some adapters have more than A and B.

    Args:
        kernels: the kernel backend.
        shape: parameters of the layers.
        lora: the rows' adapters.
        assist: host LoRA; None if all adapters are loaded.
    """

    def __init__(self, kernels: Kernels, shape: LayersShape, lora: LoraBatch, assist: Assist | None) -> None:
        super().__init__(kernels, shape, lora, assist)
        self._adapters = lora

    def embed(self, embedding: Tensor, token_ids: Tensor) -> Tensor:
        """Return the embeddings of tokens. Adapters with trained embeddings replace the embeddings of their rows."""
        x = embedding[token_ids.clamp(max=len(embedding) - 1)]
        embed(x, token_ids, self._adapters)
        return x

    def norm(self, x: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        """Add ``delta`` to ``x`` in place and return the norm.

        Rows of an adapter with a trained norm use its weight.
        """
        out = super().norm(x, delta, norm)
        if norm.weight is None:
            return out
        for segment in self._adapters.segments_with("vector"):
            own = segment.extras.vector("vector", norm.layer, norm.path)
            if own is not None:
                rows = slice(segment.start, segment.stop)
                out[rows] = self._kernels.add_norm(x[rows], None, own, self._eps, self._norm_offset)
        return out

    def rotary_store(self, qkv: Tensor, layer: DecoderLayer, rotation: Rotation, kv: Tensor, batch: Batch) -> None:
        """Rotate and store keys and values.

        Rows of an adapter with trained head norms are computed in a separate call.
        """
        for rows, norms in self._head_norms(layer, len(qkv)):
            part = replace(batch, slot_blocks=batch.slot_blocks[rows], slot_offsets=batch.slot_offsets[rows])
            angles = rotation._replace(cos=rotation.cos[rows], sin=rotation.sin[rows])
            self._kernels.rotary_store(qkv[rows], angles, kv, part, norms)

    def _head_norms(self, layer: DecoderLayer, rows: int) -> list[tuple[slice, HeadNorms | None]]:
        """Return the head norms of all rows, one for each run of rows."""
        norms = layer.head_norms
        if norms is None:
            return [(slice(0, rows), None)]
        runs: list[tuple[slice, HeadNorms | None]] = []
        done = 0
        for segment in self._adapters.segments_with("vector"):
            q, k = (
                segment.extras.vector("vector", layer.number, f"layers.{{}}.self_attn.{side}_norm.weight")
                for side in "qk"
            )
            if q is not None or k is not None:
                own = norms._replace(q=norms.q if q is None else q, k=norms.k if k is None else k)
                runs.append((slice(done, segment.start), norms))
                runs.append((slice(segment.start, segment.stop), own))
                done = segment.stop
        runs.append((slice(done, rows), norms))
        return [(run, chosen) for run, chosen in runs if run.start < run.stop]

    def adjust_logits(self, logits: Tensor, hidden: Tensor, *, is_tied: bool) -> Tensor:
        """Return the logits, changed in place for rows of adapters with a trained output layer."""
        return adjust_logits(logits, hidden, self._adapters, is_tied=is_tied)


def adapted_ops(kernels: Kernels, shape: LayersShape, lora: LoraBatch | None, assist: Assist | None) -> LoraOps:
    """Return the operations for the adapters of a step."""
    if lora is not None and lora.has_extras:
        return ExtrasOps(kernels, shape, lora, assist)
    return LoraOps(kernels, shape, lora, assist)
