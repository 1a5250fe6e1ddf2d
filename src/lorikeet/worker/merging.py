"""Merges one adapter into a rank's base weights, and restores them (dLoRA, OSDI 2024, section 4.1).

A merged weight is always computed from a pristine copy, ``W0 + Σ B·A``, rounded once, and unmerging writes the pristine
copy back. Subtracting the delta instead would leave rounding errors, which accumulate.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lorikeet.core.geometry import PRODUCTS, ModelGeometry
from lorikeet.core.ids import AdapterDigest
from lorikeet.kernels.interface import Kernels, Weight
from lorikeet.kernels.lora import LoraTargets, LoraWeights
from lorikeet.models.weights import DecoderWeights, lora_targets, recurrence_targets
from lorikeet.presets import MergeBy


class _Linear(NamedTuple):
    """A fused linear weight: its layer, its stacked modules, and its pristine and packed copies."""

    layer: int
    targets: LoraTargets
    pristine: Tensor
    packed: Weight

    def is_changed_by(self, adapter: LoraWeights | None) -> bool:
        return adapter is not None and any((self.layer, module) in adapter.pieces for module in self.targets.modules)


class Merger:
    """Merges adapters into the weights that one rank's decoder reads, in place.

    Every rank merges its own share. A is split by input and B by output like the weights. Biases are not changed.

    Args:
        plain: the rank's weights as loaded. They can be freed afterwards, except tensors that are on ``place`` already.
        packed: the same weights in the kernels' layout, from ``pack_weights`` with ``keep_plain``. The decoder reads
            the packed weights.
        kernels: the kernel backend of ``packed``.
        geometry: sizes of the rank's share.
        merge_by: whether a switch writes all linear weights, or only those that the old or the new adapter changes.
        place: device of the pristine copies. Copies in host memory for a CUDA device are pinned.

    Attributes:
        merged: the merged adapter; None if the weights are pristine.
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
        of_attention = tuple(lora_targets(geometry).values())
        of_recurrence = tuple(recurrence_targets(geometry).values())
        self._linears = [
            _linear(layer, targets, getattr(plain_layer, product), getattr(packed_layer, product), place)
            for layer, (plain_layer, packed_layer) in enumerate(zip(plain.layers, packed.layers, strict=True))
            for product, targets in zip(
                PRODUCTS, of_attention if plain_layer.recurrence is None else of_recurrence, strict=True
            )
        ]
        if self._writes_all and plain.holds_head:
            self._linears.append(_linear(len(plain.layers), LoraTargets(), plain.lm_head, packed.lm_head, place))
        self._changed: frozenset[int] = frozenset()

    @torch.inference_mode()
    def switch(self, digest: AdapterDigest | None, adapter: LoraWeights | None) -> None:
        """Unmerge the merged adapter and merge another.

        Returns when the weights can be used.

        Args:
            digest: digest of the new adapter. None restores the pristine weights.
            adapter: the new adapter's weights, which are read only during the call. None to unmerge.
        """
        changed = frozenset(i for i, linear in enumerate(self._linears) if linear.is_changed_by(adapter))
        written = range(len(self._linears)) if self._writes_all else sorted(self._changed | changed)
        for i in written:
            linear = self._linears[i]
            pristine = linear.pristine.to(self._device, non_blocking=True)
            weight = _merged(pristine, linear, adapter) if adapter is not None and i in changed else pristine
            self._kernels.repack(weight, linear.packed)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.merged = digest
        self._changed = changed


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
    """Return a weight with an adapter merged, ``[out, in]``. The sum is computed in fp32 and rounded once."""
    wide = pristine.to(torch.float32, copy=True)
    for module, column, outputs in linear.targets.each:
        if pieces := adapter.pieces.get((linear.layer, module)):
            a, bt = (torch.cat(rows).float() for rows in zip(*pieces, strict=True))
            wide[column : column + outputs].addmm_(bt.T, a)
    return wide.to(pristine.dtype)
