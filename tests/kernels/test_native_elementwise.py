"""Norm, rotary embedding, KV store and gating against fp64, by the error that torch makes in the same dtype."""

from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from lorikeet.kernels.native import load_library, supported_instruction_sets
from tests.kernels.elementwise_cases import REFERENCE, ExactNorms, Heads, head_norms, kinds_of_pairs, random
from tests.kernels.exactness import check_error
from tests.kernels.linear_cases import DTYPES, kernels

instruction_sets = pytest.mark.parametrize("instruction_set", supported_instruction_sets())
dtypes = st.sampled_from(DTYPES)
rows = st.one_of(st.integers(1, 9), st.just(64))
gates = st.sampled_from(["silu_mul", "gelu_mul"])


@pytest.mark.slow
@instruction_sets
@given(rows, st.one_of(st.integers(1, 70), st.just(1000)), st.booleans(), st.sampled_from([0.0, 1.0]), dtypes)
def test_add_norm(instruction_set: str, rows: int, hidden: int, added: bool, offset: float, dtype: torch.dtype) -> None:
    native = kernels(instruction_set)

    def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        x = random(rows, hidden, dtype=dtype, seed=3 * seed)
        weight = random(hidden, dtype=dtype, seed=3 * seed + 1)
        delta = random(rows, hidden, dtype=dtype, seed=3 * seed + 2) if added else None
        sums = {name: x.clone() for name in ("native", "torch")}
        found = native.add_norm(sums["native"], delta, weight, 1e-5, offset)
        by_torch = REFERENCE.add_norm(sums["torch"], delta, weight, 1e-5, offset)
        assert torch.equal(sums["native"], sums["torch"])
        wide = sums["torch"].double()
        normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return found, by_torch, normed * (weight.double() + offset)

    check_error("add_norm", draw)


@pytest.mark.slow
@instruction_sets
@given(rows, st.one_of(st.integers(1, 70), st.just(1536)), gates, dtypes)
def test_gates(instruction_set: str, rows: int, columns: int, gate: str, dtype: torch.dtype) -> None:
    by_torch = getattr(REFERENCE, gate)
    native = getattr(kernels(instruction_set), gate)

    def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        gate_up = random(rows, 2 * columns, dtype=dtype, seed=seed) * 4
        return native(gate_up), by_torch(gate_up), by_torch(gate_up.double())

    check_error(gate, draw)


@instruction_sets
@pytest.mark.parametrize("gate", ["silu_mul", "gelu_mul"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_of_large_numbers_infinities_and_nan(instruction_set: str, gate: str, dtype: torch.dtype) -> None:
    values = torch.tensor([-torch.inf, -1e30, -200.0, -90.0, 0.0, 90.0, 1e30, torch.inf, torch.nan], dtype=dtype)
    pairs = torch.cat((values, torch.ones_like(values)))[None]
    found, expected = (getattr(each, gate)(pairs)[0] for each in (kernels(instruction_set), REFERENCE))
    torch.testing.assert_close(found[1:8], expected[1:8])
    assert found[8].isnan()


@instruction_sets
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_may_be_written_over_its_input(instruction_set: str, dtype: torch.dtype) -> None:
    """What attention and MLP give is normalised in place."""
    library = load_library(instruction_set)
    x = random(5, 70, dtype=dtype)
    weight = random(70, dtype=dtype, seed=1)
    expected = kernels(instruction_set).add_norm(x.clone(), None, weight, 1e-5, 1.0)
    address = x.data_ptr()
    library.lorikeet_add_norm(address, None, weight.data_ptr(), address, 5, 70, 1e-5, 1.0, x.element_size(), 2)
    assert torch.equal(x, expected)


@pytest.mark.slow
@instruction_sets
@given(
    rows, st.integers(1, 4), st.integers(1, 3), st.one_of(st.integers(1, 20), st.sampled_from([32, 64])), head_norms,
    kinds_of_pairs, dtypes,
)  # fmt: skip
def test_rotary_store(
    instruction_set: str, rows: int, group: int, kv_heads: int, half: int, norms: str, pairs: str, dtype: torch.dtype
) -> None:
    native = kernels(instruction_set)

    def draw(seed: int, part: int) -> tuple[Tensor, Tensor, Tensor]:
        heads = Heads(rows, group * kv_heads, kv_heads, 2 * half, norms, pairs, dtype, seed)
        found = heads.run(native, dtype)  # type: ignore[arg-type]
        return found[part], heads.run(REFERENCE, dtype)[part], heads.run(ExactNorms(), torch.float64)[part]

    for part, name in enumerate(("rotary", "store_kv")):
        check_error(name, partial(draw, part=part))
