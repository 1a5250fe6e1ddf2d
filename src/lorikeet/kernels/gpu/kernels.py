"""Calling the Triton kernels."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from lorikeet.core.geometry import LORA_MODULES
from lorikeet.core.plan import KernelForm
from lorikeet.kernels.base import Batch, HeadNorms, LoraDelta, Weight
from lorikeet.kernels.choose import ChoiceParameters
from lorikeet.kernels.einsum import add_lora_einsum
from lorikeet.kernels.gpu import attention, draw, elementwise, lora

_FEW_ROWS, _FEW_RANKS, _FEW_WIDTH = 16, 16, 128
"""Tiles of the LoRA kernels where segments have few rows; a product of Triton's needs at least 16 each way."""
_MANY_ROWS, _MANY_RANKS, _MANY_WIDTH = 64, 64, 64
"""The same for longer segments, whose inputs would else be read once for every few ranks."""
_PROGRAMS = 264
"""So many programs or more keep a large device busy: two on each multiprocessor of an H100."""
_MOST_PARTS = 8
_COLUMNS = 128


class _Tile(NamedTuple):
    """Of attention: query rows (times heads that share a KV head) at most, tokens at a time, and who computes them."""

    rows: int
    tokens: int
    warps: int


_FEW, _MANY = _Tile(64, 64, 4), _Tile(128, 64, 8)
_LEAST_ROWS, _MOST_SPLITS = 16, 16
_VOCAB = 1024
_FILTERED, _FILTER_WARPS = 8192, 16
"""A row is filtered by one program, which goes over it dozens of times."""
_WIDE = bool(triton.knobs.runtime.interpret)


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
        width = triton.next_power_of_2(hidden)
        elementwise.add_norm[(rows,)](x, delta, weight, out, hidden, eps, delta is not None, width)
        return out

    def rotary_store(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, batch: Batch, norms: HeadNorms | None
    ) -> None:
        """Norm, rotate, scatter the rows to their slots."""
        kv_heads, head_dim = kv.shape[-2:]
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        half = head_dim // 2
        elementwise.rotary_store[(len(qkv), heads + 2 * kv_heads)](
            qkv, cos, sin, kv, batch.slot_blocks, batch.slot_offsets,
            qkv if norms is None else norms.q, qkv if norms is None else norms.k, 0.0 if norms is None else norms.eps,
            heads, kv_heads, qkv.stride(0), kv.stride(0), kv.stride(1), kv.stride(2),
            half, triton.next_power_of_2(half), norms is not None,
        )  # fmt: skip

    def attention(self, qkv: Tensor, kv: Tensor, batch: Batch, scale: float, window: int | None) -> Tensor:
        """One launch for all sequences, with tiles for the longest; of few decodes, the tokens are split."""
        block_tokens, kv_heads, head_dim = kv.shape[2:]
        heads, sequences = qkv.shape[1] // head_dim - 2 * kv_heads, len(batch.contexts)
        group = heads // kv_heads
        most = batch.most_rows
        tile = _MANY if most * group > _FEW.rows else _FEW
        rows = min(max(_LEAST_ROWS, triton.next_power_of_2(most * group)), max(tile.rows, group))
        rows = triton.next_power_of_2(rows)
        splits = max(1, min(_PROGRAMS // (sequences * kv_heads), _MOST_SPLITS)) if most == 1 else 1
        out = found = qkv.new_empty(len(qkv), heads * head_dim)
        shares, width = found, max(16, triton.next_power_of_2(head_dim))
        if splits > 1:
            found = torch.empty(splits, *out.shape, dtype=torch.float32, device=out.device)
            shares = torch.empty(splits, len(qkv), heads, 2, dtype=torch.float32, device=out.device)
        attention.attention[(sequences, kv_heads, triton.cdiv(most, rows // group) * splits)](
            qkv, kv, found, shares, batch.row_starts, batch.contexts, batch.block_tables, scale, window or 0,
            splits, heads, qkv.stride(0), out.stride(0), *kv.stride()[:3], batch.block_tables.stride(0), out.numel(),
            group, head_dim, width, block_tokens, rows, tile.tokens, splits > 1, _WIDE, num_warps=tile.warps,
        )  # fmt: skip
        if splits > 1:
            attention.join_splits[(len(qkv), heads)](
                found, shares, out, splits, out.stride(0), len(qkv),
                head_dim, width, triton.next_power_of_2(splits), num_warps=1,
            )  # fmt: skip
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up``."""
        rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, columns)
        elementwise.silu_mul[(rows, triton.cdiv(columns, _VOCAB))](gate_up, out, columns, _VOCAB)
        return out

    def choose(self, logits: Tensor, parameters: ChoiceParameters) -> Tensor:
        """Filters, then a draw."""
        rows, vocab = logits.shape
        temperature, top_k, top_p, min_p, seed, position = parameters
        lowest = torch.empty(rows, dtype=torch.float32, device=logits.device)
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
        stride = logits.stride(0)
        draw.filter_rows[(rows,)](
            logits, temperature, top_k, top_p, min_p, lowest, vocab, stride, _FILTERED, num_warps=_FILTER_WARPS
        )
        draw.draw[(rows,)](logits, temperature, lowest, seed, position, out, vocab, stride, _VOCAB)
        return out


def _add_lora(out: Tensor, x: Tensor, delta: LoraDelta) -> None:
    batch, layer, targets = delta
    tables = batch.on(x.device)
    ranks, inputs, count = batch.largest_rank, x.shape[1], len(targets.each)
    if not (len(tables) and ranks):
        return
    rows, tile_ranks, width = _FEW_ROWS, _FEW_RANKS, _FEW_WIDTH
    if batch.segment_rows > _FEW_ROWS:
        rows, width = _MANY_ROWS, _MANY_WIDTH
        tile_ranks = min(_MANY_RANKS, max(_FEW_RANKS, triton.next_power_of_2(ranks)))
    tiles, rank_tiles = triton.cdiv(batch.segment_rows, rows), triton.cdiv(ranks, tile_ranks)
    parts = _parts(len(tables) * tiles * rank_tiles * count, inputs, width)
    part_inputs = triton.cdiv(triton.cdiv(inputs, parts), width) * width
    inner = torch.empty(parts, count, len(x), ranks, dtype=torch.float32, device=x.device)
    padded = ranks if batch.form is KernelForm.PADDED else 0
    layer_modules, numbers = layer * len(LORA_MODULES), targets.on(x.device)
    part_stride, target_stride, inner_stride, _ = inner.stride()
    lora.shrink[(len(tables), tiles * rank_tiles, count * parts)](
        x, inner, tables, numbers, layer_modules, inputs, padded, rank_tiles, parts, part_inputs,
        x.stride(0), inner_stride, target_stride, part_stride,
        rows, tile_ranks, width, batch.is_aligned, _WIDE,
    )  # fmt: skip
    column_tiles = triton.cdiv(max(target.outputs for target in targets.each), _COLUMNS)
    lora.expand[(len(tables), tiles, count * column_tiles)](
        inner, out, tables, numbers, layer_modules, padded, parts, column_tiles,
        out.stride(0), inner_stride, target_stride, part_stride,
        rows, _FEW_RANKS, _COLUMNS, batch.is_aligned, "ieee" if x.dtype == torch.float32 else "tf32",
    )  # fmt: skip


def _parts(programs: int, inputs: int, width: int) -> int:
    """Return into how many parts inputs are split, so that there are programs enough and each has a few tiles."""
    return max(1, min(_PROGRAMS // programs, _MOST_PARTS, inputs // (2 * width)))
