"""Adds the replicas of a live cluster to its dispatcher."""

import asyncio
import time
from collections.abc import Callable

import structlog

from lorikeet.cluster.adapters.transport import TransportError
from lorikeet.cluster.controller.adapter_files import AdapterFiles
from lorikeet.cluster.controller.dispatcher import Actions, Dispatcher
from lorikeet.cluster.controller.replica import LiveReplica
from lorikeet.config import EngineSettings

_RETRY_S = 1.0
"""Seconds before the adapters of a replica are listed again after a failure."""

log = structlog.get_logger("lorikeet")


class ReplicaJoiner:
    """Adds replicas to the dispatcher once the adapters in their folders are known.

    Args:
        dispatcher: dispatcher of the cluster.
        files: adapter files of the cluster.
        engine: settings of every replica.
        apply: carries out the dispatcher's actions.
    """

    def __init__(
        self, dispatcher: Dispatcher, files: AdapterFiles, engine: EngineSettings, apply: Callable[[Actions], None]
    ) -> None:
        self._dispatcher = dispatcher
        self._files = files
        self._engine = engine
        self._apply = apply

    async def keep(self, replica: LiveReplica) -> None:
        """Send requests again to a replica whose removal was cancelled."""
        replica.is_leaving = False
        if replica.is_joined:
            self._apply(self._dispatcher.reopen(replica.supervisor.replica, time.monotonic()))
        else:
            await self.join(replica)

    async def join(self, replica: LiveReplica) -> None:
        """Add a replica to the dispatcher.

        If its engine dies during the call, the replica joins when the engine is back.
        """
        while not (replica.is_joined or replica.is_leaving):
            try:
                await self._try(replica)
            except TransportError as error:
                if not replica.supervisor.is_connected:
                    return
                log.warning(
                    "cannot list the adapters of a replica; trying again",
                    replica=replica.supervisor.replica,
                    reason=str(error),
                )
                await asyncio.sleep(_RETRY_S)
            else:
                return

    async def _try(self, replica: LiveReplica) -> None:
        supervisor = replica.supervisor
        copier = self._files.copier
        replica.epoch += 1
        epoch = replica.epoch
        held = await copier.scan(supervisor.replica)
        if not supervisor.is_connected or replica.epoch != epoch or replica.is_leaving:
            return
        supervisor.register_adapters(copier.placed_at(supervisor.replica))
        if self._files.pinned:
            supervisor.pin_adapters(self._files.pinned)
        if self._files.names is not None:
            supervisor.name_adapters(*self._files.names)
        replica.is_joined = True
        self._apply(self._dispatcher.join(replica.info(self._engine), time.monotonic(), held))
