"""dLoRA's modelled settings: batching modes on one server by skew, clusters of three models, migration and scale.

Wu and others, "dLoRA: Dynamically Orchestrating Requests and Adapters for LoRA LLM Serving" (OSDI 2024). The paper
leaves some conditions open: skews, rates, the largest batch, credits, and how swapping instances share a device. A grid
covers them; it is fixed here and shown whole.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from statistics import NormalDist
from typing import Any

import msgspec
import numpy as np

from benchmarks.memory_work import MemoryWork
from benchmarks.papers.measure import (
    SEEDS,
    Figure,
    Measurement,
    Paper,
    Plot,
    Run,
    Series,
    Table,
    compared,
    most_of,
    times,
)
from benchmarks.papers.runs import Cluster, Engine, Figures, peak, run_cluster, run_engine, work_of
from lorikeet.core.plan import KernelForm
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.model import CostModel, SequenceWork, step_work
from lorikeet.costs.profile import Constant, CostProfile, Switching
from lorikeet.workloads.arrivals import Rates, at_rate
from lorikeet.workloads.recipe import FUNCTION_ARRIVALS, Recipe
from lorikeet.workloads.synthetic import adapter_names, synthetic_adapters
from lorikeet.workloads.workload import WorkloadRequest

# --- the grid: written down before anything was run --------------------------------------------------

SKEWS = (1, 10, 100, 1000)
"""Successive functions that use one adapter (7.1): from an almost even load to almost all requests on one adapter."""
LOADS = (0.7, 1.0)
"""Shares of the rate at which dLoRA's average latency equals the limit (7.3)."""
BATCH, SMALL_BATCH = 32, 8
"""Maximum number of requests in a batch, which the paper does not print.

The printed limit of ten iterations is 0.5 s, and by the profile an iteration of 7B takes 50 ms with about 200 requests;
the time of a run grows with its requests, whose number the limit makes proportional to the batch. So claims of one
server are judged at 32; the rest of the grid and the clusters use 8.
"""
CREDITS = ("dlora:patience-64", "dlora:patience-16384", "dlora:no-credits", "dlora:no-tuning", "lorikeet:merge-turns")
"""Presets with other credits than ours (1,024), the ablations, and our extension."""
SLICES_S = (0.0, 1.0, 10.0, float("inf"))
"""Seconds of steps after which vLLM's instances on a device swap; 0: after every step, infinite: when one is idle.

Claims use the first value: instances are independent, and vLLM schedules every iteration anew.
"""
SHARED_SLICE_S = 0.1
"""Seconds of steps after which instances that are in memory together take turns."""
SCALES = (1.0, 2.0, 4.0)
"""Factors applied to the lengths of prompts and answers (7.4)."""

# --- the setting -------------------------------------------------------------------------------------

PROFILES = {"7b": "a100-80-llama-2-7b", "13b": "a100-80-llama-2-13b", "70b": "a100-80x4-llama-2-70b"}
OURS, MERGED, UNMERGED, S_LORA = "dlora", "merged-only", "unmerged-only", "dlora:s-lora"
SYSTEMS = (OURS, MERGED, UNMERGED, S_LORA)
PEFT, VLLM, RR, PROACTIVE = "dlora:peft", "dlora:vllm-uniform", "dlora:rr", "dlora:proactive"
ADAPTERS, RANK = 8, 8
ADAPTERS_PER_DEVICE, DEVICES = 4, 2
"""128 models on 32 devices, 32 of 70B on 8 times 4 (7.2); here 8 on 2, or on 2 times 4."""
VARIATION = 4.0
"""Coefficient of variation of the gaps between an adapter's calls."""
SLO_STEPS, SLO_TOKENS = 10, 400
"""The limit on the average latency per output token, in iterations (7.1) of a full batch, and its context."""
WINDOW_LIMITS = 5
"""Length of a run, as a multiple of the latency that the limit allows for a mean answer."""
MEAN_TOKENS, LONGEST, CONTEXT, CONVERSATIONS = (161, 338), (636.7, 163.9), 4096, 90_000
"""ShareGPT's prompts and answers: means (Kwon and others, 2023, Fig. 11), longest over mean (2.3), and the approximate
number of conversations. Longer requests are clipped at the model's context."""
SHORT_POOL_BYTES = 3 * 10**9
"""Memory of a replica in 7.4, where memory is short.

The device's 64 GB hold 476 tokens for each of 256 requests, the largest batch of vLLM: less than a mean request needs
at its end. 3 GB hold 715 tokens for each of 8 requests, and one request of 4,096.
"""
_FREE = "models that are in memory together: nothing is copied"
FAST = Switching(
    Constant(0.0, "s", source=_FREE), Constant(0.0, "s/rank", source=_FREE), Constant(0.0, "s", source=_FREE)
)
"""Swap costs of models that are in memory together: running another one costs nothing."""

