"""Where Ray runs a replica's engines: an actor for each replica, an engine process beside each actor."""

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import ray
import ray.exceptions
import structlog

from lorikeet.cluster.ray.replica_actor import ReplicaActor
from lorikeet.cluster.ray.start import RayError, RayInfo
from lorikeet.core.ids import ReplicaId

STARTS_WITHIN_S = 120.0
"""So long an actor may take to begin, the search for a machine with room included."""

log = structlog.get_logger("lorikeet")


class ReplicaResources(NamedTuple):
    """What a replica takes of its machine.

    Attributes:
        cpus: that Ray counts for it; less than one is possible.
        gpus: likewise.
        threads: of each rank of its engine, unless the settings say.
    """

    cpus: float
    gpus: float = 0.0
    threads: int = 1


class RayProcess:
    """An engine that an actor runs; an :class:`~lorikeet.client.supervisor.EngineProcess`.

    Args:
        actor: runs it.
        pid: its process id.
        node_ip: of its machine.

    Attributes:
        actor, pid, node_ip: see above.
        returncode: None while it runs, and if it is lost with its actor.
    """

    def __init__(self, actor: Any, pid: int, node_ip: str) -> None:
        self.actor = actor
        self.pid = pid
        self.node_ip = node_ip
        self.returncode: int | None = None
        self._ended = asyncio.ensure_future(self._watch())

    def kill(self) -> None:
        """End it at once."""
        self.actor.kill.remote()

    async def wait(self) -> int | None:
        """Wait until it has ended; return its code, None if it is lost with its actor or its machine."""
        await asyncio.shield(self._ended)
        return self.returncode

    async def _watch(self) -> None:
        try:
            self.returncode = await self.actor.wait.remote(self.pid)
        except ray.exceptions.RayError as error:
            log.warning("a Ray actor is lost with its engine", pid=self.pid, node=self.node_ip, reason=reason_of(error))


class RayHost:
    """Starts one replica's engines in a Ray cluster; an :class:`~lorikeet.client.supervisor.EngineHost`.

    The engines of a replica share an actor as long as that lives; when it or its machine is gone, the next start makes
    another, wherever there is room.

    Args:
        ray_info: the cluster.
        replica: whose.
        pool_dir: folder for adapters on every machine of the cluster; made absolute here.
        resources: that it takes of a machine.
    """

    def __init__(self, ray_info: RayInfo, replica: ReplicaId, pool_dir: Path, resources: ReplicaResources) -> None:
        self._ray_info = ray_info
        self._replica = replica
        self._pool_dir = str(pool_dir.expanduser().absolute())
        self._resources = resources
        self._actor: Any = None
        self._node_ip = ""

    @property
    def address(self) -> str:
        """Address of the machine where its engine ran last, empty before the first."""
        return self._node_ip

    @property
    def actor(self) -> Any:
        """Handle of the replica's actor, None if there is none; it may have died since it was used last."""
        return self._actor

    def bind_address(self) -> str:
        """Return an address that engines of the whole cluster reach, with any free port."""
        return f"tcp://{'127.0.0.1' if self._ray_info.is_embedded else self._ray_info.node_ip}:*"

    async def start(self, address: str, settings: bytes) -> RayProcess:
        """Start an engine; see ``EngineHost``.

        Raises:
            RayError: no machine has room, or the engine cannot be started.
        """
        if self._actor is not None:
            try:
                return await self._start(address, settings)
            except ray.exceptions.RayActorError as error:
                log.warning("a Ray actor has died", replica=self._replica, reason=reason_of(error))
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
        """End the actor, and its engine with it."""
        if self._actor is not None:
            ray.kill(self._actor)
            self._actor = None

    async def _start(self, address: str, settings: bytes) -> RayProcess:
        # An embedded Ray shares the folders of this process; elsewhere this folder may not exist.
        working_dir = str(Path.cwd()) if self._ray_info.is_embedded else ""
        try:
            async with asyncio.timeout(STARTS_WITHIN_S):
                pid = await self._actor.start.remote(address, settings, working_dir)
                place = await self._actor.describe.remote()
        except TimeoutError as error:
            self.close()
            raise RayError(
                f"replica {self._replica}: no machine of the Ray cluster has had {self._resources.cpus:g} CPUs and "
                f"{self._resources.gpus:g} GPUs for it within {STARTS_WITHIN_S:g} s; it has {_total()}"
            ) from error
        self._node_ip = place.node_ip
        return RayProcess(self._actor, pid, place.node_ip)

    def _new_actor(self) -> Any:
        options = ray.remote(ReplicaActor).options(
            num_cpus=self._resources.cpus,
            num_gpus=self._resources.gpus,
            max_restarts=0,  # another engine must be told everything anew, so its supervisor asks for it
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": environment(self._resources.threads)},
        )
        return options.remote(self._replica, self._pool_dir)


def environment(threads: int) -> dict[str, str]:
    """Return variables for an actor's process and what it starts.

    Ray lets workers run at niceness 15 and, where nobody has said otherwise, with as many threads as they have CPUs.
    Here both is said, so that it does not depend on where Ray was started, and how.
    """
    return {"RAY_worker_niceness": "0", "OMP_NUM_THREADS": str(threads)}


def reason_of(error: Exception) -> str:
    """Return what went wrong, without Ray's trace of the other process."""
    if isinstance(error, ray.exceptions.RayTaskError) and error.cause is not None:
        return str(error.cause) or type(error.cause).__name__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    began = not (isinstance(error, ray.exceptions.RayActorError) and error.actor_init_failed)
    return lines[0] if began else lines[-1]  # what kept an actor from beginning stands below a trace


def _total() -> str:
    resources = ray.cluster_resources()
    return f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs in all"
