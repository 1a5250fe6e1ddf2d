"""Declares the state that layers carry from token to token beside keys and values, and places it in memory blocks.

Layers with linear attention, state spaces or short convolutions have such a state. Its size does not depend on the
number of tokens. A state is a list of fp32 tensors, and takes a whole number of blocks of the arena, which need not be
neighbours. No part of a tensor crosses the end of a block, so that kernels can update parts in place.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import msgspec

STATE_BYTES = 4
"""Bytes of an element of a state, which is fp32 whatever the dtype of the model."""
_ALIGNED = 64
"""Bytes to which parts and blocks are aligned, for vector loads."""


class StateShape(msgspec.Struct, frozen=True, array_like=True):
    """One fp32 tensor of one layer's state, for one sequence: ``[parts, *shape]``.

    Attributes:
        layer: index of the layer.
        name: name of the tensor within the layer, such as ``recurrent`` or ``conv``.
        parts: number of parts that may lie apart from each other, such as heads.
        shape: shape of one part, which is contiguous in memory.
    """

    layer: int
    name: str
    parts: int
    shape: tuple[int, ...]

    @property
    def part_elements(self) -> int:
        """Number of elements of one part."""
        return prod(self.shape)

    @property
    def part_bytes(self) -> int:
        """Number of bytes of one part, aligned."""
        return aligned(self.part_elements * STATE_BYTES)


class StatePlaces(NamedTuple):
    """The place of each part of a state.

    Attributes:
        blocks: number of blocks of a state.
        places: for each tensor, the place of each part: the index of its block within the state, and its offset in the
            block in elements of fp32.
    """

    blocks: int
    places: tuple[tuple[tuple[int, int], ...], ...]


def aligned(size: int) -> int:
    """Round a number of bytes up to the alignment of states."""
    return -(-size // _ALIGNED) * _ALIGNED


def place_states(shapes: Sequence[StateShape], block_bytes: int) -> StatePlaces:
    """Place the parts of a state one after the other in blocks.

    Raises:
        ValueError: a part is larger than a block.
    """
    block = 0
    offset = 0
    places = []
    for shape in shapes:
        if shape.part_bytes > block_bytes:
            raise ValueError(
                f"layer {shape.layer}: a part of its state {shape.name} has {shape.part_bytes} bytes, a block only "
                f"{block_bytes}"
            )
        parts = []
        for _ in range(shape.parts):
            if offset + shape.part_bytes > block_bytes:
                block += 1
                offset = 0
            parts.append((block, offset // STATE_BYTES))
            offset += shape.part_bytes
        places.append(tuple(parts))
    return StatePlaces(block + 1 if offset else 0, tuple(places))
