"""Computes request sizes as in Chameleon, and divides them into classes by one-dimensional k-means."""

import itertools
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class RequestSize(NamedTuple):
    """Holds the three parts of a request's size, in tokens.

    Attributes:
        input_tokens: number of tokens of the prompt.
        output_tokens: expected number of output tokens.
        adapter_tokens: size of the adapter in tokens of KV; 0 for the base model.
    """

    input_tokens: float
    output_tokens: float
    adapter_tokens: float


class SizeWeights(NamedTuple):
    """Holds the weights A, B and C of the weighted request size (spec, section 5).

    The defaults are the paper's values.
    """

    input: float = 0.3
    output: float = 0.5
    adapter: float = 0.2


PAPER_WEIGHTS = SizeWeights()
OUTPUT_ONLY_WEIGHTS = SizeWeights(0.0, 1.0, 0.0)
"""Ablation that uses only the predicted output."""


def weighted_sizes(
    sizes: NDArray[np.float64] | RequestSize, largest: RequestSize, weights: SizeWeights = PAPER_WEIGHTS
) -> NDArray[np.float64]:
    """Return the weighted request sizes, in [0, 1].

    Args:
        sizes: ``[..., 3]``, each row as in ``RequestSize``.
        largest: maxima, which count as 1. Larger values also count as 1.
        weights: weights of the three parts.
    """
    most = np.maximum(np.asarray(largest, np.float64), 1.0)
    shares: NDArray[np.float64] = np.minimum(np.asarray(sizes, np.float64) / most, 1.0) @ np.asarray(weights)
    return shares


MOST_CLASSES = 4
"""K_max, printed in the paper."""
_ELBOW = 0.05
_MOST_POINTS = 256
"""Number of bins of equal width into which samples with more distinct values are gathered first, each bin at its
mean."""


class KRule(StrEnum):
    """Names the rules for choosing the number of classes."""

    ELBOW = "elbow"
    """The smallest number at which one more class reduces the sum of squares by less than 5 % of the sum for one
    class."""
    LEAST_SQUARES = "least-squares"
    """The number with the smallest sum of squares, as printed in the paper.

    This is usually the largest allowed number, because the sum never rises with the number of classes.
    """


class SizeClasses(NamedTuple):
    """Holds the size classes, smallest first.

    Attributes:
        centroids: mean size of each class.
        boundaries: boundaries between classes, halfway between two centroids.
        squares: sum of squares within classes (WCSS) for 1, 2, ... classes.
    """

    centroids: tuple[float, ...]
    boundaries: tuple[float, ...]
    squares: tuple[float, ...]

    def of(self, sizes: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the class of each size, 0 for the smallest. A size on a boundary belongs to the smaller class."""
        return np.searchsorted(self.boundaries, sizes, side="left")


def find_classes(sizes: NDArray[np.float64], rule: KRule, most: int = MOST_CLASSES) -> SizeClasses:
    """Return the optimal classes of ``sizes`` (any order, at least one) by dynamic programming.

    The result is deterministic.
    """
    points, counts = _gathered(sizes)
    squares, centroids = _best_partitions(points, counts, min(most, len(points)))
    number = _choose(squares, rule)
    middles = centroids[number - 1]
    boundaries = tuple((left + right) / 2 for left, right in itertools.pairwise(middles))
    return SizeClasses(middles, boundaries, tuple(squares))


def _gathered(sizes: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    points, counts = np.unique(sizes, return_counts=True)
    if len(points) <= _MOST_POINTS:
        return points, counts.astype(np.float64)
    bins = ((points - points[0]) / (points[-1] - points[0]) * (_MOST_POINTS - 1)).astype(np.int64)
    weight = np.bincount(bins, counts, _MOST_POINTS)
    total = np.bincount(bins, counts * points, _MOST_POINTS)
    used = weight > 0
    return np.divide(total[used], weight[used], dtype=np.float64), np.asarray(weight[used], np.float64)


def _best_partitions(
    points: NDArray[np.float64], counts: NDArray[np.float64], most: int
) -> tuple[list[float], list[tuple[float, ...]]]:
    """Return the least sum of squares for 1 to ``most`` classes, and the centroids that reach it."""
    shifted = points - np.average(points, weights=counts)  # keeps squares small, for precision
    weight, first, second = (np.concatenate(([0.0], np.cumsum(counts * shifted**power))) for power in (0, 1, 2))
    begin, end = np.triu_indices(len(points) + 1, 1)
    cost = np.full((len(points) + 1, len(points) + 1), np.inf)  # of the class [begin, end)
    mass, moment = weight[end] - weight[begin], first[end] - first[begin]
    cost[begin, end] = np.maximum(second[end] - second[begin] - moment**2 / mass, 0.0)
    best, cuts = cost[0], [np.zeros(len(points) + 1, np.int64)]
    squares, centroids = [], []
    for number in range(1, most + 1):
        if number > 1:
            sums = best[:, None] + cost
            cuts.append(sums.argmin(axis=0))
            best = sums.min(axis=0)
        squares.append(float(best[-1]))
        ends = [len(points)]
        for cut in reversed(cuts):
            ends.append(int(cut[ends[-1]]))
        centroids.append(
            tuple(
                float(np.average(points[left:right], weights=counts[left:right]))
                for right, left in sorted(itertools.pairwise(ends))
            )
        )
    return squares, centroids


def _choose(squares: list[float], rule: KRule) -> int:
    one = squares[0]
    tiny = 1e-12 * one
    if rule is KRule.LEAST_SQUARES:
        return next(number for number, value in enumerate(squares, 1) if value <= min(squares) + tiny)
    for number, (now, then) in enumerate(itertools.pairwise(squares), 1):
        if one == 0 or (now - then) / one < _ELBOW:
            return number
    return len(squares)
