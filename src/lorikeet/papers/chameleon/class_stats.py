"""Keeps statistics of recent requests, and computes size classes and quotas from them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lorikeet.papers.chameleon.options import MultilevelOptions
from lorikeet.papers.chameleon.quotas import assign_quotas, class_load
from lorikeet.papers.chameleon.size_classes import RequestSize, SizeClasses, find_classes, weighted_sizes
from lorikeet.scheduling.state import StepTimeEstimator


class SlidingWindow:
    """Keeps recent rows of numbers, each with a time.

    Args:
        columns: numbers in a row besides the time.
    """

    def __init__(self, columns: int) -> None:
        self._rows = np.empty((256, columns + 1))
        self._begin = self._end = 0

    def add(self, at_s: float, *values: float) -> None:
        """Append a row. Times must not decrease."""
        if self._end == len(self._rows):
            kept = self._rows[self._begin : self._end]
            grown = np.empty((max(256, 2 * len(kept)), self._rows.shape[1]))
            grown[: len(kept)] = kept
            self._rows, self._begin, self._end = grown, 0, len(kept)
        self._rows[self._end] = (at_s, *values)
        self._end += 1

    def since(self, at_s: float) -> NDArray[np.float64]:
        """Drop all rows before ``at_s``, and return the remaining rows without their times: ``[rows, columns]``."""
        times = self._rows[self._begin : self._end, 0]
        self._begin += int(np.searchsorted(times, at_s))
        return self._rows[self._begin : self._end, 1:]

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._end - self._begin


ONE_CLASS = SizeClasses((0.0,), (), ())


class ClassQuotas(NamedTuple):
    """Holds the quotas of the classes after a refresh.

    Attributes:
        quotas: tokens of each class, smallest requests first.
        feasible: whether every class has at least its least quota.
        longest_run_s: longest run of recently finished requests by class, in seconds. Classes without such requests are
            missing.
    """

    quotas: tuple[int, ...]
    feasible: bool
    longest_run_s: dict[int, float]


class ClassStats:
    """Holds sliding windows of arrivals and ends, and the size classes until the next refresh.

    Args:
        options: options of the queue.
        max_model_len: largest number of tokens in a sequence, which counts as the largest request until classes exist.

    Attributes:
        classes: the current classes.
    """

    def __init__(self, options: MultilevelOptions, max_model_len: int) -> None:
        self._options = options
        self._largest = RequestSize(max_model_len, max_model_len, 1)
        self._arrivals, self._ends = SlidingWindow(3), SlidingWindow(4)
        self._enough = options.least_samples
        self.classes = ONE_CLASS

    def arrived(self, sizes: RequestSize, now: float) -> None:
        """Record the first arrival of a request."""
        self._arrivals.add(now, *sizes)

    def ended(self, sizes: RequestSize, ran_s: float, now: float) -> None:
        """Record a finished request that held its tokens for ``ran_s`` seconds."""
        self._ends.add(now, *sizes, ran_s)

    def has_more_samples(self, now: float) -> bool:
        """Return whether enough requests have arrived recently for a refresh.

        The first classes need a minimum number of requests, and later classes twice the number at the last refresh.
        """
        if len(self._arrivals) < self._enough:
            return False
        return len(self._arrivals.since(now - self._options.refresh_s)) >= self._enough

    def refresh(self, total_tokens: int, step_times: StepTimeEstimator, lasted_s: float, now: float) -> ClassQuotas:
        """Compute classes and quotas from the requests in the windows (spec, sections 5.1 and 6).

        Args:
            total_tokens: tokens to divide.
            step_times: estimator of the duration of steps.
            lasted_s: seconds since the first arrival.
            now: the time.
        """
        options, since_s = self._options, now - self._options.refresh_s
        arrived, ended = self._arrivals.since(since_s), self._ends.since(since_s)
        is_unsure = len(arrived) < options.least_samples
        self._enough = options.least_samples if is_unsure else 2 * len(arrived)
        if is_unsure:
            self.classes = ONE_CLASS
            return ClassQuotas((total_tokens,), True, {0: float(ended[:, 3].max())} if len(ended) else {})
        inputs, outputs = np.percentile(arrived[:, :2], options.maximum_percentile, axis=0)
        self._largest = RequestSize(inputs, outputs, arrived[:, 2].max())
        sizes = weighted_sizes(arrived, self._largest, options.weights)
        self.classes = find_classes(sizes, options.k_rule)
        over_s = max(min(options.refresh_s, lasted_s), 1e-9)
        arrived_in, ended_in = self.classes.of(sizes), np.array(self.of(ended[:, :3]))
        came = [(arrived[arrived_in == n], ended[ended_in == n, 3]) for n in range(len(self.classes.centroids))]
        quotas, feasible = assign_quotas(
            [class_load(*each, over_s, step_times, options.largest_percentile) for each in came],
            total_tokens,
            floor=options.floor,
            share=options.share,
        )
        return ClassQuotas(quotas, feasible, {n: float(ran_s.max()) for n, (_, ran_s) in enumerate(came) if len(ran_s)})

    def of(self, sizes: Sequence[RequestSize] | NDArray[np.float64]) -> list[int]:
        """Return the class of each request from its sizes, ``[requests, 3]``."""
        if not len(sizes) or not self.classes.boundaries:
            return [0] * len(sizes)
        weighted = weighted_sizes(np.asarray(sizes), self._largest, self._options.weights)
        numbers: list[int] = self.classes.of(weighted).tolist()
        return numbers
