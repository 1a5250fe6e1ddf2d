"""Searches by simulation for the cheapest replicas that meet an SLO."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from math import ceil
from typing import NamedTuple

import msgspec

from lorikeet.bench.peak import min_probe_s
from lorikeet.simulator.scenario import Scenario, ScenarioError
from lorikeet.simulator.trials import Trial, TrialPool, TrialResult

_LEAST_S = 120.0
"""Seconds of a simulation, unless the scenario sets its length."""
_SHORT_SHARE = 0.25
_SHORT_REQUESTS = 300
_FINALISTS = 8
"""Number of candidates of one price that are simulated whole."""
_ROUNDING = 1e-6
LOADS = (1.1, 1.25, 1.5, 2.0)
"""Multiples of the load at which the choice is simulated."""
FIRST_UNSEEN_SEED = 1000


class PricedProfile(NamedTuple):
    """Describes the hardware of a replica.

    Attributes:
        profile: name or file of the cost profile.
        ranks: number of devices of a replica.
        price: price of a device per hour.
    """

    profile: str
    ranks: int
    price: float


class Candidate(NamedTuple):
    """Describes one way to serve the load.

    Attributes:
        hardware: hardware of each replica.
        preset: name of the preset.
        host_memory_bytes: memory of each replica's host for adapters and KV.
        replicas: number of replicas.
    """

    hardware: PricedProfile
    preset: str
    host_memory_bytes: int
    replicas: int

    @property
    def cost(self) -> float:
        """Price per hour."""
        return self.replicas * self.hardware.ranks * self.hardware.price

    def scenario(self, of: Scenario, seed: int) -> Scenario:
        """Return the scenario with this hardware and preset."""
        return msgspec.structs.replace(
            of,
            profile=self.hardware.profile,
            preset=self.preset,
            replicas=self.replicas,
            engine={**of.engine, "host_memory_bytes": self.host_memory_bytes},
            seed=seed,
        )


@dataclass
class Judged:
    """Holds the trials of a candidate.

    Attributes:
        candidate: the candidate.
        short: trial of the beginning of the workload with the first seed; None before the trial.
        full: trials of the whole workload, by seed.
        is_done: whether no further trial will be simulated.
    """

    candidate: Candidate
    short: TrialResult | None = None
    full: list[TrialResult] = field(default_factory=list)
    is_done: bool = False

    @property
    def results(self) -> list[TrialResult]:
        """Whole simulations, or the short simulation if there is no whole one."""
        return self.full or ([] if self.short is None else [self.short])

    @property
    def attainment(self) -> float:
        """Smallest share of requests that met the SLO, over all simulations."""
        return min((each.attainment or 0.0 for each in self.results), default=0.0)

    def meets(self, target: float, seeds: int) -> bool:
        """Return whether all simulations met the target."""
        return len(self.full) == seeds and all(each.meets(target) for each in self.full)


class LoadStep(NamedTuple):
    """Holds the results of the choice at a multiple of the load."""

    factor: float
    result: TrialResult


class Plan(NamedTuple):
    """Holds the result of a search.

    Attributes:
        choice: the cheapest candidate that meets the SLO; None if no candidate does.
        judged: all candidates that were simulated, by cost.
        loads: results of the choice at higher loads, up to the first load that misses the SLO; empty if the load cannot
            be multiplied.
        unseen: results of the choice with seeds that the search did not use.
        target: share of requests that must meet the SLO.
        seeds: seed of each whole simulation.
    """

    choice: Judged | None
    judged: list[Judged]
    loads: list[LoadStep]
    unseen: list[TrialResult]
    target: float
    seeds: int

    @property
    def margin(self) -> float:
        """Highest tested multiple of the load at which the SLO was met."""
        met = [step.factor for step in self.loads if step.result.meets(self.target)]
        return max(met, default=1.0)

    @property
    def breaks(self) -> LoadStep | None:
        """Lowest tested load, as a multiple of the scenario's load, at which the SLO was missed."""
        return next((step for step in self.loads if not step.result.meets(self.target)), None)


