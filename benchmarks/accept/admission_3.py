"""admission.3: Chameleon beside S-LoRA live, on both sides of FIFO's knee."""

import tempfile
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.accept import chameleon_figures as paper
from benchmarks.accept.admission_common import (
    FIFO,
    GROWTH,
    HALF_HOUR_S,
    OURS,
    PREDICTOR,
    SEED,
    WORDS_OF_KNEE,
    Case,
    figures_of,
    find_knee,
    make_work,
    mean_growth,
    part_name,
    run_on,
    workload_words,
)
from benchmarks.accept.lines import Result, line
from benchmarks.accept.memory_common import LINK_BYTES_PER_S, paired
from benchmarks.accept.offline import interval_words
from benchmarks.accept.rigs import MachineRigs, with_default_model
from benchmarks.accept.runs import StoredRuns
from lorikeet.bench.memory_bench import MemorySetting, Rig
from lorikeet.bench.memory_work import MemoryWork
from lorikeet.bench.statistics import Ratio, p50_of, p95_of, ratio_over_requests
from lorikeet.bench.synthetic import PAPER_RANKS
from lorikeet.core.adapter import AdapterRef

SCALE = 1 / 8
POOL_REQUESTS = 12
MAX_MODEL_TOKENS, STEP_TOKENS = 2048, 256
RUN_S, REPEATS = 300.0, 3
LOADS = {name: paper.LOADS[name].per_s / paper.KNEE_RPS for name in ("low", "high")}
"""Of the knee: 0.69 and 1.03."""
P50_RATIO = 0.7
SIDES = {"below": 0.9, "beyond": 1.1}
"""Of the modelled knee: where the live queue is looked at."""


@line(
    "admission.3",
    title=f"TTFT of {OURS} beside {FIFO}, live and interleaved, below and beyond FIFO's knee",
    bound=f"at {LOADS['high']:.2f} of the knee P50 TTFT ≤ {P50_RATIO:g} × and P95 < 1 × {FIFO} (whole interval); at "
    f"{LOADS['low']:.2f} the intervals include or lie below 1; live, the queue grows beyond the knee and not below",
)
def run(runs: StoredRuns) -> Result:
    """Find the knee by the profile of this machine, look at both sides of it live, and run both rows in turns."""
    with tempfile.TemporaryDirectory(prefix="lorikeet-admission-") as scratch:
        both = LiveRuns(runs, Path(scratch))
        knee = both.knee()
        sides = {side: both.growth(side, share * knee["rate"]) for side, share in SIDES.items()}
        pairs = {load: both.pair(load, share * knee["rate"]) for load, share in LOADS.items()}
        words = both.words()
    ratios = {load: ratios_of(pair) for load, pair in pairs.items()}
    failures = failures_of(ratios, sides)
    first = ratios["high"]["P50"]
    return Result(
        figure={
            **{
                f"{name} TTFT at {load} load": f"{ratio.value:.3f} ({interval_words(ratio[1:])})"
                for load, found in ratios.items()
                for name, ratio in found.items()
            },
            "knee": f"{knee['rate']:.2f}/s",
            "growth, live": {side: f"{each:+.1%}" for side, each in sides.items()},
        },
        interval=(first.low, first.high),
        passed=not failures,
        cause="; ".join(failures),
        notes=f"{words}; {REPEATS} interleaved repeats of {RUN_S / 60:.0f} minutes; 95 % bootstrap over requests; mean "
        + "TTFT, s: "
        + "; ".join(f"{load} {_means(pair)}" for load, pair in pairs.items())
        + f"; knee: {WORDS_OF_KNEE}, modelled by this machine's profile; interval of the first ratio",
        details={
            "knee": knee,
            "rows": {
                load: {
                    row: [{name: value for name, value in each.items() if name != "ttft_s"} for each in made]
                    for row, made in pair.items()
                }
                for load, pair in pairs.items()
            },
        },
    )


