"""Fits the times of merged and unmerged steps while serving, and tunes thresholds from the break-even ratio."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lorikeet.core.ids import AdapterDigest
from lorikeet.core.plan import KernelForm
from lorikeet.papers.dlora.thresholds import PeriodicThresholds, ThresholdParams
from lorikeet.scheduling.batching.mode import BatchWork, LiveRequest
from lorikeet.scheduling.state import RobustFit, faded

_SCALE = np.array((1.0, 100.0, 10.0, 1.0, 1000.0))
"""Units of the features (step, prefill tokens, decodes, any LoRA, LoRA work), so that they are of similar size."""
_RIDGE = 1e-6
_WINDOW = 256
_PLAIN, _LORA = 0, 1
_TRIAL_STEPS = 8
"""Number of steps of a kind after which its time counts as known.

A single step may be delayed, and is usually a prefill.
"""
_TRIAL_INTERVAL = 256
"""Time without LoRA steps after which new LoRA steps are measured, in durations of a trial, so that trials cost
little."""


def _sample(prefill_tokens: float, decodes: float, lora: float) -> NDArray[np.float64]:
    sample: NDArray[np.float64] = np.array((1.0, prefill_tokens, decodes, lora > 0, lora)) / _SCALE
    return sample


class ModeBatch(NamedTuple):
    """Describes the size of a batch, run or only considered.

    Attributes:
        requests: number of requests.
        lora: LoRA work of the batch with one row per request: rows times ranks as the kernel form counts them; 0 if
            merged.
    """

    requests: int
    lora: float = 0.0


def lora_work(form: KernelForm, rows: Mapping[AdapterDigest, int], rank: Callable[[AdapterDigest], int]) -> float:
    """Return the LoRA work of a step: rows times ranks.

    Args:
        form: ``unpadded`` counts the rank of each row, ``padded`` the largest rank of the step, ``einsum`` the largest
            rank once for every adapter of the step.
        rows: number of tokens by adapter.
        rank: returns the rank of an adapter.
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
    """Fits recent step times linearly in both modes, and averages the times of switches in each direction.

    The fit has a cost per step, per prefill token and per decode, which both modes share, and costs for any LoRA and
    for LoRA work, which merged and base-only steps do not have. Steps with and without LoRA fade separately, so that
    the times of one mode stay known while the other mode runs for long.

    Args:
        form: form in which kernels compute mixed ranks.
        rank: returns the rank of an adapter.

    Attributes:
        lora_steps_due: number of steps with LoRA that should be measured. Measurements are due after a few steps
            without LoRA at first, later after a long time without LoRA.
    """

    def __init__(self, form: KernelForm, rank: Callable[[AdapterDigest], int]) -> None:
        self._form, self._rank = form, rank
        self._fit = RobustFit(features=len(_SCALE), kinds=2, window=_WINDOW, ridge=_RIDGE)
        self._mix = np.zeros(3)  # sequences, prefill tokens, decodes of recent steps
        self._switches = {True: _RunningMean(), False: _RunningMean()}
        self._seen = [0, 0]  # steps of each kind
        self._mixed = Counter[int]()  # steps with LoRA, by the bit length of their number of adapters
        self._lora_s = 0.0  # seconds of all steps with LoRA
        self._since_lora, self._since_lora_s = 0, 0.0  # steps and seconds without
        self.lora_steps_due = 0

    @property
    def is_known(self) -> bool:
        """Whether enough steps with and without LoRA have run to compare the modes."""
        return min(self._seen) >= _TRIAL_STEPS

    def has_measured(self, adapters: int) -> bool:
        """Return whether enough steps ran with this many unmerged adapters (rounded to a power of two) or more.

        Otherwise the fit would extrapolate from batches of few adapters, and many adapters together may cost far less
        than their sum.
        """
        least = adapters.bit_length()
        return sum(steps for digits, steps in self._mixed.items() if digits >= least) >= _TRIAL_STEPS

    def note(self, steps: int, work: BatchWork, step_s: float) -> None:
        """Add identical steps to the fit.

        Steps that host cores assisted are skipped, because other steps differ from them.

        Args:
            steps: number of steps.
            work: work of each step.
            step_s: mean seconds of a step, without the switch.
        """
        if work.is_assisted:
            return
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
        return self._since_lora_s >= _TRIAL_INTERVAL * _TRIAL_STEPS * self._lora_s / lora_steps

    def note_switch(self, to_merged: bool, switch_s: float) -> None:
        """Record the time of a switch to a merged adapter, or to no merged adapter."""
        self._switches[to_merged].note(switch_s)

    def batch(self, adapters: Iterable[AdapterDigest | None]) -> ModeBatch:
        """Return the unmerged batch of one request for each of ``adapters``, where None is the base model."""
        requests = Counter(adapters)
        total = requests.total()
        return ModeBatch(total, lora_work(self._form, {a: n for a, n in requests.items() if a is not None}, self._rank))

    def batch_s(self, batch: ModeBatch) -> float:
        """Return the expected seconds of a step of a batch, with the recent mix of prefill tokens and decodes."""
        sequences, prefill_tokens, decodes = self._mix.tolist()
        per_sequence = batch.requests / sequences if sequences else 0.0
        prefill_tokens, decodes = prefill_tokens * per_sequence, decodes * per_sequence
        rows = (prefill_tokens + decodes) / batch.requests if batch.requests else 0.0
        return float(_sample(prefill_tokens, decodes, batch.lora * rows) @ self._fit.parts())

    def step_s(self, work: BatchWork) -> float:
        """Return the expected seconds of a step with this work."""
        lora = lora_work(self._form, work.rows, self._rank)
        return float(_sample(work.prefill_tokens, work.decodes, lora) @ self._fit.parts())

    def merged_s(self, batch: Sequence[LiveRequest]) -> float:
        """Return the expected seconds of an iteration of requests of one merged adapter."""
        return self.batch_s(ModeBatch(len(batch)))

    def unmerged_s(self, batch: Sequence[LiveRequest]) -> float:
        """Return the expected seconds of an iteration of requests of any adapters without merging."""
        return self.batch_s(self.batch(request.adapter for request in batch))

    def switch_s(self, to_merged: bool) -> float:
        """Return the expected seconds of a switch; 0 before any switch.

        This is the mean of past switches in this direction, or of switches in the other direction if there are none.
        """
        known = self._switches[to_merged].value
        if known is None:
            known = self._switches[not to_merged].value
        return known or 0.0


