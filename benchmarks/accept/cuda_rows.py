"""cuda.3, e: the rows of memory.4, admission.3 and modes.3 on a GPU, on their workloads scaled to it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.accept import chameleon_figures, dlora_cases, dlora_figures, elora_figures, memory_common
from benchmarks.accept.admission_3 import mean_request_bytes
from benchmarks.accept.admission_common import PREDICTOR, Case, make_work
from benchmarks.accept.cuda_4 import gpu_profile
from benchmarks.accept.gpu_rig import GpuRig
from benchmarks.accept.runs import StoredRuns
from lorikeet.bench.in_process import run_workload
from lorikeet.bench.memory_bench import WARM_UP, Rig, modelled_rig, warm_replica
from lorikeet.bench.memory_work import MemoryWork, WorkOptions, working_set
from lorikeet.bench.peak import find_peak
from lorikeet.bench.predictors import make_predictor
from lorikeet.bench.replicas import live_replica
from lorikeet.bench.synthetic import ATTENTION, PAPER_RANKS, spread
from lorikeet.config import EngineSettings, Settings
from lorikeet.costs.profile import CostProfile

REQUESTS = 1000
POOL_REQUESTS = 48
"""Mean requests of Chameleon's workload with an adapter each that the device holds."""
LENGTH_SCALE = 1 / 4
"""Of Azure's lengths, so that the longest fits the model."""
POOL_BYTES, HOST_BYTES = 32 * 2**30, 8 * 2**30
"""Of the rows that merge: room for all."""
SLO_TIMES, UNLOADED_RATE, PRECISION = 5, 0.1, 0.05
_HIGH = chameleon_figures.LOADS["high"]


class Pools(NamedTuple):
    """Bytes for KV and adapters on the device and on the host."""

    memory_bytes: int
    host_memory_bytes: int


class Comparison(NamedTuple):
    """Rows on one workload.

    Attributes:
        rows: which; the load is a share of the second one's peak.
        work: by the rate.
        ranks: of the adapters in turn.
        pools: for the workload on a rig.
        load: share of the peak.
        paper: what is printed of ours beside the others.
    """

    rows: tuple[str, ...]
    work: Callable[[float], MemoryWork]
    ranks: tuple[int, ...]
    pools: Callable[[MemoryWork, Rig], Pools]
    load: float
    paper: str


