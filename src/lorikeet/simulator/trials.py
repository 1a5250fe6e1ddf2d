"""Runs simulations of one scenario each in parallel processes, and keeps their results."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from lorikeet.bench.in_process import STOPPED
from lorikeet.bench.load_report import RequestResult
from lorikeet.core.request import Slo
from lorikeet.simulator.scenario import Scenario
from lorikeet.simulator.study import ScenarioResult, run_scenario


class Trial(NamedTuple):
    """Describes a simulation to run.

    Attributes:
        scenario: scenario to simulate.
        rate: requests per second instead of the scenario's rate; None for the scenario's rate.
        most_missed: number of misses of the SLO above which the simulation ends soon; None for a whole simulation.
    """

    scenario: Scenario
    rate: float | None = None
    most_missed: int | None = None


class TrialResult(msgspec.Struct, frozen=True):
    """Holds the figures of a simulation that are kept. Times are in seconds.

    Attributes:
        seed: seed of the scenario.
        attainment: share of the requests that met the SLO; None without limits. If the simulation was stopped, the
            share of the sent requests that had met the SLO or still could.
        stopped_after: number of requests sent before the trial was stopped; 0 for a whole trial.
        missed: share of the requests that missed each limit (``TTFT``, ``TPOT``, ``E2E``), or failed.
        ttft_p50_s, ttft_p99_s, cold_ttft_p99_s, tpot_p99_s, e2e_p99_s: percentiles of complete answers.
        goodput: requests per second that met the SLO.
        preemptions: preemptions in all engines.
        error: reason why the scenario cannot be simulated; empty if it can.
    """

    seed: int
    attainment: float | None = None
    stopped_after: int = 0
    missed: dict[str, float] = {}
    ttft_p50_s: float = 0.0
    ttft_p99_s: float = 0.0
    cold_ttft_p99_s: float = 0.0
    tpot_p99_s: float = 0.0
    e2e_p99_s: float = 0.0
    goodput: float = 0.0
    preemptions: int = 0
    error: str = ""

    def meets(self, target: float) -> bool:
        """Return whether at least this share of the requests met the SLO."""
        return not self.stopped_after and (self.attainment or 0.0) >= target


def run_trial(trial: Trial) -> TrialResult:
    """Run one simulation. An invalid scenario gives an error in the result, so that other simulations continue."""
    try:
        return summary(
            run_scenario(trial.scenario, lambda stage, done, total: None, trial.rate, most_missed=trial.most_missed)
        )
    except ValueError as error:
        return TrialResult(trial.scenario.seed, error=str(error))


def summary(result: ScenarioResult) -> TrialResult:
    """Return the figures of a simulation that are kept."""
    figures = result.figures
    limits = result.scenario.limits()
    records = result.simulated.run.exchanges

    def at(values: object, percentile: str) -> float:
        return float(getattr(values, percentile, 0.0))

    is_stopped = any(each.error == STOPPED for each in records)
    missed = {
        name: sum(_missed(each, only) for each in records if each.error in (None, STOPPED)) / len(records)
        for name, only in (
            ("TTFT", Slo(ttft_s=limits.ttft_s)),
            ("TPOT", Slo(tpot_s=limits.tpot_s)),
            ("E2E", Slo(e2e_s=limits.e2e_s)),
        )
        if only != Slo()
    }
    if failed := sum(each.error not in (None, STOPPED) for each in records):
        missed["failed"] = failed / len(records)
    in_time = sum(not _missed(each, limits) for each in records) / len(records)
    return TrialResult(
        seed=result.scenario.seed,
        attainment=in_time if is_stopped else figures.slo_attainment,
        stopped_after=len(records) if is_stopped else 0,
        missed=missed,
        ttft_p50_s=at(figures.ttft_s, "p50"),
        ttft_p99_s=at(figures.ttft_s, "p99"),
        cold_ttft_p99_s=at(figures.cold_ttft_s, "p99"),
        tpot_p99_s=at(figures.tpot_s, "p99"),
        e2e_p99_s=at(figures.e2e_s, "p99"),
        goodput=figures.goodput or 0.0,
        preemptions=sum(each.preemptions for each in result.simulated.stats),
    )


def _missed(record: RequestResult, limits: Slo) -> bool:
    """Return whether a request has missed its limits. A stopped request may have missed its limit on TTFT."""
    if record.error != STOPPED:
        return not record.meets(limits)
    limit_s = (record.slo or limits).ttft_s
    ttft_s = record.ttft_s
    return limit_s is not None and (record.e2e_s if ttft_s is None else ttft_s) > limit_s


class TrialPool:
    """Runs trials in parallel, and reports their progress.

    Args:
        executor: executor that runs the trials.
        workers: number of workers that run in parallel.
        show: called with the number of ended trials, the expected number, and the estimated remaining seconds (None
            before the first trial has ended).
        run: function that runs a trial.
    """

    def __init__(
        self,
        executor: Executor,
        workers: int,
        show: Callable[[int, int, float | None], None] = lambda done, expected, left_s: None,
        run: Callable[[Trial], TrialResult] = run_trial,
    ) -> None:
        self.workers = workers
        self.expected = 0
        self.done = 0
        self._executor = executor
        self._show = show
        self._run = run
        self._began_s = time.monotonic()
        self._running: dict[Future[TrialResult], Trial] = {}

    @property
    def is_full(self) -> bool:
        """Whether no worker is free."""
        return len(self._running) >= self.workers

    def submit(self, trial: Trial) -> "Future[TrialResult]":
        """Start a trial."""
        future = self._executor.submit(self._run, trial)
        self._running[future] = trial
        return future

    def wait_for_worker(self) -> None:
        """Wait until a worker is free."""
        while self.is_full:
            self.wait()

    def result(self, future: "Future[TrialResult]") -> TrialResult:
        """Wait until a started trial has ended, and return its result."""
        while not future.done():
            self.wait()
        return future.result()

    def wait(self) -> None:
        """Wait until a trial has ended."""
        if not self._running:
            return
        ended, _ = wait(self._running, return_when=FIRST_COMPLETED)
        for each in ended:
            del self._running[each]
        self.done += len(ended)
        self.expected = max(self.expected, self.done + len(self._running))
        passed_s = time.monotonic() - self._began_s
        self._show(self.done, self.expected, passed_s / self.done * (self.expected - self.done))

    def all(self, trials: list[Trial]) -> list[TrialResult]:
        """Run trials and return their results in order."""
        futures = list[Future[TrialResult]]()
        self.expected = max(self.expected, self.done + len(self._running) + len(trials))
        for each in trials:
            self.wait_for_worker()
            futures.append(self.submit(each))
        return [self.result(future) for future in futures]


@contextmanager
def process_pool(
    workers: int, show: Callable[[int, int, float | None], None] = lambda done, expected, left_s: None
) -> Iterator[TrialPool]:
    """Yield a pool of processes, and end them afterwards."""
    executor = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    try:
        yield TrialPool(executor, workers, show)
    finally:
        executor.shutdown(cancel_futures=True)
