"""Stores one replica's part of the adapter pool, in its machine's memory while there is room, then on disk.

The copies of a temporary pool are files in the machine's file system in memory (``/dev/shm``), where the loader of the
engine reads them like any other file. A pool in a folder that the user chose is wholly on disk, so that it survives a
restart of the machine.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lorikeet.cluster.adapters.folder import (
    TEMPORARY_PREFIX,
    Files,
    PoolFolder,
    PoolFolderError,
    PoolFolderUnwritableError,
    bytes_of,
    clear_abandoned_pools,
    read_files,
)
from lorikeet.cluster.adapters.peer import PeerAddress, ask_peer
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.core.machine import free_memory_bytes, memory_limit_bytes

MEMORY_FOLDER = Path("/dev/shm")
_FREE_SHARE = 0.25
"""Share of the machine's memory that copies leave free."""


def is_in_memory(folder: str | Path) -> bool:
    """Return whether a copy's folder is in memory."""
    return Path(folder).is_relative_to(MEMORY_FOLDER)


def _memory_pool(pool_dir: Path) -> Path | None:
    """Create the folder in memory that belongs to a pool, and return it; None if the pool is on disk only."""
    if not pool_dir.name.startswith(TEMPORARY_PREFIX):
        return None
    pool = MEMORY_FOLDER / pool_dir.name
    try:
        pool.mkdir(mode=0o700, exist_ok=True)  # Other users must not read adapters.
        return pool if pool.lstat().st_uid == os.getuid() else None
    except OSError:
        return None  # The machine has no file system in memory.


class ReplicaPool:
    """Owns the adapter copies of one replica. Thread-safe; see :class:`PoolFolder`.

    Args:
        pool_dir: folder of the whole pool; ``<pool_dir>/<replica>/<digest>/`` holds a copy on disk.
        replica: replica that owns the copies.

    Raises:
        PoolFolderError: another process owns the copies, or a folder cannot be written.
    """

    def __init__(self, pool_dir: Path, replica: ReplicaId) -> None:
        memory = _memory_pool(pool_dir)
        self._pools = [pool_dir] if memory is None else [memory, pool_dir]
        for pool in self._pools:
            clear_abandoned_pools(pool)
        self._disk = PoolFolder(pool_dir / replica)
        self._memory = None if memory is None else PoolFolder(memory / replica)
        self._folders = [self._disk] if self._memory is None else [self._memory, self._disk]

    def close(self) -> None:
        """Release the copies, so that another process can own them."""
        for folder in self._folders:
            folder.close()

    def discard(self) -> None:
        """Delete all copies. Later stores fail.

        Raises:
            PoolFolderError: the copies cannot be deleted.
        """
        for folder in self._folders:
            folder.discard()
        if self._memory is not None:  # A temporary pool's folder is deleted with its last replica.
            for pool in self._pools:
                with suppress(OSError):
                    pool.rmdir()

    def held(self) -> dict[AdapterDigest, str]:
        """Return the folders of all intact copies; see ``PoolFolder.held``."""
        held: dict[AdapterDigest, str] = {}
        for folder in reversed(self._folders):
            held |= folder.held()
        return held

    def intact(self, digest: AdapterDigest) -> Path:
        """Return the folder of a copy.

        Raises:
            PoolFolderError: the copy is missing, or was changed after it was stored.
        """
        return self._found(digest) or self._disk.intact(digest)  # The second call raises the error.

    def read(self, digest: AdapterDigest) -> Files:
        """Return the files of a copy; raises as :meth:`intact`."""
        return read_files(self.intact(digest))

    def store(self, digest: AdapterDigest, files: Mapping[str, NDArray[np.uint8]]) -> Path:
        """Check received files and store them, and return their folder. An existing copy is kept.

        Raises:
            PoolFolderError: the content does not match the digest.
            PoolFolderUnwritableError: there is no room.
        """
        if (place := self._found(digest)) is not None:
            return place
        if (folder := self._folder_for(bytes_of(files))) is not self._disk:
            with suppress(PoolFolderUnwritableError):  # Another copy may have used the free memory in the meantime.
                return folder.store(digest, files)
        return self._disk.store(digest, files)

    def link(self, digest: AdapterDigest, source: Path) -> Path:
        """Share an intact copy of another replica on this machine, and return the folder.

        Raises:
            PoolFolderUnwritableError: there is no room.
        """
        beside = self._memory if is_in_memory(source) else self._disk
        return (beside or self._disk).link(digest, source)

    def share(self, digest: AdapterDigest, replica: ReplicaId) -> Path | None:
        """Share the copy of another replica in the same pool, and return the folder.

        Return None if this machine cannot read the copy.

        Raises:
            PoolFolderUnwritableError: there is no room.
        """
        if (place := self._found(digest)) is not None:
            return place
        found = (folder.beside(replica, digest) for folder in self._folders)
        source = next((place for place in found if place is not None), None)
        return None if source is None else self.link(digest, source)

    def fetch(self, digest: AdapterDigest, peer: PeerAddress, key: bytes) -> Path:
        """Receive an adapter from a peer, and return its folder. An existing copy is kept.

        Args:
            digest: digest of the adapter.
            peer: address of the peer.
            key: key that is shared with the peer.

        Raises:
            PeerUnreachable: no connection to the peer can be made.
            PeerError: the peer lacks the adapter, or was lost.
            PoolFolderError: the content does not match the digest.
            PoolFolderUnwritableError: there is no room.
        """
        if (place := self._found(digest)) is not None:
            return place
        with ask_peer(peer, digest, key) as arriving:
            return self._folder_for(arriving.offer.weight_bytes).receive(digest, arriving)

    def delete(self, digest: AdapterDigest) -> None:
        """Delete a copy. A missing copy is not an error.

        Raises:
            PoolFolderError: the copy cannot be deleted.
        """
        for folder in self._folders:
            folder.delete(digest)

    def _found(self, digest: AdapterDigest) -> Path | None:
        """Return the folder of an intact copy; None if there is none."""
        return next((folder.folder(digest) for folder in self._folders if folder.has(digest)), None)

    def _folder_for(self, size_bytes: int) -> PoolFolder:
        """Return a folder for a new copy: in memory if the copy fits, otherwise on disk."""
        if self._memory is None:
            return self._disk
        try:
            there = os.statvfs(MEMORY_FOLDER)
        except OSError as error:
            raise PoolFolderError(f"{MEMORY_FOLDER} cannot be read: {error}") from error
        spare = min(there.f_bavail * there.f_frsize, free_memory_bytes() - round(_FREE_SHARE * memory_limit_bytes()))
        return self._memory if size_bytes <= spare else self._disk
