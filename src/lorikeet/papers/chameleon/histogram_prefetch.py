"""Implements Chameleon's predictive prefetch (§4.1, §5.3) after "Serverless in the Wild" (Shahrad et al., ATC 2020).

Each adapter has a histogram of the times between its arrivals. The adapter is loaded before the earliest time at which
its next arrival is expected (5th percentile), and kept until the latest (99th percentile).
"""

from collections.abc import Iterator, Sequence

import numpy as np

from lorikeet.memory.policies.base import EvictionPolicy, MemoryView, extend_to_nodes
from lorikeet.memory.policies.queue_prefetch import QueuePrefetch
from lorikeet.memory.tree import Nodes, NodeTransfer, Scores

_BINS = 240
_RANGE = 10.0
"""Range of the histogram in mean gaps; longer gaps are counted in the last bin."""
_EARLIEST, _LATEST = 0.05, 0.99
_GAPS_NEEDED = 10
_ROUNDING_S = 1e-9


class GapHistogram:
    """Counts the times between arrivals of one adapter in a histogram.

    The bin width follows the mean gap. When the mean has doubled, pairs of bins are merged. When the mean has halved,
    each bin is split in two.

    Attributes:
        last_s: time of the last arrival.
        gaps: number of gaps counted.
    """

    def __init__(self, now: float) -> None:
        self.last_s = now
        self.gaps = 0
        self._sum_s = 0.0
        self._first: list[float] = []
        self._counts = np.zeros(0)
        self._width_s = 0.0

    def add(self, now: float) -> None:
        """Count the gap that ends with an arrival at ``now``."""
        gap_s, self.last_s = now - self.last_s, now
        self.gaps += 1
        self._sum_s += gap_s
        if self.gaps <= _GAPS_NEEDED:
            self._first.append(gap_s)
            if self.gaps == _GAPS_NEEDED:
                self._begin()
            return
        self._counts[self._bin(gap_s)] += 1
        self._fit()

    def quantile_s(self, share: float, *, upper: bool) -> float:
        """Return the lower or upper bound of the bin in which the cumulative share of gaps reaches ``share``."""
        reached = int(np.searchsorted(np.cumsum(self._counts), share * self.gaps * (1 - 1e-12)))
        return (reached + upper) * self._width_s

    def _begin(self) -> None:
        self._width_s = self._fitting_width_s()
        self._counts = np.zeros(_BINS)
        for gap_s in self._first:
            self._counts[self._bin(gap_s)] += 1
        self._first = []

    def _fit(self) -> None:
        half = _BINS // 2
        if self._fitting_width_s() > 2 * self._width_s:
            self._width_s *= 2
            self._counts = np.concatenate([self._counts.reshape(half, 2).sum(axis=1), np.zeros(half)])
        elif self._fitting_width_s() < self._width_s / 2:
            self._width_s /= 2
            beyond = self._counts[half:].sum()
            self._counts = np.repeat(self._counts[:half] / 2, 2)
            self._counts[-1] += beyond

    def _fitting_width_s(self) -> float:
        return max(_RANGE * self._sum_s / self.gaps / _BINS, 1e-9)  # all requests may have arrived at the same time

    def _bin(self, gap_s: float) -> int:
        return min(int(gap_s / self._width_s), _BINS - 1)


class HistogramPrefetch(QueuePrefetch):
    """Prefetches the adapters of queued requests, then the adapters with the soonest predicted arrivals.

    Predicted adapters are loaded into free memory only.
    """

    def __init__(self, view: MemoryView, eviction: EvictionPolicy) -> None:
        super().__init__(view, eviction)
        self._gaps: dict[int, GapHistogram] = {}
        self._earliest_s = np.zeros(0, np.float64)
        self._latest_s = np.zeros(0, np.float64)
        self._unused: set[int] = set()

    def targets(self, now: float) -> Iterator[int]:
        """Yield the adapters of the queue, then the adapters whose next arrival is due."""
        yield from super().targets(now)
        coming, begin_s = self._coming(now)
        due = coming[begin_s <= now + _ROUNDING_S]
        for adapter in due[np.argsort(self._earliest_s[due], kind="stable")].tolist():
            if adapter not in self.view.waiting:
                yield adapter

    def due_s(self, now: float) -> float:
        """Return the time at which the load of the next predicted adapter should begin."""
        _, begin_s = self._coming(now)
        return float(np.min(begin_s[begin_s > now + _ROUNDING_S], initial=np.inf))

    def _coming(self, now: float) -> tuple[Nodes, Scores]:
        """Return the expected adapters that are off the device, and the time at which each load should begin."""
        view, tree = self.view, self.view.tree
        expected = np.flatnonzero(self._latest_s >= now)
        away = expected[~tree.on_device[expected] & (tree.moving[expected] == NodeTransfer.NO)]
        return away, self._earliest_s[away] - view.iteration_s - view.load_s(away)

    def evicts_below(self, node: int) -> float:
        """Return the limit of the queue prefetch for adapters of queued requests; -inf for predicted adapters."""
        return super().evicts_below(node) if node in self.view.waiting else -np.inf

    def arrived(self, adapter: int, now: float) -> None:
        """Count the gap, and predict the next arrival."""
        if adapter not in self.view.tree.adapters:
            return
        if adapter in self._unused:
            self._unused.remove(adapter)
            self.eviction.protect(adapter, now)
        gaps = self._gaps.get(adapter)
        if gaps is None:
            self._gaps[adapter] = GapHistogram(now)
            return
        gaps.add(now)
        if gaps.gaps >= _GAPS_NEEDED:
            self._earliest_s = extend_to_nodes(self._earliest_s, self.view.tree, 0.0)
            self._latest_s = extend_to_nodes(self._latest_s, self.view.tree, -np.inf)
            self._earliest_s[adapter] = now + gaps.quantile_s(_EARLIEST, upper=False)
            self._latest_s[adapter] = now + gaps.quantile_s(_LATEST, upper=True)

    def fetched(self, node: int, now: float) -> None:
        """Protect a predicted adapter until the latest time of its expected arrival."""
        if node not in self.view.waiting:
            self._unused.add(node)
            self.eviction.protect(node, float(self._latest_s[node]))

    def forgotten(self, nodes: Sequence[int]) -> None:
        """Drop the histograms of removed adapters."""
        for node in nodes:
            self._gaps.pop(node, None)
            self._unused.discard(node)
            if node < len(self._latest_s):
                self._latest_s[node] = -np.inf
