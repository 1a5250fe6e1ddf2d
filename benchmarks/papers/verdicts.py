"""Judges our figure against the printed one, by pure functions."""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from benchmarks.papers.claims import Claim, Form

SAME_FROM, SAME_TO = 0.8, 1.25
"""Bounds of the ratio of ours to the printed figure within which both count as the same."""
BETTER_TO = 1.5
"""A gain of up to this factor times the printed one is better; a larger gain overshoots."""
HALF, DOUBLE = 0.5, 2.0
"""A value without a direction is opposite if it is less than half or more than double the printed one."""
ROUNDS_TO_ZERO = 0.5
"""Values below this count as the same as a printed zero."""


class Verdict(StrEnum):
    """Result of comparing our figure with a claim."""

    SAME = "same"
    """Ours is 0.8 to 1.25 times the printed figure, of a gain in times by its effect, or keeps the printed bound."""
    BETTER = "better"
    """Ours is better for the paper's system, by a gain of up to 1.5 times the printed one."""
    OVERSHOOTS = "overshoots"
    """The gain is more than 1.5 times the printed one: it does not count, and its cause is named."""
    SAME_DIRECTION = "same direction"
    """The paper's side wins, or the value has the printed order of magnitude, but the figure differs."""
    OPPOSITE = "opposite"
    """The claim is not confirmed; its cause is named."""
    NOT_TESTABLE = "not testable"
    """The claim cannot be measured here, for one of a closed list of reasons."""
    NOT_RUN = "not run"
    """The claim's runs are missing."""


class Judged(NamedTuple):
    """The ratio of ours to the printed figure (``None`` for a printed zero), and the verdict."""

    ratio: float | None
    verdict: Verdict


def judge(form: Form, printed: float, ours: float) -> Judged:
    """Return the ratio and verdict of our figure and the printed one, both in the printed unit.

    A gain in times is judged by its effect, its difference from 1, so that no effect is never the same as a gain.
    """
    if form in (Form.GAIN_TIMES, Form.BASELINE_TIMES) and printed != 1:
        ratio: float | None = (ours - 1) / (printed - 1)
    else:
        ratio = ours / printed if printed else None
    # Rounded, so that 1.2 is 0.8 times 1.5.
    ratio = None if ratio is None else round(ratio, 9)
    return Judged(ratio, _verdict(form, printed, ours, ratio))


def _verdict(form: Form, printed: float, ours: float, ratio: float | None) -> Verdict:
    if ratio is None:
        is_same = ours < ROUNDS_TO_ZERO if form is Form.AT_MOST else abs(ours) < ROUNDS_TO_ZERO
        return Verdict.SAME if is_same else Verdict.OPPOSITE
    match form:
        case Form.AT_MOST:
            return Verdict.SAME if ratio <= SAME_TO else Verdict.OPPOSITE
        case Form.AT_LEAST:
            return Verdict.SAME if ratio >= SAME_FROM else Verdict.OPPOSITE
        case Form.GAIN_TIMES | Form.GAIN_PERCENT:
            return _gain(ratio) if ours > _neutral(form) else Verdict.OPPOSITE
        case Form.BASELINE_TIMES | Form.BASELINE_PERCENT:
            if ours <= _neutral(form):
                return Verdict.OPPOSITE
            return Verdict.SAME if SAME_FROM <= ratio <= SAME_TO else Verdict.SAME_DIRECTION
        case Form.COST_PERCENT:
            return _cost(printed, ours, ratio)
        case Form.HIGHER:
            return _gain(ratio) if ratio >= HALF else Verdict.OPPOSITE
        case Form.LOWER:
            if ratio > DOUBLE:
                return Verdict.OPPOSITE
            # The same bounds; the upper one is now the worse side.
            return Verdict.SAME if SAME_FROM <= ratio <= SAME_TO else _gain(1 / ratio if ratio > 0 else float("inf"))
        case Form.VALUE:
            if SAME_FROM <= ratio <= SAME_TO:
                return Verdict.SAME
            return Verdict.SAME_DIRECTION if HALF <= ratio <= DOUBLE else Verdict.OPPOSITE


def _neutral(form: Form) -> float:
    """Return the figure at which neither side is better."""
    return 1.0 if form in (Form.GAIN_TIMES, Form.BASELINE_TIMES) else 0.0


def _gain(ratio: float) -> Verdict:
    if ratio < SAME_FROM:
        return Verdict.SAME_DIRECTION
    if ratio <= SAME_TO:
        return Verdict.SAME
    return Verdict.BETTER if ratio <= BETTER_TO else Verdict.OVERSHOOTS


def _cost(printed: float, ours: float, ratio: float) -> Verdict:
    """Return the verdict on a cost in percent; if it is almost zero, the gain is one of the whole, not of the rest."""
    if ratio > SAME_TO:
        return Verdict.SAME_DIRECTION if ratio <= DOUBLE else Verdict.OPPOSITE
    if ratio >= SAME_FROM:
        return Verdict.SAME
    return Verdict.BETTER if (100 + printed) / (100 + ours) <= BETTER_TO else Verdict.OVERSHOOTS


class Share(NamedTuple):
    """Number of counted claims, and number of claims as printed or better."""

    good: int
    counted: int

    @property
    def percent(self) -> float | None:
        """Share in percent; ``None`` if no claim counts."""
        return 100 * self.good / self.counted if self.counted else None


def share_of(judged: Iterable[tuple[Claim, Verdict]]) -> Share:
    """Return the share of claims that are the same or better, among the testable claims that are not excluded.

    Claims without runs count as not good.
    """
    counted = [verdict for claim, verdict in judged if claim.excluded is None and verdict is not Verdict.NOT_TESTABLE]
    return Share(sum(verdict in (Verdict.SAME, Verdict.BETTER) for verdict in counted), len(counted))
