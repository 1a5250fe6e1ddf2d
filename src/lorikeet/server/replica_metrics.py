"""The metrics of all replicas on one page, told apart by the label ``engine``."""

from collections.abc import Callable, Iterable, Set

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest
from lorikeet.engine.client import Engines
from lorikeet.server.engine_metrics import EngineCollector
from lorikeet.server.memory_metrics import MemoryCollector


class ReplicasCollector(Collector):
    """What every replica tells of its engine and its memory.

    Args:
        client: knows the replicas; they may come and go.
        labels: of every metric, but for ``engine``.
        adapters_by_digest: gives adapter versions under all their names.
    """

    def __init__(
        self,
        client: Engines,
        labels: dict[str, str],
        adapters_by_digest: Callable[[Set[AdapterDigest]], dict[AdapterDigest, list[AdapterRef]]],
    ) -> None:
        self._client = client
        self._labels = labels
        self._adapters_by_digest = adapters_by_digest

    def collect(self) -> Iterable[Metric]:
        """Return each metric once, with the values of all replicas: a page may not name a metric twice."""
        merged: dict[str, Metric] = {}
        for replica, view in self._client.views.items():
            labels = {**self._labels, "engine": replica}
            for collector in (EngineCollector(view, labels, self._adapters_by_digest), MemoryCollector(view, labels)):
                for metric in collector.collect():
                    merged.setdefault(metric.name, metric)
                    if merged[metric.name] is not metric:
                        merged[metric.name].samples += metric.samples
        return merged.values()
