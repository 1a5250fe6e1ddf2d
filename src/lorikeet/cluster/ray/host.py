"""Runs the engines of replicas on Ray.

Each replica has an actor, which starts an engine process on the same machine.
"""

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import ray
import ray.exceptions
import structlog

from lorikeet.cluster.adapters.peer import PeerAddress
from lorikeet.cluster.lease import FIRST_FENCE, FencedOff
from lorikeet.cluster.ray.adoption import NAMESPACE, Claim, RayAdoption
from lorikeet.cluster.ray.errors import cause_of, reason_of
from lorikeet.cluster.ray.replica_actor import ReplicaActor
from lorikeet.cluster.ray.start import RayError, RayInfo
from lorikeet.core.ids import ReplicaId
from lorikeet.core.messages import EngineInput

START_TIMEOUT_S = 120.0
"""Most seconds until an actor has started, including the search for a machine with enough resources."""

_TAKE_S = 10.0
"""Most seconds until the actor of a claimed replica has answered."""

_RELEASE_S = 5.0

log = structlog.get_logger("lorikeet")


class ReplicaResources(NamedTuple):
    """Names the resources of a replica.

    Attributes:
        cpus: CPUs that Ray reserves; may be less than one.
        gpus: GPUs that Ray reserves.
        threads: number of threads of each rank, unless the settings contain a number.
    """

    cpus: float
    gpus: float = 0.0
    threads: int = 1


class RayProcess:
    """Controls an engine that an actor runs; implements :class:`~lorikeet.client.supervisor.EngineProcess`.

    Args:
        actor: handle of the engine's actor.
        pid: process id of the engine.
        node_ip: address of the machine.
        fence: fencing token of this process.

    Attributes:
        actor, pid, node_ip: see the arguments.
        returncode: exit code; None while the engine runs, or if it was lost with its actor.
        is_left: whether another server may own the engine, so that its end is no loss.
    """

    def __init__(self, actor: Any, pid: int, node_ip: str, fence: int = FIRST_FENCE) -> None:
        self.actor = actor
        self._fence = fence
        self.pid = pid
        self.node_ip = node_ip
        self.returncode: int | None = None
        self.is_left = False
        self._ended = asyncio.ensure_future(self._watch())

    def kill(self) -> None:
        """Kill the engine, unless another server has claimed its replica."""
        self.actor.kill.remote(self.pid, self._fence)

    async def wait(self) -> int | None:
        """Wait until the engine has ended. Return its exit code; None if its actor or machine was lost."""
        await asyncio.shield(self._ended)
        return self.returncode

    async def _watch(self) -> None:
        try:
            self.returncode = await self.actor.wait.remote(self.pid)
        except ray.exceptions.RayError as error:
            if not self.is_left:
                reason = reason_of(error)
                log.warning("Ray actor and its engine are lost", pid=self.pid, node=self.node_ip, reason=reason)


