"""The readable backend: plain torch, on any device. Other backends are checked against it."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lorikeet.kernels.base import Batch, LoraSegment, PrefillSpan

GROUP_RANKS = 512
"""Bounds the work of a group that is thrown away: a row meets at most so many ranks."""


class ReferenceKernels:
    """See ``kernels.base.Kernels`` for what each method computes."""

    name = "reference"

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ weightᵀ + bias``."""
        return F.linear(x, weight, bias)

    def add_lora(
        self, out: Tensor, x: Tensor, segments: Sequence[LoraSegment], layer: int, module: str, column: int
    ) -> None:
        """Two matrix products per group of segments: in eager torch a small product costs more than its arithmetic.

        A group multiplies all its rows with all its ranks and keeps what belongs together.
        """
        for group in _groups(segments, layer, module):
            first, last = group[0].segment.start, group[-1].segment.stop
            a, b = (_joined([piece[side] for member in group for piece in member.pieces]) for side in (0, 1))
            inner = x[first:last] @ a.T
            if len(group) > 1:
                inner = _own_blocks(inner, group)
            out[first:last, column : column + b.shape[1]].addmm_(inner, b)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Cast back before the weight is applied, in Llama's order."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The first half of a head is paired with the second."""
        first, second = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]

    def store_kv(self, k: Tensor, v: Tensor, kv: Tensor, batch: Batch) -> None:
        """Scatter the rows to their slots."""
        kv[batch.slot_blocks, 0, batch.slot_offsets] = k
        kv[batch.slot_blocks, 1, batch.slot_offsets] = v

    def attention(self, q: Tensor, kv: Tensor, batch: Batch, scale: float, window: int | None) -> Tensor:
        """Decode rows together, prefills one by one."""
        out = torch.empty_like(q)
        if len(batch.decode_rows):
            out[batch.decode_rows] = _decode(q[batch.decode_rows], kv, batch, scale, window)
        for span in batch.prefills:
            out[span.start : span.stop] = _prefill(q[span.start : span.stop], kv, span, scale, window)
        return out.flatten(1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up``."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


class _Member(NamedTuple):
    """A segment in a group, with the pieces of the (layer, module) at hand and the sum of their ranks."""

    segment: LoraSegment
    pieces: tuple[tuple[Tensor, Tensor], ...]
    rank: int


def _groups(segments: Sequence[LoraSegment], layer: int, module: str) -> Iterator[list[_Member]]:
    """Yield runs of segments that touch (layer, module), of at most ``GROUP_RANKS`` ranks together."""
    group: list[_Member] = []
    for segment in segments:
        if pieces := segment.pieces.get((layer, module)):
            member = _Member(segment, pieces, sum(len(a) for a, _ in pieces))
            if group and sum(m.rank for m in group) + member.rank > GROUP_RANKS:
                yield group
                group = []
            group.append(member)
    if group:
        yield group


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _own_blocks(inner: Tensor, group: list[_Member]) -> Tensor:
    """Keep each segment's rows under its own ranks, of ``[rows, ranks of the group]``; the rest becomes 0."""
    own, first, rank = torch.zeros_like(inner), group[0].segment.start, 0
    for member in group:
        rows, ranks = slice(member.segment.start - first, member.segment.stop - first), slice(rank, rank + member.rank)
        own[rows, ranks] = inner[rows, ranks]
        rank += member.rank
    return own


def _decode(q: Tensor, kv: Tensor, batch: Batch, scale: float, window: int | None) -> Tensor:
    """One query ``[D, heads, head_dim]`` per sequence. The heads of a group stand in for query positions."""
    tables, block_tokens, kv_heads = batch.decode_tables, kv.shape[2], kv.shape[3]
    # index_select copies whole blocks, ten times as fast as indexing does.
    gathered = kv.index_select(0, tables.flatten()).unflatten(0, tables.shape)
    position = torch.arange(tables.shape[1] * block_tokens, device=q.device)
    contexts = batch.decode_contexts[:, None]
    # Slots past the context hold other sequences' numbers, and a NaN among them would survive a weight of zero.
    row, stale = (position >= contexts).nonzero(as_tuple=True)
    gathered[row, stale // block_tokens, :, stale % block_tokens] = 0
    k, v = (gathered[:, :, part].flatten(1, 2).transpose(1, 2) for part in (0, 1))
    seen = position < contexts
    if window is not None:
        seen &= position >= contexts - window
    grouped = q.unflatten(1, (kv_heads, -1))
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=seen[:, None, None], scale=scale)
    return out.flatten(1, 2)


def _prefill(q: Tensor, kv: Tensor, span: PrefillSpan, scale: float, window: int | None) -> Tensor:
    """Queries ``[T, heads, head_dim]`` of one sequence over its whole context, cached part included."""
    gathered = kv.index_select(0, span.block_table)
    k, v = (gathered[:, part].flatten(0, 1)[: span.context].transpose(0, 1) for part in (0, 1))
    position = torch.arange(span.context, device=q.device)
    distance = position[span.context - len(q) :, None] - position
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=seen, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)
