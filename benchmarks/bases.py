"""Measures the speed of a base model that runs by transformers' modules: ``python -m benchmarks.bases``.

The default model runs by Lorikeet's own decoder, by the modules of transformers over Lorikeet's cache and kernels, and
by transformers' own ``generate``: greedily, in one dtype, in turns, on the same cores. Greedy tokens of the first two
are compared, too.
"""

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.engine_backend import LorikeetBackend
from benchmarks.harness import THREADS, default_model, in_turns, print_setup, print_table, ratios, with_interval
from benchmarks.offline_backends import OfflineBackend, OfflineBatch, OfflineResult
from benchmarks.peft_backend import PeftBackend
from lorikeet.config import EngineSettings, ModelSettings, Settings
from lorikeet.kernels.devices import torch_dtype

TOKEN_IDS = (300, 10_000)
"""Ordinary token ids of the default model."""
OWN = "own decoder"
MODULES = "transformers' modules"
GENERATE = "transformers' generate"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="a folder; the default model if not given")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="sequences at once")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    print_setup()
    model = options.model or default_model()
    with ExitStack() as stack:
        sides = _sides(model, options.dtype, max(options.batches))
        for side in sides.values():
            stack.callback(side.close)
        rows = [row for batch in options.batches for row in _compare(sides, batch, options)]
    print_table(
        f"{options.prompt_tokens} + {options.output_tokens} tokens, {options.dtype}, {THREADS} threads: output tokens "
        "per second, prefill included",
        ["sequences", OWN, MODULES, GENERATE, "modules / generate", "own / modules", "equal greedy tokens"],
        rows,
    )


def _sides(model: Path, dtype: str, sequences: int) -> dict[str, OfflineBackend]:
    def engine(model_impl: str) -> LorikeetBackend:
        return LorikeetBackend(
            Settings(
                ModelSettings(model=str(model), dtype=dtype, model_impl=model_impl),
                EngineSettings(max_num_seqs=sequences, threads=THREADS, host_memory_bytes=0),
            ),
            [],
        )

    return {
        OWN: engine("lorikeet"),
        MODULES: engine("transformers"),
        GENERATE: PeftBackend(model, torch_dtype(dtype), [], "cpu"),
    }


def _compare(sides: dict[str, OfflineBackend], batch: int, options: argparse.Namespace) -> list[list[object]]:
    def run(side: OfflineBackend, number: int) -> OfflineResult:
        prompts = np.random.default_rng(number).integers(*TOKEN_IDS, (batch, options.prompt_tokens)).tolist()
        return side.run(OfflineBatch(prompts, [None] * batch, options.output_tokens))

    calls: dict[str, Callable[[int], OfflineResult]] = {name: partial(run, side) for name, side in sides.items()}
    found = in_turns(calls, options.rounds)
    tokens = batch * options.output_tokens
    speeds = {name: [tokens / result.seconds for result in results] for name, results in found.items()}
    pairs = zip(found[OWN], found[MODULES], strict=True)
    equal = sum(a == b for own, other in pairs for a, b in zip(own.tokens, other.tokens, strict=True))
    return [
        [
            batch,
            *(with_interval(speeds[name]) for name in (OWN, MODULES, GENERATE)),
            with_interval(ratios(speeds[MODULES], speeds[GENERATE])),
            with_interval(ratios(speeds[OWN], speeds[MODULES])),
            f"{equal}/{batch * options.rounds}",
        ]
    ]


if __name__ == "__main__":
    main()
