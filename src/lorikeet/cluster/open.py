"""Builds the client of a cluster from the settings: local replicas, or replicas that Ray starts."""

import os
import socket
import tempfile
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from lorikeet.adapters.catalog import registry_url
from lorikeet.client.local_host import LocalHost
from lorikeet.cluster.adapters.folder import TEMPORARY_PREFIX, clear_abandoned_pools
from lorikeet.cluster.adapters.transport import LocalTransport
from lorikeet.cluster.build import (
    build_migration,
    build_move_times,
    build_placement,
    build_points,
    build_routing,
    needs_operating_points,
    replica_costs,
)
from lorikeet.cluster.controller.autoscaler import Autoscaler
from lorikeet.cluster.controller.client import ClusterClient
from lorikeet.cluster.controller.co_migration import CoMigrationController
from lorikeet.cluster.controller.learned_costs import LearnedCosts
from lorikeet.cluster.controller.parts import ClusterCosts, ClusterPolicies, ClusterProcesses
from lorikeet.cluster.controller.registry import ClusterRegistry
from lorikeet.cluster.controller.registry_writer import RegistryWriter
from lorikeet.cluster.controller.request_moves import KvBandwidth
from lorikeet.cluster.placement.operating_points import EstimatedPoints
from lorikeet.cluster.placement.orchestrator import Orchestrator
from lorikeet.cluster.placement.scaling import ScalingPolicy
from lorikeet.cluster.placement.service import LocalPlacementService
from lorikeet.cluster.setup import GENERIC, ClusterOptions
from lorikeet.config import ReplicaStart, Settings
from lorikeet.core.ids import ReplicaId
from lorikeet.core.machine import gpu_models
from lorikeet.costs.catalog import load_profile
from lorikeet.costs.profile import CostProfile
from lorikeet.costs.replica_estimates import estimate_costs, estimate_memory_bytes
from lorikeet.memory.sizing import stored_geometry
from lorikeet.models.config import read_model_config
from lorikeet.presets import Preset, resolve_preset

log = structlog.get_logger("lorikeet")


@dataclass(frozen=True)
class _MakeOrchestrator:
    """Builds the orchestrator, possibly in another process. So all fields are plain values."""

    preset: Preset
    replicas: tuple[ReplicaId, ...]
    profile: CostProfile | None
    options: ClusterOptions
    has_points: bool

    def __call__(self, now: float) -> Orchestrator:
        placement = build_placement(self.preset, self.profile, self.options)
        points = build_points(self.preset, self.profile, self.options) if self.has_points else None
        return Orchestrator(placement, self.replicas, now, points, self.preset.placement)


