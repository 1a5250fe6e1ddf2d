"""LoRAServe's setting, modelled: four systems on four replicas of Llama-2-7B on four A100 each, by request rate.

Numbers beside ours are those of the paper's text; most are maxima over settings that are not printed. Requests are as
long as those of Azure's conversation trace of 2023. A system bears a rate at which 95 % of the requests have their
first token within ten seconds. Adapters have five ranks in turn; *uniform* and *shifting* have 25 of them, *production*
100 and the trace's own arrivals.
"""

from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from benchmarks.harness import print_table
from benchmarks.papers.runs import (
    AZURE,
    HOST_BYTES,
    Cluster,
    Figures,
    Options,
    Runs,
    highest,
    ladder,
    main,
    mean_of,
    run_cluster,
    trace,
)
from lorikeet.bench.arrivals import Rates
from lorikeet.bench.recipe import Recipe
from lorikeet.bench.synthetic import PAPER_RANKS, adapter_names, spread, synthetic_adapters
from lorikeet.bench.workload import WorkloadRequest
from lorikeet.config import EngineSettings
from lorikeet.core.request import Slo
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.profile import OperatingLoads
from lorikeet.simulator.operating_points import BRIEF, find_operating_loads, with_operating_loads

PROFILE = "a100-40x4-llama-2-7b"
OURS, TOPPINGS = "loraserve", "loraserve:toppings"
PRESETS = (OURS, TOPPINGS, "loraserve:random", "loraserve:contiguous")
PRINTED = {TOPPINGS: 1.2, "loraserve:random": 2.0, "loraserve:contiguous": 2.0}
"""Times the request rate at the most (V-F); which of S-LoRA's two placements 2 is of is not printed."""
PRINTED_TTFT, PRINTED_STORAGE = 9.0, 16.0
"""At the most: times LoRAServe's P95 TTFT, and adapters on a server under TOPPINGS over LoRAServe's (V-F)."""
REPLICAS, LIMIT_S, SEEDS = 4, 10.0, (1, 2)
RATES = ladder(12.0, 1.07, 25)
"""Requests per second that are tried: an answer is good to 7 %."""


class Mix(NamedTuple):
    """What is asked for: how many adapters, their choice, and whether arrivals are the trace's own."""

    adapters: int
    choice: str
    is_replayed: bool = False


MIXES = {
    "uniform": Mix(25, "rank-power:0"),
    "shifting": Mix(25, "rank-shifting"),
    "production": Mix(100, "rank-power:0:1", is_replayed=True),
}


def run(runs: Runs, options: Options) -> None:
    """Run all and print the tables."""
    duration_s, seeds = (60.0, SEEDS[:1]) if options.quick else (150.0, SEEDS)
    mixes = ["shifting"] if options.quick else list(MIXES)
    points = list(runs.all({f"point-{rank}": (points_of, rank) for rank in PAPER_RANKS}).values())
    searches = product(mixes, PRESETS)
    peaks = runs.all({f"peak-{mix}-{each}": (find, points, mix, each, duration_s) for mix, each in searches})
    rates = {mix: peaks[f"peak-{mix}-{OURS}"] or RATES[0] for mix in mixes}
    made = runs.all(
        {
            f"{mix}-{preset}-{seed}": (run_at, points, mix, preset, rates[mix], seed, duration_s)
            for mix, preset, seed in product(mixes, PRESETS, seeds)
        }
    )
    rows = []
    for mix, preset in product(mixes, PRESETS):
        own, ours = ([made[f"{mix}-{each}-{seed}"] for seed in seeds] for each in (preset, OURS))
        rate, tail_s = peaks[f"peak-{mix}-{preset}"], mean_of(own, "ttft_p95_s")
        times = f"{rates[mix] / rate:.2f}" if rate and preset != OURS else ""
        paper = f"{PRINTED[preset]:g}" if preset in PRINTED else ""
        held = fmean(each["held_share"] for each in own)
        most = max(max(each["held_most"]) for each in own)
        slower = "" if preset == OURS else f"{tail_s / mean_of(ours, 'ttft_p95_s'):.1f}"
        rows.append([mix, preset, f"{rate:.1f}", times, paper, f"{tail_s:.2f}", slower, f"{held:.0%}", most])
    headings = ["mix", "preset", "requests/s", "loraserve's is x times", "paper, at most"]
    headings += ["P95 TTFT, s", "x loraserve's", "adapter bytes held", "adapters on a server, most"]
    print_table("Rates within the limit, and all at loraserve's", headings, rows)
    print(
        f"  The paper prints up to {PRINTED_TTFT:g} x LoRAServe's P95 TTFT, and {PRINTED_STORAGE:g} x its adapters.\n"
    )
    if not options.quick:
        scales = runs.all(
            {f"scale-{n}": (run_at, points, "uniform", OURS, rates["uniform"], 1, duration_s, n) for n in (1, 2)}
        )
        rows = [[4 * n, f"{n * rates['uniform']:.1f}", f"{scales[f'scale-{n}']['ttft_p95_s']:.2f}"] for n in (1, 2)]
        print_table("loraserve on more servers, uniform", ["servers", "requests/s", "P95 TTFT, s"], rows)


