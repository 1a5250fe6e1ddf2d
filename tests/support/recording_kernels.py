"""Kernels that write down what they are asked, to prove that two batches make the same calls."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lorikeet.kernels.interface import (
    Batch,
    GroupProduct,
    HeadNorms,
    Kernels,
    LayersShape,
    LayerWeights,
    Rotation,
    Weight,
)
from lorikeet.kernels.lora import LoraBatch, LoraDelta, LoraTargets
from lorikeet.kernels.quantized import QuantizedWeight
from lorikeet.kernels.sampling import SamplingTensors
from lorikeet.kernels.states import ANY_STEP, StateSequences

Call = tuple[object, ...]
"""Name of the kernel, then shapes of tensors and plain values, in the order of the arguments."""


class RecordingKernels:
    """Wraps any backend; computes with it and appends one entry to ``calls`` per kernel call."""

    fits_graphs = False
    """A replay makes no calls."""

    def __init__(self, inner: Kernels) -> None:
        self._inner = inner
        self.name = inner.name
        self.calls: list[Call] = []

    @property
    def threads(self) -> int:
        """The wrapped backend's."""
        return self._inner.threads

    @threads.setter
    def threads(self, threads: int) -> None:
        self._inner.threads = threads

    def pin_threads(self, cores: Sequence[int]) -> AbstractContextManager[None]:
        """Not recorded: what is computed is the same anywhere."""
        return self._inner.pin_threads(cores)

    def pack(self, weight: Tensor | QuantizedWeight, dtype: torch.dtype | None = None) -> Weight:
        """Not recorded: weights are packed once, before any batch."""
        return self._inner.pack(weight, dtype)

    def repack(self, weight: Tensor, packed: Weight) -> None:
        """Not recorded: weights change between batches."""
        self._inner.repack(weight, packed)

    def layers_in_one_call(self, weights: Sequence[LayerWeights], shape: LayersShape) -> None:
        """Kernel by kernel, or there would be nothing to record."""

    def products_in_one_call(self, products: Sequence[GroupProduct], layer: int) -> None:
        """Group by group, or there would be nothing to record."""

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, delta: LoraDelta | None = None) -> Tensor:
        """Record shapes, and that of the bias; with adapters their row ranges and form, layer and targets."""
        call: Call = ("linear", _shape(x), tuple(weight.shape), None if bias is None else _shape(bias))
        if delta is not None:
            rows = tuple((segment.start, segment.stop) for segment in delta.lora.segments)
            call = ("linear with lora", *call[1:], rows, delta.lora.form, delta.layer, *delta.targets.each)
        self.calls.append(call)
        return self._inner.linear(x, weight, bias, delta)

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        """Record the shapes."""
        self.calls.append(("logits", _shape(x), tuple(weight.shape)))
        return self._inner.logits(x, weight)

    def scale_and_shift(self, out: Tensor, lora: LoraBatch, layer: int, targets: LoraTargets) -> None:
        """Record the shape, layer and targets."""
        self.calls.append(("scale_and_shift", _shape(out), layer, *targets.each))
        self._inner.scale_and_shift(out, lora, layer, targets)

    def row_norms(self, weight: Weight) -> Tensor:
        """Not recorded: computed once, before any batch."""
        return self._inner.row_norms(weight)

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Record the shape, and whether something is added."""
        self.calls.append(("add_norm", _shape(x), delta is not None, eps))
        return self._inner.add_norm(x, delta, weight, eps, offset)

    def rotary_store(self, qkv: Tensor, rotation: Rotation, kv: Tensor, batch: Batch, norms: HeadNorms | None) -> None:
        """Record the shape, and whether heads are normed; the size of the arena says nothing about the work."""
        self.calls.append(("rotary_store", _shape(qkv), norms is not None))
        self._inner.rotary_store(qkv, rotation, kv, batch, norms)

    def attention(
        self, qkv: Tensor, kv: Tensor, batch: Batch, scale: float, window: int | None, softcap: float = 0.0
    ) -> Tensor:
        """Record the shape, and rows and context of each sequence."""
        spans = (*batch.row_starts.tolist(), *batch.contexts.tolist())
        self.calls.append(("attention", _shape(qkv), spans, scale, window))
        return self._inner.attention(qkv, kv, batch, scale, window, softcap)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Record the shape."""
        self.calls.append(("silu_mul", _shape(gate_up)))
        return self._inner.silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Record the shape."""
        self.calls.append(("gelu_mul", _shape(gate_up)))
        return self._inner.gelu_mul(gate_up)

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tails: Tensor,
        offsets: Tensor,
        sequences: StateSequences,
        *,
        has_silu: bool,
    ) -> Tensor:
        """Record the shape."""
        self.calls.append(("causal_conv", _shape(x), has_silu))
        return self._inner.causal_conv(x, weight, bias, tails, offsets, sequences, has_silu=has_silu)

    def recurrence(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        decay: Tensor,
        beta: Tensor,
        states: Tensor,
        offsets: Tensor,
        sequences: StateSequences,
        skip: Tensor | None = None,
        *,
        is_delta: bool,
    ) -> Tensor:
        """Record the shapes."""
        self.calls.append(("recurrence", _shape(keys), _shape(values), is_delta))
        return self._inner.recurrence(
            queries, keys, values, decay, beta, states, offsets, sequences, skip, is_delta=is_delta
        )

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, *, is_norm_first: bool
    ) -> Tensor:
        """Record the shape."""
        self.calls.append(("gated_norm", _shape(x), group, is_norm_first))
        return self._inner.gated_norm(x, gate, weight, eps, group, is_norm_first=is_norm_first)

    def recurrence_gates(
        self, b: Tensor | None, a: Tensor, rates: Tensor, bias: Tensor, limits: tuple[float, float] = ANY_STEP
    ) -> tuple[Tensor, Tensor]:
        """Record the shape."""
        self.calls.append(("recurrence_gates", _shape(a), b is None))
        return self._inner.recurrence_gates(b, a, rates, bias, limits)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """Record the shape."""
        self.calls.append(("sigmoid_mul", _shape(x)))
        return self._inner.sigmoid_mul(x, gate)

    def choose(self, logits: Tensor, parameters: SamplingTensors) -> Tensor:
        """Record the shape."""
        self.calls.append(("choose", _shape(logits)))
        return self._inner.choose(logits, parameters)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
