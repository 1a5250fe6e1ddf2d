"""cuda.3, e: the rows of memory.4, admission.3 and modes.3 on a GPU, on their workloads scaled to it."""

from collections.abc import Callable, Mapping
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from benchmarks.accept import chameleon_figures, dlora_cases, dlora_figures, elora_figures, memory_common
from benchmarks.accept.admission_3 import mean_request_bytes
from benchmarks.accept.admission_common import PREDICTOR, Case, make_work, part_name
from benchmarks.accept.cuda_4 import gpu_profile
from benchmarks.accept.gpu_rig import GpuRig
from benchmarks.accept.runs import StoredRuns
from lorikeet.bench.memory_bench import WARM_UP, Rig, modelled_rig, row_figures, run_row
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


class Modelled(NamedTuple):
    """Rows on their workload by a profile.

    Attributes:
        rig: where they run.
        pools: of all rows.
        settings: by row.
        peaks: by row, requests per second.
    """

    rig: Rig
    pools: Pools
    settings: dict[str, Settings]
    peaks: dict[str, float]


def measure_rows(rig: GpuRig, runs: StoredRuns) -> dict[str, Any]:
    """Run every row once at the load, live; its peak and that load are by the profile of cuda.4."""
    profile = gpu_profile(rig)
    return {name: _compare(rig, runs, name, model_rows(rig, runs, profile, name)) for name in COMPARISONS}


def model_rows(rig: GpuRig, runs: StoredRuns, profile: CostProfile, name: str) -> Modelled:
    """Search the peaks of a comparison's rows, for which no GPU is needed; each is kept as a part of the line.

    A peak is the highest rate at which the mean TTFT stays below a multiple of what the first row has where every
    request is alone.

    Raises:
        RuntimeError: a row has none.
    """
    given = COMPARISONS[name]
    work = given.work(1.0)
    modelled = modelled_rig(profile, work, WorkOptions(source="", ranks=given.ranks))
    pools = given.pools(work, modelled)
    settings = {row: rig.settings(row=row, **pools._asdict()) for row in given.rows}

    def ttft_s(row: str, rate: float) -> float:
        return float(_run(modelled, settings[row], given.work(rate))["ttft_mean_s"])

    def search(row: str, limit_s: float) -> dict[str, Any]:
        return {"rate": find_peak(lambda rate: limit_s / ttft_s(row, rate), 1.0, 8.0, precision=PRECISION).rate}

    limit = runs.get(f"rows-{name}-limit", lambda: {"s": SLO_TIMES * ttft_s(given.rows[0], UNLOADED_RATE)})
    peaks = {
        row: runs.get(f"rows-{name}-peak-{part_name(row)}", partial(search, row, limit["s"]))["rate"]
        for row in given.rows
    }
    if missing := [row for row, rate in peaks.items() if rate is None]:
        raise RuntimeError(f"{', '.join(missing)}: no rate meets a mean TTFT of {limit['s']:.3f} s")
    return Modelled(modelled, pools, settings, peaks)


def _compare(rig: GpuRig, runs: StoredRuns, name: str, modelled: Modelled) -> dict[str, Any]:
    given = COMPARISONS[name]
    rate = given.load * modelled.peaks[given.rows[1]]
    work = given.work(rate)
    folders = rig.folders(name, spread(given.ranks, len(work.names)), ATTENTION)
    refs = {
        adapter: msgspec.structs.replace(ref, name=adapter)
        for adapter, ref in zip(work.names, rig.references(folders), strict=True)
    }
    live = Rig(modelled.rig.geometry, rig.config.vocab_size, refs, live_replica, WARM_UP)
    made = {
        row: runs.get(f"rows-{name}-{part_name(row)}", partial(_run, live, modelled.settings[row], work))
        for row in given.rows
    }
    return {"rate": rate, "peaks": modelled.peaks, "rows": made, **modelled.pools._asdict()}


def _run(rig: Rig, settings: Settings, work: MemoryWork) -> dict[str, Any]:
    """Return a row's figures.

    Raises:
        RuntimeError: a request failed.
    """
    done = run_row(rig, settings, work, predict=make_predictor(PREDICTOR, work.requests, work.seed))
    figures = row_figures(settings.engine.row, done)
    memory_common.whole({"figures": figures})
    return figures


def rows_figure(found: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Return each row in words."""
    figure = {}
    for name, made in found.items():
        for row, run in made["rows"].items():
            ttft, tpot = (_ms(run, key) for key in ("ttft", "tpot"))
            figure[f"{name}, {row}"] = (
                f"TTFT {ttft}, TPOT {tpot} ms (mean, P95, P99) at {made['rate']:.2f}/s, peak {made['peaks'][row]:.2f}/s"
            )
        figure[f"{name}, printed"] = COMPARISONS[name].paper
    return figure


def _ms(figures: Mapping[str, float], key: str) -> str:
    return " / ".join(f"{figures[f'{key}_{part}_s'] * 1e3:,.1f}" for part in ("mean", "p95", "p99"))
