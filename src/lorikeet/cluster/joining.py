"""Takes replicas in when their engines have started, and anew when they are not to leave after all."""

import asyncio
import time
from collections.abc import Callable

import structlog

from lorikeet.cluster.actions import Actions
from lorikeet.cluster.adapter_files import AdapterFiles
from lorikeet.cluster.dispatcher import Dispatcher
from lorikeet.cluster.replica import Replica
from lorikeet.cluster.transport import TransportError
from lorikeet.config import EngineSettings

_AGAIN_S = 1.0

log = structlog.get_logger("lorikeet")


class Joining:
    """See the module.

    Args:
        dispatcher: hears of those that are there.
        files: knows what lies at each.
        engine: settings of theirs.
        do: carries out what the dispatcher then wants.
    """

    def __init__(
        self, dispatcher: Dispatcher, files: AdapterFiles, engine: EngineSettings, do: Callable[[Actions], None]
    ) -> None:
        self._dispatcher = dispatcher
        self._files = files
        self._engine = engine
        self._do = do

    async def keep(self, replica: Replica) -> None:
        """Send a replica requests again that was to leave."""
        replica.is_leaving = False
        if replica.is_joined:
            self._do(self._dispatcher.reopen(replica.keeper.replica, time.monotonic()))
        else:
            await self.join(replica)

    async def join(self, replica: Replica) -> None:
        """Send a replica requests from now on; one that dies meanwhile joins when its engine is back."""
        while not (replica.is_joined or replica.is_leaving):
            try:
                await self._try(replica)
            except TransportError as error:
                if not replica.keeper.alive:
                    return
                log.warning("a replica's adapters cannot be listed", replica=replica.keeper.replica, reason=str(error))
                await asyncio.sleep(_AGAIN_S)
            else:
                return

    async def _try(self, replica: Replica) -> None:
        keeper, carrier = replica.keeper, self._files.carrier
        replica.epoch += 1
        epoch = replica.epoch
        held = await carrier.find(keeper.replica)
        if not keeper.alive or replica.epoch != epoch or replica.is_leaving:
            return
        keeper.know(carrier.placed_at(keeper.replica))
        replica.is_joined = True
        self._do(self._dispatcher.join(replica.info(self._engine), time.monotonic(), held))
