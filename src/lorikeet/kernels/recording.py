"""Kernels that write down what they are asked, to prove that two batches make the same calls."""

from collections.abc import Sequence

from torch import Tensor

from lorikeet.kernels.base import Batch, Kernels, LoraSegment

Call = tuple[object, ...]
"""Name of the kernel, then shapes of tensors and plain values, in the order of the arguments."""


class RecordingKernels:
    """Wraps any backend; computes with it and appends one entry to ``calls`` per kernel call."""

    def __init__(self, inner: Kernels) -> None:
        self._inner = inner
        self.name = inner.name
        self.calls: list[Call] = []

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Record shapes, and that of the bias."""
        self.calls.append(("linear", _shape(x), _shape(weight), None if bias is None else _shape(bias)))
        return self._inner.linear(x, weight, bias)

    def add_lora(
        self, out: Tensor, x: Tensor, segments: Sequence[LoraSegment], layer: int, module: str, column: int
    ) -> None:
        """Record shapes, row ranges, layer, module and column."""
        rows = tuple((segment.start, segment.stop) for segment in segments)
        self.calls.append(("add_lora", _shape(out), _shape(x), rows, layer, module, column))
        self._inner.add_lora(out, x, segments, layer, module, column)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Record the shape."""
        self.calls.append(("rms_norm", _shape(x), _shape(weight), eps))
        return self._inner.rms_norm(x, weight, eps)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Record the shape."""
        self.calls.append(("rotary", _shape(x), _shape(cos)))
        return self._inner.rotary(x, cos, sin)

    def store_kv(self, k: Tensor, v: Tensor, kv: Tensor, batch: Batch) -> None:
        """Record the shape of keys and values; the size of the arena says nothing about the work."""
        self.calls.append(("store_kv", _shape(k), _shape(v)))
        self._inner.store_kv(k, v, kv, batch)

    def attention(self, q: Tensor, kv: Tensor, batch: Batch, scale: float, window: int | None) -> Tensor:
        """Record the queries' shape, the decode tables' shape and each prefill's rows and context."""
        spans = tuple((span.start, span.stop, span.context) for span in batch.prefills)
        self.calls.append(("attention", _shape(q), _shape(batch.decode_tables), spans, scale, window))
        return self._inner.attention(q, kv, batch, scale, window)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Record the shape."""
        self.calls.append(("silu_mul", _shape(gate_up)))
        return self._inner.silu_mul(gate_up)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
