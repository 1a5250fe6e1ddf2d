"""From what a machine can do to the tokens per second that a model could reach on it.

Only weights count: attention, norms, caches and sampling are free here, and nothing is read twice in a step. Figures
of a real engine lie below; how far below is what is reported. P are the parameters a decoded token passes (the
layers' Pn and the output layer, whose rows every token needs), A those of one adapter, B the rows of a decode step,
all in elements of s bytes.
"""

from collections.abc import Sequence

import msgspec

from lorikeet.bench.limits import MachineLimits
from lorikeet.core.geometry import ModuleShape
from lorikeet.models.config import ModelConfig

PREFILL_ROWS = 512
"""Rows at which a prefill's matrix multiplications run."""


class ModelCost(msgspec.Struct, frozen=True):
    """Parameters that a token passes; norms and biases are too few to count.

    Attributes:
        layer_parameters: of the linear modules of all layers (Pn).
        head_parameters: of the output layer.
        adapter_parameters: of each adapter that the work uses, over all layers.
        dtype_bytes: of one parameter (s).
    """

    layer_parameters: int
    head_parameters: int
    adapter_parameters: tuple[int, ...]
    dtype_bytes: int

    @property
    def parameters(self) -> int:
        """Pn and the output layer together (P)."""
        return self.layer_parameters + self.head_parameters

    def mean_adapter(self) -> float:
        """Mean of A over the requests, which take the adapters in turn; 0 without adapters."""
        return sum(self.adapter_parameters) / len(self.adapter_parameters) if self.adapter_parameters else 0.0


class Ceilings(msgspec.Struct, frozen=True):
    """Upper bounds of one piece of work, in tokens per second.

    Attributes:
        decode_tok_s: tokens after the first, all requests together.
        prefill_tok_s: prompt tokens.
        output_tok_s: generated tokens over the whole run: prompts at ``prefill_tok_s``, then the tokens after each
            first one at ``decode_tok_s``.
        total_tok_s: prompt and generated tokens over the whole run.
    """

    decode_tok_s: float
    prefill_tok_s: float
    output_tok_s: float
    total_tok_s: float


def model_cost(
    config: ModelConfig, dtype_bytes: int, ranks: Sequence[int] = (), modules: Sequence[str] = ()
) -> ModelCost:
    """Return the parameters of a decoder and of one adapter on ``modules`` for each of ``ranks``."""
    shapes = config.module_shapes()
    per_rank = config.layers * sum(shapes[module].in_features + shapes[module].out_features for module in modules)
    return ModelCost(
        layer_parameters=config.layers * sum(_elements(shape) for shape in shapes.values()),
        head_parameters=config.vocab_size * config.hidden_size,
        adapter_parameters=tuple(rank * per_rank for rank in ranks),
        dtype_bytes=dtype_bytes,
    )


def decode_limit_tok_s(cost: ModelCost, limits: MachineLimits, rows: int) -> float:
    """Return the bound of decoding ``presets`` sequences at a time.

    One row reads every weight once and is bound by memory: bandwidth / (s · (P + A)). A batch is bound by its
    multiplications, B rows at the rate G measured with B rows: B / (2·P·B / G + adapters).
    """
    read_bytes_s, flops_s = limits.read_gb_s * 1e9, limits.gemm_gflops[rows] * 1e9
    if rows == 1:
        return read_bytes_s / (cost.dtype_bytes * (cost.parameters + cost.mean_adapter()))
    return rows / (2 * cost.parameters * rows / flops_s + adapters_limit_s(cost, limits, rows))


def adapters_limit_s(cost: ModelCost, limits: MachineLimits, rows: int) -> float:
    """Return the least time that the adapters of a step take, in seconds.

    The longer of reading each of them once and multiplying its rows: max(s · ΣA / bandwidth, 2 · B · mean A / G).
    """
    read_s = cost.dtype_bytes * sum(cost.adapter_parameters) / (limits.read_gb_s * 1e9)
    return max(read_s, 2 * rows * cost.mean_adapter() / (limits.gemm_gflops[rows] * 1e9))


def prefill_limit_tok_s(cost: ModelCost, limits: MachineLimits) -> float:
    """Return the bound of prompt tokens: the multiply rate of 512 rows / (2 · (Pn + mean A))."""
    return limits.gemm_gflops[PREFILL_ROWS] * 1e9 / (2 * (cost.layer_parameters + cost.mean_adapter()))


def work_ceilings(
    cost: ModelCost, limits: MachineLimits, requests: int, prompt_tokens: int, output_tokens: int
) -> Ceilings:
    """Return the bounds of ``requests`` requests given at once; ``limits`` knows the rate at that many rows."""
    decode, prefill = decode_limit_tok_s(cost, limits, requests), prefill_limit_tok_s(cost, limits)
    seconds = requests * (prompt_tokens / prefill + (output_tokens - 1) / decode)
    return Ceilings(
        decode_tok_s=decode,
        prefill_tok_s=prefill,
        output_tok_s=requests * output_tokens / seconds,
        total_tok_s=requests * (prompt_tokens + output_tokens) / seconds,
    )


def _elements(shape: ModuleShape) -> int:
    return shape.in_features * shape.out_features
