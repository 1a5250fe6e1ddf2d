"""The methods of backends whose weights stay in torch's layout."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lorikeet.kernels.extras import row_norms, scale_and_shift
from lorikeet.kernels.interface import GroupedProducts, GroupProduct, Layers, LayersShape, LayerWeights, Weight
from lorikeet.kernels.lora import LoraBatch, LoraDelta, LoraTargets
from lorikeet.kernels.quantized import QuantizedWeight


class TorchLayoutKernels(ABC):
    """A backend whose weights are not packed. ``kernels.interface.Kernels`` documents the methods."""

    @abstractmethod
    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, delta: LoraDelta | None = None) -> Tensor:
        """Multiply, then add the LoRA delta."""

    def pin_threads(self, cores: Sequence[int]) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def pack(self, weight: Tensor | QuantizedWeight, dtype: torch.dtype | None = None) -> Weight:
        """Return the weight itself."""
        return weight

    def repack(self, weight: Tensor, packed: Weight) -> None:
        """Copy the weight into ``packed``."""
        assert isinstance(packed, Tensor)
        packed.copy_(weight)

    def layers_in_one_call(self, weights: Sequence[LayerWeights], shape: LayersShape) -> Layers | None:
        """Return None, since layers run kernel by kernel or in a graph."""
        return None

    def products_in_one_call(self, products: Sequence[GroupProduct], layer: int) -> GroupedProducts | None:
        """Return None, since each group is one product."""
        return None

    def scale_and_shift(self, out: Tensor, lora: LoraBatch, layer: int, targets: LoraTargets) -> None:
        """Adjust the outputs segment by segment."""
        scale_and_shift(out, lora, layer, targets)

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        """Return logits in the weights' dtype."""
        return self.linear(x, weight, None)

    def row_norms(self, weight: Weight) -> Tensor:
        """Compute the norms of the plain or dequantised weight."""
        plain = weight.dequantized(torch.float32) if isinstance(weight, QuantizedWeight) else weight
        assert isinstance(plain, Tensor)
        return row_norms(plain)
