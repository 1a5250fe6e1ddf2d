"""Copies and deletes the adapter files of a live cluster.

:class:`AdapterFiles` carries out the dispatcher's actions: copies between replicas, copies from an adapter's source
files, and deletions. It also reports every outcome to the dispatcher. Operations on one adapter at one replica run one
after the other.
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
from lorikeet.cluster.adapters.transport import CannotStore, DestinationLost, Transport, TransportError
from lorikeet.cluster.controller.dispatcher import MAX_RETIRED, REST_S, Actions, Dispatcher, Provision
from lorikeet.cluster.controller.replica import LiveReplica
from lorikeet.cluster.tasks import BackgroundTasks
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, AdapterName, ReplicaId
from lorikeet.core.request import Request

MAX_CONCURRENT_PROVISIONS = 4
"""Most copies from source files in flight, because this machine reads all of them."""

_DISCARD_TIMEOUT_S = 10.0

log = structlog.get_logger("lorikeet")


class AdapterFiles:
    """Carries out the dispatcher's copies and deletions, and reports the outcomes to the dispatcher.

    Args:
        transport: copies adapters between replicas.
        dispatcher: dispatcher of the cluster.
        replicas: all replicas; read when an operation ends.
        apply: carries out the actions that follow from the end of a copy. The second argument is the reason why
            requests failed.

    Attributes:
        copier: makes the copies.
    """

    def __init__(
        self,
        transport: Transport,
        dispatcher: Dispatcher,
        replicas: Mapping[ReplicaId, LiveReplica],
        apply: Callable[[Actions, str], None],
    ) -> None:
        self._transport = transport
        self._dispatcher = dispatcher
        self._replicas = replicas
        self._apply = apply
        self._refs: dict[AdapterDigest, AdapterRef] = {}
        self._dropped: dict[AdapterDigest, AdapterRef] = {}  # dropped versions, in the order in which they were dropped
        self._retiring = RetiringAdapters()
        self.pinned: tuple[AdapterDigest, ...] = ()
        self.names: tuple[dict[AdapterName, AdapterDigest], str] | None = None
        self.copier = AdapterCopier(transport, self._refs, self._dropped, self)

    def register(self, refs: Iterable[AdapterRef]) -> None:
        """Accept requests for adapters, even if the adapters were dropped before.

        Replicas may still hold copies of them.
        """
        placed = defaultdict[ReplicaId, list[AdapterRef]](list)
        for ref in refs:
            self._refs[ref.digest] = ref
            self._dropped.pop(ref.digest, None)
            found = self.copier.register(ref)
            holders = [each for each in found if each in self._replicas and self._replicas[each].is_joined]
            self._dispatcher.register(ref.digest, holders, ref.weight_bytes)
            self._retiring.cancel(ref.digest)
            for replica_id in holders:
                placed[replica_id].append(self.copier.placed(ref.digest, replica_id))
        for replica_id, at_one in placed.items():
            self._replicas[replica_id].supervisor.register_adapters(at_one)

    def accept(self, ref: AdapterRef) -> None:
        """Accept an adapter that a request uses before the adapter is registered, or after its drop has begun."""
        self._refs.setdefault(ref.digest, ref)
        self._dropped.pop(ref.digest, None)  # A copy of the adapter that appears later is kept.

    def begin_drop(self, digest: AdapterDigest) -> "asyncio.Future[int]":
        """Return a future of the bytes freed on all replicas once the dispatcher has retired an adapter."""
        return self._retiring.begin(digest)

    def carry_out(self, actions: Actions) -> None:
        """Begin the copies and deletions among the dispatcher's actions."""
        for digest, replica_id in actions.deletes:
            self._retiring.deletes(digest, 1)
            task = self.copier.delete(digest, replica_id, partial(self._drop, digest, replica_id))
            task.add_done_callback(partial(self._deleted, digest))
        for fetch in actions.fetches:
            self.copier.copy(fetch)
        for provision in actions.provisions:
            if provision.adapter in self._refs:
                self.copier.copy(provision)
            else:  # A table from before a restart may name adapters that are not registered yet.
                self._apply(self._dispatcher.provision_failed(provision, time.monotonic()), "it is not registered")

    def with_folder(self, request: Request, replica_id: ReplicaId) -> Request:
        """Return a request with its adapter's folder at a replica."""
        if request.adapter is None:
            return request
        placed = self.copier.placed(request.adapter.digest, replica_id)
        adapter = msgspec.structs.replace(request.adapter, folder=placed.folder)
        return msgspec.structs.replace(request, adapter=adapter)

    def end_retired(self) -> None:
        """Delete the state of dropped adapters that no request uses and no replica holds.

        Their digests stay recorded as dropped.
        """
        for digest in self._retiring.ended(self._dispatcher.uses):
            if (ref := self._refs.pop(digest, None)) is not None:
                self._dropped[digest] = ref
            if len(self._dropped) > MAX_RETIRED:
                del self._dropped[next(iter(self._dropped))]

    def lost(self, replica_id: ReplicaId) -> None:
        """Remove a replica that has failed.

        The replica's folder stays on disk, where a restarted server can find the copies.
        """
        self.copier.forget(replica_id)
        self._transport.release(replica_id)

    async def end(self, replica: LiveReplica, *, discard: bool) -> None:
        """Stop a replica. If ``discard`` is true, the replica's copies are deleted first."""
        try:
            if discard:
                await self._discard(replica.supervisor.replica)
        finally:
            await replica.supervisor.close()

    async def leave_running(self, replica: LiveReplica, release: Callable[[ReplicaId], Awaitable[None]]) -> None:
        """Free a replica, which keeps its engine and its copies, for another server."""
        replica_id = replica.supervisor.replica
        self.copier.forget(replica_id)
        try:
            await replica.supervisor.detach()
            await release(replica_id)
        finally:
            self._transport.release(replica_id)

    async def _discard(self, replica_id: ReplicaId) -> None:
        """Delete a replica's folder, if the replica still answers."""
        self.copier.forget(replica_id)
        try:
            async with asyncio.timeout(_DISCARD_TIMEOUT_S):
                await self._transport.discard(replica_id)
        except (TransportError, TimeoutError) as error:
            log.warning("adapter files of a removed replica stay on its machine", reason=str(error))
        finally:
            self._transport.release(replica_id)

    def copy_done(self, copy: Fetch | Provision) -> None:
        """Register the adapter with the engine, and send the requests that waited for it."""
        done = self._dispatcher.fetched(copy) if isinstance(copy, Fetch) else self._dispatcher.provided(copy)
        replica_id = copy.destination if isinstance(copy, Fetch) else copy.replica
        if (replica := self._replicas.get(replica_id)) is not None and replica.is_joined:
            replica.supervisor.register_adapters([self.copier.placed(copy.adapter, replica_id)])
        self._apply(done, "")

    def copy_failed(self, copy: Fetch | Provision, reason: str, *, is_storable: bool = True) -> None:
        """Try another source or another replica, or fail the requests that waited."""
        now = time.monotonic()
        if not is_storable:
            replica_id = copy.destination if isinstance(copy, Fetch) else copy.replica
            if self._dispatcher.rest(replica_id, now):
                log.warning(
                    f"a replica cannot store adapters and gets no new ones for {REST_S:g} s",
                    replica=replica_id,
                    reason=reason,
                )
        if isinstance(copy, Fetch):
            self._apply(self._dispatcher.fetch_failed(copy, is_storable=is_storable), reason)
        else:
            self._apply(self._dispatcher.provision_failed(copy, now, is_storable=is_storable), reason)

    def fail(self, failure: EngineError) -> None:
        """Fail all pending drops."""
        self._retiring.fail(failure)

    async def _drop(self, digest: AdapterDigest, replica_id: ReplicaId) -> None:
        if (replica := self._replicas.get(replica_id)) is not None:
            self._retiring.freed(digest, await replica.drop(digest))

    def _deleted(self, digest: AdapterDigest, task: "asyncio.Task[None]") -> None:
        self._retiring.deletes(digest, -1)
        self.end_retired()


