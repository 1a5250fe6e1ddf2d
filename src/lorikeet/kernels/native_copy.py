"""Calling ``native/copy.cpp``."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor


def native_copy(library: ctypes.CDLL, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each source to its target, past the caches: for what is not read again soon.

    Args:
        library: see ``kernels.library``.
        sources, targets: contiguous, on the CPU; none overlap.

    Raises:
        RuntimeError: a pair differs in shape or dtype, or is not contiguous; nothing is copied then.
    """
    for source, target in zip(sources, targets, strict=True):
        if source.shape != target.shape or source.dtype != target.dtype:
            raise RuntimeError(
                f"{list(source.shape)} of {source.dtype} cannot be copied to {list(target.shape)} of {target.dtype}"
            )
        if not (source.is_contiguous() and target.is_contiguous()):
            raise RuntimeError("only contiguous tensors can be copied")
    addresses = ([each.data_ptr() for each in side] for side in (sources, targets))
    blocks = torch.tensor([*addresses, [source.nbytes for source in sources]], dtype=torch.int64)
    library.lorikeet_copy(blocks.data_ptr(), len(sources))
