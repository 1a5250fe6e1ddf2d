"""Cases of attention for the native kernels."""

import ctypes
from copy import copy
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Shape:
    """A call: ``sequences`` are (rows, context) each; ``window`` and ``softcap`` 0 are none.

    ``one_order`` sums as a prefill does, however many rows there are.
    """

    sequences: list[tuple[int, int]]
    kv_heads: int = 3
    group: int = 3
    head_dim: int = 64
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    one_order: bool = False


class Case:
    """Random tensors of a shape. What no row may see is NaN: the tail of the last blocks, and block 0."""

    def __init__(self, shape: Shape, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows = [rows for rows, _ in shape.sequences]
        contexts = [context for _, context in shape.sequences]
        blocks = [-(-context // shape.block_size) for context in contexts]
        numbers = (torch.randperm(sum(blocks), generator=generator) + 1).split(blocks)
        self.shape = shape
        self.heads = shape.kv_heads * shape.group
        self.row_starts = torch.tensor([0, *rows]).cumsum(0)
        self.contexts = torch.tensor(contexts)
        # Padded with a block that is not there.
        self.tables = torch.full((len(blocks), max(blocks) + 1), 1 << 40)
        size = (sum(blocks) + 1, 2, shape.block_size, shape.kv_heads, shape.head_dim)
        self.kv = torch.randn(size, generator=generator).to(dtype)
        self.kv[0] = torch.nan
        for table, mine, context in zip(self.tables, numbers, contexts, strict=True):
            table[: len(mine)] = mine
            if unused := -context % shape.block_size:
                self.kv[mine[-1], :, -unused:] = torch.nan
        # Wider than the queries, as they come with keys and values.
        self.q = torch.randn(sum(rows), (self.heads + 2) * shape.head_dim, generator=generator).to(dtype)

    def native(self, library: ctypes.CDLL, threads: int, *, only: int | None = None) -> Tensor:
        """Return ``[rows, heads * head_dim]``; with ``only`` that of one sequence, alone in the call."""
        shape = self.shape
        first = only or 0
        sequences = len(self.contexts) if only is None else 1
        starts = self.row_starts[first : first + sequences + 1]
        out = self.q.new_full((len(self.q), self.heads * shape.head_dim), torch.nan)
        library.lorikeet_attention(
            self.q.data_ptr(),
            self.q.stride(0),
            self.kv.data_ptr(),
            self.kv.element_size(),
            self.kv.stride(0),
            out.data_ptr(),
            out.stride(0),
            starts.data_ptr(),
            self.contexts[first:].data_ptr(),
            self.tables[first:].data_ptr(),
            self.tables.stride(0),
            sequences,
            self.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.block_size,
            shape.head_dim**-0.5,
            shape.window,
            shape.softcap,
            shape.one_order,
            self.q.element_size(),
            threads,
        )
        return out[starts[0] : starts[-1]]

    def part(self, first: int, rows: int) -> "Case":
        """Return the case in which the only sequence computes ``rows`` of its rows from the ``first`` on."""
        (all_rows, context) = self.shape.sequences[0]
        part = copy(self)
        part.shape = replace(self.shape, sequences=[(rows, context - all_rows + first + rows)])
        part.row_starts = torch.tensor([0, rows])
        part.contexts = torch.tensor([context - all_rows + first + rows])
        part.q = self.q[first : first + rows]
        return part

    def by_torch(self, dtype: torch.dtype) -> Tensor:
        """Return the same, computed by torch in ``dtype``."""
        shape = self.shape
        outputs = []
        for index, (rows, context) in enumerate(shape.sequences):
            start = int(self.row_starts[index])
            table = self.tables[index, : -(-context // shape.block_size)]
            k, v = (self.kv[table, part].flatten(0, 1)[:context].transpose(0, 1).to(dtype) for part in (0, 1))
            q = self.q[start : start + rows, : self.heads * shape.head_dim].unflatten(1, (self.heads, -1))
            position = torch.arange(context)
            distance = position[context - rows :, None] - position
            seen = distance >= 0
            if shape.window:
                seen &= distance < shape.window
            out = self._attended(q.transpose(0, 1).to(dtype), k, v, seen)
            outputs.append(out.transpose(0, 1).flatten(1))
        return torch.cat(outputs)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        if not self.shape.softcap:
            return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen, enable_gqa=True)[0]
        k, v = (each.repeat_interleave(self.shape.group, 0) for each in (k, v))
        scores = (q @ k.mT).to(torch.float64 if q.dtype == torch.float64 else torch.float32) * q.shape[-1] ** -0.5
        scores = (torch.tanh(scores / self.shape.softcap) * self.shape.softcap).masked_fill(~seen, -torch.inf)
        return scores.softmax(-1).to(q.dtype) @ v
