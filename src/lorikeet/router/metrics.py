"""Reports the state of a router's backends, for ``/v1/cluster`` and as Prometheus metrics."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from lorikeet.client.state import ClusterState, CopyCounts, ReplicaState
from lorikeet.http.connections import ConnectionStats
from lorikeet.observe.collectors import ConnectionCollector
from lorikeet.observe.metrics import metrics_page
from lorikeet.router.backend_router import BackendRouter
from lorikeet.router.backends import Backend


def router_state(backend_router: BackendRouter) -> ClusterState:
    """Return the backends and the placement. Requests of other clients count as running."""
    fleet = backend_router.dispatcher.fleet
    table = backend_router.dispatcher.table
    index = {info.replica: at for at, info in enumerate(fleet.infos())}

    def state(backend: Backend) -> ReplicaState:
        at = index.get(backend.replica)
        return ReplicaState(
            id=backend.replica,
            pid=None,
            address=backend.url,
            alive=backend.is_up,
            is_open=backend.is_open,
            restarts=max(0, backend.epoch),
            running=0 if at is None else int(fleet.loads.requests[at] - fleet.loads.queued[at]),
            waiting=0 if at is None else int(fleet.loads.queued[at]),
            resident=tuple(backend.adapters[name] for name in sorted(backend.adapters)),
            held=len(backend.adapters),
            held_bytes=sum(backend_router.versions[digest].size_bytes for digest in backend.adapters.values()),
            memory_used=None,
            trouble="" if backend.is_up else backend.last_error,
        )

    backends = backend_router.backends.values()
    return ClusterState(
        replicas=tuple(state(backend) for backend in backends),
        unrouted=backend_router.dispatcher.waiting,
        epoch=0 if table is None else table.epoch,
        shares={} if table is None else table.shown,
        copies=CopyCounts(
            provisions=sum(backend.loads for backend in backends),
            failed=sum(backend.refusals for backend in backends),
            deletes=sum(backend.unloads for backend in backends),
        ),
    )


OUTCOMES = ("complete", "refused", "failed", "left")
"""How requests end. Refused ones got a 4xx or 501; left ones were ended by their clients."""


_TENANT_COUNTERS = {
    "requests": "Sequences of the key that have ended.",
    "requests_failed": "Those that failed.",
    "requests_refused": "Sequences that a limit of the key refused.",
    "prompt_tokens": "Tokens of prompts.",
    "generation_tokens": "Tokens of answers.",
}
"""Counters of tenants' keys, under a server's names."""


class RouterMetrics:
    """Holds counters of requests and gauges of the backends.

    Args:
        backend_router: the router of the backends.

    Attributes:
        connections: counts the connections that a limit closed.
    """

    def __init__(self, backend_router: BackendRouter) -> None:
        self.registry = CollectorRegistry()
        ended = Counter("lorikeet:route_requests", "Requests ended.", ("outcome",), registry=self.registry)
        self._ended = {outcome: ended.labels(outcome=outcome) for outcome in OUTCOMES}
        self.retried = Counter(
            "lorikeet:route_retries", "Requests sent again, before any of the answer was sent.", registry=self.registry
        )
        self.continued = Counter(
            "lorikeet:route_continued", "Answers that went on at another backend.", registry=self.registry
        )
        self._split = Counter(
            "lorikeet:split_requests",
            "Requests of a name that is split between versions.",
            ("split", "version", "kind"),
            registry=self.registry,
        )
        self.moved = Counter(
            "lorikeet:route_moved", "Requests sent to another backend, since one was full.", registry=self.registry
        )
        self._tenant = {
            name: Counter(f"lorikeet:tenant_{name}", text, ("tenant",), registry=self.registry)
            for name, text in _TENANT_COUNTERS.items()
        }
        self.registry.register(_Backends(backend_router))
        self.connections = ConnectionStats()
        self.registry.register(ConnectionCollector(self.connections.closed, {}))

    def ended(self, outcome: str) -> None:
        """Count an ended request. ``outcome`` is one of ``OUTCOMES``."""
        self._ended[outcome].inc()

    def count_split(self, split: str, version: str, kind: str) -> None:
        """Count a request of a split. ``kind`` is ``served``, ``shadow``, or ``skipped`` for an unsent copy."""
        self._split.labels(split=split, version=version, kind=kind).inc()

    def tenant_ended(
        self, tenant: str, sequences: int, prompt_tokens: int, generation_tokens: int, *, has_failed: bool
    ) -> None:
        """Count an ended request of a tenant's key."""
        counts = {"requests": sequences, "prompt_tokens": prompt_tokens, "generation_tokens": generation_tokens}
        for name, count in {**counts, "requests_failed": sequences * has_failed}.items():
            self._tenant[name].labels(tenant=tenant).inc(count)

    def tenant_refused(self, tenant: str, sequences: int) -> None:
        """Count a request that a limit of a tenant's key refused."""
        self._tenant["requests_refused"].labels(tenant=tenant).inc(sequences)

    def page(self, accept: str) -> Response:
        """Return a page with all metrics; see :func:`metrics_page`."""
        return metrics_page(self.registry, accept)


class _Backends(Collector):
    """Collects gauges and counters of each backend at every scrape."""

    def __init__(self, backend_router: BackendRouter) -> None:
        self._backend_router = backend_router

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        up = GaugeMetricFamily("lorikeet:route_backend_up", "Whether it answers.", labels=["backend"])
        requests = GaugeMetricFamily("lorikeet:route_backend_requests", "Requests there.", labels=["backend"])
        adapters = GaugeMetricFamily("lorikeet:route_backend_adapters", "Adapters loaded.", labels=["backend"])
        blocks = GaugeMetricFamily(
            "lorikeet:route_backend_kv_blocks", "Blocks of KV there, by its events.", labels=["backend"]
        )
        changes = CounterMetricFamily(
            "lorikeet:route_adapter_calls", "Calls to load and unload adapters.", labels=["backend", "call"]
        )
        failures = CounterMetricFamily(
            "lorikeet:backend_failures", "Failures of a backend.", labels=["backend", "reason"]
        )
        for state in router_state(self._backend_router).replicas:
            up.add_metric([state.address], float(state.alive))
            requests.add_metric([state.address], float(state.running + state.waiting))
            adapters.add_metric([state.address], float(state.held))
        for backend in self._backend_router.backends.values():
            blocks.add_metric([backend.url], float(self._backend_router.kv.blocks(backend.replica)))
            for call, count in (("load", backend.loads), ("unload", backend.unloads), ("refused", backend.refusals)):
                changes.add_metric([backend.url, call], float(count))
            for reason, count in sorted(backend.failures.items()):
                failures.add_metric([backend.url, reason], float(count))
        yield from (up, requests, adapters, blocks, changes, failures)
