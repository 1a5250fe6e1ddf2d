"""Allocates large tensors in host memory, on huge pages where the system provides them."""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

_SLAB_BYTES = 64 * 2**20
_ALIGNMENT_BYTES = 64


def allocate(elements: int, dtype: torch.dtype) -> Tensor:
    """Return zeros ``[elements]``.

    The system provides the memory when it is first written.

    Huge pages of 2 MiB need fewer page faults and fewer address translations.
    """
    # The mapping is private, since Linux gives shared anonymous memory huge pages only if the whole machine is set up
    # so.
    memory = mmap.mmap(-1, elements * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # The Linux kernel has no huge pages.
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=elements)


class Slabs:
    """Allocates tensors that live as long as the model from large slabs. Successive tensors are adjacent."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)

    def allocate(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return zeros ``[elements]``, aligned to a cache line."""
        size_bytes = elements * dtype.itemsize
        padded_bytes = -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if padded_bytes > len(self._slab):
            self._slab = allocate(max(padded_bytes, _SLAB_BYTES), torch.uint8)
        piece = self._slab[:size_bytes]
        self._slab = self._slab[padded_bytes:]
        return piece.view(dtype)
