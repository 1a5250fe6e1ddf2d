"""Defines the interface that copies adapter files to replicas, and implements it for replicas on one machine.

On one machine each replica has its own folder, and replicas share files by links.
"""

import asyncio
from pathlib import Path
from typing import Protocol

import msgspec

from lorikeet.cluster.adapters.folder import (
    Files,
    PoolFolderError,
    PoolFolderUnwritableError,
    read_files,
)
from lorikeet.cluster.adapters.replica_pool import ReplicaPool, is_in_memory
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, ReplicaId


class TransportError(RuntimeError):
    """A copy could not be made or deleted. The message names the adapter, the replicas and the reason."""


class DestinationLost(TransportError):
    """The destination of a copy has died or was removed.

    The destination's requests continue elsewhere and no longer wait for the copy.
    """


class CannotStore(TransportError):
    """The destination of a copy cannot store it, for example because its disk is full.

    It usually cannot store other copies either.
    """


def copy_error(what: str, error: Exception, reason: str = "") -> TransportError:
    """Return a failed copy's error; ``what`` names adapter and replicas, ``reason`` replaces the error's text."""
    kind = CannotStore if isinstance(error, PoolFolderUnwritableError) else TransportError
    return kind(f"{what}: {reason or error}")


class Traffic(msgspec.Struct):
    """Counts the bytes of weights that a transport has moved.

    Attributes:
        peer_bytes: bytes sent directly from one process's memory to another's.
        disk_bytes: bytes written to a destination's disk.
    """

    peer_bytes: int = 0
    disk_bytes: int = 0


class Transport(Protocol):
    """Copies adapters between replicas. Calls may overlap, also for the same adapter.

    Attributes:
        traffic: bytes moved so far.
    """

    traffic: Traffic

    async def copy(self, adapter: AdapterRef, source: ReplicaId, destination: ReplicaId) -> AdapterRef:
        """Copy an adapter from one replica to another.

        Returns:
            The adapter, with the ``folder`` from which the destination's engine loads it.

        Raises:
            DestinationLost: the destination has died or was removed.
            CannotStore: the destination cannot store it.
            TransportError: the source is gone or lacks the adapter, or it arrived damaged.
        """
        ...

    async def provide(self, adapter: AdapterRef, destination: ReplicaId) -> AdapterRef:
        """Copy an adapter from ``adapter.folder`` on this machine to a replica; otherwise like :meth:`copy`."""
        ...

    async def delete(self, adapter: AdapterRef, replica: ReplicaId) -> None:
        """Delete a replica's copy. A missing copy is not an error.

        Raises:
            TransportError: the replica is gone, or cannot delete it.
        """
        ...

    async def held(self, replica: ReplicaId) -> dict[AdapterDigest, str]:
        """Return the folders of the copies at a replica, including those of its earlier incarnations.

        Raises:
            TransportError: the replica is gone, or cannot read them.
        """
        ...

    async def discard(self, replica: ReplicaId) -> None:
        """Delete all copies at a replica that receives no more copies. Call :meth:`release` afterwards.

        Raises:
            TransportError: the replica is gone, or cannot delete them.
        """
        ...

    def release(self, replica: ReplicaId) -> None:
        """Release the resources held for a replica that will not come back. Its copies stay."""
        ...

    def close(self) -> None:
        """Release all resources. The copies stay."""
        ...


class LocalTransport:
    """Copies adapters between engine processes of this machine.

    Args:
        pool_dir: folder that holds ``<replica>/<digest>/``; created if missing. No other process may use it.
    """

    def __init__(self, pool_dir: Path) -> None:
        self.traffic = Traffic()
        self._pool_dir = pool_dir
        self._pools: dict[ReplicaId, ReplicaPool] = {}

    async def copy(self, adapter: AdapterRef, source: ReplicaId, destination: ReplicaId) -> AdapterRef:
        """Let the destination share the files of the source."""
        try:
            source_folder = await asyncio.to_thread(self._of(source).intact, adapter.digest)
            place = await asyncio.to_thread(self._of(destination).link, adapter.digest, source_folder)
        except PoolFolderError as error:
            raise copy_error(f"adapter {adapter.name!r} from {source} to {destination}", error) from error
        return msgspec.structs.replace(adapter, folder=str(place))

    async def provide(self, adapter: AdapterRef, destination: ReplicaId) -> AdapterRef:
        """Copy the source files to the folder."""
        try:
            files = await asyncio.to_thread(read_files, Path(adapter.folder))
            return await self._store(adapter, destination, files)
        except PoolFolderError as error:
            raise copy_error(f"adapter {adapter.name!r} to {destination}", error) from error

    async def delete(self, adapter: AdapterRef, replica: ReplicaId) -> None:
        """Delete the version from the folder."""
        try:
            await asyncio.to_thread(self._of(replica).delete, adapter.digest)
        except PoolFolderError as error:
            raise TransportError(f"adapter {adapter.name!r} at {replica}: {error}") from error

    async def held(self, replica: ReplicaId) -> dict[AdapterDigest, str]:
        """Return the versions in the folder."""
        try:
            return await asyncio.to_thread(self._of(replica).held)
        except PoolFolderError as error:
            raise TransportError(f"the adapters of {replica}: {error}") from error

    async def discard(self, replica: ReplicaId) -> None:
        """Delete the folder."""
        try:
            await asyncio.to_thread(self._of(replica).discard)
        except PoolFolderError as error:
            raise TransportError(f"the adapters of {replica}: {error}") from error

    def release(self, replica: ReplicaId) -> None:
        """Close the replica's folder."""
        if (pool := self._pools.pop(replica, None)) is not None:
            pool.close()

    def close(self) -> None:
        """Close all folders, so that another process may use them."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    async def _store(self, adapter: AdapterRef, destination: ReplicaId, files: Files) -> AdapterRef:
        place = await asyncio.to_thread(self._of(destination).store, adapter.digest, files)
        if not is_in_memory(place):
            self.traffic.disk_bytes += adapter.weight_bytes
        return msgspec.structs.replace(adapter, folder=str(place))

    def _of(self, replica: ReplicaId) -> ReplicaPool:
        if replica not in self._pools:
            self._pools[replica] = ReplicaPool(self._pool_dir, replica)
        return self._pools[replica]
