"""The operations of a decoder's layers, for steps without adapters.

The decoder calls only these operations. In a step with adapters, those of ``models.adapted_ops`` replace them.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from lorikeet.core.geometry import RECURRENCE_OUT
from lorikeet.kernels.interface import (
    Batch,
    HeadNorms,
    Kernels,
    LayersShape,
    LayerWeights,
    RecurrenceWeights,
    Rotation,
    Weight,
)
from lorikeet.kernels.lora import LoraTargets
from lorikeet.models.weights import RECURRENCE_IN


class Product(NamedTuple):
    """A linear product of a layer.

    Attributes:
        weight: ``[out, in]``.
        bias: ``[out]``, None if there is none.
        layer: index of the layer.
        targets: columns of the product's modules; None if no adapter can change the product.
        name: a key of ``core.geometry.PRODUCTS``, or of ``weights.recurrence_targets``; "" in a model of transformers,
            which has other products.
    """

    weight: Weight
    bias: Tensor | None
    layer: int
    targets: LoraTargets | None
    name: str = ""


class Norm(NamedTuple):
    """A norm of the residual stream, or of an output that is added to it.

    Attributes:
        weight: ``[hidden]``; None if the layer has no such norm.
        path: name of the weight, with ``{}`` in place of the layer's index.
        layer: index of the layer.
    """

    weight: Tensor | None
    path: str
    layer: int


class DecoderLayer(NamedTuple):
    """A layer in the form that the decoder computes. ``LayerWeights`` documents the other fields.

    Attributes:
        number: index of the layer.
        place: number of the layer among those with attention, or among those with a recurrence.
    """

    number: int
    place: int
    recurrence: RecurrenceWeights | None
    input_norm: Norm
    qkv: Product
    head_norms: HeadNorms | None
    o: Product
    attention_norm: Norm
    post_norm: Norm
    gate_up: Product
    down: Product
    mlp_norm: Norm


def decoder_layer(
    index: int,
    place: int,
    weights: LayerWeights,
    shape: LayersShape,
    targets: Mapping[str, LoraTargets],
    norms: tuple[str, str, str, str],
) -> DecoderLayer:
    """Return a layer with the names that adapters use for its products and norms.

    Args:
        index: index of the layer.
        place: see ``DecoderLayer``.
        weights: the layer's weights.
        shape: parameters of all layers.
        targets: columns of each product's modules, for layers of this kind.
        norms: names of the layer's norms, in the order of ``LLAMA_NORMS``.
    """
    before, after, before_mlp, after_mlp = (f"layers.{{}}.{name}.weight" for name in norms)
    head_norms = None
    if weights.q_norm is not None and weights.k_norm is not None:
        head_norms = HeadNorms(weights.q_norm, weights.k_norm, shape.eps, shape.norm_offset, shape.has_whole_norms)
    mixed, out = (RECURRENCE_IN, RECURRENCE_OUT) if weights.recurrence is not None else ("qkv", "o")
    return DecoderLayer(
        number=index,
        place=place,
        recurrence=weights.recurrence,
        input_norm=Norm(weights.input_norm, before, index),
        qkv=Product(weights.qkv, weights.qkv_bias, index, targets[mixed], mixed),
        head_norms=head_norms,
        o=Product(weights.o, weights.o_bias, index, targets[out], out),
        attention_norm=Norm(weights.attention_norm, after, index),
        post_norm=Norm(weights.post_norm, before_mlp, index),
        gate_up=Product(weights.gate_up, weights.gate_up_bias, index, targets["gate_up"], "gate_up"),
        down=Product(weights.down, weights.down_bias, index, targets["down"], "down"),
        mlp_norm=Norm(weights.mlp_norm, after_mlp, index),
    )


class LayerOps:
    """The operations of a step whose rows have no adapters.

    Args:
        kernels: the kernel backend.
        shape: parameters of the layers.
    """

    def __init__(self, kernels: Kernels, shape: LayersShape) -> None:
        self._kernels = kernels
        self._eps = shape.eps
        self._norm_offset = shape.norm_offset

    def embed(self, embedding: Tensor, token_ids: Tensor) -> Tensor:
        """Return the rows of ``embedding [vocab, hidden]`` for ``token_ids [T]``."""
        return embedding[token_ids]

    def linear(self, x: Tensor, product: Product) -> Tensor:
        """Return ``x [T, in]`` times the weight, plus the bias: ``[T, out]``."""
        return self._kernels.linear(x, product.weight, product.bias)

    def norm(self, x: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        """Add ``delta`` to ``x`` in place, if given, and return the norm of the sum.

        If the layer has no such norm, the result is ``x`` itself.
        """
        if norm.weight is not None:
            return self._kernels.add_norm(x, delta, norm.weight, self._eps, self._norm_offset)
        if delta is not None:
            x += delta
        return x

    def rotary_store(self, qkv: Tensor, layer: DecoderLayer, rotation: Rotation, kv: Tensor, batch: Batch) -> None:
        """Normalise and rotate queries and keys, and store keys and values, like ``Kernels.rotary_store``."""
        self._kernels.rotary_store(qkv, rotation, kv, batch, layer.head_norms)

    def adjust_logits(self, logits: Tensor, hidden: Tensor, *, is_tied: bool) -> Tensor:
        """Return the base's logits ``[S, vocab]`` unchanged.

        Args:
            logits: the base's logits.
            hidden: ``[S, hidden]``, the input of the output layer.
            is_tied: whether the base's output layer is its embedding.
        """
        return logits
