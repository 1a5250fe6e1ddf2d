"""Calling ``native/sampling.cpp``."""

import ctypes

import torch
from torch import Tensor

from lorikeet.kernels.choose import ChoiceParameters


def native_choose(library: ctypes.CDLL, logits: Tensor, parameters: ChoiceParameters, threads: int) -> Tensor:
    """See ``kernels.choose.choose``; the same tokens but for roundings where a sum of probabilities meets top-p.

    Args:
        library: see ``kernels.library``.
        logits: bfloat16 or fp32 ``[S, vocab]`` on the CPU; rows are contiguous.
        parameters: how each row's token is chosen.
        threads: that share the rows.
    """
    rows, vocab = logits.shape
    token_ids = torch.empty(rows, dtype=torch.int64)
    library.lorikeet_choose(
        logits.data_ptr(),
        logits.stride(0),
        rows,
        vocab,
        logits.element_size(),
        parameters.temperature.data_ptr(),
        parameters.top_k.data_ptr(),
        parameters.top_p.data_ptr(),
        parameters.min_p.data_ptr(),
        parameters.seed.data_ptr(),
        parameters.position.data_ptr(),
        token_ids.data_ptr(),
        threads,
    )
    return token_ids
