"""modes.3: dLoRA's batching beside merging only and never, live, while the skew of the requests changes."""

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, cast

from benchmarks.accept.admission_common import part_name
from benchmarks.accept.disturbance import drift_words
from benchmarks.accept.lines import Result, line
from benchmarks.accept.modes_phases import PHASES, WORDS, Phased
from benchmarks.accept.offline import interval_words
from benchmarks.accept.rigs import MachineRigs, with_default_model
from benchmarks.accept.runs import StoredRuns
from lorikeet.bench.choices import Range
from lorikeet.bench.memory_bench import MemorySetting, Rig, run_row, settle
from lorikeet.bench.peak import find_peak
from lorikeet.bench.statistics import Ratio, mean_of, ratio_over_requests
from lorikeet.config import Settings
from lorikeet.core.ids import AdapterDigest, RequestId
from lorikeet.core.plan import StepPlan, StepResult
from lorikeet.engine.executor import Executor
from lorikeet.engine.loop import Engine
from lorikeet.scheduling.batching.dlora import DLora
from lorikeet.scheduling.batching.mode import BatchWork

OURS, MERGED, UNMERGED = "dlora", "merged-only", "unmerged-only"
CHEAP = {OURS: f"{OURS},kernel_form=unpadded", UNMERGED: f"{UNMERGED},kernel_form=unpadded"}
"""The same where adapters cost little, so merging pays little."""
WORK = Phased(phase_s=80.0, prompt_tokens=Range(32, 160), output_tokens=Range(64, 64))
LOAD, REPEATS, WITHIN, WAIT_TIMES = 0.7, 3, 1.05, 2.0
SLOWER = WORK._replace(phase_s=40.0)
"""What never merging runs to tell by how much einsums take longer than the profile says."""
SLO_TIMES, UNLOADED_RATE = 5, 0.05
RANKS, MEMORY_BYTES, HOST_BYTES = (8, 16, 32, 64), 2 * 2**30, 2**30


@line(
    "modes.3",
    title="dLoRA's batching while skew comes and goes, live beside merging only and never",
    bound=f"at {LOAD:.0%} of {UNMERGED}'s peak mean latency per output token ≤ {WITHIN:g} × the better one's in each "
    f"phase (or the interval includes it); switches pay by the mode's own model of step times; P99 TTFT ≤ "
    f"{WAIT_TIMES:g} × {UNMERGED}'s; where adapters cost little, likewise beside {UNMERGED}",
)
def run(runs: StoredRuns) -> Result:
    """Find the peak by this machine's profile, run the rows in turns, and compare phase by phase."""
    with tempfile.TemporaryDirectory(prefix="lorikeet-modes-") as scratch:
        live = _Live(runs, Path(scratch))
        rate = LOAD * live.peak
        made: dict[str, list[dict[str, Any]]] = {row: [] for row in (OURS, MERGED, UNMERGED, *CHEAP.values())}
        for repeat in range(REPEATS):
            for row in made if repeat % 2 == 0 else reversed(made):
                made[row].append(live.run(row, rate, repeat))
        modelled = {row: live.modelled(row, rate) for row in (OURS, MERGED, UNMERGED)}
    ratios = {phase: {row: _ratio(made[OURS], made[row], phase) for row in (MERGED, UNMERGED)} for phase in PHASES}
    rivals = {phase: max(each, key=lambda row: each[row].value) for phase, each in ratios.items()}
    better = {phase: ratios[phase][rival] for phase, rival in rivals.items()}
    cheap_ratios = {phase: _ratio(made[CHEAP[OURS]], made[CHEAP[UNMERGED]], phase) for phase in PHASES}
    waits = {row: fmean(_p99_s(each) for each in made[row]) for row in made}
    stretches = [stretch for each in made[OURS] for stretch in each["stretches"]]
    gain_s, paid = sum(each["gain_s"] for each in stretches), sum(each["gain_s"] > 0 for each in stretches)
    failures = [
        *(
            f"{phase}: {_words(ratio)} × {rivals[phase]}, whose P99 TTFT there is "
            f"{_waits(made, rivals[phase], phase):.1f} × {UNMERGED}'s, and {OURS}'s {_waits(made, OURS, phase):.1f} × "
            "(docs/decisions/batching-mode.md)"
            for phase, ratio in better.items()
            if min(ratio.value, ratio.low) > WITHIN
        ),
        *(
            f"cheap adapters, {phase}: {_words(ratio)}"
            for phase, ratio in cheap_ratios.items()
            if min(ratio.value, ratio.low) > WITHIN
        ),
        *([f"P99 TTFT is {waits[OURS] / waits[UNMERGED]:.2f} ×"] if waits[OURS] > WAIT_TIMES * waits[UNMERGED] else []),
        *(["it never merged"] if not stretches else []),
        *([f"merging came to {gain_s:+.1f} s"] if stretches and gain_s <= 0 else []),
    ]
    return Result(
        figure={
            **{f"{phase}, ÷ better": _words(ratio) for phase, ratio in better.items()},
            **{f"{phase}, cheap adapters, ÷ {UNMERGED}": _words(ratio) for phase, ratio in cheap_ratios.items()},
            "P99 TTFT ÷ " + UNMERGED: waits[OURS] / waits[UNMERGED],
            "times merged": len(stretches),
            "of them paid": paid,
            "gain by its model, s": gain_s,
            "merged steps": _merged_shares(made[OURS]),
            "merged steps, cheap adapters": _merged_shares(made[CHEAP[OURS]]),
        },
        interval=(better[PHASES[0]].low, better[PHASES[0]].high),
        passed=not failures,
        cause="; ".join(failures),
        notes=f"SmolLM2-135M-Instruct, {WORDS}, ranks {', '.join(map(str, RANKS))}, {rate:.2f} requests/s of "
        f"{WORK.prompt_tokens} + {WORK.output_tokens} tokens, {len(PHASES)} × {WORK.phase_s:.0f} s, {REPEATS} "
        "interleaved repeats, einsums as dLoRA computes (cheap: kernels that pay for the sum of ranks); "
        "mean latency per output token, ms: "
        + "; ".join(f"{row} {_means(each)}" for row, each in made.items())
        + f"; peak: mean TTFT ≤ {SLO_TIMES} × that at {UNLOADED_RATE:g}/s, modelled by this machine's quick profile, "
        f"divided by how much longer than that the steps of {UNMERGED} took in {len(PHASES) * SLOWER.phase_s:.0f} s at "
        f"the load ({live.slower:+.0%}); a "
        "time merged pays if its steps and both switches took less than its model says they had taken unmerged; "
        f"steps took longer than then ({OURS}, {UNMERGED}) or than the profile says by: {_drift(made)}; a run was "
        f"{drift_words()}; "
        "interval of the first ratio; modelled, with P99 TTFT: "
        + "; ".join(f"{row} {_means([each])}, {_p99_s(each):.2f} s" for row, each in modelled.items()),
        details={
            "rows": {
                row: [{phase: _small(each["phases"][phase]) for phase in PHASES} for each in runs_]
                for row, runs_ in made.items()
            },
            "stretches": stretches,
        },
    )


