"""Implements dLoRA's adaptive threshold tuning, which learns from each period when merging pays.

Source: B. Wu et al., "dLoRA: Dynamically Orchestrating Requests and Adapters for LoRA LLM Serving", OSDI 2024,
Algorithm 2. It tunes alpha; the tuning of beta is "similar", and its details are omitted.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from lorikeet.core.ids import AdapterDigest
from lorikeet.scheduling.batching.mode import LiveRequest


class ThresholdParams(NamedTuple):
    """Parameters of the thresholds: initial values and tuning. The paper prints none of these values.

    Attributes:
        alpha, beta: initial values. The break-even ratio is 1 / 1.389 = 0.72 if iterations take as long with fewer
            requests, and adapters add 38.9 % (section 4.1).
        decrement: amount by which alpha falls if merging would have served more requests, and by which beta rises if
            unmerging would.
        factor: factor by which otherwise alpha rises and beta falls.
        least_alpha, most_alpha, least_beta: limits.
        gap: least distance of beta below alpha, so that a state is not left as soon as it is entered.
        period_iterations: largest number of iterations in a period.
        from_even: whether alpha is set to the break-even ratio as soon as the times of both states are known; see
            ``mode_times.BreakEvenThresholds``.
    """

    alpha: float = 0.8
    beta: float = 0.65
    decrement: float = 0.05
    factor: float = 1.1
    least_alpha: float = 0.2
    most_alpha: float = 2.0
    least_beta: float = 0.05
    gap: float = 0.05
    period_iterations: int = 32
    from_even: bool = False


class IterationTimes(Protocol):
    """Defines the times of iterations, in seconds."""

    @property
    def is_known(self) -> bool:
        """Whether the times of both states are known."""
        ...

    def merged_s(self, batch: Sequence[LiveRequest]) -> float:
        """Return the time of an iteration of requests of one merged adapter."""
        ...

    def unmerged_s(self, batch: Sequence[LiveRequest]) -> float:
        """Return the time of an iteration of requests of any adapters without merging."""
        ...

    def switch_s(self, to_merged: bool) -> float:
        """Return the time of a switch to a merged adapter, or to no merged adapter."""
        ...


class Iteration(NamedTuple):
    """Holds the two possible batches of an iteration, one of which ran.

    Attributes:
        merged: number of the oldest requests of the adapter that is or would be merged.
        merged_s: time of their iteration, merged.
        unmerged: number of the oldest requests of all.
        unmerged_s: time of their iteration, unmerged.
    """

    merged: int
    merged_s: float
    unmerged: int
    unmerged_s: float


class PeriodicThresholds(ABC):
    """Holds the thresholds alpha and beta of dynamic batching, which are tuned period by period.

    A period ends with a switch, when another adapter has the most requests, or after ``period_iterations``. At its end,
    the requests per second of both states are compared over its iterations. An unmerged period moves alpha, and a
    merged period moves beta. The state that did not run is charged with the switch to it.

    Args:
        params: initial values and tuning.

    Attributes:
        alpha, beta: arguments of ``dynamic.decide``.
    """

    def __init__(self, params: ThresholdParams) -> None:
        self._params = params
        self.alpha = params.alpha
        self.beta = params.beta
        self._state: tuple[AdapterDigest | None, AdapterDigest | None] = (None, None)

    def start_iteration(self, merged: AdapterDigest | None, candidate: AdapterDigest | None) -> bool:
        """End the period if the next iteration does not belong to it. Return whether the next choice may differ.

        Args:
            merged: adapter that is merged for the iteration; None for none.
            candidate: adapter with the most requests, which is or would be merged.
        """
        if (merged, candidate) == self._state:
            return False
        may_differ = self._end_period()
        self._state = merged, candidate
        return may_differ

    @property
    def _is_merged(self) -> bool:
        """Whether the current period runs merged."""
        return self._state[0] is not None

    @abstractmethod
    def _end_period(self) -> bool:
        """Tune a threshold and begin the next period. Return whether the next choice may differ."""

    def _move_alpha(self, pays: bool) -> None:
        """Move alpha after an unmerged period. ``pays`` is whether merging would have served more."""
        rules = self._params
        alpha = self.alpha - rules.decrement if pays else self.alpha * rules.factor
        self.alpha = min(max(alpha, rules.least_alpha), rules.most_alpha)
        self.beta = max(min(self.beta, self.alpha - rules.gap), rules.least_beta)

    def _moved_beta(self, pays: bool) -> float:
        """Return beta after a merged period, before its limits. ``pays`` is whether unmerging would serve more."""
        return self.beta + self._params.decrement if pays else self.beta / self._params.factor


class Thresholds(PeriodicThresholds):
    """Tunes alpha and beta by the times that each iteration had when it was chosen.

    Args:
        times: times of switches.
        params: initial values and tuning.
    """

    def __init__(self, times: IterationTimes, params: ThresholdParams) -> None:
        super().__init__(params)
        self._times = times
        self._begin_period()

    def note(self, iteration: Iteration, count: int) -> None:
        """Log identical iterations, at most the remaining number of the period."""
        self._iterations += count
        self._served[True] += count * iteration.merged
        self._served[False] += count * iteration.unmerged
        self._seconds[True] += count * iteration.merged_s
        self._seconds[False] += count * iteration.unmerged_s
        if self.iterations_left <= 0:
            self._end_period()

    @property
    def iterations_left(self) -> int:
        """Largest number of iterations until the period ends."""
        return self._params.period_iterations - self._iterations

    def _begin_period(self) -> None:
        self._iterations = 0
        self._served = {True: 0, False: 0}
        self._seconds = {True: 0.0, False: 0.0}

    def _end_period(self) -> bool:
        has_period = self._iterations > 0
        if has_period:
            other, ran = not self._is_merged, self._is_merged
            self._tune(self._throughput(other, self._times.switch_s(other)) > self._throughput(ran))
        self._begin_period()
        return has_period

    def _throughput(self, merged: bool, switch_s: float = 0.0) -> float:
        """Return requests per second over the period, including a switch before its first iteration."""
        return self._served[merged] / (self._seconds[merged] + switch_s)

    def _tune(self, pays: bool) -> None:
        """Move the threshold of the state that ran. ``pays`` is whether the other state would have served more."""
        if self._is_merged:
            self.beta = max(min(self._moved_beta(pays), self.alpha - self._params.gap), self._params.least_beta)
        else:
            self._move_alpha(pays)
