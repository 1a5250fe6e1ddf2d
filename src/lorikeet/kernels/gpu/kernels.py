"""Calling the Triton kernels."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lorikeet.core.geometry import LORA_MODULES
from lorikeet.core.plan import KernelForm
from lorikeet.kernels.base import MOST_ROWS, Batch, HeadNorms, LayersShape, LayerWeights, LoraBatch, LoraDelta, Weight
from lorikeet.kernels.gpu import draw, elementwise, lora
from lorikeet.kernels.gpu.attend import attend
from lorikeet.kernels.gpu.launch import INTERPRETED, PROGRAMS, launch, power_of_2, tiles_of
from lorikeet.kernels.reference import add_lora_einsum
from lorikeet.kernels.sampling import SamplingTensors

_MOST_PARTS = 8


class _LoraTile(NamedTuple):
    """Of one LoRA kernel: rows, ranks, and inputs or outputs at a time, who computes them, and tiles on their way.

    If it is of one row, that of the kernels for one.
    """

    rows: int
    ranks: int
    width: int
    warps: int
    stages: int


class _LoraTiles(NamedTuple):
    """Of both; the first one's inputs are split until it has so many ``programs``."""

    shrink: _LoraTile
    expand: _LoraTile
    programs: int = PROGRAMS


_LEAST_RANKS = 16
"""A product of Triton's needs so much each way."""
_ONE_ROW = _LoraTiles(_LoraTile(1, 16, 256, 4, 1), _LoraTile(1, 32, 128, 2, 1), 4 * PROGRAMS)
_ONE_ROW_OF_MANY = _LoraTiles(_LoraTile(1, 16, 512, 4, 1), _LoraTile(1, 16, 128, 2, 1), 4 * PROGRAMS)
_FEW_ROWS = _LoraTiles(_LoraTile(16, 32, 256, 4, 3), _LoraTile(16, 16, 256, 4, 4))
_MANY_ROWS = _LoraTiles(_LoraTile(64, 64, 128, 4, 3), _LoraTile(64, 32, 128, 8, 2))
"""For long segments, whose inputs would else be read once for every few ranks. With four warps the second one's sums of
parts do not fit into registers, and with three stages not into most devices' shared memory, as the compiler tells.
"""
_LORA = ((1, 16, _ONE_ROW), (1, 2**31, _ONE_ROW_OF_MANY), (16, 2**31, _FEW_ROWS))
"""By the rows of a segment and segments at most."""

_NORM_WARPS = 4
_ROTARY_HEADS, _ROTARY_WARPS = 16, 4
_COLUMNS, _SILU_WARPS = 1024, 4
_DRAWN, _DRAW_WARPS = 1024, 4
_FILTERED, _FILTER_WARPS = 8192, 16
"""A row is filtered by one program, which goes over it a dozen times or so; for the draw, it is split."""


