"""Fits the constants of a profile to measurements.

Least squares over relative errors, with non-negative constants and confidence intervals: first for whole steps, then
for what adapters add to them.
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
    """Fits a sum of non-negative constants times counts to measured points.

    Confidence intervals come from a bootstrap of 200 fits. Each fit draws an exponential weight for every point, so
    that no point is missing and every constant is determined, and resamples the point's measurements. So the intervals
    reflect noise as well as errors of the model.

    Args:
        counts: ``[points, constants]``.
        measured: seconds at each point.
        tolerances: allowed error of each point, in seconds.
        redraw: returns ``measured`` with resampled measurements of the same points.

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
        # Scale the columns: contexts are thousands of tokens, sequences are ones.
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
        """Predicted seconds, ``[points]``."""
        predicted: Floats = self._counts @ self.values
        return predicted

    def constant(self, index: int, unit: str) -> Constant:
        """Return one constant as a profile's ``Constant``."""
        return Constant(float(self.values[index]), unit, float(self.errors[index]))

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

    Constants enter one by one, the steepest first. A constant that would fall below zero is removed again.
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
            # Move towards the trial until a constant reaches zero, and remove this constant.
            share = (x[falling] / (x[falling] - trial[falling])).min()
            x += share * (trial - x)
            inside &= x > _TOLERANCE
            x[~inside] = 0.0
        x = trial
    return x


def quality(predicted: Floats, measured: Floats) -> FitQuality:
    """Return the quality of a fit from predictions and measurements."""
    total = float(((measured - measured.mean()) ** 2).sum())
    left = float(((measured - predicted) ** 2).sum())
    worst = float((np.abs(predicted - measured) / np.abs(measured)).max())
    return FitQuality(1 - left / total if total else 0.0, worst, len(measured))


_TOKEN_POINTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_ROW_POINTS = (1, 4, 16, 64, 256)
"""Counts at which the curves have a point, up to the largest measured count."""


class StepMeasurement(NamedTuple):
    """Holds the measured times of a step without adapters."""

    work: StepWork
    seconds: tuple[float, ...]


def fit_step(measurements: Sequence[StepMeasurement], loop: Constant, loop_sequence: Constant) -> StepCosts:
    """Return the constants of steps that best match the measurements.

    Args:
        measurements: measured steps, varied enough to separate the parts: decodes alone, prefills alone, several
            prefills with and without sampling, short and long contexts.
        loop, loop_sequence: constants of the engine's loop, which are passed on.
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
    tokens = len(token_points)
    rows = len(row_points)
    return StepCosts(
        tokens=_curve("tokens", token_points, found.values[:tokens], found.errors[:tokens]),
        sampled_rows=_curve(
            "rows", row_points, found.values[tokens : tokens + rows], found.errors[tokens : tokens + rows]
        ),
        decode_attention=found.constant(-4, "s/token"),
        decode_sequence=found.constant(-3, "s/sequence"),
        prefill_attention=found.constant(-2, "s/pair"),
        prefill_sequence=found.constant(-1, "s/sequence"),
        loop=loop,
        loop_sequence=loop_sequence,
        average=_average(found.predicted, measurements),
        fit=quality(found.predicted, found.measured),
    )


def _average(predicted: Floats, measurements: Sequence[StepMeasurement]) -> Constant:
    """Return the mean time of steps as a share of the predicted time.

    A disturbance lasts for many steps of a round, so the confidence interval is computed over the rounds.
    """
    ratios = np.array([measured.seconds for measured in measurements]) / predicted[:, None]
    of_rounds = ratios.mean(axis=0)
    rounds = len(of_rounds)
    error = 1.96 * float(of_rounds.std(ddof=1)) / rounds**0.5 if rounds > 1 else None
    return Constant(float(ratios.mean()), "of the sum", error)


def _points(wanted: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Return the wanted counts below the largest measured count, and the largest measured count."""
    largest = max(counts)
    return [*takewhile(lambda count: count < largest, wanted), largest]


def _shares(count: int, points: Sequence[int]) -> list[float]:
    """Return the weight of each point in a curve's value at ``count``, as ``CostModel`` interpolates."""
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


_OF_ADDED = 0.05
_OF_BASE = 0.02
"""Allowed errors of the model, as shares of the time that adapters add and of the base step measured beside it."""
_SURE_OF_ADDED = 0.05
_SURE_OF_BASE = 0.007
"""Standard errors that are small enough, as shares of the same two times. The larger limit counts."""


class LoraMeasurement(NamedTuple):
    """Holds a step with adapters, measured alternately with the same step of the base model.

    Attributes:
        work: ranks of the step.
        base_s: times without adapters.
        with_s: times with adapters, at the same moments.
    """

    work: LoraWork
    base_s: list[float]
    with_s: list[float]

    @property
    def total_s(self) -> float:
        """Sum of all times in seconds."""
        return sum(self.base_s) + sum(self.with_s)

    @property
    def is_sure(self) -> bool:
        """Whether the standard error of the added time is small, relative to the added time or to the step."""
        pair = np.array([self.base_s, self.with_s])
        base_s = float(np.median(pair[0]))
        added_s = _added_s(pair)
        error_s = base_s * float(np.std(pair[1] / pair[0], ddof=1)) / len(self.with_s) ** 0.5
        return bool(error_s <= max(_SURE_OF_ADDED * added_s, _SURE_OF_BASE * base_s))


def fit_lora(measurements: Sequence[LoraMeasurement], form: KernelForm) -> LoraCosts:
    """Return the constants of a kernel form that best match the measured additions.

    The time that adapters add is small compared with the changes of a machine's speed from second to second. So each
    measurement counts as a ratio to the base model's time at the same moment. A difference of two steps has the noise
    of both, so the weight of a point also depends on the duration of the steps.

    Einsums copy every adapter and add whole rows for any rank, and their prefills take longer than the tokens explain.
    So einsums have constants for these effects. In other kernel forms, the effects are too small to separate from
    noise.
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
        fixed=found.constant(0, "s"),
        decode_row_rank=found.constant(1, "s/rank"),
        prefill_token_rank=found.constant(2, "s/rank"),
        adapter_rank=found.constant(3, "s/rank"),
        row=found.constant(4, "s/row") if einsum else None,
        adapter=found.constant(5, "s/adapter") if einsum else None,
        prefill=found.constant(6, "s") if einsum else None,
        decode_fit=_quality(found, base_s, decodes),
        prefill_fit=_quality(found, base_s, prefills),
    )


def _added_s(pair: Floats) -> float:
    """Return the seconds that adapters added, from times without and with them, ``[2, times]``."""
    base_s, with_s = pair
    return float(np.median(base_s)) * (_middle(with_s / base_s) - 1)


def _middle(values: Floats) -> float:
    """Return the mean of the middle half, which is about as precise as a mean, and robust against other load."""
    cut = len(values) // 4
    return float(np.sort(values)[cut : len(values) - cut].mean())


def _quality(found: Regression, base_s: Floats, which: npt.NDArray[np.bool_]) -> FitQuality:
    """Return the quality of predicted additions.

    Errors are relative to whole steps, because an addition may be near zero.
    """
    fit = quality(found.predicted[which], found.measured[which])
    missed = np.abs(found.predicted - found.measured) / (base_s + found.measured)
    return msgspec.structs.replace(fit, worst=float(missed[which].max()))
