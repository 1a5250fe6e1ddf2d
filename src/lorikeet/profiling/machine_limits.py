"""Measures the best rates of a machine or its GPU, and derives the tokens per second that a model could reach.

Throughput is reported as a share of these limits.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec
import torch

from lorikeet.core.geometry import ModuleShape
from lorikeet.models.config import ModelConfig

MEASURED_ROWS = (1, 8, 32, 128, 512)
"""Rows of the matrices whose multiply rate is measured."""

_READ_BYTES = 512 * 2**20
_MOST_CALLS = 50
_ROUND_S = 0.05
_WEIGHTS = {"cpu": (1536, 576), "cuda": (11008, 4096)}
"""Outputs and inputs of the weight matrix, by device: the sizes of a small model, and of a model that fills a GPU."""


class MachineLimits(msgspec.Struct, frozen=True):
    """Holds the sustained rates of this machine with torch's number of threads.

    Attributes:
        threads: number of torch's threads.
        read_gb_s: memory read bandwidth, GB/s: one pass over 512 MiB, best of 10. On a GPU a round has as many passes
            as fit in 50 ms.
        gemm_gflops: rows → matrix-multiply rate, GFLOP/s, with weights of 576 × 1536 (on a GPU 4096 × 11008): best of 5
            rounds of 50 calls, or of as many as fit in 50 ms.
    """

    threads: int
    read_gb_s: float
    gemm_gflops: dict[int, float]


class LimitMeter:
    """Measures :class:`MachineLimits` in about one second.

    The meter keeps its buffer, because the first touch of memory is slow.

    Args:
        dtype: dtype of the products.
        rows: rows of the matrices that are multiplied.
        device: ``cpu`` or ``cuda``.
    """

    def __init__(
        self, dtype: torch.dtype = torch.bfloat16, rows: Iterable[int] = MEASURED_ROWS, device: str = "cpu"
    ) -> None:
        self._device = device
        self._buffer = torch.ones(_READ_BYTES // 4, device=device)
        self._weights = torch.randn(_WEIGHTS[device], dtype=dtype, device=device)
        inputs = self._weights.shape[1]
        self._inputs = {count: torch.randn(count, inputs, dtype=dtype, device=device) for count in sorted(set(rows))}

    @torch.inference_mode()
    def measure(self) -> MachineLimits:
        """Measure the rates."""
        # Passes are not synchronised one by one, because a GPU reads so fast that this would distort the result.
        read_s = self._best_s(self._buffer.sum, rounds=10, calls=_MOST_CALLS if self._device == "cuda" else 1)
        rates = {}
        for rows, inputs in self._inputs.items():
            multiply = partial(torch.nn.functional.linear, inputs, self._weights)
            seconds = self._best_s(multiply, rounds=5, calls=_MOST_CALLS)
            rates[rows] = 2 * rows * self._weights.numel() / seconds / 1e9
        return MachineLimits(torch.get_num_threads(), _READ_BYTES / read_s / 1e9, rates)

    def _best_s(self, call: Callable[[], object], rounds: int, calls: int) -> float:
        """Return the seconds of one call in the best of ``rounds`` rounds, after one warm-up call.

        A round has ``calls`` calls, or the number that fits in 50 ms, because some dtypes take a tenth of a second per
        call on a CPU.
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
    """Return the median of each rate. All limits were measured with the same threads and rows."""
    return MachineLimits(
        measured[0].threads,
        statistics.median(limits.read_gb_s for limits in measured),
        {rows: statistics.median(limits.gemm_gflops[rows] for limits in measured) for rows in measured[0].gemm_gflops},
    )


PREFILL_ROWS = 512
"""Rows at which a prefill's matrix multiplications run."""


