"""A paged KV arena for tests, and batches over its scattered blocks. Free of transformers, so ranks start fast."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lorikeet.kernels.interface import Batch, kv_view
from lorikeet.kernels.lora import LoraBatch
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

    def batch(self, steps: list[tuple[str, list[int]]], lora: LoraBatch | None = None) -> Batch:
        """Return the batch that appends these tokens to these sequences; logits of every row are wanted."""
        rows: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        row_starts = [0]
        contexts = []
        tables = []
        for name, token_ids in steps:
            start = self.lengths.get(name, 0)
            context = self.lengths[name] = start + len(token_ids)
            table = self.tables.setdefault(name, [])
            while len(table) * BLOCK_TOKENS < context:
                table.append(self.free.pop())
            rows += token_ids
            row_starts.append(len(rows))
            contexts.append(context)
            tables.append(torch.tensor(table))
            positions += range(start, context)
            blocks += [table[position // BLOCK_TOKENS] for position in range(start, context)]
        at = torch.tensor(positions)
        return Batch(
            token_ids=torch.tensor(rows),
            positions=at,
            slot_blocks=torch.tensor(blocks),
            slot_offsets=at % BLOCK_TOKENS,
            row_starts=torch.tensor(row_starts),
            contexts=torch.tensor(contexts),
            block_tables=torch.nn.utils.rnn.pad_sequence(tables, batch_first=True),
            sample_rows=torch.arange(len(rows)),
            lora=lora,
        )
