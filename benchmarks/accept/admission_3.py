"""admission.3: Chameleon beside S-LoRA live, on both sides of FIFO's knee."""

import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.accept import chameleon_figures as paper
from benchmarks.accept.admission_cases import without_times
from benchmarks.accept.admission_common import (
    FIFO,
    GROWTH,
    HALF_HOUR_S,
    KNEE_SEEDS,
    OURS,
    PREDICTOR,
    SEED,
    WORDS_OF_KNEE,
    Case,
    Outcome,
    figures_of,
    find_knee,
    make_work,
    mean_growth,
    run_on,
    turns_on,
    two_processes,
    workload_words,
)
from benchmarks.accept.lines import Result, line
from benchmarks.accept.machine import this_machine
from benchmarks.accept.memory_common import LINK_BYTES_PER_S, paired
from benchmarks.accept.offline import interval_words
from benchmarks.accept.rigs import SLICE_S, MachineRigs, with_default_model
from benchmarks.accept.runs import StoredRuns
from lorikeet.bench.memory_bench import MemorySetting, Rig, modelled_rig
from lorikeet.bench.memory_work import MemoryWork, WorkOptions
from lorikeet.bench.statistics import Ratio, p50_of, p95_of, ratio_over_repeats
from lorikeet.bench.synthetic import PAPER_RANKS
from lorikeet.config import Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.costs.profile import CostProfile

SCALE = 1 / 8
POOL_REQUESTS = 12
MAX_MODEL_TOKENS, STEP_TOKENS = 2048, 256
RUN_S = 300.0
LIVE_SEEDS = (41, 42, 43)
"""Of the repeats' workloads: by none of them was anything chosen."""
LOADS = {name: paper.LOADS[name].per_s / paper.KNEE_RPS for name in ("low", "high")}
"""Of the knee: 0.69 and 1.03."""
P50_RATIO = 0.7
SIDES = {"below": 0.85, "beyond": 1.15}
"""Of the knee: where the live queue is looked at, so far away that chance does not decide."""
OVERLOAD = 1.3
"""Of the knee: where it shows how much each row can serve."""

Pair = dict[str, list[dict[str, Any]]]
"""Runs of both rows, by repeat."""


class Found(NamedTuple):
    """What was found on one side of the knee, or at one load.

    Attributes:
        machine: where.
        knee: see ``LiveRuns``.
        runs: see ``LiveRuns.run``; of a load one a repeat.
    """

    machine: str
    knee: float
    runs: list[dict[str, Any]]

    @property
    def pair(self) -> Pair:
        """The runs by row."""
        return {row: [each["rows"][row] for each in self.runs] for row in self.runs[0]["rows"]}

    @property
    def slower(self) -> str:
        """By what share the machine was slower than its profile in each run, in words."""
        return " ".join(f"{each['slower']:.0%}" for each in self.runs)


class Load(NamedTuple):
    """Both rows at one load.

    Attributes:
        found: the runs.
        modelled: both rows by the profile; see ``LiveRuns.modelled``.
        words: what was run on what.
    """

    found: Found
    modelled: dict[str, list[float]]
    words: str


@line(
    "admission.3",
    title=f"TTFT of {OURS} beside {FIFO}, live and interleaved, below and beyond FIFO's knee",
    bound=f"at {LOADS['high']:.2f} of the knee P50 TTFT ≤ {P50_RATIO:g} × and P95 < 1 × {FIFO} (whole interval); at "
    f"{LOADS['low']:.2f} the intervals include or lie below 1; live, the queue grows beyond the knee and not below",
)
def run(runs: StoredRuns) -> Result:
    """Find the knee by the profile of this machine, look at both sides of it live, and run both rows by turns."""
    sides = {name: _side(runs, name) for name in SIDES}
    loads = {name: _load(runs, name) for name in LOADS}
    growths = {name: float(side.pair[FIFO][0]["growth"]) for name, side in sides.items()}
    ratios = {name: ratios_of(load.found.pair) for name, load in loads.items()}
    found = sides | {name: load.found for name, load in loads.items()}
    failures, modelled = failures_of(ratios, growths), loads["high"].modelled
    first = ratios["high"]["P50"]
    return Result(
        figure={
            **{
                f"{name} TTFT at {load} load": f"{ratio.value:.3f} ({interval_words(ratio[1:])})"
                for load, by_name in ratios.items()
                for name, ratio in by_name.items()
            },
            "by the profile": {
                f"{name} at {load} load": f"{min(each.modelled[name]):.2f} to {max(each.modelled[name]):.2f}"
                for load, each in loads.items()
                for name in ratios[load]
            },
            "served per second ÷ FIFO's, by the profile": {
                f"at {load:.2f}": f"{fmean(modelled[_served(load)]):.3f}" for load in (LOADS["high"], OVERLOAD)
            },
            "growth, live": {name: f"{each:+.1%}" for name, each in growths.items()},
            "knee": {name: f"{each.knee:.2f}/s" for name, each in found.items()},
        },
        interval=(first.low, first.high),
        passed=not failures,
        cause="; ".join([*failures, _served_words(modelled)] if failures else []),
        notes=f"{loads['low'].words}; {len(LIVE_SEEDS)} repeats of {RUN_S / 60:.0f} minutes, each of a workload of its "
        f"own, in which both rows run by turns of {SLICE_S:g} s, and the clock of each stands while the other runs; "
        "95 % bootstrap over repeats and requests, of the mean ratio of repeats; mean TTFT, s: "
        + "; ".join(f"{name} {_by_row(load.found.pair, _mean)}" for name, load in loads.items())
        + f"; knee: {WORDS_OF_KNEE}, modelled by a quick profile of this machine right before each load and side; "
        "clocks go as much slower than the real one as steps lately took longer than that profile says: "
        + ", ".join(f"{name} {each.slower}" for name, each in found.items())
        + "; machines: "
        + ", ".join(f"{name} {each.machine}" for name, each in found.items())
        + "; by the profile: "
        f"{len(KNEE_SEEDS)} workloads, what is served per second by the time until the last answer; sides at "
        + " and ".join(f"{share:g}" for share in SIDES.values())
        + " of the knee for half an hour; interval of the first ratio",
        details={
            "slower": {name: [each["slower"] for each in those.runs] for name, those in found.items()},
            "rows": {
                name: {row: [without_times(each) for each in made] for row, made in load.found.pair.items()}
                for name, load in loads.items()
            },
        },
    )


