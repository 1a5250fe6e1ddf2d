"""Compares the default preset with ten systems in sixteen scenarios: ``python -m benchmarks.auto``.

Everything is *modelled*: the engine's own loop, memory and policies on a virtual clock, by a profile of the device. All
systems of a scenario have the same kernels, memory, link and requests. Scenarios and rivals were written down before
the default was tuned. The default was tuned on the odd scenarios; the even scenarios have separate seeds. Runs are kept
in a cache, so that an interrupted program can continue.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.harness import print_setup, print_table
from benchmarks.memory_bench import MemorySetting, modelled_rig, settle, warm_replica
from benchmarks.memory_work import MemoryWork, WorkOptions
from benchmarks.papers import dlora, elora_work, loraserve, toppings
from benchmarks.papers.cache import Cache, default_folder, run_missing
from benchmarks.papers.chameleon import simulate as chameleon
from benchmarks.papers.measure import Answer, Run, over_seeds
from benchmarks.papers.runs import Figures
from lorikeet.bench.in_process import WorkloadRun, run_workload
from lorikeet.bench.load_report import slo_attainment
from lorikeet.config import Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import LORA_MODULES
from lorikeet.core.plan import KernelForm
from lorikeet.core.request import Slo
from lorikeet.costs.profile import OperatingLoads
from lorikeet.simulator.cluster import ClusterChoice, simulate_cluster
from lorikeet.simulator.operating_points import OperatingPointSearch, find_operating_loads, with_operating_loads
from lorikeet.workloads.arrivals import Rates
from lorikeet.workloads.predictors import make_predictor
from lorikeet.workloads.prompts import DEFAULT_IDS, Prompts
from lorikeet.workloads.recipe import Recipe
from lorikeet.workloads.synthetic import ATTENTION, PAPER_RANKS, adapter_names, spread, synthetic_adapters
from lorikeet.workloads.workload import Range, WorkloadRequest, block_tokens_of

# --- the rivals --------------------------------------------------------------------------------------

AUTO = "auto"
RIVALS = (
    "elora",
    "chameleon",
    "dlora",
    "toppings",
    "loraserve",
    "lorikeet:plain",  # one pool, LRU, FIFO: a modern server without any of the five papers
    "lorikeet:tree-lru",  # ELORA's tree and prefetch under LRU: the best single memory of the audit
    "vllm-static",
    "elora:s-lora",
    "merged-only",
)

# --- the scenarios -----------------------------------------------------------------------------------

HOST_BYTES = 128 * 10**9
"""Of each replica's host tier, for every system: all adapters fit."""
SEEDS = (1, 2, 3, 4, 5)
HELD_OUT_SEEDS = (101, 102, 103, 104, 105)
"""Of odd and of even scenarios."""
ATTAINMENT = 0.9
"""Share of the requests that must meet the SLO at a rate within the capacity."""
QUICK_SEEDS = 2
"""Of a quick run, which searches no capacity."""
CAPACITY_STEP = 1.06
CAPACITY_STEPS = range(-12, 13)
"""Rates at which the capacity is searched: the scenario's times powers of the first."""


class Scenario(NamedTuple):
    """Describes a setting, which is the same for all systems.

    Attributes:
        title: subject of the scenario.
        profile: cost profile of device and model.
        form: form of every system's LoRA kernels, except on merged weights.
        recipe: returns options of the workload's ``Recipe``, given the seed.
        rate: requests per second.
        requests: number of requests in a run.
        adapters: number of adapters.
        ranks: ranks that the adapters get in turn.
        slo: limits that define the capacity.
        choice: rule that chooses adapters, see ``choose_adapters``.
        modules: modules that adapters change.
        memory_gb: memory of each replica for adapters and KV, over all ranks; 0 for the profile's.
        link_gb_per_s: bandwidth between host and device, per rank; 0 for the profile's.
        replicas: number of replicas.
        batch, step_tokens: largest number of sequences and of tokens in a step.
        predictor: predictor of answer lengths.
    """

    title: str
    profile: str
    form: KernelForm
    recipe: Callable[[int], dict[str, Any]]
    rate: float
    requests: int
    adapters: int
    ranks: tuple[int, ...]
    slo: Slo
    choice: str = "uniform"
    modules: tuple[str, ...] = ATTENTION
    memory_gb: float = 0.0
    link_gb_per_s: float = 0.0
    replicas: int = 1
    batch: int = 256
    step_tokens: int = 2048
    predictor: str = "history"


