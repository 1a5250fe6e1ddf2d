"""States are read back from scattered blocks as they were written."""

import torch

from lorikeet.core.states import StateShape
from lorikeet.kernels.interface import StateTable
from lorikeet.models.state_arena import StateArena


def test_states_of_sequences_are_kept_apart() -> None:
    shapes = (StateShape(0, "conv", 1, (6, 3)), StateShape(0, "recurrent", 3, (5, 4)), StateShape(1, "conv", 2, (7,)))
    arena = torch.zeros(12, 160, dtype=torch.bfloat16)  # blocks of 320 bytes
    states = StateArena(shapes, arena)
    assert states.blocks == 3
    table = StateTable(torch.tensor([[7, 2, 5], [0, 11, 3]]), torch.tensor([1, 1]))
    values = {
        (index, sequence): torch.randn(shape.parts, *shape.shape)
        for index, shape in enumerate(shapes)
        for sequence in range(2)
    }
    for (index, sequence), value in values.items():
        states.write(table, index, sequence, value)
    for (index, sequence), value in values.items():
        found = states.read(table, index, sequence)
        assert found is not None
        assert torch.equal(found, value)
        shape = shapes[index]
        first = states.offsets(table, index)[sequence]
        for part in range(shape.parts):
            assert torch.equal(states.flat[first[part] : first[part] + shape.part_elements], value[part].flatten())
    assert not arena[[1, 4, 6, 8, 9, 10]].any(), "blocks of others are untouched"


def test_a_new_sequence_starts_from_zeros() -> None:
    states = StateArena((StateShape(0, "conv", 1, (2, 3)),), torch.ones(2, 32))
    assert states.read(StateTable(torch.tensor([[1]]), torch.tensor([0])), 0, 0) is None
