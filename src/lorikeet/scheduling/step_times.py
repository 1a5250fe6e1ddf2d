"""Estimates how long steps take, by fits to the durations of recent steps.

No profile of the machine is needed, so a live engine and a simulated one decide by the same rule.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORGET = 0.998
"""Factor by which the weight of a sample falls with each later one: about the last 500 count."""
_PRIOR = 1e-3
_ROUNDS = 8
"""Reweighting rounds of a robust fit."""
_EXACT = 0.01
"""Residual, as a share of the median value, below which a sample counts as exactly on the line."""

Floats = NDArray[np.float64]


def faded(old: Any, new: Any, times: int = 1) -> Any:
    """Return a fading sum after ``new`` was added ``times`` times; see ``FORGET``."""
    weight = FORGET**times
    return weight * old + new * ((1 - weight) / (1 - FORGET))


def _least_squares(squares: Floats, products: Floats) -> Floats:
    """Solve normal equations without negative coefficients: the most negative one is dropped until none is left."""
    parts, used = np.zeros(len(products)), list(range(len(products)))
    while used:
        parts[:] = 0.0
        parts[used] = np.linalg.solve(squares[np.ix_(used, used)], products[used])
        if parts.min() >= 0:
            break
        used.remove(int(parts.argmin()))
    return parts


class OnlineFit:
    """Least squares with non-negative coefficients, in which old samples fade.

    Args:
        features: number of features of a sample; the first is always 1.
    """

    def __init__(self, features: int) -> None:
        self._squares, self._products = _PRIOR * np.eye(features), np.zeros(features)
        self._parts: Floats | None = np.zeros(features)

    def note(self, sample: Sequence[float], value: float) -> None:
        """Add a sample."""
        features = np.array(sample, np.float64)
        self._squares = faded(self._squares, np.outer(features, features))
        self._products = faded(self._products, features * value)
        self._parts = None

    @property
    def is_known(self) -> bool:
        """Whether there have been samples with values above 0."""
        return bool(self._products[0])

    def parts(self) -> Floats:
        """Return the coefficient of each feature; all 0 before the first sample."""
        if self._parts is None:
            self._parts = _least_squares(self._squares, self._products)
        return self._parts


class RobustFit:
    """Least absolute deviations with non-negative coefficients, over the last samples of each kind.

    An outlier has no more influence than a sample on the line, so a delayed step hardly matters. The method is
    iteratively reweighted least squares: I. Daubechies et al., "Iteratively reweighted least squares minimization for
    sparse recovery", CPAM 2010.

    Args:
        features: number of features of a sample; the first is always 1.
        kinds: number of kinds of samples. New samples replace only old ones of their kind, so rare kinds are kept.
        window: number of samples kept of each kind.
        ridge: ridge penalty, as a share of each feature's own squares. Features that always occurred together then
            share what they explain.
    """

    def __init__(self, features: int, kinds: int, window: int, ridge: float) -> None:
        self._window, self._ridge = window, ridge
        self._samples = np.zeros((kinds, window, features))
        self._values, self._times = np.zeros((kinds, window)), np.zeros((kinds, window))
        self._noted = [0] * kinds
        self._parts: Floats | None = np.zeros(features)

    def note(self, sample: Floats, value: float, times: int, kind: int) -> None:
        """Add a sample that occurred ``times`` times."""
        place = self._noted[kind] % self._window
        self._noted[kind] += 1
        self._samples[kind, place], self._values[kind, place], self._times[kind, place] = sample, value, times
        self._parts = None

    def parts(self) -> Floats:
        """Return the coefficient of each feature; all 0 before the first sample."""
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
    """A linear fit of recent step times: a cost per step, per prefill token, and per decode.

    It returns 0 before the first step.
    """

    def __init__(self) -> None:
        self._fit = OnlineFit(features=3)

    def note(self, prefill_tokens: int, decodes: int, duration_s: float) -> None:
        """Add the duration of a step."""
        self._fit.note((1.0, prefill_tokens, decodes), duration_s)

    @property
    def is_known(self) -> bool:
        """Whether there have been steps."""
        return self._fit.is_known

    def step_s(self, prefill_tokens: float, decodes: float) -> float:
        """Return the expected seconds of a step."""
        base_s, prefill_s, decode_s = self._fit.parts().tolist()
        return float(base_s + prefill_s * prefill_tokens + decode_s * decodes)

    def alone_s(self, input_tokens: float, output_tokens: float) -> float:
        """Return the expected seconds of a request that runs alone."""
        return self.step_s(input_tokens, 0) + (output_tokens - 1) * self.step_s(0, 1)
