"""Numbers are converted like by torch."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lorikeet.adapters.numbers import from_float32, to_float32


def float32_cases() -> NDArray[np.float32]:
    """Random bits, everything near a tie of bfloat16, the largest and smallest numbers; no NaN."""
    random = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    upper = np.random.default_rng(1).integers(0, 2**16, 5000, dtype=np.uint32) << 16
    near_ties = np.concatenate([upper + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    values = np.concatenate([random, near_ties.astype(np.uint32)]).view(np.float32)
    edges = np.array([0, -0.0, 1e-45, 65504, 65519.9, 65520, 3.3895e38, 3.3961e38, 3.4e38, np.inf], np.float32)
    return np.concatenate([values[~np.isnan(values)], edges, -edges])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_is_that_of_torch(dtype: torch.dtype) -> None:
    values = float32_cases()
    found = from_float32(values, str(dtype).removeprefix("torch."))
    expected = torch.from_numpy(values).to(dtype)
    assert np.array_equal(found.view(np.uint8), expected.view(torch.uint8).numpy())


def test_every_bfloat16_number_has_the_value_that_it_has_for_torch() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    expected = torch.from_numpy(bits).view(torch.bfloat16).float().numpy()
    assert np.array_equal(to_float32(bits, "bfloat16"), expected, equal_nan=True)
