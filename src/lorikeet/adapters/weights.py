"""Reads the weights of an adapter for one rank, without torch, whose import takes seconds."""

from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lorikeet.adapters.checkpoint import DescribeOptions
from lorikeet.adapters.description import WEIGHTS_FILE, ExtraTensor, TensorEntry, TowerTensor
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.manifest import check_unchanged, tensors_of
from lorikeet.adapters.numbers import DTYPES, KEPT_AS, from_float32, to_float32
from lorikeet.adapters.reader import describe
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import ROW_PARALLEL, SCORE, ModelGeometry


class ModuleWeights(NamedTuple):
    """One tensor-parallel rank's share of a module, in arrays of ``adapters.numbers.KEPT_AS``.

    Attributes:
        layer, module: the module. The layers of a pipeline stage are counted from the stage's first.
        a: A, ``[rank, in_features]``.
        bt: Bᵀ multiplied by LoRA's scaling, ``[rank, out_features]``. Both are fp32 if they will be stored as codes.
    """

    layer: int
    module: str
    a: NDArray[Any]
    bt: NDArray[Any]


def load_weights(
    ref: AdapterRef,
    geometry: ModelGeometry,
    dtype: str,
    rank: int = 0,
    size: int = 1,
    whole: ModelGeometry | None = None,
) -> Iterator[ModuleWeights]:
    """Read an adapter, module by module in packing order.

    Args:
        ref: the adapter.
        geometry: sizes of the rank's share of the model.
        dtype: dtype of the result, a key of ``KEPT_AS``. The scaling is applied in fp32 before the conversion.
        rank, size: tensor-parallel rank and number of ranks. For query, gate and up, a rank reads a slice of B's rows.
            For key and value, it reads the rows of its KV heads (head ``rank * heads // size`` if there are fewer heads
            than ranks). For o and down, it reads a slice of A's columns.
        whole: sizes of the whole model, if ``size`` is above 1.

    Raises:
        AdapterError: the files are missing, have changed since they were registered, or overflow ``dtype``.
    """
    modules, _ = tensors_of(ref, whole or geometry)
    file = Path(ref.folder) / WEIGHTS_FILE
    of_experts: dict[int, NDArray[Any]] = {}
    try:
        with FileIO(file) as stream:
            for each in modules:
                layer = each.layer - geometry.first_layer
                module = each.module
                if not 0 <= layer < geometry.layers:
                    continue
                where = f"adapter {ref.name!r}: {module} of layer {each.layer}"
                columns, rows = _share(module, each.b_shape[0], geometry, rank, size)
                matrix = of_experts.get(each.b.start)
                if matrix is None:
                    matrix = _read(stream, each.b)
                    matrix = matrix.T if each.are_turned else matrix
                first, step = each.columns
                if step > 1:  # Experts alternate between a few tensors. Each tensor is read once.
                    of_experts = {**dict(list(of_experts.items())[-1:]), each.b.start: matrix}
                a = _read(stream, each.a)
                a = (a.T if each.are_turned else a)[:, columns]
                b = matrix[rows, first::step]
                shape = geometry.shape_of(module)
                if (a.shape[1], b.shape[0]) != (shape.in_features, shape.out_features):
                    raise AdapterError(
                        f"{where}: has {(a.shape[1], b.shape[0])} features, "
                        f"the rank's share of the model {(shape.in_features, shape.out_features)}"
                    )
                kept = "float32" if geometry.has_codes(module) else dtype
                a = _convert(a, DTYPES[each.a.dtype], 1.0, kept, where)
                b = _convert(b, DTYPES[each.b.dtype], each.scaling, kept, where)
                yield ModuleWeights(layer, module, a, b.T)
    except OSError as error:
        raise AdapterError(f"adapter {ref.name!r}: {file}: {error}") from error


