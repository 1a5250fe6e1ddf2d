"""The adapters of a live cluster: their files at replicas, and their end."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import msgspec
import structlog

from lorikeet.cluster.actions import Actions, Provision
from lorikeet.cluster.carrier import Carrier
from lorikeet.cluster.dispatcher import RETIRED_KNOWN, Dispatcher
from lorikeet.cluster.pool import Fetch
from lorikeet.cluster.replica import Replica
from lorikeet.cluster.retiring import Retiring
from lorikeet.cluster.transport import Transport, TransportError
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.core.request import Request
from lorikeet.engine.connection import EngineError

_DISCARDED_WITHIN_S = 10.0

log = structlog.get_logger("lorikeet")


class AdapterFiles:
    """Brings adapters to replicas and deletes them there as a dispatcher asks, and tells it what came of it.

    Args:
        transport: moves adapters between replicas.
        dispatcher: asks.
        replicas: that there are; read when something ends.
        do: carries out what follows from the end of a copy; its second argument says why requests have failed.

    Attributes:
        carrier: makes the copies.
    """

    def __init__(
        self,
        transport: Transport,
        dispatcher: Dispatcher,
        replicas: Mapping[ReplicaId, Replica],
        do: Callable[[Actions, str], None],
    ) -> None:
        self._transport = transport
        self._dispatcher = dispatcher
        self._replicas = replicas
        self._do = do
        self._refs: dict[AdapterDigest, AdapterRef] = {}
        self._dropped: dict[AdapterDigest, AdapterRef] = {}  # in the order in which they were
        self._retiring = Retiring()
        self.carrier = Carrier(transport, self._refs, self._dropped, self)

    def know(self, refs: Iterable[AdapterRef]) -> None:
        """Requests may come for these, perhaps again after they were dropped; replicas may have them from before."""
        placed = defaultdict[ReplicaId, list[AdapterRef]](list)
        for ref in refs:
            self._refs[ref.digest] = ref
            self._dropped.pop(ref.digest, None)
            found = self.carrier.recognise(ref)
            holders = [each for each in found if each in self._replicas and self._replicas[each].is_joined]
            self._dispatcher.know(ref.digest, holders)
            self._retiring.cancel(ref.digest)
            for replica_id in holders:
                placed[replica_id].append(self.carrier.placed(ref.digest, replica_id))
        for replica_id, at_one in placed.items():
            self._replicas[replica_id].keeper.know(at_one)

    def accept(self, ref: AdapterRef) -> None:
        """A request is there for an adapter, perhaps before anybody has made it known, and after its drop has begun."""
        self._refs.setdefault(ref.digest, ref)
        self._dropped.pop(ref.digest, None)  # a copy that turns up may be what it needs

    def begin_drop(self, digest: AdapterDigest) -> "asyncio.Future[int]":
        """Return what will be the bytes freed on all replicas once the dispatcher has retired an adapter."""
        return self._retiring.begin(digest)

    def carry_out(self, actions: Actions) -> None:
        """Begin the copies and deletions among what the dispatcher asks for."""
        for digest, replica_id in actions.deletes:
            self._retiring.deletes(digest, 1)
            task = self.carrier.delete(digest, replica_id, partial(self._drop, digest, replica_id))
            task.add_done_callback(partial(self._deleted, digest))
        for fetch in actions.fetches:
            self.carrier.copy(fetch)
        for provision in actions.provisions:
            if provision.adapter in self._refs:
                self.carrier.copy(provision)
            else:  # a table of before the start names adapters before they are known
                self._do(self._dispatcher.provision_failed(provision, time.monotonic()), "it is not known")

    def with_folder(self, request: Request, replica_id: ReplicaId) -> Request:
        """Return a request with its adapter's files as they lie at a replica."""
        if request.adapter is None:
            return request
        placed = self.carrier.placed(request.adapter.digest, replica_id)
        adapter = msgspec.structs.replace(request.adapter, folder=placed.folder)
        return msgspec.structs.replace(request, adapter=adapter)

    def end_retired(self) -> None:
        """Forget adapters that were dropped and are gone by now, but for copies that come back with their replicas."""
        for digest in self._retiring.ended(self._dispatcher.uses):
            if (ref := self._refs.pop(digest, None)) is not None:
                self._dropped[digest] = ref
            if len(self._dropped) > RETIRED_KNOWN:
                del self._dropped[next(iter(self._dropped))]

    def lost(self, replica_id: ReplicaId) -> None:
        """A replica was given up. Its folder stays as it is: a head that is started anew may find it."""
        self.carrier.forget(replica_id)
        self._transport.release(replica_id)

    async def end(self, replica: Replica, *, discard: bool) -> None:
        """Stop a replica for good, once its copies are deleted if they are not to stay."""
        try:
            if discard:
                await self._discard(replica.keeper.replica)
        finally:
            await replica.keeper.close()

    async def _discard(self, replica_id: ReplicaId) -> None:
        """Delete what a replica has, if it can still be asked to."""
        self.carrier.forget(replica_id)
        try:
            async with asyncio.timeout(_DISCARDED_WITHIN_S):
                await self._transport.discard(replica_id)
        except (TransportError, TimeoutError) as error:
            log.warning("adapters of a replica that was taken out stay on its machine", reason=str(error))
        finally:
            self._transport.release(replica_id)

    def copy_done(self, copy: Fetch | Provision) -> None:
        """Tell the engine there, and send it those who waited."""
        done = self._dispatcher.fetched(copy) if isinstance(copy, Fetch) else self._dispatcher.provided(copy)
        replica_id = copy.destination if isinstance(copy, Fetch) else copy.replica
        if (replica := self._replicas.get(replica_id)) is not None and replica.is_joined:
            replica.keeper.know([self.carrier.placed(copy.adapter, replica_id)])
        self._do(done, "")

    def copy_failed(self, copy: Fetch | Provision, reason: str) -> None:
        """Try another way, or fail those who waited."""
        if isinstance(copy, Fetch):
            self._do(self._dispatcher.fetch_failed(copy), reason)
        else:
            self._do(self._dispatcher.provision_failed(copy, time.monotonic()), reason)

    def fail(self, failure: EngineError) -> None:
        """Nothing will be dropped any more."""
        self._retiring.fail(failure)

    async def _drop(self, digest: AdapterDigest, replica_id: ReplicaId) -> None:
        if (replica := self._replicas.get(replica_id)) is not None:
            self._retiring.freed(digest, await replica.drop(digest))

    def _deleted(self, digest: AdapterDigest, task: "asyncio.Task[None]") -> None:
        self._retiring.deletes(digest, -1)
        self.end_retired()
