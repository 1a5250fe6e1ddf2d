"""Builds the client of a cluster from the settings: local replicas, or replicas that Ray starts."""

import socket
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from lorikeet.adapters.catalog import registry_url
from lorikeet.client.supervisor import LocalHost
from lorikeet.cluster.adapters.folder import TEMPORARY_PREFIX, clear_abandoned_pools
from lorikeet.cluster.adapters.transport import LocalTransport
from lorikeet.cluster.build import ClusterOptions, build_migration, build_placement, build_points, build_router
from lorikeet.cluster.controller.autoscaler import Autoscaler
from lorikeet.cluster.controller.client import ClusterClient
from lorikeet.cluster.controller.co_migration import CoMigrationController
from lorikeet.cluster.controller.registry import ClusterRegistry
from lorikeet.cluster.controller.registry_writer import RegistryWriter
from lorikeet.cluster.controller.request_moves import KvBandwidth
from lorikeet.cluster.placement.operating_points import OperatingPoints
from lorikeet.cluster.placement.orchestrator import Orchestrator
from lorikeet.cluster.placement.scaling import ScalingPolicy
from lorikeet.cluster.placement.service import LocalPlacementService, PlacementService
from lorikeet.config import ReplicaStart, Settings
from lorikeet.core.ids import ReplicaId
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.profile import CostProfile
from lorikeet.presets import Preset, resolve_preset

log = structlog.get_logger("lorikeet")


@dataclass(frozen=True)
class _MakeOrchestrator:
    """Builds the orchestrator, possibly in another process, so it holds plain values only."""

    preset: Preset
    replicas: tuple[ReplicaId, ...]
    profile: CostProfile | None
    options: ClusterOptions
    points: OperatingPoints | None

    def __call__(self, now: float) -> Orchestrator:
        placement = build_placement(self.preset, self.replicas, self.profile, self.options)
        return Orchestrator(placement, now, self.points, self.preset.placement)


def cluster_options(settings: Settings) -> ClusterOptions:
    """Return the options that the policies of a live cluster are built with."""
    engine = settings.engine
    return ClusterOptions(
        ttft_s=settings.server.slo_ttft_s,
        tpot_s=settings.server.slo_tpot_s,
        memory_bytes=engine.memory_bytes * engine.memory_ranks,
        link_bytes_per_s=engine.link_bytes_per_s,
    )


def open_cluster(settings: Settings, stack: AsyncExitStack) -> ClusterClient:
    """Return the client of a cluster that is not started yet.

    Args:
        settings: all settings; ``model.model`` is a folder that exists on every machine.
        stack: closes what was opened here. The caller closes the client first.

    Raises:
        ConfigError: the preset's policies, co-migration or autoscaling lack something that they need.
        ProfileError: unknown profile.
        RayError: Ray cannot be started or joined.
        ValueError: the registry's URL is invalid.
    """
    cluster, (_, preset) = settings.cluster, resolve_preset(settings.engine.preset)
    profile = load_profile(settings.engine.profile) if settings.engine.profile else None
    if profile is not None:
        log.info("policies decide by a profile", profile=profile.name, device=profile.device, model=profile.model)
    options = cluster_options(settings)
    router = build_router(preset, profile, options)
    kv_bandwidth = KvBandwidth()
    migration = build_migration(settings.engine, profile, lambda: kv_bandwidth.bytes_per_s)
    points = build_points(preset, profile, options, "scaling by load") if cluster.max_replicas else None
    replicas = tuple(ReplicaId(f"replica-{number}") for number in range(cluster.replicas))
    make = _MakeOrchestrator(preset, replicas, profile, options, points)
    orchestrator = make(time.monotonic())  # reports wrong settings before anything is started
    make_client = partial(
        ClusterClient,
        settings,
        router=router,
        period_s=preset.placement_period_s,
        prefetch=preset.pool_prefetch,
        kv_bandwidth=kv_bandwidth,
    )
    pool_dir = Path(cluster.pool_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX)))
    clear_abandoned_pools(pool_dir)
    url, identity = cluster.registry_url or registry_url(settings.adapters), _identity(settings)
    registry = ClusterRegistry(url, identity)
    stack.callback(registry.close)
    placement: PlacementService
    if cluster.start is ReplicaStart.LOCAL:
        transport, placement = LocalTransport(pool_dir), LocalPlacementService(orchestrator)
        stack.callback(transport.close)
        client = make_client(hosts=lambda replica: LocalHost(), transport=transport, placement=placement)
    else:
        from lorikeet.cluster.ray.open import open_ray  # Ray is optional, and takes a second to import

        ray_parts = open_ray(settings, pool_dir, make, url, identity, stack)
        placement = ray_parts.placement
        client = make_client(hosts=ray_parts.host, transport=ray_parts.transport, placement=placement)
    client.add_background_task(RegistryWriter(client, registry).run)
    if migration is not None:
        client.add_background_task(CoMigrationController(client, migration).run)
    if cluster.max_replicas:
        scaling = ScalingPolicy(max(1, cluster.min_replicas), cluster.max_replicas)
        client.add_background_task(Autoscaler(client, placement, scaling, settings.server.drain_timeout_s).run)
    return client


def _identity(settings: Settings) -> str:
    """Return the name of this server in a registry that others may share. It stays the same after a restart."""
    return f"{settings.model.model} at {socket.gethostname()}:{settings.server.port}"
