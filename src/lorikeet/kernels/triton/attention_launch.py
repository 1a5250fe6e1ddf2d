"""Launches the attention kernels: chooses tile sizes and the number of splits of a sequence's tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from lorikeet.kernels.interface import LONG_TOKENS, Batch, BatchPart
from lorikeet.kernels.triton import attention
from lorikeet.kernels.triton.launch import INTERPRETED, PROGRAMS, launch, power_of_2, tiles_of


class _Tile(NamedTuple):
    """Maximum number of query rows (times query heads per KV head), tokens per iteration, and warps of a program."""

    rows: int
    tokens: int
    warps: int


_FEW = _Tile(64, 64, 4)
_MANY = _Tile(128, 64, 8)
_FP32_TILE = _Tile(32, 32, 4)
"""For fp32, which does not use tensor cores; larger tiles take 15 s to compile."""
_LEAST_ROWS = 16
_MOST_SPLITS = 16
_LONG_SPLIT = 4096
"""Tokens per split of a long context, if there are enough programs."""
_LONG_PROGRAMS = 4096
"""Most programs when contexts may be long. Unused programs return immediately."""
_LEAST_LONG_SPLITS = 4
"""Least number of splits when contexts may be long."""
_LEAST_SPLIT = 1024
"""Least tokens of a split when the device is busy without splits."""


class Splits(NamedTuple):
    """The number of programs among which the tokens of a decode are split.

    Attributes:
        usual: number of splits that keeps the device busy.
        most: number of splits for long sequences, which is launched.
    """

    usual: int
    most: int


def splits_of(programs: int, longest: int) -> Splits:
    """Return the splits of decodes that have ``programs`` programs before splitting and contexts up to ``longest``."""
    usual = max(1, min(PROGRAMS // programs, _MOST_SPLITS))
    if longest <= LONG_TOKENS:
        return Splits(usual, usual)
    most = max(_LONG_PROGRAMS // programs, _LEAST_LONG_SPLITS)
    return Splits(usual, max(usual, min(tiles_of(longest, _LONG_SPLIT), most, _MOST_SPLITS)))


def paged_attention(
    qkv: Tensor, kv: Tensor, batch: Batch, scale: float, window: int | None, softcap: float = 0.0
) -> Tensor:
    """Compute attention like ``Kernels.attention``, with one launch per part of the batch, two if tokens are split."""
    _, kv_heads, head_dim = kv.shape[2:]
    out = qkv.new_empty(len(qkv), qkv.shape[1] - 2 * kv_heads * head_dim)
    for part in batch.parts:
        _attend_part(out, qkv, kv, batch, part, scale, window or 0, softcap)
    return out


def _attend_part(
    out: Tensor, qkv: Tensor, kv: Tensor, batch: Batch, part: BatchPart, scale: float, window: int, softcap: float
) -> None:
    block_size, kv_heads, head_dim = kv.shape[2:]
    heads = out.shape[1] // head_dim
    group = heads // kv_heads
    tile = _tile(part.most_rows, group, qkv.dtype)
    splits = _splits(part, kv_heads, batch.block_tables.shape[1] * block_size, window)
    found = shares = out
    if splits.most > 1:
        found = torch.empty(splits.most, part.sequences, out.shape[1], dtype=torch.float32, device=out.device)
        shares = torch.empty(splits.most, part.sequences, heads, 2, dtype=torch.float32, device=out.device)
    numbers = batch.row_starts if part.numbers is None else part.numbers
    sequences = numbers, int(part.numbers is not None), batch.row_starts, batch.contexts
    width = max(16, power_of_2(head_dim))
    tiles = tiles_of(part.most_rows, tile.rows // group)
    attention.attention[(part.sequences, kv_heads, tiles * splits.most)](
        qkv, kv, found, shares, *sequences, batch.block_tables, scale, softcap, window, *splits, heads,
        qkv.stride(0), out.stride(0), *kv.stride()[:3], batch.block_tables.stride(0),
        group, head_dim, width, block_size, tile.rows, tile.tokens, splits.most > 1, softcap != 0, _LEAST_SPLIT,
        INTERPRETED,
        **launch(tile.warps),
    )  # fmt: skip
    if splits.most > 1:
        attention.join_splits[(part.sequences, heads)](
            found, shares, out, *sequences, window, *splits, out.stride(0),
            head_dim, width, tile.tokens, power_of_2(splits.most), _LEAST_SPLIT, **launch(1),
        )  # fmt: skip


def _tile(most_rows: int, group: int, dtype: torch.dtype) -> _Tile:
    tile = _MANY if most_rows * group > _FEW.rows else _FEW
    if dtype == torch.float32:
        tile = _FP32_TILE
    rows = min(max(_LEAST_ROWS, power_of_2(most_rows * group)), max(tile.rows, group))
    return tile._replace(rows=power_of_2(rows))


def _splits(part: BatchPart, kv_heads: int, table_tokens: int, window: int) -> Splits:
    if part.most_rows > 1:
        return Splits(1, 1)
    longest = table_tokens if part.longest is None else part.longest
    return splits_of(part.sequences * kv_heads, min(longest, window or longest))