def _memory_pools(work: MemoryWork, rig: Rig) -> Pools:
    """A quarter of what is asked for, as in memory.4."""
    filled = working_set(work, rig.adapters, rig.geometry, EngineSettings().block_tokens)
    return Pools(filled.total_bytes // 4, filled.host_bytes)


def _admission_work(rate: float) -> MemoryWork:
    return make_work(Case(row="", rate=rate, requests=REQUESTS), LENGTH_SCALE)


def _admission_pools(work: MemoryWork, rig: Rig) -> Pools:
    mean_bytes = mean_request_bytes(work, rig.adapters, rig.geometry.block_bytes(1))
    return Pools(round(POOL_REQUESTS * mean_bytes), 2 * sum(ref.weight_bytes for ref in rig.adapters.values()))


def _modes_work(rate: float) -> MemoryWork:
    return dlora_cases.PHASES._replace(phase_s=REQUESTS / 3 / rate).work(rate)


COMPARISONS = {
    "memory.4": Comparison(
        rows=("elora", "elora:s-lora", "vllm-static"),
        work=lambda rate: memory_common.conversations(rate, REQUESTS),
        ranks=memory_common.RANKS,
        pools=_memory_pools,
        load=memory_common.LOAD,
        paper="; ".join(
            f"TTFT {fmean(rival.ttft_reduction.values()):.0%}, TPOT {rival.tpot_reduction:.0%} less than {row}, peak "
            f"{rival.peak_increase:.0%} higher"
            for row, rival in elora_figures.RIVALS.items()
        ),
    ),
    "admission.3": Comparison(
        rows=("chameleon", "chameleon:s-lora"),
        work=_admission_work,
        ranks=PAPER_RANKS,
        pools=_admission_pools,
        load=1.0,
        paper=f"P99 TTFT {_HIGH.p99_reduction:.0%}, P50 {_HIGH.p50_reduction:.0%} less than chameleon:s-lora at high "
        f"load, throughput {chameleon_figures.THROUGHPUT['chameleon']:g} ×",
    ),
    "modes.3": Comparison(
        rows=("dlora", "unmerged-only", "merged-only"),
        work=_modes_work,
        ranks=(8, 16, 32, 64),
        pools=lambda work, rig: Pools(POOL_BYTES, HOST_BYTES),
        load=dlora_cases.PHASE_LOAD,
        paper=", ".join(
            f"{row} up to {rival.mean:g} ×" for row, rival in dlora_figures.RIVALS.items() if row.endswith("-only")
        )
        + " dlora's latency per output token",
    ),
}
"""By the line whose rows and workload they are."""


def measure_rows(rig: GpuRig, runs: StoredRuns) -> dict[str, Any]:
    """Run every row once at the load, live; its peak and that load are by the profile of cuda.4."""
    profile = gpu_profile(rig)
    return {name: _compare(rig, runs, profile, name, each) for name, each in COMPARISONS.items()}


def _compare(rig: GpuRig, runs: StoredRuns, profile: CostProfile, name: str, given: Comparison) -> dict[str, Any]:
    work = given.work(1.0)
    modelled = modelled_rig(profile, work, WorkOptions(source="", ranks=given.ranks))
    pools = given.pools(work, modelled)
    settings = {row: rig.settings(row=row, **pools._asdict()) for row in given.rows}
    peaks = {
        row: runs.get(f"rows-{name}-peak-{_part(row)}", partial(_peak, modelled, settings[row], given.work))["rate"]
        for row in given.rows
    }
    rate = given.load * peaks[given.rows[1]]
    folders = rig.folders(name, spread(given.ranks, len(work.names)), ATTENTION)
    refs = {
        adapter: msgspec.structs.replace(ref, name=adapter)
        for adapter, ref in zip(work.names, rig.references(folders), strict=True)
    }
    live = Rig(modelled.geometry, rig.config.vocab_size, refs, live_replica, WARM_UP)
    made = {
        row: runs.get(f"rows-{name}-{_part(row)}", partial(_run, live, settings[row], given.work(rate)))
        for row in given.rows
    }
    return {"rate": rate, "peaks": peaks, "rows": made, **pools._asdict()}


def _peak(rig: Rig, settings: Settings, work: Callable[[float], MemoryWork]) -> dict[str, Any]:
    """Search the highest rate at which the mean TTFT stays below a multiple of that of requests that are alone."""

    def ttft_s(rate: float) -> float:
        return float(_run(rig, settings, work(rate))["ttft_s"]["mean"])

    limit_s = SLO_TIMES * ttft_s(UNLOADED_RATE)
    found = find_peak(lambda rate: limit_s / ttft_s(rate), 1.0, 8.0, precision=PRECISION)
    if found.rate is None:
        raise RuntimeError(f"{settings.engine.row}: no rate meets a mean TTFT of {limit_s:.3f} s")
    return {"rate": found.rate}


def _run(rig: Rig, settings: Settings, work: MemoryWork) -> dict[str, Any]:
    """Return TTFT and TPOT of a row.

    Raises:
        RuntimeError: a request failed.
    """
    with warm_replica(rig, settings, work) as ((engine, _, _), clock, coalesced):
        run = run_workload(
            engine,
            clock,
            work.requests,
            rig.adapters,
            work.prompts_of(rig.vocabulary),
            coalesced=coalesced,
            predict=make_predictor(PREDICTOR, work.requests, work.seed),
        )
    failed = [each for each in run.exchanges if each.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(run.exchanges)} requests failed: {failed[0].message}")
    times = {name: [getattr(each, name) for each in run.exchanges] for name in ("ttft_s", "tpot_s")}
    return {"requests": len(run.exchanges)} | {name: _summary(values) for name, values in times.items()}


def _summary(values: Sequence[float | None]) -> dict[str, float]:
    """Return mean, P95 and P99; answers of one token have no TPOT."""
    known = [each for each in values if each is not None]
    percentiles = {f"p{percent}": float(np.percentile(known, percent)) for percent in (95, 99)}
    return {"mean": fmean(known), **percentiles}


def rows_figure(found: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Return each row in words."""
    figure = {}
    for name, made in found.items():
        for row, run in made["rows"].items():
            ttft, tpot = (_ms(run[key]) for key in ("ttft_s", "tpot_s"))
            figure[f"{name}, {row}"] = (
                f"TTFT {ttft}, TPOT {tpot} ms (mean, P95, P99) at {made['rate']:.2f}/s, peak {made['peaks'][row]:.2f}/s"
            )
        figure[f"{name}, printed"] = COMPARISONS[name].paper
    return figure


def _ms(times_s: Mapping[str, float]) -> str:
    return " / ".join(f"{times_s[key] * 1e3:,.1f}" for key in ("mean", "p95", "p99"))


def _part(row: str) -> str:
    return row.replace(":", "-")
