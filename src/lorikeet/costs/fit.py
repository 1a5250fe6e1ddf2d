"""Fits the constants of a profile to measurements.

Least squares over relative errors, with no constant below zero and with intervals: first for whole steps, then for
what adapters add to them.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from lorikeet.core.plan import KernelForm
from lorikeet.costs.model import LoraWork, StepWork
from lorikeet.costs.profile import Constant, Curve, FitQuality, LoraCosts, StepCosts

Floats = npt.NDArray[np.float64]

_RESAMPLES = 200
_TOLERANCE = 1e-10


class Regression:
    """A sum of non-negative constants times counts, fitted to measured points.

    Intervals are those of a bootstrap that draws, for each of 200 fits, a weight for every point (exponential, so
    that no point is ever missing and no constant undetermined) and the measurements of the point anew. So they
    show noise as well as what the model cannot explain.

    Args:
        counts: ``[points, constants]``.
        measured: seconds at each point.
        tolerances: by how much, in seconds, the points may be missed.
        redraw: returns ``measured`` as it would be with other measurements of the same points.

    Attributes:
        values: the constants.
        errors: half of their 95 % intervals.
    """

    def __init__(
        self, counts: Floats, measured: Floats, tolerances: Floats, redraw: Callable[[np.random.Generator], Floats]
    ) -> None:
        self.measured = measured
        self._counts = counts
        self._weights = 1 / tolerances
        # Columns of one size: contexts run to thousands of tokens where sequences are ones.
        self._scale = np.maximum(np.abs(counts).max(axis=0), _TOLERANCE)
        self.values = self._solve(self._weights, measured)
        generator = np.random.default_rng(0)
        found = [
            self._solve(self._weights * np.sqrt(generator.exponential(size=len(measured))), redraw(generator))
            for _ in range(_RESAMPLES)
        ]
        low, high = np.quantile(found, [0.025, 0.975], axis=0)
        self.errors: Floats = (high - low) / 2

    @property
    def predicted(self) -> Floats:
        """Seconds by the constants, ``[points]``."""
        predicted: Floats = self._counts @ self.values
        return predicted

    def figure(self, constant: int, unit: str) -> Constant:
        """Return one constant as a profile holds it."""
        return Constant(float(self.values[constant]), unit, float(self.errors[constant]))

    def _solve(self, weights: Floats, seconds: Floats) -> Floats:
        found: Floats = (
            nonnegative_least_squares(self._counts / self._scale * weights[:, None], seconds * weights) / self._scale
        )
        return found


def fit_medians(counts: Floats, samples: Sequence[Sequence[float]]) -> Regression:
    """Fit the medians of repeated measurements, all with the same relative error."""
    medians = np.array([np.median(seconds) for seconds in samples])
    return Regression(
        counts,
        medians,
        medians,
        lambda generator: np.array([np.median(generator.choice(seconds, len(seconds))) for seconds in samples]),
    )


def fit_line(counts: Sequence[float], samples: Sequence[Sequence[float]]) -> Regression:
    """Fit ``values[0] + values[1] · count`` to the medians."""
    return fit_medians(np.stack([np.ones(len(counts)), np.array(counts)], axis=1), samples)


def nonnegative_least_squares(matrix: Floats, values: Floats) -> Floats:
    """Return the x ≥ 0 that minimises |matrix · x - values| (Lawson and Hanson, Solving Least Squares Problems, 23).

    Constants enter one by one, the steepest first; those that would fall below zero leave again.
    """
    x = np.zeros(matrix.shape[1])
    inside = np.zeros(len(x), dtype=bool)
    tolerance = _TOLERANCE * max(1.0, float(np.abs(matrix.T @ values).max(initial=0.0)))
    for _ in range(10 * len(x)):
        gradient = matrix.T @ (values - matrix @ x)
        outside = np.flatnonzero(~inside & (gradient > tolerance))
        if not len(outside):
            break
        inside[outside[np.argmax(gradient[outside])]] = True
        while True:
            trial = np.zeros_like(x)
            trial[inside] = np.linalg.lstsq(matrix[:, inside], values, rcond=None)[0]
            falling = inside & (trial <= 0)
            if not falling.any():
                break
            # Go towards the trial as far as nothing falls below zero; what has reached it leaves.
            share = (x[falling] / (x[falling] - trial[falling])).min()
            x += share * (trial - x)
            inside &= x > _TOLERANCE
            x[~inside] = 0.0
        x = trial
    return x


def quality(predicted: Floats, measured: Floats) -> FitQuality:
    """Return how well predictions meet measurements."""
    total = float(((measured - measured.mean()) ** 2).sum())
    left = float(((measured - predicted) ** 2).sum())
    worst = float((np.abs(predicted - measured) / np.abs(measured)).max())
    return FitQuality(1 - left / total if total else 0.0, worst, len(measured))


_TOKEN_POINTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_ROW_POINTS = (1, 4, 16, 64, 256)
"""Counts at which the curves get a point, as far as anything was measured there."""


class StepMeasurement(NamedTuple):
    """A step without adapters, and how long it took each time it was measured."""

    work: StepWork
    seconds: tuple[float, ...]


def fit_step(measurements: Sequence[StepMeasurement], loop: Constant, loop_sequence: Constant) -> StepCosts:
    """Return the constants of steps that meet the measured ones best.

    Args:
        measurements: enough of them to tell the parts apart: steps of decodes alone, of prefills alone, of several
            prefills that sample or do not, of contexts short and long.
        loop, loop_sequence: taken over.
    """
    works = [measured.work for measured in measurements]
    token_points = _points(_TOKEN_POINTS, [work.tokens for work in works])
    row_points = _points(_ROW_POINTS, [work.sampled_rows for work in works])
    counts = np.array(
        [
            [
                *_shares(work.tokens, token_points),
                *_shares(work.sampled_rows, row_points),
                work.decode_context_tokens,
                work.decodes,
                work.prefill_pairs,
                work.prefills,
            ]
            for work in works
        ],
        dtype=np.float64,
    )
    found = fit_medians(counts, [measured.seconds for measured in measurements])
    tokens, rows = len(token_points), len(row_points)
    return StepCosts(
        tokens=_curve("tokens", token_points, found.values[:tokens], found.errors[:tokens]),
        sampled_rows=_curve(
            "rows", row_points, found.values[tokens : tokens + rows], found.errors[tokens : tokens + rows]
        ),
        decode_attention=found.figure(-4, "s/token"),
        decode_sequence=found.figure(-3, "s/sequence"),
        prefill_attention=found.figure(-2, "s/pair"),
        prefill_sequence=found.figure(-1, "s/sequence"),
        loop=loop,
        loop_sequence=loop_sequence,
        average=_average(found.predicted, measurements),
        fit=quality(found.predicted, found.measured),
    )


def _average(predicted: Floats, measurements: Sequence[StepMeasurement]) -> Constant:
    """Return how long steps took on average, as a share of what is predicted.

    A disturbance lasts for many steps of a round, so that the interval is that of the rounds.
    """
    ratios = np.array([measured.seconds for measured in measurements]) / predicted[:, None]
    of_rounds = ratios.mean(axis=0)
    rounds = len(of_rounds)
    error = 1.96 * float(of_rounds.std(ddof=1)) / rounds**0.5 if rounds > 1 else None
    return Constant(float(ratios.mean()), "of the sum", error)


def _points(wanted: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Return the wanted counts up to the largest one that was measured, and that one."""
    largest = max(counts)
    return [*takewhile(lambda count: count < largest, wanted), largest]


