"""Searches the cheapest replicas that meet an SLO, by simulation."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

import msgspec

from lorikeet.bench.peak import min_probe_s
from lorikeet.simulator.scenario import Scenario, ScenarioError
from lorikeet.simulator.trials import Trial, TrialPool, TrialResult

_LEAST_S = 120.0
"""Length of a simulation, unless the scenario says otherwise."""
_SHORT_SHARE, _SHORT_REQUESTS = 0.25, 300
_CLEAR_MISS = 0.1
"""A candidate that misses the target by so much in a short simulation is not simulated further."""
LOADS = (1.1, 1.25, 1.5, 2.0)
"""Multiples of the load that the choice is tried with."""
FIRST_UNSEEN_SEED = 1000


class PricedProfile(NamedTuple):
    """Hardware of one replica.

    Attributes:
        profile: name or file of the cost profile.
        ranks: devices of one replica.
        price: of one device for an hour.
    """

    profile: str
    ranks: int
    price: float


class Candidate(NamedTuple):
    """One way to serve the load.

    Attributes:
        hardware: of each replica.
        preset: the system.
        host_memory_bytes: for adapters and KV on the host, of each replica.
        replicas: number of them.
    """

    hardware: PricedProfile
    preset: str
    host_memory_bytes: int
    replicas: int

    @property
    def cost(self) -> float:
        """Price of an hour."""
        return self.replicas * self.hardware.ranks * self.hardware.price

    def scenario(self, of: Scenario, seed: int) -> Scenario:
        """Return the scenario served in this way."""
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
    """What was found of a candidate.

    Attributes:
        candidate: as given.
        short: of a short simulation; None before it.
        full: of whole simulations, by seed.
        is_done: whether nothing more will be simulated.
    """

    candidate: Candidate
    short: TrialResult | None = None
    full: list[TrialResult] = field(default_factory=list)
    is_done: bool = False

    @property
    def results(self) -> list[TrialResult]:
        """The whole simulations, or the short one if there are none."""
        return self.full or ([] if self.short is None else [self.short])

    @property
    def attainment(self) -> float:
        """The least share of requests that met the SLO."""
        return min((each.attainment or 0.0 for each in self.results), default=0.0)

    def meets(self, target: float, seeds: int) -> bool:
        """Return whether all simulations met the target."""
        return len(self.full) == seeds and all(each.meets(target) for each in self.full)


class LoadStep(NamedTuple):
    """The choice at a multiple of the load."""

    factor: float
    result: TrialResult


class Plan(NamedTuple):
    """The result of a search.

    Attributes:
        choice: the cheapest that meets the SLO; None if none does.
        judged: all candidates that were simulated, by cost.
        loads: the choice at higher loads, up to the first that misses; empty if the load cannot be multiplied.
        unseen: the choice with seeds that the search did not use.
        target: share of requests that must meet the SLO.
        seeds: of each whole simulation.
    """

    choice: Judged | None
    judged: list[Judged]
    loads: list[LoadStep]
    unseen: list[TrialResult]
    target: float
    seeds: int

    @property
    def margin(self) -> float:
        """The highest multiple of the load that still met the SLO."""
        met = [step.factor for step in self.loads if step.result.meets(self.target)]
        return max(met, default=1.0)

    @property
    def breaks(self) -> LoadStep | None:
        """The first multiple of the load that missed it."""
        return next((step for step in self.loads if not step.result.meets(self.target)), None)


def long_enough(scenario: Scenario) -> Scenario:
    """Return a scenario with a number of requests that shows whether its load can be sustained.

    Raises:
        ScenarioError: it has no SLO.
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
    """Return the rate that can be multiplied; None if there is none."""
    if scenario.trace or scenario.arrivals == "now":
        return float(scenario.rate) if scenario.trace and scenario.rate and ":" not in scenario.rate else None
    try:
        return float(scenario.rate or 1)
    except ValueError:
        return None


def _short(scenario: Scenario) -> Scenario:
    """Return the beginning of a scenario, for a first look."""
    if scenario.count is None:
        return scenario
    return msgspec.structs.replace(
        scenario, count=min(scenario.count, max(_SHORT_REQUESTS, round(_SHORT_SHARE * scenario.count)))
    )


