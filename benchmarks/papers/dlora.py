"""dLoRA's settings, modelled: batching modes on one engine by skew, and its cluster.

Wu and others, "dLoRA: Dynamically Orchestrating Requests and Adapters for LoRA LLM Serving" (OSDI 2024). Numbers beside
ours are those of the text. On one server: Llama-2-7B, 8 adapters of rank 8, lengths of ShareGPT, calls of Azure's
functions; all are maxima over a grid of skewness that is not printed. The cluster is half of the paper's: Llama-2-70B
on 4 replicas of four A100, 16 adapters.
"""

from itertools import product

import msgspec
import numpy as np

from benchmarks.harness import print_table
from benchmarks.papers.runs import (
    Cluster,
    Engine,
    Figures,
    Options,
    Runs,
    highest,
    ladder,
    main,
    mean_of,
    peak,
    run_cluster,
    run_engine,
    work_of,
)
from lorikeet.bench.arrivals import Rates, at_rate
from lorikeet.bench.memory_work import MemoryWork
from lorikeet.bench.recipe import FUNCTION_ARRIVALS, Recipe
from lorikeet.bench.synthetic import adapter_names, synthetic_adapters
from lorikeet.bench.workload import Range, WorkloadRequest
from lorikeet.core.plan import KernelForm
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.model import CostModel, SequenceWork, step_work

PROFILE, CLUSTER_PROFILE = "a100-80-llama-2-7b", "a100-80x4-llama-2-70b"
OURS, MERGED, UNMERGED = "dlora", "merged-only", "unmerged-only"
PRESETS = (OURS, MERGED, UNMERGED, "dlora:peft", "dlora:vllm-uniform", "dlora:s-lora")
ABLATIONS = ("dlora:no-credits", "dlora:no-tuning", "dlora:alone")
PRINTED = {MERGED: 3.9, UNMERGED: 2.4, "dlora:s-lora": 1.8}
"""Times dLoRA's average latency per output token, at the most (7.3, 7.7)."""
SKEWS, PHASES = (1, 10, 100, 1000), "phases"
"""Functions that follow one another to the same adapter (7.1)."""
ADAPTERS, RANK, VARIATION, SEED = 8, 8, 4.0, 7
PHASE_ADAPTERS, PHASE_S, PHASE_SHARE, PHASE_LOAD = 32, 120.0, 0.95, 0.7
"""One adapter has nearly all requests, then all have as many, then the one again; at a share of the peak."""
SLO_STEPS = 10
"""Limit of the average latency per output token, in decode steps (7.1)."""
ADAPTER_SHARE = 0.389
"""Time of an adapter's computation over the base's (4.1)."""
MEAN_TOKENS, SIGMA, LONGEST = (161, 338), 1.0, 2048
"""Of ShareGPT's prompts and answers, as the paper of vLLM prints them (Kwon and others, 2023, Fig. 11)."""

REPLICAS, CLUSTER_ADAPTERS = 4, 16
PROACTIVE, ROUND_ROBIN, PEFT, VLLM = "dlora:proactive", "dlora:rr", "dlora:peft", "dlora:vllm-uniform"
CLUSTER_PRESETS = (OURS, PROACTIVE, ROUND_ROBIN, PEFT, VLLM)
CLUSTER_RATES = {PEFT: 26.0, VLLM: 57.9}
"""Times the request rate within the limit at the most (7.2)."""
CLUSTER_WAITS = {PROACTIVE: 1.4, ROUND_ROBIN: 3.6}
"""Times dLoRA's mean queueing delay, on one server of 8 devices (7.4)."""
RATES = ladder(1.5, 1.2, 25)
SEEDS = (7, 8, 9, 10)


