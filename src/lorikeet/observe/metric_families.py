"""Builds metrics of Prometheus's library that share labels."""

import math
from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

Values = Iterable[tuple[tuple[str, ...], float]]
"""Pairs of label values and the value of the metric."""


class MetricFamilies:
    """Builds metrics that share labels.

    Args:
        labels: the labels of every metric.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)

    def gauge(self, name: str, text: str, value: float, more: Mapping[str, str] | None = None) -> Metric:
        """Return a gauge of one value, with ``more`` labels."""
        more = more or {}
        return self.gauges(name, text, tuple(more), [(tuple(more.values()), value)])

    def gauges(self, name: str, text: str, labels: tuple[str, ...], values: Values) -> Metric:
        """Return a gauge with a value for each combination of ``labels``."""
        return self._fill(GaugeMetricFamily(name, text, labels=[*self._labels, *labels]), values)

    def count(self, name: str, text: str, value: float) -> Metric:
        """Return a counter of one value."""
        return self.counts(name, text, (), [((), value)])

    def counts(self, name: str, text: str, labels: tuple[str, ...], values: Values) -> Metric:
        """Return a counter with a value for each combination of ``labels``."""
        return self._fill(CounterMetricFamily(name, text, labels=[*self._labels, *labels]), values)

    def histogram(self, name: str, text: str, counts: Mapping[float, int], total: float) -> Metric:
        """Return a histogram from cumulative ``counts`` by upper bound and the sum of all values."""
        return self.histograms(name, text, (), [((), counts, total)])

    def histograms(
        self,
        name: str,
        text: str,
        labels: tuple[str, ...],
        values: Iterable[tuple[tuple[str, ...], Mapping[float, int], float]],
    ) -> Metric:
        """Return a histogram for each combination of ``labels``; see :meth:`histogram` for counts and sum."""
        family = HistogramMetricFamily(name, text, labels=(*self._labels, *labels))
        for chosen, counts, total in values:
            buckets = [("+Inf" if bound == math.inf else str(float(bound)), count) for bound, count in counts.items()]
            family.add_metric((*self._labels.values(), *chosen), buckets, total)
        return family

    def _fill(self, family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
        for chosen, value in values:
            family.add_metric([*self._labels.values(), *chosen], value)
        return family