def _side(runs: StoredRuns, name: str) -> Found:
    with live_runs(runs, name, SIDES[name]) as live:
        return Found(live.machine, live.knee, [live.run("growth", (FIFO,), HALF_HOUR_S)])


def _load(runs: StoredRuns, name: str) -> Load:
    """Run both rows at a load; which begins, and the workload, changes from repeat to repeat."""
    rows = (OURS, FIFO)
    with live_runs(runs, name, LOADS[name]) as live:
        made = [
            live.run(str(repeat), rows[:: -1 if repeat % 2 else 1], RUN_S, seed)
            for repeat, seed in enumerate(LIVE_SEEDS)
        ]
        return Load(Found(live.machine, live.knee, made), live.modelled, live.words())


class LiveRuns:
    """Runs of one workload at one load on this machine by one quick profile of it, stored as parts of the line.

    The machine drifts from one quarter of an hour to the next, and the knee with it. What goes by one profile is run
    on one machine; others may be run on another one.

    Args:
        runs: the parts.
        name: of the profile and of all that is run by it; begins the names of the parts.
        load: share of the knee.
        scratch: an empty folder, for adapters.

    Attributes:
        machine: that of the first part.
    """

    def __init__(self, runs: StoredRuns, name: str, load: float, scratch: Path) -> None:
        # Each load on one machine, but not necessarily on the other's.
        self._runs = runs = runs.of_any_machine()
        self.machine: str = runs.get(f"{name}-machine", lambda: {"machine": this_machine()})["machine"]
        self._name = name
        self._load = load
        # Enough requests to know the mean one.
        self._work = make_work(Case(row=FIFO, rate=1.0, requests=10_000), SCALE)
        profile_part = f"{name}-profile"
        self._rigs = MachineRigs(runs, self._work, PAPER_RANKS, scratch, profile_part=profile_part, quick=True)

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

    @property
    def knee(self) -> float:
        """FIFO's, in requests per second of the machine as its profile has it."""
        return float(self._get("knee", self._search_knee)["rate"])

    def _get(self, part: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        def measure_here() -> dict[str, Any]:
            if this_machine() != self.machine:
                raise RuntimeError(
                    f"{self._name} was begun on {self.machine}, this is {this_machine()}: remove its parts first"
                )
            return measure()

        return self._runs.get(f"{self._name}-{part}", measure_here)

    def _search_knee(self) -> dict[str, Any]:
        modelled = partial(_modelled_growth, self._rigs.profile, self.setting)
        with two_processes() as pool:
            return find_knee(FIFO, 1.0, lambda rate: mean_growth(FIFO, rate, partial(pool.map, modelled)))

    def run(self, part: str, rows: Sequence[str], duration_s: float, seed: int = SEED) -> dict[str, Any]:
        """Run rows live at the load by turns; see ``MachineRigs.run_in_slices``.

        Args:
            part: of the line.
            rows: in the order in which they begin.
            duration_s: how long requests come.
            seed: of the workload.

        Returns:
            ``rows``: the figures of each; ``slower``: by what share steps took longer than the profile says.
        """
        rate = self._load * self.knee
        cases = [Case(row=row, rate=rate, requests=round(rate * duration_s), seed=seed) for row in rows]
        runs = [(self.setting.settings(case.row), partial(_turns_of, case=case)) for case in cases]

        def measure() -> dict[str, Any]:
            made, slower = self._rigs.run_in_slices(runs)
            return {"rows": dict(zip(rows, made, strict=True)), "slower": slower}

        return self._get(part, measure)

    @cached_property
    def modelled(self) -> dict[str, list[float]]:
        """Return what both rows do by the profile, as ours ÷ FIFO's by workload.

        P50 and P95 of TTFT at the load, and how much is served per second at the load and far beyond the knee, where
        the last answer comes so much sooner.
        """
        return self._get("modelled", self._compare_modelled)

    def _compare_modelled(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for load in (self._load, OVERLOAD):
            rate = load * self.knee
            cases = [
                Case(row=row, rate=rate, requests=round(rate * RUN_S), seed=seed)
                for seed in KNEE_SEEDS
                for row in (OURS, FIFO)
            ]
            with two_processes() as pool:
                made = list(pool.map(partial(_modelled_figures, self._rigs.profile, self.setting), cases))
            pairs = list(zip(made[::2], made[1::2], strict=True))
            found[_served(load)] = [theirs["drained_s"] / ours["drained_s"] for ours, theirs in pairs]
            if load == self._load:
                for name, key in (("P50", "ttft_p50_s"), ("P95", "ttft_p95_s")):
                    found[name] = [ours[key] / theirs[key] for ours, theirs in pairs]
        return found

    def words(self) -> str:
        """Say what is run on what."""
        setting, token_bytes = self.setting, self._rigs.modelled.geometry.block_bytes(1)
        return (
            f"{workload_words()}, lengths divided by {1 / SCALE:.0f}; device pool {setting.memory_bytes / 2**20:,.0f} "
            f"MiB, {POOL_REQUESTS} mean requests with an adapter each ({setting.memory_bytes // token_bytes:,} tokens "
            f"of KV), host pool {setting.host_memory_bytes / 2**20:,.0f} MiB, declared link "
            f"{LINK_BYTES_PER_S / 1e9:g} GB/s each way, at most {STEP_TOKENS} tokens in a step; predictor {PREDICTOR}"
        )


@contextmanager
def live_runs(runs: StoredRuns, name: str, load: float) -> Iterator[LiveRuns]:
    """Yield the runs, with a folder that is removed in the end; see ``LiveRuns``."""
    with tempfile.TemporaryDirectory(prefix="lorikeet-admission-") as scratch:
        yield LiveRuns(runs, name, load, Path(scratch))


def _turns_of(rig: Rig, settings: Settings, case: Case) -> Generator[None, None, dict[str, Any]]:
    return figures_of((yield from turns_on(rig, settings, case, make_work(case, SCALE))))


def _modelled_growth(profile: CostProfile, setting: MemorySetting, case: Case) -> float:
    return _run_modelled(profile, setting, case).growth


def _modelled_figures(profile: CostProfile, setting: MemorySetting, case: Case) -> dict[str, Any]:
    return without_times(figures_of(_run_modelled(profile, setting, case)))


def _run_modelled(profile: CostProfile, setting: MemorySetting, case: Case) -> Outcome:
    """Run a case by a profile in any process."""
    work = make_work(case, SCALE)
    rig = modelled_rig(profile, work, WorkOptions(source="", ranks=PAPER_RANKS))
    return run_on(rig, setting.settings(case.row), case, work)


def _served(load: float) -> str:
    return f"served at {load:.2f}"


def _served_words(modelled: dict[str, list[float]]) -> str:
    high = LOADS["high"]
    return (
        f"by the profile {OURS} serves {fmean(modelled[_served(high)]):.3f} × as much per second as {FIFO} at "
        f"{high:.2f} of the knee ({fmean(modelled[_served(OVERLOAD)]):.3f} × at {OVERLOAD:g}): as far as it serves no "
        "more, whoever waits for less time makes others wait for longer"
    )


def mean_request_bytes(work: MemoryWork, adapters: dict[str, AdapterRef], token_bytes: int) -> float:
    """Return what a request takes at its end, with its adapter, on average."""
    tokens = fmean(each.input_tokens + each.output_tokens for each in work.requests)
    return token_bytes * tokens + fmean(adapters[each.adapter].weight_bytes for each in work.requests if each.adapter)


def ratios_of(pair: Pair) -> dict[str, Ratio]:
    """Return P50 and P95 TTFT of ours ÷ FIFO's."""
    ttft = paired(pair[OURS], pair[FIFO], "ttft_s")
    return {"P50": ratio_over_repeats(*ttft, p50_of), "P95": ratio_over_repeats(*ttft, p95_of)}


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


def _by_row(pair: Pair, words: Callable[[dict[str, Any]], str]) -> str:
    return ", ".join(f"{row} " + " ".join(map(words, made)) for row, made in pair.items())


def _mean(run: dict[str, Any]) -> str:
    return f"{run['ttft_mean_s']:.2f}"


def _words(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} × ({interval_words(ratio[1:])})"