KEPT = ("latency_per_token_s", "ttft_mean_s", "e2e_p90_s", "drained_s")


@cache
def lengths(scale: float = 1.0) -> tuple[WorkloadRequest, ...]:
    """Return requests with ShareGPT's printed means and longest requests, log-normal, clipped at the context."""
    generator = np.random.default_rng(7)
    prompts, answers = (
        generator.permutation(np.maximum(1, np.rint(scale * mean * of_mean(longest))))
        for mean, longest in zip(MEAN_TOKENS, LONGEST, strict=True)
    )
    prompts = np.minimum(prompts, CONTEXT - 1)
    answers = np.minimum(answers, CONTEXT - prompts)
    return tuple(WorkloadRequest(0.0, None, int(p), int(a)) for p, a in zip(prompts, answers, strict=True))


@cache
def of_mean(longest: float) -> np.ndarray:
    """Return quantiles of the log-normal distribution whose longest of ``CONVERSATIONS`` is ``longest`` means."""
    normal = NormalDist()
    places = np.array([normal.inv_cdf((number + 0.5) / CONVERSATIONS) for number in range(CONVERSATIONS)])
    low, high = 0.1, float(places[-1])
    while high - low > 1e-6:
        middle = (low + high) / 2
        drawn = np.exp(middle * places)
        low, high = (middle, high) if drawn[-1] < longest * drawn.mean() else (low, middle)
    drawn = np.exp(low * places)
    return drawn / drawn.mean()


def mean_answer_tokens(scale: float = 1.0) -> float:
    """Return the mean length of an answer."""
    return float(np.mean([request.output_tokens for request in lengths(scale)]))


@cache
def slo_s(model: str, batch: int = SMALL_BATCH) -> float:
    """Return the limit on the average latency per output token: ten decode iterations of a full batch (7.1)."""
    profile = load_profile(PROFILES[model])
    work = [SequenceWork(SLO_TOKENS, 1, True, request % ADAPTERS, RANK) for request in range(batch)]
    form = KernelForm.EINSUM
    return SLO_STEPS * CostModel(profile, form).step_s(step_work(work, form))


def window_s(model: str, batch: int = SMALL_BATCH, scale: float = 1.0) -> float:
    """Return the seconds during which requests arrive."""
    return WINDOW_LIMITS * slo_s(model, batch) * mean_answer_tokens(scale)


def functions(
    rate: float,
    skew: int,
    adapters: int,
    seed: int,
    duration_s: float,
    scale: float = 1.0,
) -> MemoryWork:
    """Return at least a hundred calls of adapters that represent functions, each with independent bursts."""
    rates, names = Rates.constant(rate), tuple(adapter_names(adapters))
    recipe = Recipe(
        arrivals=FUNCTION_ARRIVALS,
        function_chunk=skew,
        variation=VARIATION,
        lengths=lengths(scale),
        rates=rates,
        count=max(100, round(rate * duration_s)),
        adapters=names,
        seed=seed,
    )
    return work_of(at_rate(recipe.requests(), rates), names, seed)


def kept(figures: Figures, *more: str) -> Figures:
    """Return the figures that claims use, and the requests per second served."""
    count = len(figures["ttft_s"])
    return {key: figures[key] for key in (*KEPT, *more)} | {"served_per_s": count / figures["drained_s"]}


