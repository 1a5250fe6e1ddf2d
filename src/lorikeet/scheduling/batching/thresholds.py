"""How large an adapter's part must be for merging to pay, learned by looking back: dLoRA's threshold tuning.

Source: B. Wu et al., "dLoRA: Dynamically Orchestrating Requests and Adapters for LoRA LLM Serving", OSDI 2024,
Algorithm 2. It prints no values, and omits the tuning of beta.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from lorikeet.core.ids import AdapterDigest
from lorikeet.scheduling.batching.times import Batch


class ThresholdParams(NamedTuple):
    """Where the thresholds begin, and how they move.

    Attributes:
        alpha, beta: at the start.
        decrement: what a threshold changes by where that makes its switch likelier.
        factor: what it changes by where that makes its switch less likely.
        least_alpha, most_alpha, least_beta: limits.
        gap: beta stays at least so far below alpha: whichever moves pushes the other.
        period_steps: iterations after which a period ends at the latest.
        from_even: as soon as both modes are known, begin from where an adapter's part would break even.
    """

    alpha: float = 0.8
    beta: float = 0.65
    decrement: float = 0.05
    factor: float = 1.1
    least_alpha: float = 0.2
    most_alpha: float = 1.2
    least_beta: float = 0.05
    gap: float = 0.05
    period_steps: int = 32
    from_even: bool = True


class IterationTimes(Protocol):
    """What the tuning must know of time, in seconds."""

    @property
    def is_known(self) -> bool:
        """Whether the two modes can be compared yet."""
        ...

    def batch_s(self, batch: Batch) -> float:
        """Return how long a step of a batch takes."""
        ...

    def switch_s(self, to_merged: bool) -> float:
        """Return how long a switch takes."""
        ...


class Iteration(NamedTuple):
    """Both batches of an iteration, of which one ran.

    Attributes:
        merged: the oldest requests of the adapter that is merged or would be.
        unmerged: the oldest of all.
    """

    merged: Batch
    unmerged: Batch


def throughput(batches: Sequence[tuple[Batch, int]], times: IterationTimes, switch_s: float = 0.0) -> float:
    """Return requests per second over iterations, each with how often it ran, a switch before the first included."""
    taken_s = switch_s + _seconds(batches, times)
    served = sum(steps * batch.requests for batch, steps in batches)
    return served / taken_s if taken_s else 0.0


def _seconds(batches: Sequence[tuple[Batch, int]], times: IterationTimes) -> float:
    return sum(steps * times.batch_s(batch) for batch, steps in batches)


class Thresholds:
    """Alpha and beta, and the log of the period since they were last looked at.

    A period ends with a switch, with another adapter having the most requests, or after ``period_steps`` iterations.
    Then the two modes are compared over its iterations: a period that ran unmerged moves alpha, one that ran merged
    beta. The mode that did not run pays for the switch to it.

    The first period in which both modes are known does not move alpha but sets it, a factor above the part at which an
    iteration of the adapter alone, with its share of a switch for the longest period, serves as many requests a second
    as one of the oldest. The paper's values suit one machine; where adapters cost several times what the base model
    does, break-even is many small moves away from them.

    Args:
        times: of steps and switches.
        params: where to begin, and how to move.

    Attributes:
        alpha, beta: see ``dynamic.decide``.
    """

    def __init__(self, times: IterationTimes, params: ThresholdParams | None = None) -> None:
        self._times = times
        self._params = params or ThresholdParams()
        self.alpha, self.beta = self._params.alpha, self._params.beta
        self._merged: AdapterDigest | None = None
        self._candidate: AdapterDigest | None = None
        self._log: list[tuple[Iteration, int]] = []
        self.begin()

    def begin(self) -> None:
        """Set alpha anew by the period that is running."""
        self._has_begun = not self._params.from_even

    def meet(self, merged: AdapterDigest | None, candidate: AdapterDigest | None) -> bool:
        """End the period if an iteration that is about to run does not belong to it, and return whether it ended."""
        if (merged, candidate) == (self._merged, self._candidate):
            return False
        self._end()
        self._merged, self._candidate = merged, candidate
        return True

    def note(self, iteration: Iteration, steps: int) -> None:
        """Take identical iterations in, no more than are left of the period."""
        self._log.append((iteration, steps))
        if self.steps_left <= 0:
            self._end()

    @property
    def steps_left(self) -> int:
        """Iterations until the period ends at the latest."""
        first = self._merged is None and not self._has_begun  # the less is run unmerged before one knows, the better
        return (1 if first else self._params.period_steps) - sum(steps for _, steps in self._log)

    def _end(self) -> None:
        log, self._log = self._log, []
        if not log or not self._times.is_known:
            return
        merged = [(iteration.merged, steps) for iteration, steps in log]
        unmerged = [(iteration.unmerged, steps) for iteration, steps in log]
        rules = self._params
        if not self._has_begun and (unmerged_s := _seconds(unmerged, self._times)):
            self._has_begun = True
            switch_s = self._times.switch_s(to_merged=True) / rules.period_steps * sum(steps for _, steps in log)
            even = (_seconds(merged, self._times) + switch_s) / unmerged_s
            self.alpha = min(max(even * rules.factor, rules.least_alpha), rules.most_alpha)
            self.beta = max(self.alpha - (rules.alpha - rules.beta), rules.least_beta)
        elif self._merged is None:
            gain = throughput(merged, self._times, self._times.switch_s(to_merged=True))
            pays = gain > throughput(unmerged, self._times)
            self.alpha = self.alpha - rules.decrement if pays else self.alpha * rules.factor
            self.alpha = min(max(self.alpha, rules.least_alpha), rules.most_alpha)
            self.beta = max(min(self.beta, self.alpha - rules.gap), rules.least_beta)
        else:
            gain = throughput(unmerged, self._times, self._times.switch_s(to_merged=False))
            pays = gain > throughput(merged, self._times)
            self.beta = self.beta + rules.decrement if pays else self.beta / rules.factor
            self.beta = min(max(self.beta, rules.least_beta), rules.most_alpha - rules.gap)
            self.alpha = max(self.alpha, self.beta + rules.gap)