class ModelCost(msgspec.Struct, frozen=True):
    """Counts the parameters that a token passes. Norms and biases are too few to count.

    Attributes:
        layer_parameters: parameters of the linear modules of all layers (Pn).
        head_parameters: parameters of the output layer.
        adapter_parameters: parameters of each adapter in the batch, over all layers.
        dtype_bytes: bytes of one parameter (s).
    """

    layer_parameters: int
    head_parameters: int
    adapter_parameters: tuple[int, ...]
    dtype_bytes: int

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the layers and the output layer together (P)."""
        return self.layer_parameters + self.head_parameters

    def mean_adapter(self) -> float:
        """Return the mean of A over the requests, which use the adapters in turn; 0 without adapters."""
        return sum(self.adapter_parameters) / len(self.adapter_parameters) if self.adapter_parameters else 0.0


class Ceilings(msgspec.Struct, frozen=True):
    """Holds the upper bounds of one batch, in tokens per second.

    Attributes:
        decode_tok_s: tokens after each first token, over all requests.
        prefill_tok_s: prompt tokens.
        output_tok_s: generated tokens over the whole run: prompts at ``prefill_tok_s``, then the tokens after each
            first token at ``decode_tok_s``.
        total_tok_s: prompt and generated tokens over the whole run.
    """

    decode_tok_s: float
    prefill_tok_s: float
    output_tok_s: float
    total_tok_s: float


def model_cost(
    config: ModelConfig, dtype_bytes: int, ranks: Sequence[int] = (), modules: Sequence[str] = ()
) -> ModelCost:
    """Return the number of parameters of a decoder, and of one adapter on ``modules`` for each of ``ranks``."""
    shapes = config.module_shapes()
    geometry = config.geometry(dtype_bytes)
    layers = {module: sum(geometry.has_module(layer, module) for layer in range(config.layers)) for module in shapes}
    per_rank = sum(layers[module] * (shapes[module].in_features + shapes[module].out_features) for module in modules)
    return ModelCost(
        layer_parameters=sum(layers[module] * _elements(shape) for module, shape in shapes.items()),
        head_parameters=config.vocab_size * config.hidden_size,
        adapter_parameters=tuple(rank * per_rank for rank in ranks),
        dtype_bytes=dtype_bytes,
    )


def decode_limit_tok_s(cost: ModelCost, limits: MachineLimits, rows: int) -> float:
    """Return the upper bound of decoding ``rows`` sequences at a time, in tokens per second.

    One row reads every weight once and is bound by memory: bandwidth / (s · (P + A)). A batch is bound by its
    multiplications, B rows at the rate G measured with B rows: B / (2·P·B / G + adapters).
    """
    read_bytes_s = limits.read_gb_s * 1e9
    flops_s = limits.gemm_gflops[rows] * 1e9
    if rows == 1:
        return read_bytes_s / (cost.dtype_bytes * (cost.parameters + cost.mean_adapter()))
    return rows / (2 * cost.parameters * rows / flops_s + adapters_limit_s(cost, limits, rows))


def adapters_limit_s(cost: ModelCost, limits: MachineLimits, rows: int) -> float:
    """Return the least time that the adapters of a step take, in seconds.

    This is the longer of reading each adapter once and multiplying its rows: max(s · ΣA / bandwidth, 2 · B · mean A /
    G).
    """
    read_s = cost.dtype_bytes * sum(cost.adapter_parameters) / (limits.read_gb_s * 1e9)
    return max(read_s, 2 * rows * cost.mean_adapter() / (limits.gemm_gflops[rows] * 1e9))


def prefill_limit_tok_s(cost: ModelCost, limits: MachineLimits) -> float:
    """Return the upper bound of prompt tokens per second: the multiply rate of 512 rows / (2 · (Pn + mean A))."""
    return limits.gemm_gflops[PREFILL_ROWS] * 1e9 / (2 * (cost.layer_parameters + cost.mean_adapter()))


def work_ceilings(
    cost: ModelCost, limits: MachineLimits, requests: int, prompt_tokens: int, output_tokens: int
) -> Ceilings:
    """Return the upper bounds of a batch of ``requests`` requests.

    ``limits`` has the multiply rate at that number of rows.
    """
    decode = decode_limit_tok_s(cost, limits, requests)
    prefill = prefill_limit_tok_s(cost, limits)
    seconds = requests * (prompt_tokens / prefill + (output_tokens - 1) / decode)
    return Ceilings(
        decode_tok_s=decode,
        prefill_tok_s=prefill,
        output_tok_s=requests * output_tokens / seconds,
        total_tok_s=requests * (prompt_tokens + output_tokens) / seconds,
    )


def _elements(shape: ModuleShape) -> int:
    return shape.in_features * shape.out_features
