"""LoRAServe's part of cluster.3: its four systems on four modelled replicas, under three workloads."""

from collections.abc import Mapping
from concurrent.futures import Executor
from functools import cache
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from benchmarks.accept.admission_common import part_name
from benchmarks.accept.cluster_runs import HOST_BYTES, ClusterSetting, highest, ladder, mean_of, run_cluster
from benchmarks.accept.runs import StoredRuns
from benchmarks.accept.traces import AZURE_CONVERSATION, unpacked
from lorikeet.bench.rates import Rates
from lorikeet.bench.recipe import Recipe
from lorikeet.bench.synthetic import PAPER_RANKS, adapter_names, spread, synthetic_adapters
from lorikeet.bench.workload import WorkloadRequest, read_any
from lorikeet.config import EngineSettings
from lorikeet.core.slo import Slo
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.profile import OperatingLoads
from lorikeet.simulator.operating_points import BRIEF, find_operating_loads, with_operating_loads

PROFILE = "a100-40x4-llama-2-7b"
OURS, RANDOM, CONTIGUOUS, TOPPINGS = "loraserve", "loraserve:random", "loraserve:contiguous", "loraserve:toppings"
ROWS = (OURS, TOPPINGS, RANDOM, CONTIGUOUS)
REPLICAS, SCALES = 4, (1, 2)
LIMIT_S = 10.0
SLO = Slo(ttft_s=LIMIT_S)
RATES = tuple(ladder(12.0, 1.07, 25))
"""Requests per second that are tried, 12 to 60.9: an answer is good to 7 %."""
DURATION_S, SINCE_S = 150.0, 30.0
"""Of a run, 15 periods of placement; what arrives in the first three does not count: little is known of demand yet."""
SEEDS = (1, 2)
PRODUCTION = "production"


class Mix(NamedTuple):
    """Who asks for what.

    Attributes:
        adapters: how many, of five ranks in turn.
        choice: see ``choose_adapters``.
        replayed: arrivals are the trace's own, stretched; else Poisson.
    """

    adapters: int
    choice: str
    replayed: bool = False


MIXES = {
    "uniform": Mix(25, "rank-power:0"),
    "shifting": Mix(25, "rank-shifting"),
    PRODUCTION: Mix(100, "rank-power:0:1", replayed=True),
}
"""Section V-E. The mix of ranks in the production trace is on a figure alone; here each has as much."""


class Case(NamedTuple):
    """A run: a row under a mix at a rate, with so many times the replicas, adapters and requests."""

    mix: str
    row: str
    rate: float
    seed: int
    scale: int = 1

    @property
    def name(self) -> str:
        """As part of a file's name."""
        return part_name(f"loraserve-{self.mix}-{self.row}-{self.rate:.2f}-{self.seed}-x{self.scale}")


Found = Mapping[str, Any]


def measure(runs: StoredRuns, pool: Executor) -> dict[str, Any]:
    """Return operating points, the highest rate of each row under each mix, and all rows' runs at that of ``OURS``.

    Returns:
        ``points``: tokens per second by rank. ``peaks``: by mix and row. ``runs``: by mix and row, one for each seed,
        at the peak of ``OURS``. ``scales``: ``OURS`` under the uniform mix at that rate for four replicas, on 4 and 8.
    """
    points = [each.result() for each in [pool.submit(stored_points, runs, rank) for rank in PAPER_RANKS]]
    waiting = {(mix, row): pool.submit(peak, runs, points, mix, row) for mix, row in product(MIXES, ROWS)}
    peaks = {mix: {row: waiting[mix, row].result() for row in ROWS} for mix in MIXES}
    rates = {mix: peaks[mix][OURS]["rate"] or RATES[0] for mix in MIXES}
    compared = {
        (mix, row): [pool.submit(stored_case, runs, points, Case(mix, row, rates[mix], seed)) for seed in SEEDS]
        for mix, row in product(MIXES, ROWS)
    }
    scaled = [Case("uniform", OURS, rates["uniform"], SEEDS[0], scale) for scale in SCALES]
    scales = [pool.submit(stored_case, runs, points, case) for case in scaled]
    return {
        "points": loads_of(points).tokens_per_s,
        "peaks": peaks,
        "runs": {mix: {row: [each.result() for each in compared[mix, row]] for row in ROWS} for mix in MIXES},
        "scales": [each.result() for each in scales],
    }


def stored_points(runs: StoredRuns, rank: int) -> dict[str, Any]:
    """Search the operating point of one rank, and keep it."""
    return runs.get(f"loraserve-point-{rank}", lambda: points_of((rank,), BRIEF))