# --- one server (7.3, 7.5, 7.7) ----------------------------------------------------------------------


def find_rate(skew: int, batch: int) -> float:
    """Return the rate at which dLoRA's average latency per output token is about the limit."""
    limit_s = slo_s("7b", batch)
    holds = lambda rate: limit_s / serve(1.0, OURS, skew, rate, batch, SEEDS[0])["latency_per_token_s"]  # noqa: E731
    return peak(holds, 2.5 if batch == SMALL_BATCH else 10.0, 0.1)


def serve(found: float, preset: str, skew: int, load: float, batch: int, seed: int) -> Figures:
    """Return a preset's figures on one server at a share of the rate that ``find_rate`` found."""
    engine = Engine(
        profile=load_profile(PROFILES["7b"]), adapters=ADAPTERS, ranks=(RANK,), settle=True, max_num_seqs=batch
    )
    work = functions(found * load, skew, ADAPTERS, seed, window_s("7b", batch))
    return kept(run_engine(preset, engine, work), "switches", "switch_s", "merged_steps")


def rate_of(skew: int, batch: int = BATCH) -> Run:
    """Return the run that finds the rate of a skew."""
    return Run(find_rate, (skew, batch))


SERVER_SEEDS = SEEDS[:2]
"""Seeds of the grid; they are few because the grid is large."""


def served(
    preset: str, skew: int, load: float = 1.0, batch: int = BATCH, seeds: Sequence[int] = SERVER_SEEDS
) -> tuple[Run, ...]:
    """Return the runs of a preset on one server, one per seed."""
    return tuple(Run(serve, (preset, skew, load, batch, seed), (rate_of(skew, batch),)) for seed in seeds)


def largest(baseline: str, key: str) -> Figure:
    """Return the largest ratio of a baseline's figure to dLoRA's, over the skews at the limit."""
    return most_of([compared(times, served(baseline, skew), served(OURS, skew), key) for skew in SKEWS])


def inference_share(made: Sequence[Figures]) -> float:
    """Return the smallest percentage of a run's time that was not spent on switches.

    The solver runs beside the engines.
    """
    return min(100 * (1 - each["switch_s"] / each["drained_s"]) for each in made)


Cells = Sequence[tuple[int, float, int]]
"""Cells of the grid: skews, loads and largest batches."""
JUDGED: Cells = [(skew, 1.0, BATCH) for skew in SKEWS]
SMALL: Cells = [(skew, load, SMALL_BATCH) for load in LOADS for skew in SKEWS]


def seeds_of(load: float, batch: int) -> tuple[int, ...]:
    """Return the seeds of a cell of the grid: all seeds if claims are judged there."""
    return SERVER_SEEDS if load == 1.0 and batch == BATCH else SEEDS[:1]


def grid_runs(cells: Cells) -> tuple[Run, ...]:
    """Return the runs of all systems in some cells of the grid."""
    return tuple(
        run
        for skew, load, batch in cells
        for preset in SYSTEMS
        for run in served(preset, skew, load, batch, seeds_of(load, batch))
    )


CREDIT_RUNS = tuple(
    run for skew, preset in product(SKEWS, CREDITS) for run in served(preset, skew, batch=SMALL_BATCH, seeds=SEEDS[:1])
)


def grid_rows(cells: Cells) -> Callable[[Sequence[Figures]], list[list[Any]]]:
    """Return a function that makes a row for each cell: dLoRA's mean latency, and the others' divided by it."""

    def rows(made: Sequence[Figures]) -> list[list[Any]]:
        lines, rest = [], iter(made)
        for skew, load, batch in cells:
            latencies = [[next(rest)["latency_per_token_s"] for _ in seeds_of(load, batch)] for _ in SYSTEMS]
            ours = latencies[0]
            ratios = [np.mean([times(a, b) for a, b in zip(each, ours, strict=True)]) for each in latencies[1:]]
            limits = np.mean(ours) / slo_s("7b", batch)
            lines.append([skew, load, batch, len(ours), f"{limits:.2f}", *(f"{ratio:.2f}" for ratio in ratios)])
        return lines

    return rows


