"""What an adapter adds to q, k and v of one layer, from weights on the host."""

import torch
from torch import Tensor

from lorikeet.core.geometry import ModelGeometry
from lorikeet.kernels.base import LoraPieces, LoraTargets
from lorikeet.models.weights import lora_targets


def host_targets(geometry: ModelGeometry) -> LoraTargets:
    """Return the modules that the host computes, and their columns in y."""
    return lora_targets(geometry)["qkv"]


def write_delta(x: Tensor, pieces: LoraPieces, layer: int, targets: LoraTargets, y: Tensor) -> None:
    """Write ``x Aᵀ Bᵀᵀ`` of each target into its columns of ``y``, zeros where the adapter leaves it alone.

    Workers call this for their slices, and a rank calls it for slices of workers that it has lost. Sums are in fp32;
    each result is rounded once.

    Args:
        x: ``[rows, in]``.
        pieces: weights where they lie.
        layer: of the model.
        targets: see :func:`host_targets`.
        y: ``[rows, out]``, overwritten.
    """
    wide = x.float().numpy()  # numpy multiplies few rows several times as fast as torch does, and many as fast
    for module, column, outputs in targets.each:
        found = pieces.get((layer, module), ())
        columns = y[:, column : column + outputs]
        if not found:
            columns.zero_()
            continue
        total, *others = ((wide @ a.float().numpy().T) @ bt.float().numpy() for a, bt in found)
        for other in others:
            total += other
        columns.copy_(torch.from_numpy(total))
