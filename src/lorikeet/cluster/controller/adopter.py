"""Adopts replicas whose server is gone, and hands adopted ones back to servers that start."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

import structlog

from lorikeet.client.supervisor import EngineError, EngineHost
from lorikeet.cluster.tasks import BackgroundTasks
from lorikeet.core.ids import ReplicaId

EVERY_S = 1.0
"""Seconds between two looks for replicas without a server."""

log = structlog.get_logger("lorikeet")


class Orphan(NamedTuple):
    """Describes a replica without a server, which this server has claimed.

    Attributes:
        server: name of its last server.
        silent_s: seconds for which it had no server.
        host: returns its host, given the id that the replica has from now on.
    """

    server: str
    silent_s: float
    host: Callable[[ReplicaId], EngineHost]


class Adoption(Protocol):
    """Claims replicas of other servers, and frees replicas for them."""

    async def claim_orphan(self) -> Orphan | None:
        """Claim one replica that has no server; None if there is none."""
        ...

    def wanted(self) -> list[ReplicaId]:
        """Return the replicas that other servers ask for."""
        ...

    async def release(self, replica: ReplicaId) -> None:
        """Free a replica for other servers; its engine goes on.

        Raises:
            OSError: the replica does not answer, or another server has claimed it.
        """
        ...


class Adopts(Protocol):
    """The cluster's client, as far as the adopter needs it."""

    @property
    def is_asleep(self) -> bool:
        """Whether the engines were put to sleep."""
        ...

    async def adopt_replica(self, orphan: Orphan) -> ReplicaId:
        """Take over a claimed replica."""
        ...

    async def hand_back_replica(self, replica_id: ReplicaId) -> None:
        """Empty a replica, and free it for another server."""
        ...


class Adopter:
    """Looks for replicas without a server, each second.

    Args:
        client: the client of the cluster.
        adoption: claims and frees replicas.
    """

    def __init__(self, client: Adopts, adoption: Adoption) -> None:
        self._client = client
        self._adoption = adoption
        self._asked: set[ReplicaId] = set()
        self._tasks = BackgroundTasks()

    async def run(self) -> None:
        """Adopt and hand back, until cancelled."""
        try:
            while True:
                wanted = set(self._adoption.wanted())
                for replica in wanted - self._asked:  # Once for each wish, even if it cannot be fulfilled.
                    self._tasks.run(self._hand_back(replica))
                self._asked = wanted
                orphan = None if self._client.is_asleep else await self._adoption.claim_orphan()
                if orphan is None:
                    await asyncio.sleep(EVERY_S)
                else:
                    self._tasks.run(self._adopt(orphan))  # A replica that hangs must not delay the others.
        finally:
            await self._tasks.close()

    async def _adopt(self, orphan: Orphan) -> None:
        try:
            await self._client.adopt_replica(orphan)
        except EngineError as error:
            log.warning("a replica without a server is lost", reason=str(error))

    async def _hand_back(self, replica: ReplicaId) -> None:
        try:
            await self._client.hand_back_replica(replica)
        except (EngineError, OSError) as error:
            log.warning("replica is not handed back", replica=replica, reason=str(error))
