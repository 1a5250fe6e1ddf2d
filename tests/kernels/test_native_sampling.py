"""Native sampling, on every instruction set of this machine, against plain torch."""

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet.kernels.native import load_library, native_choose, supported_instruction_sets
from lorikeet.kernels.sampling import SamplingTensors, choose, gumbel_noise
from tests.kernels.choices import check_chosen
from tests.kernels.sampling_cases import parameters
from tests.support.step_counts import examples

pytestmark = pytest.mark.skipif(not supported_instruction_sets(), reason="no native library can be used here")


@pytest.fixture(params=supported_instruction_sets(), scope="module")
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return load_library(request.param)


def assert_as_reference(library: ctypes.CDLL, logits: torch.Tensor, asked: SamplingTensors) -> None:
    check_chosen(native_choose(library, logits, asked, threads=2), logits, asked)


dtypes = st.sampled_from([torch.float32, torch.bfloat16])


@pytest.mark.slow
@settings(max_examples=examples(50))
@given(
    seed=st.integers(0, 2**32),
    vocab=st.sampled_from([1, 2, 7, 15, 16, 17, 63, 64, 65, 255, 257, 1000, 4099]),
    scale=st.sampled_from([0.01, 0.5, 3.0, 10.0, 100.0]),
    whole=st.booleans(),
    masked=st.sampled_from([0.0, 0.3, 0.99]),
    dtype=dtypes,
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.3, 1.0, 1.7, 50.0]),
            st.sampled_from([0, 1, 2, 7, 50, 300, 5000]),
            st.sampled_from([1.0, 0.9999, 0.95, 0.5, 0.1, 1e-6, 0.0]),
            st.sampled_from([0.0, 1e-4, 0.05, 0.6, 1.0]),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_tokens_equal_the_reference(
    library: ctypes.CDLL,
    seed: int,
    vocab: int,
    scale: float,
    whole: bool,
    masked: float,
    dtype: torch.dtype,
    rows: list[tuple[float, int, float, float]],
) -> None:
    random = np.random.default_rng(seed)
    values = random.normal(scale=scale, size=(len(rows), vocab))
    values = np.round(values) if whole else values  # many ties
    values[random.random(values.shape) < masked] = -np.inf
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    asked = parameters(len(rows), temperature, top_k, top_p, min_p, seed)
    assert_as_reference(library, torch.from_numpy(values).to(dtype), asked)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [49_152, 128_256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tokens_of_whole_vocabularies_equal_the_reference(library: ctypes.CDLL, vocab: int, dtype: torch.dtype) -> None:
    filters = {
        "top_k": [0, 0, 50, 0, 50, 0],
        "top_p": [1.0, 0.9, 1.0, 1.0, 0.9, 0.999],
        "min_p": [0.0, 0.0, 0.0, 0.05, 0.05, 0.0],
        "temperature": [1.0, 0.7, 1.0, 1.3, 0.8, 2.0],
    }
    logits = torch.from_numpy(np.random.default_rng(vocab).normal(scale=3.0, size=(6, vocab))).to(dtype)
    for seed in range(5):
        assert_as_reference(library, logits, parameters(6, seed=seed, **filters))  # type: ignore[arg-type]


def test_noise_alone_decides_between_equal_logits(library: ctypes.CDLL) -> None:
    asked = parameters(1, seed=5)
    noise = gumbel_noise(int(asked.seed), int(asked.position), np.arange(3000))
    assert native_choose(library, torch.zeros(1, 3000), asked, threads=1).tolist() == [int(noise.argmax())]


def test_tokens_are_drawn_in_proportion_to_their_probability(library: ctypes.CDLL) -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    draws = 20_000
    asked = parameters(draws)
    tokens = native_choose(library, probabilities.log().repeat(draws, 1), asked, threads=2)
    shares = torch.bincount(tokens, minlength=5) / draws
    torch.testing.assert_close(shares, probabilities, atol=0.015, rtol=0)
    assert shares[4] == 0


@pytest.mark.slow
@given(st.integers(0, 2**32), st.integers(1, 5000), dtypes)
def test_greedy_is_the_first_of_the_largest(library: ctypes.CDLL, seed: int, vocab: int, dtype: torch.dtype) -> None:
    values = np.random.default_rng(seed).integers(-3, 4, size=(2, vocab)) * 0.0625
    logits = torch.from_numpy(values).to(dtype)
    asked = parameters(2, temperature=[0.0, 9e-6])
    assert native_choose(library, logits, asked, threads=1).tolist() == [int(row.argmax()) for row in values]


def test_zeros_of_either_sign_are_equal(library: ctypes.CDLL) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.tensor([[-1.0, -0.0, 0.0]], dtype=dtype)
        assert native_choose(library, logits, parameters(1, temperature=0.0), threads=1).tolist() == [1]


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
@pytest.mark.parametrize("vocab", [3, 100])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_gets_no_token(
    library: ctypes.CDLL, bad: float, vocab: int, temperature: float
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for place in (0, vocab // 2, vocab - 1):
            logits = torch.zeros(3, vocab, dtype=dtype)
            logits[1, place] = bad
            tokens = native_choose(library, logits, parameters(3, temperature=temperature), threads=1).tolist()
            assert [token < 0 for token in tokens] == [False, True, False]
    nothing = torch.full((1, vocab), -torch.inf)
    assert native_choose(library, nothing, parameters(1, temperature=temperature), threads=1).tolist() == [-1]


def test_rows_of_a_wider_matrix_are_read_where_they_lie(library: ctypes.CDLL) -> None:
    wide = torch.from_numpy(np.random.default_rng(1).normal(size=(3, 200)).astype(np.float32))
    asked = parameters(3)
    assert torch.equal(native_choose(library, wide[:, :150], asked, 1), choose(wide[:, :150].contiguous(), asked))


@pytest.mark.slow
@given(st.integers(0, 2**32))
def test_token_does_not_depend_on_the_rest_of_the_batch(library: ctypes.CDLL, seed: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(scale=3.0, size=(5, 700)).astype(np.float32))
    asked = parameters(5, top_p=[1.0, 0.9, 0.5, 1.0, 0.99], top_k=[0, 0, 40, 9, 0], seed=seed)
    together = native_choose(library, logits, asked, threads=2)
    alone = [
        native_choose(library, logits[i : i + 1], SamplingTensors(*(values[i : i + 1] for values in asked)), 1)
        for i in range(5)
    ]
    assert together.tolist() == torch.cat(alone).tolist()