def run(runs: Runs, options: Options) -> None:
    """Run all and print the tables."""
    requests, precision = (1_000, 0.2) if options.quick else (1_500, 0.05)
    kinds: list[int | str] = [10, PHASES] if options.quick else [*SKEWS, PHASES]
    peaks = runs.all(
        {f"peak-{kind}": (find, UNMERGED if kind == PHASES else OURS, kind, requests, precision) for kind in kinds}
    )
    rates = {kind: peaks[f"peak-{kind}"] * (PHASE_LOAD if kind == PHASES else 1) for kind in kinds}
    found = runs.all(
        {
            f"{kind}-{preset}": (run_at, preset, kind, rates[kind], requests)
            for kind, preset in product(kinds, (*PRESETS, *ABLATIONS))
        }
    )
    rows = []
    for preset in (*PRESETS, *ABLATIONS):
        times = {kind: found[f"{kind}-{preset}"]["latency_per_token_s"] for kind in kinds}
        beside = {kind: times[kind] / found[f"{kind}-{OURS}"]["latency_per_token_s"] for kind in kinds}
        largest = max(ratio for kind, ratio in beside.items() if kind != PHASES)
        paper = f"{PRINTED[preset]:g}" if preset in PRINTED else ""
        rows.append([preset, *(f"{each:.2f}" for each in beside.values()), f"{largest:.2f}", paper])
    columns = [f"{'' if kind == PHASES else 'skew '}{kind}, {rates[kind]:.1f}/s" for kind in kinds]
    title = f"Latency per output token over dLoRA's, one server ({PROFILE})"
    print_table(title, ["preset", *columns, "largest over skews", "paper, at most"], rows)
    cluster(runs, options)


def cluster(runs: Runs, options: Options) -> None:
    """Print rates within the limit, and waits at dLoRA's."""
    duration_s, seeds = (30.0, SEEDS[:1]) if options.quick else (100.0, SEEDS)
    searched = (OURS, PEFT, VLLM)
    rates = runs.all({f"cluster-peak-{preset}": (find_cluster, preset, duration_s) for preset in searched})
    rate = rates[f"cluster-peak-{OURS}"] or RATES[0]
    made = runs.all(
        {
            f"cluster-{preset}-{seed}": (run_cluster_at, preset, rate, seed, duration_s)
            for preset, seed in product(CLUSTER_PRESETS, seeds)
        }
    )
    rows = []
    for preset in CLUSTER_PRESETS:
        own = [made[f"cluster-{preset}-{seed}"] for seed in seeds]
        ours = [made[f"cluster-{OURS}-{seed}"] for seed in seeds]
        found = rates.get(f"cluster-peak-{preset}")
        times = "" if found is None else f"{(rates[f'cluster-peak-{OURS}'] or RATES[0]) / (found or RATES[0]):.1f}"
        waits = f"{mean_of(own, 'ttft_mean_s') / mean_of(ours, 'ttft_mean_s'):.2f}"
        shown = "" if found is None else f"{found:.1f}"
        papers = [f"{each[preset]:g}" if preset in each else "" for each in (CLUSTER_RATES, CLUSTER_WAITS)]
        rows.append([preset, shown, times, papers[0], waits, papers[1], f"{mean_of(own, 'latency_per_token_s'):.3f}"])
    headings = ["preset", "requests/s", "dLoRA's is x times", "paper", "mean TTFT / dLoRA's", "paper", "s per token"]
    print_table(f"{REPLICAS} replicas ({CLUSTER_PROFILE}), at {rate:.1f}/s", headings, rows)


# --- one server --------------------------------------------------------------------------------------


def find(preset: str, kind: int | str, requests: int, precision: float) -> float:
    """Return the highest rate at which the average latency per output token keeps the limit."""
    limit_s = slo_s(PROFILE)
    return peak(lambda rate: limit_s / run_at(preset, kind, rate, requests)["latency_per_token_s"], 4.0, precision)