def plain(prompt: str, output: str, **options: Any) -> Callable[[int], dict[str, Any]]:
    """Return a recipe of single shots; lengths are ranges such as ``16-800``."""
    return lambda seed: {"prompt_tokens": Range.parse(prompt), "output_tokens": Range.parse(output), **options}


def shape(name: str) -> Callable[[int], dict[str, Any]]:
    """Return a recipe of one of ``SHAPES``."""
    return lambda seed: {"shape": name}


def drawn(
    lengths: Callable[[int], Sequence[WorkloadRequest]], scale: float = 1.0, **options: Any
) -> Callable[[int], dict[str, Any]]:
    """Return a recipe of single shots with the lengths of random requests, given those of a seed."""
    return lambda seed: {"lengths": tuple(lengths(seed)), "length_scale": scale, **options}


def chatbot_lengths(seed: int) -> list[WorkloadRequest]:
    """Return ELORA's chatbot, dialogues of one turn or two, as single requests."""
    case = elora_work.Case("chatbot", "34B", 50, seed, load=0.4, window=0.2)
    return elora_work.load_of(case).requests


UNPADDED = KernelForm.UNPADDED
PADDED = KernelForm.PADDED
EINSUM = KernelForm.EINSUM
A100 = "a100-80-llama-2-7b"
A40 = "a40-llama-2-7b"
H100 = "h100-llama-2-7b"
SEVENTY_B = "a100-80x4-llama-2-70b"

