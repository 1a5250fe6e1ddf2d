"""From settings to the client of a cluster."""

import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lorikeet.cluster.build import ClusterOptions, build_placement, build_router
from lorikeet.cluster.client import ClusterClient
from lorikeet.cluster.local_transport import LocalTransport
from lorikeet.cluster.orchestrator import Orchestrator
from lorikeet.cluster.placing import InProcess
from lorikeet.config import ReplicaStart, Settings
from lorikeet.core.ids import ReplicaId
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.profile import CostProfile
from lorikeet.engine.connection import LocalHost
from lorikeet.rows import Row, resolve_row


@dataclass(frozen=True)
class _MakeOrchestrator:
    """Makes the orchestrator, perhaps in another process: plain values."""

    row: Row
    replicas: tuple[ReplicaId, ...]
    profile: CostProfile | None
    options: ClusterOptions

    def __call__(self, now: float) -> Orchestrator:
        return Orchestrator(build_placement(self.row, self.replicas, self.profile, self.options), now)


def open_cluster(settings: Settings, stack: AsyncExitStack) -> ClusterClient:
    """Return the client of a cluster that is not started yet.

    Args:
        settings: all; ``model.model`` is a folder that every machine has.
        stack: releases what was opened here, after the client, which its caller closes.

    Raises:
        ConfigError: the row's policies need something that is not there.
        ProfileError: there is no such profile.
        RayError: Ray cannot be started or joined.
    """
    _, row = resolve_row(settings.engine.row)
    profile = load_profile(settings.engine.profile) if settings.engine.profile else None
    options = ClusterOptions(
        ttft_s=settings.server.slo_ttft_s,
        tpot_s=settings.server.slo_tpot_s,
        memory_bytes=settings.engine.memory_bytes,
        link_bytes_per_s=settings.engine.link_bytes_per_s,
    )
    router = build_router(row, profile, options)
    replicas = tuple(ReplicaId(f"replica-{number}") for number in range(settings.cluster.replicas))
    make = _MakeOrchestrator(row, replicas, profile, options)
    orchestrator = make(time.monotonic())  # what is wrong with the settings is said before anything is started
    client = partial(
        ClusterClient, settings, router=router, period_s=row.placement_period_s, prefetch=row.pool_prefetch
    )
    pool_dir = settings.cluster.pool_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="lorikeet-pool-"))
    if settings.cluster.start is ReplicaStart.LOCAL:
        transport = LocalTransport(Path(pool_dir))
        stack.callback(transport.close)
        return client(hosts=lambda replica: LocalHost(), transport=transport, placement=InProcess(orchestrator))
    from lorikeet.cluster.on_ray.open import open_ray  # Ray is an extra, and takes a second to import

    on_ray = open_ray(settings, Path(pool_dir), make, stack)
    return client(hosts=on_ray.host, transport=on_ray.transport, placement=on_ray.placement)