def _shares(count: int, points: Sequence[int]) -> list[float]:
    """Return the weight of each point in a curve's value at ``count``; see ``CostModel``, which reads it so."""
    if count == 0:
        return [0.0] * len(points)
    return [float(np.interp(count, points, np.eye(len(points))[i])) for i in range(len(points))]


def _curve(unit: str, counts: Sequence[int], seconds: Floats, errors: Floats) -> Curve:
    inner = range(1, len(counts) - 1)
    missed = [
        abs(np.interp(counts[i], (counts[i - 1], counts[i + 1]), (seconds[i - 1], seconds[i + 1])) / seconds[i] - 1)
        for i in inner
        if seconds[i] > 0
    ]
    points = tuple((count, float(value)) for count, value in zip(counts, seconds, strict=True))
    return Curve(unit, points, float(max(missed)) if missed else None, errors=tuple(errors.tolist()))


_OF_ADDED, _OF_BASE = 0.05, 0.02
"""Share of an addition, and of the step that it was measured against, that the model may miss it by."""
_SURE_OF_ADDED, _SURE_OF_BASE = 0.05, 0.007
"""Shares, of which the larger is a standard error that is small enough: what einsums add is soon known."""


class LoraMeasurement(NamedTuple):
    """A step with adapters, measured in turns with the same step of the base model.

    Attributes:
        work: ranks of the step.
        base_s: without adapters, each time.
        with_s: with them, in the same moments.
    """

    work: LoraWork
    base_s: list[float]
    with_s: list[float]

    @property
    def total_s(self) -> float:
        """All these times together."""
        return sum(self.base_s) + sum(self.with_s)

    @property
    def is_sure(self) -> bool:
        """Whether the standard error of the addition is small, or next to nothing beside the step."""
        pair = np.array([self.base_s, self.with_s])
        base_s, added_s = float(np.median(pair[0])), _added_s(pair)
        error_s = base_s * float(np.std(pair[1] / pair[0], ddof=1)) / len(self.with_s) ** 0.5
        return bool(error_s <= max(_SURE_OF_ADDED * added_s, _SURE_OF_BASE * base_s))