SCENARIOS: dict[int, Scenario] = {
    1: Scenario(
        "ELORA's home: chatbot, 34B, 50 adapters, memory for a part of them",
        "h800x4-llama-2-34b", UNPADDED, drawn(chatbot_lengths), 21.0, 350, 50, (32, 64), Slo(ttft_s=1.0, tpot_s=0.1),
        choice="zipf:1", modules=LORA_MODULES, memory_gb=30, step_tokens=8192,
    ),
    2: Scenario(
        "Chameleon's home: Azure's lengths x 0.3, ranks 8 to 128, 4 GB/s, 80 % of predictions right",
        f"{A40}@chameleon", UNPADDED, drawn(lambda seed: chameleon.lengths(), 0.3), 6.5, 350, 100, PAPER_RANKS,
        Slo(ttft_s=1.5, tpot_s=0.15), choice=chameleon.POWER, link_gb_per_s=4, predictor="oracle:0.8",
    ),
    3: Scenario(
        "TOPPINGS' home: 512 cold adapters of q, k and v, short prompts, 2 GB/s",
        toppings.SEVEN_B, PADDED, drawn(lambda seed: toppings.lengths(2000, (100, 0.0), seed)), 7.7, 350, 512, (64,),
        Slo(ttft_s=0.5, tpot_s=0.15), choice="functions", modules=("q", "k", "v"), link_gb_per_s=2,
    ),
    4: Scenario(
        "dLoRA's home: 8 adapters of rank 8 in bursts of their own, ShareGPT's lengths, its kernel",
        A100, EINSUM, drawn(lambda seed: dlora.lengths(), arrivals="functions", variation=4.0, function_chunk=10), 3.0,
        300, 8, (8,), Slo(ttft_s=2.0, tpot_s=0.15), batch=32,
    ),
    5: Scenario(
        "LoRAServe's home: 4 servers, 100 adapters of ranks 8 to 128, Azure's lengths",
        loraserve.PROFILE, PADDED, drawn(lambda seed: loraserve.requests_like()), 38.0, 500, 100, PAPER_RANKS,
        Slo(ttft_s=5.0, tpot_s=0.2), choice="rank-power:0:1", replicas=4,
    ),
    6: Scenario(
        "single shots over 200 adapters behind a slow link, 2 GB/s, memory for a third of them",
        A100, UNPADDED, plain("64-512", "16-128"), 7.0, 350, 200, (16, 32, 64), Slo(ttft_s=1.0, tpot_s=0.1),
        choice="zipf:1", memory_gb=8, link_gb_per_s=2,
    ),
    7: Scenario(
        "2,000 adapters, single shots, a fast link, memory for a tenth",
        H100, UNPADDED, plain("32-512", "16-128"), 32.0, 500, 2000, (8, 16, 32), Slo(ttft_s=0.5, tpot_s=0.08),
        choice="zipf:0.8", memory_gb=14,
    ),
    8: Scenario(
        "eight replicas with 8 GB each, 400 adapters, 12 GB/s: round robin queues far longer",
        A100, UNPADDED, plain("64-512", "16-128"), 64.0, 600, 400, (64,), Slo(ttft_s=1.0, tpot_s=0.1),
        memory_gb=8, link_gb_per_s=12, replicas=8,
    ),
    9: Scenario(
        "conversations that return, 20 adapters, KV of three times the memory",
        A40, UNPADDED, shape("conversations"), 20.0, 500, 20, (16, 64), Slo(ttft_s=1.0, tpot_s=0.1),
        choice="zipf:1", memory_gb=4,
    ),
    10: Scenario(
        "70B on four devices, chats of 200 adapters, memory for a part of the KV",
        SEVENTY_B, UNPADDED, shape("chatbot"), 8.0, 350, 200, (16, 64), Slo(ttft_s=2.0, tpot_s=0.15),
        choice="zipf:1", memory_gb=24,
    ),
    11: Scenario(
        "one adapter has nearly all requests, and LoRA costs as in dLoRA: merging wins",
        A100, EINSUM, plain("64-256", "64-256"), 12.0, 350, 4, (64,), Slo(ttft_s=1.0, tpot_s=0.08),
        choice="zipf:6", batch=64,
    ),
    12: Scenario(
        "bursts of single shots of very different lengths, 20 adapters, memory for all",
        A100, UNPADDED, plain("16-1500", "8-200", arrivals="gamma", variation=4.0), 4.0, 350, 20, (16, 64),
        Slo(ttft_s=5.0, tpot_s=0.15),
    ),
    13: Scenario(
        "a skew that moves over 200 adapters, chats, 4 GB/s, memory scarce",
        A100, UNPADDED, shape("chatbot"), 11.0, 400, 200, (16, 64), Slo(ttft_s=1.0, tpot_s=0.1),
        choice="drifting:1:2", memory_gb=10, link_gb_per_s=4,
    ),
    14: Scenario(
        "2,000 adapters whose popularity moves, chats, 8 GB/s, memory scarce",
        H100, UNPADDED, shape("chatbot"), 40.0, 500, 2000, (8, 32), Slo(ttft_s=1.0, tpot_s=0.1),
        choice="drifting:0.8:1", memory_gb=14, link_gb_per_s=8,
    ),
    15: Scenario(
        "70B on four devices, bursts of single shots, 20 adapters, memory for all",
        SEVENTY_B, UNPADDED, plain("16-2000", "8-200", arrivals="gamma", variation=3.0), 1.5, 250, 20, (16, 64),
        Slo(ttft_s=5.0, tpot_s=0.15),
    ),
    16: Scenario(
        "eight replicas, 200 adapters of ranks 8 to 128, load that moves between ranks",
        A40, PADDED, plain("64-512", "16-128"), 28.0, 500, 200, PAPER_RANKS, Slo(ttft_s=2.0, tpot_s=0.15),
        choice="rank-shifting", memory_gb=16, link_gb_per_s=8, replicas=8,
    ),
}  # fmt: skip


def seeds_of(number: int) -> tuple[int, ...]:
    """Return the seeds of a scenario."""
    return SEEDS if number % 2 else HELD_OUT_SEEDS


# --- runs --------------------------------------------------------------------------------------------

FIGURES = ("ttft_mean_s", "ttft_p99_s", "e2e_per_token_s")
"""A score is their geometric mean."""
_SEARCH = OperatingPointSearch(ranks=PAPER_RANKS, requests=300, limits=5.0, precision=0.1)


def requests_of(scenario: Scenario, rate: float, seed: int) -> list[WorkloadRequest]:
    """Return the requests of a run. Another rate leaves lengths and adapters as they are."""
    recipe = Recipe(
        rates=Rates.constant(rate),
        count=scenario.requests,
        adapters=tuple(adapter_names(scenario.adapters)),
        ranks=tuple(spread(scenario.ranks, scenario.adapters)),
        adapter_choice=scenario.choice,
        seed=seed,
        **scenario.recipe(seed),
    )
    return recipe.requests()


