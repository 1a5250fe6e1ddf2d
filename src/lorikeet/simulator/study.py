"""Simulates a scenario once, or at different rates until its peak is found."""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from lorikeet.bench.in_process import MissBudget
from lorikeet.bench.load_report import LoadFigures
from lorikeet.bench.peak import LEAST_PROBE_REQUESTS, Peak, find_peak, probe_requests
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.messages import EngineStats
from lorikeet.core.process_tuning import return_freed_memory
from lorikeet.core.text import install_command
from lorikeet.costs.assist_costs import assisted_modules
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.profile import CostProfile
from lorikeet.presets import ColdStart, resolve_preset
from lorikeet.simulator.cells import cut_into_cells, simulate_cells
from lorikeet.simulator.run import Simulated, simulate
from lorikeet.simulator.scenario import Scenario, ScenarioError
from lorikeet.workloads.predictors import make_predictor
from lorikeet.workloads.prompts import DEFAULT_IDS, Prompts
from lorikeet.workloads.recipe import DEFAULT_COUNT
from lorikeet.workloads.workload import WorkloadRequest, block_tokens_of

Show = Callable[[str, int, int], None]


class ScenarioResult(NamedTuple):
    """Holds the result of a simulation.

    Attributes:
        scenario: the scenario that was simulated.
        profile: cost profile.
        rate: rate that replaced the scenario's rate; None for no replacement.
        simulated: run, gauges and notes.
        figures: figures of the run.
    """

    scenario: Scenario
    profile: CostProfile
    rate: float | None
    simulated: Simulated
    figures: LoadFigures

    def report(self) -> dict[str, Any]:
        """Return all results except single requests as plain values. Equal scenarios give equal reports."""
        simulated = self.simulated
        report = {
            "scenario": msgspec.structs.asdict(self.scenario),
            "profile": {"name": self.profile.name, "origin": self.profile.origin, "made": self.profile.made},
            "executor": "modelled",
            "rate": self.rate,
            "notes": simulated.notes,
            "figures": msgspec.to_builtins(self.figures),
            "engine": counters(simulated.stats),
        }
        if simulated.cluster is not None:
            report["cluster"] = msgspec.to_builtins(simulated.cluster)
        return report


def counters(stats: Sequence[EngineStats]) -> dict[str, int]:
    """Return the sums of the counters of all engines."""
    return {
        "steps": sum(each.steps for each in stats),
        "preemptions": sum(each.preemptions for each in stats),
        "total_blocks": sum(each.total_blocks for each in stats),
        "prefix_queries_tokens": sum(each.prefix_queries_tokens for each in stats),
        "prefix_hits_tokens": sum(each.prefix_hits_tokens for each in stats),
    }


def run_scenario(
    scenario: Scenario,
    show: Show,
    rate: float | None = None,
    stage: str = "requests",
    most_missed: int | None = None,
) -> ScenarioResult:
    """Simulate a scenario.

    Args:
        scenario: scenario to simulate.
        show: called with (stage, requests that have ended, requests).
        rate: requests per second instead of the scenario's.
        stage: name for ``show``.
        most_missed: number of misses of the SLO above which the simulation is stopped soon; None for a whole
            simulation.

    Raises:
        ValueError: a part of the scenario is invalid or does not fit another (``ScenarioError``, ``OptionError``,
            ``WorkloadError``, ``ConfigError``, ``ProfileError``, ``OperatingPointError`` and
            ``WorkloadAdapterUnknown``;
            each message names the part).
    """
    profile = load_profile(scenario.profile)
    if scenario.cells > 1:
        simulated = simulate_cells(partial(_run_cell, scenario, rate, most_missed), scenario.cells, show)
    else:
        workload = _workload(scenario, rate)
        adapters = scenario.adapter_refs(profile.geometry, workload)
        run = simulate if scenario.replicas == 1 else _cluster(scenario, show)
        simulated = _run(scenario, run, workload, adapters, partial(show, stage), most_missed)
    return ScenarioResult(scenario, profile, rate, simulated, simulated.run.figures(scenario.limits()))


def _workload(scenario: Scenario, rate: float | None) -> list[WorkloadRequest]:
    workload = scenario.recipe(rate).requests()
    if not workload:
        raise ScenarioError("the workload holds no request")
    return workload