def credit_rows(made: Sequence[Figures]) -> list[list[Any]]:
    """Return a row for each skew: latencies divided by dLoRA's with our credits."""
    rows, rest = [], iter(made)
    base = [next(rest) for _ in SKEWS]
    for skew, ours in zip(SKEWS, base, strict=True):
        ratios = [times(next(rest)["latency_per_token_s"], ours["latency_per_token_s"]) for _ in CREDITS]
        rows.append([skew, *(f"{ratio:.2f}" for ratio in ratios)])
    return rows


BASE_RUNS = tuple(run for skew in SKEWS for run in served(OURS, skew, batch=SMALL_BATCH, seeds=SEEDS[:1]))


def by_skew(key: str, runs: tuple[Run, ...]) -> Callable[[Sequence[Figures]], list[Series]]:
    """Return the lines of a plot: each system's mean over the seeds by skew."""

    def series(made: Sequence[Figures]) -> list[Series]:
        lines, count = [], len(SERVER_SEEDS)
        for number, preset in enumerate(SYSTEMS):
            means = []
            for place in range(len(SKEWS)):
                first = (place * len(SYSTEMS) + number) * count
                means.append(float(np.mean([each[key] for each in made[first : first + count]])))
            lines.append(Series(preset, [float(np.log10(skew)) for skew in SKEWS], means))
        return lines

    return series


SKEW_RUNS = grid_runs(JUDGED)

ONE_SERVER = Measurement(
    "Batching modes on one server (7.3, 7.5, 7.7)",
    {
        "model": "Llama-2-7B, 8 adapters of rank 8",
        "device": "one A100 80 GB (the A800 differs in NVLink only)",
        "link": "PCI Express 4.0 by data sheet; all adapters are on the device",
        "lengths": "ShareGPT: means 161 and 338 tokens, longest 636.7 and 163.9 times the mean, clipped at 4,096",
        "arrivals": "functions in gamma gaps (variation 4), mapped round robin in chunks of the skew",
        "load": "the rate of each skew at which dLoRA's average latency is the limit, by a search with the first seed",
        "limit": "10 decode iterations of a full batch by the profile: 0.19 s (32), 0.14 s (8); printed 0.5 s",
        "window": "5 times the latency that the limit allows a mean answer; arrivals then stop, all are answered",
        "grid": f"skews {SKEWS}, loads {LOADS}, largest batch 32 and 8, five readings of the credits",
        "seeds": "2, paired, with batches of 32; 1 with batches of 8",
    },
    {
        "avg-latency-vs-merged-only": largest(MERGED, "latency_per_token_s"),
        "avg-latency-vs-unmerged-only": largest(UNMERGED, "latency_per_token_s"),
        "p90-latency-vs-merged-only": largest(MERGED, "e2e_p90_s"),
        "p90-latency-vs-unmerged-only": largest(UNMERGED, "e2e_p90_s"),
        "latency-vs-slora": largest(S_LORA, "latency_per_token_s"),
        "overhead-inference-share": Figure(
            tuple(
                run for skew, load in product(SKEWS, LOADS) for run in served(OURS, skew, load, SMALL_BATCH, SEEDS[:1])
            ),
            inference_share,
        ),
    },
    plots=[
        Plot(
            "Average latency by skew at dLoRA's limit, batch 32",
            "log10 of the skew",
            "seconds per output token",
            SKEW_RUNS,
            by_skew("latency_per_token_s", SKEW_RUNS),
            log_y=True,
        )
    ],
    tables=[
        *(
            Table(
                f"The grid, {name}: average latency per token, others' over dLoRA's",
                ["skew", "load", "batch", "seeds", "dLoRA / limit", *SYSTEMS[1:]],
                grid_runs(cells),
                grid_rows(cells),
            )
            for name, cells in (("where the claims are judged", JUDGED), ("smaller batches", SMALL))
        ),
        Table(
            "Other readings, at the limit: average latency per token over dLoRA's",
            ["skew", *CREDITS],
            (*BASE_RUNS, *CREDIT_RUNS),
            credit_rows,
        ),
    ],
)

# --- clusters (7.2, 7.5) -----------------------------------------------------------------------------


