"""Sampling in plain torch, against a slow and obvious implementation."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet.kernels.sampling import CANDIDATES, gumbel_noise, lowest_kept
from tests.kernels.choices import VOCAB, filters, kept_slowly


def random_logits(seed: int, vocab: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(scale=scale, size=vocab).astype(np.float32))


@given(st.integers(0, 2**32), st.sampled_from([0.3, 1.0, 1.7]), filters)
def test_filters_keep_the_tokens_that_the_slow_and_obvious_ones_keep(
    seed: int, temperature: float, given: dict[str, Any]
) -> None:
    logits = random_logits(seed) / temperature
    kept = set(torch.nonzero(logits >= lowest_kept(logits, **given)).flatten().tolist())
    assert kept == kept_slowly(logits.tolist(), **given)


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from([0.9, 0.9999]), st.sampled_from([0, 3000]))
def test_looking_at_few_candidates_first_changes_nothing(seed: int, top_p: float, top_k: int) -> None:
    logits = random_logits(seed, vocab=2 * CANDIDATES[-1], scale=0.5)
    kept = int((logits >= lowest_kept(logits, top_k, top_p, 0.0)).sum())
    expected = len(kept_slowly(logits.tolist(), top_k, top_p, 0.0))
    assert expected > CANDIDATES[0]  # otherwise this test would not see the second look
    assert abs(kept - expected) <= 2  # fp32 and fp64 sums of thousands of masses


def test_noise_is_the_same_wherever_it_is_computed() -> None:
    # Written down once: a change here would make a resumed request go on differently from the one that was cut off.
    expected = [1.1694775, 0.22575231, 0.87037158, -0.16908757, 0.58437109]
    np.testing.assert_allclose(gumbel_noise(42, 7, np.arange(5)), expected, rtol=1e-6)
    np.testing.assert_allclose(gumbel_noise(42, 7, np.array([3, 1])), [expected[3], expected[1]], rtol=1e-6)


def test_noise_of_neighbouring_positions_and_seeds_does_not_overlap() -> None:
    drawn = [gumbel_noise(seed, position, np.arange(64)) for seed in (0, 1, -1) for position in range(8)]
    assert len(np.unique(np.concatenate(drawn))) == 64 * len(drawn)


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1, -(2**63)])
def test_noise_of_any_seed_of_64_bits_is_that_of_its_bits(seed: int) -> None:
    np.testing.assert_array_equal(gumbel_noise(seed, 3, np.arange(9)), gumbel_noise(seed % 2**64, 3, np.arange(9)))