BREAK_EVEN = ThresholdParams(most_alpha=1.2, from_even=True)
"""Default parameters of :class:`BreakEvenThresholds`."""


class ModeIterationTimes(Protocol):
    """Defines the times that the tuning needs, in seconds."""

    @property
    def is_known(self) -> bool:
        """Whether the times of both modes are known."""
        ...

    def batch_s(self, batch: ModeBatch) -> float:
        """Return the seconds of a step of a batch."""
        ...

    def switch_s(self, to_merged: bool) -> float:
        """Return the seconds of a switch."""
        ...


class ModeIteration(NamedTuple):
    """Holds the two possible batches of an iteration, one of which ran.

    Attributes:
        merged: the oldest requests of the adapter that is or would be merged.
        unmerged: the oldest requests of all adapters.
    """

    merged: ModeBatch
    unmerged: ModeBatch


def throughput(batches: Sequence[tuple[ModeBatch, int]], times: ModeIterationTimes, switch_s: float = 0.0) -> float:
    """Return requests per second over iterations (batch, number of steps), including a switch before the first."""
    taken_s = switch_s + _seconds(batches, times)
    served = sum(steps * batch.requests for batch, steps in batches)
    return served / taken_s if taken_s else 0.0


def _seconds(batches: Sequence[tuple[ModeBatch, int]], times: ModeIterationTimes) -> float:
    return sum(steps * times.batch_s(batch) for batch, steps in batches)


class BreakEvenThresholds(PeriodicThresholds):
    """Tunes alpha and beta from the break-even ratio, by times that are learned while serving.

    The first period in which both modes are known sets alpha to a factor above the break-even ratio. At break-even,
    merged iterations, including their share of a switch per longest period, serve as many requests per second as
    unmerged iterations. The paper's values suit one machine. If adapters cost several times as much as the base model,
    break-even is many small moves away from these values.

    The threshold that moves pushes the other.

    Args:
        times: times of steps and switches.
        params: initial values and tuning.
    """

    def __init__(self, times: ModeIterationTimes, params: ThresholdParams = BREAK_EVEN) -> None:
        super().__init__(params)
        self._times = times
        self._log: list[tuple[ModeIteration, int]] = []
        self.recalibrate()

    def recalibrate(self) -> None:
        """Schedule alpha to be set to the break-even ratio again at the end of the current period."""
        self._is_calibrated = not self._params.from_even

    def note(self, iteration: ModeIteration, steps: int) -> None:
        """Log identical iterations, at most the remaining number of the period."""
        self._log.append((iteration, steps))
        if self.iterations_left <= 0:
            self._end_period()

    @property
    def iterations_left(self) -> int:
        """Largest number of iterations until the period ends."""
        first = not self._is_merged and not self._is_calibrated  # thresholds are calibrated as soon as possible
        return (1 if first else self._params.period_iterations) - sum(steps for _, steps in self._log)

    def _end_period(self) -> bool:
        log, self._log = self._log, []
        if log and self._times.is_known:
            self._tune(log)
        return True

    def _tune(self, log: Sequence[tuple[ModeIteration, int]]) -> None:
        """Calibrate alpha, or move the threshold of the mode that ran."""
        merged = [(iteration.merged, steps) for iteration, steps in log]
        unmerged = [(iteration.unmerged, steps) for iteration, steps in log]
        rules = self._params
        if not self._is_calibrated and (unmerged_s := _seconds(unmerged, self._times)):
            self._is_calibrated = True
            switch_s = self._times.switch_s(to_merged=True) / rules.period_iterations * sum(steps for _, steps in log)
            even = (_seconds(merged, self._times) + switch_s) / unmerged_s
            self.alpha = min(max(even * rules.factor, rules.least_alpha), rules.most_alpha)
            self.beta = max(self.alpha - (rules.alpha - rules.beta), rules.least_beta)
        elif self._is_merged:
            gain = throughput(unmerged, self._times, self._times.switch_s(to_merged=False))
            beta = self._moved_beta(gain > throughput(merged, self._times))
            self.beta = min(max(beta, rules.least_beta), rules.most_alpha - rules.gap)
            self.alpha = max(self.alpha, self.beta + rules.gap)
        else:
            gain = throughput(merged, self._times, self._times.switch_s(to_merged=True))
            self._move_alpha(gain > throughput(unmerged, self._times))
