"""The constants of whole steps, from measured ones."""

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from lorikeet.costs.fit import Floats, fit_medians, quality
from lorikeet.costs.model import StepWork
from lorikeet.costs.profile import Curve, Figure, StepCosts

_TOKEN_POINTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_ROW_POINTS = (1, 4, 16, 64, 256)
"""Counts at which the curves get a point, as far as anything was measured there."""


class StepMeasurement(NamedTuple):
    """A step without adapters, and how long it took each time it was measured."""

    work: StepWork
    seconds: tuple[float, ...]


def fit_step(measurements: Sequence[StepMeasurement], loop: Figure, loop_sequence: Figure) -> StepCosts:
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


def _average(predicted: Floats, measurements: Sequence[StepMeasurement]) -> Figure:
    """Return how long steps took on average, as a share of what is predicted.

    A disturbance lasts for many steps of a round, so that the interval is that of the rounds.
    """
    ratios = np.array([measured.seconds for measured in measurements]) / predicted[:, None]
    of_rounds = ratios.mean(axis=0)
    rounds = len(of_rounds)
    error = 1.96 * float(of_rounds.std(ddof=1)) / rounds**0.5 if rounds > 1 else None
    return Figure(float(ratios.mean()), "of the sum", error)


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
