"""Runs the engines of replicas on Ray.

Each replica has an actor, which starts an engine process on the same machine.
"""

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import ray
import ray.exceptions
import structlog

from lorikeet.cluster.adapters.peer import PeerAddress
from lorikeet.cluster.ray.replica_actor import ReplicaActor
from lorikeet.cluster.ray.start import RayError, RayInfo
from lorikeet.core.ids import ReplicaId

START_TIMEOUT_S = 120.0
"""Most seconds until an actor has started, including the search for a machine with enough resources."""

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

    Attributes:
        actor, pid, node_ip: see the arguments.
        returncode: exit code; None while the engine runs, or if it was lost with its actor.
    """

    def __init__(self, actor: Any, pid: int, node_ip: str) -> None:
        self.actor = actor
        self.pid = pid
        self.node_ip = node_ip
        self.returncode: int | None = None
        self._ended = asyncio.ensure_future(self._watch())

    def kill(self) -> None:
        """Kill the engine."""
        self.actor.kill.remote(self.pid)

    async def wait(self) -> int | None:
        """Wait until the engine has ended. Return its exit code; None if its actor or machine was lost."""
        await asyncio.shield(self._ended)
        return self.returncode

    async def _watch(self) -> None:
        try:
            self.returncode = await self.actor.wait.remote(self.pid)
        except ray.exceptions.RayError as error:
            log.warning("Ray actor and its engine are lost", pid=self.pid, node=self.node_ip, reason=reason_of(error))


class RayHost:
    """Starts one replica's engines in a Ray cluster; implements :class:`~lorikeet.client.supervisor.EngineHost`.

    The engines of a replica share an actor while the actor lives. If the actor or its machine is lost, the next start
    creates another actor on any machine with enough resources.

    Args:
        ray_info: Ray cluster of this process.
        replica: replica whose engines this host starts.
        pool_dir: folder for adapters on every machine of the cluster. A relative path is made absolute.
        resources: resources of the replica.
        peer_key: key with which other processes fetch adapters from this replica.
    """

    def __init__(
        self,
        ray_info: RayInfo,
        replica: ReplicaId,
        pool_dir: Path,
        resources: ReplicaResources,
        peer_key: bytes,
    ) -> None:
        self._ray_info = ray_info
        self._replica = replica
        self._pool_dir = str(pool_dir.expanduser().absolute())
        self._resources = resources
        self._peer_key = peer_key
        self._peer: PeerAddress | None = None
        self._actor: Any = None
        self._node_ip = self._node_id = ""

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
                raise RayError(f"replica {self._replica}: {reason_of(error)}") from error
        self._actor = self._new_actor()
        try:
            return await self._start(address, settings)
        except ray.exceptions.RayError as error:
            self.close()
            raise RayError(f"replica {self._replica}: {reason_of(error)}") from error

    def close(self) -> None:
        """Kill the actor and its engine."""
        if self._actor is not None:
            ray.kill(self._actor)
            self._actor = None

    async def _start(self, address: str, settings: bytes) -> RayProcess:
        # An embedded Ray shares the folders of this process; elsewhere this folder may not exist.
        working_dir = str(Path.cwd()) if self._ray_info.is_embedded else ""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                pid = await self._actor.start.remote(address, settings, working_dir)
                place = await self._actor.describe.remote()
        except TimeoutError as error:
            self.close()
            raise RayError(
                f"replica {self._replica}: no machine of the Ray cluster had {self._resources.cpus:g} CPUs and "
                f"{self._resources.gpus:g} GPUs free within {START_TIMEOUT_S:g} s; the cluster has {_cluster_totals()}"
            ) from error
        self._node_ip = place.node_ip
        self._node_id = place.node_id
        self._peer = place.peer
        return RayProcess(self._actor, pid, place.node_ip)

    def _new_actor(self) -> Any:
        options = ray.remote(ReplicaActor).options(
            num_cpus=self._resources.cpus,
            num_gpus=self._resources.gpus,
            max_restarts=0,  # The supervisor restarts the engine, because a new one needs all messages again.
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": environment(self._resources.threads)},
        )
        return options.remote(self._replica, self._pool_dir, self._peer_key)


def environment(threads: int) -> dict[str, str]:
    """Return environment variables for an actor's process and its children.

    By default, Ray runs workers at niceness 15, with one thread for each reserved CPU. These variables set both values,
    whichever way Ray was started.
    """
    return {"RAY_worker_niceness": "0", "OMP_NUM_THREADS": str(threads)}


def cause_of(error: Exception) -> Exception:
    """Return the exception that an actor's method raised. Any other error is returned unchanged."""
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, Exception):
        return error.cause
    return error


def reason_of(error: Exception) -> str:
    """Return the reason of an error, without the stack trace that Ray adds."""
    if (cause := cause_of(error)) is not error:
        return str(cause) or type(cause).__name__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    has_started = not (isinstance(error, ray.exceptions.RayActorError) and error.actor_init_failed)
    return lines[0] if has_started else lines[-1]  # If a start fails, the last line after the trace is the reason.


def _cluster_totals() -> str:
    resources = ray.cluster_resources()
    return f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs in all"