def operating_points(number: int) -> dict[str, Any]:
    """Search the loads by rank that a replica of a cluster sustains, which ``loraserve`` needs.

    Return them as plain data.
    """
    scenario = SCENARIOS[number]
    asked = requests_of(scenario, scenario.rate, 0)
    lengths = round(fmean(each.input_tokens for each in asked)), round(fmean(each.output_tokens for each in asked))
    engine = _settings(scenario, "loraserve").engine
    search = msgspec.structs.replace(_SEARCH, ranks=tuple(sorted(set(scenario.ranks))))
    found = find_operating_loads(toppings.profile_of(scenario.profile), engine, scenario.slo, lengths, 0, search)
    return dict(msgspec.json.decode(msgspec.json.encode(found)))


def _settings(scenario: Scenario, preset: str) -> Settings:
    engine = MemorySetting(
        memory_bytes=int(scenario.memory_gb * 1e9) or toppings.profile_of(scenario.profile).pool_bytes,
        host_memory_bytes=HOST_BYTES,
        link_bytes_per_s=scenario.link_gb_per_s * 1e9,
        max_num_seqs=scenario.batch,
        max_num_batched_tokens=scenario.step_tokens,
        num_scheduler_steps=1,
    )
    return engine.settings(f"{preset},kernel_form={scenario.form}")


def _serve(scenario: Scenario, points: Sequence[dict[str, Any]], preset: str, rate: float, seed: int) -> WorkloadRun:
    """Run a system on a fresh engine or cluster whose adapters are on the host.

    Raises:
        RuntimeError: a request got no complete answer.
    """
    profile = toppings.profile_of(scenario.profile)
    settings = _settings(scenario, preset)
    for found in points:
        loads = msgspec.convert(found, OperatingLoads, strict=False)
        profile = with_operating_loads(profile, loads)
    requests = requests_of(scenario, rate, seed)
    predictor = make_predictor(scenario.predictor, requests, seed)
    names = tuple(adapter_names(scenario.adapters))
    if scenario.replicas > 1:
        refs: dict[str, AdapterRef] = {
            ref.name: ref for ref in synthetic_adapters(scenario.adapters, scenario.ranks, profile.geometry)
        }
        prompts = Prompts(seed, 0, DEFAULT_IDS, block_tokens_of(requests))
        choice = ClusterChoice(scenario.replicas, seed, scenario.slo)
        run = simulate_cluster(settings, profile, requests, refs, prompts, choice, predictor=predictor).run
    else:
        work = MemoryWork(requests, names, block_tokens_of(requests), seed)
        options = WorkOptions(source="", adapters=len(names), ranks=scenario.ranks, modules=scenario.modules)
        rig = modelled_rig(profile, work, options)
        with warm_replica(rig, settings, work) as ((engine, *_), clock, coalesced):
            settle(engine)
            prompts = work.prompts_of(rig.vocabulary)
            run = run_workload(engine, clock, requests, rig.adapters, prompts, coalesced=coalesced, predictor=predictor)
    if failed := [each for each in run.exchanges if each.error is not None]:
        raise RuntimeError(f"{preset}: {len(failed)} requests failed, the first with {failed[0].error}")
    return run


def serve(*given: Any) -> Figures:
    """Return the figures of a run, given operating points if needed, the scenario's number, the preset and the seed."""
    *points, number, preset, seed = given
    scenario = SCENARIOS[number]
    return figures_of(_serve(scenario, points, preset, scenario.rate, seed), scenario.slo)


def figures_of(run: WorkloadRun, slo: Slo) -> Figures:
    """Return the figures of a run. ``slo`` gives the limits for the share of requests that meet it."""
    ttft_s = np.array([each.ttft_s for each in run.exchanges])
    per_token_s = [each.e2e_s / each.output_tokens for each in run.exchanges]
    gaps_s = np.asarray(run.gaps_s)
    return {
        "ttft_mean_s": float(ttft_s.mean()),
        "ttft_p99_s": float(np.percentile(ttft_s, 99)),
        "e2e_per_token_s": fmean(per_token_s),
        "gap_p99_s": float(np.percentile(gaps_s, 99)),
        "attained": slo_attainment(run.exchanges, slo) or 0.0,
    }


def capacity(*given: Any) -> float:
    """Return the highest rate at which a system meets the SLO with its first seed.

    The arguments are those of :func:`serve`.
    """
    *points, number, preset, seed = given
    scenario = SCENARIOS[number]
    rates = [scenario.rate * CAPACITY_STEP**power for power in CAPACITY_STEPS]
    attained = lambda rate: slo_attainment(_serve(scenario, points, preset, rate, seed).exchanges, scenario.slo)  # noqa: E731
    return _highest(rates, lambda rate: (attained(rate) or 0.0) >= ATTAINMENT)


