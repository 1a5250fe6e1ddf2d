"""A paged KV arena for tests, and batches over its scattered blocks. Free of transformers, so ranks start fast."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lorikeet.kernels.base import Batch, LoraSegment, PrefillSpan, kv_view
from lorikeet.models.config import ModelConfig

BLOCK_TOKENS = 4


@dataclass
class Arena:
    """A paged KV arena whose blocks are handed out in a scattered order and start out full of NaN."""

    kv: Tensor
    free: list[int]
    tables: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)

    @classmethod
    def make(cls, config: ModelConfig, blocks: int = 40, tensor_parallel: int = 1) -> "Arena":
        """Return an empty arena for one rank of ``config``."""
        geometry = config.geometry(dtype_bytes=4, tensor_parallel=tensor_parallel)
        elements = torch.full((blocks, geometry.block_elements(BLOCK_TOKENS)), float("nan"))
        kv = kv_view(elements, config.layers, BLOCK_TOKENS, geometry.kv_heads, config.head_dim)
        scattered = torch.randperm(blocks, generator=torch.Generator().manual_seed(7)).tolist()
        return cls(kv, scattered)

    def batch(self, steps: list[tuple[str, list[int]]], lora: tuple[LoraSegment, ...] = ()) -> Batch:
        """Return the batch that appends these tokens to these sequences; logits of every row are wanted."""
        rows: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        decode_rows, decode_tables, decode_contexts, prefills = [], [], [], []
        for name, token_ids in steps:
            start = self.lengths.get(name, 0)
            context = self.lengths[name] = start + len(token_ids)
            table = self.tables.setdefault(name, [])
            while len(table) * BLOCK_TOKENS < context:
                table.append(self.free.pop())
            if len(token_ids) == 1:
                decode_rows.append(len(rows))
                decode_tables.append(torch.tensor(table))
                decode_contexts.append(context)
            else:
                prefills.append(PrefillSpan(len(rows), len(rows) + len(token_ids), context, torch.tensor(table)))
            rows += token_ids
            positions += range(start, context)
            blocks += [table[position // BLOCK_TOKENS] for position in range(start, context)]
        at = torch.tensor(positions)
        padded = torch.nn.utils.rnn.pad_sequence(decode_tables, batch_first=True) if decode_tables else None
        return Batch(
            token_ids=torch.tensor(rows),
            positions=at,
            slot_blocks=torch.tensor(blocks),
            slot_offsets=at % BLOCK_TOKENS,
            decode_rows=torch.tensor(decode_rows, dtype=torch.int64),
            decode_tables=torch.zeros((0, 0), dtype=torch.int64) if padded is None else padded,
            decode_contexts=torch.tensor(decode_contexts, dtype=torch.int64),
            prefills=tuple(prefills),
            sample_rows=torch.arange(len(rows)),
            lora=lora,
        )