def long_enough(scenario: Scenario) -> Scenario:
    """Return a scenario with enough requests to show whether its load can be sustained.

    Raises:
        ScenarioError: the scenario has no SLO.
    """
    limits = scenario.limits()
    if limits == type(limits)():
        raise ScenarioError("slo: a plan needs limits, such as ttft=0.5,tpot=0.1")
    if scenario.trace or scenario.count is not None or scenario.duration_s is not None:
        return scenario
    rate = _single_rate(scenario)
    if rate is None:
        raise ScenarioError("rate: give count or duration_s with a rate that changes")
    return msgspec.structs.replace(scenario, count=max(1, ceil(rate * max(_LEAST_S, min_probe_s(limits)))))


def _single_rate(scenario: Scenario) -> float | None:
    """Return the scenario's single rate, which can be multiplied; None if it has none."""
    if scenario.trace or scenario.arrivals == "now":
        return float(scenario.rate) if scenario.trace and scenario.rate and ":" not in scenario.rate else None
    try:
        return float(scenario.rate or 1)
    except ValueError:
        return None


def _short(scenario: Scenario) -> Scenario:
    """Return the beginning of a scenario, for a short trial."""
    if scenario.count is None:
        return scenario
    return msgspec.structs.replace(
        scenario, count=min(scenario.count, max(_SHORT_REQUESTS, round(_SHORT_SHARE * scenario.count)))
    )


