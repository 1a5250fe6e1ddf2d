"""What this machine, or a GPU of it, can do at best: the ceilings that throughput is judged against.

These machines drift: measure in the same minute as the figure that is compared.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec
import torch

PRESETS = (1, 8, 32, 128, 512)
"""Rows of the matrices whose multiply rate is measured."""

_READ_BYTES = 512 * 2**20
_MOST_CALLS = 50
_ROUND_S = 0.05
_WEIGHTS = {"cpu": (1536, 576), "cuda": (11008, 4096)}
"""Outputs and inputs of what is multiplied by, by device: of a small model, and of one that fills a GPU."""


class MachineLimits(msgspec.Struct, frozen=True):
    """Sustained rates of this machine, with as many threads as torch uses.

    Attributes:
        threads: of torch.
        read_gb_s: memory read bandwidth, GB/s: one pass over 512 MiB, on a GPU as many as a twentieth of a second
            holds, best of 10.
        gemm_gflops: rows → matrix-multiply rate, GFLOP/s: weights of 576 × 1536, on a GPU of 4096 × 11008, best of 5
            rounds of 50, or of as many as a twentieth of a second holds.
    """

    threads: int
    read_gb_s: float
    gemm_gflops: dict[int, float]


class LimitMeter:
    """Measures :class:`MachineLimits`, about one second a time; holds its buffer, whose first touch is slow.

    Args:
        dtype: of products.
        rows: of the matrices that are multiplied.
        device: ``cpu`` or ``cuda``.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16, rows: Iterable[int] = PRESETS, device: str = "cpu") -> None:
        self._device = device
        self._buffer = torch.ones(_READ_BYTES // 4, device=device)
        self._weights = torch.randn(_WEIGHTS[device], dtype=dtype, device=device)
        inputs = self._weights.shape[1]
        self._inputs = {count: torch.randn(count, inputs, dtype=dtype, device=device) for count in sorted(set(rows))}

    @torch.inference_mode()
    def measure(self) -> MachineLimits:
        """Measure now."""
        # A GPU reads so quickly that waiting for one pass would count as much as a part of it.
        read_s = self._best_s(self._buffer.sum, rounds=10, calls=_MOST_CALLS if self._device == "cuda" else 1)
        rates = {}
        for rows, inputs in self._inputs.items():
            multiply = partial(torch.nn.functional.linear, inputs, self._weights)
            seconds = self._best_s(multiply, rounds=5, calls=_MOST_CALLS)
            rates[rows] = 2 * rows * self._weights.numel() / seconds / 1e9
        return MachineLimits(torch.get_num_threads(), _READ_BYTES / read_s / 1e9, rates)

    def _best_s(self, call: Callable[[], object], rounds: int, calls: int) -> float:
        """Seconds of one call in the best of ``rounds`` rounds, after one call to warm up.

        A round has ``calls`` calls, or as many as fit into its time: where torch computes a dtype by detours, one call
        may take a tenth of a second.
        """
        self._seconds(call, 1)
        calls = max(1, min(calls, int(_ROUND_S / self._seconds(call, 1))))
        return min(self._seconds(call, calls) for _ in range(rounds)) / calls

    def _seconds(self, call: Callable[[], object], calls: int) -> float:
        start_s = time.perf_counter()
        for _ in range(calls):
            call()
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start_s


def median_limits(measured: Sequence[MachineLimits]) -> MachineLimits:
    """Return the median of each rate; all were measured with the same threads and rows."""
    return MachineLimits(
        measured[0].threads,
        statistics.median(limits.read_gb_s for limits in measured),
        {rows: statistics.median(limits.gemm_gflops[rows] for limits in measured) for rows in measured[0].gemm_gflops},
    )
