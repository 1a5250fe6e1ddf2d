"""Cases of LoRA on linear products for the native kernels."""

from itertools import chain
from typing import NamedTuple

import hypothesis.strategies as st
import torch
from torch import Tensor

from lorikeet.kernels.lora import LoraTarget, LoraWeights

LAYERS = 2

LAYER = 1


class Case(NamedTuple):
    """A call: its weight ``[outputs, inputs]``, where the modules write, and per segment its rows and its adapter."""

    targets: tuple[LoraTarget, ...]
    segments: list[tuple[int, int, LoraWeights]]
    x: Tensor
    weight: Tensor


def weights(
    inputs: int, targets: tuple[LoraTarget, ...], pieces: dict[str, list[int]], dtype: torch.dtype, seed: int
) -> LoraWeights:
    """Return an adapter with random pieces of so many rows per module, on ``LAYER`` only."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / shape[1] ** 0.5).to(dtype)

    tensors = {
        (LAYER, target.module): tuple((draw(r, inputs), draw(r, target.outputs)) for r in pieces[target.module])
        for target in targets
        if pieces.get(target.module)
    }
    return LoraWeights(tensors, LAYERS)


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype) -> Case:
    """Rows without an adapter between segments, adapters that occur twice, modules that are left alone."""
    inputs = draw(st.integers(1, 150) | st.sampled_from([32, 64, 576]))
    column = draw(st.integers(0, 3))
    targets = []
    for module in draw(st.sampled_from([("q", "k", "v"), ("gate", "up"), ("down",)])):
        targets.append(LoraTarget(module, column, draw(st.integers(1, 100) | st.sampled_from([32, 64, 192]))))
        column += targets[-1].outputs + draw(st.integers(0, 2))
    pieces = st.lists(st.integers(1, 3) | st.integers(1, 40), max_size=3)
    seed = draw(st.integers(0, 2**31))
    adapters = [
        weights(inputs, tuple(targets), {target.module: draw(pieces) for target in targets}, dtype, seed + i)
        for i in range(draw(st.integers(1, 3)))
    ]
    row = 0
    segments = []
    for _ in range(draw(st.integers(0, 5))):
        start = row + draw(st.integers(0, 2))
        row = start + draw(st.integers(1, 8) | st.integers(1, 150))
        segments.append((start, row, draw(st.sampled_from(adapters))))
    rows = row + draw(st.integers(0, 2))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs + 3, generator=generator).to(dtype)[:, :inputs]
    weight = torch.randn(column + 1, inputs, generator=generator) / inputs**0.5
    return Case(tuple(targets), segments, x, weight.to(dtype))


def redrawn(case: Case, seed: int) -> Case:
    """Return the same call on other random values."""
    generator = torch.Generator().manual_seed(seed)
    case.x.copy_(torch.randn(case.x.shape, generator=generator))
    pieces = (piece for _, _, adapter in case.segments for held in adapter.pieces.values() for piece in held)
    for tensor in (case.weight, *chain.from_iterable(pieces)):
        tensor.copy_(torch.randn(tensor.shape, generator=generator) / tensor.shape[1] ** 0.5)
    return case


def dense(case: Case, dtype: torch.dtype) -> Tensor:
    """Return the same in dense products, two per segment and module, computed by torch in ``dtype``."""
    out = case.x.to(dtype) @ case.weight.to(dtype).T
    for start, stop, adapter in case.segments:
        for module, column, outputs in case.targets:
            if pieces := adapter.pieces.get((LAYER, module)):
                a, bt = (torch.cat(parts).to(dtype) for parts in zip(*pieces, strict=True))
                out[start:stop, column : column + outputs] += case.x[start:stop].to(dtype) @ a.T @ bt
    return out
