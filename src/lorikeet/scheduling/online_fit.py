"""Lines through what was measured lately, for models of time that need no profile."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORGET = 0.998
"""Weight of a step beside the one after it: about the last 500 count."""
_PRIOR = 1e-3


def faded(old: Any, new: Any, times: int = 1) -> Any:
    """Return a sum whose older parts count less, after ``new`` was added ``times`` times."""
    weight = FORGET**times
    return weight * old + new * ((1 - weight) / (1 - FORGET))


class OnlineFit:
    """Least squares without parts below zero, in which old samples count less and less.

    Args:
        features: how many numbers describe a sample; the first is always 1.
        kinds: of samples. A kind fades only as others of the same kind come, so a rare kind is remembered.
        ridge: this share of each feature's own squares holds its part back. Features that only ever occurred together
            then share what they explain; with 0 such a case is undetermined.
    """

    def __init__(self, features: int, kinds: int = 1, ridge: float = 0.0) -> None:
        self._ridge = ridge
        self._squares = [_PRIOR * np.eye(features) for _ in range(kinds)]
        self._products = [np.zeros(features) for _ in range(kinds)]
        self._parts: NDArray[np.float64] | None = np.zeros(features)

    def note(self, sample: Sequence[float] | NDArray[np.float64], value: float, times: int = 1, kind: int = 0) -> None:
        """Take a sample in that occurred ``times`` times."""
        features = np.array(sample, np.float64)
        self._squares[kind] = faded(self._squares[kind], np.outer(features, features), times)
        self._products[kind] = faded(self._products[kind], features * value, times)
        self._parts = None

    def is_known(self, kind: int = 0) -> bool:
        """Whether there have been samples of a kind, with values above 0."""
        return bool(self._products[kind][0])

    def parts(self) -> NDArray[np.float64]:
        """Return how much of the value belongs to one unit of each feature; all 0 before the first sample."""
        if self._parts is None:
            squares, products = np.sum(self._squares, axis=0), np.sum(self._products, axis=0)
            squares = squares + self._ridge * np.diag(np.diag(squares))
            parts, used = np.zeros(len(products)), list(range(len(products)))
            while used:  # the worst leaves until no part is below zero
                parts[:] = 0.0
                parts[used] = np.linalg.solve(squares[np.ix_(used, used)], products[used])
                if parts.min() >= 0:
                    break
                used.remove(int(parts.argmin()))
            self._parts = parts
        return self._parts
