"""What an adapter adds to q, k and v of one layer, from weights on the host."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lorikeet.core.geometry import ModelGeometry
from lorikeet.kernels.base import LoraPieces, LoraTargets
from lorikeet.models.weights import lora_targets


def host_targets(geometry: ModelGeometry) -> LoraTargets:
    """Return the modules that the host computes, and their columns in y."""
    return lora_targets(geometry)["qkv"]


def write_delta(x: Tensor, pieces: Sequence[LoraPieces], layer: int, targets: LoraTargets, y: Tensor) -> None:
    """Write ``x Aᵀ Bᵀᵀ`` of each target into its columns of ``y``, zeros where the adapter leaves it alone.

    A is whole on every rank, as q, k and v are split by their outputs alone; so ``x Aᵀ`` is computed once for all.

    Workers call this for their slices, and a rank calls it for slices of workers that it has lost. Sums are in fp32;
    each result is rounded once.

    Args:
        x: ``[rows, in]``.
        pieces: of each rank, weights where they lie.
        layer: of the model.
        targets: see :func:`host_targets`.
        y: ``[ranks, rows, out]``, overwritten.
    """
    wide = x.float().numpy()  # numpy multiplies few rows several times as fast as torch does, and many as fast
    for module, column, outputs in targets.each:
        columns = y[:, :, column : column + outputs]
        inner = [wide @ a.float().numpy().T for a, _ in pieces[0].get((layer, module), ())]
        if not inner:
            columns.zero_()
            continue
        for of_rank, its_columns in zip(pieces, columns, strict=True):
            total, *others = (u @ bt.float().numpy() for u, (_, bt) in zip(inner, of_rank[layer, module], strict=True))
            for other in others:
                total += other
            its_columns.copy_(torch.from_numpy(total))
