"""Carries out what the adapter pool asks for: copies between replicas, copies from adapters' own files, deletions."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol
from weakref import WeakValueDictionary

import msgspec
import structlog

from lorikeet.cluster.actions import Provision
from lorikeet.cluster.placed_copies import PlacedCopies
from lorikeet.cluster.pool import Fetch
from lorikeet.cluster.tasks import Tasks
from lorikeet.cluster.transport import DestinationGone, Transport, TransportError
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.engine.views import CopyCounts

PROVISIONS_AT_ONCE = 4
"""Most copies from adapters' own files under way, which one machine reads."""

log = structlog.get_logger("lorikeet")


class Receiver(Protocol):
    """Hears what came of copies, but for those whose destination died: it has lost them with all else there."""

    def copy_done(self, copy: Fetch | Provision) -> None:
        """It is there."""
        ...

    def copy_failed(self, copy: Fetch | Provision, reason: str) -> None:
        """It is not."""
        ...


class Carrier:
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
        receiver: Receiver,
    ) -> None:
        self.counts = CopyCounts()
        self._transport = transport
        self._refs = refs
        self._dropped = dropped
        self._receiver = receiver
        self._placed = PlacedCopies()
        self._unknown: dict[AdapterDigest, dict[ReplicaId, str]] = {}  # folders of adapters that are not in the refs
        self._gone: set[ReplicaId] = set()
        self._locks = WeakValueDictionary[tuple[AdapterDigest, ReplicaId], asyncio.Lock]()
        self._provisions = asyncio.Semaphore(PROVISIONS_AT_ONCE)
        self._tasks = Tasks()

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
        """Begin a copy; see ``Receiver`` for its end."""
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
        except DestinationGone as error:
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
            raise DestinationGone(f"{replica} was taken out")

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
