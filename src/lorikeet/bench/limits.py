"""What this machine can do at best: the ceilings that throughput is judged against.

These machines drift: measure in the same minute as the figure that is compared.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec
import torch

ROWS = (1, 8, 32, 128, 512)
"""Rows of the matrices whose multiply rate is measured."""

_READ_BYTES = 512 * 2**20
_IN, _OUT = 576, 1536


class MachineLimits(msgspec.Struct, frozen=True):
    """Sustained rates of this machine, with as many threads as torch uses.

    Attributes:
        threads: of torch.
        read_gb_s: memory read bandwidth, GB/s: one pass over 512 MiB, best of 10.
        gemm_gflops: rows → matrix-multiply rate, GFLOP/s: weights of 576 × 1536, best of 5 rounds of 50.
    """

    threads: int
    read_gb_s: float
    gemm_gflops: dict[int, float]


class LimitMeter:
    """Measures :class:`MachineLimits`, about one second a time; holds its buffer, whose first touch is slow."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, rows: Iterable[int] = ROWS) -> None:
        self._buffer = torch.ones(_READ_BYTES // 4)
        self._weights = torch.randn(_OUT, _IN, dtype=dtype)
        self._inputs = {count: torch.randn(count, _IN, dtype=dtype) for count in sorted(set(rows))}

    @torch.inference_mode()
    def measure(self) -> MachineLimits:
        """Measure now."""
        read_s = _best_s(self._buffer.sum, rounds=10, calls=1)
        rates = {}
        for rows, inputs in self._inputs.items():
            multiply = partial(torch.nn.functional.linear, inputs, self._weights)
            seconds = _best_s(multiply, rounds=5, calls=50)
            rates[rows] = 2 * rows * _IN * _OUT / seconds / 1e9
        return MachineLimits(torch.get_num_threads(), _READ_BYTES / read_s / 1e9, rates)


def median_limits(measured: Sequence[MachineLimits]) -> MachineLimits:
    """Return the median of each rate; all were measured with the same threads and rows."""
    return MachineLimits(
        measured[0].threads,
        statistics.median(limits.read_gb_s for limits in measured),
        {rows: statistics.median(limits.gemm_gflops[rows] for limits in measured) for rows in measured[0].gemm_gflops},
    )


def _best_s(call: Callable[[], object], rounds: int, calls: int) -> float:
    """Seconds of one call in the best of ``rounds`` rounds, after one call to warm up."""
    call()
    best_s = float("inf")
    for _ in range(rounds):
        start_s = time.perf_counter()
        for _ in range(calls):
            call()
        best_s = min(best_s, (time.perf_counter() - start_s) / calls)
    return best_s
