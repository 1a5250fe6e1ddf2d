"""Pieces of slabs are zero, aligned, and nobody else's."""

import torch

from lorikeet.kernels.huge_pages import Slabs


def test_pieces_are_zero_aligned_and_do_not_overlap() -> None:
    slabs = Slabs()
    sizes = [3, 100, 40 * 2**20, 5, 0, 70 * 2**20, 1]
    pieces = [slabs.allocate(size, torch.bfloat16) for size in sizes]
    for number, piece in enumerate(pieces, start=1):
        assert not piece.any()
        piece[:100] = number
    assert [len(piece) for piece in pieces] == sizes
    assert all(piece.data_ptr() % 64 == 0 for piece in pieces if len(piece))
    assert all((piece[:100] == number).all() for number, piece in enumerate(pieces, start=1))
