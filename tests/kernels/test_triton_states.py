"""The Triton kernels of layers with a state, interpreted or on a GPU, against fp64, by the error of torch."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from lorikeet.kernels import states as in_torch
from tests.kernels.elementwise_cases import REFERENCE, random
from tests.kernels.exactness import check_error
from tests.kernels.state_cases import Convolution, Heads, Recurrence, Sequences, sequences
from tests.kernels.triton_cases import FEW
from tests.support.interpreter import round_to_nearest, spare_needless_work
from tests.support.on_gpu import triton_kernels

round_to_nearest()
spare_needless_work()
TRITON = triton_kernels()
dtypes = st.sampled_from((torch.bfloat16, torch.float32))
some_heads = st.builds(
    Heads,
    st.just(2),
    st.integers(1, 2),
    st.sampled_from([16, 40]),
    st.sampled_from([16, 40]),
    st.booleans(),
    st.booleans(),
)
few_sequences = sequences(st.one_of(st.integers(1, 3), st.sampled_from([31, 32, 33, 70])), most=2)


@pytest.mark.slow
@FEW
@given(some_heads, few_sequences, dtypes)
def test_recurrences(shape: Heads, sequences: Sequences, dtype: torch.dtype) -> None:
    def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        case = Recurrence(shape, sequences, dtype, seed)
        found, states = case.run(TRITON)
        exact, right = case.exact()
        torch.testing.assert_close(states[1:].double(), right[1:], atol=1e-5, rtol=1e-5)
        return found, case.run(REFERENCE)[0], exact

    check_error("triton recurrence", draw)


@FEW
@given(st.sampled_from([33, 130]), st.integers(2, 4), few_sequences, st.booleans(), st.booleans(), dtypes)
def test_convolutions(
    channels: int, taps: int, sequences: Sequences, has_bias: bool, has_silu: bool, dtype: torch.dtype
) -> None:
    def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        case = Convolution(channels, taps, sequences, dtype, seed, has_bias=has_bias)
        exact, tails = case.exact(has_silu=has_silu)
        found, ours = case.run(TRITON, has_silu=has_silu)
        torch.testing.assert_close(ours, tails, atol=0, rtol=0, equal_nan=True)
        return found, case.run(REFERENCE, has_silu=has_silu)[0], exact

    check_error("triton causal_conv", draw)


@FEW
@given(st.integers(1, 5), st.sampled_from([(1, 16), (3, 40)]), st.booleans(), st.booleans(), dtypes)
def test_gated_norms(
    rows: int, groups: tuple[int, int], is_shared: bool, is_norm_first: bool, dtype: torch.dtype
) -> None:
    count, group = groups

    def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        x, gate = random(rows, 2 * count * group, dtype=dtype, seed=2 * seed).chunk(2, dim=1)
        weight = random(group if is_shared else count * group, dtype=dtype, seed=2 * seed + 1)
        found, by_torch = (
            backend.gated_norm(x, gate, weight, 1e-5, group, is_norm_first=is_norm_first)
            for backend in (TRITON, REFERENCE)
        )
        wide = (each.double() for each in (x, gate, weight))
        return found, by_torch, in_torch.gated_norm(*wide, 1e-5, group, is_norm_first=is_norm_first)

    check_error("triton gated_norm", draw)
