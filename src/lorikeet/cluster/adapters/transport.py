"""Moves the files of adapters to replicas: the interface, and the transport for replicas on one machine.

On one machine each replica has a folder, and adapters are copied as plain files.
"""

import asyncio
from pathlib import Path
from typing import Protocol

import msgspec

from lorikeet.cluster.adapters.folder import Files, PoolFolder, PoolFolderError, read_files
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, ReplicaId


class TransportError(RuntimeError):
    """A copy was not made or not deleted; the message names the adapter, the replicas and the reason."""


class DestinationLost(TransportError):
    """A copy's destination is dead or was taken out. Its owner hears of that otherwise, and waits for no copy there."""


class Transport(Protocol):
    """Carries adapters between replicas. Calls may be made at the same time, also for the same adapter."""

    async def copy(self, adapter: AdapterRef, source: ReplicaId, destination: ReplicaId) -> AdapterRef:
        """Copy an adapter from one replica to another.

        Returns:
            The adapter with ``folder`` as the destination's engine has to be told.

        Raises:
            DestinationLost: see there.
            TransportError: the source has not got it or is gone, the destination cannot keep it, or it was damaged on
                its way.
        """
        ...

    async def provide(self, adapter: AdapterRef, destination: ReplicaId) -> AdapterRef:
        """Copy an adapter from ``adapter.folder`` on this machine to a replica. Otherwise as :meth:`copy`."""
        ...

    async def delete(self, adapter: AdapterRef, replica: ReplicaId) -> None:
        """Delete a replica's copy; one that is not there is no error.

        Raises:
            TransportError: the replica is gone, or cannot delete it.
        """
        ...

    async def held(self, replica: ReplicaId) -> dict[AdapterDigest, str]:
        """Return where copies lie at a replica, those of its earlier incarnations included.

        Raises:
            TransportError: the replica is gone, or cannot read them.
        """
        ...

    async def discard(self, replica: ReplicaId) -> None:
        """Delete all that lies at a replica. Nothing goes there any more; :meth:`release` follows.

        Raises:
            TransportError: the replica is gone, or cannot delete it.
        """
        ...

    def release(self, replica: ReplicaId) -> None:
        """Hold nothing for a replica that will not be back; what lies there stays."""
        ...

    def close(self) -> None:
        """Release what it holds; the copies stay."""
        ...


class LocalTransport:
    """A :class:`~lorikeet.cluster.adapters.transport.Transport` for engines that are processes of this machine.

    Args:
        pool_dir: holds ``<replica>/<digest>/``; made if missing. No other process may use it.
    """

    def __init__(self, pool_dir: Path) -> None:
        self._pool_dir = pool_dir
        self._folders: dict[ReplicaId, PoolFolder] = {}

    async def copy(self, adapter: AdapterRef, source: ReplicaId, destination: ReplicaId) -> AdapterRef:
        """See ``Transport``."""
        try:
            files = await asyncio.to_thread(self._of(source).read, adapter.digest)
            return await self._store(adapter, destination, files)
        except PoolFolderError as error:
            raise TransportError(f"adapter {adapter.name!r} from {source} to {destination}: {error}") from error

    async def provide(self, adapter: AdapterRef, destination: ReplicaId) -> AdapterRef:
        """See ``Transport``."""
        try:
            files = await asyncio.to_thread(read_files, Path(adapter.folder))
            return await self._store(adapter, destination, files)
        except PoolFolderError as error:
            raise TransportError(f"adapter {adapter.name!r} to {destination}: {error}") from error

    async def delete(self, adapter: AdapterRef, replica: ReplicaId) -> None:
        """See ``Transport``."""
        try:
            await asyncio.to_thread(self._of(replica).delete, adapter.digest)
        except PoolFolderError as error:
            raise TransportError(f"adapter {adapter.name!r} at {replica}: {error}") from error

    async def held(self, replica: ReplicaId) -> dict[AdapterDigest, str]:
        """See ``Transport``."""
        try:
            return await asyncio.to_thread(self._of(replica).held)
        except PoolFolderError as error:
            raise TransportError(f"the adapters of {replica}: {error}") from error

    async def discard(self, replica: ReplicaId) -> None:
        """See ``Transport``."""
        try:
            await asyncio.to_thread(self._of(replica).discard)
        except PoolFolderError as error:
            raise TransportError(f"the adapters of {replica}: {error}") from error

    def release(self, replica: ReplicaId) -> None:
        """See ``Transport``."""
        if (folder := self._folders.pop(replica, None)) is not None:
            folder.close()

    def close(self) -> None:
        """Let another process use the folder."""
        for folder in self._folders.values():
            folder.close()
        self._folders.clear()

    async def _store(self, adapter: AdapterRef, destination: ReplicaId, files: Files) -> AdapterRef:
        place = await asyncio.to_thread(self._of(destination).store, adapter.digest, files)
        return msgspec.structs.replace(adapter, folder=str(place))

    def _of(self, replica: ReplicaId) -> PoolFolder:
        if replica not in self._folders:
            self._folders[replica] = PoolFolder(self._pool_dir / replica)
        return self._folders[replica]