def cluster_options(settings: Settings) -> ClusterOptions:
    """Return the options from which the policies of a live cluster are built.

    Values that a profile would contain are estimated from the model and this machine.

    Raises:
        ModelConfigError: the model's configuration cannot be read.
    """
    engine = settings.engine
    costs = GENERIC
    memory_bytes = engine.memory_bytes
    token_bytes = 0
    if not engine.profile:
        config = read_model_config(Path(settings.model.model))
        geometry = stored_geometry(engine, config.geometry(dtype_bytes=2))
        replicas = max(settings.cluster.replicas, settings.cluster.max_replicas)
        cores = engine.threads or max(1, (os.cpu_count() or 1) // replicas)
        gpus = gpu_models()
        ranks = engine.ranks
        costs = estimate_costs(geometry, config.vocab_size, engine.device, cores, gpus, ranks)
        memory_bytes = memory_bytes or estimate_memory_bytes(geometry, config.vocab_size, engine.device, gpus, ranks)
        token_bytes = geometry.token_bytes
    return ClusterOptions(
        ttft_s=settings.server.slo_ttft_s,
        tpot_s=settings.server.slo_tpot_s,
        memory_bytes=memory_bytes * engine.memory_ranks,
        kv_token_bytes=token_bytes,
        link_bytes_per_s=engine.link_bytes_per_s,
        costs=costs,
        max_batch=engine.max_num_seqs,
        has_default_slo=True,
    )


def open_cluster(settings: Settings, stack: AsyncExitStack, host: LocalHost | None = None) -> ClusterClient:
    """Return the client of a cluster. The replicas are not started yet.

    Args:
        settings: all settings; ``model.model`` is a folder that exists on every machine.
        stack: closes the resources that this function opens. The caller closes the client first.
        host: host that starts the first local replica; the client closes it.

    Raises:
        ConfigError: the preset's policies, co-migration or autoscaling lack a required value.
        ProfileError: unknown profile.
        RayError: Ray cannot be started or joined.
        ValueError: the registry's URL is invalid.
    """
    cluster = settings.cluster
    (_, preset) = resolve_preset(settings.engine.preset)
    profile = load_profile(settings.engine.profile) if settings.engine.profile else None
    options = cluster_options(settings)
    if profile is not None:
        log.info("policies decide by a profile", profile=profile.name, device=profile.device, model=profile.model)
    else:
        log.info(
            "policies decide by what the replicas measure; until then by a guess from device and model",
            prompt_tokens_per_s=round(1 / options.costs.prefill_token_s),
            decode_ms=round(1e3 * options.costs.decode_step_s(1), 2),
        )
    needs_points = needs_operating_points(preset) or bool(settings.cluster.max_replicas)
    if needs_points and isinstance(build_points(preset, profile, options), EstimatedPoints):
        log.info("operating points are estimated: none were searched with `lorikeet profile --operating-points`")
    routing = build_routing(preset, profile, options)
    kv_bandwidth = KvBandwidth()
    learned = LearnedCosts(replica_costs(preset, profile, options))
    times = build_move_times(
        settings.engine,
        profile,
        lambda: kv_bandwidth.bytes_per_s,
        costs=lambda: learned.costs,
        kv_token_bytes=round(options.kv_token_bytes),
    )
    migration = build_migration(settings.engine, times)
    replicas = tuple(ReplicaId(f"replica-{number}") for number in range(cluster.replicas))
    make = _MakeOrchestrator(preset, replicas, profile, options, bool(cluster.max_replicas))
    orchestrator = make(time.monotonic())  # Wrong settings are reported before any process is started.
    pool_dir = Path(cluster.pool_dir or _temporary_pool(settings, stack))
    clear_abandoned_pools(pool_dir)
    url = cluster.registry_url or registry_url(settings.adapters)
    identity = _identity(settings)
    registry = ClusterRegistry(url, identity)
    stack.callback(registry.close)
    if cluster.start is ReplicaStart.LOCAL:
        processes = _local_processes(pool_dir, orchestrator, host, stack)
    else:
        from lorikeet.cluster.ray.open import open_ray  # Ray is optional, and its import takes a second

        processes = open_ray(settings, pool_dir, make, url, identity, stack)
    client = ClusterClient(
        settings,
        processes,
        ClusterPolicies(routing, preset.placement_period_s, preset.pool_prefetch, preset.pool_share),
        ClusterCosts(times, kv_bandwidth, learned),
    )
    client.add_background_task(RegistryWriter(client, registry).run)
    if migration is not None:
        client.add_background_task(CoMigrationController(client, migration).run)
    if cluster.max_replicas:
        scaling = ScalingPolicy(max(1, cluster.min_replicas), cluster.max_replicas)
        client.add_background_task(
            Autoscaler(client, processes.placement, scaling, settings.server.drain_timeout_s).run
        )
    return client


def _temporary_pool(settings: Settings, stack: AsyncExitStack) -> str:
    """Create a temporary folder for adapters. It stays while replicas that outlive this server have copies there."""
    if not (settings.cluster.ray_address and settings.cluster.orphan_timeout_s):
        return stack.enter_context(tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX))
    folder = tempfile.mkdtemp(prefix=TEMPORARY_PREFIX)

    def remove() -> None:
        with suppress(OSError):  # The last replica removes a folder with copies.
            Path(folder).rmdir()

    stack.callback(remove)
    return folder


def _local_processes(
    pool_dir: Path, orchestrator: Orchestrator, host: LocalHost | None, stack: AsyncExitStack
) -> ClusterProcesses:
    """Return the parts of a cluster whose replicas are processes of this machine; ``host`` runs the first replica."""
    unused = [] if host is None else [host]

    def next_host(replica: ReplicaId) -> LocalHost:
        return unused.pop() if unused else LocalHost()

    transport = LocalTransport(pool_dir)
    stack.callback(transport.close)
    return ClusterProcesses(next_host, transport, LocalPlacementService(orchestrator))


def _identity(settings: Settings) -> str:
    """Return the name of this server in a registry that servers can share. The name stays the same after a restart."""
    return f"{settings.model.model} at {socket.gethostname()}:{settings.server.port}"
