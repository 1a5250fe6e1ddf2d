"""Stores one replica's part of the adapter pool on disk: a folder for each adapter version."""

import fcntl
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from lorikeet.adapters.checkpoint import DescribeOptions, begin_digest
from lorikeet.adapters.description import CONFIG_FILE, WEIGHTS_FILE, AdapterDescription
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.manifest import MANIFEST_FILE, Manifest, write_manifest
from lorikeet.adapters.reader import describe
from lorikeet.cluster.adapters.peer import Arriving
from lorikeet.core.ids import AdapterDigest, ReplicaId

Files = dict[str, NDArray[np.uint8]]
"""Contents of an adapter's two files, by name. Arrays pass through shared memory without a copy."""

TEMPORARY_PREFIX = "lorikeet-pool-"
"""Prefix of the names of pool folders that are deleted when their server ends."""

_LOCK_FILE = ".lock"
_INCOMING = ".incoming"


class PoolFolderError(RuntimeError):
    """A copy cannot be read, written or trusted. The message names the adapter and the reason."""


class PoolFolderUnwritableError(PoolFolderError):
    """A copy cannot be written, for example because the disk is full. Other copies would fail as well."""


def read_files(folder: Path) -> Files:
    """Read the two files of an adapter.

    Raises:
        PoolFolderError: a file is missing or cannot be read.
    """
    try:
        return {name: np.fromfile(folder / name, np.uint8) for name in (CONFIG_FILE, WEIGHTS_FILE)}
    except OSError as error:
        raise PoolFolderError(f"{error.filename or folder}: {error.strerror or error}") from error


def bytes_of(files: Mapping[str, NDArray[np.uint8]]) -> int:
    """Return the total size of the files."""
    return sum(content.nbytes for content in files.values())


def clear_abandoned_pools(pool: Path) -> None:
    """Delete the temporary pools that killed servers left in the same directory.

    A pool is in use while a process holds the lock of one of its replicas. Pools in use, other users' pools and folders
    that only resemble a pool are kept.
    """
    if not pool.name.startswith(TEMPORARY_PREFIX):
        return
    with suppress(OSError):
        for other in sorted(pool.parent.glob(f"{TEMPORARY_PREFIX}*")):
            if other != pool and _is_own_folder(other):
                _clear_abandoned_pool(other)


def _clear_abandoned_pool(pool: Path) -> None:
    with suppress(OSError):
        for replica in filter(_is_own_folder, sorted(pool.iterdir())):
            try:
                lock = _locked(replica)
            except (OSError, PoolFolderError):
                continue
            with lock:
                shutil.rmtree(replica, ignore_errors=True)
        pool.rmdir()  # Fails if a replica is left. A server that just created the folder recreates it.


def _is_own_folder(path: Path) -> bool:
    about = path.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()


