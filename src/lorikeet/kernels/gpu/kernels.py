"""Calling the Triton kernels."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

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

_ROWS, _RANKS, _WIDTH = 16, 16, 64
"""Tiles of the LoRA kernels; a product of Triton's needs at least 16 each way."""
_TOKENS, _LEAST_ROWS, _MOST_ROWS = 32, 16, 64
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
        """One launch for all sequences, with tiles for the longest that there could be."""
        block_tokens, kv_heads, head_dim = kv.shape[2:]
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        group, sequences = heads // kv_heads, len(batch.contexts)
        most = len(qkv) - sequences + 1  # rows of a sequence; how many they are in fact only the device knows
        rows = min(max(_LEAST_ROWS, triton.next_power_of_2(most * group)), max(_MOST_ROWS, group))
        rows = triton.next_power_of_2(rows)
        out = qkv.new_empty(len(qkv), heads * head_dim)
        attention.attention[(sequences, kv_heads, triton.cdiv(most, rows // group))](
            qkv, kv, out, batch.row_starts, batch.contexts, batch.block_tables, scale, window or 0,
            qkv.stride(0), out.stride(0), kv.stride(0), kv.stride(1), kv.stride(2), batch.block_tables.stride(0),
            group, head_dim, max(16, triton.next_power_of_2(head_dim)), block_tokens, rows, _TOKENS, _WIDE,
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
    ranks = batch.largest_rank
    if not (len(tables) and ranks):
        return
    padded = ranks if batch.form is KernelForm.PADDED else 0
    layer_modules = layer * len(LORA_MODULES)
    numbers = targets.on(x.device)
    inner = torch.empty(len(targets.each), len(x), ranks, dtype=torch.float32, device=x.device)
    tiles, count = triton.cdiv(batch.segment_rows, _ROWS), len(targets.each)
    lora.shrink[(len(tables), tiles, count)](
        x, inner, tables, numbers, layer_modules, x.shape[1], padded, x.stride(0), inner.stride(1), inner.stride(0),
        _ROWS, _RANKS, _WIDTH, _WIDE,
    )  # fmt: skip
    parts = triton.cdiv(max(target.outputs for target in targets.each), _WIDTH)
    lora.expand[(len(tables), tiles, count * parts)](
        inner, out, tables, numbers, layer_modules, padded, out.stride(0), inner.stride(1), inner.stride(0), parts,
        _ROWS, _RANKS, _WIDTH,
    )  # fmt: skip
