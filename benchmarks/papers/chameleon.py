"""Chameleon's setting, modelled: its queues and its cache beside S-LoRA's, below and beyond the knee.

Iliakopoulou and others, "Chameleon: Adaptive Caching and Scheduling for Many-Adapter LLM Inference Environments".
Numbers beside ours are those of the text: Llama-7B on an A40, 100 adapters of ranks 8 to 128, lengths of Azure's trace
(CC-BY 4.0), Poisson arrivals, a predictor that is right four times in five. The knee is the highest rate at which the
requests that wait under S-LoRA do not become more; loads are shares of it, as the paper's 6, 8 and 9 requests/s are of
its 8.7.
"""

from functools import cache
from itertools import product
from statistics import fmean

import numpy as np

from benchmarks.harness import print_table
from benchmarks.papers.runs import AZURE, Engine, Figures, Options, Runs, less, main, peak, run_engine, trace
from lorikeet.bench.arrivals import Rates, at_rate
from lorikeet.bench.memory_work import MemoryWork
from lorikeet.bench.recipe import Recipe
from lorikeet.bench.synthetic import PAPER_RANKS, adapter_names, spread
from lorikeet.bench.workload import WorkloadRequest
from lorikeet.costs.catalog import load_profile
from lorikeet.scheduling.policies import ADMISSION

PROFILE, ADAPTERS, CHOICE, SEED = "a40-llama-2-7b", 100, "rank-power:1", 7
OURS, FIFO, NO_CACHE, NO_SCHEDULER = "chameleon", "chameleon:s-lora", "chameleon:no-cache", "chameleon:no-scheduler"
SYSTEMS = (FIFO, NO_CACHE, NO_SCHEDULER, OURS)
LOADS = {"low": 6 / 8.7, "medium": 8 / 8.7, "high": 9 / 8.7}
PRINTED = {"low": (0.139, 0.147), "medium": (0.209, 0.246), "high": (0.481, 0.807)}
"""By which P50 and P99 TTFT are below S-LoRA's (5.2)."""
THROUGHPUT = {OURS: 1.5, NO_SCHEDULER: 1.2, NO_CACHE: 1.1}
"""Load within the limit on P99 TTFT over S-LoRA's (5.2)."""
EVICTION = {"chameleon:lru": 0.18, "chameleon:fairshare": 0.22, NO_SCHEDULER: 0.26, "chameleon:prefetch": None}
"""By which P99 TTFT at medium load is below S-LoRA's (5.3)."""
READINGS = tuple(f"{OURS},admission={name}" for name in ADMISSION if name.startswith(f"{OURS}:"))
"""Every reading of what the paper leaves open that has a name."""
OTHERS = ("chameleon:sjf", "chameleon:sjf-aging", "chameleon:output-only")
PREDICTED = tuple(product((OURS, "chameleon:output-only"), (1.0, 0.8, 0.6)))
HALF_HOUR_S, KNEE_SEEDS, GROWTH, HIGH_S = 1800.0, (7, 8, 9, 10), 0.01, 58 * 60.0
SLO_TIMES, UNLOADED = 5, 0.1
MEDIAN = (1020, 129)
"""Tokens of the median prompt and answer."""


def run(runs: Runs, options: Options) -> None:
    """Run all and print the tables."""
    requests, high_s, seeds = (1_000, 600.0, KNEE_SEEDS[:1]) if options.quick else (10_000, HIGH_S, KNEE_SEEDS)
    knee = runs.all({"knee": (find_knee, seeds, HALF_HOUR_S / (3 if options.quick else 1))})["knee"]
    print(f"The knee lies at {knee:.2f} requests/s.\n", flush=True)
    counts = {load: round(LOADS[load] * knee * high_s) if load == "high" else requests for load in LOADS}
    cases = [
        *product(SYSTEMS, LOADS, [0.8]),
        *product(EVICTION, ["medium"], [0.8]),
        *((preset, "high", accuracy) for preset, accuracy in PREDICTED),
        *([] if options.quick else product((*OTHERS, *READINGS), ["high"], [0.8])),
    ]
    found = runs.all(
        {
            f"{load}-{preset}-{accuracy:g}": (run_at, preset, LOADS[load] * knee, counts[load], f"oracle:{accuracy:g}")
            for preset, load, accuracy in dict.fromkeys(cases)
        }
    )

    def row(load: str, preset: str, accuracy: float = 0.8) -> list[str]:
        own, fifo = (found[f"{load}-{name}"] for name in (f"{preset}-{accuracy:g}", f"{FIFO}-0.8"))
        shown = [f"{load} ({LOADS[load]:.2f})", preset]
        for key, paper in zip(("ttft_p50_s", "ttft_p99_s"), PRINTED[load], strict=True):
            beside = "" if preset == FIFO else less(own[key], fifo[key])
            shown += [f"{own[key]:.2f}", beside, f"{paper:.0%}" if preset == OURS and accuracy == 0.8 else ""]
        return [*shown, f"{own['adapter_hit_rate']:.0%}"]

    headings = ["load", "preset", "P50 TTFT, s", "less", "paper", "P99 TTFT, s", "less", "paper", "adapter hits"]
    print_table("Latency", headings, [row(load, preset) for load, preset in product(LOADS, SYSTEMS)])
    fifo_s = found[f"medium-{FIFO}-0.8"]["ttft_p99_s"]
    rows = [
        [preset, f"{own['ttft_p99_s']:.2f}", less(own["ttft_p99_s"], fifo_s), "" if paper is None else f"{paper:.0%}"]
        for preset, paper in EVICTION.items()
        for own in [found[f"medium-{preset}-0.8"]]
    ]
    print_table("Eviction, at medium load", ["preset", "P99 TTFT, s", "less", "paper"], rows)
    rows = [[f"{preset}, right {accuracy:.0%}", *row("high", preset, accuracy)[2:]] for preset, accuracy in PREDICTED]
    print_table("Predictors, at high load", ["preset", *headings[2:]], rows)
    if not options.quick:
        rows = [row("high", preset)[1:] for preset in (*OTHERS, *READINGS)]
        print_table("Other schedulers and readings, at high load", headings[1:], rows)
    throughput(runs, knee, requests)
    print_table("One by one: TTFT of the median request, ms", ["rank", "base", "adapter there", "on the host"], alone())