class CopyListener(Protocol):
    """Receives the outcomes of copies, except copies to a destination that died."""

    def copy_done(self, copy: Fetch | Provision) -> None:
        """Handle a copy that has succeeded."""
        ...

    def copy_failed(self, copy: Fetch | Provision, reason: str, *, is_storable: bool = True) -> None:
        """Handle a copy that has failed; ``is_storable`` is false if the destination cannot store any copy."""
        ...


class AdapterCopier:
    """Makes and deletes copies of adapters.

    Operations on one adapter at one replica run one after the other, in the order of the calls.

    Args:
        transport: copies the bytes.
        refs: registered adapters with their source folders; read when a copy begins.
        dropped: adapters that were dropped. Copies of dropped adapters are deleted when they are found.
        listener: receives the outcome of copies.

    Attributes:
        counts: number of copies so far, by outcome.
    """

    def __init__(
        self,
        transport: Transport,
        refs: Mapping[AdapterDigest, AdapterRef],
        dropped: Mapping[AdapterDigest, AdapterRef],
        listener: CopyListener,
    ) -> None:
        self.counts = CopyCounts()
        self._transport = transport
        self._refs = refs
        self._dropped = dropped
        self._listener = listener
        self._placed = ReplicaCopies()
        self._unknown: dict[AdapterDigest, dict[ReplicaId, str]] = {}  # copies of adapters that are not registered yet
        self._removed: set[ReplicaId] = set()
        self._locks = WeakValueDictionary[tuple[AdapterDigest, ReplicaId], asyncio.Lock]()
        self._provisions = asyncio.Semaphore(MAX_CONCURRENT_PROVISIONS)
        self._tasks = BackgroundTasks()

    def placed(self, adapter: AdapterDigest, replica: ReplicaId) -> AdapterRef:
        """Return an adapter with its folder at a replica.

        Raises:
            KeyError: the replica does not hold it.
        """
        return self._placed.get(adapter, replica)

    def placed_at(self, replica: ReplicaId) -> list[AdapterRef]:
        """Return all adapters at a replica."""
        return self._placed.at(replica)

    def pairs(self) -> frozenset[tuple[AdapterDigest, ReplicaId]]:
        """Return all pairs of adapter and replica. The same object is returned until a copy is added or removed."""
        return self._placed.pairs()

    async def scan(self, replica: ReplicaId) -> list[AdapterDigest]:
        """List the adapters in the folder of a replica that has just started or come back.

        Copies of dropped adapters are deleted. Copies of unknown adapters are kept until the adapter is registered; see
        :meth:`register`.

        Raises:
            TransportError: the replica does not answer, or was removed.
        """
        self._check_present(replica)
        self._clear(replica)
        held = await self._transport.held(replica)
        self._check_present(replica)
        for digest, folder in held.items():
            if (ref := self._refs.get(digest)) is not None:
                self._placed.add(msgspec.structs.replace(ref, folder=folder), replica)
            elif (ref := self._dropped.get(digest)) is not None:
                self._tasks.run(self._delete_dropped(ref, replica))
            else:
                self._unknown.setdefault(digest, {})[replica] = folder
        return [ref.digest for ref in self._placed.at(replica)]

    def register(self, ref: AdapterRef) -> list[ReplicaId]:
        """Register an unknown adapter, and return the replicas that hold a copy."""
        found = self._unknown.pop(ref.digest, {})
        for replica, folder in found.items():
            self._placed.add(msgspec.structs.replace(ref, folder=folder), replica)
        return list(found)

    def forget(self, replica: ReplicaId) -> None:
        """Remove a replica that will not come back. The replica receives no more copies."""
        self._removed.add(replica)
        self._clear(replica)

    def copy(self, copy: Fetch | Provision) -> None:
        """Begin a copy; the listener receives its outcome."""
        self.counts.under_way += 1
        self._tasks.run(self._copy(copy))

    def delete(
        self, adapter: AdapterDigest, replica: ReplicaId, drop: Callable[[], Awaitable[object]]
    ) -> "asyncio.Task[None]":
        """Delete a copy, after ``drop`` has removed the adapter from the replica's engine."""
        return self._tasks.run(self._delete(adapter, replica, drop))

    async def close(self) -> None:
        """Cancel the operations in flight."""
        await self._tasks.close()

    async def _copy(self, copy: Fetch | Provision) -> None:
        ref = self._refs.get(copy.adapter)
        try:
            if ref is None:
                raise TransportError(f"adapter {copy.adapter} was dropped")
            await self._transfer(copy, ref)
        except DestinationLost as error:
            self.counts.failed += 1
            log.info("adapter copy ended: its destination is lost", digest=copy.adapter, reason=str(error))
        except CannotStore as error:
            self.counts.failed += 1
            self._listener.copy_failed(copy, str(error), is_storable=False)
        except TransportError as error:
            self.counts.failed += 1
            log.warning("adapter copy failed", digest=copy.adapter, reason=str(error))
            self._listener.copy_failed(copy, str(error))
        except Exception as error:  # Whatever the error is, the waiting requests must not hang.
            self.counts.failed += 1
            log.exception("adapter copy failed unexpectedly", digest=copy.adapter)
            self._listener.copy_failed(copy, repr(error))
        else:
            self._listener.copy_done(copy)
        finally:
            self.counts.under_way -= 1

    async def _transfer(self, copy: Fetch | Provision, ref: AdapterRef) -> None:
        if isinstance(copy, Fetch):
            async with self._lock(copy.adapter, copy.destination):
                self._check_present(copy.destination)
                if copy.source in self._removed:
                    raise TransportError(f"{copy.source} was removed")
                self._place(await self._transport.copy(ref, copy.source, copy.destination), copy.destination)
            self.counts.fetches += 1
            self.counts.fetched_bytes += ref.weight_bytes
        else:
            async with self._lock(copy.adapter, copy.replica), self._provisions:
                self._check_present(copy.replica)
                self._place(await self._transport.provide(ref, copy.replica), copy.replica)
            self.counts.provisions += 1
            self.counts.provided_bytes += ref.weight_bytes
        traffic = self._transport.traffic
        self.counts.peer_bytes = traffic.peer_bytes
        self.counts.disk_bytes = traffic.disk_bytes

    def _lock(self, adapter: AdapterDigest, replica: ReplicaId) -> asyncio.Lock:
        """Return the lock of one adapter at one replica. The lock exists while a task holds it or waits for it."""
        return self._locks.setdefault((adapter, replica), asyncio.Lock())

    def _place(self, ref: AdapterRef, replica: ReplicaId) -> None:
        self._check_present(replica)
        self._placed.add(ref, replica)

    def _clear(self, replica: ReplicaId) -> None:
        self._placed.clear(replica)
        for folders in self._unknown.values():
            folders.pop(replica, None)

    def _check_present(self, replica: ReplicaId) -> None:
        if replica in self._removed:
            raise DestinationLost(f"{replica} was removed")

    async def _delete(self, adapter: AdapterDigest, replica: ReplicaId, drop: Callable[[], Awaitable[object]]) -> None:
        async with self._lock(adapter, replica):
            ref = self._placed.remove(adapter, replica)
            if ref is None:
                return  # The replica was restarted and has lost the copy.
            await drop()
            await self._delete_files(ref, replica)

    async def _delete_dropped(self, ref: AdapterRef, replica: ReplicaId) -> None:
        async with self._lock(ref.digest, replica):
            if (
                ref.digest in self._dropped and replica not in self._removed
            ):  # The adapter is still dropped, and the replica still exists.
                await self._delete_files(ref, replica)

    async def _delete_files(self, ref: AdapterRef, replica: ReplicaId) -> None:
        try:
            await self._transport.delete(ref, replica)
        except TransportError as error:
            log.warning("adapter copy could not be deleted", digest=ref.digest, reason=str(error))
        else:
            self.counts.deletes += 1


