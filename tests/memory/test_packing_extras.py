"""What is not low rank lies in an adapter's blocks behind A and B, and is read back as it was written."""

import numpy as np
import pytest
import torch

from lorikeet.core.adapter import AdapterExtra
from lorikeet.memory.adapter_blocks import AdapterLayout
from lorikeet.memory.packing import pack, write_pieces
from tests.adapters.builders import HIDDEN, LAYERS, geometry

ELEMENTS = 200
EXTRAS = (
    AdapterExtra("magnitude", "q", HIDDEN, (1,) * LAYERS),
    AdapterExtra("vector", "norm.weight", HIDDEN, (1, 0, 0)),
    AdapterExtra("weight", "head", HIDDEN, (37, 0, 0)),
    AdapterExtra("rows", "embedding", HIDDEN, (2, 0, 0), (3, 9)),
)


def test_extras_come_back_from_scattered_blocks() -> None:
    base, generator = geometry(), np.random.default_rng(0)
    packing = pack({"q": (0, 3, 0)}, base, ELEMENTS, EXTRAS)
    matrices = {
        (number, layer): generator.normal(size=(rows, extra.columns)).astype(np.float32)
        for number, extra in enumerate(EXTRAS)
        for layer, rows in enumerate(extra.rows)
        if rows
    }
    low_rank = generator.normal(size=(3, HIDDEN)).astype(np.float32)
    arena = np.full((2 * packing.blocks, ELEMENTS), np.nan, np.float32)
    blocks = list(range(2 * packing.blocks - 1, 0, -2))
    extras = (
        (*key, lambda first, count, matrix=matrix: matrix[first : first + count]) for key, matrix in matrices.items()
    )
    written = list(write_pieces([(1, "q", low_rank, low_rank)], packing, blocks, arena, extras))
    assert written == list(range(packing.blocks))

    weights = AdapterLayout(packing, base, EXTRAS).weights(blocks, torch.from_numpy(arena))
    assert weights.extras is not None
    for (number, layer), matrix in matrices.items():
        found = weights.extras.get(EXTRAS[number].kind, layer, EXTRAS[number].module)
        assert found is not None
        assert torch.equal(torch.cat(found.pieces), torch.from_numpy(matrix))
        assert found.tokens == EXTRAS[number].tokens
        some = torch.tensor([len(matrix) - 1, 0])
        assert torch.equal(found.rows_of(some), torch.from_numpy(matrix)[some])
    assert torch.equal(weights.pieces[1, "q"][0][0], torch.from_numpy(low_rank))
    assert np.isnan(arena[::2]).all(), "written to a block of another"
    used = sum(matrix.size for matrix in matrices.values()) + 2 * low_rank.size
    assert packing.used_elements == used


def test_an_adapter_without_low_rank_matrices_takes_blocks() -> None:
    assert pack({}, geometry(), ELEMENTS, EXTRAS[1:2]).blocks == 1


def test_a_row_must_fit_a_block() -> None:
    with pytest.raises(ValueError, match="magnitude of q has 32 columns"):
        pack({}, geometry(), 31, EXTRAS[:1])