class _Live:
    """Runs of the workload on this machine, stored as parts of the line."""

    def __init__(self, runs: StoredRuns, scratch: Path) -> None:
        self._runs = runs
        self._rigs = MachineRigs(runs, WORK.work(1.0), RANKS, scratch, quick=True)

    @property
    def peak(self) -> float:
        """Never merging's, on this machine: if all steps take longer than the profile says, so much less is served."""
        return self._modelled_peak / (1 + self.slower)

    @cached_property
    def slower(self) -> float:
        """By what share the steps of never merging take longer than the profile says, at the load."""
        run = partial(_run, rate=LOAD * self._modelled_peak, work=SLOWER)
        return float(self._runs.get("slower", lambda: self._rigs.measure_slower(_settings(UNMERGED), run))["slower"])

    @cached_property
    def _modelled_peak(self) -> float:
        """Never merging's by the profile.

        Raises:
            RuntimeError: there is none.
        """

        def search() -> dict[str, Any]:
            rig = self._rigs.modelled
            limit_s = SLO_TIMES * _ttft_mean_s(_run(rig, _settings(UNMERGED), UNLOADED_RATE))
            found = find_peak(
                lambda rate: limit_s / _ttft_mean_s(_run(rig, _settings(UNMERGED), rate)), 1.0, 1.0, precision=0.02
            )
            return {"rate": found.rate}

        rate = self._runs.get("peak", search)["rate"]
        if rate is None:
            raise RuntimeError("no rate meets the limit")
        return float(rate)

    def modelled(self, row: str, rate: float) -> dict[str, Any]:
        """Return a run by the profile, on a machine as slow as this one."""
        rig = self._rigs.drifted(self.slower)
        return self._runs.get(part_name(f"modelled-{row}"), lambda: _run(rig, _settings(row), rate))

    def run(self, row: str, rate: float, repeat: int) -> dict[str, Any]:
        """Return a live run, with ``stolen`` and ``drift``; see ``MachineRigs.run_live``."""
        slower = self.slower if row in (OURS, UNMERGED) else 0.0  # the others compute hardly any einsums
        measure = partial(self._rigs.run_live, _settings(row), partial(_run, rate=rate), slower)
        return self._runs.get(part_name(f"{row}-{repeat}"), measure)


