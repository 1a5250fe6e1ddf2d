"""The modelled runs of admission.4, and how they are made: each a part of the line that can be made in any process."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from benchmarks.accept import chameleon_figures as paper
from benchmarks.accept.admission_common import (
    FIFO,
    OURS,
    SEED,
    Case,
    figures_of,
    make_work,
    part_name,
    profile_rig,
    run_modelled,
    run_on,
    two_processes,
)
from benchmarks.accept.runs import StoredRuns
from lorikeet.bench.peak import find_peak
from lorikeet.bench.synthetic import PAPER_RANKS
from lorikeet.bench.workload import WorkloadRequest
from lorikeet.scheduling.policies import ADMISSION

NO_CACHE, NO_SCHEDULER = "chameleon:no-cache", "chameleon:no-scheduler"
SYSTEMS = (FIFO, NO_CACHE, NO_SCHEDULER, OURS)
LOADS = {name: load.per_s / paper.KNEE_RPS for name, load in paper.LOADS.items()}
"""Of our knee: 0.69, 0.92 and 1.03, as the paper's loads are of its own."""
REQUESTS = 10_000
HIGH_S, HIGH_SEEDS = 58 * 60.0, (SEED, SEED + 1)
"""Beyond the knee a queue grows, so the length of the run decides; two workloads make more than 10,000 requests."""
CACHES = ("chameleon:lru", "chameleon:fairshare", "chameleon:lru-full", "chameleon:fairshare-full")
PREFETCH = "chameleon:prefetch"
SJF = "chameleon:sjf"
SCHEDULERS = (SJF, "chameleon:sjf-aging")
OUTPUT_ONLY = "chameleon:output-only"
READINGS = tuple(
    f"{OURS},admission={name}" for name in ADMISSION if name.startswith(f"{OURS}:") and name != OUTPUT_ONLY
)
"""Every reading of what the paper leaves open that has a name."""
ACCURACY = 0.8
PREDICTED = tuple(product((OURS, OUTPUT_ONLY), (1.0, 0.8, 0.6)))
"""Rows and accuracies."""
SLO_TIMES, UNLOADED = 5, 0.1
PCIE_LOAD, PCIE_ADAPTERS, PCIE_RANK = 5 / paper.KNEE_RPS, (1, 500), 32
MEDIAN = (1020, 129)
"""Tokens of the median prompt and answer."""
_LINE = "admission.4"


def measure(runs: StoredRuns, knee_rate: float, cases: Mapping[str, Case]) -> dict[str, Any]:
    """Return all that the page is made of. Each part is kept as soon as it is there; two are made at a time."""
    slo = runs.get("slo", partial(_slo, knee_rate))
    with two_processes() as pool:
        peaks = {row: pool.submit(_stored_peak, row, knee_rate, slo["slo_s"]) for row in SYSTEMS}
        made = {name: pool.submit(_stored_case, name, case) for name, case in cases.items()}
        return {
            "slo": slo,
            "runs": {name: each.result() for name, each in made.items()},
            "peaks": {row: each.result() for row, each in peaks.items()},
            "unloaded": {str(rank): runs.get(f"unloaded-{rank}", partial(unloaded, rank)) for rank in PAPER_RANKS},
        }


def all_cases(knee_rate: float) -> dict[str, Case]:
    """Return the runs by the names of their parts."""
    wanted = [
        *product(SYSTEMS, LOADS, [ACCURACY]),
        *product((*CACHES, PREFETCH), ["medium"], [ACCURACY]),
        *product((*SCHEDULERS, *READINGS), ["high"], [ACCURACY]),
        *((row, "high", accuracy) for row, accuracy in PREDICTED),
    ]
    cases = {name: case for each in wanted for name, case in _cases_of(knee_rate, *each).items()}
    for adapters in PCIE_ADAPTERS:
        cases[f"pcie-{adapters}"] = Case(
            row=FIFO,
            rate=PCIE_LOAD * knee_rate,
            requests=REQUESTS,
            adapters=adapters,
            ranks=(PCIE_RANK,),
            choice="uniform",
        )
    return cases


