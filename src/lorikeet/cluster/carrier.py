"""Carries out what the adapter pool asks for: copies between replicas, copies from adapters' own files, deletions."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec
import structlog

from lorikeet.cluster.dispatcher import Provision
from lorikeet.cluster.pool import Fetch
from lorikeet.cluster.tasks import Tasks
from lorikeet.cluster.transport import Transport, TransportError
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.engine.views import CopyCounts

PROVISIONS_AT_ONCE = 4
"""Most copies from adapters' own files under way, which one machine reads."""

log = structlog.get_logger("lorikeet")


class Receiver(Protocol):
    """Hears what came of copies."""

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
        receiver: hears what came of copies.

    Attributes:
        counts: copies so far.
    """

    def __init__(self, transport: Transport, refs: Mapping[AdapterDigest, AdapterRef], receiver: Receiver) -> None:
        self.counts = CopyCounts()
        self._transport = transport
        self._refs = refs
        self._receiver = receiver
        self._placed: dict[tuple[AdapterDigest, ReplicaId], AdapterRef] = {}
        self._locks = defaultdict[tuple[AdapterDigest, ReplicaId], asyncio.Lock](asyncio.Lock)
        self._provisions = asyncio.Semaphore(PROVISIONS_AT_ONCE)
        self._tasks = Tasks()

    def placed(self, adapter: AdapterDigest, replica: ReplicaId) -> AdapterRef:
        """Return an adapter with its files at a replica.

        Raises:
            KeyError: it is not there.
        """
        return self._placed[adapter, replica]

    def placed_at(self, replica: ReplicaId) -> list[AdapterRef]:
        """Return all adapters at a replica."""
        return [ref for (_, where), ref in self._placed.items() if where == replica]

    async def find(self, replica: ReplicaId) -> list[AdapterDigest]:
        """Look anew at what a replica has that just came (back); what its folder has and nobody knows is left alone.

        Raises:
            TransportError: it cannot be asked.
        """
        for key in [key for key in self._placed if key[1] == replica]:
            del self._placed[key]
        for digest, folder in (await self._transport.held(replica)).items():
            if (ref := self._refs.get(digest)) is not None:
                self._placed[digest, replica] = msgspec.structs.replace(ref, folder=folder)
        return [digest for digest, where in self._placed if where == replica]

    def copy(self, copy: Fetch | Provision) -> None:
        """Begin a copy; its receiver hears of its end."""
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
        is_fetch = isinstance(copy, Fetch)
        destination = copy.destination if isinstance(copy, Fetch) else copy.replica
        try:
            async with self._locks[copy.adapter, destination]:
                ref = self._refs[copy.adapter]
                if isinstance(copy, Fetch):
                    placed = await self._transport.copy(ref, copy.source, destination)
                else:
                    async with self._provisions:
                        placed = await self._transport.provide(ref, destination)
                self._placed[copy.adapter, destination] = placed
        except KeyError:
            self._failed(copy, "it was dropped")
        except TransportError as error:
            self._failed(copy, str(error))
        else:
            if is_fetch:
                self.counts.fetches += 1
                self.counts.fetched_bytes += ref.weight_bytes
            else:
                self.counts.provisions += 1
                self.counts.provided_bytes += ref.weight_bytes
            self._receiver.copy_done(copy)

    def _failed(self, copy: Fetch | Provision, reason: str) -> None:
        self.counts.failed += 1
        log.warning("an adapter could not be copied", digest=copy.adapter, reason=reason)
        self._receiver.copy_failed(copy, reason)

    async def _delete(self, adapter: AdapterDigest, replica: ReplicaId, drop: Callable[[], Awaitable[object]]) -> None:
        async with self._locks[adapter, replica]:
            ref = self._placed.pop((adapter, replica), None)
            if ref is None:
                return  # its replica came back without it
            await drop()
            try:
                await self._transport.delete(ref, replica)
            except TransportError as error:
                log.warning("a copy of an adapter could not be deleted", digest=adapter, reason=str(error))
            else:
                self.counts.deletes += 1
