"""Adapters as codes of 8 bits: the error of the codes, and of the native kernels, against float64."""

from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from lorikeet.adapters.numbers import to_codes
from lorikeet.core.geometry import ModelGeometry, ModuleShape
from lorikeet.core.plan import KernelForm
from lorikeet.kernels.lora import LoraBatch, LoraDelta, LoraSegment, LoraTarget, LoraTargets, LoraWeights
from lorikeet.kernels.native import NativeKernels, load_library, supported_instruction_sets
from lorikeet.kernels.reference import ReferenceKernels
from lorikeet.memory.adapter_blocks import AdapterLayout
from lorikeet.memory.packing import pack, write_pieces
from tests.kernels.exactness import check_error

Exact = dict[str, tuple[Tensor, Tensor]]
Segments = list[tuple[int, int, LoraWeights]]

KEPT = {torch.bfloat16: torch.uint16, torch.float32: torch.float32}
SETS = pytest.mark.parametrize("instruction_set", supported_instruction_sets())
BOTH_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
SETTINGS = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Leave torch as many threads as it had: a backend sets both."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def coded(
    shapes: dict[str, ModuleShape], ranks: dict[str, int], block_rows: int, dtype: torch.dtype, seed: int
) -> tuple[LoraWeights, Exact]:
    """Return a random adapter of two layers in blocks, as codes, and on its last layer the numbers that they mean."""
    geometry = ModelGeometry(2, 1, 1, shapes, dtype.itemsize, lora_bits=8)
    by_layer = {module: (1, rank) for module, rank in ranks.items()}
    packing = pack(by_layer, geometry, block_rows * max(map(geometry.row_elements, shapes)))
    generator = np.random.default_rng(seed)
    written = []
    exact = {}
    for layer in range(2):
        for module, shape in shapes.items():
            if rank := by_layer.get(module, (0, 0))[layer]:
                a = generator.standard_normal((rank, shape.in_features), np.float32) / shape.in_features**0.5
                bt = generator.standard_normal((rank, shape.out_features), np.float32) * generator.uniform(0.01, 1)
                bt = bt.astype(np.float32)
                written.append((layer, module, a, bt))
                codes, of_a = to_codes(a)
                other, of_b = to_codes(bt)
                scaled = other * (of_a * of_b).astype(np.float64)[:, None]
                if layer == 1:
                    exact[module] = torch.from_numpy(codes.astype(np.float64)), torch.from_numpy(scaled)
    arena = torch.zeros(packing.blocks + 1, block_rows * max(map(geometry.row_elements, shapes)), dtype=dtype)
    blocks = list(range(packing.blocks, 0, -1))
    assert list(write_pieces(written, packing, blocks, arena.view(KEPT[dtype]).numpy()))
    return AdapterLayout(packing, geometry).weights(blocks, arena), exact


