"""What a gateway counts."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lorikeet.gateway.describe import describe
from lorikeet.gateway.head import Head

_OUTCOMES = ("complete", "failed", "left")


class GatewayMetrics:
    """Counters of requests, and gauges of the backends.

    Args:
        head: of the backends.
    """

    def __init__(self, head: Head) -> None:
        self.registry = CollectorRegistry()
        ended = Counter("lorikeet:route_requests", "Requests ended.", ("outcome",), registry=self.registry)
        self._ended = {outcome: ended.labels(outcome=outcome) for outcome in _OUTCOMES}
        self.retried = Counter(
            "lorikeet:route_retries", "Requests begun anew, before any of the answer was sent.", registry=self.registry
        )
        self.continued = Counter(
            "lorikeet:route_continued", "Answers that went on at another backend.", registry=self.registry
        )
        self.registry.register(_Backends(head))

    def ended(self, outcome: str) -> None:
        """Count a request: ``complete``, ``failed``, or ``left`` by its client."""
        self._ended[outcome].inc()

    def page(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


class _Backends(Collector):
    def __init__(self, head: Head) -> None:
        self._head = head

    def collect(self) -> Iterator[Metric]:
        """Yield what is known of each backend."""
        up = GaugeMetricFamily("lorikeet:route_backend_up", "Whether it answers.", labels=["backend"])
        requests = GaugeMetricFamily("lorikeet:route_backend_requests", "Requests there.", labels=["backend"])
        adapters = GaugeMetricFamily("lorikeet:route_backend_adapters", "Adapters loaded.", labels=["backend"])
        changes = CounterMetricFamily(
            "lorikeet:route_adapter_calls", "Calls to load and unload adapters.", labels=["backend", "call"]
        )
        for state in describe(self._head).replicas:
            up.add_metric([state.address], float(state.alive))
            requests.add_metric([state.address], float(state.running + state.waiting))
            adapters.add_metric([state.address], float(state.held))
        for backend in self._head.backends.values():
            for call, count in (("load", backend.loads), ("unload", backend.unloads), ("refused", backend.refusals)):
                changes.add_metric([backend.url, call], float(count))
        yield from (up, requests, adapters, changes)