def run_at(preset: str, kind: int | str, rate: float, requests: int) -> Figures:
    """Return a preset's figures on functions of a skew, or on the phases; what it prefetches is there at first."""
    adapters = PHASE_ADAPTERS if kind == PHASES else ADAPTERS
    engine = Engine(profile=load_profile(PROFILE), adapters=adapters, ranks=(RANK,), settle=True)
    work = phases(rate, requests) if kind == PHASES else functions(rate, int(kind), requests)
    return run_engine(preset, engine, work)


def slo_s(profile: str) -> float:
    """Return the limit of the average latency per output token: ten decode steps."""
    form, step = KernelForm.EINSUM, SequenceWork(MEAN_TOKENS[0], 1, True, None, 0.0)
    return SLO_STEPS * CostModel(load_profile(profile), form).step_s(step_work([step], form))


def functions(rate: float, skew: int, count: int, adapters: int = ADAPTERS, seed: int = SEED) -> MemoryWork:
    """Return calls of adapters that stand for functions, each in bursts of its own."""
    rates, names = Rates.constant(rate), tuple(adapter_names(adapters))
    recipe = Recipe(
        arrivals=FUNCTION_ARRIVALS,
        function_chunk=skew,
        variation=VARIATION,
        lengths=lengths(),
        rates=rates,
        count=count,
        adapters=names,
        seed=seed,
    )
    return work_of(at_rate(recipe.requests(), rates), names, seed)


def lengths() -> tuple[WorkloadRequest, ...]:
    """Return requests as long as ShareGPT's on average, log-normal."""
    generator = np.random.default_rng(SEED)
    drawn = [generator.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, 10_000) for mean in MEAN_TOKENS]
    tokens = np.clip(np.rint(np.stack(drawn)), 1, LONGEST).astype(int)
    return tuple(WorkloadRequest(0.0, None, *each) for each in tokens.T.tolist())


def phases(rate: float, requests: int) -> MemoryWork:
    """Return requests of three phases: one adapter has nearly all, then all have as many, then the one again."""
    names, rates, phase_s = tuple(adapter_names(PHASE_ADAPTERS)), Rates.constant(rate), PHASE_S * requests / 1_500
    recipe = Recipe(
        rates=rates,
        count=round(3 * phase_s * rate),
        prompt_tokens=Range(1, 321),
        output_tokens=Range(1, 675),
        adapters=names,
        seed=3,
    )
    generator = np.random.default_rng(3)

    def adapter(arrival_s: float) -> str:
        is_first, other = generator.random() < PHASE_SHARE, int(generator.integers(len(names)))
        if phase_s <= arrival_s < 2 * phase_s:
            return names[other]
        return names[0] if is_first else names[1 + other % (len(names) - 1)]

    asked = at_rate(recipe.requests(), rates)
    return work_of([msgspec.structs.replace(each, adapter=adapter(each.arrival_s)) for each in asked], names, 3)


# --- the cluster -------------------------------------------------------------------------------------


def find_cluster(preset: str, duration_s: float) -> float:
    """Return the highest of ``RATES`` at which the average latency per output token keeps the limit; 0 for none."""
    limit_s = slo_s(CLUSTER_PROFILE)
    return highest(
        RATES, lambda rate: run_cluster_at(preset, rate, SEEDS[0], duration_s)["latency_per_token_s"] <= limit_s
    )


def run_cluster_at(preset: str, rate: float, seed: int, duration_s: float) -> Figures:
    """Return the figures of a run; functions have the least skew, since none is printed."""
    profile = load_profile(CLUSTER_PROFILE)
    adapters = tuple(synthetic_adapters(CLUSTER_ADAPTERS, (RANK,), profile.geometry))
    work = functions(rate, 1, round(rate * duration_s), CLUSTER_ADAPTERS, seed)
    return run_cluster(preset, Cluster(profile=profile, replicas=REPLICAS, adapters=adapters), work.requests, seed)


if __name__ == "__main__":
    main(__doc__ or "", "dlora", run)