def fit_lora(measurements: Sequence[LoraMeasurement], form: KernelForm) -> LoraCosts:
    """Return the constants of one kernel form that meet the measured additions best.

    What adapters add is small beside what a machine's speed changes by from second to second: so each measurement
    counts as a ratio to the base model's at the same moment. A difference of two steps carries the noise of both, so
    a point weighs by the size of the steps as well as by its own.

    Einsums copy every adapter and add whole rows whatever the ranks, and chunks make them longer by more than their
    tokens explain, so theirs have constants for that; in the other forms it is too little to be told from noise.
    """
    works = [measured.work for measured in measurements]
    einsum = form is KernelForm.EINSUM
    counts = np.array(
        [
            [
                *(1.0, w.decode_row_ranks, w.prefill_token_ranks, w.adapter_ranks),
                *([w.rows, w.adapters, w.prefill_token_ranks > 0] * einsum),
            ]
            for w in works
        ],
        dtype=np.float64,
    )
    pairs = [np.array([measured.base_s, measured.with_s]) for measured in measurements]
    base_s = np.array([np.median(pair[0]) for pair in pairs])
    added_s = np.array([_added_s(pair) for pair in pairs])
    tolerances = _OF_ADDED * np.abs(added_s) + _OF_BASE * base_s

    def redraw(generator: np.random.Generator) -> Floats:
        return np.array([_added_s(generator.choice(pair, pair.shape[1], axis=1)) for pair in pairs])

    found = Regression(counts, added_s, tolerances, redraw)
    decodes = np.array([work.prefill_token_ranks == 0 for work in works])
    prefills = np.array([work.decode_row_ranks == 0 for work in works])
    return LoraCosts(
        fixed=found.figure(0, "s"),
        decode_row_rank=found.figure(1, "s/rank"),
        prefill_token_rank=found.figure(2, "s/rank"),
        adapter_rank=found.figure(3, "s/rank"),
        row=found.figure(4, "s/row") if einsum else None,
        adapter=found.figure(5, "s/adapter") if einsum else None,
        prefill=found.figure(6, "s") if einsum else None,
        decode_fit=_quality(found, base_s, decodes),
        prefill_fit=_quality(found, base_s, prefills),
    )


def _added_s(pair: Floats) -> float:
    """Return what adapters added, from times without and with them, ``[2, times]``."""
    base_s, with_s = pair
    return float(np.median(base_s)) * (_middle(with_s / base_s) - 1)


def _middle(values: Floats) -> float:
    """Return the mean of the middle half: nearly as sure as a mean, and blind to what else the machine did."""
    cut = len(values) // 4
    return float(np.sort(values)[cut : len(values) - cut].mean())


def _quality(found: Regression, base_s: Floats, which: npt.NDArray[np.bool_]) -> FitQuality:
    """Return how well additions are met. Errors are relative to whole steps: an addition may be next to nothing."""
    fit = quality(found.predicted[which], found.measured[which])
    missed = np.abs(found.predicted - found.measured) / (base_s + found.measured)
    return msgspec.structs.replace(fit, worst=float(missed[which].max()))