def load_extras(
    ref: AdapterRef, geometry: ModelGeometry, dtype: str
) -> Iterator[tuple[int, int, Callable[[int, int], NDArray[Any]]]]:
    """Read whole extras of an adapter in packing order. ``geometry`` has the sizes of the model.

    See :func:`load_weights` for other arguments and errors.

    Yields:
        For each extra, its number, its layer, and a function that returns ``count`` rows of the matrix from ``first``
        on. A matrix that is computed on the device is zero.
    """
    if not ref.extras:
        return
    _, listed = tensors_of(ref, geometry)
    file = Path(ref.folder) / WEIGHTS_FILE
    by_place = {(each.kind, each.module, each.columns, each.tokens, each.layer): each for each in listed}
    try:
        with FileIO(file) as stream:
            for number, extra in enumerate(ref.extras):
                key = extra.kind, extra.module, extra.columns, extra.tokens
                for layer in (layer for layer, rows in enumerate(extra.rows) if rows):
                    where = f"adapter {ref.name!r}: {extra.kind} of {extra.module} of layer {layer}"
                    yield number, layer, _rows_of(stream, by_place[*key, layer], dtype, where)
    except OSError as error:
        raise AdapterError(f"adapter {ref.name!r}: {file}: {error}") from error


def load_tower(ref: AdapterRef, geometry: ModelGeometry, dtype: str) -> Iterator[tuple[TowerTensor, NDArray[Any]]]:
    """Read the tensors of an adapter for the parts of the base that compute images.

    B and its bias are multiplied by the scaling. See :func:`load_weights` for arguments and errors.
    """
    check_unchanged(ref)
    file = Path(ref.folder) / WEIGHTS_FILE
    try:
        found = describe(Path(ref.folder), DescribeOptions(geometry.whole, checks_fit=False))
        with FileIO(file) as stream:
            for each in found.tower:
                where = f"adapter {ref.name!r}: {each.kind} of {each.module}"
                scaling = each.scaling if each.kind in ("b", "lora_bias") else 1.0
                yield each, _convert(_read(stream, each.entry), DTYPES[each.entry.dtype], scaling, dtype, where)
    except OSError as error:
        raise AdapterError(f"adapter {ref.name!r}: {file}: {error}") from error


def _rows_of(stream: FileIO, extra: ExtraTensor, dtype: str, where: str) -> Callable[[int, int], NDArray[Any]]:
    """Return a function that reads rows of a matrix."""
    entry = extra.entry
    if entry is None:
        return lambda first, count: np.zeros((count, extra.columns), KEPT_AS[dtype])
    was = DTYPES[entry.dtype]
    shape = (extra.rows, extra.columns)
    if extra.is_transposed:
        whole = _convert(_read(stream, entry), was, extra.scaling, dtype, where)
        turned = np.ascontiguousarray(whole.reshape(shape[::-1]).T)
        return lambda first, count: turned[first : first + count]
    matrix = entry.shaped(*shape)

    def read(first: int, count: int) -> NDArray[Any]:
        return _convert(_read(stream, matrix.row_range(first, count)), was, extra.scaling, dtype, where)

    return read


def _share(module: str, out_features: int, geometry: ModelGeometry, rank: int, size: int) -> tuple[slice, slice]:
    """Return the columns of A and the rows of B that belong to ``rank``."""
    if module == SCORE:
        return slice(None), slice(None)
    local = geometry.modules[module]
    if module in ROW_PARALLEL:
        return slice(rank * local.in_features, (rank + 1) * local.in_features), slice(None)
    if module in ("k", "v"):
        heads = out_features // geometry.head_dim
        start = rank * heads // size * geometry.head_dim
    else:
        start = rank * local.out_features
    return slice(None), slice(start, start + local.out_features)


def _read(stream: FileIO, entry: TensorEntry) -> NDArray[Any]:
    """Read a tensor into new memory. Reading a truncated file through a memory map would kill the process instead."""
    values = np.empty(entry.shape, KEPT_AS[DTYPES[entry.dtype]])
    stream.seek(entry.start)
    if stream.readinto(values.data) != values.nbytes:
        raise OSError(f"was truncated while tensor {entry.name} was read")
    return values


def _convert(values: NDArray[Any], was: str, scaling: float, dtype: str, where: str) -> NDArray[Any]:
    if not values.size:  # A score head has no B.
        return from_float32(to_float32(values, was), dtype)
    exact = to_float32(values, was)
    if scaling != 1.0:
        exact = exact * np.float32(scaling)
    # Checking the extremes suffices, since min and max also propagate NaN.
    extremes = np.array([exact.min(), exact.max()])
    if not (np.isfinite(extremes).all() and np.isfinite(to_float32(from_float32(extremes, dtype), dtype)).all()):
        raise AdapterError(f"{where}: too large for {dtype} once scaled")
    return values if (was, scaling) == (dtype, 1.0) else from_float32(exact, dtype)