class ReplicaCopies:
    """Maps each replica to its adapters and the folders of their copies."""

    def __init__(self) -> None:
        self._refs: dict[ReplicaId, dict[AdapterDigest, AdapterRef]] = {}
        self._pairs: frozenset[tuple[AdapterDigest, ReplicaId]] | None = None  # None after a change.

    def add(self, ref: AdapterRef, replica: ReplicaId) -> None:
        """Record a copy."""
        self._refs.setdefault(replica, {})[ref.digest] = ref
        self._pairs = None

    def get(self, adapter: AdapterDigest, replica: ReplicaId) -> AdapterRef:
        """Return a copy.

        Raises:
            KeyError: the replica does not hold the adapter.
        """
        return self._refs[replica][adapter]

    def at(self, replica: ReplicaId) -> list[AdapterRef]:
        """Return all copies at a replica."""
        return list(self._refs.get(replica, {}).values())

    def pairs(self) -> frozenset[tuple[AdapterDigest, ReplicaId]]:
        """Return all pairs of adapter and replica. The same object is returned until a copy is added or removed."""
        if self._pairs is None:
            self._pairs = frozenset((adapter, replica) for replica, refs in self._refs.items() for adapter in refs)
        return self._pairs

    def remove(self, adapter: AdapterDigest, replica: ReplicaId) -> AdapterRef | None:
        """Remove a copy and return it; None if the replica does not hold it."""
        self._pairs = None
        return self._refs.get(replica, {}).pop(adapter, None)

    def clear(self, replica: ReplicaId) -> None:
        """Remove all copies at a replica."""
        self._pairs = None
        self._refs.pop(replica, None)