class Case:
    """Rows, targets, and per segment its adapter."""

    def __init__(self, draw: st.DrawFn, dtype: torch.dtype) -> None:
        inputs = draw(st.integers(1, 150) | st.sampled_from([64, 576]))
        modules = draw(st.sampled_from([("q", "k", "v"), ("down",)]))
        outputs = {module: draw(st.integers(1, 100) | st.sampled_from([64, 192])) for module in modules}
        columns = np.cumsum([draw(st.integers(0, 3)), *outputs.values()]).tolist()
        self.targets = [LoraTarget(m, c, o) for (m, o), c in zip(outputs.items(), columns, strict=False)]
        shapes = {module: ModuleShape(inputs, outputs[module]) for module in modules}
        rank = st.integers(0, 5) | st.integers(1, 70)
        self.adapters = [
            coded(shapes, {m: draw(rank) for m in modules}, draw(st.integers(1, 20)), dtype, draw(st.integers(0, 99)))
            for _ in range(draw(st.integers(1, 3)))
        ]
        self.segments: list[tuple[int, int, int]] = []
        row = 0
        for _ in range(draw(st.integers(1, 4))):
            start = row + draw(st.integers(0, 1))
            row = start + draw(st.integers(1, 3) | st.integers(1, 90))
            self.segments.append((start, row, draw(st.integers(0, len(self.adapters) - 1))))
        self.x = torch.empty(row, inputs, dtype=dtype)
        self.weight = torch.empty(columns[-1], inputs, dtype=dtype)
        self.redraw(draw(st.integers(0, 99)))

    def redraw(self, seed: int) -> None:
        """Put other numbers into rows and weight."""
        generator = torch.Generator().manual_seed(seed)
        self.x.copy_(torch.randn(self.x.shape, generator=generator))
        self.weight.copy_(torch.randn(self.weight.shape, generator=generator) / self.x.shape[1] ** 0.5)

    def run(self, kernels: NativeKernels | ReferenceKernels, form: KernelForm = KernelForm.UNPADDED) -> Tensor:
        """Return the product with what all adapters add."""
        segments = [LoraSegment(start, stop, self.adapters[i][0]) for start, stop, i in self.segments]
        targets = LoraTargets(*self.targets, modules=("q", "k", "v") if len(self.targets) > 1 else ("down",))
        return kernels.linear(self.x, kernels.pack(self.weight), None, LoraDelta(LoraBatch(segments, form), 1, targets))

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the same in dense products by torch in ``dtype``, of the numbers that the codes mean."""
        x = self.x.to(dtype)
        out = x @ self.weight.to(dtype).T
        for start, stop, i in self.segments:
            for module, column, outputs in self.targets:
                if found := self.adapters[i][1].get(module):
                    a, bt = found if dtype == torch.float64 else (found[0] * 2.0**-7, found[1] * 2.0**7)
                    out[start:stop, column : column + outputs] += x[start:stop] @ a.to(dtype).T @ bt.to(dtype)
        return out


def native(instruction_set: str, threads: int = 2) -> NativeKernels:
    """Return the kernels for an instruction set."""
    kernels = NativeKernels(instruction_set, load_library(instruction_set))
    kernels.threads = threads
    return kernels


@SETS
@BOTH_DTYPES
@SETTINGS
@given(st.data())
def test_native_error_is_at_most_twice_that_of_torch_in_the_same_dtype(
    instruction_set: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    case = Case(data.draw, dtype)
    kernels = native(instruction_set)

    def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        case.redraw(seed)
        return case.run(kernels), case.dense(dtype), case.dense(torch.float64)

    check_error("linear_lora", draw)


@SETS
@BOTH_DTYPES
@SETTINGS
@given(st.data())
def test_bits_depend_neither_on_threads_nor_on_padding(
    instruction_set: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    case = Case(data.draw, dtype)
    kernels = native(instruction_set, threads=1)
    alone = case.run(kernels)
    kernels.threads = 3
    assert torch.equal(case.run(kernels), alone)
    assert torch.equal(case.run(kernels, KernelForm.PADDED), alone)


def row_case(rows: int, rank: int = 40, inputs: int = 576) -> Case:
    """Return a case of one adapter on "down" of ``rows`` rows, in bfloat16."""
    case = Case.__new__(Case)
    shapes = {"down": ModuleShape(inputs, 100)}
    case.targets = [LoraTarget("down", 0, 100)]
    case.adapters = [coded(shapes, {"down": rank}, 20, torch.bfloat16, 3)]
    case.segments = [(0, rows, 0)]
    case.x = torch.empty(rows, inputs).bfloat16()
    case.weight = torch.empty(100, inputs).bfloat16()
    case.redraw(1)
    return case


@SETS
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_stays_so_and_spoils_no_other(instruction_set: str, bad: float) -> None:
    case = row_case(20)
    kernels = native(instruction_set)
    before = case.run(kernels)
    case.x[5, 70] = bad
    found = case.run(kernels)
    others = torch.arange(20) != 5
    assert not found[5].isfinite().any()
    assert torch.equal(found[others], before[others])


@SETS
@pytest.mark.parametrize("rows", [1, 9, 64])
def test_rows_with_a_large_element_are_as_exact_as_others(instruction_set: str, rows: int) -> None:
    """One that is 100 times the others, as activations have."""
    kernels = native(instruction_set)
    case = row_case(rows)

    def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        case.redraw(seed)
        case.x[:, 17] *= 100
        return case.run(kernels), case.dense(torch.bfloat16), case.dense(torch.float64)

    check_error("linear_lora", draw)


@SETS
def test_a_row_of_codes_has_the_same_bits_in_any_company(instruction_set: str) -> None:
    case = row_case(64)
    kernels = native(instruction_set)
    together = case.run(kernels)
    x = case.x
    for row in (0, 8, 33, 63):
        case.x = x[row : row + 1].clone()
        case.segments = [(0, 1, 0)]
        assert torch.equal(case.run(kernels)[0], together[row])


@BOTH_DTYPES
@SETTINGS
@given(st.data())
def test_the_reference_and_einsums_compute_the_same_numbers(dtype: torch.dtype, data: st.DataObject) -> None:
    case = Case(data.draw, dtype)
    for form in (KernelForm.UNPADDED, KernelForm.EINSUM):

        def draw(seed: int, form: KernelForm = form) -> tuple[Tensor, Tensor, Tensor]:
            case.redraw(seed)
            return case.run(ReferenceKernels(), form), case.dense(dtype), case.dense(torch.float64)

        check_error("linear_lora", draw)


def test_codes_are_the_nearest() -> None:
    values = np.random.default_rng(0).standard_normal((64, 576), np.float32)
    values[3] = 0
    codes, scales = to_codes(values)
    assert np.abs(codes).max(axis=1).tolist() == [0 if row == 3 else 127 for row in range(64)]
    assert (np.abs(codes * scales[:, None] - values) <= scales[:, None] * 0.5001).all()


def test_a_delta_of_codes_is_off_by_the_rounding_of_a_and_b() -> None:
    """Each rounds to 1/254 of its row's largest element: for Gaussian rows about 0.75 % of the root of the square."""
    generator = torch.Generator().manual_seed(0)
    a, bt, x = (torch.randn(*shape, generator=generator) for shape in ((32, 576), (32, 576), (256, 576)))
    delta = x @ a.T @ bt

    def rounded(values: Tensor) -> Tensor:
        codes, scales = to_codes(values.numpy())
        return torch.from_numpy(codes * scales[:, None])

    off = (x @ rounded(a).T @ rounded(bt) - delta).norm() / delta.norm()
    assert 0.008 < float(off) < 0.012