def _locked(folder: Path) -> TextIO:
    """Create a replica's folder if it is missing, lock its lock file, and return the file.

    Raises:
        PoolFolderError: another process holds the lock.
        OSError: the folder cannot be created or opened.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK_FILE).open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(lock.name)):
                return lock
        except BlockingIOError:
            lock.close()
            raise PoolFolderError(f"the pool folder {folder} is in use by another process") from None
        except FileNotFoundError:
            pass  # Between open and lock, another process deleted the folder as abandoned.
        lock.close()


class PoolFolder:
    """Owns the folders ``<root>/<digest>/``. Thread-safe.

    The folders outlive their owner: the replica's next incarnation on this machine finds them. A version is present as
    a whole or not at all. Its content is hashed on arrival, so a file that was damaged in transit is an error and never
    serves a request.

    Args:
        root: created if missing.

    Raises:
        PoolFolderError: another process owns the folder, or it cannot be written.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._incoming = root / _INCOMING
        self._publishing = threading.Lock()
        self._is_discarded = False
        self._lock = self._make()

    def _make(self) -> TextIO:
        """Create the folder if it is missing, lock its lock file, and return the file."""
        try:
            lock = _locked(self._root)
            shutil.rmtree(self._incoming, ignore_errors=True)  # A killed owner left unfinished copies in the folder.
            self._incoming.mkdir()
        except OSError as error:
            raise PoolFolderError(f"the pool folder {self._root} cannot be written: {error}") from error
        return lock

    def close(self) -> None:
        """Release the lock, so that another process can own the folder."""
        self._lock.close()

    def discard(self) -> None:
        """Delete the folder with its content. Later stores fail.

        Raises:
            PoolFolderError: the folder cannot be deleted.
        """
        try:
            with self._publishing:
                self._is_discarded = True
                shutil.rmtree(self._root)
        except OSError as error:
            raise PoolFolderError(f"the pool folder {self._root} cannot be deleted: {error}") from error

    def folder(self, digest: AdapterDigest) -> Path:
        """Return the path of a version's folder, whether or not the folder exists."""
        return self._root / digest

    def held(self) -> dict[AdapterDigest, str]:
        """Return the folders of all intact versions. Damaged ones are deleted.

        A root that another program has deleted is created again.

        Raises:
            PoolFolderError: the root cannot be read or written.
        """
        try:
            with self._publishing:
                if not (self._root.exists() or self._is_discarded):
                    self._lock.close()
                    self._lock = self._make()
                names = [each.name for each in os.scandir(self._root) if not each.name.startswith(".")]
        except OSError as error:
            raise PoolFolderError(f"the pool folder {self._root} cannot be read: {error}") from error
        found = [AdapterDigest(name) for name in sorted(names)]
        intact = {digest: str(self.folder(digest)) for digest in found if self._problem(digest) is None}
        for digest in found:
            if digest not in intact:
                self.delete(digest)
        return intact

    def has(self, digest: AdapterDigest) -> bool:
        """Return whether a version is present and intact."""
        return self._problem(digest) is None

    def intact(self, digest: AdapterDigest) -> Path:
        """Return the folder of a version.

        Raises:
            PoolFolderError: the version is missing, or was changed after it was stored.
        """
        problem = self._problem(digest)
        if problem is not None:
            raise PoolFolderError(f"adapter {digest}: {problem}")
        return self.folder(digest)

    def read(self, digest: AdapterDigest) -> Files:
        """Return the files of a version; raises as :meth:`intact`."""
        return read_files(self.intact(digest))

    def store(self, digest: AdapterDigest, files: Mapping[str, NDArray[np.uint8]]) -> Path:
        """Check received files and store them. If an intact copy of the version is present, it is kept.

        Returns:
            The version's folder, which a loader can read.

        Raises:
            PoolFolderError: the content does not match the digest.
            PoolFolderUnwritableError: the folder cannot be written.
        """

        def fill(staged: Path) -> None:
            for name in (CONFIG_FILE, WEIGHTS_FILE):
                (staged / name).write_bytes(files[name].data)
            write_manifest(staged, _checked(staged, digest))

        return self._add(digest, fill)

    def link(self, digest: AdapterDigest, source: Path) -> Path:
        """Link the files of an intact version from another folder of this machine, or copy them where links fail.

        Returns:
            The version's folder, which a loader can read.

        Raises:
            PoolFolderError: the version was deleted during the call.
            PoolFolderUnwritableError: the folder cannot be written.
        """

        def fill(staged: Path) -> None:
            for name in (CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE):
                try:
                    os.link(source / name, staged / name)
                except FileNotFoundError as error:
                    raise PoolFolderError(f"adapter {digest}: there is no {error.filename}") from error
                except OSError:  # The other folder is on another file system, or links are not supported.
                    shutil.copy2(source / name, staged / name)  # copy2 keeps the mtime, which the manifest records.

        return self._add(digest, fill)

    def receive(self, digest: AdapterDigest, arriving: Arriving) -> Path:
        """Receive an adapter from a peer, and check its digest during the transfer.

        If an intact copy of the version is present, it is kept.

        Returns:
            The version's folder, which a loader can read.

        Raises:
            PoolFolderError: the content does not match the digest.
            PoolFolderUnwritableError: the folder cannot be written.
            PeerError: the peer was lost.
        """
        offer = arriving.offer

        def fill(staged: Path) -> None:
            (staged / CONFIG_FILE).write_bytes(offer.config)
            try:
                found = begin_digest(staged / CONFIG_FILE)
                manifest = msgspec.json.decode(offer.manifest, type=Manifest) if offer.manifest else None
            except (AdapterError, msgspec.DecodeError) as error:
                raise PoolFolderError(f"adapter {digest} arrived damaged: {error}") from error
            arriving.receive(staged / WEIGHTS_FILE, found)
            if found.hexdigest() != digest:
                raise _damaged(digest, found.hexdigest())
            write_manifest(staged, _checked(staged, digest) if manifest is None else manifest)

        return self._add(digest, fill)

    def _add(self, digest: AdapterDigest, fill: Callable[[Path], None]) -> Path:
        """Write a version's files to a new folder unless the version is present. Return the version's folder."""
        place = self.folder(digest)
        if self._problem(digest) is None:
            return place
        try:
            with tempfile.TemporaryDirectory(dir=self._incoming, ignore_cleanup_errors=True) as parent:
                staged = Path(parent) / "version"
                staged.mkdir()
                fill(staged)
                with self._publishing:
                    if self._problem(digest) is not None:  # A concurrent call may have stored the version first.
                        self._remove(digest)
                        os.rename(staged, place)
        except OSError as error:
            raise PoolFolderUnwritableError(f"adapter {digest} cannot be stored in {self._root}: {error}") from error
        return place

    def delete(self, digest: AdapterDigest) -> None:
        """Delete a version. A missing version is not an error.

        Raises:
            PoolFolderError: the folder cannot be written.
        """
        try:
            with self._publishing:
                self._remove(digest)
        except OSError as error:
            raise PoolFolderError(f"adapter {digest} cannot be deleted from {self._root}: {error}") from error

    def _remove(self, digest: AdapterDigest) -> None:
        """Rename a version's folder, so that no reader sees a part of the version, then delete the folder."""
        with tempfile.TemporaryDirectory(dir=self._incoming, ignore_cleanup_errors=True) as parent:
            try:
                os.rename(self.folder(digest), Path(parent) / "version")
            except FileNotFoundError:
                return

    def beside(self, replica: ReplicaId, digest: AdapterDigest) -> Path | None:
        """Return the folder of another replica's intact copy of a version.

        Return None if that replica has no intact copy.
        """
        place = self._root.parent / replica / digest
        return place if _problem_of(place) is None else None

    def _problem(self, digest: AdapterDigest) -> str | None:
        return _problem_of(self.folder(digest))


