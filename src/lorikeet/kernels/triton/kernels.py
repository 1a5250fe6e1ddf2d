"""The Triton backend, which launches the Triton kernels."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lorikeet.core.plan import KernelForm
from lorikeet.kernels import states as in_torch
from lorikeet.kernels.interface import Batch, HeadNorms, Rotation, Weight
from lorikeet.kernels.lora import MAX_SEGMENT_ROWS, LoraBatch, LoraDelta
from lorikeet.kernels.quantized import QuantizedWeight
from lorikeet.kernels.reference import add_lora_einsum, norm_heads, split_heads
from lorikeet.kernels.sampling import SamplingTensors
from lorikeet.kernels.states import ANY_STEP, StateSequences
from lorikeet.kernels.torch_layout import TorchLayoutKernels
from lorikeet.kernels.triton import elementwise, lora, sampling, state_launch
from lorikeet.kernels.triton.attention_launch import paged_attention
from lorikeet.kernels.triton.launch import INTERPRETED, PROGRAMS, launch, power_of_2, tiles_of
from lorikeet.kernels.triton.quantized import quantized_linear

_MOST_PARTS = 8


class _LoraTile(NamedTuple):
    """The tile of a LoRA kernel: rows, ranks, inputs or outputs per iteration, warps and pipeline stages.

    A tile with ``rows`` 1 is for the kernels for segments of one row.
    """

    rows: int
    ranks: int
    width: int
    warps: int
    stages: int


class _LoraTiles(NamedTuple):
    """The tiles of both LoRA kernels. The inputs of ``shrink`` are split until it has ``programs`` programs."""

    shrink: _LoraTile
    expand: _LoraTile
    programs: int = PROGRAMS


_LEAST_RANKS = 16
"""Least size of each dimension of ``tl.dot``."""
_ONE_ROW = _LoraTiles(_LoraTile(1, 16, 256, 4, 1), _LoraTile(1, 32, 128, 2, 1), 4 * PROGRAMS)
_ONE_ROW_OF_MANY = _LoraTiles(_LoraTile(1, 16, 512, 4, 1), _LoraTile(1, 16, 128, 2, 1), 4 * PROGRAMS)
_FEW_ROWS = _LoraTiles(_LoraTile(16, 32, 256, 4, 3), _LoraTile(16, 16, 256, 4, 4))
_MANY_ROWS = _LoraTiles(_LoraTile(64, 64, 128, 4, 3), _LoraTile(64, 32, 128, 8, 2))
"""For long segments, whose inputs would otherwise be read once for every few ranks.

