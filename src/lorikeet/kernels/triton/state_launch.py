"""Launches the kernels of layers with a state per sequence."""

from itertools import pairwise

import torch
from torch import Tensor

from lorikeet.kernels.states import StateSequences
from lorikeet.kernels.triton import states as kernels
from lorikeet.kernels.triton.launch import launch, power_of_2, tiles_of

_CONV_ROWS = 16
_CONV_CHANNELS = 128
_CONV_WARPS = 4
_COLUMNS = 32
"""Columns of a state in one program, so that the state fits into registers."""
_STATE_WARPS = 4
_NORM_WARPS = 4


def _rows(sequences: StateSequences, rows: int) -> list[int]:
    """Return the number of rows of each sequence. In a graph each has one row."""
    if sequences.host is None:
        return [1] * len(sequences.resumed) if rows else []
    return [stop - start for start, stop in pairwise(sequences.host.tolist())]


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tails: Tensor,
    offsets: Tensor,
    sequences: StateSequences,
    *,
    has_silu: bool,
) -> Tensor:
    """Compute like ``Kernels.causal_conv``, in two launches: the second one overwrites the tails."""
    rows, channels = x.shape
    out = torch.empty((rows, channels), dtype=x.dtype, device=x.device)
    counts = _rows(sequences, rows)
    if not counts:
        return out
    places = sequences.row_starts, sequences.resumed, offsets, channels, x.stride(0), offsets.shape[1]
    blocks = tiles_of(channels, _CONV_CHANNELS)
    tile = min(_CONV_ROWS, power_of_2(max(counts)))
    kernels.causal_conv[(len(counts), blocks, tiles_of(max(counts), tile))](
        x, weight, x if bias is None else bias, tails, out, *places,
        len(weight), bias is not None, has_silu, tile, _CONV_CHANNELS, **launch(_CONV_WARPS),
    )  # fmt: skip
    kernels.shift_tails[(len(counts), blocks)](
        x, tails, *places, len(weight), _CONV_CHANNELS, **launch(_CONV_WARPS)
    )  # fmt: skip
    return out


def recurrence(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    offsets: Tensor,
    sequences: StateSequences,
    skip: Tensor | None,
    *,
    is_delta: bool,
) -> Tensor:
    """Compute like ``Kernels.recurrence``, in one launch."""
    key_heads, key_dim = keys.shape[1:]
    heads, value_dim = values.shape[1:]
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    sequence_count = len(sequences.resumed)
    tensors = queries, keys, values, decay, beta, decay if skip is None else skip, states, out
    numbers = (
        *tensors, sequences.row_starts, sequences.resumed, offsets,
        queries.stride(0), keys.stride(0), values.stride(0), heads, heads // key_heads,
        key_dim**-0.5 if is_delta else 1.0,
    )  # fmt: skip
    columns = min(_COLUMNS, power_of_2(value_dim))
    kernels.recurrence[(sequence_count, heads, tiles_of(value_dim, columns))](
        *numbers, key_dim, power_of_2(key_dim), value_dim, columns, is_delta, skip is not None, **launch(_STATE_WARPS)
    )
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, *, is_norm_first: bool) -> Tensor:
    """Compute like ``Kernels.gated_norm``, in one launch."""
    rows, columns = x.shape
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    kernels.gated_norm[(rows, columns // group)](
        x, gate, weight, out, columns, x.stride(0), gate.stride(0), len(weight), eps,
        group, power_of_2(group), is_norm_first, **launch(_NORM_WARPS),
    )  # fmt: skip
    return out