def cluster_profile(preset: str, model: str) -> tuple[CostProfile, int]:
    """Return the profile of a replica, and its memory for adapters and KV (0: all of the profile's memory).

    vLLM's instances of 7B are in memory together, so their weights take memory, and running another instance costs
    nothing.
    """
    profile = load_profile(PROFILES[model])
    if preset.startswith(VLLM) and model == "7b":
        others = (ADAPTERS_PER_DEVICE - 1) * (profile.weight_bytes or 0)
        return msgspec.structs.replace(profile, switching=FAST), profile.pool_bytes - others
    return profile, 0


def vllm(model: str, slice_s: float) -> str:
    """Return vLLM's preset, whose instances take turns of ``slice_s`` seconds."""
    mode = "whole-models" if slice_s == float("inf") else f"whole-models(turn_s={slice_s:g})"
    return f"{VLLM},batching={mode}" + (",merge_by=delta" if model == "7b" else "")


def run_at(preset: str, model: str, rate: float, seed: int, adapters: int, scale: float = 1.0) -> Figures:
    """Return a preset's figures on two replicas at a rate; functions have the skew 10."""
    profile, memory_bytes = cluster_profile(preset, model)
    setting = Cluster(
        profile=profile,
        replicas=DEVICES,
        adapters=tuple(synthetic_adapters(adapters, (RANK,), profile.geometry)),
        memory_bytes=memory_bytes,
        max_num_seqs=SMALL_BATCH,
    )
    work = functions(rate, 10, adapters, seed, window_s(model, scale=scale), scale)
    return kept(run_cluster(preset, setting, work.requests, seed), "moves")


FIRST_RATES = {"7b": 4.0, "13b": 4.0, "70b": 2.0}
"""Rates at which searches for dLoRA begin."""


def find_peak_rate(preset: str, model: str, seed: int) -> float:
    """Return the highest rate at which the average latency per output token keeps the limit."""
    limit_s, adapters = slo_s(model), ADAPTERS_PER_DEVICE * DEVICES
    first = FIRST_RATES[model] if preset == OURS else 0.5
    return peak(lambda rate: limit_s / run_at(preset, model, rate, seed, adapters)["latency_per_token_s"], first, 0.2)


CLUSTER_SEEDS = SEEDS[:2]
"""A search costs several runs."""


def peaks(preset: str, model: str, seeds: Sequence[int] = CLUSTER_SEEDS) -> tuple[Run, ...]:
    """Return the searches of a preset, one per seed."""
    return tuple(Run(find_peak_rate, (preset, model, seed)) for seed in seeds)


def rates_over(model: str, preset: str) -> Figure:
    """Return dLoRA's highest rate divided by a baseline's, seed by seed."""
    return compared(times, peaks(OURS, model), peaks(preset, model), float)


def serve_cluster(found: float, preset: str, adapters: int, seed: int) -> Figures:
    """Return a preset's figures at dLoRA's highest rate for more adapters."""
    return run_at(preset, "7b", found, seed, adapters)


def drop_of(preset: str) -> Figure:
    """Return the throughput of a preset with one adapter per device over that with all adapters, at the same rate."""
    found = peaks(OURS, "7b", SEEDS[:1])
    few, many = (
        tuple(Run(serve_cluster, (preset, adapters, seed), found) for seed in CLUSTER_SEEDS)
        for adapters in (DEVICES, ADAPTERS_PER_DEVICE * DEVICES)
    )
    return compared(times, few, many, "served_per_s")


SWAPPED = ("13b", "70b")
SLICE_RUNS = tuple(
    run
    for model in SWAPPED
    for preset in (OURS, *(vllm(model, slice_s) for slice_s in SLICES_S))
    for run in peaks(preset, model, SEEDS[:1])
)


def slice_rows(made: Sequence[float]) -> list[list[Any]]:
    """Return a row for each model: dLoRA's rate divided by vLLM's, by slice."""
    size = 1 + len(SLICES_S)
    rows = []
    for number, model in enumerate(SWAPPED):
        ours, *theirs = made[number * size : (number + 1) * size]
        rows.append([model, f"{ours:.2f}", *(f"{times(ours, each):.1f}" for each in theirs)])
    return rows


