"""The weights of a decoder on one rank."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lorikeet.core.geometry import PRODUCTS, RECURRENCE_INPUTS, RECURRENCE_OUT, ModelGeometry
from lorikeet.kernels.interface import Kernels, LayerWeights, Weight
from lorikeet.kernels.lora import LoraTarget, LoraTargets
from lorikeet.kernels.quantized import QuantizedWeight


@dataclass(frozen=True)
class DecoderWeights:
    """All decoder weights of one rank.

    Attributes:
        embedding: ``[vocab, hidden]``, whole on every rank of the first pipeline stage, and of the last stage if it is
            tied. ``[0, hidden]`` on other stages.
        layers: the decoder layers of the stage.
        final_norm: ``[hidden]`` on the last stage, ``[0]`` on others.
        lm_head: ``[vocab, hidden]``, whole on every rank of the last stage. It is the same tensor as ``embedding`` if
            both are tied and not quantised. ``[0, hidden]`` on other stages.
        stored: description of the form of the linear weights.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Weight
    stored: str = ""

    @property
    def holds_head(self) -> bool:
        """Whether the output layer is on this rank."""
        return self.lm_head.shape[0] > 0

    @property
    def are_quantized(self) -> bool:
        """Whether any linear weight is quantised; valid before they are packed."""
        linear = [getattr(layer, product) for layer in self.layers for product in PRODUCTS]
        return any(isinstance(weight, QuantizedWeight) for weight in (*linear, self.lm_head))


def lora_targets(geometry: ModelGeometry) -> dict[str, LoraTargets]:
    """Return the output columns of each product's modules, on a rank of this geometry."""
    return _targets(geometry, PRODUCTS)


def recurrence_targets(geometry: ModelGeometry) -> dict[str, LoraTargets]:
    """Return the same for layers with a recurrence; empty without such layers."""
    inputs = tuple(module for module in RECURRENCE_INPUTS if module in geometry.modules)
    if not inputs:
        return {}
    others = {name: PRODUCTS[name] for name in ("gate_up", "down")}
    return _targets(geometry, {RECURRENCE_IN: inputs, RECURRENCE_OUT: (RECURRENCE_OUT,), **others})


RECURRENCE_IN = "recurrence_in"
"""The name of the product of all projections of the input of a layer with a recurrence."""


def _targets(geometry: ModelGeometry, products: Mapping[str, tuple[str, ...]]) -> dict[str, LoraTargets]:
    found = {}
    for product, modules in products.items():
        targets: list[LoraTarget] = []
        for module in modules:
            column = sum(target.outputs for target in targets)
            targets.append(LoraTarget(module, column, geometry.modules[module].out_features))
        found[product] = LoraTargets(*targets, modules=tuple(geometry.modules), slots=geometry.module_slots)
    return found


def pack_weights(weights: DecoderWeights, kernels: Kernels, *, keep_plain: bool = False) -> DecoderWeights:
    """Return ``weights`` in the layout of the kernels.

    Unless ``keep_plain``, each tensor is freed as soon as it is packed, so that the weights never exist twice as a
    whole. A backend that needs no packing returns the same tensors.
    """
    dtype = weights.embedding.dtype
    layers = tuple(
        replace(
            layer,
            qkv=_pack(layer.qkv, kernels, dtype, keep=keep_plain),
            o=_pack(layer.o, kernels, dtype, keep=keep_plain),
            gate_up=_pack(layer.gate_up, kernels, dtype, keep=keep_plain),
            down=_pack(layer.down, kernels, dtype, keep=keep_plain),
        )
        for layer in weights.layers
    )
    # A tied embedding is also kept unpacked, since its rows are looked up.
    tied = weights.lm_head is weights.embedding
    lm_head = weights.lm_head
    if weights.holds_head:
        lm_head = _pack(lm_head, kernels, dtype, keep=keep_plain or tied)
    return replace(weights, layers=layers, lm_head=lm_head)


def _pack(weight: Weight, kernels: Kernels, dtype: torch.dtype, *, keep: bool) -> Weight:
    assert isinstance(weight, Tensor | QuantizedWeight)
    packed = kernels.pack(weight, dtype)
    if packed is not weight and not keep:
        plain = weight.codes if isinstance(weight, QuantizedWeight) else weight
        plain.untyped_storage().resize_(0)
    return packed
