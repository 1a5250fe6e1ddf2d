"""fast.5: `unpadded` costs the sum of the ranks in a batch, `padded` the largest for each of its adapters."""

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.accept.inprocess import THREADS, default_kernels
from benchmarks.accept.lines import Result, line
from benchmarks.accept.models import default_model
from benchmarks.accept.offline import interval_words
from benchmarks.accept.runs import StoredRuns
from lorikeet.bench.statistics import median_interval
from lorikeet.bench.synthetic import ATTENTION
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import BlockId
from lorikeet.core.plan import KernelForm
from lorikeet.kernels import huge_pages
from lorikeet.kernels.base import (
    Kernels,
    LoraBatch,
    LoraDelta,
    LoraSegment,
    LoraTarget,
    LoraTargets,
    LoraWeights,
    Weight,
)
from lorikeet.memory.adapter_blocks import AdapterLayout
from lorikeet.memory.packing import pack
from lorikeet.models.config import read_model_config

ROUNDS = 9
WITHIN = 0.10
EQUAL, LARGE, MIXED = (16,) * 8, (64,) * 8, (8,) * 6 + (16, 64)
"""Ranks of the adapters in a batch of eight decodes. EQUAL and MIXED have the same sum, LARGE and MIXED the same
largest."""
COLD_BYTES = 512 * 2**20
"""At least so much is read before a batch's adapters come again, many times the largest cache."""
BLOCK_TOKENS = 16
_STD = 0.02


@line(
    "fast.5",
    title="Eight decodes of ranks 6 × 8, 16, 64 beside eight of one rank",
    bound=f"unpadded within {WITHIN:.0%} of eight of rank 16, padded within {WITHIN:.0%} of eight of rank 64",
)
def run(runs: StoredRuns) -> Result:
    """Time what LoRA adds to the products of all layers, weights not in any cache, in turns."""
    seconds = runs.get("kernel", _measure)["seconds"]
    unpadded = _ratios(seconds["unpadded mixed"], seconds["unpadded 8 × 16"])
    padded = _ratios(seconds["padded mixed"], seconds["unpadded 8 × 64"])
    failures = [
        f"{name} takes {statistics.median(ratios):.2f} × {other}"
        for name, ratios, other in (
            ("unpadded", unpadded, "eight of rank 16"),
            ("padded", padded, "eight of rank 64"),
        )
        if abs(statistics.median(ratios) - 1) > WITHIN
    ]
    return Result(
        figure={
            "unpadded_to_8x16": statistics.median(unpadded),
            "padded_to_8x64": statistics.median(padded),
            "padded_interval": interval_words(median_interval(padded)),
            **{f"{name} ms": statistics.median(times) * 1e3 for name, times in seconds.items()},
        },
        interval=median_interval(unpadded),
        passed=not failures,
        cause="; ".join(failures),
        notes=f"products of q, k, v, o of all layers with adapters less the same without, in pairs; adapters in pool "
        f"blocks, {THREADS} threads, {ROUNDS} rounds in turns over adapters of {COLD_BYTES / 2**20:.0f} MiB for each "
        "batch; interval of unpadded",
    )


def _ratios(mine: Sequence[float], others: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(mine, others, strict=True)]


def _measure() -> dict[str, Any]:
    geometry = read_model_config(default_model()).geometry(2)
    kernels = default_kernels()
    kernels.threads = THREADS
    products = Products(kernels, geometry)
    batches = {
        "unpadded mixed": _batches(MIXED, geometry, KernelForm.UNPADDED),
        "unpadded 8 × 16": _batches(EQUAL, geometry, KernelForm.UNPADDED),
        "padded mixed": _batches(MIXED, geometry, KernelForm.PADDED),
        "unpadded 8 × 64": _batches(LARGE, geometry, KernelForm.UNPADDED),
    }
    seconds: dict[str, list[float]] = {name: [] for name in batches}
    for turn in range(ROUNDS + 1):
        for name in batches if turn % 2 else reversed(batches):
            taken = [products.added_s(batch, adapters_first=bool(i % 2)) for i, batch in enumerate(batches[name])]
            if turn:  # the first one warms up
                seconds[name].append(statistics.median(taken))
    return {"seconds": seconds}


def _batches(ranks: Sequence[int], geometry: ModelGeometry, form: KernelForm) -> list[LoraBatch]:
    """Return batches of one row for each rank, each of adapters of its own, of ``COLD_BYTES`` together."""
    one_bytes = sum(_pack(rank, geometry).used_elements for rank in ranks) * geometry.dtype_bytes
    return [
        LoraBatch([LoraSegment(row, row + 1, _adapter(rank, geometry)) for row, rank in enumerate(ranks)], form)
        for _ in range(-(-COLD_BYTES // one_bytes))
    ]


def _adapter(rank: int, geometry: ModelGeometry) -> LoraWeights:
    """Return random weights in blocks of the pool's size, scattered; in memory of the engine's kind."""
    packing = _pack(rank, geometry)
    block_elements = geometry.block_elements(BLOCK_TOKENS)
    arena = huge_pages.allocate(packing.blocks * block_elements, torch.bfloat16).normal_(std=_STD)
    arena = arena.view(packing.blocks, block_elements)
    blocks = [BlockId(block) for block in random.Random(rank).sample(range(packing.blocks), packing.blocks)]
    return AdapterLayout(packing, geometry).weights(blocks, arena)


def _pack(rank: int, geometry: ModelGeometry) -> Any:
    return pack(dict.fromkeys(ATTENTION, (rank,) * geometry.layers), geometry, geometry.block_elements(BLOCK_TOKENS))


class Products:
    """The products of a step that read adapters, with random weights of their own on every layer.

    Args:
        kernels: compute.
        geometry: of the model.
    """

    def __init__(self, kernels: Kernels, geometry: ModelGeometry) -> None:
        q, k, v, o = (geometry.modules[module] for module in ("q", "k", "v", "o"))
        fused = q.out_features + k.out_features + v.out_features
        self._kernels = kernels
        self._layers = [
            (_weight(kernels, fused, q.in_features), _weight(kernels, o.out_features, o.in_features))
            for _ in range(geometry.layers)
        ]
        self._qkv = LoraTargets(
            LoraTarget("q", 0, q.out_features),
            LoraTarget("k", q.out_features, k.out_features),
            LoraTarget("v", q.out_features + k.out_features, v.out_features),
        )
        self._o = LoraTargets(LoraTarget("o", 0, o.out_features))
        self._inputs = q.in_features, o.in_features

    def added_s(self, batch: LoraBatch, *, adapters_first: bool) -> float:
        """Return how many seconds longer a step's products take with adapters, a row each, than without."""
        seconds = {adapted: self._seconds(batch, adapted) for adapted in (adapters_first, not adapters_first)}
        return seconds[True] - seconds[False]

    def _seconds(self, batch: LoraBatch, adapted: bool) -> float:
        x, mixed = (torch.ones(len(batch.segments), inputs, dtype=torch.bfloat16) for inputs in self._inputs)
        start_s = time.perf_counter()
        for layer, (qkv, o) in enumerate(self._layers):
            self._kernels.linear(x, qkv, None, LoraDelta(batch, layer, self._qkv) if adapted else None)
            self._kernels.linear(mixed, o, None, LoraDelta(batch, layer, self._o) if adapted else None)
        return time.perf_counter() - start_s


def _weight(kernels: Kernels, outputs: int, inputs: int) -> Weight:
    return kernels.pack(torch.empty(outputs, inputs, dtype=torch.bfloat16).normal_(std=_STD))
