"""The metrics of all replicas on one page, told apart by the label ``engine``, and those of the cluster."""

from collections.abc import Callable, Iterable, Set

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest
from lorikeet.engine.client import Engines
from lorikeet.server.engine_metrics import EngineCollector
from lorikeet.server.families import Families
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


class ClusterCollector(Collector):
    """What a cluster tells of itself as a whole.

    Args:
        client: knows the cluster.
        model_name: label of every metric.
    """

    def __init__(self, client: Engines, model_name: str) -> None:
        self._client = client
        self._make = Families({"model_name": model_name})

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        make, state = self._make, self._client.describe()
        copies = state.copies
        by_state = [
            (("open",), sum(replica.is_open for replica in state.replicas)),
            (("draining",), sum(replica.alive and not replica.is_open for replica in state.replicas)),
            (("down",), sum(not replica.alive for replica in state.replicas)),
        ]
        yield make.gauges("lorikeet:cluster_replicas", "Replicas; those that start are down.", ("state",), by_state)
        if state.wanted is not None:
            yield make.gauge("lorikeet:cluster_replicas_wanted", "Replicas that the load asks for.", state.wanted)
        yield make.gauge("lorikeet:cluster_requests_unrouted", "Requests that wait for a replica.", state.unrouted)
        yield make.count("lorikeet:cluster_requests_moved", "Requests moved between replicas.", state.moves)
        yield make.gauge("lorikeet:cluster_placement_epoch", "Number of the placement.", state.epoch)
        made = [(("replica",), copies.fetches), (("files",), copies.provisions)]
        made_bytes = [(("replica",), copies.fetched_bytes), (("files",), copies.provided_bytes)]
        yield make.counts("lorikeet:cluster_copies", "Copies of adapters to replicas.", ("source",), made)
        yield make.counts("lorikeet:cluster_copied_bytes", "Their bytes.", ("source",), made_bytes)
        yield make.count("lorikeet:cluster_copies_failed", "Copies that failed.", copies.failed)
        yield make.count("lorikeet:cluster_copies_deleted", "Copies deleted.", copies.deletes)
        yield make.gauge("lorikeet:cluster_copies_under_way", "Copies under way.", copies.under_way)
