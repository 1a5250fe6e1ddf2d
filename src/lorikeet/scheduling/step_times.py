"""Estimates how long steps take from the durations of recent steps.

Least squares with forgetting; no profile is needed, so a live engine and a simulated one decide by the same rule.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORGET = 0.998
"""Weight of a step beside the one after it: about the last 500 count."""
_PRIOR = 1e-3
_ROUNDS = 8
"""Times that a robust fit weighs its samples anew."""
_EXACT = 0.01
"""Share of the median value that a sample may lie off the line and count as on it."""

Floats = NDArray[np.float64]


def faded(old: Any, new: Any, times: int = 1) -> Any:
    """Return a sum whose older parts count less, after ``new`` was added ``times`` times."""
    weight = FORGET**times
    return weight * old + new * ((1 - weight) / (1 - FORGET))


def _least_squares(squares: Floats, products: Floats) -> Floats:
    """Return the parts of the normal equations' solution, none below zero: the worst leaves until none is."""
    parts, used = np.zeros(len(products)), list(range(len(products)))
    while used:
        parts[:] = 0.0
        parts[used] = np.linalg.solve(squares[np.ix_(used, used)], products[used])
        if parts.min() >= 0:
            break
        used.remove(int(parts.argmin()))
    return parts


class OnlineFit:
    """Least squares without parts below zero, in which old samples count less and less.

    Args:
        features: how many numbers describe a sample; the first is always 1.
    """

    def __init__(self, features: int) -> None:
        self._squares, self._products = _PRIOR * np.eye(features), np.zeros(features)
        self._parts: Floats | None = np.zeros(features)

    def note(self, sample: Sequence[float], value: float) -> None:
        """Take a sample in."""
        features = np.array(sample, np.float64)
        self._squares = faded(self._squares, np.outer(features, features))
        self._products = faded(self._products, features * value)
        self._parts = None

    @property
    def is_known(self) -> bool:
        """Whether there have been samples, with values above 0."""
        return bool(self._products[0])

    def parts(self) -> Floats:
        """Return how much of the value belongs to one unit of each feature; all 0 before the first sample."""
        if self._parts is None:
            self._parts = _least_squares(self._squares, self._products)
        return self._parts


class RobustFit:
    """Least absolute deviations without parts below zero, over the last samples of each kind.

    A sample far off the line weighs no more than one on it, so a step that something held up hardly matters. The line
    is found by weighing squares anew until they count as their roots would: I. Daubechies et al., "Iteratively
    reweighted least squares minimization for sparse recovery", CPAM 2010, for the method.

    Args:
        features: how many numbers describe a sample; the first is always 1.
        kinds: of samples. A kind is forgotten only as others of the same kind come, so a rare kind is remembered.
        window: how many samples of a kind count.
        ridge: this share of each feature's own squares holds its part back. Features that only ever occurred together
            then share what they explain.
    """

    def __init__(self, features: int, kinds: int, window: int, ridge: float) -> None:
        self._window, self._ridge = window, ridge
        self._samples = np.zeros((kinds, window, features))
        self._values, self._times = np.zeros((kinds, window)), np.zeros((kinds, window))
        self._noted = [0] * kinds
        self._parts: Floats | None = np.zeros(features)

    def note(self, sample: Floats, value: float, times: int, kind: int) -> None:
        """Take a sample in that occurred ``times`` times."""
        place = self._noted[kind] % self._window
        self._noted[kind] += 1
        self._samples[kind, place], self._values[kind, place], self._times[kind, place] = sample, value, times
        self._parts = None

    def parts(self) -> Floats:
        """Return how much of the value belongs to one unit of each feature; all 0 before the first sample."""
        if self._parts is None:
            used = self._times > 0
            samples, values, times = self._samples[used], self._values[used], self._times[used]
            near = _EXACT * float(np.median(values)) + 1e-12
            weights = times
            for _ in range(_ROUNDS):
                weighted = samples.T * weights
                squares = weighted @ samples
                squares += self._ridge * np.diag(np.diag(squares)) + _PRIOR * np.eye(len(squares))
                self._parts = _least_squares(squares, weighted @ values)
                weights = times * near / np.maximum(np.abs(samples @ self._parts - values), near)
        assert self._parts is not None
        return self._parts


class StepTimeEstimator:
    """A line through the durations of recent steps: so much for a step, for a token of prefill, and for a decode.

    It needs no profile, so a live engine and a simulated one decide by the same rule. Before the first steps it says 0.
    """

    def __init__(self) -> None:
        self._fit = OnlineFit(features=3)

    def note(self, prefill_tokens: int, decodes: int, duration_s: float) -> None:
        """Take a step in."""
        self._fit.note((1.0, prefill_tokens, decodes), duration_s)

    @property
    def is_known(self) -> bool:
        """Whether there have been steps."""
        return self._fit.is_known

    def step_s(self, prefill_tokens: float, decodes: float) -> float:
        """Return about how long a step takes."""
        base_s, prefill_s, decode_s = self._fit.parts().tolist()
        return float(base_s + prefill_s * prefill_tokens + decode_s * decodes)

    def alone_s(self, input_tokens: float, output_tokens: float) -> float:
        """Return about how long a request takes that has the engine for itself."""
        return self.step_s(input_tokens, 0) + (output_tokens - 1) * self.step_s(0, 1)
