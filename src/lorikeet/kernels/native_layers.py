"""Calling ``native/layers.cpp``."""

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lorikeet.kernels.base import Batch, LoraBatch, LoraTargets, Weight
from lorikeet.kernels.layers import LayersShape, LayerWeights
from lorikeet.kernels.panels import PanelWeight


class NativeLayers:
    """See ``kernels.layers.Layers``.

    Args:
        library: see ``kernels.library``.
        weights: packed.
        shape: what they do not tell.
        threads: returns how many share a step.
    """

    def __init__(
        self, library: ctypes.CDLL, weights: Sequence[LayerWeights], shape: LayersShape, threads: Callable[[], int]
    ) -> None:
        self._library, self._weights, self._shape, self._threads = library, weights, shape, threads
        records = [_record(layer, window or 0) for layer, window in zip(weights, shape.windows, strict=True)]
        self._records = torch.tensor(records, dtype=torch.int64)
        hidden, inner = weights[0].input_norm, weights[0].down.shape[1]
        self._model = _int64(
            self._records.data_ptr(), len(weights), len(hidden), shape.heads, shape.kv_heads, shape.head_dim, inner,
            hidden.itemsize,
        )  # fmt: skip
        mixed = shape.heads * shape.head_dim
        qkv = mixed + 2 * shape.kv_heads * shape.head_dim
        self._widths = len(hidden), qkv, mixed, len(hidden), 2 * inner, inner

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute a step; intermediate results live as long as it."""
        rows, samples = len(x), len(batch.sample_rows)
        normed, qkv, mixed, delta, gate_up, gated = [x.new_empty(rows, width) for width in self._widths]
        assert all(tensor.is_contiguous() for tensor in (x, cos, sin, kv[0, 0]))
        assert len(kv) == len(self._weights)
        assert kv.dtype == x.dtype
        step = _int64(
            rows, samples, batch.sample_rows.data_ptr(), x.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            kv.data_ptr(), kv.stride(0), kv.stride(1), kv.shape[3],
            batch.slot_blocks.data_ptr(), batch.slot_offsets.data_ptr(), batch.row_starts.data_ptr(),
            batch.contexts.data_ptr(), batch.block_tables.data_ptr(), batch.block_tables.shape[1], len(batch.contexts),
            _numbers(batch.lora), _numbers(batch.sample_lora),
            *(_touched(batch.lora, targets) for targets in self._shape.targets),
            *(tensor.data_ptr() for tensor in (normed, qkv, mixed, delta, gate_up, gated)),
        )  # fmt: skip
        self._library.lorikeet_layers(self._model, step, self._shape.eps, self._shape.scale, self._threads())
        return x[:samples], delta[:samples]


def _record(layer: LayerWeights, window: int) -> list[int]:
    """Return a ``Layer`` of ``native/layers.cpp``."""
    return [
        _address(layer.input_norm), _packed(layer.qkv), _address(layer.qkv_bias), _address(layer.q_norm),
        _address(layer.k_norm), _packed(layer.o), _address(layer.o_bias), _address(layer.post_norm),
        _packed(layer.gate_up), _address(layer.gate_up_bias), _packed(layer.down), _address(layer.down_bias), window,
    ]  # fmt: skip


def _int64(*numbers: int) -> "ctypes.Array[ctypes.c_int64]":
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _packed(weight: Weight) -> int:
    assert isinstance(weight, PanelWeight)
    return weight.address


def _numbers(lora: LoraBatch | None) -> int:
    return 0 if lora is None else lora.numbers.data_ptr()


def _touched(lora: LoraBatch | None, targets: LoraTargets) -> int:
    """Return the address of targets that any adapter changes, else 0."""
    return targets.numbers.data_ptr() if lora is not None and lora.touches(targets) else 0