CLUSTERS = Measurement(
    "Highest rates of three models (7.2), and more adapters (7.5)",
    {
        "model": "Llama-2-7B and 13B, 8 adapters on 2 devices; 70B, 8 on 2 replicas of 4 devices; rank 8",
        "device": "A100 80 GB; the paper has 32, and as many models a device",
        "link": "PCI Express 4.0 by data sheet: a swap takes 1.0 s (13B), 1.4 s (70B)",
        "lengths": "as on one server",
        "arrivals": "as on one server, skew 10",
        "load": "searched to 20 %",
        "limit": "10 decode iterations of a full batch by the profiles: 0.14 to 0.46 s; printed 0.5 s",
        "window": "5 times the latency that the limit allows a mean answer, and at least 100 requests",
        "vLLM": "separate instances: of 7B four share a device by time, of 13B and 70B they swap after every iteration",
        "seeds": "2, paired; 1 for the slices",
    },
    {
        **{f"throughput-vs-peft-{model}": rates_over(model, PEFT) for model in ("7b", "13b")},
        "throughput-vs-peft-70b-max": rates_over("70b", PEFT),
        "throughput-vs-vllm-7b": rates_over("7b", vllm("7b", SHARED_SLICE_S)),
        "throughput-vs-vllm-13b": rates_over("13b", vllm("13b", SLICES_S[0])),
        "throughput-vs-vllm-70b-max": rates_over("70b", vllm("70b", SLICES_S[0])),
        "scalability-vllm-throughput-drop": drop_of(vllm("7b", SHARED_SLICE_S)),
        "scalability-peft-throughput-drop": drop_of(PEFT),
    },
    tables=[
        Table(
            "dLoRA's highest rate over vLLM's, by seconds between swaps",
            ["model", "dLoRA, requests/s", *(f"{slice_s:g} s" for slice_s in SLICES_S)],
            SLICE_RUNS,
            slice_rows,
        )
    ],
)

# --- load balancing (7.4, 2.3) -----------------------------------------------------------------------

REPLICAS = 4
"""Number of simulated devices: half of the server's eight, with half of the adapters."""


def run_balanced(preset: str, rate: float, seed: int, scale: float) -> Figures:
    """Return a preset's figures on the server, whose replicas are short of memory."""
    profile, adapters = load_profile(PROFILES["7b"]), REPLICAS * ADAPTERS_PER_DEVICE
    setting = Cluster(
        profile=profile,
        replicas=REPLICAS,
        adapters=tuple(synthetic_adapters(adapters, (RANK,), profile.geometry)),
        memory_bytes=SHORT_POOL_BYTES,
        max_num_seqs=SMALL_BATCH,
    )
    work = functions(rate, 10, adapters, seed, window_s("7b"), scale)
    return kept(run_cluster(preset, setting, work.requests, seed), "moves")


def find_balanced() -> float:
    """Return dLoRA's highest rate on the server."""
    limit_s = slo_s("7b")
    return peak(lambda rate: limit_s / run_balanced(OURS, rate, 1, 1.0)["latency_per_token_s"], 6.0, 0.2)


BALANCED_LOAD = 0.9
"""Share of that rate: "under SLO"."""


def balance(found: float, preset: str, scale: float, seed: int) -> Figures:
    """Return a preset's figures at a rate that decreases as lengths grow."""
    return run_balanced(preset, BALANCED_LOAD * found / scale, seed, scale)


def balanced(preset: str, scale: float = 1.0, seeds: Sequence[int] = CLUSTER_SEEDS) -> tuple[Run, ...]:
    """Return the runs of a preset on the server, one per seed."""
    return tuple(Run(balance, (preset, scale, seed), (Run(find_balanced),)) for seed in seeds)


def largest_of_scales(first: str, second: str) -> Figure:
    """Return the largest ratio of one system's latency to the other's, over the scales."""

    def at(scale: float) -> Figure:
        one, other = (balanced(preset, scale, SEEDS[:1]) for preset in (first, second))
        return compared(times, one, other, "latency_per_token_s")

    return most_of([at(scale) for scale in SCALES])


