"""LoRA by einsum, dLoRA's form, against the reference."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from lorikeet.kernels import reference
from lorikeet.kernels.lora import LoraBatch, LoraDelta, LoraSegment, LoraTarget, LoraTargets, LoraWeights
from lorikeet.kernels.reference import add_lora, add_lora_einsum

TARGETS = (LoraTarget("q", 1, 10), LoraTarget("k", 12, 5))


def weights(ranks: dict[str, list[int]], seed: int) -> LoraWeights:
    """Return an adapter of layer 1 with pieces of so many rows per module."""
    generator = torch.Generator().manual_seed(seed)
    pieces = {
        (1, module): tuple(
            (torch.randn(r, 12, generator=generator), torch.randn(r, outputs, generator=generator))
            for r in ranks[module]
        )
        for module, _, outputs in TARGETS
        if ranks[module]
    }
    return LoraWeights(pieces, layers=2)


ranks = st.fixed_dictionaries({target.module: st.lists(st.integers(1, 9), max_size=3) for target in TARGETS})


@given(
    st.lists(ranks, min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=5),
)
@settings(max_examples=50)
def test_einsum_form_equals_the_reference(
    adapters: list[dict[str, list[int]]], runs: list[tuple[int, int, int]]
) -> None:
    held = [weights(adapter, seed) for seed, adapter in enumerate(adapters)]
    segments = []
    row = 0
    for gap, rows, adapter in runs:  # the same adapter may occur twice, some rows have none
        segments.append(LoraSegment(row + gap, row + gap + rows, held[adapter % len(held)]))
        row += gap + rows
    torch.manual_seed(row)
    x = torch.randn(row + 1, 12)
    out = torch.randn(row + 1, 18)
    expected = out.clone()
    delta = LoraDelta(LoraBatch(segments), 1, LoraTargets(*TARGETS))
    add_lora(expected, x, delta)
    add_lora_einsum(out, x, delta)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


def test_an_adapter_that_overflows_leaves_the_rows_of_others_alone() -> None:
    large = LoraWeights({(1, "q"): ((torch.full((2, 12), 3e38), torch.ones(2, 10)),)}, layers=2)
    segments = [LoraSegment(0, 1, large), LoraSegment(1, 2, weights({"q": [4], "k": []}, 0))]
    x = torch.full((3, 12), 2.0)
    out = torch.zeros(3, 18)
    add_lora_einsum(out, x, LoraDelta(LoraBatch(segments), 1, LoraTargets(*TARGETS)))
    assert not out[0].isfinite().all()
    assert out[1:].isfinite().all()
    assert out[1].any()
    assert not out[2].any()


@pytest.mark.parametrize("layer", [0, 1])
def test_the_worked_example_of_two_adapters_on_two_rows(layer: int) -> None:
    """W is the identity; x0 = (1, 2) under A = (1, 0), B = (1, 1); x1 = (3, 4) under A = (0, 1), B = (2, 0)."""
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    first, second = (
        LoraWeights({(1, "q"): ((torch.tensor([a]), torch.tensor([bt])),)}, layers=2)
        for a, bt in (([1.0, 0.0], [1.0, 1.0]), ([0.0, 1.0], [2.0, 0.0]))
    )
    out = x.clone()
    batch = LoraBatch([LoraSegment(0, 1, first), LoraSegment(1, 2, second)])
    add_lora_einsum(out, x, LoraDelta(batch, layer, LoraTargets(LoraTarget("q", 0, 2))))
    assert out.tolist() == ([[2.0, 3.0], [11.0, 4.0]] if layer else x.tolist())


@pytest.mark.parametrize("widens", [False, True])
def test_half_precision_is_rounded_once_or_twice(widens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "SLOW_HALVES", widens)
    adapter = weights({"q": [4], "k": [3, 2]}, 0)
    half = LoraWeights(
        {key: tuple((a.bfloat16(), bt.bfloat16()) for a, bt in each) for key, each in adapter.pieces.items()}, layers=2
    )
    torch.manual_seed(0)
    x = torch.randn(5, 12).bfloat16()
    out = torch.zeros(5, 18).bfloat16()
    expected = torch.zeros(5, 18)
    whole = LoraWeights(
        {key: tuple((a.float(), bt.float()) for a, bt in each) for key, each in half.pieces.items()}, layers=2
    )
    add_lora(expected, x.float(), LoraDelta(LoraBatch([LoraSegment(1, 4, whole)]), 1, LoraTargets(*TARGETS)))
    add_lora_einsum(out, x, LoraDelta(LoraBatch([LoraSegment(1, 4, half)]), 1, LoraTargets(*TARGETS)))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, atol=0.1, rtol=0.02)
