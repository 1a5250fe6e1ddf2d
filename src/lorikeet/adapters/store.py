"""The adapter store: the files of adapters on disk, in one folder per version, which is named by the digest."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from lorikeet.adapters.chat import NO_OVERRIDES, ChatOverrides
from lorikeet.adapters.chat_files import CHAT_FILES
from lorikeet.adapters.checkpoint import NO_CHECKS, AdapterChecks, DescribeOptions
from lorikeet.adapters.description import AdapterDescription
from lorikeet.adapters.errors import AdapterError, AdapterStoreError
from lorikeet.adapters.manifest import check_unchanged, largest_of, write_manifest
from lorikeet.adapters.numbers import fits
from lorikeet.adapters.reader import describe
from lorikeet.adapters.sources import fetch, locate
from lorikeet.config import AdapterSettings
from lorikeet.core.adapter import AdapterExtra, AdapterRef
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import AdapterDigest, AdapterName


class StagedVersion(NamedTuple):
    """A validated adapter in a temporary folder.

    Attributes:
        folder: the temporary folder.
        description: description of its content.
        ranks, extras: see ``AdapterRef``.
    """

    folder: Path
    description: AdapterDescription
    ranks: dict[str, tuple[int, ...]]
    extras: tuple[AdapterExtra, ...]

    @property
    def digest(self) -> AdapterDigest:
        """Digest of the version."""
        return AdapterDigest(self.description.digest)


def default_store_dir() -> Path:
    """Return the user's data folder for adapters (XDG)."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "lorikeet" / "adapters"


def versions_dir(root: Path) -> Path:
    """Return the folder of a store's versions."""
    return root / "versions"


def reference(name: str, folder: Path, geometry: ModelGeometry, dtype: str = "") -> AdapterRef:
    """Validate a folder and return a reference to it, without store and registry, for benchmarks and tools.

    Raises:
        AdapterError: the adapter is not valid, does not fit, or is sharded.
    """
    found = describe(folder, DescribeOptions(geometry, AdapterChecks(dtype), read_weights=True))
    if found.shards:
        raise AdapterError(f"{folder} holds a sharded adapter; only a store can hold it")
    ranks = found.ranks(geometry)
    extras = found.extras_of(geometry)
    digest = AdapterDigest(found.digest)
    seeing = bool(found.tower)
    return AdapterRef(AdapterName(name), digest, str(folder), ranks, found.weight_bytes, extras, seeing)


def adapted(ref: AdapterRef, geometry: ModelGeometry, prompt: Sequence[int]) -> tuple[AdapterRef | None, int]:
    """Return ``adapter`` and ``adapter_start`` of a ``Request`` for a prompt.

    An aLoRA may act on no token of a prompt.

    Raises:
        AdapterError: the adapter's folder is not valid.
    """
    start = describe(Path(ref.folder), DescribeOptions(geometry)).chat.task.start(prompt)
    return (None, 0) if start is None else (ref, start)


