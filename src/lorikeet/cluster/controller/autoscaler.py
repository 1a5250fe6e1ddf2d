"""Adds and removes replicas as the load changes."""

import asyncio

import structlog

from lorikeet.cluster.controller.client import ClusterClient
from lorikeet.cluster.placement.scaling import ScalingPolicy
from lorikeet.cluster.placement.service import OrchestratorUnavailable, PlacementService
from lorikeet.core.ids import ReplicaId

log = structlog.get_logger("lorikeet")


class Autoscaler:
    """Adds or removes one replica at a time. A failed change is logged, and repeated if it is still needed.

    Args:
        client: client of the cluster.
        placement: computes the load.
        scaling: decides how many replicas the load needs.
        drain_s: seconds for which requests may continue at a replica that is being removed. After that time the
            requests move to other replicas.
    """

    def __init__(
        self, client: ClusterClient, placement: PlacementService, scaling: ScalingPolicy, drain_s: float
    ) -> None:
        self._client = client
        self._placement = placement
        self._scaling = scaling
        self._drain_s = drain_s

    async def run(self) -> None:
        """Check the load after every placement period. Failures are logged and change nothing."""
        change: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as changes:  # When this method ends, the task group cancels the running change.
            while True:
                await self._client.period()
                load = await self._load()
                if load is None:
                    continue
                size = self._client.size
                self._client.wanted = wanted = self._scaling.wanted(load, size)
                if wanted != size and (change is None or change.done()):
                    change = changes.create_task(self._change(load, size, wanted))

    async def _load(self) -> float | None:
        """Return the load as a number of replicas; None if it is unknown."""
        try:
            return await self._placement.load()
        except OrchestratorUnavailable as error:
            log.warning("number of replicas unchanged: the load is unknown", reason=str(error))
        except Exception:
            log.exception("number of replicas unchanged: the load could not be determined")
        return None

    async def _change(self, load: float, size: int, wanted: int) -> None:
        """Add or remove one replica."""
        why = {"load": round(load, 2), "replicas": size, "wanted": wanted}
        try:
            if wanted > size:
                log.info("adding a replica", **why)
                await self._client.add_replica()
            else:
                replica = self._least_busy()
                log.info("removing a replica", replica=replica, **why)
                await self._client.remove_replica(replica, self._drain_s)
        except Exception:  # Whatever the error is, the cluster continues with its current replicas.
            log.exception("number of replicas could not be changed", **why)

    def _least_busy(self) -> ReplicaId:
        """Return the replica with the fewest requests that is not being removed, the youngest among equals.

        A replica that is down has no requests.
        """
        requests = {member.info.replica: len(member.requests) for member in self._client.fleet.members()}
        return min(reversed(self._client.staying), key=lambda each: requests.get(each, 0))
