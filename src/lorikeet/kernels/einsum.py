"""LoRA as dLoRA computes it (its section on the implementation): one-hot adapter types and two einsums.

Both are written as the matrix product that each amounts to, since ``torch.einsum`` is slower on CPUs.
"""

import torch
from torch import Tensor

from lorikeet.kernels.base import LoraDelta
from lorikeet.kernels.dtypes import SLOW_HALVES


def add_lora_einsum(out: Tensor, x: Tensor, delta: LoraDelta) -> None:
    """Add to ``out`` what ``kernels.base.Kernels.linear`` adds for a delta; here every row meets every adapter.

    ``out[n] += Σ_m S[n, m] Σ_r (x[n] · A[m, r]) Bᵀ[m, r]``, where ``S [rows, adapters]`` is 1 at a row's own adapter
    and 0 elsewhere, and all adapters are padded with zeros to the largest rank of the batch. So the work is
    rows x adapters x largest rank. Where products in half precision are slow, they are made in single.
    """
    lora, layer, targets = delta
    adapters = list(dict.fromkeys(segment.weights for segment in lora.segments))
    if SLOW_HALVES and x.device.type == "cpu":
        x = x.to(torch.float32)
    types = torch.zeros(len(x), len(adapters), dtype=torch.bool, device=x.device)
    for segment in lora.segments:
        types[segment.start : segment.stop, adapters.index(segment.weights)] = True
    for module, column, outputs in targets.each:
        a = x.new_zeros(len(adapters), lora.largest_rank, x.shape[1])
        bt = x.new_zeros(len(adapters), lora.largest_rank, outputs)
        for i, weights in enumerate(adapters):
            if pieces := weights.pieces.get((layer, module)):
                for padded, parts in zip((a, bt), zip(*pieces, strict=True), strict=True):
                    rows = torch.cat(parts)
                    padded[i, : len(rows)] = rows
        inner = (x @ a.flatten(0, 1).T).unflatten(1, a.shape[:2])
        # Chosen, not multiplied by 0: an adapter on which another's row overflows would make that row NaN.
        inner = torch.where(types[:, :, None], inner, 0.0)
        out[:, column : column + outputs] += inner.flatten(1) @ bt.flatten(0, 1)
