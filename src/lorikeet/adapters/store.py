"""The content of adapters on disk, one folder per version, named by its digest."""

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
    """What a version's weights file was when it was stored; a file that differs has been tampered with."""

    weight_bytes: int
    weight_mtime_ns: int


class StagedVersion(NamedTuple):
    """A checked adapter that is not in its final place yet.

    Attributes:
        folder: where it lies for now.
        digest: its version.
        ranks: as in ``AdapterRef.ranks``.
        weight_bytes: size of its weights file.
    """

    folder: Path
    digest: AdapterDigest
    ranks: dict[str, tuple[int, ...]]
    weight_bytes: int


def default_store_dir() -> Path:
    """The user's data folder for adapters (XDG)."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "lorikeet" / "adapters"


def compute_digest(checkpoint: AdapterCheckpoint) -> AdapterDigest:
    """Hex SHA-256 over the settings that change what the weights mean and the bytes of the weights file."""
    fields = checkpoint.config.digest_fields()
    digest = hashlib.sha256(b"lorikeet adapter 1\n%d\n" % len(fields) + fields)
    with (checkpoint.folder / WEIGHTS_FILE).open("rb") as stream:
        while chunk := stream.read(2**20):
            digest.update(chunk)
    return AdapterDigest(digest.hexdigest())


def reference(name: str, folder: Path, geometry: ModelGeometry) -> AdapterRef:
    """Validate a folder where it lies and return a reference to it, past store and registry (benches, tools).

    Raises:
        AdapterError: it is not valid or does not fit.
    """
    checkpoint = inspect_adapter(folder)
    ranks = validate(checkpoint, geometry)
    return AdapterRef(AdapterName(name), compute_digest(checkpoint), str(folder), ranks, checkpoint.weight_bytes)


def check_unchanged(ref: AdapterRef) -> None:
    """Check that the weights file is still the one that was registered, by size and, in the store, by time.

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
            f"registered were {ref.weight_bytes}; register it again"
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
    """Owner of ``<root>/versions/<digest>/``. Calls may come from several threads; changes to one digest may not.

    Several processes may share a store: each holds a shared lock on it while it lives.
    """

    def __init__(self, root: Path, settings: AdapterSettings, geometry: ModelGeometry) -> None:
        self._versions = root / "versions"
        self._incoming = root / "incoming"
        self._settings = settings
        self._geometry = geometry
        for folder in (self._versions, self._incoming):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = (root / "lock").open("a")
        self._turn = (root / "turn").open("a")
        """Held by whoever changes its lock, since that takes the old one away for a moment."""
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Tell whether no other process uses the store; if so, none begins to until the block ends."""
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
        """Let others delete what only this process used."""
        self._lock.close()
        self._turn.close()

    def clear_incoming(self) -> None:
        """Delete what an earlier process staged and never published. Only while alone."""
        for leftover in self._incoming.iterdir():
            shutil.rmtree(leftover, ignore_errors=True)

    def folder(self, digest: AdapterDigest) -> Path:
        """Where a version lies, whether it is there or not."""
        return self._versions / digest

    def digests(self) -> set[AdapterDigest]:
        """All versions that are there."""
        return {AdapterDigest(entry.name) for entry in os.scandir(self._versions)}

    @contextmanager
    def stage(self, source: str, trusted: bool = False) -> Iterator[StagedVersion]:
        """Fetch an adapter, check it and compute its digest; what is not published is deleted at the end.

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
        """Move a staged version to its place; one that is there already and unchanged is kept.

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
                self.remove(staged.digest)  # damaged since; what was just checked takes its place
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
        """Stage and publish in one go."""
        with self.stage(source, trusted) as staged:
            return staged.digest, self.publish(staged)

    def remove(self, digest: AdapterDigest) -> None:
        """Delete a version; one that is not there is no error.

        Raises:
            AdapterStoreError: it cannot be deleted.
        """
        # Renamed first, so that nobody sees half a version.
        with self._temporary_folder() as parent, _writing(), suppress(FileNotFoundError):
            os.rename(self.folder(digest), Path(parent) / "version")

    def _temporary_folder(self) -> tempfile.TemporaryDirectory[str]:
        with _writing():
            return tempfile.TemporaryDirectory(dir=self._incoming, ignore_cleanup_errors=True)


@contextmanager
def _writing() -> Iterator[None]:
    """Let what goes wrong with the disk be an ``AdapterStoreError``."""
    try:
        yield
    except OSError as error:
        raise AdapterStoreError(f"the adapter store cannot be written: {error}") from error