class RetiringAdapters:
    """Tracks the adapter versions that are being dropped.

    A drop ends when no request uses the version, no replica holds it, and its last copy has been deleted.
    """

    def __init__(self) -> None:
        self._drops = PendingDrops()
        self._deletes = Counter[AdapterDigest]()
        self._freed_bytes = Counter[AdapterDigest]()

    def begin(self, digest: AdapterDigest) -> "asyncio.Future[int]":
        """Return a future of the bytes freed on all replicas."""
        return self._drops.begin(digest)

    def deletes(self, digest: AdapterDigest, change: int) -> None:
        """Change the number of copies that are being deleted."""
        self._deletes[digest] += change
        if not self._deletes[digest]:
            del self._deletes[digest]

    def freed(self, digest: AdapterDigest, freed_bytes: int) -> None:
        """Add the bytes that a replica's engine has freed."""
        if digest in self._drops:
            self._freed_bytes[digest] += freed_bytes

    def cancel(self, digest: AdapterDigest) -> None:
        """End a drop because the version is registered again.

        The drop's callers get the number of bytes freed so far.
        """
        self._drops.end(digest, self._freed_bytes.pop(digest, 0))

    def ended(self, is_used: Callable[[AdapterDigest], bool]) -> list[AdapterDigest]:
        """Finish the drops of all versions that no replica holds any more, and return these versions."""
        gone = [digest for digest in self._drops if not self._deletes[digest] and not is_used(digest)]
        for digest in gone:
            self.cancel(digest)
        return gone

    def fail(self, failure: EngineError) -> None:
        """Fail all pending drops."""
        self._drops.fail(failure)
