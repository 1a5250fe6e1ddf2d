"""One model with one adapter on all modules, run by any number of tensor-parallel ranks."""

import sys
from pathlib import Path

import torch
from torch import Tensor

from lorikeet.kernels.lora import LoraBatch, LoraSegment, LoraWeights
from lorikeet.kernels.reference import ReferenceKernels
from lorikeet.models.config import ModelConfig, read_model_config
from lorikeet.models.decoder import Decoder
from lorikeet.models.loading import load_weights
from lorikeet.models.parallel import DistributedRankGroup, RankGroup
from tests.models.arenas import Arena

RANK = 5
PIECES = (2, 3)
"""The adapter's rank rows come in two pieces, as they do when a block ends between them."""


def adapter_factors(config: ModelConfig) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
    """Return the whole model's A ``[rank, in]`` and Bᵀ ``[rank, out]`` of each layer and module."""
    generator = torch.Generator().manual_seed(11)
    shapes = config.module_shapes()
    geometry = config.geometry(4)
    return {
        (layer, module): (
            torch.randn(RANK, shapes[module].in_features, generator=generator) * 0.2,
            torch.randn(RANK, shapes[module].out_features, generator=generator) * 0.2,
        )
        for layer in range(config.layers)
        for module in shapes
        if geometry.has_module(layer, module)
    }


def run_steps(folder: Path, group: RankGroup) -> Tensor:
    """Return all logits of a prefill beside an adapter's prefill, then of a decode of both."""
    config = read_model_config(folder)
    weights = load_weights(folder, config, torch.float32, rank=group.rank, tensor_parallel=group.size)
    decoder = Decoder(config, weights, ReferenceKernels(), group)
    arena = Arena.make(config, decoder, tensor_parallel=group.size)
    pieces = {}
    for (layer, module), (a, bt) in adapter_factors(config).items():
        shard = config.module_shard(module, group.rank, group.size)
        parts = zip(a[:, shard.inputs].split(PIECES), bt[:, shard.outputs].split(PIECES), strict=True)
        pieces[layer, module] = tuple(parts)
    adapter = LoraWeights(pieces, config.layers, tuple(config.module_shapes()))
    prefill = arena.batch(
        [("base", [5, 6, 7, 8, 9]), ("adapted", [5, 6, 7, 8])], LoraBatch([LoraSegment(5, 9, adapter)])
    )
    first = decoder.forward(prefill, arena.kv)
    decode = arena.batch([("base", [1]), ("adapted", [9])], LoraBatch([LoraSegment(1, 2, adapter)]))
    return torch.cat((first, decoder.forward(decode, arena.kv)))


def main() -> None:
    """Run one rank; rank 0 saves the logits."""
    folder, meeting, rank, size, result = sys.argv[1:]
    torch.set_num_threads(1)
    group = DistributedRankGroup(int(rank), int(size), f"file://{meeting}")
    logits = run_steps(Path(folder), group)
    same = group.broadcast(logits.clone())
    if not torch.equal(same, logits):
        raise AssertionError(f"rank {rank} has other logits than rank 0")
    if group.rank == 0:
        torch.save(logits, result)
    group.close()


if __name__ == "__main__":
    main()
