"""The planner finds the cheapest candidate that meets the SLO, and simulates little else."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lorikeet.cli.app import app
from lorikeet.simulator.planner import FIRST_UNSEEN_SEED, Candidate, Plan, Planner, PricedProfile
from lorikeet.simulator.scenario import Scenario, ScenarioError
from lorikeet.simulator.trials import Trial, TrialPool, TrialResult, run_trial

SMALL, LARGE = PricedProfile("small", 1, 1.0), PricedProfile("large", 2, 2.0)
LOAD = Scenario(profile="any", rate="10", slo="ttft=1")


class Model:
    """Attainment by a rule; remembers what it was asked.

    Args:
        capacity: requests per second of a replica, by profile and preset.
        bad_seed: with which one request in fifty is late under the preset ``auto``.
    """

    def __init__(self, capacity: dict[tuple[str, str], float], bad_seed: int = -1) -> None:
        self.capacity, self.bad_seed = capacity, bad_seed
        self.ttft_p99_s: dict[str, float] = {}
        self.asked: list[Trial] = []

    def __call__(self, trial: Trial) -> TrialResult:
        self.asked.append(trial)
        scenario, rate = trial.scenario, trial.rate or float(trial.scenario.rate)
        share = min(1.0, scenario.replicas * self.capacity[scenario.profile, scenario.preset] / rate)
        if (scenario.seed, scenario.preset) == (self.bad_seed, "auto"):
            share -= 0.02
        assert scenario.count is not None
        assert trial.most_missed is not None
        stopped = round((1 - share) * scenario.count) > trial.most_missed
        ttft_s = self.ttft_p99_s.get(scenario.preset, 0.1)
        return TrialResult(scenario.seed, share, 100 if stopped else 0, {"TTFT": 1 - share}, ttft_p99_s=ttft_s)


def plan(model: Model, *presets: str, most: int = 6, workers: int = 1, load: Scenario = LOAD, **given: Any) -> Plan:
    candidates = [
        Candidate(hardware, preset, 0, replicas)
        for hardware in (SMALL, LARGE)
        for preset in presets or ("auto",)
        for replicas in range(1, most + 1)
    ]
    with ThreadPoolExecutor(workers) as executor:
        pool = TrialPool(executor, workers, run=model)
        return Planner(load, candidates, given.get("target", 0.99), given.get("seeds", 3), pool).plan(
            given.get("unseen", 2)
        )


CAPACITY = {("small", "auto"): 2.1, ("large", "auto"): 11.0}


@pytest.mark.parametrize("workers", [1, 4])
def test_the_cheapest_that_meets_the_slo_is_chosen(workers: int) -> None:
    model = Model(CAPACITY)
    found = plan(model, workers=workers)
    assert found.choice is not None
    assert found.choice.candidate == Candidate(LARGE, "auto", 0, 1), "4 an hour; 5 small ones cost 5"
    full = {trial.scenario.seed for trial in model.asked if trial.scenario.profile == "large" and trial.rate is None}
    assert full == {0, 1, 2, FIRST_UNSEEN_SEED, FIRST_UNSEEN_SEED + 1}
    dear = [each.candidate.cost for each in found.judged if each.candidate.cost > 4]
    assert len(dear) <= workers - 1, "no more than what was begun at the same time"


def test_of_equally_dear_ones_the_best_is_chosen() -> None:
    found = plan(Model({**CAPACITY, ("small", "elora"): 5.0, ("large", "elora"): 1.0}), "auto", "elora")
    assert found.choice is not None
    assert found.choice.candidate == Candidate(SMALL, "elora", 0, 2)


def test_a_candidate_must_meet_the_slo_with_every_seed() -> None:
    found = plan(Model(CAPACITY, bad_seed=2))
    assert found.choice is None
    assert max(each.attainment for each in found.judged) == pytest.approx(0.98)


def test_more_load_shows_the_margin_and_the_first_broken_limit() -> None:
    found = plan(Model({**CAPACITY, ("large", "auto"): 13.0}))
    assert (found.margin, [step.factor for step in found.loads]) == (1.25, [1.1, 1.25, 1.5])
    assert found.breaks is not None
    assert found.breaks.result.missed["TTFT"] == pytest.approx(1 - 13 / 15)


def test_of_equally_dear_ones_only_the_best_is_simulated_with_every_seed() -> None:
    model = Model({**CAPACITY, ("small", "elora"): 2.6, ("large", "elora"): 10.0})
    found = plan(model, "auto", "elora")
    assert found.choice is not None
    assert found.choice.candidate == Candidate(SMALL, "elora", 0, 4)
    whole = [(each.candidate.hardware.profile, each.candidate.preset, len(each.full)) for each in found.judged]
    assert [each for each in whole if each[2]] == [("small", "elora", 3), ("large", "auto", 1), ("large", "elora", 1)]


@pytest.mark.parametrize("nearer", ["auto", "elora"])
def test_candidate_farthest_from_the_limit_wins_among_equals(nearer: str) -> None:
    model = Model({("small", "auto"): 5.0, ("small", "elora"): 5.0, ("large", "auto"): 1.0, ("large", "elora"): 1.0})
    model.ttft_p99_s = {nearer: 0.9}
    found = plan(model, "auto", "elora", seeds=1)
    assert found.choice is not None
    assert found.choice.candidate.preset != nearer


def test_when_the_best_misses_with_another_seed_the_next_is_tried() -> None:
    found = plan(Model({**CAPACITY, ("small", "elora"): 1.0, ("large", "elora"): 11.0}, bad_seed=2), "auto", "elora")
    assert found.choice is not None
    assert found.choice.candidate == Candidate(LARGE, "elora", 0, 1)
    assert [len(each.full) for each in found.judged if each.candidate.hardware == LARGE] == [3, 3]


def test_misses_are_seen_in_a_short_simulation() -> None:
    model = Model(CAPACITY)
    plan(model)
    tried = [trial.scenario for trial in model.asked if trial.scenario.profile == "small"]
    assert {scenario.count for scenario in tried} == {300}
    most = max(trial.scenario.count or 0 for trial in model.asked)
    assert most == 1.25 * 1200, "that was too much, and more was not tried"


def test_unplannable_scenario_is_refused() -> None:
    with pytest.raises(ScenarioError, match="slo"):
        plan(Model(CAPACITY), load=Scenario(profile="any", rate="10"))
    with pytest.raises(ScenarioError, match="rate"):
        plan(Model(CAPACITY), load=Scenario(profile="any", rate="0:1,10:2", slo="ttft=1"))


def test_invalid_trial_is_an_error_in_its_result() -> None:
    result = run_trial(Trial(Scenario(profile="nothing", slo="ttft=1")))
    assert (result.attainment, "nothing" in result.error) == (None, True)


@pytest.mark.slow
def test_the_command_prints_a_choice_with_its_margin(tmp_path: Path) -> None:
    report, plot = tmp_path / "plan.json", tmp_path / "plan.svg"
    arguments = (
        "plan --device a100-80=2 --rate 4 --count 30 --prompt-tokens 64 --output-tokens 8 --slo ttft=2 --seeds 1 "
        f"--unseen 1 --processes 1 --max-replicas 1 --tensor-parallel 1 --json {report} --plot {plot}"
    )
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments.split())
    assert result.exit_code == 0, result.output
    assert "cheapest: 1 × a100-80-llama-2-7b, auto, no host memory, 2 an hour" in result.output
    assert "with 1 unseen seeds: met with 1" in result.output
    assert json.loads(report.read_text())["choice"]["met"] is True
    assert "1 × a100-80-llama-2-7b" in plot.read_text()
    priceless = CliRunner().invoke(app, ["plan", "--device", "a100-80", "--slo", "ttft=2"])
    assert (priceless.exit_code, "NAME=PRICE" in priceless.output) == (2, True)
