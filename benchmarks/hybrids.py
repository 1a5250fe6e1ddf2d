"""Measures the speed of a hybrid of Qwen3.5's shape: ``python -m benchmarks.hybrids``.

A model of half a billion parameters with random weights, three of four layers with a gated delta rule, runs by
Lorikeet and by transformers' ``generate``, in turns, on the same cores. Decode steps are compared with the time in
which the machine reads the weights or multiplies the batch with them, whichever is longer, reads and writes the states,
and reads keys and values. Prefills are compared with the time of the linear products at the rate of one large product.
Both limits are measured in the same run.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

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
CONTEXT = 2048
STATE_BYTES = 4
_READ_BYTES = 1 << 30
_READS = 5


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--inner", type=int, default=3584, help="inner features of an MLP")
    parser.add_argument("--heads", type=int, default=16, help="heads of linear attention, of 128")
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="sequences at once")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    print_setup()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config, parameters = _write_checkpoint(folder, options)
        bytes_per_s = _read_bytes_per_s()
        products_per_s = _products_per_s(options)
        sides = _sides(folder, options)
        for side in sides.values():
            stack.callback(side.close)
        decodes = []
        prefills = []
        item_bytes = torch_dtype(options.dtype).itemsize
        for batch in options.batches:
            weights_s = max(parameters * item_bytes / bytes_per_s, batch * parameters / products_per_s)
            limit_s = weights_s + batch * _sequence_bytes(config, options, item_bytes) / bytes_per_s
            decodes.append(_decode_row(sides, batch, limit_s, options))
            prefills.append(_prefill_row(sides, batch, parameters / products_per_s, options))
    sizes = f"{parameters / 1e6:.0f} million parameters, {options.dtype}, {THREADS} threads"
    headings = ["sequences", OWN, GENERATE, f"{GENERATE} / {OWN}", "limit", f"limit / {OWN}"]
    print_table(
        f"{sizes}: milliseconds of a decode step after {options.prompt_tokens} tokens; limit: weights, states and KV "
        f"at {bytes_per_s / 1e9:.1f} GB/s, but products at most at {2 * products_per_s / 1e9:.0f} GFLOP/s",
        headings,
        decodes,
    )
    print_table(
        f"{sizes}: milliseconds of a prefill of {options.prompt_tokens} tokens per sequence; limit: linear products at "
        f"{2 * products_per_s / 1e9:.0f} GFLOP/s",
        headings,
        prefills,
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
    return 2 * linear * state * STATE_BYTES + kv * options.prompt_tokens * item_bytes


def _read_bytes_per_s() -> float:
    """Return the rate at which all threads read memory, as the best of some sums."""
    data = torch.ones(_READ_BYTES // 4)
    times = []
    for _ in range(_READS):
        began_s = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - began_s)
    return _READ_BYTES / min(times)


def _products_per_s(options: argparse.Namespace) -> float:
    """Return the rate of multiplications in the product of the MLP's inputs, as the best of some."""
    dtype = torch_dtype(options.dtype)
    kernels = choose_kernels("auto", dtype, torch.device("cpu"))
    weight = torch.randn(2 * options.inner, options.hidden).to(dtype)
    packed = kernels.pack(weight)
    x = torch.randn(options.prompt_tokens, options.hidden).to(dtype)
    times = []
    for _ in range(_READS):
        began_s = time.perf_counter()
        kernels.linear(x, packed, None)
        times.append(time.perf_counter() - began_s)
    return len(x) * weight.numel() / min(times)


def _sides(folder: Path, options: argparse.Namespace) -> dict[str, OfflineBackend]:
    settings = Settings(
        ModelSettings(model=str(folder), dtype=options.dtype, max_model_len=CONTEXT),
        EngineSettings(max_num_seqs=max(options.batches), threads=THREADS, host_memory_bytes=0),
    )
    return {
        OWN: LorikeetBackend(settings, []),
        GENERATE: PeftBackend(folder, torch_dtype(options.dtype), [], "cpu"),
    }


def _seconds(side: OfflineBackend, batch: int, output_tokens: int, options: argparse.Namespace, number: int) -> float:
    generator = torch.Generator().manual_seed(number)
    prompts = torch.randint(3, options.vocabulary, (batch, options.prompt_tokens), generator=generator).tolist()
    return side.run(OfflineBatch(prompts, [None] * batch, output_tokens)).seconds


def _decode_row(
    sides: dict[str, OfflineBackend], batch: int, limit_s: float, options: argparse.Namespace
) -> list[object]:
    def step_s(side: OfflineBackend, number: int) -> float:
        # The same prompts run twice with other numbers, so that no prefix comes from a cache.
        long = _seconds(side, batch, options.output_tokens, options, 2 * number)
        short = _seconds(side, batch, 1, options, 2 * number + 1)
        return (long - short) / (options.output_tokens - 1)

    return _row(sides, batch, limit_s, step_s, options)


def _prefill_row(
    sides: dict[str, OfflineBackend], batch: int, token_s: float, options: argparse.Namespace
) -> list[object]:
    def prefill_s(side: OfflineBackend, number: int) -> float:
        return _seconds(side, batch, 1, options, 1000 + number)

    return _row(sides, batch, token_s * batch * options.prompt_tokens, prefill_s, options)


def _row(
    sides: dict[str, OfflineBackend],
    batch: int,
    limit_s: float,
    measure: Callable[[OfflineBackend, int], float],
    options: argparse.Namespace,
) -> list[object]:
    calls: dict[str, Callable[[int], float]] = {name: partial(measure, side) for name, side in sides.items()}
    times = in_turns(calls, options.rounds)
    return [
        batch,
        *(with_interval([1000 * each for each in times[name]]) for name in (OWN, GENERATE)),
        with_interval(ratios(times[GENERATE], times[OWN])),
        f"{1000 * limit_s:.3g}",
        f"{100 * limit_s / statistics.median(times[OWN]):.0f} %",
    ]


if __name__ == "__main__":
    main()