def throughput(runs: Runs, knee: float, requests: int) -> None:
    """Print the highest rate of each system within a limit on P99 TTFT."""
    slo_s = SLO_TIMES * run_at(FIFO, UNLOADED * knee, min(requests, 1_000), "oracle:0.8")["ttft_mean_s"]
    found = runs.all(
        {f"peak-{preset}": (find_peak_of, preset, LOADS["low"] * knee, slo_s, requests) for preset in SYSTEMS}
    )
    rows = []
    for preset in SYSTEMS:
        rate = found[f"peak-{preset}"]
        paper = f"{THROUGHPUT[preset]:g}" if preset in THROUGHPUT else ""
        rows.append([preset, f"{rate:.2f}", f"{rate / found[f'peak-{FIFO}']:.2f}", paper])
    print_table(f"Rates with a P99 TTFT within {slo_s:.2f} s", ["preset", "requests/s", "x S-LoRA's", "paper"], rows)


def find_peak_of(preset: str, first_rate: float, slo_s: float, requests: int) -> float:
    """Return the highest rate at which P99 TTFT keeps the limit."""
    return peak(lambda rate: slo_s / run_at(preset, rate, requests, "oracle:0.8")["ttft_p99_s"], first_rate, 0.02)


def find_knee(seeds: tuple[int, ...], duration_s: float) -> float:
    """Return the highest rate at which TTFT under S-LoRA does not grow over the run."""

    def holds(rate: float) -> float:
        growth = fmean(growth_of(run_at(FIFO, rate, round(rate * duration_s), "", seed), rate) for seed in seeds)
        return float(growth <= GROWTH)

    return peak(holds, 1.2, 0.01)


def growth_of(made: Figures, rate: float) -> float:
    """Return by how much of the arrivals the waiting requests become more.

    Where a queue grows, the TTFT of those that arrive grows by as many seconds a second, as a first-in, first-out queue
    makes a request wait for those before it. The first third is left out: the engine has filled by then.
    """
    ttft_s = np.array(made["ttft_s"])
    arrivals_s = np.arange(len(ttft_s)) / rate
    kept = len(ttft_s) // 3
    return float(np.polyfit(arrivals_s[kept:], ttft_s[kept:], 1)[0])


def run_at(preset: str, rate: float, requests: int, predictor: str, seed: int = SEED) -> Figures:
    """Return the figures of a run at a rate. Arrivals are stretched to have exactly that rate."""
    names, rates = tuple(adapter_names(ADAPTERS)), Rates.constant(rate)
    recipe = Recipe(
        lengths=trace(AZURE),
        rates=rates,
        count=requests,
        adapters=names,
        ranks=tuple(spread(PAPER_RANKS, ADAPTERS)),
        adapter_choice=CHOICE,
        seed=seed,
    )
    work = MemoryWork(at_rate(recipe.requests(), rates), names, 2, seed)
    return run_engine(preset, engine_of(ADAPTERS, PAPER_RANKS, predictor), work)


def engine_of(adapters: int, ranks: tuple[int, ...], predictor: str = "") -> Engine:
    """Return where all runs run. The trace has prompts of 14,050 tokens; no time depends on the model's own limit."""
    return Engine(
        profile=load_profile(PROFILE),
        adapters=adapters,
        ranks=ranks,
        host_bytes=64 * 10**9,
        max_num_batched_tokens=512,
        max_model_len=16_384,
        predictor=predictor,
    )


def alone() -> list[list[str]]:
    """Return TTFT of the median request alone: of the base model, with its adapter there, and with it on the host."""

    @cache
    def ttft(preset: str, rank: int, adapter: str | None) -> str:
        # The second of two requests far apart: S-LoRA has let its adapter go by then.
        requests = [WorkloadRequest(at_s, adapter, *MEDIAN) for at_s in (0.0, 100.0)]
        work = MemoryWork(requests, tuple(adapter_names(1)), 2, SEED)
        return f"{run_engine(preset, engine_of(1, (rank,)), work)['ttft_s'][1] * 1e3:.1f}"

    name = adapter_names(1)[0]
    return [
        [str(rank), ttft(NO_SCHEDULER, rank, None), ttft(NO_SCHEDULER, rank, name), ttft(FIFO, rank, name)]
        for rank in PAPER_RANKS
    ]


if __name__ == "__main__":
    main(__doc__ or "", "chameleon", run)
