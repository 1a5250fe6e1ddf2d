"""How long merged and unmerged steps take, learned while serving, and dLoRA's thresholds for switching between them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lorikeet.core.ids import AdapterDigest
from lorikeet.core.plan import KernelForm
from lorikeet.scheduling.batching.mode import BatchWork
from lorikeet.scheduling.step_times import RobustFit, faded

_SCALE = np.array((1.0, 100.0, 10.0, 1.0, 1000.0))
"""Units of step, prefilled tokens, decodes, LoRA at all, and its work, so that all parts are about as large."""
_RIDGE = 1e-6
_WINDOW = 256
_PLAIN, _LORA = 0, 1
_TRIAL_STEPS = 8
"""Steps of a kind that make it known: one alone may have been held up by anything, and most often it is a prefill."""
_FRESH_TIMES = 256
"""As many times as long as a trial takes without LoRA, and another one is due: trials cost a small part of the time."""


def _sample(prefill_tokens: float, decodes: float, lora: float) -> NDArray[np.float64]:
    sample: NDArray[np.float64] = np.array((1.0, prefill_tokens, decodes, lora > 0, lora)) / _SCALE
    return sample


class ModeBatch(NamedTuple):
    """A batch that may or may not have run.

    Attributes:
        requests: how many.
        lora: its LoRA work if every request had one row: rows times ranks, as the kernel form counts them; 0 if merged.
    """

    requests: int
    lora: float = 0.0


def lora_work(form: KernelForm, rows: Mapping[AdapterDigest, int], rank: Callable[[AdapterDigest], int]) -> float:
    """Return the LoRA work of a step: rows times ranks.

    Args:
        form: ``unpadded`` counts each row's own rank, ``padded`` the largest of the step, ``einsum`` that for every
            adapter of the step.
        rows: tokens under each adapter.
        rank: of an adapter.
    """
    if form is KernelForm.UNPADDED or not rows:
        return float(sum(count * rank(adapter) for adapter, count in rows.items()))
    padded = sum(rows.values()) * max(map(rank, rows))
    return float(padded * (len(rows) if form is KernelForm.EINSUM else 1))


class _RunningMean:
    def __init__(self) -> None:
        self._total, self._count = 0.0, 0

    def note(self, value: float) -> None:
        self._total, self._count = self._total + value, self._count + 1

    @property
    def value(self) -> float | None:
        return self._total / self._count if self._count else None


class ModeTimes:
    """One line through the durations of recent steps of both modes, and the mean cost of a switch each way.

    The line has so much for a step, a token of prefill and a decode, which both modes share, and for LoRA at all and
    its work, which merged steps and those of the base model alone are free of. Steps with LoRA and steps without are
    forgotten separately: while one mode runs for long, the other's times stay known.

    Args:
        form: how mixed ranks are computed.
        rank: of an adapter.

    Attributes:
        lora_steps_due: how many steps with LoRA ought to be measured: after a few without at first, later after a long
            time without.
    """

    def __init__(self, form: KernelForm, rank: Callable[[AdapterDigest], int]) -> None:
        self._form, self._rank = form, rank
        self._fit = RobustFit(features=len(_SCALE), kinds=2, window=_WINDOW, ridge=_RIDGE)
        self._mix = np.zeros(3)  # sequences, prefilled tokens, decodes of recent steps
        self._switches = {True: _RunningMean(), False: _RunningMean()}
        self._seen = [0, 0]  # steps of each kind
        self._mixed = Counter[int]()  # steps with LoRA, by the binary digits of how many adapters they had
        self._lora_s = 0.0  # all steps with LoRA together
        self._since_lora, self._since_lora_s = 0, 0.0  # steps and seconds without
        self.lora_steps_due = 0

    @property
    def is_known(self) -> bool:
        """Whether there have been enough steps both with and without LoRA, so that the modes can be compared."""
        return min(self._seen) >= _TRIAL_STEPS

    def has_measured(self, adapters: int) -> bool:
        """Return whether enough steps had so many adapters unmerged, to the power of two, or more.

        Else the line would be a guess: it was drawn through batches of few adapters, and many at once may cost far less
        than so many times one.
        """
        least = adapters.bit_length()
        return sum(steps for digits, steps in self._mixed.items() if digits >= least) >= _TRIAL_STEPS

    def note(self, steps: int, work: BatchWork, step_s: float) -> None:
        """Take identical steps in.

        Args:
            steps: how many.
            work: of each.
            step_s: mean duration, without a switch.
        """
        lora = lora_work(self._form, work.rows, self._rank)
        kind = _LORA if lora else _PLAIN
        self._seen[kind] += steps
        if lora:
            self._lora_s += steps * step_s
            self._since_lora, self._since_lora_s = 0, 0.0
            self._mixed[len(work.rows).bit_length()] += steps
            self.lora_steps_due = max(0, self.lora_steps_due - steps)
        else:
            self._since_lora, self._since_lora_s = self._since_lora + steps, self._since_lora_s + steps * step_s
            if self._is_stale():
                self.lora_steps_due = _TRIAL_STEPS
        self._fit.note(_sample(work.prefill_tokens, work.decodes, lora), step_s, steps, kind)
        mix = np.array((work.prefills + work.decodes, work.prefill_tokens, work.decodes), np.float64)
        self._mix = faded(self._mix, mix, steps)

    def _is_stale(self) -> bool:
        lora_steps = self._seen[_LORA]
        if lora_steps < _TRIAL_STEPS:
            return self._since_lora >= _TRIAL_STEPS
        return self._since_lora_s >= _FRESH_TIMES * _TRIAL_STEPS * self._lora_s / lora_steps

    def note_switch(self, to_merged: bool, switch_s: float) -> None:
        """Take a switch in, to some merged adapter or to none."""
        self._switches[to_merged].note(switch_s)

    def batch(self, adapters: Iterable[AdapterDigest | None]) -> ModeBatch:
        """Return the unmerged batch of requests of these adapters, None for the base model."""
        requests = Counter(adapters)
        total = requests.total()
        return ModeBatch(total, lora_work(self._form, {a: n for a, n in requests.items() if a is not None}, self._rank))

    def batch_s(self, batch: ModeBatch) -> float:
        """Return about how long a step of a batch takes whose requests prefill and decode as those lately did."""
        sequences, prefill_tokens, decodes = self._mix.tolist()
        per_sequence = batch.requests / sequences if sequences else 0.0
        prefill_tokens, decodes = prefill_tokens * per_sequence, decodes * per_sequence
        rows = (prefill_tokens + decodes) / batch.requests if batch.requests else 0.0
        return float(_sample(prefill_tokens, decodes, batch.lora * rows) @ self._fit.parts())

    def step_s(self, work: BatchWork) -> float:
        """Return about how long a step of that work takes."""
        lora = lora_work(self._form, work.rows, self._rank)
        return float(_sample(work.prefill_tokens, work.decodes, lora) @ self._fit.parts())

    def switch_s(self, to_merged: bool) -> float:
        """Return about how long a switch takes: as those seen, else as those the other way, 0 before any."""
        known = self._switches[to_merged].value
        if known is None:
            known = self._switches[not to_merged].value
        return known or 0.0


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

    def batch_s(self, batch: ModeBatch) -> float:
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

    merged: ModeBatch
    unmerged: ModeBatch


def throughput(batches: Sequence[tuple[ModeBatch, int]], times: IterationTimes, switch_s: float = 0.0) -> float:
    """Return requests per second over iterations, each with how often it ran, a switch before the first included."""
    taken_s = switch_s + _seconds(batches, times)
    served = sum(steps * batch.requests for batch, steps in batches)
    return served / taken_s if taken_s else 0.0


def _seconds(batches: Sequence[tuple[ModeBatch, int]], times: IterationTimes) -> float:
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
