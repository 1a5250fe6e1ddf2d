"""Builds the parts of a cluster that run on Ray."""

import uuid
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from lorikeet.cluster.adapters.peer import make_peer_key
from lorikeet.cluster.controller.adopter import Orphan
from lorikeet.cluster.controller.parts import ClusterProcesses
from lorikeet.cluster.ray.adoption import Claim, RayAdoption, group_of
from lorikeet.cluster.ray.host import RayHost, ReplicaResources
from lorikeet.cluster.ray.orchestrator_actor import MakeOrchestrator, RayPlacement
from lorikeet.cluster.ray.replica_actor import ReplicaOwner
from lorikeet.cluster.ray.start import start_ray, stop_ray
from lorikeet.cluster.ray.transport import RayTransport
from lorikeet.config import Settings
from lorikeet.core.ids import ReplicaId
from lorikeet.core.machine import usable_cores

_CPU_OVERCOMMIT = 16
"""CPUs that Ray assumes. Engines share cores, so the number is high enough that no added replica is refused."""


def open_ray(
    settings: Settings, pool_dir: Path, make: MakeOrchestrator, registry_url: str, identity: str, stack: AsyncExitStack
) -> ClusterProcesses:
    """Start Ray or join a Ray cluster, and start the orchestrator.

    Args:
        settings: all settings.
        pool_dir: folder for adapters on every machine.
        make: builds the orchestrator.
        registry_url: registry for the orchestrator's state.
        identity: name of this server in the registry.
        stack: closes everything that this function starts.

    Raises:
        RayError: Ray cannot be started or joined.
    """
    cluster = settings.cluster
    cores = len(usable_cores())
    info = start_ray(cluster.ray_address, None if cluster.ray_address else cores * _CPU_OVERCOMMIT)
    stack.callback(stop_ray)
    resources = resources_of(settings, cores if info.is_embedded else None)
    hosts: dict[ReplicaId, RayHost] = {}
    peer_key = make_peer_key()
    transport = RayTransport(hosts, info.peer_host, peer_key)
    stack.callback(transport.close)

    adoption: RayAdoption | None = None
    if cluster.orphan_timeout_s and not info.is_embedded:
        owner = ReplicaOwner(uuid.uuid4().hex, identity, cluster.orphan_timeout_s)
        adoption = RayAdoption(group_of(settings, registry_url), owner, peer_key)
        stack.callback(adoption.close)

    def host(replica: ReplicaId, claim: Claim | None = None) -> RayHost:
        hosts[replica] = RayHost(info, replica, pool_dir, resources, peer_key, adoption, claim)
        return hosts[replica]

    by_replica = None if adoption is None else ReplicaAdoption(adoption, hosts, host)

    placement = RayPlacement(make, registry_url, identity)
    stack.callback(placement.close)
    return ClusterProcesses(host, transport, placement, by_replica)


class ReplicaAdoption:
    """Adopts and frees replicas by their ids; implements ``lorikeet.cluster.controller.adopter.Adoption``.

    Args:
        adoption: claims the replicas' actors.
        hosts: hosts of all replicas.
        host: makes the host of a claimed replica.
    """

    def __init__(
        self,
        adoption: RayAdoption,
        hosts: Mapping[ReplicaId, RayHost],
        host: Callable[[ReplicaId, Claim], RayHost],
    ) -> None:
        self._adoption = adoption
        self._hosts = hosts
        self._host = host

    async def claim_orphan(self) -> Orphan | None:
        """Claim one replica that has no server; None if there is none."""
        claim = await self._adoption.claim()
        if claim is None:
            return None
        return Orphan(claim.server, claim.silent_s, lambda replica: self._host(replica, claim))

    def wanted(self) -> list[ReplicaId]:
        """Return the replicas that other servers ask for."""
        names = self._adoption.wanted
        return [replica for replica, host in self._hosts.items() if host.name in names]

    async def release(self, replica: ReplicaId) -> None:
        """Free a replica for other servers. See ``RayHost.release`` for errors."""
        await self._hosts[replica].release()


def resources_of(settings: Settings, cores: int | None) -> ReplicaResources:
    """Return the resources of each replica.

    Args:
        settings: all settings.
        cores: number of cores, shared among the largest possible number of replicas. None if the machines of the
            cluster are unknown.
    """
    engine = settings.engine
    cluster = settings.cluster
    share = 1.0 if cores is None else cores / max(cluster.replicas, cluster.max_replicas)
    cpus = engine.threads * engine.ranks or share
    gpus = engine.ranks if engine.device == "cuda" else 0
    return ReplicaResources(cpus, gpus, max(1, int(cpus / engine.ranks)))
