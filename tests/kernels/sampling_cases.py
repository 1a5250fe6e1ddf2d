"""Sampling parameters for tests of kernels."""

from collections.abc import Sequence

import numpy as np
import torch

from lorikeet.kernels.sampling import SamplingTensors


def parameters(
    rows: int,
    temperature: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seed: int = 0,
) -> SamplingTensors:
    """One value for all rows, or one each; every row has another seed and position."""

    def tensor(values: float | Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).expand(rows).contiguous()

    random = np.random.default_rng(seed)
    return SamplingTensors(
        tensor(temperature, torch.float32),
        tensor(top_k, torch.int64),
        tensor(top_p, torch.float32),
        tensor(min_p, torch.float32),
        torch.from_numpy(random.integers(-(2**63), 2**63, rows)),
        torch.from_numpy(random.integers(0, 2**40, rows)),
    )
