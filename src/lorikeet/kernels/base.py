"""What a kernel backend computes, and the batch it computes on.

All tensors of a batch lie on the executor's device. ``T`` is the number of tokens (rows) of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

LoraPieces = dict[tuple[int, str], tuple[tuple[Tensor, Tensor], ...]]
"""(layer, module) → pieces (A rows ``[r, in]``, Bᵀ rows ``[r, out]``), views into pool blocks; scaling is in B."""


@dataclass(frozen=True)
class LoraSegment:
    """Rows ``start`` to ``stop`` of the batch run under one adapter.

    Attributes:
        start, stop: half-open range of rows.
        pieces: where its weights lie.
    """

    start: int
    stop: int
    pieces: LoraPieces


@dataclass(frozen=True)
class PrefillSpan:
    """One sequence that computes more than one token.

    Attributes:
        start, stop: its rows.
        context: tokens in its KV once the step has stored its own; its first row has position
            ``context - (stop - start)``.
        block_table: int64 ``[ceil(context / block_tokens)]``.
    """

    start: int
    stop: int
    context: int
    block_table: Tensor


@dataclass(frozen=True)
class Batch:
    """One step's metadata, built once per step.

    Attributes:
        token_ids: int64 ``[T]``.
        positions: int64 ``[T]``.
        slot_blocks: int64 ``[T]``, block that receives the row's KV.
        slot_offsets: int64 ``[T]``, token index inside that block.
        decode_rows: int64 ``[D]``, rows of sequences that compute one token.
        decode_tables: int64 ``[D, N]``, their block tables, padded with block 0.
        decode_contexts: int64 ``[D]``, tokens in their KV including this one.
        prefills: the other sequences.
        sample_rows: int64 ``[S]``, rows whose logits are wanted.
        lora: segments in row order; empty if no row has an adapter.
    """

    token_ids: Tensor
    positions: Tensor
    slot_blocks: Tensor
    slot_offsets: Tensor
    decode_rows: Tensor
    decode_tables: Tensor
    decode_contexts: Tensor
    prefills: tuple[PrefillSpan, ...]
    sample_rows: Tensor
    lora: tuple[LoraSegment, ...] = ()


class Kernels(Protocol):
    """One backend. Arguments are never changed unless the docstring says so."""

    name: str

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x [T, in] @ weight [out, in]ᵀ + bias [out]``."""
        ...

    def add_lora(
        self, out: Tensor, x: Tensor, segments: Sequence[LoraSegment], layer: int, module: str, column: int
    ) -> None:
        """For each segment add ``x[rows] @ Aᵀ @ Bᵀ`` to ``out[rows, column : column + out_features]``, in place.

        Segments whose adapter leaves (layer, module) alone are skipped. Ranks may differ; nothing is padded.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last dimension, computed in fp32, returned in x's dtype."""
        ...

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate ``x [T, heads, head_dim]`` by ``cos, sin [T, head_dim]`` (halves, as in Llama)."""
        ...

    def store_kv(self, k: Tensor, v: Tensor, kv: Tensor, batch: Batch) -> None:
        """Write ``k, v [T, kv_heads, head_dim]`` into ``kv`` at the batch's slots, in place.

        Args:
            k, v: this layer's keys and values.
            kv: this layer's view of the arena, ``[blocks, 2, block_tokens, kv_heads, head_dim]``.
            batch: the step.
        """
        ...

    def attention(self, q: Tensor, kv: Tensor, batch: Batch, scale: float, window: int | None) -> Tensor:
        """Causal attention of ``q [T, heads, head_dim]`` over the paged ``kv``; grouped heads.

        ``window`` limits a token to the ``window`` latest positions, its own included.
        Returns ``[T, heads * head_dim]``.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` for ``gate_up [T, 2 * n]``; returns ``[T, n]``."""
        ...


def kv_view(arena: Tensor, layers: int, block_tokens: int, kv_heads: int, head_dim: int) -> Tensor:
    """See ``arena [blocks, elements]`` as ``[layers, blocks, 2, block_tokens, kv_heads, head_dim]`` without a copy."""
    blocks = arena.shape[0]
    return arena.view(blocks, layers, 2, block_tokens, kv_heads, head_dim).transpose(0, 1)


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype called ``name``.

    Raises:
        ValueError: it is not one that Lorikeet computes in.
    """
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in dtypes:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(dtypes)}")
    return dtypes[name]
