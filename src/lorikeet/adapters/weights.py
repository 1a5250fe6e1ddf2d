"""Reading an adapter's weights as one tensor-parallel rank needs them."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lorikeet.adapters.checkpoint import WEIGHTS_FILE, inspect_adapter
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.store import check_unchanged
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import ModelGeometry

_ROW_PARALLEL = ("o", "down")
"""Their input features are sharded; all other modules' output features are."""


class ModuleWeights(NamedTuple):
    """One module's share of an adapter.

    Attributes:
        layer, module: which.
        a: ``[rank, in_features]`` of the tensor-parallel rank.
        bt: ``[rank, out_features]`` of the tensor-parallel rank; Bᵀ with LoRA's scaling in it.
    """

    layer: int
    module: str
    a: Tensor
    bt: Tensor


def load_weights(
    ref: AdapterRef, geometry: ModelGeometry, dtype: torch.dtype, rank: int = 0, size: int = 1
) -> Iterator[ModuleWeights]:
    """Read an adapter, module by module in packing order.

    Args:
        ref: the adapter.
        geometry: sizes of the tensor-parallel rank's share of the model.
        dtype: what the weights are converted to; the scaling is multiplied in fp32 before.
        rank, size: which share of how many. Query, gate and up take a slice of B's rows; key and value the rows of
            the rank's KV heads (head ``rank * heads // size`` where there are fewer heads than ranks); o and down a
            slice of A's columns.

    Raises:
        AdapterError: the files are missing, have changed since they were registered, or overflow ``dtype``.
    """
    check_unchanged(ref)
    checkpoint = inspect_adapter(Path(ref.folder))
    try:
        with safe_open(checkpoint.folder / WEIGHTS_FILE, framework="pt") as tensors:
            for (layer, module), pair in checkpoint.pairs.items():
                a = tensors.get_slice(pair.a.name)
                b = tensors.get_slice(pair.b.name)
                columns, rows = _share(module, pair.b.shape[0], geometry, rank, size)
                bt = (b[rows].float() * checkpoint.scaling(layer, module)).to(dtype).t()
                weights = ModuleWeights(layer, module, a[:, columns].to(dtype), bt)
                _check(weights, geometry, ref)
                yield weights
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"adapter {ref.name!r}: {checkpoint.folder / WEIGHTS_FILE}: {error}") from error


def _share(module: str, out_features: int, geometry: ModelGeometry, rank: int, size: int) -> tuple[slice, slice]:
    """Return the columns of A and the rows of B that belong to ``rank``."""
    local = geometry.modules[module]
    if module in _ROW_PARALLEL:
        return slice(rank * local.in_features, (rank + 1) * local.in_features), slice(None)
    if module in ("k", "v"):
        heads = out_features // geometry.head_dim
        start = rank * heads // size * geometry.head_dim
    else:
        start = rank * local.out_features
    return slice(None), slice(start, start + local.out_features)


def _check(weights: ModuleWeights, geometry: ModelGeometry, ref: AdapterRef) -> None:
    where = f"adapter {ref.name!r}: {weights.module} of layer {weights.layer}"
    shape = geometry.modules[weights.module]
    found = (weights.a.shape[1], weights.bt.shape[1])
    if found != (shape.in_features, shape.out_features):
        raise AdapterError(
            f"{where}: has {found} features, the rank's share of the model {(shape.in_features, shape.out_features)}"
        )
    if not (_is_finite(weights.a) and _is_finite(weights.bt.t())):
        raise AdapterError(f"{where}: too large for {weights.a.dtype} once scaled")


def _is_finite(tensor: Tensor) -> bool:
    """Whether all elements are; by the extremes, 20 times as fast as ``torch.isfinite`` in bf16. NaN passes through."""
    return all(math.isfinite(extreme) for extreme in tensor.aminmax())
