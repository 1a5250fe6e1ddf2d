"""Adapters between replicas on one machine: plain files, a folder for each replica."""

import asyncio
from pathlib import Path

import msgspec

from lorikeet.cluster.pool_folder import Files, PoolFolder, PoolFolderError, read_files
from lorikeet.cluster.transport import TransportError
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, ReplicaId


class LocalTransport:
    """A :class:`~lorikeet.cluster.transport.Transport` for engines that are processes of this machine.

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
