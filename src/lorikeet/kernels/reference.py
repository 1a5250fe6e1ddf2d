"""The reference backend, which is plain torch on any device.

Other backends are tested against it.

The module also has LoRA by einsum, as in dLoRA, which all backends use.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lorikeet.core.geometry import KV_SCALE_BYTES
from lorikeet.core.plan import KernelForm
from lorikeet.kernels import states as in_torch
from lorikeet.kernels.devices import SLOW_HALVES
from lorikeet.kernels.interface import Batch, HeadNorms, Rotation, Weight, kv_head_dim
from lorikeet.kernels.lora import LoraDelta, LoraSegment
from lorikeet.kernels.quantized import QuantizedWeight
from lorikeet.kernels.sampling import SamplingTensors, choose
from lorikeet.kernels.states import ANY_STEP, StateSequences
from lorikeet.kernels.torch_layout import TorchLayoutKernels


def add_lora_einsum(out: Tensor, x: Tensor, delta: LoraDelta) -> None:
    """Add the LoRA delta of ``Kernels.linear`` to ``out`` by multiplying every row with every adapter.

    ``out[n] += Σ_m S[n, m] Σ_r (x[n] · A[m, r]) Bᵀ[m, r]``, where ``S [rows, adapters]`` is 1 at a row's own adapter
    and 0 elsewhere, and all adapters are padded with zeros to the largest rank of the batch. The work is rows x
    adapters x largest rank. On CPUs with slow half precision, the computation is in fp32.
    """
    lora, layer, targets = delta
    adapters = list(dict.fromkeys(segment.weights for segment in lora.segments))
    if SLOW_HALVES and x.device.type == "cpu":
        x = x.to(torch.float32)
    types = torch.zeros(len(x), len(adapters), dtype=torch.bool, device=x.device)
    for segment in lora.segments:
        types[segment.start : segment.stop, adapters.index(segment.weights)] = True
    for module, column, outputs in targets.each:
        a = x.new_zeros(len(adapters), lora.largest_rank, x.shape[1])
        bt = x.new_zeros(len(adapters), lora.largest_rank, outputs)
        for i, weights in enumerate(adapters):
            if pieces := weights.pieces.get((layer, module)):
                for padded, parts in zip((a, bt), zip(*pieces, strict=True), strict=True):
                    rows = torch.cat(parts)
                    padded[i, : len(rows)] = rows
        inner = (x @ a.flatten(0, 1).T).unflatten(1, a.shape[:2])
        # Products are selected, not multiplied by 0, since another adapter's product may overflow, and inf * 0 is NaN.
        inner = torch.where(types[:, :, None], inner, 0.0)
        out[:, column : column + outputs] += inner.flatten(1) @ bt.flatten(0, 1)


_LEAST_SCALE = 1e-37
"""Least scale of keys and values in 8 bits; smaller ones become 0, since their inverse would not be finite."""

GROUP_RANKS = 512
"""Most ranks of a group of segments. Each row is multiplied with all of them, so this bounds the wasted work."""


class ReferenceKernels(TorchLayoutKernels):
    """The reference backend. ``kernels.interface.Kernels`` documents the methods.

    Args:
        instead_of_faster: why the fast backend cannot be used; empty if it was not requested. The reason is part of the
            name.
    """

    fits_graphs = False
    reads_codes = True

    def __init__(self, instead_of_faster: str = "") -> None:
        self.name = f"reference ({instead_of_faster})" if instead_of_faster else "reference"

    @property
    def threads(self) -> int:
        """Number of torch's threads."""
        return torch.get_num_threads()

    @threads.setter
    def threads(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, delta: LoraDelta | None = None) -> Tensor:
        """Multiply, then add the LoRA delta. A quantised weight is dequantised for each product."""
        plain = weight.dequantized(x.dtype) if isinstance(weight, QuantizedWeight) else weight
        assert isinstance(plain, Tensor)
        out = F.linear(x, plain, bias)
        if delta is not None:
            add = add_lora_einsum if delta.lora.form is KernelForm.EINSUM else add_lora
            add(out, x, delta)
        return out

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Add the residual, then compute the norm."""
        if delta is not None:
            x += delta
        return rms_norm(x, weight, eps, offset)

    def rotary_store(self, qkv: Tensor, rotation: Rotation, kv: Tensor, batch: Batch, norms: HeadNorms | None) -> None:
        """Normalise and rotate, and store keys and values in their slots."""
        q, k, v = split_heads(qkv, kv)
        if norms is not None:
            norm_heads(q, norms.q, norms)
            norm_heads(k, norms.k, norms)
        q[:] = rotated(q, rotation)
        for part, rows in enumerate((rotated(k, rotation), v)):
            kept = kv_codes(rows) if kv.dtype == torch.int8 else rows
            kv[batch.slot_blocks, part, batch.slot_offsets] = kept

    def attention(
        self, qkv: Tensor, kv: Tensor, batch: Batch, scale: float, window: int | None, softcap: float = 0.0
    ) -> Tensor:
        """Compute the attention of all decodes together, and of prefills one by one."""
        if kv.dtype == torch.int8:
            used, tables = batch.block_tables.unique(return_inverse=True)
            kv = kv_from_codes(kv[used], qkv.dtype)
            batch = replace(batch, block_tables=tables)
            batch = batch if batch.host is None else replace(batch, host=batch.host._replace(block_tables=tables))
        if softcap:
            heads = split_heads(qkv, kv)[0]
            return attend_plainly(heads, kv[:, 0], kv[:, 1], batch, scale, window, softcap, None).flatten(1)
        q, _, _ = split_heads(qkv, kv)
        out = torch.empty_like(q)
        starts = batch.row_starts.tolist()
        contexts = batch.contexts.tolist()
        counts = [stop - start for start, stop in pairwise(starts)]
        decodes = torch.tensor([i for i, count in enumerate(counts) if count == 1], device=q.device)
        if len(decodes):
            rows = batch.row_starts[decodes]
            tables = batch.block_tables[decodes]
            at = batch.contexts[decodes]
            tables = tables[:, : -(-int(at.max()) // kv.shape[2])]
            out[rows] = _decode(q[rows], kv, tables, at, scale, window)
        for i, count in enumerate(counts):
            if count > 1:
                span = slice(starts[i], starts[i + 1])
                table = batch.block_tables[i, : -(-contexts[i] // kv.shape[2])]
                out[span] = _prefill(q[span], kv, table, contexts[i], scale, window)
        return out.flatten(1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return ``silu(gate) * up``."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Return ``gelu(gate) * up``."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

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
        """Convolve sequence by sequence."""
        return in_torch.causal_conv(x, weight, bias, tails, offsets, sequences, has_silu=has_silu)

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
        """Update the states chunk by chunk."""
        return in_torch.recurrence(
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
        """Normalise and gate in fp32."""
        return in_torch.gated_norm(x, gate, weight, eps, group, is_norm_first=is_norm_first)

    def choose(self, logits: Tensor, parameters: SamplingTensors) -> Tensor:
        """Sample tokens with ``kernels.sampling.choose``."""
        return choose(logits, parameters)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Return the RMS norm over the last dimension, computed in fp32.

    Without an offset, the norm is cast back before the weight is applied (Llama's order). With an offset it is cast
    back afterwards (Gemma's order).
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * (weight.float() + offset)).to(x.dtype) if offset else weight * wide.to(x.dtype)


def norm_heads(x: Tensor, weight: Tensor, norms: HeadNorms) -> None:
    """Normalise ``x [T, heads, head_dim]`` in place."""
    found = rms_norm(x.flatten(1) if norms.is_whole else x, weight, norms.eps, norms.offset)
    x[:] = found.view(x.shape)


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate ``x [T, heads, head_dim]``."""
    dims, are_neighbours = rotation.pairs
    if not dims:
        return x
    cos, sin = (each[:, None, : dims // 2] for each in rotation[:2])
    if are_neighbours:
        first = x[..., 0:dims:2]
        second = x[..., 1:dims:2]
        found = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = x[..., :dims].chunk(2, dim=-1)
        found = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((found, x[..., dims:]), dim=-1) if dims < x.shape[-1] else found


def kv_codes(rows: Tensor) -> Tensor:
    """Return the codes of keys or values ``[…, head_dim]``, int8 ``[…, head_dim + 2]`` (``base.kv_view``).

    The scale is rounded up, so that no code is above 127. The scale is NaN if a number is not finite.
    """
    wide = rows.float()
    exact = wide.abs().amax(-1, keepdim=True) / 127 + (wide * 0).sum(-1, keepdim=True)
    scale = ((exact.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
    scale = torch.where(exact.isnan(), torch.nan, torch.where(exact < _LEAST_SCALE, 0.0, scale))
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    codes = (wide * inverse).nan_to_num(0, 0, 0).round().to(torch.int8)
    return torch.cat((codes, scale.to(torch.bfloat16).view(torch.int8)), dim=-1)


def kv_from_codes(kv: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the keys and values ``[…, head_dim]`` for codes ``[…, head_dim + 2]``."""
    codes = kv[..., :-KV_SCALE_BYTES]
    scale = kv[..., -KV_SCALE_BYTES:].contiguous().view(torch.bfloat16)
    return (codes.float() * scale.float()).to(dtype)


def split_heads(qkv: Tensor, kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """View ``qkv`` as q ``[T, heads, head_dim]`` and k, v ``[T, kv_heads, head_dim]``, with sizes from ``kv``."""
    kv_heads = kv.shape[-2]
    head_dim = kv_head_dim(kv)
    heads = qkv.unflatten(-1, (-1, head_dim))
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    return q, k, v


def add_lora(out: Tensor, x: Tensor, delta: LoraDelta) -> None:
    """Add the LoRA delta to ``out``, by two matrix products per group of segments.

    In eager torch launching a small product costs more than its arithmetic. So a group multiplies all its rows with all
    its ranks, and keeps the blocks in which row and rank belong to the same adapter. Padding would change only the
    time, so ``padded`` is computed like ``unpadded``.
    """
    lora, layer, targets = delta
    for module, column, outputs in targets.each:
        for group in _groups(lora.segments, layer, module):
            first = group[0].segment.start
            last = group[-1].segment.stop
            a, b = (_joined([piece[side] for member in group for piece in member.pieces]) for side in (0, 1))
            inner = x[first:last] @ a.T
            if len(group) > 1:
                inner = _own_blocks(inner, group)
            out[first:last, column : column + outputs].addmm_(inner, b)


class _Member(NamedTuple):
    """A segment of a group, with its adapter's pieces for the (layer, module), and the sum of the pieces' ranks."""

    segment: LoraSegment
    pieces: tuple[tuple[Tensor, Tensor], ...]
    rank: int


def _groups(segments: Sequence[LoraSegment], layer: int, module: str) -> Iterator[list[_Member]]:
    """Yield groups of consecutive segments that change (layer, module), with at most ``GROUP_RANKS`` ranks in sum."""
    group: list[_Member] = []
    for segment in segments:
        if pieces := segment.weights.pieces.get((layer, module)):
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
    """Zero ``inner [rows, ranks of the group]`` except for each segment's rows at the ranks of its adapter."""
    own = torch.zeros_like(inner)
    first = group[0].segment.start
    rank = 0
    for member in group:
        rows = slice(member.segment.start - first, member.segment.stop - first)
        ranks = slice(rank, rank + member.rank)
        own[rows, ranks] = inner[rows, ranks]
        rank += member.rank
    return own


def _decode(q: Tensor, kv: Tensor, tables: Tensor, at: Tensor, scale: float, window: int | None) -> Tensor:
    """Compute the attention of one query ``[D, heads, head_dim]`` per sequence.

    The heads of a group stand for positions.
    """
    block_size = kv.shape[2]
    kv_heads = kv.shape[3]
    # index_select copies whole blocks and is ten times as fast as indexing.
    gathered = kv.index_select(0, tables.flatten()).unflatten(0, tables.shape)
    position = torch.arange(tables.shape[1] * block_size, device=q.device)
    contexts = at[:, None]
    # Slots past the context hold stale values, and a NaN among them would survive a weight of zero.
    row, stale = (position >= contexts).nonzero(as_tuple=True)
    gathered[row, stale // block_size, :, stale % block_size] = 0
    k, v = (gathered[:, :, part].flatten(1, 2).transpose(1, 2) for part in (0, 1))
    seen = position < contexts
    if window is not None:
        seen &= position >= contexts - window
    grouped = q.unflatten(1, (kv_heads, -1))
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=seen[:, None, None], scale=scale)
    return out.flatten(1, 2)


def _prefill(q: Tensor, kv: Tensor, table: Tensor, context: int, scale: float, window: int | None) -> Tensor:
    """Compute the attention of the queries ``[T, heads, head_dim]`` of one sequence over its whole context."""
    gathered = kv.index_select(0, table)
    k, v = (gathered[:, part].flatten(0, 1)[:context].transpose(0, 1) for part in (0, 1))
    position = torch.arange(context, device=q.device)
    distance = position[context - len(q) :, None] - position
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=seen, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def attend_plainly(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: Batch,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention with options that ``Kernels.attention`` lacks, on any device, with fp32 scores.

    It is causal, but for rows that see later tokens (``Batch.seen``), whose keys must be stored.

    Args:
        q: ``[T, heads, key_dim]``.
        keys, values: a layer's keys and values in the arena, ``[blocks, block_size, kv_heads, key_dim]`` and ``[...,
            value_dim]``.
        batch: the step.
        scale: factor of the scores.
        window: number of latest positions that a token sees, its own included; None for all.
        softcap: scores become ``softcap * tanh(score / softcap)``; None leaves them unchanged.
        sinks: ``[heads]``, logits that take part in the softmax without a value; None without sinks.

    Returns:
        ``[T, heads, value_dim]``.
    """
    block_size, kv_heads = keys.shape[1:3]
    out = q.new_empty(len(q), q.shape[1], values.shape[-1])
    there = batch if batch.host is None else batch.host
    starts = there.row_starts.tolist()
    contexts = there.contexts.tolist()
    by_rows: dict[int, list[int]] = {}
    for i, (start, stop) in enumerate(pairwise(starts)):
        by_rows.setdefault(stop - start, []).append(i)
    for rows, members in by_rows.items():  # All decodes are computed together.
        longest = max(contexts[i] for i in members)
        table = batch.block_tables[members, : -(-longest // block_size)]
        position = torch.arange(table.shape[1] * block_size, device=q.device)
        context = torch.tensor([contexts[i] for i in members], device=q.device)
        # Slots past the context hold stale values, and a NaN among them would survive a weight of zero.
        stale = (position >= context[:, None])[:, :, None, None]
        k, v = (part[table].flatten(1, 2).masked_fill(stale, 0) for part in (keys, values))
        at = torch.cat([torch.arange(starts[i], starts[i] + rows, device=q.device) for i in members])
        queries = q[at].view(len(members), rows, kv_heads, -1, q.shape[-1])
        scores = torch.einsum("nrkgd,ntkd->nkgrt", queries.float(), k.float()) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        own = context[:, None] - rows + torch.arange(rows, device=q.device)
        distance = own[:, :, None] - position
        seen = distance >= 0 if batch.seen is None else position < batch.seen[at].view(len(members), rows, 1)
        if window is not None:
            seen &= distance < window
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        if sinks is not None:
            extra = sinks.float().view(1, kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, extra], dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(position)]
        found = torch.einsum("nkgrt,ntkd->nrkgd", weights, v.float())
        out[at] = found.reshape(len(at), q.shape[1], -1).to(out.dtype)
    return out