def _run_cell(scenario: Scenario, rate: float | None, most_missed: int | None, cell: int) -> Simulated:
    """Run one cell of a scenario in a separate process."""
    workload = _workload(scenario, rate)
    adapters = scenario.adapter_refs(load_profile(scenario.profile).geometry, workload)
    cells = cut_into_cells(workload, list(adapters), scenario.cells)
    workload = [workload[index] for index in cells.requests[cell]]
    adapters = {name: adapters[name] for name in cells.adapters[cell]}
    part = msgspec.structs.replace(scenario, replicas=scenario.replicas // scenario.cells, cells=1)
    run = _cluster(part, lambda stage, done, total: None)
    simulated = _run(part, run, workload, adapters, lambda done, total: None, most_missed)
    gc.collect()  # The engines are freed before their figures are sent.
    return_freed_memory()
    return simulated


def _run(
    scenario: Scenario,
    run: Callable[..., Simulated],
    workload: Sequence[WorkloadRequest],
    adapters: Mapping[str, AdapterRef],
    show: Callable[[int, int], None],
    most_missed: int | None,
) -> Simulated:
    """Run a workload by ``run``, which has the arguments of ``simulate``.

    ``show`` is called with (ended requests, requests).
    """
    profile = load_profile(scenario.profile)
    block_size = block_tokens_of(workload)
    simulated = run(
        scenario.settings(),
        profile,
        workload,
        adapters,
        Prompts(scenario.seed, 0, DEFAULT_IDS, block_size),
        predictor=make_predictor(scenario.predictor, workload, scenario.seed),
        on_finished=lambda done: show(done, len(workload)),
        budget=None if most_missed is None else MissBudget(scenario.limits(), most_missed),
    )
    notes = _notes(scenario, workload, block_size, profile.tensor_parallel)
    return simulated._replace(notes=(*simulated.notes, *notes))


def _notes(scenario: Scenario, workload: Sequence[WorkloadRequest], block_size: int, ranks: int) -> list[str]:
    """Return the assumptions of a run as sentences."""
    notes = []
    if any(request.prefix_blocks for request in workload):
        notes.append(f"prefix blocks of {block_size} tokens")
    _, preset = resolve_preset(scenario.preset)
    others = [name for name in scenario.module_names() if name not in assisted_modules(ranks)]
    if scenario.adapters and others and preset.cold_start in (ColdStart.ASSIST, ColdStart.AUTO):
        notes.append(f"adapters also target {', '.join(others)}: requests wait for their adapter and are not assisted")
    return notes


def _cluster(scenario: Scenario, show: Show) -> Callable[..., Simulated]:
    """Return a function that runs the scenario's cluster, with the arguments of ``simulate``.

    Raises:
        ScenarioError: a package that clusters need is not installed.
    """
    try:
        from lorikeet.simulator.cluster import ClusterChoice, simulate_cluster
    except ModuleNotFoundError as error:
        raise ScenarioError(f"several replicas need {error.name}: run `{install_command('cluster')}`") from error
    choice = ClusterChoice(scenario.replicas, scenario.seed, scenario.limits(), scenario.fetch, scenario.provisioned)
    return partial(simulate_cluster, choice=choice, show=show)


def find_peak_rate(
    scenario: Scenario, show: Show, target: float, start: float, precision: float = 0.05
) -> tuple[Peak, list[ScenarioResult]]:
    """Search for the highest request rate at which the share ``target`` of the requests meets the SLO.

    Every probe begins with the same requests, closer together or further apart. If requests are generated and no
    duration is given, probes of a high rate have more requests, so that a growing queue becomes visible.

    Raises:
        ValueError: see :func:`run_scenario`; or the scenario has no SLO, or no single rate.
    """
    if scenario.arrivals == "now" or ":" in scenario.rate:
        raise ScenarioError("a peak is a single rate: choose arrivals with a rate, and a rate without points")
    if not (math.isfinite(start) and start > 0):
        raise ScenarioError(f"rate {start:g}: a search must begin at a positive rate")
    outcomes: list[ScenarioResult] = []

    def probe(rate: float) -> float:
        outcomes.append(run_scenario(_long_enough(scenario, rate), show, rate, f"probe at {rate:.3g}/s"))
        attained = outcomes[-1].figures.slo_attainment
        if attained is None:
            raise ScenarioError("slo: a peak needs limits, such as ttft=0.5,tpot=0.1")
        return attained

    lowest = LEAST_PROBE_REQUESTS / scenario.duration_s if scenario.duration_s is not None else 0.0
    if start < lowest:
        raise ScenarioError(
            f"duration_s {scenario.duration_s:g}: at {start:g} requests/s fewer than {LEAST_PROBE_REQUESTS} arrive, "
            "too few to judge: begin at a higher rate, or set a longer duration"
        )
    return find_peak(probe, target, start, lowest=lowest, precision=precision), outcomes


def _long_enough(scenario: Scenario, rate: float) -> Scenario:
    if scenario.trace or scenario.duration_s is not None:
        return scenario
    requests = probe_requests(rate, scenario.limits(), scenario.count or DEFAULT_COUNT)
    return msgspec.structs.replace(scenario, count=requests)
