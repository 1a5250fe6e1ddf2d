"""The adapter files of a live cluster.

Carries out what the dispatcher asks for: copies between replicas, copies from an adapter's source, and deletions. It
reports the outcome to the dispatcher. Operations on one adapter at one replica run one after the other.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Protocol
from weakref import WeakValueDictionary

import msgspec
import structlog

from lorikeet.client.client import PendingDrops
from lorikeet.client.state import CopyCounts
from lorikeet.client.supervisor import EngineError
from lorikeet.cluster.adapters.pool import Fetch
from lorikeet.cluster.adapters.transport import DestinationLost, Transport, TransportError
from lorikeet.cluster.controller.dispatcher import RETIRED_KNOWN, Actions, Dispatcher, Provision
from lorikeet.cluster.controller.replica import LiveReplica
from lorikeet.cluster.tasks import BackgroundTasks
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.core.request import Request


class RetiringAdapters:
    """A version is dropped when nobody uses or holds it, and the last of its copies has been deleted."""

    def __init__(self) -> None:
        self._drops = PendingDrops()
        self._deletes = Counter[AdapterDigest]()
        self._freed_bytes = Counter[AdapterDigest]()

    def begin(self, digest: AdapterDigest) -> "asyncio.Future[int]":
        """Return what will be the bytes freed on all replicas."""
        return self._drops.begin(digest)

    def deletes(self, digest: AdapterDigest, change: int) -> None:
        """So many more copies are being deleted."""
        self._deletes[digest] += change
        if not self._deletes[digest]:
            del self._deletes[digest]

    def freed(self, digest: AdapterDigest, freed_bytes: int) -> None:
        """A replica's engine has forgotten a version."""
        if digest in self._drops:
            self._freed_bytes[digest] += freed_bytes

    def cancel(self, digest: AdapterDigest) -> None:
        """A version is wanted again: whoever waits for its end hears of what has been freed so far."""
        self._drops.end(digest, self._freed_bytes.pop(digest, 0))

    def ended(self, is_used: Callable[[AdapterDigest], bool]) -> list[AdapterDigest]:
        """Tell those who wait for versions that are gone by now; return these versions."""
        gone = [digest for digest in self._drops if not self._deletes[digest] and not is_used(digest)]
        for digest in gone:
            self.cancel(digest)
        return gone

    def fail(self, failure: EngineError) -> None:
        """Nothing will be dropped any more."""
        self._drops.fail(failure)


class ReplicaCopies:
    """Adapters by replica, each with its files there."""

    def __init__(self) -> None:
        self._refs: dict[ReplicaId, dict[AdapterDigest, AdapterRef]] = {}
        self._pairs: frozenset[tuple[AdapterDigest, ReplicaId]] | None = None  # None: something has changed since

    def add(self, ref: AdapterRef, replica: ReplicaId) -> None:
        """Note a copy."""
        self._refs.setdefault(replica, {})[ref.digest] = ref
        self._pairs = None

    def get(self, adapter: AdapterDigest, replica: ReplicaId) -> AdapterRef:
        """Return a copy.

        Raises:
            KeyError: it is not there.
        """
        return self._refs[replica][adapter]

    def at(self, replica: ReplicaId) -> list[AdapterRef]:
        """Return all copies at a replica."""
        return list(self._refs.get(replica, {}).values())

    def pairs(self) -> frozenset[tuple[AdapterDigest, ReplicaId]]:
        """Return which adapters are at which replicas; the same set until something changes."""
        if self._pairs is None:
            self._pairs = frozenset((adapter, replica) for replica, refs in self._refs.items() for adapter in refs)
        return self._pairs

    def remove(self, adapter: AdapterDigest, replica: ReplicaId) -> AdapterRef | None:
        """Forget a copy and return it, None if it is not there."""
        self._pairs = None
        return self._refs.get(replica, {}).pop(adapter, None)

    def clear(self, replica: ReplicaId) -> None:
        """Forget all copies at a replica."""
        self._pairs = None
        self._refs.pop(replica, None)


PROVISIONS_AT_ONCE = 4
"""Most copies from adapters' own files under way, which one machine reads."""

log = structlog.get_logger("lorikeet")


