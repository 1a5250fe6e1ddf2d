"""Layers with a state in torch, against fp64 token by token and against transformers' functions."""

import pytest
import torch
from hypothesis import given
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from lorikeet.kernels.reference import ReferenceKernels
from tests.kernels.state_cases import Convolution, Heads, Recurrence, Sequences, heads, sequences

REFERENCE = ReferenceKernels()


@pytest.mark.slow
@given(heads, sequences())
def test_recurrences_equal_the_oracle(shape: Heads, sequences: Sequences) -> None:
    case = Recurrence(shape, sequences, torch.float32, 1)
    for found, exact in zip(case.run(REFERENCE), case.exact(), strict=True):
        torch.testing.assert_close(found.double(), exact, atol=2e-5, rtol=2e-5, equal_nan=True)


@given(sequences())
def test_convolutions_equal_the_oracle(sequences: Sequences) -> None:
    case = Convolution(20, 4, sequences, torch.float32, 1, has_bias=True)
    found, tails = case.run(REFERENCE, has_silu=True)
    exact, right = case.exact(has_silu=True)
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(tails, right, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 7, 150])
def test_the_delta_rule_is_that_of_transformers(rows: int) -> None:
    case = Recurrence(Heads(2, 2, 32, 16, is_delta=True), Sequences((rows,), (True,)), torch.float32, 2)
    q, k, v = (each[None] for each in case.parts(case.mixed))
    gates = case.decay[None], case.beta[None]
    for rule in (torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule):
        right, state = rule(
            q, k, v, *gates, initial_state=case.states[1:], output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        found, states = case.run(REFERENCE)
        torch.testing.assert_close(found, right[0], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(states[1], state[0], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("rows", [7, 150])
def test_mamba_2_is_that_of_transformers(rows: int) -> None:
    shape = Heads(2, 2, 32, 16, is_delta=False, has_skip=True)
    case = Recurrence(shape, Sequences((rows,), (True,)), torch.float32, 3)
    c, b, x = (each[None] for each in case.parts(case.mixed))
    a = -torch.rand(4) - 0.1
    dt = case.beta[None]
    case.decay = case.beta * a
    states = case.states[1:].transpose(2, 3)
    right, state = mamba2_chunk_scan(
        x, dt, a, b, c, chunk_size=16, D=case.skip, initial_states=states, return_final_states=True
    )
    found, ours = case.run(REFERENCE)
    torch.testing.assert_close(found, right[0], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(ours[1].transpose(1, 2), state[0], atol=2e-5, rtol=2e-5)
