"""The native kernels of layers with a state, against fp64, by the error that torch makes in the same dtype."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from lorikeet.kernels import states as in_torch
from lorikeet.kernels.native import supported_instruction_sets
from lorikeet.kernels.states import ANY_STEP
from tests.kernels.elementwise_cases import REFERENCE, random
from tests.kernels.exactness import check_error
from tests.kernels.linear_cases import DTYPES, kernels
from tests.kernels.state_cases import Convolution, Heads, Recurrence, Sequences, heads, sequences

instruction_sets = pytest.mark.parametrize("instruction_set", supported_instruction_sets())
dtypes = st.sampled_from(DTYPES)


@pytest.mark.slow
@instruction_sets
@given(heads, sequences(), dtypes)
def test_recurrences(instruction_set: str, shape: Heads, sequences: Sequences, dtype: torch.dtype) -> None:
    native = kernels(instruction_set)
    kept = slice(1, None)

    def draw(seed: int, part: int) -> tuple[Tensor, Tensor, Tensor]:
        case = Recurrence(shape, sequences, dtype, seed)
        found, by_torch, exact = (each[part] for each in (case.run(native), case.run(REFERENCE), case.exact()))
        return (found, by_torch, exact) if part == 0 else (found[kept], by_torch[kept], exact[kept])

    check_error("recurrence", lambda seed: draw(seed, 0))
    check_error("state", lambda seed: draw(seed, 1))


@pytest.mark.slow
@instruction_sets
@given(st.sampled_from([1, 5, 16, 33, 100]), st.integers(2, 4), sequences(), st.booleans(), st.booleans(), dtypes)
def test_convolutions(
    instruction_set: str,
    channels: int,
    taps: int,
    sequences: Sequences,
    has_bias: bool,
    has_silu: bool,
    dtype: torch.dtype,
) -> None:
    native = kernels(instruction_set)

    def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        case = Convolution(channels, taps, sequences, dtype, seed, has_bias=has_bias)
        exact, tails = case.exact(has_silu=has_silu)
        found, ours = case.run(native, has_silu=has_silu)
        torch.testing.assert_close(ours, tails, atol=0, rtol=0, equal_nan=True)
        return found, case.run(REFERENCE, has_silu=has_silu)[0], exact

    check_error("causal_conv", draw)


@pytest.mark.slow
@instruction_sets
@given(st.sampled_from([1, 9, 64]), st.sampled_from([(1, 16), (3, 40), (1, 129)]), st.booleans(), st.booleans(), dtypes)
def test_gated_norms(
    instruction_set: str, rows: int, groups: tuple[int, int], is_shared: bool, is_norm_first: bool, dtype: torch.dtype
) -> None:
    native = kernels(instruction_set)
    count, group = groups

    def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        x, gate = random(rows, 2 * count * group, dtype=dtype, seed=2 * seed).chunk(2, dim=1)
        weight = random(group if is_shared else count * group, dtype=dtype, seed=2 * seed + 1)
        found, by_torch = (
            backend.gated_norm(x, gate, weight, 1e-5, group, is_norm_first=is_norm_first)
            for backend in (native, REFERENCE)
        )
        wide = (each.double() for each in (x, gate, weight))
        return found, by_torch, in_torch.gated_norm(*wide, 1e-5, group, is_norm_first=is_norm_first)

    check_error("gated_norm", draw)


@instruction_sets
@given(
    st.sampled_from([1, 9, 130]), st.sampled_from([1, 16, 40]), st.sampled_from([None, ANY_STEP, (0.5, 9.0)]), dtypes
)
def test_gates_of_recurrences(
    instruction_set: str, rows: int, heads: int, limits: tuple[float, float] | None, dtype: torch.dtype
) -> None:
    native = kernels(instruction_set)

    def draw(seed: int, part: int) -> tuple[Tensor, Tensor, Tensor]:
        # Large values, too: softplus is then the value itself.
        b, a = (random(rows, 2 * heads + 3, dtype=dtype, seed=2 * seed) * 12)[:, 3:].split(heads, dim=1)
        rates, bias = random(2, heads, dtype=torch.float32, seed=2 * seed + 1)
        is_delta = limits is None
        given = (b if is_delta else None, a, rates, bias)
        between = limits or ANY_STEP
        found, by_torch = (backend.recurrence_gates(*given, between)[part] for backend in (native, REFERENCE))
        wide = (None if each is None else each.double() for each in given)
        return found, by_torch, in_torch.recurrence_gates(*wide, between)[part]

    check_error("decay", lambda seed: draw(seed, 0))
    check_error("beta", lambda seed: draw(seed, 1))


@instruction_sets
@given(st.sampled_from([1, 9, 64]), st.sampled_from([1, 40, 256]), dtypes)
def test_products_with_a_sigmoid(instruction_set: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    native = kernels(instruction_set)

    def draw(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        x, gate = random(2, rows, columns, dtype=dtype, seed=seed) * 4
        exact = in_torch.sigmoid_mul(x.double(), gate.double())
        return native.sigmoid_mul(x, gate), REFERENCE.sigmoid_mul(x, gate), exact

    check_error("sigmoid_mul", draw)


@instruction_sets
@pytest.mark.parametrize("is_delta", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [1, 2, 30, 64])
def test_states_and_outputs_do_not_depend_on_where_a_prompt_is_cut(
    instruction_set: str, cut: int, dtype: torch.dtype, is_delta: bool
) -> None:
    native = kernels(instruction_set)
    case = Recurrence(Heads(2, 2, 32, 70, is_delta=is_delta, has_skip=True), Sequences((65,), (False,)), dtype, 4)
    inputs = (case.mixed, case.decay, case.beta)
    out, states = case.run(native)
    found = []
    for rows, is_resumed in ((slice(0, cut), False), (slice(cut, 65), True)):
        case.mixed, case.decay, case.beta = (each[rows] for each in inputs)
        case.sequences = Sequences((len(case.mixed),), (is_resumed,))
        outputs, case.states = case.run(native)
        found.append(outputs)
    assert torch.equal(torch.cat(found), out)
    assert torch.equal(case.states[1], states[1])