class TritonKernels:
    """See ``kernels.base.Kernels``. Products of the base model are the library's.

    Nothing here waits for the device, but what adapters add as einsums.

    Attributes:
        threads: is of no use here.
    """

    name = "triton"
    threads = 1
    fits_graphs = True

    def apart(self, cores: Sequence[int]) -> AbstractContextManager[None]:
        """The one thread runs where it likes."""
        return nullcontext()

    def pack(self, weight: Tensor) -> Weight:
        """Plain."""
        return weight

    def repack(self, weight: Tensor, packed: Weight) -> None:
        """A copy."""
        assert isinstance(packed, Tensor)
        packed.copy_(weight)

    def layers_in_one_call(self, weights: Sequence[LayerWeights], shape: LayersShape) -> None:
        """Kernel by kernel: the host launches them ahead of the device, or a graph does."""

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, delta: LoraDelta | None = None) -> Tensor:
        """``x @ weightᵀ + bias``, then what adapters add."""
        assert isinstance(weight, Tensor)
        out = F.linear(x, weight, bias)
        if delta is not None:
            add = add_lora_einsum if delta.lora.form is KernelForm.EINSUM else _add_lora
            add(out, x, delta)
        return out

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Residual and norm."""
        out = torch.empty_like(x)
        rows, hidden = x.shape
        width = power_of_2(hidden)
        elementwise.add_norm[(rows,)](
            x, delta, weight, out, hidden, eps, delta is not None, width, **launch(_NORM_WARPS)
        )
        return out

    def rotary_store(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, batch: Batch, norms: HeadNorms | None
    ) -> None:
        """Norm, rotate, scatter the rows to their slots."""
        kv_heads, head_dim = kv.shape[-2:]
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        half = head_dim // 2
        elementwise.rotary_store[(len(qkv), tiles_of(heads + 2 * kv_heads, _ROTARY_HEADS))](
            qkv, cos, sin, kv, batch.slot_blocks, batch.slot_offsets,
            qkv if norms is None else norms.q, qkv if norms is None else norms.k, 0.0 if norms is None else norms.eps,
            heads, kv_heads, qkv.stride(0), kv.stride(0), kv.stride(1), kv.stride(2),
            half, power_of_2(half), _ROTARY_HEADS, norms is not None, **launch(_ROTARY_WARPS),
        )  # fmt: skip

    def attention(self, qkv: Tensor, kv: Tensor, batch: Batch, scale: float, window: int | None) -> Tensor:
        """Decodes and prefills apart, where the host knows which are which."""
        return attend(qkv, kv, batch, scale, window)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up``."""
        rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, columns)
        grid = (rows, tiles_of(columns, _COLUMNS))
        elementwise.silu_mul[grid](gate_up, out, columns, _COLUMNS, **launch(_SILU_WARPS))
        return out

    def choose(self, logits: Tensor, parameters: SamplingTensors) -> Tensor:
        """The largest logits, filters, a draw; of few rows, each vocabulary is split."""
        rows, vocab = logits.shape
        temperature, top_k, top_p, min_p, seed, position = parameters
        stride, place = logits.stride(0), logits.device
        parts, width = _parts(PROGRAMS // max(rows, 1), vocab, _DRAWN, draw.MOST_PARTS)
        values = torch.empty(2, rows, parts, dtype=torch.float32, device=place)
        tokens = torch.empty(2, rows, parts, dtype=torch.int32, device=place)
        lowest = torch.empty(rows, dtype=torch.float32, device=place)
        out = torch.empty(rows, dtype=torch.int64, device=place)
        draw.largest[(rows, parts)](logits, values, tokens, vocab, width, stride, _DRAWN, **launch(_DRAW_WARPS))
        draw.filter_rows[(rows,)](
            logits, temperature, top_k, top_p, min_p, values, lowest, vocab, parts, stride, _FILTERED,
            **launch(_FILTER_WARPS),
        )  # fmt: skip
        draw.draw[(rows, parts)](
            logits, temperature, lowest, seed, position, values, tokens, vocab, width, stride, _DRAWN,
            **launch(_DRAW_WARPS),
        )  # fmt: skip
        draw.join[(rows,)](temperature, values, tokens, out, parts, **launch(1))
        return out


def _add_lora(out: Tensor, x: Tensor, delta: LoraDelta) -> None:
    batch = delta.lora
    segments, ranks = len(batch.on(x.device)), batch.largest_rank
    if segments and ranks:
        tiles = _tiles(_segment_rows(batch), segments, ranks)
        _expand(out, _shrink(x, delta, tiles), delta, tiles.expand)


def _shrink(x: Tensor, delta: LoraDelta, lora_tiles: _LoraTiles) -> Tensor:
    """Return fp32 ``[parts, targets, T, rank]``, parts of sums over the inputs."""
    batch, layer, targets = delta
    tables = batch.on(x.device)
    ranks, inputs, count = batch.largest_rank, x.shape[1], len(targets.each)
    tile, _, programs = lora_tiles
    tile = tile._replace(width=tile.width * 2 // x.element_size())  # as many bytes in fp32: there is no room for more
    tiles, rank_tiles = tiles_of(_segment_rows(batch), tile.rows), tiles_of(ranks, tile.ranks)
    parts, part_inputs = _parts(programs // (len(tables) * tiles * rank_tiles * count), inputs, tile.width)
    even = tiles_of(ranks, _LEAST_RANKS) * _LEAST_RANKS  # all strides are multiples of 16
    inner = torch.empty(parts, count, len(x), even, dtype=torch.float32, device=x.device)
    part_stride, target_stride, inner_stride, _ = inner.stride()
    tensors = x, inner, tables, targets.on(x.device), layer * len(LORA_MODULES), inputs, _padded_rank(batch)
    strides = x.stride(0), inner_stride, target_stride, part_stride
    shape = tile.ranks, tile.width, batch.is_aligned and inputs % 16 == 0
    grid, options = (len(tables), tiles * rank_tiles, count * parts), launch(tile.warps, tile.stages)
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
        inner, out, tables, targets.on(out.device), layer * len(LORA_MODULES), _padded_rank(batch), column_tiles,
        out.stride(0), inner_stride, target_stride, part_stride, parts,
    )  # fmt: skip
    shape = tile.ranks, tile.width, batch.is_aligned, targets.are_even
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
    """Return how many rows a segment of its table on the device has at most."""
    return min(batch.segment_rows, MOST_ROWS)


def _padded_rank(batch: LoraBatch) -> int:
    return batch.largest_rank if batch.form is KernelForm.PADDED else 0


def _parts(wanted: int, inputs: int, width: int, most: int = _MOST_PARTS) -> tuple[int, int]:
    """Return into how many parts inputs are split, by whole tiles, and how many inputs each has.

    There are few numbers of parts, as there is a kernel for each.
    """
    parts = 1 << max(1, min(wanted, most)).bit_length() - 1
    part_inputs = tiles_of(tiles_of(inputs, width), parts) * width
    return tiles_of(inputs, part_inputs), part_inputs
