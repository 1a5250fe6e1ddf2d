"""The LoRA delta of native products, on every instruction set of this machine, against float64."""

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from lorikeet.core.plan import KernelForm
from lorikeet.kernels.lora import LoraBatch, LoraDelta, LoraSegment, LoraTarget, LoraTargets, LoraWeights
from lorikeet.kernels.native import NativeKernels, load_library, supported_instruction_sets
from tests.kernels.exactness import check_error

LAYERS = 2
LAYER = 1

pytestmark = pytest.mark.skipif(not supported_instruction_sets(), reason="the native module was not built")


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


def run(
    case: Case,
    instruction_set: str,
    threads: int = 2,
    form: KernelForm = KernelForm.UNPADDED,
    only: int | None = None,
    layer: int = LAYER,
) -> Tensor:
    """Return the product with what all segments, or one of them, add to it."""
    segments = case.segments if only is None else case.segments[only : only + 1]
    batch = LoraBatch([LoraSegment(*segment) for segment in segments], form)
    kernels = NativeKernels(instruction_set, load_library(instruction_set))
    kernels.threads = threads
    return kernels.linear(case.x, kernels.pack(case.weight), None, LoraDelta(batch, layer, LoraTargets(*case.targets)))


def product(case: Case, instruction_set: str) -> Tensor:
    """Return what the base model computes."""
    kernels = NativeKernels(instruction_set, load_library(instruction_set))
    return kernels.linear(case.x, kernels.pack(case.weight), None)


def dense(case: Case, dtype: torch.dtype) -> Tensor:
    """Return the same in dense products, two per segment and module, computed by torch in ``dtype``."""
    out = case.x.to(dtype) @ case.weight.to(dtype).T
    for start, stop, adapter in case.segments:
        for module, column, outputs in case.targets:
            if pieces := adapter.pieces.get((LAYER, module)):
                a, bt = (torch.cat(parts).to(dtype) for parts in zip(*pieces, strict=True))
                out[start:stop, column : column + outputs] += case.x[start:stop].to(dtype) @ a.T @ bt
    return out


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Leave torch as many threads as it had: a backend sets both."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=supported_instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


BOTH_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
SETTINGS = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.slow
@BOTH_DTYPES
@SETTINGS
@given(st.data())
def test_its_error_is_at_most_twice_that_of_torch_in_the_same_dtype(
    instruction_set: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    case = data.draw(cases(dtype))

    def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        again = redrawn(case, seed)
        return run(again, instruction_set), dense(again, dtype), dense(again, torch.float64)

    check_error("linear_lora", draw)


@pytest.mark.slow
@BOTH_DTYPES
@SETTINGS
@given(st.data())
def test_result_bits_do_not_depend_on_threads_or_other_segments(
    instruction_set: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    case = data.draw(cases(dtype))
    together = run(case, instruction_set)
    for threads in (1, 3):
        assert torch.equal(together, run(case, instruction_set, threads=threads))
    for i, (start, stop, _) in enumerate(case.segments):
        assert torch.equal(together[start:stop], run(case, instruction_set, only=i)[start:stop])


@pytest.mark.slow
@BOTH_DTYPES
@SETTINGS
@given(st.data())
def test_padding_changes_no_bit(instruction_set: str, dtype: torch.dtype, data: st.DataObject) -> None:
    case = data.draw(cases(dtype))
    if case.segments:
        assert torch.equal(run(case, instruction_set), run(case, instruction_set, form=KernelForm.PADDED))


def test_a_row_has_the_same_bits_alone_and_in_a_long_prefill(instruction_set: str) -> None:
    targets = (LoraTarget("q", 0, 100),)
    adapter = weights(96, targets, {"q": [20, 13]}, torch.bfloat16, 1)
    x = torch.randn(200, 96).bfloat16()
    weight = torch.randn(100, 96).bfloat16()
    all_rows = run(Case(targets, [(0, 200, adapter)], x, weight), instruction_set)
    for row in (0, 63, 64, 199):
        alone = run(Case(targets, [(0, 1, adapter)], x[row : row + 1], weight), instruction_set)
        assert torch.equal(all_rows[row], alone[0])


def test_a_row_that_overflows_leaves_the_rows_of_others_alone(instruction_set: str) -> None:
    targets = (LoraTarget("q", 0, 40),)
    adapter = weights(24, targets, {"q": [9]}, torch.float32, 1)
    x = torch.randn(3, 24)
    weight = torch.randn(40, 24)
    calm = run(Case(targets, [(0, 3, adapter)], x, weight), instruction_set)
    x[1] = torch.finfo(torch.float32).max
    wild = run(Case(targets, [(0, 3, adapter)], x, weight), instruction_set)
    assert not torch.isfinite(wild[1]).all()
    assert torch.equal(calm[[0, 2]], wild[[0, 2]])


def test_layers_and_modules_without_weights_are_the_base_models(instruction_set: str) -> None:
    targets = (LoraTarget("q", 0, 10), LoraTarget("k", 10, 10))
    adapter = weights(16, targets, {"k": [4]}, torch.float32, 1)
    case = Case(targets, [(0, 2, adapter)], torch.randn(2, 16), torch.randn(20, 16))
    base = product(case, instruction_set)
    found = run(case, instruction_set)
    assert torch.equal(found[:, :10], base[:, :10])
    assert not torch.equal(found[:, 10:], base[:, 10:])
    assert torch.equal(run(case, instruction_set, layer=LAYER - 1), base)


def test_einsums_are_added_to_the_native_product(instruction_set: str) -> None:
    targets = (LoraTarget("q", 0, 10), LoraTarget("k", 10, 10))
    adapters = [weights(16, targets, {"q": [3], "k": [4]}, torch.float32, seed) for seed in (1, 2)]
    segments = [(0, 2, adapters[0]), (3, 4, adapters[1])]
    case = Case(targets, segments, torch.randn(4, 16), torch.randn(20, 16))
    by_einsum = run(case, instruction_set, form=KernelForm.EINSUM)
    torch.testing.assert_close(by_einsum, run(case, instruction_set))
