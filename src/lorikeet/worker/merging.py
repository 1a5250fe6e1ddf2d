"""One adapter merged into a rank's base weights (dLoRA, OSDI 2024, section 4.1), and the base weights as they were.

A merged weight is always computed from a pristine copy, ``W0 + Σ B·A``, rounded once, and a weight that is no longer
merged is written from that copy: subtracting what was added would leave rounding errors, which add up.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lorikeet.core.geometry import PRODUCTS, ModelGeometry
from lorikeet.core.ids import AdapterDigest
from lorikeet.kernels.base import Kernels, LoraTargets, LoraWeights, Weight
from lorikeet.models.weights import DecoderWeights, lora_targets
from lorikeet.presets import MergeBy


class _Linear(NamedTuple):
    """A linear weight: its layer, the modules whose weights lie one below the other in it, and its two copies."""

    layer: int
    targets: LoraTargets
    pristine: Tensor
    packed: Weight

    def is_touched_by(self, adapter: LoraWeights | None) -> bool:
        return adapter is not None and any((self.layer, module) in adapter.pieces for module in self.targets.modules)


class Merger:
    """Changes the weights that one rank computes with, in place: whoever holds them need not know.

    Every rank merges its own share: A is split by input and B by output as the weights are. Biases stay.

    Args:
        plain: the rank's weights as they were loaded. Not needed any more afterwards, but for what lies at ``place``.
        packed: the same in the kernels' layout, from ``pack_weights`` with ``keep_plain``; what the decoder reads.
        kernels: of ``packed``.
        geometry: of the rank's share.
        merge_by: which weights a change writes: those that one of the two adapters touches, or every linear one.
        place: where pristine copies lie. The CPU's memory for weights of a CUDA device is pinned.

    Attributes:
        merged: the adapter that is merged; None: the weights are pristine.
    """

    def __init__(
        self,
        plain: DecoderWeights,
        packed: DecoderWeights,
        kernels: Kernels,
        geometry: ModelGeometry,
        merge_by: MergeBy,
        place: torch.device,
    ) -> None:
        self.merged: AdapterDigest | None = None
        self._kernels = kernels
        self._device = plain.embedding.device
        self._writes_all = merge_by is MergeBy.MODEL
        targets = lora_targets(geometry)
        self._linears = [
            _linear(layer, targets[product], getattr(was, product), getattr(now, product), place)
            for layer, (was, now) in enumerate(zip(plain.layers, packed.layers, strict=True))
            for product in PRODUCTS
        ]
        if self._writes_all:
            self._linears.append(_linear(len(plain.layers), LoraTargets(), plain.lm_head, packed.lm_head, place))
        self._changed: frozenset[int] = frozenset()

    @torch.inference_mode()
    def switch(self, digest: AdapterDigest | None, adapter: LoraWeights | None) -> None:
        """Merge one adapter instead of another; returns when the weights can be used.

        Args:
            digest: the new one; None leaves the weights pristine.
            adapter: where its weights lie. They are not needed any more afterwards.
        """
        touched = frozenset(i for i, linear in enumerate(self._linears) if linear.is_touched_by(adapter))
        written = range(len(self._linears)) if self._writes_all else sorted(self._changed | touched)
        for i in written:
            linear = self._linears[i]
            pristine = linear.pristine.to(self._device, non_blocking=True)
            weight = _merged(pristine, linear, adapter) if adapter is not None and i in touched else pristine
            self._kernels.repack(weight, linear.packed)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.merged, self._changed = digest, touched


def linear_bytes(weights: DecoderWeights) -> int:
    """Return the bytes of a rank's linear weights, the output layer included."""
    in_layers = (getattr(layer, product) for layer in weights.layers for product in PRODUCTS)
    return sum(int(weight.nbytes) for weight in (*in_layers, weights.lm_head))


def _linear(layer: int, targets: LoraTargets, plain: Weight, packed: Weight, place: torch.device) -> _Linear:
    assert isinstance(plain, Tensor)
    pristine = plain.to(place, copy=plain is packed)
    if place.type == "cpu" and plain.device.type == "cuda":
        pristine = pristine.pin_memory()
    return _Linear(layer, targets, pristine, packed)


def _merged(pristine: Tensor, linear: _Linear, adapter: LoraWeights) -> Tensor:
    """Return what a weight is with an adapter in it, ``[out, in]``. Sums are of fp32, the result is rounded once."""
    wide = pristine.to(torch.float32, copy=True)
    for module, column, outputs in linear.targets.each:
        if pieces := adapter.pieces.get((linear.layer, module)):
            a, bt = (torch.cat(rows).float() for rows in zip(*pieces, strict=True))
            wide[column : column + outputs].addmm_(bt.T, a)
    return wide.to(pristine.dtype)