class Planner:
    """Finds the cheapest candidate that meets the SLO with every seed, with few and short simulations.

    Candidates of one price are compared together, first by the beginning of their simulations. The best candidates are
    simulated whole with one seed, and the best of these with every seed. Only if that candidate misses the SLO, the
    next is simulated with every seed. Free workers begin simulations of more expensive candidates. Every simulation
    ends as soon as its misses exceed what the target allows.

    Args:
        scenario: the load. Candidates replace its profile, preset, replicas and seed.
        candidates: candidates to choose from.
        target: share of requests that must meet the SLO.
        seeds: number of simulations of each candidate.
        pool: pool that runs the simulations.
    """

    def __init__(
        self, scenario: Scenario, candidates: Sequence[Candidate], target: float, seeds: int, pool: TrialPool
    ) -> None:
        self._scenario = long_enough(scenario)
        self._target = target
        self._seeds = seeds
        self._pool = pool
        self._most_missed = self._misses_allowed(self._scenario, None)
        self._judged = [Judged(each) for each in sorted(candidates, key=_by_cost)]
        self._waiting: dict[int, list[Future[TrialResult]]] = {}

    def plan(self, unseen: int) -> Plan:
        """Return the plan. The choice is also simulated with ``unseen`` further seeds, and with more load."""
        choice = self._search(self._seeds + unseen + len(LOADS))
        loads = list[LoadStep]()
        checks = list[TrialResult]()
        if choice is not None:
            raised = self._with_more_load(choice.candidate.scenario(self._scenario, 0))
            seeds = range(FIRST_UNSEEN_SEED, FIRST_UNSEEN_SEED + unseen)
            checks = self._pool.all([self._trial(choice.candidate.scenario(self._scenario, seed)) for seed in seeds])
            for factor, future in raised:
                loads.append(LoadStep(factor, self._pool.result(future)))
                if not loads[-1].result.meets(self._target):
                    break
        judged = [each for each in self._judged if each.results]
        return Plan(choice, judged, loads, checks, self._target, self._seeds)

    def _misses_allowed(self, scenario: Scenario, rate: float | None) -> int:
        """Return the number of requests of a simulation that may miss the SLO."""
        return int((1 - self._target) * len(scenario.recipe(rate).requests()) + _ROUNDING)

    def _trial(self, scenario: Scenario) -> Trial:
        return Trial(scenario, most_missed=self._most_missed)

    def _with_more_load(self, scenario: Scenario) -> list[tuple[float, Future[TrialResult]]]:
        """Run simulations with increasing load until one misses the SLO.

        Return the simulations with their multiples.
        """
        rate = _single_rate(self._scenario)
        begun = list[tuple[float, Future[TrialResult]]]()
        for factor in LOADS if rate is not None else ():
            self._pool.wait_for_worker()
            if any(each.done() and not each.result().meets(self._target) for _, each in begun):
                break
            longer = _as_long(scenario, factor)
            more = (rate or 0.0) * factor
            begun.append((factor, self._pool.submit(Trial(longer, more, self._misses_allowed(longer, more)))))
        return begun

    def _search(self, later: int) -> Judged | None:
        """Return the choice. ``later`` is the number of simulations of the choice that will follow."""
        while (found := self._choice()) is None:
            wanted = self._wanted()
            if not wanted and not self._waiting:
                return None
            for number in wanted:
                if self._pool.is_full:
                    break
                self._begin(number)
            self._pool.expected = self._pool.done + len(wanted) + later
            self._pool.wait()
            self._collect()
        return found

    def _prices(self) -> Iterator[list[int]]:
        """Yield the candidates of each price, the least price first."""
        for _, numbers in groupby(range(len(self._judged)), key=lambda number: self._judged[number].candidate.cost):
            yield list(numbers)

    def _choice(self) -> Judged | None:
        """Return the best candidate of the lowest price at which candidates meet the SLO.

        Return None while a better one may be found.
        """
        for numbers in self._prices():
            met = [number for number in numbers if self._judged[number].meets(self._target, self._seeds)]
            if met:
                is_compared = all(self._judged[number].full for number in self._finalists(numbers))
                return self._judged[min(met, key=self._rank)] if is_compared else None
        return None

    def _finalists(self, numbers: list[int]) -> list[int]:
        """Return the open candidates of one price that did best in the short simulations."""
        seen = [number for number in numbers if not self._judged[number].is_done and self._judged[number].short]
        return sorted(seen, key=lambda number: self._closeness(number, self._judged[number].short))[:_FINALISTS]

    def _wanted(self) -> list[int]:
        """Return the candidates whose simulations should begin, the cheapest first.

        For the next price, only the short simulations are wanted. Candidates that are being simulated are left out.
        """
        wanted = list[int]()
        is_cheapest = True
        for numbers in self._prices():
            open_ones = [number for number in numbers if not self._judged[number].is_done]
            not_seen = [number for number in open_ones if self._judged[number].short is None]
            if is_cheapest and open_ones and not not_seen:
                finalists = self._finalists(numbers)
                not_whole = [number for number in finalists if not self._judged[number].full]
                wanted += not_whole or [min(finalists, key=self._rank)]
            wanted += not_seen
            if open_ones and not is_cheapest:
                break
            is_cheapest = is_cheapest and not open_ones
        return [number for number in wanted if number not in self._waiting]

    def _rank(self, number: int) -> tuple[float, float, int]:
        """Return a sort key for candidates that were simulated whole with one seed, the best first."""
        return self._closeness(number, self._judged[number].full[0])

    def _closeness(self, number: int, result: TrialResult | None) -> tuple[float, float, int]:
        """Return a sort key: misses beyond the target, the P99 that is nearest to its limit, and host memory."""
        assert result is not None
        limits = self._scenario.limits()
        pairs = (
            (result.ttft_p99_s, limits.ttft_s),
            (result.tpot_p99_s, limits.tpot_s),
            (result.e2e_p99_s, limits.e2e_s),
        )
        nearest = max((p99_s / limit_s for p99_s, limit_s in pairs if limit_s), default=0.0)
        return -min(result.attainment or 0.0, self._target), nearest, self._judged[number].candidate.host_memory_bytes

    def _begin(self, number: int) -> None:
        judged = self._judged[number]
        if judged.short is None:
            trials = [self._trial(_short(judged.candidate.scenario(self._scenario, 0)))]
        else:
            seeds = range(len(judged.full), self._seeds if judged.full else 1)
            trials = [self._trial(judged.candidate.scenario(self._scenario, seed)) for seed in seeds]
        self._waiting[number] = [self._pool.submit(trial) for trial in trials]

    def _collect(self) -> None:
        for number, futures in [*self._waiting.items()]:
            if not all(future.done() for future in futures):
                continue
            del self._waiting[number]
            judged = self._judged[number]
            results = [future.result() for future in futures]
            if judged.short is None:
                (judged.short,) = results
                judged.is_done = bool(judged.short.error or judged.short.stopped_after)
                if judged.is_done or _short(self._scenario) != self._scenario:
                    continue
            judged.full += results
            missed = not all(each.meets(self._target) for each in judged.full)
            judged.is_done = missed or len(judged.full) >= self._seeds


def _by_cost(candidate: Candidate) -> tuple[float, int]:
    return candidate.cost, candidate.host_memory_bytes


def _as_long(scenario: Scenario, factor: float) -> Scenario:
    """Return a scenario of equal duration at a multiple of its rate."""
    if scenario.count is None or scenario.trace:
        return scenario
    return msgspec.structs.replace(scenario, count=ceil(scenario.count * factor))
