"""Offline throughput, alone or beside a peer: all requests at once, every run timed from first to last token."""

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from lorikeet.bench.adapters import spread_ranks, write_random_adapter
from lorikeet.bench.contestants import Contestant, Outcome, Work
from lorikeet.bench.statistics import median_interval
from lorikeet.config import EngineSettings, ModelSettings, Settings
from lorikeet.kernels.base import torch_dtype
from lorikeet.models.config import read_model_config

Progress = Callable[[str, int, int], None]


class OfflineOptions(msgspec.Struct, frozen=True):
    """What is run.

    Attributes:
        model: folder of the base model.
        requests: size of the batch.
        prompt_tokens, output_tokens: lengths of every request.
        adapters: how many, spread evenly over the requests; ranks 8 to 128 on q, k, v and o.
        peer: ``peft``, or empty to measure Lorikeet alone.
        pairs: timed runs of each side, taken in turns.
        dtype: of weights, adapters and KV, on both sides.
        threads: of both sides.
        row: system that the engine runs as.
        seed: of prompts and adapters.
    """

    model: str
    requests: int = 32
    prompt_tokens: int = 128
    output_tokens: int = 64
    adapters: int = 8
    peer: str = ""
    pairs: int = 5
    dtype: str = "bfloat16"
    threads: int = 1
    row: str = "auto"
    seed: int = 0


def run_offline(options: OfflineOptions, progress: Progress = lambda stage, done, total: None) -> dict[str, Any]:
    """Measure, and return plain data for JSON.

    One warm-up run of each side loads the adapters and fills caches. Each pair has prompts of its own, the same for
    both sides, so that prefix reuse finds nothing. The side that goes first alternates from pair to pair.
    """
    if options.peer not in ("", "peft"):
        raise ValueError(f"peer {options.peer!r} is not one of: peft")
    from lorikeet.bench.engine_contestant import LorikeetContestant
    from lorikeet.bench.peft_contestant import PeftContestant

    torch.set_num_threads(options.threads)
    geometry = read_model_config(Path(options.model)).geometry(torch_dtype(options.dtype).itemsize)
    ranks = spread_ranks(options.adapters)
    with tempfile.TemporaryDirectory(prefix="lorikeet-bench-") as scratch:
        folders = [
            write_random_adapter(Path(scratch) / f"adapter-{i}-r{rank}", geometry, rank, seed=options.seed + i)
            for i, rank in enumerate(ranks)
        ]
        engine = LorikeetContestant(_settings(options), folders)
        sides: list[Contestant] = [engine]
        if options.peer:
            sides.append(PeftContestant(Path(options.model), torch_dtype(options.dtype), folders))
        outcomes = _interleave(sides, options, progress)
        engine.close()
    return _report(options, ranks, outcomes)


def _settings(options: OfflineOptions) -> Settings:
    return Settings(
        model=ModelSettings(
            model=options.model, dtype=options.dtype, max_model_tokens=options.prompt_tokens + options.output_tokens
        ),
        engine=EngineSettings(row=options.row, max_running=options.requests, threads=options.threads),
    )


def _interleave(sides: list[Contestant], options: OfflineOptions, progress: Progress) -> dict[str, list[Outcome]]:
    """Run pairs in turns (A B, B A, A B, …); the first pair is the warm-up and is not kept."""
    outcomes: dict[str, list[Outcome]] = {side.name: [] for side in sides}
    for pair in range(options.pairs + 1):
        work = _work(options, pair)
        for side in sides if pair % 2 else reversed(sides):
            progress("pairs run", pair, options.pairs + 1)
            outcome = side.run(work)
            wrong = [len(tokens) for tokens in outcome.tokens if len(tokens) != options.output_tokens]
            if wrong:
                raise RuntimeError(f"{side.name} generated {wrong[0]} tokens instead of {options.output_tokens}")
            if pair:
                outcomes[side.name].append(outcome)
    progress("pairs run", options.pairs + 1, options.pairs + 1)
    return outcomes


def _work(options: OfflineOptions, pair: int) -> Work:
    generator = np.random.default_rng([options.seed, pair])
    vocabulary = read_model_config(Path(options.model)).vocab_size
    prompts = generator.integers(0, vocabulary, (options.requests, options.prompt_tokens)).tolist()
    return Work(prompts, [i % options.adapters for i in range(options.requests)], options.output_tokens)


def _report(options: OfflineOptions, ranks: list[int], outcomes: dict[str, list[Outcome]]) -> dict[str, Any]:
    output_tokens = options.requests * options.output_tokens
    total_tokens = output_tokens + options.requests * options.prompt_tokens
    runs_s = {name: [outcome.seconds for outcome in runs] for name, runs in outcomes.items()}
    median_s = {name: statistics.median(seconds) for name, seconds in runs_s.items()}
    report: dict[str, Any] = {
        "output_tok_s": output_tokens / median_s["lorikeet"],
        "total_tok_s": total_tokens / median_s["lorikeet"],
    }
    if options.peer:
        ratios = [theirs / ours for ours, theirs in zip(runs_s["lorikeet"], runs_s[options.peer], strict=True)]
        report |= {
            "peer": options.peer,
            "peer_output_tok_s": output_tokens / median_s[options.peer],
            "peer_total_tok_s": total_tokens / median_s[options.peer],
            "ratio": statistics.median(ratios),
            "ratio_interval": median_interval(ratios),
            "ratios": ratios,
            "first_tokens_equal": _agreement(outcomes["lorikeet"], outcomes[options.peer]),
        }
    return report | {
        "runs_s": runs_s,
        "ranks": ranks,
        "setup": msgspec.to_builtins(options) | {"model": Path(options.model).name},
        "versions": _versions(options.peer),
    }


def _agreement(ours: list[Outcome], theirs: list[Outcome]) -> float:
    """Share of requests whose first token is the same on both sides: a check that both did the same work."""
    pairs = [
        (a[0], b[0])
        for mine, other in zip(ours, theirs, strict=True)
        for a, b in zip(mine.tokens, other.tokens, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


def _versions(peer: str) -> dict[str, str]:
    from importlib.metadata import version

    names = ("lorikeet", "torch", *(("transformers", "peft") if peer == "peft" else ()))
    return {name: version(name) for name in names}
