"""Sizes requests as Chameleon does, and divides the sizes into classes."""

import itertools
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class RequestSize(NamedTuple):
    """What the size of a request is made of, in tokens.

    Attributes:
        input_tokens: of its prompt.
        output_tokens: expected of its answer.
        adapter_tokens: KV that would fit where its adapter lies; 0 for the base model.
    """

    input_tokens: float
    output_tokens: float
    adapter_tokens: float


class SizeWeights(NamedTuple):
    """A, B and C of the weighted request size (section 5 of the spec; printed in the paper)."""

    input: float = 0.3
    output: float = 0.5
    adapter: float = 0.2


PAPER_WEIGHTS = SizeWeights()
OUTPUT_ONLY_WEIGHTS = SizeWeights(0.0, 1.0, 0.0)
"""The ablation that looks at the predicted output alone."""


def weighted_sizes(
    sizes: NDArray[np.float64] | RequestSize, largest: RequestSize, weights: SizeWeights = PAPER_WEIGHTS
) -> NDArray[np.float64]:
    """Return the weighted request sizes, in [0, 1].

    Args:
        sizes: ``[..., 3]``, each row as in ``RequestSize``.
        largest: maxima that count as 1; what is above them counts as 1, too.
        weights: of the three parts.
    """
    most = np.maximum(np.asarray(largest, np.float64), 1.0)
    shares: NDArray[np.float64] = np.minimum(np.asarray(sizes, np.float64) / most, 1.0) @ np.asarray(weights)
    return shares


MOST_CLASSES = 4
"""K_max, printed in the paper."""
_ELBOW = 0.05
_MOST_POINTS = 256
"""Samples with more distinct values are first gathered in so many bins of equal width, each at its mean."""


class KRule(StrEnum):
    """How the number of classes is chosen."""

    ELBOW = "elbow"
    """The first after which another class would take less than 5 % of the sum of squares of one class away."""
    LITERAL = "literal"
    """The smallest sum of squares: as many as may be, as it cannot rise with their number."""


class SizeClasses(NamedTuple):
    """Size classes, smallest first.

    Attributes:
        centroids: of the classes.
        boundaries: between them: halfway between two centroids.
        squares: sum of squares within classes (WCSS) with 1, 2, ... of them.
    """

    centroids: tuple[float, ...]
    boundaries: tuple[float, ...]
    squares: tuple[float, ...]

    def of(self, sizes: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the class of each size, 0 for the smallest; one on a boundary belongs to the smaller class."""
        return np.searchsorted(self.boundaries, sizes, side="left")


def find_classes(sizes: NDArray[np.float64], rule: KRule = KRule.ELBOW, most: int = MOST_CLASSES) -> SizeClasses:
    """Return the best classes of ``sizes`` (any order, at least one), by dynamic programming, without chance."""
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
    """Return the least sum of squares, and the centroids that have it, with 1 to ``most`` classes."""
    shifted = points - np.average(points, weights=counts)  # smaller squares lose fewer digits
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
    if rule is KRule.LITERAL:
        return next(number for number, value in enumerate(squares, 1) if value <= min(squares) + tiny)
    for number, (now, then) in enumerate(itertools.pairwise(squares), 1):
        if one == 0 or (now - then) / one < _ELBOW:
            return number
    return len(squares)