def _drift(made: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    return ", ".join(f"{each['drift']:+.0%}" for done in made.values() for each in done)


def _settings(row: str) -> Settings:
    setting = MemorySetting(memory_bytes=MEMORY_BYTES, host_memory_bytes=HOST_BYTES, max_model_tokens=1024)
    return with_default_model(setting).settings(row)


def _run(rig: Rig, settings: Settings, rate: float, work: Phased = WORK) -> dict[str, Any]:
    log = _Log()
    done = run_row(rig, settings, work.work(rate), on_warm=log.attach)
    return {
        "phases": work.figures(done.run.exchanges),
        "stretches": log.stretches(),
        "merged": log.merged_shares(),
    }


class _Ran(NamedTuple):
    """A plan that has run."""

    merged: AdapterDigest | None
    work: BatchWork
    steps: int
    step_s: float
    switch_s: float
    started: int
    """Requests so far."""


class _Log:
    """Stands between an engine and its executor, and remembers the plans."""

    def __init__(self) -> None:
        self._adapters: dict[RequestId, AdapterDigest | None] = {}
        self._prompts: dict[RequestId, int] = {}
        self._started = 0
        self._ran: list[_Ran] = []

    def attach(self, engine: Engine) -> None:
        """Wait for what the row loads beforehand, and see all plans from then on."""
        settle(engine)
        self._mode = engine._scheduler.selection._mode
        self._inner, engine._executor = engine._executor, cast("Executor", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run it and note it down."""
        for start in plan.starts:
            self._adapters[start.request_id] = start.adapter
            self._prompts[start.request_id] = len(start.token_ids)
        self._started += len(plan.starts)
        result = self._inner.execute(plan)
        if plan.sequences:
            decodes = sum(step.start >= self._prompts[step.request_id] for step in plan.sequences)
            rows = Counter[AdapterDigest]()
            for step in plan.sequences:
                digest = self._adapters[step.request_id]
                if digest is not None:
                    rows[digest] += step.tokens
            tokens = sum(step.tokens for step in plan.sequences)
            work = BatchWork(len(plan.sequences) - decodes, tokens - decodes, decodes, rows)
            step_s = (result.duration_s - result.switch_s) / result.steps_run
            self._ran.append(_Ran(plan.merged, work, result.steps_run, step_s, result.switch_s, self._started))
        return result

    def stretches(self) -> list[dict[str, float]]:
        """Return each time an adapter was merged: its steps, and the seconds that this saved by the mode's times.

        The switch back belongs to it. Empty for a mode that has none.
        """
        if not isinstance(self._mode, DLora):
            return []
        found: list[dict[str, float]] = []
        before: AdapterDigest | None = None
        for each in self._ran:
            if each.merged != before and before is not None:
                found[-1]["gain_s"] -= each.switch_s
            if each.merged is not None:
                if each.merged != before:
                    found.append({"steps": 0, "gain_s": -each.switch_s if before is None else 0.0})
                found[-1]["steps"] += each.steps
                found[-1]["gain_s"] += each.steps * (self._mode.times.step_s(each.work) - each.step_s)
            before = each.merged
        return found

    def merged_shares(self) -> dict[str, float]:
        """Return the share of merged steps by phase: requests start in the order of the phases, as many in each."""
        steps, merged = Counter[str](), Counter[str]()
        for each in self._ran:
            phase = PHASES[min(len(PHASES) - 1, int(len(PHASES) * (each.started - 1) / max(1, self._started)))]
            steps[phase] += each.steps
            merged[phase] += each.steps * (each.merged is not None)
        return {phase: merged[phase] / steps[phase] for phase in PHASES if steps[phase]}


def _ratio(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], phase: str) -> Ratio:
    """Return the ratio of mean latencies; every answer has as many tokens."""

    def latencies(runs: list[dict[str, Any]]) -> list[list[float]]:
        return [each["phases"][phase]["latencies_s"] for each in runs]

    return ratio_over_requests(latencies(ours), latencies(theirs), mean_of)


def _waits(made: Mapping[str, Sequence[Mapping[str, Any]]], row: str, phase: str) -> float:
    """Return a row's P99 TTFT in a phase, as a multiple of never merging's."""
    ours_s, theirs_s = (fmean(each["phases"][phase]["ttft_p99_s"] for each in made[name]) for name in (row, UNMERGED))
    return ours_s / theirs_s


def _p99_s(run: dict[str, Any]) -> float:
    return max(run["phases"][phase]["ttft_p99_s"] for phase in PHASES)


def _ttft_mean_s(run: dict[str, Any]) -> float:
    return fmean(time_s for phase in PHASES for time_s in run["phases"][phase]["ttft_s"])


def _merged_shares(runs: list[dict[str, Any]]) -> dict[str, str]:
    return {phase: f"{fmean(each['merged'].get(phase, 0.0) for each in runs):.0%}" for phase in PHASES}


def _means(runs: list[dict[str, Any]]) -> str:
    return ", ".join(
        f"{phase} {fmean(each['phases'][phase]['latency_per_token_s'] for each in runs) * 1e3:.1f}" for phase in PHASES
    )


def _small(phase: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in phase.items() if not isinstance(value, list)}


def _words(ratio: Ratio) -> str:
    return f"{ratio.value:.3f} ({interval_words((ratio.low, ratio.high))})"
