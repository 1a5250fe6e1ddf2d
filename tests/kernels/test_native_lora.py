"""The LoRA delta of native products, on every instruction set of this machine, against float64."""

from collections.abc import Iterator
from itertools import groupby

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from lorikeet.core.plan import KernelForm
from lorikeet.kernels.interface import GroupProduct
from lorikeet.kernels.lora import LoraBatch, LoraDelta, LoraSegment, LoraTarget, LoraTargets
from lorikeet.kernels.native import NativeKernels, load_library, supported_instruction_sets
from lorikeet.models.transformers_experts import grouped_rows
from tests.kernels.exactness import check_error
from tests.kernels.lora_cases import LAYER, Case, cases, dense, redrawn, weights

pytestmark = pytest.mark.skipif(not supported_instruction_sets(), reason="the native module was not built")


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


@BOTH_DTYPES
@pytest.mark.parametrize("form", [KernelForm.UNPADDED, KernelForm.PADDED])
def test_groups_of_rows_in_one_call_have_the_bits_of_one_call_each(
    instruction_set: str, dtype: torch.dtype, form: KernelForm
) -> None:
    """Groups without rows, rows without an adapter, adapters in several groups, a group that no adapter changes."""
    kernels = NativeKernels(instruction_set, load_library(instruction_set))
    modules = ("q", "k", "v")
    targets = [LoraTargets(LoraTarget(module, 4, 30)) for module in modules]
    generator = torch.Generator().manual_seed(1)
    given = [(torch.randn(40, 24, generator=generator) / 5).to(dtype) for _ in modules]
    bias = torch.randn(40, generator=generator).to(dtype)
    products = [GroupProduct(kernels.pack(weight), bias if i else None, targets[i]) for i, weight in enumerate(given)]
    adapters = [
        weights(24, (LoraTarget("q", 4, 30), LoraTarget("v", 4, 30)), {"q": [3], "v": [5 * seed]}, dtype, seed)
        for seed in (1, 2)
    ]
    lora = LoraBatch([LoraSegment(0, 2, adapters[0]), LoraSegment(2, 3, adapters[1])], form)
    grouped = kernels.products_in_one_call(products, LAYER)
    assert grouped is not None
    for bounds, numbers in (
        ([0, 4, 4, 9], [0, 0, 1, -1, -1, 0, 1, 1, 1]),
        ([0, 0, 2, 3], [0, 1, 1]),
        ([0, 3, 3, 3], [1, 1, 1]),
        ([0, 1, 3, 4], [-1, -1, -1, -1]),
    ):
        x = torch.randn(bounds[-1], 24, generator=generator).to(dtype)
        found = grouped(x, grouped_rows(np.array(bounds), lora, np.array(numbers)))
        assert torch.equal(found, grouped(x, grouped_rows(np.array(bounds), lora, np.array(numbers))))
        for i, product in enumerate(products):
            start, stop = bounds[i : i + 2]
            if start == stop:
                continue
            segments = [LoraSegment(*run[:2], adapters[run[2]]) for run in runs(numbers[start:stop])]
            delta = LoraDelta(LoraBatch(segments, form), LAYER, targets[i]) if segments else None
            expected = kernels.linear(x[start:stop], product.weight, product.bias, delta)
            assert torch.equal(found[start:stop], expected)
        plain = grouped(x, grouped_rows(np.array(bounds), None, None))
        first = next(i for i in range(3) if bounds[i] < bounds[i + 1])
        expected = kernels.linear(x[: bounds[first + 1]], products[first].weight, products[first].bias)
        assert torch.equal(plain[: bounds[first + 1]], expected)


def runs(numbers: list[int]) -> list[tuple[int, int, int]]:
    """Return start, stop and number of each run of equal numbers that are not negative."""
    found = []
    start = 0
    for number, members in groupby(numbers):
        stop = start + len(list(members))
        if number >= 0:
            found.append((start, stop, number))
        start = stop
    return found


def test_einsums_are_added_to_the_native_product(instruction_set: str) -> None:
    targets = (LoraTarget("q", 0, 10), LoraTarget("k", 10, 10))
    adapters = [weights(16, targets, {"q": [3], "k": [4]}, torch.float32, seed) for seed in (1, 2)]
    segments = [(0, 2, adapters[0]), (3, 4, adapters[1])]
    case = Case(targets, segments, torch.randn(4, 16), torch.randn(20, 16))
    by_einsum = run(case, instruction_set, form=KernelForm.EINSUM)
    torch.testing.assert_close(by_einsum, run(case, instruction_set))