def imbalance(seed: int) -> float:
    """Return the longest mean TTFT of eight replicas divided by the shortest: 32 adapters, four pinned to each."""
    waits = []
    for replica in range(8):
        engine = Engine(
            profile=load_profile(PROFILES["7b"]),
            adapters=ADAPTERS_PER_DEVICE,
            ranks=(RANK,),
            settle=True,
            max_num_seqs=SMALL_BATCH,
        )
        work = functions(1.5, 1, ADAPTERS_PER_DEVICE, 100 * seed + replica, window_s("7b") / 2)
        waits.append(run_engine(PEFT, engine, work)["ttft_mean_s"])
    return max(waits) / min(waits)


BALANCING = Measurement(
    "Load balancing (7.4, 2.3)",
    {
        "model": "Llama-2-7B (7.4 names none), 16 adapters of rank 8",
        "device": "4 A100 80 GB",
        "memory": "3 GB each for adapters and KV: about as short for 8 requests as all of it for 256",
        "lengths": "as on one server, times 1, 2 and 4",
        "arrivals": "as on one server, skew 10",
        "load": "0.9 of dLoRA's highest rate; divided by the factor on the lengths",
        "queueing delay": "time to the first token",
        "imbalance (2.3)": "8 replicas, 1.5 requests/s each, four adapters pinned to each, served as PEFT does",
        "seeds": "2, paired; 1 for the lengths",
    },
    {
        "queueing-delay-vs-rr": compared(times, balanced(RR), balanced(OURS), "ttft_mean_s"),
        "queueing-delay-vs-proactive": compared(times, balanced(PROACTIVE), balanced(OURS), "ttft_mean_s"),
        "length-scale-latency-rr-vs-dlora": largest_of_scales(RR, OURS),
        "length-scale-latency-proactive-vs-rr": largest_of_scales(RR, PROACTIVE),
        "length-scale-latency-proactive-vs-dlora": largest_of_scales(PROACTIVE, OURS),
        "motivation-queue-delay-imbalance": Figure((Run(imbalance, (1,)), Run(imbalance, (2,))), max),
    },
)

# --- arithmetic --------------------------------------------------------------------------------------


def longest_over_mean(part: int) -> Callable[[Sequence[Any]], float]:
    """Return the longest of the generated prompts (0) or answers (1) divided by their mean, before clipping."""
    return lambda _: float(of_mean(LONGEST[part]).max())


def kv_blocks_of_adapter(_: Sequence[Any]) -> float:
    """Return the blocks of 16 tokens' KV that the printed 56 MB hold: the printed 7 "tokens" are blocks."""
    return 56e6 / (16 * load_profile(PROFILES["7b"]).geometry.block_bytes(1))


def adapter_mb(_: Sequence[Any]) -> float:
    """Return the size of an adapter of rank 8 on all seven linear layers, in fp16."""
    geometry = load_profile(PROFILES["7b"]).geometry
    elements = sum(shape.in_features + shape.out_features for shape in geometry.modules.values())
    return geometry.layers * RANK * elements * 2 / 1e6


ARITHMETIC = Measurement(
    "Statistics of the workload, and arithmetic",
    {"lengths": "90,000 quantiles of log-normal distributions", "limit": "10 iterations of 8 requests on 70B"},
    {
        "sharegpt-longest-input-over-mean": Figure((), longest_over_mean(0)),
        "sharegpt-longest-output-over-mean": Figure((), longest_over_mean(1)),
        "adapter-size-llama-7b": Figure((), adapter_mb),
        "adapter-size-in-kv-tokens": Figure((), kv_blocks_of_adapter),
        "motivation-peft-utilisation": Figure((), lambda _: 100 * 3 / (2 * 3)),
        "slo-seconds": Figure((), lambda _: slo_s("70b")),
        "slo-multiple-of-decode-iteration": Figure((), lambda _: float(SLO_STEPS)),
    },
)

PAPER = Paper(
    measurements=[ONE_SERVER, CLUSTERS, BALANCING, ARITHMETIC],
)
