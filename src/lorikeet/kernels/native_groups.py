"""Computes the products of groups of rows, such as the rows of each expert, in one native call."""

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from lorikeet.core.geometry import LORA_MODULES
from lorikeet.kernels.interface import GroupedRows, GroupProduct
from lorikeet.kernels.native_records import AdaptersRecord, GroupRecord

_COLUMNS = [name for name, *_ in GroupRecord._fields_]
_WEIGHT, _BIAS, _TARGETS, _ROWS, _SEGMENTS = range(len(_COLUMNS))


class NativeGroups:
    """Implements ``kernels.interface.GroupedProducts``.

    Args:
        library: the native library.
        products: the product of each group, with weights that the library packed.
        layer: index of the layer.
        threads: function that returns the number of threads of a step.
    """

    def __init__(
        self, library: ctypes.CDLL, products: Sequence[GroupProduct], layer: int, threads: Callable[[], int]
    ) -> None:
        self._library = library
        self._products = products  # The records have the addresses of their tensors.
        self._threads = threads
        self._outputs = products[0].weight.shape[0]
        self._records = np.zeros((len(products), len(_COLUMNS)), dtype=np.int64)
        self._records[:, _WEIGHT] = [each.weight.address for each in products]  # type: ignore[attr-defined]
        self._records[:, _BIAS] = [0 if each.bias is None else each.bias.data_ptr() for each in products]
        targets = [each.targets for each in products]
        self._records[:, _TARGETS] = [0 if each is None else each.numbers.data_ptr() for each in targets]
        slots = next((each.slots for each in targets if each is not None), len(LORA_MODULES))
        # The library expects seven modules in each layer.
        self._layer = layer * slots // len(LORA_MODULES)

    def __call__(self, x: Tensor, rows: GroupedRows) -> Tensor:
        """Compute all groups."""
        out = torch.empty(len(x), self._outputs, dtype=x.dtype)
        records = self._records[rows.groups]
        records[:, _ROWS] = rows.rows
        records[:, _SEGMENTS] = rows.counts
        segments = rows.segments
        adapters = AdaptersRecord(
            segments=segments.ctypes.data, count=len(segments), padded_rank=rows.padded_rank, bits=rows.bits
        )
        self._library.lorikeet_linear_groups(
            x.data_ptr(),
            x.stride(0),
            records.ctypes.data,
            len(records),
            out.data_ptr(),
            self._threads(),
            adapters.address if len(segments) else None,
            self._layer,
        )
        return out