class AdapterStore:
    """Owns ``<root>/versions/<digest>/``.

    Thread-safe, except that one digest must not be changed concurrently.

    Several processes may share a store. Each process holds a shared lock on the store while it runs.

    Args:
        root: the store's folder, which is created if missing.
        settings: allowed sources and limits.
        geometry: sizes of the base model, for validation.
        checks: the checks of adapters that depend on the engine.
    """

    def __init__(
        self,
        root: Path,
        settings: AdapterSettings,
        geometry: ModelGeometry,
        checks: AdapterChecks = NO_CHECKS,
    ) -> None:
        self._versions = versions_dir(root)
        self._incoming = root / "incoming"
        self._settings = settings
        self._geometry = geometry
        self._options = DescribeOptions(
            geometry,
            checks,
            settings.max_rank,
            settings.max_bytes,
            read_weights=True,
            merge=True,
            read_chat=True,
        )
        self._names = DescribeOptions(geometry)
        for folder in (self._versions, self._incoming):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = (root / "lock").open("a")
        # This lock is held while a process converts its lock, since the conversion releases the old lock for a moment.
        self._turn = (root / "turn").open("a")
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Yield whether no other process uses the store. If so, no process can open the store until the block ends."""
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
        """Delete staged folders of earlier processes. Call it only while :meth:`alone`."""
        for leftover in self._incoming.iterdir():
            shutil.rmtree(leftover, ignore_errors=True)

    def folder(self, digest: AdapterDigest) -> Path:
        """Return the folder of a version, even if it does not exist."""
        return self._versions / digest

    def digests(self) -> set[AdapterDigest]:
        """Return all stored versions."""
        return {AdapterDigest(entry.name) for entry in os.scandir(self._versions)}

    def overflows(self, digest: AdapterDigest) -> bool:
        """Return whether a stored version, perhaps from a server with another dtype, overflows this dtype."""
        # Only float16 has a smaller range than other dtypes, so the weights must be read only for float16.
        return self._options.checks.dtype == "float16" and not fits(largest_of(self.folder(digest)), "float16")

    def locate(self, source: str, trusted: bool = False) -> str:
        """Return a source's URL on the Hub, or the source itself. See :func:`lorikeet.adapters.sources.locate`."""
        return locate(source, self._settings, trusted)

    @contextmanager
    def stage(
        self,
        source: str,
        trusted: bool = False,
        overrides: ChatOverrides = NO_OVERRIDES,
        takes_over: bool = False,
        shared: str = "",
    ) -> Iterator[StagedVersion]:
        """Fetch and validate an adapter, and compute its digest.

        It is deleted when the block ends, unless published.

        Args:
            source: a folder or URL.
            trusted: whether the source comes from the command line.
            overrides: chat settings that replace those in the adapter's files.
            takes_over: whether ``source`` is a folder of :meth:`receiving`, whose files are moved instead of copied.
            shared: name of shared weights that belong to the files of ``source``; empty for none.

        Raises:
            AdapterStoreError: the store cannot be written, for example because the disk is full.
            AdapterError: the source is not allowed or cannot be read, or the adapter is not valid.
        """
        with self._temporary_folder() as parent:
            folder = Path(parent) / "version"
            with _writing():
                folder.mkdir()
                for file in Path(source).iterdir() if takes_over else ():
                    os.rename(file, folder / file.name)
            if not takes_over:
                fetch(source, self._settings, folder, trusted)
            try:
                found = describe(folder, msgspec.structs.replace(self._options, overrides=overrides, shared=shared))
            except AdapterStoreError:
                raise
            except AdapterError as error:
                raise AdapterError(f"{source}: {error}") from error
            with _writing():
                # Chat settings belong to a name, and a stored version is identified by its weights.
                for name in CHAT_FILES:
                    (folder / name).unlink(missing_ok=True)
            yield StagedVersion(folder, found, found.ranks(self._geometry), found.extras_of(self._geometry))

    def publish(self, staged: StagedVersion, *, is_durable: bool = True) -> Path:
        """Move a staged version into the store.

        If the store already has an unchanged copy, that copy is kept. ``is_durable`` is whether the version must
        outlive a failure of the machine.

        Raises:
            AdapterStoreError: the store cannot be written, for example because the disk is full.
        """
        place = self.folder(staged.digest)
        if place.exists():
            if self._is_intact(place, staged):
                return place
            self.remove(staged.digest)
        with _writing():
            write_manifest(staged.folder, staged.description, is_durable=is_durable)
            os.rename(staged.folder, place)
        return place

    def _is_intact(self, place: Path, staged: StagedVersion) -> bool:
        """Return whether a stored version equals the staged one."""
        found = staged.description
        ref = AdapterRef(AdapterName(""), staged.digest, str(place), staged.ranks, found.weight_bytes)
        try:
            again = describe(place, self._names)
            return check_unchanged(ref) == (again.modules, again.extras) == (found.modules, found.extras)
        except AdapterError:
            return False

    def add(self, source: str, trusted: bool = False) -> tuple[AdapterDigest, Path]:
        """Stage and publish an adapter. Errors are those of :meth:`stage`."""
        with self.stage(source, trusted) as staged:
            return staged.digest, self.publish(staged)

    def remove(self, digest: AdapterDigest) -> None:
        """Delete a version.

        An unknown version is ignored.

        Raises:
            AdapterStoreError: the version cannot be deleted.
        """
        # The folder is renamed first, so that no reader sees a partly deleted version.
        with self._temporary_folder() as parent, _writing(), suppress(FileNotFoundError):
            os.rename(self.folder(digest), Path(parent) / "version")

    @contextmanager
    def receiving(self) -> Iterator[Path]:
        """Yield an empty folder for uploaded files, which is deleted when the block ends."""
        with self._temporary_folder() as folder:
            yield Path(folder)

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
