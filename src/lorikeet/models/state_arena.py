"""Finds, reads and writes the states of sequences in the arena."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lorikeet.core.states import STATE_BYTES, StateShape, place_states
from lorikeet.kernels.interface import StateTable


class StateArena:
    """Addresses states in the arena, for kernels that update them in place and for modules that copy them.

    Args:
        shapes: the tensors of a state (``ModelGeometry.states``).
        arena: the arena, ``[blocks, elements]``, whose blocks are whole numbers of 64 bytes.

    Attributes:
        shapes: the tensors of a state.
        flat: all elements of the arena as fp32, one after the other.
        blocks: number of blocks of a state.
    """

    def __init__(self, shapes: Sequence[StateShape], arena: Tensor) -> None:
        self.shapes = tuple(shapes)
        rows = arena.view(torch.float32)
        self.flat = rows.view(-1)
        found = place_states(shapes, rows.shape[1] * STATE_BYTES)
        self.blocks = found.blocks
        self._block_elements = rows.shape[1]
        device = arena.device
        self._block = [torch.tensor([block for block, _ in parts], device=device) for parts in found.places]
        self._offset = [torch.tensor([offset for _, offset in parts], device=device) for parts in found.places]
        self._stacked: dict[tuple[int, ...], tuple[Tensor, ...]] = {}
        self._within = [torch.arange(shape.part_elements, device=device) for shape in shapes]

    def offsets(self, table: StateTable, index: int) -> Tensor:
        """Return where each part of a tensor begins in ``flat``, int64 ``[sequences, parts]``.

        Args:
            table: the states of a batch.
            index: number of the tensor in ``shapes``.
        """
        return table.blocks[:, self._block[index]] * self._block_elements + self._offset[index]

    def all_offsets(self, table: StateTable, indices: Sequence[int]) -> Tensor:
        """Return the offsets of several tensors with the same number of parts, int64 ``[tensors, sequences, parts]``.

        See :meth:`offsets`.
        """
        key = tuple(indices)
        if key not in self._stacked:
            self._stacked[key] = tuple(torch.stack([of[i] for i in indices]) for of in (self._block, self._offset))
        blocks, within = self._stacked[key]
        first = table.blocks[:, blocks].transpose(0, 1)
        return torch.add(within[:, None], first, alpha=self._block_elements).contiguous()

    def read(self, table: StateTable, index: int, sequence: int) -> Tensor | None:
        """Return a copy of a tensor of one sequence, fp32 ``[parts, *shape]``; None if it starts from zeros."""
        resumed = table.resumed if table.host_resumed is None else table.host_resumed
        if not resumed[sequence]:
            return None
        shape = self.shapes[index]
        return self.flat[self._elements(table, index, sequence)].view(shape.parts, *shape.shape)

    def write(self, table: StateTable, index: int, sequence: int, value: Tensor) -> None:
        """Store a tensor of one sequence, ``[parts, *shape]`` in any floating dtype."""
        self.flat[self._elements(table, index, sequence)] = value.reshape(-1).to(torch.float32)

    def _elements(self, table: StateTable, index: int, sequence: int) -> Tensor:
        first = table.blocks[sequence, self._block[index]] * self._block_elements + self._offset[index]
        return (first[:, None] + self._within[index]).flatten()
