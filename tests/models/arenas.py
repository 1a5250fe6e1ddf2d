"""A paged KV arena for tests, and batches over its scattered blocks. Free of transformers, so ranks start fast."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lorikeet.kernels.interface import Batch, StateTable
from lorikeet.kernels.lora import LoraBatch
from lorikeet.models.config import ModelConfig
from lorikeet.models.decoder import Decoder

BLOCK_TOKENS = 4


@dataclass
class Arena:
    """A paged KV arena whose blocks are handed out in a scattered order and start out full of NaN."""

    kv: Tensor
    free: list[int]
    tables: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    state_blocks: int = 0
    states: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        config: ModelConfig,
        decoder: Decoder,
        blocks: int = 40,
        tensor_parallel: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> "Arena":
        """Return an empty arena for one rank of ``config``, with further blocks for the states of four sequences."""
        geometry = config.geometry(dtype.itemsize, tensor_parallel)
        blocks += 4 * geometry.state_blocks(BLOCK_TOKENS)
        elements = torch.full((blocks, geometry.block_elements(BLOCK_TOKENS)), float("nan"), dtype=dtype)
        kv = decoder.view_kv(elements, BLOCK_TOKENS)
        scattered = torch.randperm(blocks, generator=torch.Generator().manual_seed(7)).tolist()
        return cls(kv, scattered, state_blocks=geometry.state_blocks(BLOCK_TOKENS))

    def batch(self, steps: list[tuple[str, list[int]]], lora: LoraBatch | None = None) -> Batch:
        """Return the batch that appends these tokens to these sequences; logits of every row are wanted."""
        resumed = torch.tensor([int(name in self.lengths) for name, _ in steps])
        states = [self._states_of(name) for name, _ in steps]
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
            states=StateTable(torch.tensor(states), resumed, resumed) if self.state_blocks else None,
        )

    def _states_of(self, name: str) -> list[int]:
        """Return the blocks of a sequence's state."""
        if name not in self.states:
            self.states[name] = [self.free.pop() for _ in range(self.state_blocks)]
        return self.states[name]