class CopyListener(Protocol):
    """Hears what came of copies, but for those whose destination died: it has lost them with all else there."""

    def copy_done(self, copy: Fetch | Provision) -> None:
        """It is there."""
        ...

    def copy_failed(self, copy: Fetch | Provision, reason: str) -> None:
        """It is not."""
        ...


class AdapterCopier:
    """See the module. What concerns one adapter at one replica happens one after the other, in the order of the calls.

    Args:
        transport: moves bytes.
        refs: adapters with the files that they were registered with; read when a copy begins.
        dropped: adapters that are wanted no longer; copies of theirs that turn up are deleted.
        receiver: hears what came of copies.

    Attributes:
        counts: copies so far.
    """

    def __init__(
        self,
        transport: Transport,
        refs: Mapping[AdapterDigest, AdapterRef],
        dropped: Mapping[AdapterDigest, AdapterRef],
        receiver: CopyListener,
    ) -> None:
        self.counts = CopyCounts()
        self._transport = transport
        self._refs = refs
        self._dropped = dropped
        self._receiver = receiver
        self._placed = ReplicaCopies()
        self._unknown: dict[AdapterDigest, dict[ReplicaId, str]] = {}  # folders of adapters that are not in the refs
        self._gone: set[ReplicaId] = set()
        self._locks = WeakValueDictionary[tuple[AdapterDigest, ReplicaId], asyncio.Lock]()
        self._provisions = asyncio.Semaphore(PROVISIONS_AT_ONCE)
        self._tasks = BackgroundTasks()

    def placed(self, adapter: AdapterDigest, replica: ReplicaId) -> AdapterRef:
        """Return an adapter with its files at a replica.

        Raises:
            KeyError: it is not there.
        """
        return self._placed.get(adapter, replica)

    def placed_at(self, replica: ReplicaId) -> list[AdapterRef]:
        """Return all adapters at a replica."""
        return self._placed.at(replica)

    def pairs(self) -> frozenset[tuple[AdapterDigest, ReplicaId]]:
        """Return which adapters are at which replicas; the same set until something changes."""
        return self._placed.pairs()

    async def find(self, replica: ReplicaId) -> list[AdapterDigest]:
        """Look anew at what a replica has that just came (back).

        What was dropped is deleted. What nobody has ever known is left alone, until somebody does: see
        :meth:`recognise`.

        Raises:
            TransportError: it cannot be asked, or was taken out.
        """
        self._check_is_there(replica)
        self._clear(replica)
        held = await self._transport.held(replica)
        self._check_is_there(replica)
        for digest, folder in held.items():
            if (ref := self._refs.get(digest)) is not None:
                self._placed.add(msgspec.structs.replace(ref, folder=folder), replica)
            elif (ref := self._dropped.get(digest)) is not None:
                self._tasks.run(self._delete_dropped(ref, replica))
            else:
                self._unknown.setdefault(digest, {})[replica] = folder
        return [ref.digest for ref in self._placed.at(replica)]

    def recognise(self, ref: AdapterRef) -> list[ReplicaId]:
        """Take in an adapter that nobody knew; return the replicas that were found to have it."""
        found = self._unknown.pop(ref.digest, {})
        for replica, folder in found.items():
            self._placed.add(msgspec.structs.replace(ref, folder=folder), replica)
        return list(found)

    def forget(self, replica: ReplicaId) -> None:
        """A replica will not be back: what it had is no longer known, and nothing more is brought there."""
        self._gone.add(replica)
        self._clear(replica)

    def copy(self, copy: Fetch | Provision) -> None:
        """Begin a copy; see ``CopyListener`` for its end."""
        self.counts.under_way += 1
        self._tasks.run(self._copy(copy))

    def delete(
        self, adapter: AdapterDigest, replica: ReplicaId, drop: Callable[[], Awaitable[object]]
    ) -> "asyncio.Task[None]":
        """Delete a copy, after ``drop`` has made its replica's engine forget the adapter."""
        return self._tasks.run(self._delete(adapter, replica, drop))

    async def close(self) -> None:
        """Give up what is under way."""
        await self._tasks.close()

    async def _copy(self, copy: Fetch | Provision) -> None:
        ref = self._refs.get(copy.adapter)
        try:
            if ref is None:
                raise TransportError(f"adapter {copy.adapter} was dropped")
            await self._carry(copy, ref)
        except DestinationLost as error:
            self.counts.failed += 1
            log.info("a copy of an adapter ended with its destination", digest=copy.adapter, reason=str(error))
        except TransportError as error:
            self.counts.failed += 1
            log.warning("an adapter could not be copied", digest=copy.adapter, reason=str(error))
            self._receiver.copy_failed(copy, str(error))
        except Exception as error:  # whatever it is, those who wait must not wait for ever
            self.counts.failed += 1
            log.exception("a copy of an adapter failed in a way that nobody foresaw", digest=copy.adapter)
            self._receiver.copy_failed(copy, repr(error))
        else:
            self._receiver.copy_done(copy)
        finally:
            self.counts.under_way -= 1

    async def _carry(self, copy: Fetch | Provision, ref: AdapterRef) -> None:
        if isinstance(copy, Fetch):
            async with self._lock(copy.adapter, copy.destination):
                self._check_is_there(copy.destination)
                if copy.source in self._gone:
                    raise TransportError(f"{copy.source} was taken out")
                self._place(await self._transport.copy(ref, copy.source, copy.destination), copy.destination)
            self.counts.fetches += 1
            self.counts.fetched_bytes += ref.weight_bytes
        else:
            async with self._lock(copy.adapter, copy.replica), self._provisions:
                self._check_is_there(copy.replica)
                self._place(await self._transport.provide(ref, copy.replica), copy.replica)
            self.counts.provisions += 1
            self.counts.provided_bytes += ref.weight_bytes

    def _lock(self, adapter: AdapterDigest, replica: ReplicaId) -> asyncio.Lock:
        """Return the lock of one adapter at one replica, which lives as long as somebody has it or waits for it."""
        return self._locks.setdefault((adapter, replica), asyncio.Lock())

    def _place(self, ref: AdapterRef, replica: ReplicaId) -> None:
        self._check_is_there(replica)
        self._placed.add(ref, replica)

    def _clear(self, replica: ReplicaId) -> None:
        self._placed.clear(replica)
        for folders in self._unknown.values():
            folders.pop(replica, None)

    def _check_is_there(self, replica: ReplicaId) -> None:
        if replica in self._gone:
            raise DestinationLost(f"{replica} was taken out")

    async def _delete(self, adapter: AdapterDigest, replica: ReplicaId, drop: Callable[[], Awaitable[object]]) -> None:
        async with self._lock(adapter, replica):
            ref = self._placed.remove(adapter, replica)
            if ref is None:
                return  # its replica came back without it
            await drop()
            await self._delete_files(ref, replica)

    async def _delete_dropped(self, ref: AdapterRef, replica: ReplicaId) -> None:
        async with self._lock(ref.digest, replica):
            if ref.digest in self._dropped and replica not in self._gone:  # still
                await self._delete_files(ref, replica)

    async def _delete_files(self, ref: AdapterRef, replica: ReplicaId) -> None:
        try:
            await self._transport.delete(ref, replica)
        except TransportError as error:
            log.warning("a copy of an adapter could not be deleted", digest=ref.digest, reason=str(error))
        else:
            self.counts.deletes += 1


_DISCARDED_WITHIN_S = 10.0


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
        replicas: Mapping[ReplicaId, LiveReplica],
        do: Callable[[Actions, str], None],
    ) -> None:
        self._transport = transport
        self._dispatcher = dispatcher
        self._replicas = replicas
        self._do = do
        self._refs: dict[AdapterDigest, AdapterRef] = {}
        self._dropped: dict[AdapterDigest, AdapterRef] = {}  # in the order in which they were
        self._retiring = RetiringAdapters()
        self.carrier = AdapterCopier(transport, self._refs, self._dropped, self)

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
            self._replicas[replica_id].supervisor.register_adapters(at_one)

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

    async def end(self, replica: LiveReplica, *, discard: bool) -> None:
        """Stop a replica for good, once its copies are deleted if they are not to stay."""
        try:
            if discard:
                await self._discard(replica.supervisor.replica)
        finally:
            await replica.supervisor.close()

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
            replica.supervisor.register_adapters([self.carrier.placed(copy.adapter, replica_id)])
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
