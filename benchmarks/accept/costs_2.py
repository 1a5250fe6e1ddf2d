"""costs.2: the engine on a virtual clock, by a profile measured here, beside the engine itself."""

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.accept.disturbance import ATTEMPTS, MOST_STOLEN, undisturbed
from benchmarks.accept.lines import Result, line
from benchmarks.accept.machine_profile import machine_profile
from benchmarks.accept.models import default_model
from benchmarks.accept.runs import StoredRuns
from benchmarks.accept.traces import MOONCAKE_CONVERSATION, unpacked
from lorikeet.adapters.store import reference
from lorikeet.bench.adapters import spread_ranks, write_random_adapter
from lorikeet.bench.choices import Range
from lorikeet.bench.in_process import Run, run_workload
from lorikeet.bench.peak import find_peak
from lorikeet.bench.prompts import DEFAULT_IDS, Prompts
from lorikeet.bench.rates import Rates
from lorikeet.bench.recipe import Recipe
from lorikeet.bench.workload import WorkloadRequest, read_any
from lorikeet.config import EngineSettings, ModelSettings, Settings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.clock import MonotonicClock
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.slo import Slo
from lorikeet.costs.profile import CostProfile
from lorikeet.engine.build import build_replica
from lorikeet.models.config import read_model_config
from lorikeet.simulator.run import simulate

ADAPTERS, REPEATS, WITHIN, LOAD = 20, 3, 0.10, 0.5
SLO, TARGET = Slo(ttft_s=1.0, tpot_s=0.15), 0.9
MEMORY_BYTES = 2 * 2**30
_TIMES, _KEYS = ("ttft_s", "tpot_s", "e2e_s"), ("mean", "p50", "p95")
BLOCK_TOKENS = 16
"""Of the trace's prefix blocks at 1 / 32 of their length."""


class _Work(NamedTuple):
    """A workload by its rate.

    Attributes:
        name: in words.
        recipe: everything but the rate.
        block_tokens: of its prefix blocks.
    """

    name: str
    recipe: Recipe
    block_tokens: int

    def requests(self, rate: float) -> list[WorkloadRequest]:
        """The same requests at any rate, closer together or further apart."""
        return msgspec.structs.replace(self.recipe, rates=Rates.constant(rate)).requests()

    def prompts(self) -> Prompts:
        """The same in every repeat."""
        return Prompts(0, 0, DEFAULT_IDS, self.block_tokens)


@line(
    "costs.2",
    title="The twin: a simulated engine beside the live one, on workloads that its profile has not seen",
    bound=f"mean, P50 and P95 of TTFT, TPOT and E2E within max({WITHIN:.0%}, the spread of {REPEATS} live repeats), at "
    f"{LOAD:.0%} of peak: 128 + 64 tokens and conversations",
)
def run(runs: StoredRuns) -> Result:
    """Compare them on this machine, with the default model."""
    with tempfile.TemporaryDirectory(prefix="lorikeet-costs2-") as scratch:
        settings = Settings(
            ModelSettings(model=str(default_model()), dtype="bfloat16"),
            EngineSettings(memory_bytes=MEMORY_BYTES, touch_memory=True),
        )
        return twin_result(runs, Bed(settings, partial(machine_profile, runs), Path(scratch)))


class Bed(NamedTuple):
    """Where twins are compared.

    Attributes:
        settings: of the live engine; its model is a local folder.
        profile: returns one of that model there, by the name of the part that keeps it.
        folder: empty, for adapters.
    """

    settings: Settings
    profile: Callable[[str], CostProfile]
    folder: Path


def twin_result(runs: StoredRuns, bed: Bed) -> Result:
    """Find each workload's peak by simulation, run half of it live, and simulate that.

    Machines drift from one quarter of an hour to the next. So the machine is profiled before and after each live
    repeat, and the repeat's twin is the mean of both simulations. What others on the hardware take all at once is no
    part of any cost: what they disturbed is measured again.
    """
    works, rates = _works(), dict[str, float]()
    refs = _adapters(bed.folder, read_model_config(Path(bed.settings.model.model)).geometry(2))
    live: dict[str, list[dict[str, Any]]] = {work.name: [] for work in works}
    twins: dict[str, list[dict[str, Any]]] = {work.name: [] for work in works}
    simulate_by = partial(_simulate, bed.settings, refs)
    before = bed.profile("profile")
    for work in works:
        peak = runs.get(f"peak-{work.name}", partial(_peak, work.name, partial(simulate_by, before, work)))
        rates[work.name] = LOAD * peak["rate"]
    for repeat in range(REPEATS):
        for work in works if repeat % 2 == 0 else reversed(works):
            part = f"live-{work.name}-{repeat}"
            measure = partial(_live, bed.settings, refs, work, rates[work.name])
            live[work.name].append(runs.get(part, partial(undisturbed, measure)))
        after = bed.profile(f"profile-{repeat + 1}")
        for work in works:
            both = [_times(simulate_by(profile, work, rates[work.name])) for profile in (before, after)]
            twins[work.name].append({time: statistics.mean(each[time] for each in both) for time in both[0]})
        before = after
    rows = [row for work in works for row in _compare(work.name, live[work.name], twins[work.name])]
    failures = [f"{row['what']} is off by {row['error']:.0%}" for row in rows if not row["met"]]
    stolen = [each["stolen"] for repeats in live.values() for each in repeats]
    return Result(
        figure={
            "largest_error": max(abs(row["error"]) for row in rows),
            "median_error": statistics.median(abs(row["error"]) for row in rows),
            "met": f"{sum(row['met'] for row in rows)} of {len(rows)}",
            **{row["what"]: row["words"] for row in rows},
        },
        passed=not failures,
        cause="; ".join(failures),
        notes=f"modelled and live in one process each, {ADAPTERS} adapters of ranks 8 to 128, Poisson arrivals, memory "
        "touched before; "
        + ", ".join(
            f"{work.name}: {live[work.name][0]['requests']} requests at {rates[work.name]:.2f}/s" for work in works
        )
        + f"; peaks by simulation, {TARGET:.0%} of requests with TTFT ≤ {SLO.ttft_s:g} s and TPOT ≤ {SLO.tpot_s:g} s; "
        "mean of the twins, each by the profiles before and after its repeat, beside the mean of repeats (both lowest "
        "to highest), ms; a profile or repeat of which others on the hardware "
        f"took more than {MOST_STOLEN:.0%} was measured {ATTEMPTS} times, and the least disturbed counts: of the live "
        f"repeats they took {', '.join(f'{share:.1%}' for share in stolen)}; "
        "conversations of Mooncake's trace (Apache-2.0), lengths divided by 32",
        details={"rows": rows},
    )