class LiveRuns:
    """Runs of one workload on this machine, live and by its profile, stored as parts of the line.

    Args:
        runs: the parts.
        scratch: an empty folder, for adapters.
    """

    def __init__(self, runs: StoredRuns, scratch: Path) -> None:
        self._runs = runs
        # Enough requests to know the mean one.
        self._work = make_work(Case(row=FIFO, rate=1.0, requests=10_000), SCALE)
        self._rigs = MachineRigs(runs, self._work, PAPER_RANKS, scratch)

    @cached_property
    def setting(self) -> MemorySetting:
        """Return a device pool of so many mean requests with an adapter each, and a host pool for all adapters."""
        rig = self._rigs.modelled
        mean_bytes = mean_request_bytes(self._work, rig.adapters, rig.geometry.block_bytes(1))
        return with_default_model(
            MemorySetting(
                memory_bytes=round(POOL_REQUESTS * mean_bytes),
                host_memory_bytes=2 * sum(ref.weight_bytes for ref in rig.adapters.values()),
                link_bytes_per_s=LINK_BYTES_PER_S,
                max_model_tokens=MAX_MODEL_TOKENS,
                max_step_tokens=STEP_TOKENS,
            )
        )

    # --- runs ----------------------------------------------------------------------------------------

    def knee(self) -> dict[str, Any]:
        """Return FIFO's knee by the profile."""
        return self._runs.get("knee", lambda: find_knee(FIFO, 1.0, self._modelled_growth))

    def _modelled_growth(self, rate: float) -> float:
        def each(cases: Iterable[Case]) -> list[float]:
            return [self._run(self._rigs.modelled, case)["growth"] for case in cases]

        return mean_growth(FIFO, rate, each)

    def growth(self, side: str, rate: float) -> float:
        """Return by how much of the arrivals FIFO's waiting requests become more in half an hour, live."""
        case = Case(row=FIFO, rate=rate, requests=round(rate * HALF_HOUR_S))
        return float(self._runs.get(f"knee-{side}", lambda: self._run(self._rigs.live, case))["growth"])

    def pair(self, load: str, rate: float) -> dict[str, list[dict[str, Any]]]:
        """Return the live runs of both rows; which comes first changes from repeat to repeat."""
        made: dict[str, list[dict[str, Any]]] = {OURS: [], FIFO: []}
        for repeat in range(REPEATS):
            for row in sorted(made, reverse=bool(repeat % 2)):
                case = Case(row=row, rate=rate, requests=round(rate * RUN_S), seed=SEED)
                name = f"{load}-{repeat}-{part_name(row)}"
                made[row].append(self._runs.get(name, lambda case=case: self._run(self._rigs.live, case)))  # type: ignore[misc]
        return made

    def _run(self, rig: Rig, case: Case) -> dict[str, Any]:
        return figures_of(run_on(rig, self.setting, case, make_work(case, SCALE)))

    def words(self) -> str:
        """Say what is run on what."""
        setting, token_bytes = self.setting, self._rigs.modelled.geometry.block_bytes(1)
        return (
            f"{workload_words()}, lengths divided by {1 / SCALE:.0f}; device pool {setting.memory_bytes / 2**20:,.0f} "
            f"MiB, {POOL_REQUESTS} mean requests with an adapter each ({setting.memory_bytes // token_bytes:,} tokens "
            f"of KV), host pool {setting.host_memory_bytes / 2**20:,.0f} MiB, declared link "
            f"{LINK_BYTES_PER_S / 1e9:g} GB/s each way, at most {STEP_TOKENS} tokens in a step; predictor {PREDICTOR}"
        )


def mean_request_bytes(work: MemoryWork, adapters: dict[str, AdapterRef], token_bytes: int) -> float:
    """Return what a request takes at its end, with its adapter, on average."""
    tokens = fmean(each.input_tokens + each.output_tokens for each in work.requests)
    return token_bytes * tokens + fmean(adapters[each.adapter].weight_bytes for each in work.requests if each.adapter)


def ratios_of(pair: dict[str, list[dict[str, Any]]]) -> dict[str, Ratio]:
    """Return P50 and P95 TTFT of ours ÷ FIFO's."""
    ttft = paired(pair[OURS], pair[FIFO], "ttft_s")
    return {"P50": ratio_over_requests(*ttft, p50_of), "P95": ratio_over_requests(*ttft, p95_of)}


def failures_of(ratios: dict[str, dict[str, Ratio]], sides: dict[str, float]) -> list[str]:
    """Return what is missed of the bound, in words.

    Args:
        ratios: by load and percentile.
        sides: growth of the live queue below and beyond the knee.
    """
    high = ratios["high"]
    return [
        *([f"P50 TTFT at high load is {high['P50'].value:.2f} ×"] if high["P50"].value > P50_RATIO else []),
        *([f"P95 TTFT at high load is {_words(high['P95'])}"] if high["P95"].high >= 1 else []),
        *(f"{name} TTFT at low load is {_words(ratio)}" for name, ratio in ratios["low"].items() if ratio.low > 1),
        *([f"the live queue grows below the knee ({sides['below']:+.1%})"] if sides["below"] > GROWTH else []),
        *(
            [f"the live queue does not grow beyond the knee ({sides['beyond']:+.1%})"]
            if sides["beyond"] <= GROWTH
            else []
        ),
    ]


def _means(pair: dict[str, list[dict[str, Any]]]) -> str:
    return ", ".join(f"{row} " + " ".join(f"{each['ttft_mean_s']:.2f}" for each in made) for row, made in pair.items())


def _words(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} × ({interval_words(ratio[1:])})"