def _highest(rates: Sequence[float], holds: Callable[[float], bool]) -> float:
    """Return the highest of ascending rates at which a condition holds; 0 for none.

    The condition is assumed to hold below that rate and to fail above it.
    """
    known = -1
    first_missed = len(rates)
    while first_missed - known > 1:
        middle = (known + first_missed) // 2
        if holds(rates[middle]):
            known = middle
        else:
            first_missed = middle
    return 0.0 if known < 0 else rates[known]


def runs_of(number: int, preset: str, *, quick: bool) -> tuple[Run, ...]:
    """Return a system's runs in a scenario, one per seed.

    Unless the runs are quick, the last run finds the capacity.
    """
    clustered = SCENARIOS[number].replicas > 1 and preset.startswith("loraserve")
    after = (Run(operating_points, (number,)),) if clustered else ()
    seeds = seeds_of(number)
    made = [Run(serve, (number, preset, seed), after) for seed in seeds[: QUICK_SEEDS if quick else None]]
    return (*made, *([] if quick else [Run(capacity, (number, preset, seeds[0]), after)]))


# --- the comparison ----------------------------------------------------------------------------------


def score(figures: Figures) -> float:
    """Return the geometric mean of the three figures."""
    return float(np.exp(np.mean([np.log(figures[name]) for name in FIGURES])))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Answer:
    """Return the geometric mean over the seeds of ours over theirs, with its 95 % interval."""
    answer = over_seeds([float(np.log(a / b)) for a, b in zip(ours, theirs, strict=True)])
    return Answer(*(float(np.exp(each)) for each in answer if each is not None))


class Judged(NamedTuple):
    """Compares a system with the rivals: the best rival by score, and score and P99 inter-token gap relative to it.

    ``worst`` is the largest ratio of a figure to the best figure of any rival. ``capacity`` is relative to the highest
    capacity of any rival.
    """

    best: str
    score: Answer
    worst: tuple[Answer, str]
    gap: Answer
    capacity: float


class Results(NamedTuple):
    """Holds the results of a system in a scenario: figures by seed, and the capacity (NaN if it was not searched)."""

    figures: list[Figures]
    capacity: float

    def of(self, name: str) -> list[float]:
        """Return a figure or the score by seed."""
        return [score(each) if name == "score" else each[name] for each in self.figures]

    def mean(self, name: str) -> float:
        """Return the geometric mean of a figure or the score over the seeds."""
        return float(np.exp(np.mean(np.log(self.of(name)))))


def judge(ours: Results, rivals: dict[str, Results]) -> Judged:
    """Compare a system with the rivals."""
    best = min(rivals, key=lambda name: rivals[name].mean("score"))
    figures = []
    for name in FIGURES:
        least = min(rivals.values(), key=lambda results, name=name: results.mean(name))  # type: ignore[misc]
        figures.append((ratio(ours.of(name), least.of(name)), name))
    return Judged(
        best,
        ratio(ours.of("score"), rivals[best].of("score")),
        max(figures, key=lambda each: each[0].value),
        ratio(ours.of("gap_p99_s"), rivals[best].of("gap_p99_s")),
        ours.capacity / max(each.capacity for each in rivals.values()),
    )


def results_of(number: int, preset: str, cache: Cache, *, quick: bool) -> Results | None:
    """Return a system's results from the cache; None if a result is missing."""
    kept = [cache.get(run) for run in runs_of(number, preset, quick=quick)]
    there = [each.result for each in kept if each is not None]
    if len(there) < len(kept):
        return None
    return Results(there, np.nan) if quick else Results(there[:-1], there[-1])


