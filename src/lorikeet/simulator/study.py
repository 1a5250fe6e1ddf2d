"""A scenario simulated: once, or at rate after rate until its peak is found."""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from lorikeet.bench.load_report import LoadFigures
from lorikeet.bench.peak import Peak, find_peak
from lorikeet.bench.predictors import make_predictor
from lorikeet.bench.prompts import DEFAULT_IDS, Prompts
from lorikeet.core.messages import EngineStats
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.profile import CostProfile
from lorikeet.simulator.run import Simulated, simulate
from lorikeet.simulator.scenario import Scenario, ScenarioError

Show = Callable[[str, int, int], None]


class Outcome(NamedTuple):
    """What a simulation found.

    Attributes:
        scenario: what was simulated.
        profile: by which.
        rate: that took the place of the scenario's own, None if none did.
        simulated: run, gauges and notes.
        figures: of the run.
    """

    scenario: Scenario
    profile: CostProfile
    rate: float | None
    simulated: Simulated
    figures: LoadFigures

    def report(self) -> dict[str, Any]:
        """Return everything but the single requests as plain values, the same for the same scenario."""
        stats = self.simulated.stats
        return {
            "scenario": msgspec.structs.asdict(self.scenario),
            "profile": {"name": self.profile.name, "origin": self.profile.origin, "made": self.profile.made},
            "executor": "modelled",
            "rate": self.rate,
            "notes": self.simulated.notes,
            "figures": msgspec.to_builtins(self.figures),
            "engine": counters(stats),
        }


def counters(stats: EngineStats) -> dict[str, int]:
    """Return what an engine counted in a run."""
    return {
        "steps": stats.steps,
        "preemptions": stats.preemptions,
        "total_blocks": stats.total_blocks,
        "prefix_queries_tokens": stats.prefix_queries_tokens,
        "prefix_hits_tokens": stats.prefix_hits_tokens,
    }


def run_scenario(scenario: Scenario, show: Show, rate: float | None = None, stage: str = "requests") -> Outcome:
    """Simulate a scenario.

    Args:
        scenario: what.
        show: called with (stage, requests that have ended, requests).
        rate: requests per second instead of the scenario's.
        stage: name for ``show``.

    Raises:
        ValueError: a part of the scenario has no meaning or does not fit another (``ScenarioError``, ``ChoiceError``,
            ``WorkloadError``, ``ConfigError``, ``ProfileError`` and ``UnknownAdapter``; each says which).
    """
    profile = load_profile(scenario.profile)
    workload = scenario.recipe(rate).requests()
    if not workload:
        raise ScenarioError("the workload holds no request")
    simulated = simulate(
        scenario.settings(),
        profile,
        workload,
        scenario.adapter_refs(profile.geometry),
        Prompts(scenario.seed, 0, DEFAULT_IDS, scenario.prefix_block_tokens()),
        predict=make_predictor(scenario.predictor, workload, scenario.seed),
        on_finished=lambda done: show(stage, done, len(workload)),
    )
    return Outcome(scenario, profile, rate, simulated, simulated.run.figures(scenario.limits()))


def find_peak_rate(
    scenario: Scenario, show: Show, target: float, start: float, precision: float = 0.05
) -> tuple[Peak, list[Outcome]]:
    """Search the highest request rate at which the share ``target`` of the requests meets the SLO.

    Every probe has the same requests, only closer together or further apart.

    Raises:
        ValueError: see :func:`run_scenario`; or there is no SLO.
    """
    outcomes: list[Outcome] = []

    def probe(rate: float) -> float:
        outcomes.append(run_scenario(scenario, show, rate, f"probe at {rate:.3g}/s"))
        attained = outcomes[-1].figures.slo_attainment
        if attained is None:
            raise ScenarioError("slo: a peak needs limits, such as ttft=0.5,tpot=0.1")
        return attained

    return find_peak(probe, target, start, precision=precision), outcomes