def _works() -> list[_Work]:
    with unpacked(MOONCAKE_CONVERSATION) as file:
        trace = tuple(read_any(file))
    names = tuple(f"a{i}" for i in range(ADAPTERS))
    common: dict[str, Any] = {"adapters": names, "adapter_choice": "zipf:1", "seed": 20}
    fixed = Recipe(count=1000, prompt_tokens=Range(128, 128), output_tokens=Range(64, 64), **common)
    chat = Recipe(trace=trace, shape="chat", count=300, length_scale=1 / 32, most_tokens=1000, **common)
    return [_Work("128 + 64", fixed, BLOCK_TOKENS), _Work("conversations", chat, BLOCK_TOKENS)]


def _peak(name: str, simulate_at: Callable[[float], Run]) -> dict[str, Any]:
    peak = find_peak(lambda rate: simulate_at(rate).figures(SLO).slo_attainment or 0.0, TARGET, 2.0, precision=0.05)
    if peak.rate is None:
        raise RuntimeError(f"{name}: no rate meets the limits")
    return {"rate": peak.rate}


def _simulate(live: Settings, refs: Mapping[str, AdapterRef], profile: CostProfile, work: _Work, rate: float) -> Run:
    settings = Settings(ModelSettings(), EngineSettings(memory_bytes=live.engine.memory_bytes))
    return simulate(settings, profile, work.requests(rate), refs, work.prompts()).run


def _live(settings: Settings, refs: Mapping[str, AdapterRef], work: _Work, rate: float) -> dict[str, Any]:
    requests = work.requests(rate)
    with closing(build_replica(settings).engine) as engine:
        warm = [WorkloadRequest(0.0, None, 256, 32)] * 16
        run_workload(engine, MonotonicClock(), warm, {}, Prompts(1, 0, DEFAULT_IDS, work.block_tokens))
        return _times(run_workload(engine, MonotonicClock(), requests, refs, work.prompts()))


def _adapters(folder: Path, geometry: ModelGeometry) -> dict[str, AdapterRef]:
    ranks = spread_ranks(ADAPTERS)
    folders = [write_random_adapter(folder / f"a{i}", geometry, rank, seed=i) for i, rank in enumerate(ranks)]
    return {each.name: reference(each.name, each, geometry) for each in folders}


def _times(run: Run) -> dict[str, Any]:
    figures = run.figures(Slo())
    if figures.completed != len(run.exchanges):
        raise RuntimeError(f"{figures.completed} of {len(run.exchanges)} requests were answered: {figures.errors}")
    found: dict[str, Any] = {"requests": figures.requests}
    for name in _TIMES:
        values = getattr(figures, name)
        found |= {f"{name} {key}": getattr(values, key) for key in _KEYS}
    return found


def _words(values_s: Sequence[float]) -> str:
    low, middle, high = (each * 1e3 for each in (min(values_s), statistics.mean(values_s), max(values_s)))
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def _compare(name: str, live: Sequence[Mapping[str, Any]], twins: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for time in _TIMES:
        for key in _KEYS:
            measured = [each[f"{time} {key}"] for each in live]
            simulated = [each[f"{time} {key}"] for each in twins]
            modelled = statistics.mean(simulated)
            middle, spread = statistics.mean(measured), max(measured) - min(measured)
            rows.append(
                {
                    "what": f"{name} {time.removesuffix('_s').upper()} {key}",
                    "error": modelled / middle - 1,
                    "met": abs(modelled - middle) <= max(WITHIN * middle, spread),
                    "words": f"{_words(simulated)} beside {_words(measured)}",
                }
            )
    return rows
