"""Whole clusters of real engine processes on this machine."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from pathlib import Path

import msgspec

from lorikeet.client.local_host import LocalHost
from lorikeet.client.supervisor import EngineHost
from lorikeet.cluster.adapters.transport import LocalTransport
from lorikeet.cluster.controller.client import ClusterClient
from lorikeet.cluster.controller.parts import ClusterCosts, ClusterPolicies, ClusterProcesses
from lorikeet.cluster.controller.request_moves import KvBandwidth
from lorikeet.cluster.migration.problem import MoveTimes
from lorikeet.cluster.open import open_cluster
from lorikeet.cluster.placement.service import PlacementService
from lorikeet.cluster.routing.base import RoutingPolicy
from lorikeet.config import ClusterSettings, Settings
from lorikeet.core.ids import ReplicaId


def replicas_of(settings: Settings, count: int) -> Settings:
    """Return the same for a cluster of so many replicas."""
    return msgspec.structs.replace(settings, cluster=ClusterSettings(replicas=count))


KV_STAYS = MoveTimes(lambda tokens: 0.0, inf, 1.0, None)
"""Of moves that take no KV along."""


@asynccontextmanager
async def started(client: ClusterClient) -> AsyncIterator[ClusterClient]:
    """Start a cluster, and close it at the end."""
    try:
        await client.start(lambda progress: None)
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[ClusterClient]:
    """Open a cluster as a server does, start it, and close it at the end."""
    async with AsyncExitStack() as stack:
        yield await stack.enter_async_context(started(open_cluster(settings, stack)))


def local_client(
    settings: Settings,
    pool_dir: Path,
    service: PlacementService,
    routing: RoutingPolicy,
    hosts: Callable[[ReplicaId], EngineHost] = lambda replica: LocalHost(),
    times: MoveTimes = KV_STAYS,
) -> ClusterClient:
    """Return a client that starts its replicas here, with short periods."""
    processes = ClusterProcesses(hosts, LocalTransport(pool_dir), service)
    return ClusterClient(settings, processes, ClusterPolicies(routing, 0.05), ClusterCosts(times, KvBandwidth()))
