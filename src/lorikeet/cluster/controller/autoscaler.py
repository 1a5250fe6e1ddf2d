"""Adds and removes replicas as the load asks."""

import asyncio

import structlog

from lorikeet.cluster.controller.client import ClusterClient
from lorikeet.cluster.placement.scaling import ScalingPolicy
from lorikeet.cluster.placement.service import OrchestratorUnavailable, PlacementService
from lorikeet.core.ids import ReplicaId

log = structlog.get_logger("lorikeet")


class Autoscaler:
    """See the module. One replica comes or goes at a time; what fails is told of, and tried again if still wanted.

    Args:
        client: of the cluster.
        placement: knows the load.
        scaling: says how many replicas that takes.
        drain_s: how long requests may go on at a replica that is taken out; then they go on elsewhere.
    """

    def __init__(
        self, client: ClusterClient, placement: PlacementService, scaling: ScalingPolicy, drain_s: float
    ) -> None:
        self._client = client
        self._placement = placement
        self._scaling = scaling
        self._drain_s = drain_s

    async def run(self) -> None:
        """Look after every period of placement, for ever. What fails is logged, and changes nothing."""
        change: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as changes:  # what is under way ends with this
            while True:
                await self._client.period()
                load = await self._load()
                if load is None:
                    continue
                there = self._client.size
                self._client.wanted = wanted = self._scaling.wanted(load, there)
                if wanted != there and (change is None or change.done()):
                    change = changes.create_task(self._change(load, there, wanted))

    async def _load(self) -> float | None:
        """Return the load in replicas, None if it is not known."""
        try:
            return await self._placement.load()
        except OrchestratorUnavailable as error:
            log.warning("the number of replicas stays: the load is not known", reason=str(error))
        except Exception:
            log.exception("the number of replicas stays: the load cannot be asked for")
        return None

    async def _change(self, load: float, there: int, wanted: int) -> None:
        """Come one replica closer to what is wanted."""
        why = {"load": round(load, 2), "replicas": there, "wanted": wanted}
        try:
            if wanted > there:
                log.info("a replica is started for the load", **why)
                replica = await self._client.add_replica()
                log.info("a replica has been started", replica=replica)
            else:
                replica = self._least_busy()
                log.info("a replica is taken out: fewer bear the load", replica=replica, **why)
                await self._client.remove_replica(replica, self._drain_s)
                log.info("a replica has been taken out", replica=replica)
        except Exception:  # whatever it is, the cluster goes on with the replicas that it has
            log.exception("the number of replicas could not be changed", **why)

    def _least_busy(self) -> ReplicaId:
        """Return the staying replica with the fewest requests, of several the youngest. One that is down has none."""
        requests = {member.info.replica: len(member.requests) for member in self._client.fleet.members()}
        return min(reversed(self._client.staying), key=lambda each: requests.get(each, 0))