With four warps the sums of ``expand`` do not fit into registers, and with three stages its tiles do not fit into most
devices' shared memory.
"""
_LORA = ((1, 16, _ONE_ROW), (1, 2**31, _ONE_ROW_OF_MANY), (16, 2**31, _FEW_ROWS))
"""Tiles by most rows of a segment and most segments."""

_NORM_WARPS = 4
_ROTARY_HEADS = 16
_ROTARY_WARPS = 4
_COLUMNS = 1024
_GATE_WARPS = 4
_DRAWN = 1024
_DRAW_WARPS = 4
_FILTERED = 8192
_FILTER_WARPS = 16
"""One program filters a row, in a dozen passes or so. For the draw a row is split."""


class TritonKernels(TorchLayoutKernels):
    """The Triton backend.

    Products with weights that are not quantised run in torch.

    ``kernels.interface.Kernels`` documents the methods.
    No method waits for the device, except LoRA by einsum.

    Attributes:
        threads: unused.
    """

    name = "triton"
    threads = 1
    fits_graphs = True
    reads_codes = False

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, delta: LoraDelta | None = None) -> Tensor:
        """Multiply, then add the LoRA delta."""
        if isinstance(weight, QuantizedWeight):
            out = quantized_linear(x, weight, bias)
        else:
            assert isinstance(weight, Tensor)
            out = F.linear(x, weight, bias)
        if delta is not None:
            add = add_lora_einsum if delta.lora.form is KernelForm.EINSUM else _add_lora
            add(out, x, delta)
        return out

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Add the residual, then compute the norm."""
        out = torch.empty_like(x)
        rows, hidden = x.shape
        width = power_of_2(hidden)
        elementwise.add_norm[(rows,)](
            x, delta, weight, out, hidden, eps, offset, delta is not None, offset != 0, width, **launch(_NORM_WARPS)
        )
        return out

    def rotary_store(self, qkv: Tensor, rotation: Rotation, kv: Tensor, batch: Batch, norms: HeadNorms | None) -> None:
        """Normalise and rotate, and store keys and values in their slots."""
        kv_heads, head_dim = kv.shape[-2:]
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        half = head_dim // 2
        cos, sin, (dims, are_neighbours) = rotation
        if norms is not None and norms.is_whole:  # A program has only some of the heads.
            q, k, _ = split_heads(qkv, kv)
            norm_heads(q, norms.q, norms)
            norm_heads(k, norms.k, norms)
            norms = None
        offset = 0.0 if norms is None else norms.offset
        elementwise.rotary_store[(len(qkv), tiles_of(heads + 2 * kv_heads, _ROTARY_HEADS))](
            qkv, cos, sin, kv, batch.slot_blocks, batch.slot_offsets,
            qkv if norms is None else norms.q, qkv if norms is None else norms.k, 0.0 if norms is None else norms.eps,
            offset, heads, kv_heads, qkv.stride(0), kv.stride(0), kv.stride(1), kv.stride(2),
            half, dims // 2, are_neighbours, power_of_2(half), _ROTARY_HEADS, norms is not None, offset != 0,
            **launch(_ROTARY_WARPS),
        )  # fmt: skip

    def attention(
        self, qkv: Tensor, kv: Tensor, batch: Batch, scale: float, window: int | None, softcap: float = 0.0
    ) -> Tensor:
        """Compute decodes and prefills in separate launches, if the host has the metadata."""
        return paged_attention(qkv, kv, batch, scale, window, softcap)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return ``silu(gate) * up``."""
        return self._gated(gate_up, has_gelu=False)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Return ``gelu(gate) * up``."""
        return self._gated(gate_up, has_gelu=True)

    def _gated(self, gate_up: Tensor, *, has_gelu: bool) -> Tensor:
        rows = gate_up.shape[0]
        columns = gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, columns)
        grid = (rows, tiles_of(columns, _COLUMNS))
        elementwise.gated[grid](gate_up, out, columns, has_gelu, _COLUMNS, **launch(_GATE_WARPS))
        return out

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
        """Convolve, then overwrite the tails."""
        return state_launch.causal_conv(x, weight, bias, tails, offsets, sequences, has_silu=has_silu)

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
        """Update the states row by row, in registers."""
        return state_launch.recurrence(
            queries, keys, values, decay, beta, states, offsets, sequences, skip, is_delta=is_delta
        )

    def recurrence_gates(
        self, b: Tensor | None, a: Tensor, rates: Tensor, bias: Tensor, limits: tuple[float, float] = ANY_STEP
    ) -> tuple[Tensor, Tensor]:
        """Compute the gates with torch."""
        return in_torch.recurrence_gates(b, a, rates, bias, limits)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """Multiply with torch."""
        return in_torch.sigmoid_mul(x, gate)

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, *, is_norm_first: bool
    ) -> Tensor:
        """Normalise and gate in one pass over memory."""
        return state_launch.gated_norm(x, gate, weight, eps, group, is_norm_first=is_norm_first)

    def choose(self, logits: Tensor, parameters: SamplingTensors) -> Tensor:
        """Sample in four launches. The vocabulary is split if there are few rows."""
        rows, vocab = logits.shape
        temperature, top_k, top_p, min_p, seed, position = parameters
        stride = logits.stride(0)
        place = logits.device
        parts, width = _parts(PROGRAMS // max(rows, 1), vocab, _DRAWN, sampling.MOST_PARTS)
        values = torch.empty(2, rows, parts, dtype=torch.float32, device=place)
        tokens = torch.empty(2, rows, parts, dtype=torch.int32, device=place)
        lowest = torch.empty(rows, dtype=torch.float32, device=place)
        out = torch.empty(rows, dtype=torch.int64, device=place)
        sampling.largest[(rows, parts)](logits, values, tokens, vocab, width, stride, _DRAWN, **launch(_DRAW_WARPS))
        sampling.filter_rows[(rows,)](
            logits, temperature, top_k, top_p, min_p, values, lowest, vocab, parts, stride, _FILTERED,
            **launch(_FILTER_WARPS),
        )  # fmt: skip
        sampling.draw[(rows, parts)](
            logits, temperature, lowest, seed, position, values, tokens, vocab, width, stride, _DRAWN,
            **launch(_DRAW_WARPS),
        )  # fmt: skip
        sampling.join[(rows,)](temperature, values, tokens, out, parts, **launch(1))
        return out


def _add_lora(out: Tensor, x: Tensor, delta: LoraDelta) -> None:
    batch = delta.lora
    segments = len(batch.on(x.device))
    ranks = batch.largest_rank
    if segments and ranks:
        tiles = _tiles(_segment_rows(batch), segments, ranks)
        _expand(out, _shrink(x, delta, tiles), delta, tiles.expand)


def _shrink(x: Tensor, delta: LoraDelta, lora_tiles: _LoraTiles) -> Tensor:
    """Return partial sums over the inputs, fp32 ``[parts, targets, T, rank]``."""
    batch, layer, targets = delta
    tables = batch.on(x.device)
    ranks = batch.largest_rank
    inputs = x.shape[1]
    count = len(targets.each)
    tile, _, programs = lora_tiles
    # fp32 gets the same number of bytes, to fit into shared memory.
    tile = tile._replace(width=tile.width * 2 // x.element_size())
    tiles = tiles_of(_segment_rows(batch), tile.rows)
    rank_tiles = tiles_of(ranks, tile.ranks)
    parts, part_inputs = _parts(programs // (len(tables) * tiles * rank_tiles * count), inputs, tile.width)
    padded = tiles_of(ranks, _LEAST_RANKS) * _LEAST_RANKS  # All strides are multiples of 16.
    inner = torch.empty(parts, count, len(x), padded, dtype=torch.float32, device=x.device)
    part_stride, target_stride, inner_stride, _ = inner.stride()
    tensors = x, inner, tables, targets.on(x.device), layer * targets.slots, inputs, _padded_rank(batch)
    strides = x.stride(0), inner_stride, target_stride, part_stride
    shape = tile.ranks, tile.width, batch.is_aligned and inputs % 16 == 0
    grid = (len(tables), tiles * rank_tiles, count * parts)
    options = launch(tile.warps, tile.stages)
    if tile.rows == 1:
        lora.shrink_row[grid](*tensors, parts, part_inputs, *strides, *shape, **options)
    else:
        lora.shrink[grid](
            *tensors, rank_tiles, parts, part_inputs, *strides, tile.rows, *shape, INTERPRETED, **options,
        )  # fmt: skip
    return inner


def _expand(out: Tensor, inner: Tensor, delta: LoraDelta, tile: _LoraTile) -> None:
    batch, layer, targets = delta
    tables = batch.on(out.device)
    parts, count = inner.shape[:2]
    part_stride, target_stride, inner_stride, _ = inner.stride()
    column_tiles = tiles_of(max(target.outputs for target in targets.each), tile.width)
    arguments = (
        inner, out, tables, targets.on(out.device), layer * targets.slots, _padded_rank(batch), column_tiles,
        out.stride(0), inner_stride, target_stride, part_stride, parts,
    )  # fmt: skip
    shape = tile.ranks, tile.width, batch.is_aligned, targets.are_aligned
    options = launch(tile.warps, tile.stages)
    if tile.rows == 1:
        lora.expand_row[len(tables), count * column_tiles](*arguments, *shape, **options)
    else:
        grid = (len(tables), tiles_of(_segment_rows(batch), tile.rows), count * column_tiles)
        lora.expand[grid](*arguments, tile.rows, *shape, INTERPRETED, **options)


def _tiles(segment_rows: int, segments: int, ranks: int) -> _LoraTiles:
    fits = (tiles for rows, most, tiles in _LORA if segment_rows <= rows and segments <= most)
    tiles = next(fits, _MANY_ROWS)
    least = max(_LEAST_RANKS, power_of_2(ranks))
    shrink, expand = (tile._replace(ranks=min(tile.ranks, least)) for tile in (tiles.shrink, tiles.expand))
    return tiles._replace(shrink=shrink, expand=expand)


def _segment_rows(batch: LoraBatch) -> int:
    """Return the maximum number of rows of a segment in the batch's table on the device."""
    return min(batch.segment_rows, MAX_SEGMENT_ROWS)


def _padded_rank(batch: LoraBatch) -> int:
    return batch.largest_rank if batch.form is KernelForm.PADDED else 0


def _parts(wanted: int, inputs: int, width: int, most: int = _MOST_PARTS) -> tuple[int, int]:
    """Return the number of parts into which inputs are split, and the inputs of each part, in whole tiles.

    The number before rounding is a power of two, since a kernel is compiled for each number.
    """
    parts = 1 << max(1, min(wanted, most)).bit_length() - 1
    part_inputs = tiles_of(tiles_of(inputs, width), parts) * width
    return tiles_of(inputs, part_inputs), part_inputs