def _cases_of(knee_rate: float, row: str, load: str, accuracy: float) -> dict[str, Case]:
    """Return the runs of a row at a load: 10,000 requests, or at high load as many as arrive in the time."""
    rate, name, predictor = LOADS[load] * knee_rate, part(row, load, accuracy), f"oracle:{accuracy:g}"
    if load != "high":
        return {f"{name}-{SEED}": Case(row=row, rate=rate, requests=REQUESTS, predictor=predictor)}
    return {
        f"{name}-{seed}": Case(row=row, rate=rate, requests=round(rate * HIGH_S), predictor=predictor, seed=seed)
        for seed in HIGH_SEEDS
    }


def part(row: str, load: str, accuracy: float = ACCURACY) -> str:
    """Return how the parts of a row at a load begin; the seed comes after it."""
    return f"{load}-{part_name(row)}-{accuracy * 100:.0f}"


def _stored_case(name: str, case: Case) -> dict[str, Any]:
    """Run a case in a process of its own, and keep it even if another one fails."""
    return StoredRuns(_LINE).get(name, lambda: figures_of(run_modelled(case)))


# --- throughput under the limit ----------------------------------------------------------------------


def _slo(knee_rate: float) -> dict[str, Any]:
    """Limit of TTFT: a multiple of what S-LoRA has at low load, on average."""
    found = figures_of(run_modelled(Case(row=FIFO, rate=UNLOADED * knee_rate, requests=1000)))
    return {"slo_s": SLO_TIMES * found["ttft_mean_s"], "unloaded": without_times(found)}


def _stored_peak(row: str, knee_rate: float, slo_s: float) -> dict[str, Any]:
    return StoredRuns(_LINE).get(f"peak-{part_name(row)}", partial(_peak, row, knee_rate, slo_s))


def _peak(row: str, knee_rate: float, slo_s: float) -> dict[str, Any]:
    """Search the highest rate at which P99 TTFT keeps the limit."""
    p99_s: dict[str, float] = {}

    def attainment(rate: float) -> float:
        found = figures_of(run_modelled(Case(row=row, rate=rate, requests=REQUESTS)))
        p99_s[f"{rate:.3f}"] = found["ttft_p99_s"]
        return slo_s / float(found["ttft_p99_s"])

    peak = find_peak(attainment, 1.0, LOADS["low"] * knee_rate, precision=0.02)
    if peak.rate is None:
        raise RuntimeError(f"{row}: no rate keeps a P99 TTFT of {slo_s:.3f} s")
    return {"rate": peak.rate, "p99_s": p99_s}


# --- one by one --------------------------------------------------------------------------------------


def unloaded(rank: int) -> dict[str, Any]:
    """Return TTFT of the median request alone: of the base model, with its adapter there, and with it on the host."""
    return {
        "base_s": _alone_s(NO_SCHEDULER, rank, None),
        "warm_s": _alone_s(NO_SCHEDULER, rank, "adapter-0000"),
        "cold_s": _alone_s(FIFO, rank, "adapter-0000"),
    }


def _alone_s(row: str, rank: int, adapter: str | None) -> float:
    """Return the TTFT of the second of two requests far apart; S-LoRA has let its adapter go by then."""
    case = Case(row=row, rate=0.01, requests=2, predictor="none", adapters=1, ranks=(rank,))
    requests = [WorkloadRequest(at_s, adapter, *MEDIAN) for at_s in (0.0, 100.0)]
    work = make_work(case)._replace(requests=requests)
    return run_on(*profile_rig(case, work), case, work).ttft_s[1]


# --- figures -----------------------------------------------------------------------------------------

Runs = Mapping[str, Mapping[str, Any]]


def of(runs: Runs, name: str) -> Sequence[Mapping[str, Any]]:
    """Return the runs of a part, by seed."""
    return [each for each_name, each in sorted(runs.items()) if each_name.rpartition("-")[0] == name]


def percentile(runs: Runs, name: str, percent: float) -> float:
    """Return a percentile of TTFT over all runs of a part."""
    return float(np.percentile(np.concatenate([each["ttft_s"] for each in of(runs, name)]), percent))


def reduction(runs: Runs, row: str, load: str, percent: float, rival: str = FIFO) -> float:
    """Return (rival - row) / rival of a percentile of TTFT."""
    ours, theirs = (percentile(runs, part(each, load), percent) for each in (row, rival))
    return 1 - ours / theirs


def without_times(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a run without those of every request."""
    return {name: value for name, value in figures.items() if name != "ttft_s"}
