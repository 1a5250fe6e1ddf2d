"""Calling ``native/copy.cpp``."""

import ctypes
from collections.abc import Sequence

import numpy as np
from torch import Tensor


def native_copy(
    library: ctypes.CDLL,
    source: Tensor,
    source_blocks: Sequence[int],
    target: Tensor,
    target_blocks: Sequence[int],
    until_s: float,
) -> None:
    """Copy blocks of an arena to those of another, past the caches: for what is not read again soon.

    Args:
        library: see ``kernels.library``.
        source, target: ``[blocks, elements]``, contiguous, on the CPU; they do not overlap.
        source_blocks, target_blocks: which.
        until_s: time of the monotonic clock until which it gives way to every other thread.

    Raises:
        RuntimeError: the arenas or the blocks do not go together, or a block is not there; nothing is copied then.
    """
    if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        raise RuntimeError(
            f"blocks {list(source.shape[1:])} of {source.dtype} cannot be copied to {list(target.shape[1:])} of "
            f"{target.dtype}"
        )
    if not (source.is_contiguous() and target.is_contiguous()):
        raise RuntimeError("only contiguous arenas can be copied")
    if len(source_blocks) != len(target_blocks):
        raise RuntimeError(f"{len(source_blocks)} blocks cannot be copied to {len(target_blocks)}")
    blocks = np.array((source_blocks, target_blocks), dtype=np.int64)
    if blocks.size and (blocks.min() < 0 or (blocks.max(axis=1) >= (len(source), len(target))).any()):
        raise RuntimeError(f"blocks of arenas of {len(source)} and {len(target)} cannot be copied: one is not there")
    library.lorikeet_copy(
        source.data_ptr(),
        target.data_ptr(),
        source.shape[1] * source.itemsize,
        blocks.ctypes.data,
        len(source_blocks),
        until_s,
    )