class RayHost:
    """Starts one replica's engines in a Ray cluster; implements :class:`~lorikeet.client.supervisor.EngineHost`.

    The engines of a replica share an actor while the actor lives. If the actor or its machine is lost, or another
    server has claimed it, the next start adopts a replica that has no server, or creates another actor on any machine
    with enough resources.

    Args:
        ray_info: Ray cluster of this process.
        replica: replica whose engines this host starts.
        pool_dir: folder for adapters on every machine of the cluster. A relative path is made absolute.
        resources: resources of the replica.
        peer_key: key with which other processes fetch adapters from this replica.
        adoption: finds replicas without a server; None if replicas end with their server.
        claim: a replica that this process has claimed, whose engine the first start takes over. It is spare, and so is
            an actor that replaces it.

    Attributes:
        fence: fencing token of this process.
    """

    def __init__(
        self,
        ray_info: RayInfo,
        replica: ReplicaId,
        pool_dir: Path,
        resources: ReplicaResources,
        peer_key: bytes,
        adoption: RayAdoption | None = None,
        claim: Claim | None = None,
    ) -> None:
        self.fence = FIRST_FENCE
        self._adoption = adoption
        self._claim = claim
        self._is_spare = claim is not None
        self._name = ""
        self._ray_info = ray_info
        self._replica = replica
        self._pool_dir = str(pool_dir.expanduser().absolute())
        self._resources = resources
        self._peer_key = peer_key
        self._peer: PeerAddress | None = None
        self._actor: Any = None
        self._has_lease = False
        self._engine: RayProcess | None = None
        self._node_ip = self._node_id = ""

    @property
    def name(self) -> str:
        """Ray's name of the replica's actor; empty without an actor, or if it ends with this process."""
        return self._name

    @property
    def node_id(self) -> str:
        """Ray's node id of the last engine; empty before the first start."""
        return self._node_id

    @property
    def address(self) -> str:
        """Address of the last engine's machine; empty before the first start."""
        return self._node_ip

    @property
    def peer(self) -> PeerAddress | None:
        """Address at which the replica's adapters can be fetched; None before the first start."""
        return self._peer

    @property
    def actor(self) -> Any:
        """Handle of the replica's actor; None if there is none. The actor may have died since its last use."""
        return self._actor

    def bind_address(self) -> str:
        """Return an address with a free port that engines of the whole cluster can reach."""
        return f"tcp://{self._ray_info.peer_host}:*"

    async def start(self, address: str, settings: bytes) -> RayProcess:
        """Start an engine that connects to ``address``, and write ``settings`` to its standard input.

        Raises:
            RayError: no machine has enough free resources, or the engine cannot be started.
        """
        if self._actor is not None:
            try:
                return await self._start(address, settings)
            except ray.exceptions.RayActorError as error:
                log.warning("Ray actor died", replica=self._replica, reason=reason_of(error))
                self.close()
            except ray.exceptions.RayError as error:
                if not isinstance(cause_of(error), FencedOff):
                    raise RayError(f"replica {self._replica}: {reason_of(error)}") from error
                log.warning("replica belongs to another server now", replica=self._replica, reason=reason_of(error))
                self.forget()
        if (claim := self._claim) is not None:
            self._claim = None
            if (process := await self._take(claim, address, settings)) is not None:
                return process
            raise RayError(f"replica {self._replica}: it was lost while it was adopted from {claim.server}")
        if self._adoption is not None and not self._is_spare:
            found = await self._adoption.find()
            if found is not None and (process := await self._take(found, address, settings)) is not None:
                return process
        self._new_actor()
        try:
            return await self._start(address, settings)
        except ray.exceptions.RayError as error:
            self.close()
            raise RayError(f"replica {self._replica}: {reason_of(error)}") from error

    def close(self) -> None:
        """End the actor and its engine, unless another server owns them."""
        if self._actor is not None:
            if self._adoption is not None and self._has_lease:
                self._adoption.end(self._name, self._actor, self.fence)
            else:  # Nobody else can own it.
                ray.kill(self._actor)
            self.forget()

    def forget(self) -> None:
        """Leave the actor to other servers."""
        if self._adoption is not None:
            self._adoption.leave(self._name, self._actor, self.fence)
        if self._engine is not None:
            self._engine.is_left = True
        self._actor = None
        self._name = ""

    async def release(self) -> None:
        """Free the replica, whose engine goes on, for other servers.

        Raises:
            RayError: the replica does not answer, or another server has claimed it.
        """
        actor = self._actor
        if actor is None:
            raise RayError(f"replica {self._replica}: it was lost")
        self.forget()
        try:
            async with asyncio.timeout(_RELEASE_S):
                await actor.release.remote(self.fence)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise RayError(f"replica {self._replica}: {reason_of(error)}") from error

    async def _take(self, claim: Claim, address: str, settings: bytes) -> RayProcess | None:
        """Take over a claimed replica; None if it cannot be reached."""
        self._actor = claim.actor
        self._name = claim.name
        self._has_lease = True
        self.fence = claim.fence
        key = msgspec.json.decode(settings, type=EngineInput).channel_key
        try:
            async with asyncio.timeout(_TAKE_S):
                pid = await self._actor.attach.remote(address, key, self.fence)
                if pid is not None:
                    await self._describe()
            if pid is None:
                log.warning("adopted replica has no engine; starting one", replica=self._replica)
                return await self._start(address, settings)
        except (ray.exceptions.RayError, TimeoutError, RayError) as error:
            log.warning("replica cannot be adopted", replica=self._replica, reason=reason_of(error))
            self.forget()
            return None
        return self._process(pid)

    async def _start(self, address: str, settings: bytes) -> RayProcess:
        # An embedded Ray shares the folders of this process; elsewhere this folder may not exist.
        working_dir = str(Path.cwd()) if self._ray_info.is_embedded else ""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                pid = await self._actor.start.remote(address, settings, working_dir, self.fence)
                await self._describe()
        except TimeoutError as error:
            self.close()
            raise RayError(
                f"replica {self._replica}: no machine of the Ray cluster had {self._resources.cpus:g} CPUs and "
                f"{self._resources.gpus:g} GPUs free within {START_TIMEOUT_S:g} s; the cluster has {_cluster_totals()}"
            ) from error
        if self._adoption is not None:
            self._adoption.keep(self._name, self._actor, self.fence)
            self._has_lease = True
        return self._process(pid)

    def _process(self, pid: int) -> RayProcess:
        self._engine = RayProcess(self._actor, pid, self._node_ip, self.fence)
        return self._engine

    async def _describe(self) -> None:
        place = await self._actor.describe.remote()
        self._node_ip = place.node_ip
        self._node_id = place.node_id
        self._peer = place.peer

    def _new_actor(self) -> None:
        outlives = {}
        owner = None
        self.fence = FIRST_FENCE
        self._has_lease = False
        if self._adoption is not None:
            self._name = self._adoption.new_name()
            owner = self._adoption.owner._replace(is_spare=self._is_spare)
            outlives = {"name": self._name, "namespace": NAMESPACE, "lifetime": "detached"}
        options = ray.remote(ReplicaActor).options(
            **outlives,
            num_cpus=self._resources.cpus,
            num_gpus=self._resources.gpus,
            max_restarts=0,  # The supervisor restarts the engine, because a new one needs all messages again.
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": environment(self._resources.threads)},
        )
        self._actor = options.remote(self._replica, self._pool_dir, self._peer_key, owner)


def environment(threads: int) -> dict[str, str]:
    """Return environment variables for an actor's process and its children.

    By default, Ray runs workers at niceness 15, with one thread for each reserved CPU. These variables set both values,
    whichever way Ray was started.
    """
    return {"RAY_worker_niceness": "0", "OMP_NUM_THREADS": str(threads)}


def _cluster_totals() -> str:
    resources = ray.cluster_resources()
    return f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs in all"