def points_of(rank: int) -> dict[str, Any]:
    """Search the tokens per second that a replica bears with adapters of one rank, as plain data."""
    engine = EngineSettings(preset=OURS, num_scheduler_steps=1, host_memory_bytes=HOST_BYTES)
    asked = requests_like()
    mean_lengths = round(fmean(r.input_tokens for r in asked)), round(fmean(r.output_tokens for r in asked))
    search = msgspec.structs.replace(BRIEF, ranks=(rank,))
    slo = Slo(ttft_s=LIMIT_S)
    found = find_operating_loads(load_profile(PROFILE), engine, slo, mean_lengths, SEEDS[0], search)
    return dict(msgspec.json.decode(msgspec.json.encode(found)))


def loads_of(points: list[dict[str, Any]]) -> OperatingLoads:
    """Return the loads of single ranks as one."""
    parts = [msgspec.convert(each, OperatingLoads, strict=False) for each in points]
    by_rank = {rank: load for each in parts for rank, load in each.tokens_per_s.items()}
    return msgspec.structs.replace(parts[0], tokens_per_s=by_rank)


def find(points: list[dict[str, Any]], mix: str, preset: str, duration_s: float) -> float:
    """Return the highest of ``RATES`` that a preset bears; 0 for none."""
    return highest(RATES, lambda rate: run_at(points, mix, preset, rate, SEEDS[0], duration_s)["ttft_p95_s"] <= LIMIT_S)


def run_at(
    points: list[dict[str, Any]], mix: str, preset: str, rate: float, seed: int, duration_s: float, scale: int = 1
) -> Figures:
    """Return the figures of a run with ``scale`` times the replicas, adapters and requests.

    What arrives in the first three periods of placement does not count: little is known of demand yet.
    """
    about, profile = MIXES[mix], with_operating_loads(load_profile(PROFILE), loads_of(points))
    count, rate = about.adapters * scale, rate * scale
    setting = Cluster(
        profile=profile,
        replicas=REPLICAS * scale,
        adapters=tuple(synthetic_adapters(count, PAPER_RANKS, profile.geometry)),
        slo=Slo(ttft_s=LIMIT_S),
        since_s=duration_s / 5,
    )
    common: dict[str, Any] = {
        "rates": Rates.constant(rate),
        "adapters": tuple(adapter_names(count)),
        "ranks": tuple(spread(PAPER_RANKS, count)),
        "adapter_choice": about.choice,
        "seed": seed,
    }
    if about.is_replayed:
        requests = Recipe(trace=requests_like(), count=round(rate * duration_s), **common).requests()
    else:
        requests = Recipe(lengths=requests_like(), duration_s=duration_s, **common).requests()
    return run_cluster(preset, setting, requests, seed)


def requests_like() -> tuple[WorkloadRequest, ...]:
    """Return Azure's conversations without those that are too long for the model."""
    longest = load_profile(PROFILE).max_model_len
    return tuple(each for each in trace(AZURE) if each.input_tokens + each.output_tokens <= longest)


if __name__ == "__main__":
    main(__doc__ or "", "loraserve", run)
