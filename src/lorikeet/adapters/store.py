"""The adapter store: files of adapters on disk, one folder per version, named by its digest."""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from lorikeet.adapters.checkpoint import WEIGHTS_FILE, AdapterCheckpoint, inspect_adapter, validate
from lorikeet.adapters.errors import AdapterError, AdapterStoreError
from lorikeet.adapters.sources import fetch
from lorikeet.config import AdapterSettings
from lorikeet.core.adapter import AdapterRef
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import AdapterDigest, AdapterName

MANIFEST_FILE = "version.json"


class Manifest(msgspec.Struct, frozen=True):
    """Size and modification time of a version's weights file when it was stored; any difference is an error."""

    weight_bytes: int
    weight_mtime_ns: int


class StagedVersion(NamedTuple):
    """A validated adapter in a temporary folder.

    Attributes:
        folder: the temporary folder.
        digest: its version.
        ranks: as in ``AdapterRef.ranks``.
        weight_bytes: size of its weights file.
    """

    folder: Path
    digest: AdapterDigest
    ranks: dict[str, tuple[int, ...]]
    weight_bytes: int


def default_store_dir() -> Path:
    """Return the user's data folder for adapters (XDG)."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "lorikeet" / "adapters"


def compute_digest(checkpoint: AdapterCheckpoint) -> AdapterDigest:
    """Return the hex SHA-256 of the settings that change the meaning of the weights, and of the weights file."""
    fields = checkpoint.config.digest_fields()
    digest = hashlib.sha256(b"lorikeet adapter 1\n%d\n" % len(fields) + fields)
    with (checkpoint.folder / WEIGHTS_FILE).open("rb") as stream:
        while chunk := stream.read(2**20):
            digest.update(chunk)
    return AdapterDigest(digest.hexdigest())


def reference(name: str, folder: Path, geometry: ModelGeometry) -> AdapterRef:
    """Validate a folder in place and return a reference to it, without store and registry; for benchmarks and tools.

    Raises:
        AdapterError: it is not valid or does not fit.
    """
    checkpoint = inspect_adapter(folder)
    ranks = validate(checkpoint, geometry)
    return AdapterRef(AdapterName(name), compute_digest(checkpoint), str(folder), ranks, checkpoint.weight_bytes)


def check_unchanged(ref: AdapterRef) -> None:
    """Check that the weights file is unchanged since it was registered: by size and, in the store, modification time.

    Raises:
        AdapterError: it is missing or differs.
    """
    folder = Path(ref.folder)
    try:
        found = (folder / WEIGHTS_FILE).stat()
    except OSError as error:
        raise AdapterError(f"adapter {ref.name!r}: {folder / WEIGHTS_FILE}: {error.strerror}") from error
    if found.st_size != ref.weight_bytes:
        raise AdapterError(
            f"adapter {ref.name!r}: {folder / WEIGHTS_FILE} has {found.st_size} bytes, "
            f"but was registered with {ref.weight_bytes}; register it again"
        )
    if (folder / MANIFEST_FILE).exists():  # folders outside the store have none
        try:
            manifest = msgspec.json.decode((folder / MANIFEST_FILE).read_bytes(), type=Manifest)
        except (OSError, msgspec.DecodeError) as error:
            raise AdapterError(
                f"adapter {ref.name!r}: {folder / MANIFEST_FILE} cannot be read: {error}; register it again"
            ) from error
        if found.st_mtime_ns != manifest.weight_mtime_ns:
            raise AdapterError(
                f"adapter {ref.name!r}: {folder / WEIGHTS_FILE} was changed after it was registered; register it again"
            )


class AdapterStore:
    """Owns ``<root>/versions/<digest>/``. Thread-safe, except that one digest must not be changed concurrently.

    Several processes may share a store; each holds a shared lock on it while it runs.

    Args:
        root: folder of the store; created if missing.
        settings: allowed sources and limits.
        geometry: sizes of the base model, for validation.
    """

    def __init__(self, root: Path, settings: AdapterSettings, geometry: ModelGeometry) -> None:
        self._versions = root / "versions"
        self._incoming = root / "incoming"
        self._settings = settings
        self._geometry = geometry
        for folder in (self._versions, self._incoming):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = (root / "lock").open("a")
        # Locked while a process converts its lock, since the conversion releases the old lock for a moment.
        self._turn = (root / "turn").open("a")
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Yield whether no other process uses the store; if so, none can open it until the block ends."""
        with self._changing():
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except BlockingIOError:
                fcntl.flock(self._lock, fcntl.LOCK_SH)
                alone = False
        try:
            yield alone
        finally:
            if alone:
                with self._changing():
                    fcntl.flock(self._lock, fcntl.LOCK_SH)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        fcntl.flock(self._turn, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._turn, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release the lock, so that other processes may delete unused versions."""
        self._lock.close()
        self._turn.close()

    def clear_incoming(self) -> None:
        """Delete staged folders of earlier processes. Call only while :meth:`alone`."""
        for leftover in self._incoming.iterdir():
            shutil.rmtree(leftover, ignore_errors=True)

    def folder(self, digest: AdapterDigest) -> Path:
        """Return the folder of a version, whether it exists or not."""
        return self._versions / digest

    def digests(self) -> set[AdapterDigest]:
        """Return all stored versions."""
        return {AdapterDigest(entry.name) for entry in os.scandir(self._versions)}

    @contextmanager
    def stage(self, source: str, trusted: bool = False) -> Iterator[StagedVersion]:
        """Fetch an adapter, validate it and compute its digest. Unless published, it is deleted when the block ends.

        Raises:
            AdapterStoreError: the store cannot be written, for example because the disk is full.
            AdapterError: the source is not allowed or cannot be read, or the adapter is not valid.
        """
        with self._temporary_folder() as parent:
            folder = Path(parent) / "version"
            with _writing():
                folder.mkdir()
            fetch(source, self._settings, folder, trusted)
            try:
                checkpoint = inspect_adapter(folder)
                ranks = validate(checkpoint, self._geometry, self._settings.max_rank, self._settings.max_bytes)
            except AdapterError as error:
                raise AdapterError(f"{source}: {error}") from error
            yield StagedVersion(folder, compute_digest(checkpoint), ranks, checkpoint.weight_bytes)

    def publish(self, staged: StagedVersion) -> Path:
        """Move a staged version into the store; an unchanged copy that is already there is kept.

        Raises:
            AdapterStoreError: the store cannot be written, for example because the disk is full.
        """
        place = self.folder(staged.digest)
        if place.exists():
            try:
                check_unchanged(
                    AdapterRef(AdapterName(""), staged.digest, str(place), staged.ranks, staged.weight_bytes)
                )
                inspect_adapter(place)
            except AdapterError:
                self.remove(staged.digest)  # it is damaged, and the staged version replaces it
            else:
                return place
        with _writing():
            weights = (staged.folder / WEIGHTS_FILE).stat()
            manifest = Manifest(weights.st_size, weights.st_mtime_ns)
            with (staged.folder / MANIFEST_FILE).open("wb") as file:
                file.write(msgspec.json.encode(manifest))
                file.flush()
                os.fsync(file.fileno())
            os.rename(staged.folder, place)
        return place

    def add(self, source: str, trusted: bool = False) -> tuple[AdapterDigest, Path]:
        """Stage and publish an adapter; raises as :meth:`stage`."""
        with self.stage(source, trusted) as staged:
            return staged.digest, self.publish(staged)

    def remove(self, digest: AdapterDigest) -> None:
        """Delete a version; an unknown one is ignored.

        Raises:
            AdapterStoreError: it cannot be deleted.
        """
        # Renamed first, so that no reader sees a partly deleted version.
        with self._temporary_folder() as parent, _writing(), suppress(FileNotFoundError):
            os.rename(self.folder(digest), Path(parent) / "version")

    def _temporary_folder(self) -> tempfile.TemporaryDirectory[str]:
        with _writing():
            return tempfile.TemporaryDirectory(dir=self._incoming, ignore_cleanup_errors=True)


@contextmanager
def _writing() -> Iterator[None]:
    """Raise an ``AdapterStoreError`` for an ``OSError`` in the block."""
    try:
        yield
    except OSError as error:
        raise AdapterStoreError(f"the adapter store cannot be written: {error}") from error