class Planner:
    """Judges candidates from the cheapest on, until one meets the SLO with every seed.

    A candidate gets a short simulation first; one that misses clearly gets no more. Workers that are free begin with
    the next candidates.

    Args:
        scenario: the load; its profile, preset, replicas and seed are those of the candidates.
        candidates: to choose from.
        target: share of requests that must meet the SLO.
        seeds: simulations of each candidate.
        pool: runs them.
    """

    def __init__(
        self, scenario: Scenario, candidates: Sequence[Candidate], target: float, seeds: int, pool: TrialPool
    ) -> None:
        self._scenario, self._target, self._seeds, self._pool = long_enough(scenario), target, seeds, pool
        self._judged = [
            Judged(each) for each in sorted(candidates, key=lambda each: (each.cost, each.host_memory_bytes))
        ]
        self._waiting: dict[int, list[Future[TrialResult]]] = {}

    def plan(self, unseen: int) -> Plan:
        """Return the plan; the choice is also simulated with ``unseen`` further seeds, and with more load."""
        self._pool.expected = len(self._judged) + self._seeds + unseen + len(LOADS)
        choice = self._search()
        loads, checks = list[LoadStep](), list[TrialResult]()
        if choice is not None:
            scenario, rate = choice.candidate.scenario(self._scenario, 0), _single_rate(self._scenario)
            trials = [
                Trial(choice.candidate.scenario(self._scenario, FIRST_UNSEEN_SEED + seed)) for seed in range(unseen)
            ]
            factors = LOADS if rate is not None else ()
            trials += [Trial(_as_long(scenario, factor), (rate or 0.0) * factor) for factor in factors]
            results = self._pool.all(trials)
            checks = results[:unseen]
            for factor, result in zip(factors, results[unseen:], strict=True):
                loads.append(LoadStep(factor, result))
                if not result.meets(self._target):
                    break
        judged = [each for each in self._judged if each.results]
        return Plan(choice, judged, loads, checks, self._target, self._seeds)

    def _search(self) -> Judged | None:
        while True:
            best = self._best()
            open_ones = list(self._open(best))
            if not open_ones and not self._waiting:
                return best
            for number in open_ones:
                if self._pool.is_full:
                    break
                self._next_trials(number)
            self._pool.wait()
            self._collect()

    def _best(self) -> Judged | None:
        """Return the cheapest candidate that meets the SLO so far; of equal ones that with most requests in time."""
        met = [each for each in self._judged if each.is_done and each.meets(self._target, self._seeds)]
        return min(
            met,
            key=lambda each: (each.candidate.cost, -each.attainment, each.candidate.host_memory_bytes),
            default=None,
        )

    def _open(self, best: Judged | None) -> Iterator[int]:
        """Yield the candidates that may be better than the best and of which nothing runs, the cheapest first."""
        for number, each in enumerate(self._judged):
            if best is not None and each.candidate.cost > best.candidate.cost:
                return
            if not each.is_done and number not in self._waiting:
                yield number

    def _next_trials(self, number: int) -> None:
        judged = self._judged[number]
        if judged.short is None:
            trial = Trial(_short(judged.candidate.scenario(self._scenario, 0)))
            self._waiting[number] = [self._pool.submit(trial)]
            return
        first = len(judged.full)
        seeds = range(first, 1 if not first else self._seeds)
        self._waiting[number] = [
            self._pool.submit(Trial(judged.candidate.scenario(self._scenario, seed))) for seed in seeds
        ]

    def _collect(self) -> None:
        for number, futures in [*self._waiting.items()]:
            if not all(future.done() for future in futures):
                continue
            del self._waiting[number]
            judged, results = self._judged[number], [future.result() for future in futures]
            if judged.short is None:
                (judged.short,) = results
                judged.is_done = bool(results[0].error) or judged.attainment < self._target - _CLEAR_MISS
                if not judged.is_done and _short(self._scenario) == self._scenario:
                    judged.full = results
            else:
                judged.full += results
            if judged.full:
                missed = not all(each.meets(self._target) for each in judged.full)
                judged.is_done = missed or len(judged.full) >= self._seeds


def _as_long(scenario: Scenario, factor: float) -> Scenario:
    """Return a scenario that lasts as long at a multiple of its rate."""
    if scenario.count is None or scenario.trace:
        return scenario
    return msgspec.structs.replace(scenario, count=ceil(scenario.count * factor))
