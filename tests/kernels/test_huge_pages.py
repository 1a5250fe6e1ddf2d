"""Pieces of slabs are zero and aligned, and do not overlap."""

import mmap

import pytest
import torch

from lorikeet.kernels.huge_pages import Slabs, allocate


def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)  # no advice that there is: refused, as by such a kernel
    with pytest.raises(OSError, match="Invalid argument"):
        mmap.mmap(-1, 4096).madvise(12345)
    assert not allocate(1000, torch.float32).any()


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
