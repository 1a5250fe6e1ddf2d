"""Constants from measurements: least squares over relative errors, no constant below zero, with intervals."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from lorikeet.costs.profile import Figure, Fit

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

    def figure(self, constant: int, unit: str) -> Figure:
        """Return one constant as a profile holds it."""
        return Figure(float(self.values[constant]), unit, float(self.errors[constant]))

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


def quality(predicted: Floats, measured: Floats) -> Fit:
    """Return how well predictions meet measurements."""
    total = float(((measured - measured.mean()) ** 2).sum())
    left = float(((measured - predicted) ** 2).sum())
    worst = float((np.abs(predicted - measured) / np.abs(measured)).max())
    return Fit(1 - left / total if total else 0.0, worst, len(measured))