def _problem_of(place: Path) -> str | None:
    """Return the fault that the metadata of a version's files shows; None if there is none."""
    try:
        manifest = msgspec.json.decode((place / MANIFEST_FILE).read_bytes(), type=Manifest)
        weights = (place / WEIGHTS_FILE).stat()
    except FileNotFoundError as error:
        return f"there is no {error.filename}"
    except (OSError, msgspec.DecodeError) as error:
        return f"{place} cannot be read: {error}"
    if (weights.st_size, weights.st_mtime_ns) != (manifest.weight_bytes, manifest.weight_mtime_ns):
        return f"{place / WEIGHTS_FILE} was changed after it was stored"
    return None


def _checked(folder: Path, digest: AdapterDigest) -> AdapterDescription:
    """Return the manifest of a folder's files; raise an error if the files do not match the digest."""
    try:
        found = describe(folder, DescribeOptions(read_weights=True))
    except AdapterError as error:
        raise PoolFolderError(f"adapter {digest} arrived damaged: {error}") from error
    if found.digest != digest:
        raise _damaged(digest, found.digest)
    if found.extras:  # Tensor names depend on the base, which the pool does not know. Loaders read them again.
        return msgspec.structs.replace(found, modules=(), extras=())
    return found


def _damaged(digest: AdapterDigest, found: str) -> PoolFolderError:
    return PoolFolderError(f"adapter {digest} arrived damaged: its content has the digest {found}")