def points_of(ranks: tuple[int, ...], search: Any) -> dict[str, Any]:
    """Return operating points as plain data: for requests of the trace's mean lengths."""
    engine = EngineSettings(row=OURS, max_repeat=1, host_memory_bytes=HOST_BYTES)
    lengths = round(fmean(r.input_tokens for r in trace())), round(fmean(r.output_tokens for r in trace()))
    search = msgspec.structs.replace(search, ranks=ranks)
    found = find_operating_loads(load_profile(PROFILE), engine, SLO, lengths, SEEDS[0], search)
    return dict(msgspec.json.decode(msgspec.json.encode(found)))


def loads_of(points: list[dict[str, Any]]) -> OperatingLoads:
    """Return the points of single ranks as one."""
    parts = [msgspec.convert(each, OperatingLoads, strict=False) for each in points]
    by_rank = {rank: load for each in parts for rank, load in each.tokens_per_s.items()}
    return msgspec.structs.replace(parts[0], tokens_per_s=by_rank)


def peak(runs: StoredRuns, points: list[dict[str, Any]], mix: str, row: str) -> dict[str, Any]:
    """Search the highest of ``RATES`` at which 95 % of the requests have their first token in time.

    Returns:
        ``rate``: 0 for none. ``tried``: P95 TTFT in seconds by rate.
    """
    tried: dict[str, float] = {}

    def holds(rate: float) -> bool:
        tail_s = stored_case(runs, points, Case(mix, row, rate, SEEDS[0]))["ttft_p95_s"]
        tried[f"{rate:.1f}"] = tail_s
        return bool(tail_s <= LIMIT_S)

    return {"rate": highest(RATES, holds) or 0.0, "tried": tried}


def stored_case(runs: StoredRuns, points: list[dict[str, Any]], case: Case) -> dict[str, Any]:
    """Run a case, and keep it even if another one fails."""
    return runs.get(case.name, lambda: run_case(points, case))


def run_case(points: list[dict[str, Any]], case: Case, duration_s: float = DURATION_S) -> dict[str, Any]:
    """Return the figures of a case."""
    profile = with_operating_loads(load_profile(PROFILE), loads_of(points))
    count = MIXES[case.mix].adapters * case.scale
    setting = ClusterSetting(
        profile=profile,
        replicas=REPLICAS * case.scale,
        adapters=tuple(synthetic_adapters(count, PAPER_RANKS, profile.geometry)),
        slo=SLO,
        since_s=SINCE_S * duration_s / DURATION_S,
    )
    return run_cluster(case.row, setting, requests_of(case, duration_s), case.seed)


def requests_of(case: Case, duration_s: float) -> list[WorkloadRequest]:
    """Return the requests of a case, as long as the trace's; no time of them depends on the row."""
    mix, rate = MIXES[case.mix], case.rate * case.scale
    count = mix.adapters * case.scale
    common: dict[str, Any] = {
        "rates": Rates.constant(rate),
        "adapters": tuple(adapter_names(count)),
        "ranks": tuple(spread(PAPER_RANKS, count)),
        "adapter_choice": mix.choice,
        "seed": case.seed,
    }
    if mix.replayed:
        return Recipe(trace=trace(), count=round(rate * duration_s), **common).requests()
    return Recipe(lengths=trace(), duration_s=duration_s, **common).requests()


@cache
def trace() -> tuple[WorkloadRequest, ...]:
    """Return Azure's conversations of 2023 without those that are too long for the model."""
    longest = load_profile(PROFILE).max_model_tokens
    with unpacked(AZURE_CONVERSATION) as file:
        return tuple(each for each in read_any(file) if each.input_tokens + each.output_tokens <= longest)


def bears(found: Found, mix: str, row: str) -> float:
    """Return the highest rate of a row under a mix."""
    return float(found["peaks"][mix][row]["rate"])


def tail_s(found: Found, mix: str, row: str) -> float:
    """Return the mean over seeds of a row's P95 TTFT at the highest rate of ``OURS``."""
    return mean_of(found["runs"][mix][row], "ttft_p95_s")


def out_of_order(found: Found) -> list[str]:
    """Return where the systems do not come in the order that the paper prints, in words."""
    pairs = [(mix, OURS, row) for mix, row in product(MIXES, ROWS[1:])]
    pairs += [(PRODUCTION, TOPPINGS, row) for row in (RANDOM, CONTIGUOUS)]
    wrong = [
        f"{mix}: {worse} bears {bears(found, mix, worse):.1f}/s, {better} {bears(found, mix, better):.1f}"
        for mix, better, worse in pairs
        if bears(found, mix, worse) > bears(found, mix, better)
    ]
    return wrong + [
        f"{mix}: at {OURS}'s highest rate P95 TTFT of {row} is {tail_s(found, mix, row):.1f} s, of {OURS} "
        f"{tail_s(found, mix, OURS):.1f} s"
        for mix, row in product(MIXES, ROWS[1:])
        if tail_s(found, mix, row) < tail_s(found, mix, OURS)
    ]
