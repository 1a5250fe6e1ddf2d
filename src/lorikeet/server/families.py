"""Makes the metrics of collectors that read somebody's state when somebody scrapes."""

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Values = Iterable[tuple[tuple[str, ...], float]]
"""Values of the labels, and the value that they have."""


class Families:
    """Metrics that share some labels.

    Args:
        labels: of every metric.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)

    def gauge(self, name: str, text: str, value: float, more: Mapping[str, str] | None = None) -> Metric:
        """Return a gauge of one value, with ``more`` labels."""
        more = more or {}
        return self.gauges(name, text, tuple(more), [(tuple(more.values()), value)])

    def gauges(self, name: str, text: str, labels: tuple[str, ...], values: Values) -> Metric:
        """Return a gauge with a value for each choice of ``labels``."""
        return self._fill(GaugeMetricFamily(name, text, labels=[*self._labels, *labels]), values)

    def count(self, name: str, text: str, value: float) -> Metric:
        """Return a counter of one value."""
        return self.counts(name, text, (), [((), value)])

    def counts(self, name: str, text: str, labels: tuple[str, ...], values: Values) -> Metric:
        """Return a counter with a value for each choice of ``labels``."""
        return self._fill(CounterMetricFamily(name, text, labels=[*self._labels, *labels]), values)

    def _fill(self, family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
        for chosen, value in values:
            family.add_metric([*self._labels.values(), *chosen], value)
        return family
