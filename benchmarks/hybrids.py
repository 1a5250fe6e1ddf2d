"""Measures the speed of a hybrid of Qwen3.5's shape: ``python -m benchmarks.hybrids``.

A model of half a billion parameters with random weights, three of four layers with a gated delta rule, runs by
Lorikeet and by transformers' ``generate``, in turns, on the same cores. Decode steps are compared with the time in
which the machine reads the weights or multiplies the batch with them, whichever is longer, reads and writes the states,
and reads keys and values. Prefills are compared with the time of the linear products at the rate of one large product.
Both rates are measured in the same turns.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.engine_backend import LorikeetBackend
from benchmarks.harness import THREADS, in_turns, print_setup, print_table, ratios, with_interval
from benchmarks.offline_backends import OfflineBackend, OfflineBatch
from benchmarks.peft_backend import PeftBackend
from lorikeet.config import EngineSettings, ModelSettings, Settings
from lorikeet.kernels.backends import choose_kernels
from lorikeet.kernels.devices import torch_dtype

OWN = "lorikeet"
GENERATE = "transformers' generate"
LIMIT = "limit"
CONTEXT = 2048
STATE_BYTES = 4
_READ_BYTES = 1 << 29
_CALLS = 5
_POOL_BYTES = 3 << 29
_FIRST_RUNS = 4
"""Runs that write all of the pool, whose memory the system provides only then."""


class Rates(NamedTuple):
    """The rates of the machine.

    Attributes:
        bytes_per_s: bytes that all threads read.
        products_per_s: multiplications in a product of many rows.
    """

    bytes_per_s: float
    products_per_s: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--inner", type=int, default=3584, help="inner features of an MLP")
    parser.add_argument("--heads", type=int, default=16, help="heads of linear attention, of 128")
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="sequences that decode at once")
    parser.add_argument("--context", type=int, default=64, help="tokens of a sequence before it decodes")
    parser.add_argument("--output-tokens", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=512, help="tokens of a prefill")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    print_setup()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config, parameters = _write_checkpoint(folder, options)
        meter = _Meter(options)
        sides = _sides(folder, options)
        for side in sides.values():
            stack.callback(side.close)
        for number in range(_FIRST_RUNS):
            _step_s(sides[OWN], max(options.batches), options, -1 - number)
        item_bytes = torch_dtype(options.dtype).itemsize

        def decode_limit_s(batch: int, number: int) -> float:
            rates = meter.measure()
            weights_s = max(parameters * item_bytes / rates.bytes_per_s, batch * parameters / rates.products_per_s)
            return weights_s + batch * _sequence_bytes(config, options, item_bytes) / rates.bytes_per_s

        def prefill_limit_s(number: int) -> float:
            return options.prompt_tokens * _layer_parameters(parameters, options) / meter.measure().products_per_s

        decodes = [
            _row(
                f"{batch}",
                {name: partial(_step_s, side, batch, options) for name, side in sides.items()}
                | {LIMIT: partial(decode_limit_s, batch)},
                options.rounds,
            )
            for batch in options.batches
        ]
        prefill = _row(
            f"{options.prompt_tokens}",
            {name: partial(_prefill_s, side, options) for name, side in sides.items()} | {LIMIT: prefill_limit_s},
            options.rounds,
        )
    sizes = f"{parameters / 1e6:.0f} million parameters, {options.dtype}, {THREADS} threads"
    headings = [OWN, GENERATE, f"{GENERATE} / {OWN}", LIMIT, f"{LIMIT} / {OWN}"]
    rates = (
        f"{statistics.median(rate.bytes_per_s for rate in meter.found) / 1e9:.1f} GB/s and "
        f"{2 * statistics.median(rate.products_per_s for rate in meter.found) / 1e9:.0f} GFLOP/s"
    )
    print_table(
        f"{sizes}: milliseconds of a decode step after {options.context} tokens; limit: weights, states and KV at the "
        f"rate of memory, or products at theirs ({rates})",
        ["sequences", *headings],
        decodes,
    )
    print_table(
        f"{sizes}: milliseconds of a prefill; limit: linear products at their rate", ["tokens", *headings], [prefill]
    )


def _write_checkpoint(folder: Path, options: argparse.Namespace) -> tuple[Any, int]:
    """Save a random checkpoint, and return its config and the number of parameters that a step reads."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.inner,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=options.heads,
        linear_num_value_heads=options.heads,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        layer_types=["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(options.layers)],
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    model = Qwen3_5ForCausalLM._from_config(config, dtype=torch_dtype(options.dtype))
    model.save_pretrained(folder)
    return config, sum(parameter.numel() for parameter in model.parameters())


def _sequence_bytes(config: Any, options: argparse.Namespace, item_bytes: int) -> int:
    """Return the bytes that a decode step moves for a sequence: states read and written, and KV read."""
    heads = options.heads
    linear = sum(kind == "linear_attention" for kind in config.layer_types)
    state = heads * 128 * 128 + 3 * 3 * heads * 128
    kv = 2 * config.num_key_value_heads * config.head_dim * (options.layers - linear)
    return 2 * linear * state * STATE_BYTES + kv * options.context * item_bytes


def _layer_parameters(parameters: int, options: argparse.Namespace) -> int:
    """Return the number of parameters without those of the output layer, which a prefill reads for one row."""
    return parameters - options.vocabulary * options.hidden


class _Meter:
    """Measures the machine's rates.

    Attributes:
        found: the rates of each measurement.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        dtype = torch_dtype(options.dtype)
        self._data = torch.ones(_READ_BYTES // 4)
        self._kernels = choose_kernels("auto", dtype, torch.device("cpu"))
        self._weight = torch.randn(2 * options.inner, options.hidden).to(dtype)
        self._packed = self._kernels.pack(self._weight)
        self._x = torch.randn(options.prompt_tokens, options.hidden).to(dtype)
        self.found: list[Rates] = []

    def measure(self) -> Rates:
        """Return the rates, each as the median of some calls; products by Lorikeet's kernel or torch's."""
        own = partial(self._kernels.linear, self._x, self._packed, None)
        by_torch = partial(torch.nn.functional.linear, self._x, self._weight)
        rates = Rates(
            _READ_BYTES / _median_s(self._data.sum),
            len(self._x) * self._weight.numel() / min(_median_s(own), _median_s(by_torch)),
        )
        self.found.append(rates)
        return rates


def _median_s(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_CALLS):
        began_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def _sides(folder: Path, options: argparse.Namespace) -> dict[str, OfflineBackend]:
    settings = Settings(
        ModelSettings(model=str(folder), dtype=options.dtype, max_model_len=CONTEXT),
        EngineSettings(
            max_num_seqs=max(options.batches), threads=THREADS, host_memory_bytes=0, memory_bytes=_POOL_BYTES
        ),
    )
    return {
        OWN: LorikeetBackend(settings, []),
        GENERATE: PeftBackend(folder, torch_dtype(options.dtype), [], "cpu"),
    }


def _prompts(count: int, tokens: int, options: argparse.Namespace, number: int) -> list[list[int]]:
    """Return random prompts. Each round has its own, so that no prefix comes from a cache."""
    generator = torch.Generator().manual_seed(1000 * count + number)
    return torch.randint(3, options.vocabulary, (count, tokens), generator=generator).tolist()


def _step_s(side: OfflineBackend, batch: int, options: argparse.Namespace, number: int) -> float:
    prompts = _prompts(batch, options.context, options, number)
    rate = side.run(OfflineBatch(prompts, [None] * batch, options.output_tokens)).decode_tok_s
    assert rate is not None
    return batch / rate


def _prefill_s(side: OfflineBackend, options: argparse.Namespace, number: int) -> float:
    return side.run(OfflineBatch(_prompts(1, options.prompt_tokens, options, number), [None], 1)).seconds


def _row(label: str, sides: Mapping[str, Callable[[int], float]], rounds: int) -> list[object]:
    times = in_turns(sides, rounds)
    return [
        label,
        *(with_interval([1000 * each for each in times[name]]) for name in (OWN, GENERATE)),
        with_interval(ratios(times[GENERATE], times[OWN])),
        with_interval([1000 * each for each in times[LIMIT]]),
        with_interval(ratios(times[LIMIT], times[OWN]), ".2f"),
    ]


if __name__ == "__main__":
    main()