# --- the program -------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, run what is missing in the cache, and print the tables."""
    given = _parser().parse_args(arguments)
    cache = Cache(given.cache)
    numbers = _numbers(given.scenario)
    systems = [AUTO, *given.also]

    def of(number: int, *presets: str) -> list[Run]:
        return [run for each in presets for run in runs_of(number, each, quick=given.quick)]

    runs = {number: of(number, *systems, *RIVALS) for number in numbers}
    cache.forget(run for number in numbers for run in of(number, *given.fresh))
    for made in [] if given.cached else runs.values():
        try:
            run_missing(made, cache, given.processes, lambda line: print(line, file=sys.stderr, flush=True))
        except RuntimeError as error:
            sys.exit(str(error))
    print_setup()
    summary: dict[str, list[tuple[int, Judged]]] = {each: [] for each in systems}
    for number in numbers:
        found = {name: results_of(number, name, cache, quick=given.quick) for name in (*systems, *RIVALS)}
        there = {name: results for name, results in found.items() if results is not None}
        _show(number, there)
        rivals = {name: there[name] for name in RIVALS if name in there}
        for system in systems:
            if system in there and rivals:
                summary[system].append((number, judge(there[system], rivals)))
    for system, judged in summary.items():
        _show_summary(system, judged)
    revisions = {kept.revision for made in runs.values() for run in made if (kept := cache.get(run)) is not None}
    print(f"revisions of the runs: {', '.join(sorted(revisions))}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.auto", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--scenario", default="", help="numbers, 'odd' or 'even', comma-separated (default: all)")
    parser.add_argument("--also", action="append", default=[], metavar="PRESET", help="judge another preset as well")
    parser.add_argument("--fresh", action="append", default=[], metavar="PRESET", help="make its runs again")
    parser.add_argument("--quick", action="store_true", help="two seeds, and no capacities")
    parser.add_argument("--cached", action="store_true", help="make no runs")
    parser.add_argument("--processes", type=int, default=2, help="runs at the same time (default: 2)")
    folder = default_folder().with_name("auto")
    parser.add_argument("--cache", type=Path, default=folder, help="folder of finished runs (%(default)s)")
    return parser


def _numbers(text: str) -> list[int]:
    words = {"odd": [n for n in SCENARIOS if n % 2], "even": [n for n in SCENARIOS if n % 2 == 0], "": list(SCENARIOS)}
    try:
        found = [number for part in text.split(",") for number in words.get(part) or [int(part)]]
        return [number for number in dict.fromkeys(found) if number in SCENARIOS]
    except ValueError:
        sys.exit(f"--scenario {text}: numbers from 1 to {len(SCENARIOS)}, 'odd' or 'even'")


def _show(number: int, there: dict[str, Results]) -> None:
    """Print a scenario's table."""
    scenario = SCENARIOS[number]
    about = (
        f"{number}. {scenario.title}\n  {scenario.replicas} x {scenario.profile}, {scenario.form} kernels, "
        f"link {scenario.link_gb_per_s or 'by data sheet'} GB/s, pool {scenario.memory_gb or 'all'} GB, "
        f"{scenario.rate:g} requests/s, SLO: TTFT {scenario.slo.ttft_s:g} s, TPOT {scenario.slo.tpot_s:g} s"
    )
    headings = ["", "TTFT, ms", "P99, ms", "E2E/token, ms", "score", "gap P99, ms", "capacity/s", "auto / it", "95 %"]
    rows = []
    for name, results in sorted(there.items(), key=lambda item: item[1].mean("score")):
        values = [f"{1e3 * results.mean(each):,.0f}" for each in FIGURES]
        beside = ratio(there[AUTO].of("score"), results.of("score")) if AUTO in there else None
        values += [f"{1e3 * results.mean(each):,.0f}" for each in ("score", "gap_p99_s")]
        rows.append([name, *values, f"{results.capacity:.1f}", *ratio_and_interval(beside)])
    print_table(about, headings, rows)


def _show_summary(system: str, judged: Sequence[tuple[int, Judged]]) -> None:
    headings = ["", "best rival", "score", "95 %", "worst figure", "95 %", "of", "gap", "95 %", "capacity"]
    rows = []
    for number, each in judged:
        worst, name = each.worst
        ratios = [*ratio_and_interval(each.score), *ratio_and_interval(worst), name, *ratio_and_interval(each.gap)]
        rows.append([number, each.best, *ratios, f"{each.capacity:.2f}"])
    print_table(f"{system}, over the best rival of each scenario", headings, rows)
    if judged:
        mean = float(np.exp(np.mean([np.log(each.score.value) for _, each in judged])))
        print(f"geometric mean of the scores: {mean:.3f}\n")


def ratio_and_interval(answer: Answer | None) -> tuple[str, str]:
    """Return a ratio and its interval in words; empty if there is none."""
    if answer is None:
        return "", ""
    interval = "" if answer.low is None or answer.high is None else f"{answer.low:.2f} to {answer.high:.2f}"
    return f"{answer.value:.2f}", interval


if __name__ == "__main__":
    # Other processes find the functions of runs by this module's name
    from benchmarks.auto import main as run_as_module

    run_as_module()
