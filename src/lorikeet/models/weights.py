"""The weights of a decoder on one tensor-parallel rank."""

from dataclasses import dataclass, replace

from torch import Tensor

from lorikeet.core.geometry import PRODUCTS, ModelGeometry
from lorikeet.kernels.base import Kernels, LayerWeights, LoraTarget, LoraTargets, Weight


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of one rank.

    Attributes:
        embedding: ``[vocab, hidden]``, whole on every rank.
        layers: the decoder layers.
        final_norm: ``[hidden]``.
        lm_head: ``[vocab, hidden]``, whole on every rank; the same tensor as ``embedding`` if they are tied.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Weight


def lora_targets(geometry: ModelGeometry) -> dict[str, LoraTargets]:
    """Return the output columns of the modules of each of ``PRODUCTS``, on a rank of this geometry."""
    found = {}
    for product, modules in PRODUCTS.items():
        targets: list[LoraTarget] = []
        for module in modules:
            column = sum(target.outputs for target in targets)
            targets.append(LoraTarget(module, column, geometry.modules[module].out_features))
        found[product] = LoraTargets(*targets)
    return found


def pack_weights(weights: DecoderWeights, kernels: Kernels, *, keep_plain: bool = False) -> DecoderWeights:
    """Return ``weights`` in the layout of the kernels.

    Unless ``keep_plain``, each plain tensor is freed as soon as it is packed, so that never all weights exist twice. A
    backend that needs no packing returns the same tensors.
    """
    layers = tuple(
        replace(
            layer,
            qkv=_pack(layer.qkv, kernels, keep=keep_plain),
            o=_pack(layer.o, kernels, keep=keep_plain),
            gate_up=_pack(layer.gate_up, kernels, keep=keep_plain),
            down=_pack(layer.down, kernels, keep=keep_plain),
        )
        for layer in weights.layers
    )
    # A tied embedding is kept plain as well, since its rows are looked up.
    tied = weights.lm_head is weights.embedding
    lm_head = _pack(weights.lm_head, kernels, keep=keep_plain or tied)
    return replace(weights, layers=layers, lm_head=lm_head)


def _pack(weight: Weight, kernels: Kernels, *, keep: bool) -> Weight:
    assert isinstance(weight, Tensor)
    packed = kernels.pack(weight)
    if packed is not weight and not keep:
        weight.untyped_storage().resize_(0)
    return packed
