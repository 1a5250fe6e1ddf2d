"""The adapter catalog of a server: names in memory, rows in the registry, and files in the store."""

import dataclasses
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

from lorikeet.adapters.chat import NO_OVERRIDES, AdapterChat, ChatOverrides, as_text
from lorikeet.adapters.checkpoint import NO_CHECKS, AdapterChecks
from lorikeet.adapters.errors import (
    AdapterBusy,
    AdapterError,
    AdapterExists,
    AdapterNotServed,
    AdapterStoreError,
    UnknownAdapter,
)
from lorikeet.adapters.registry import (
    NOBODY,
    AdapterRecord,
    AdapterRegistry,
    Author,
    RegisteredAdapter,
    RegistryRow,
    base_identity,
    check_name,
    encode_shape,
    sqlite_url,
)
from lorikeet.adapters.store import AdapterStore, StagedVersion, default_store_dir, versions_dir
from lorikeet.config import AdapterSettings
from lorikeet.core.adapter import AdapterRef, largest_rank
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import AdapterDigest

_LOG = logging.getLogger(__name__)

__all__ = ["AdapterCatalog", "AdapterRecord", "Author", "RegisteredAdapter", "StoredAdapters"]


def registry_url(settings: AdapterSettings) -> str:
    """Return the SQLAlchemy URL of the registry.

    If the registry is a file in the store's folder, the folder is created.
    """
    if settings.registry_url:
        return settings.registry_url
    folder = _store_dir(settings)
    folder.mkdir(parents=True, exist_ok=True)
    return sqlite_url(folder / "registry.sqlite3")


def _store_dir(settings: AdapterSettings) -> Path:
    return Path(settings.store_dir).expanduser() if settings.store_dir else default_store_dir()


_LATE_CHANGES = 100
"""Number of later changes that may become visible before a change, because its transaction ended after theirs."""


class FollowedChange(NamedTuple):
    """A change that another server has made to a name.

    Attributes:
        name: the name.
        record: the name's adapter now; None if the name was removed.
        old: the name's adapter on this server before; None if the name is new.
        why_not: why the adapter cannot be served here; empty if it can.
    """

    name: str
    record: AdapterRecord | None
    old: AdapterRecord | None
    why_not: str = ""


class StoredAdapters:
    """The names in the registry for all base models.

    A server reads the names before it knows the sizes of its base model.

    Args:
        settings: the catalog's settings.

    Attributes:
        registry: the open registry. It has no base model yet.
        newest: number of the registry's latest change at the time of reading.
        records: records by base model and name.

    Raises:
        AdapterError: the registry cannot be opened or read.
    """

    def __init__(self, settings: AdapterSettings) -> None:
        self.registry = AdapterRegistry(registry_url(settings))
        self._versions = versions_dir(_store_dir(settings))
        self.read()

    def read(self) -> None:
        """Read the registry again."""
        # The number is read first, so that no later change is missed.
        self.newest = self.registry.newest()
        self.records = {
            base: {row.name: AdapterRecord(row, f"{self._versions}/{row.digest}") for row in rows}
            for base, rows in self.registry.load().items()
        }


class AdapterCatalog:
    """All adapters of one server.

    Thread-safe.

    ``get``, ``names``, ``list``, ``has``, ``acquire`` and ``release`` return immediately, so an event loop may call
    them. ``register``, ``remove`` and ``close`` read, write and hash files, so call them in a worker thread. With
    thousands of adapters, also call ``versions`` there.

    Args:
        settings: folders, allowed sources, limits and registry URL.
        base_name: name of the base model, which is part of its identity in the registry.
        geometry: sizes of the whole base model.
        reserved_names: names that adapters may not have, besides ``base_name``.
        checks: the checks of adapters that depend on the engine.
        accept: function called with every new adapter before it is registered. It raises AdapterError to refuse the
            adapter.
        fit_chat: function called with the chat settings of a new adapter's folder. It returns the settings that differ
            from the base model's, or raises AdapterError.
        now: function that returns the time in Unix seconds.
        stored: the registry's content, if it was read before; None to read it now.

    Attributes:
        dtype: dtype in which adapters are served; "" for any dtype.
        notes: lines for the start-up log about adapters that cannot be served.

    Raises:
        AdapterError: the registry cannot be opened.
    """

    def __init__(
        self,
        settings: AdapterSettings,
        base_name: str,
        geometry: ModelGeometry,
        *,
        reserved_names: Sequence[str] = (),
        checks: AdapterChecks = NO_CHECKS,
        accept: Callable[[AdapterRef], None] = lambda _: None,
        fit_chat: Callable[[AdapterChat], AdapterChat] = lambda chat: chat,
        now: Callable[[], float] = time.time,
        stored: StoredAdapters | None = None,
    ) -> None:
        stored = stored or StoredAdapters(settings)
        self._store = AdapterStore(_store_dir(settings), settings, geometry, checks)
        self._registry = stored.registry
        self._registry.base = base_identity(base_name, geometry)
        self._reserved = {base_name, *reserved_names}
        self.dtype = checks.dtype
        self._accept = accept
        self._fit_chat = fit_chat
        self._now = now
        self._changes = threading.Lock()  # The lock is held while store and registry are written.
        self._state = threading.Lock()  # The lock guards the fields below. It is never held during input or output.
        self._is_closed = False  # Threads hold ``_changes`` to use the flag.
        self._busy: set[str] = set()
        self.changes = 0
        self._records: dict[str, AdapterRecord] = {}
        self._names: Counter[str] = Counter()  # Number of names by digest.
        self._uses: Counter[str] = Counter()  # Number of uses by digest.
        self._not_served: dict[str, str] = {}  # Reasons by digest.
        self._cleaner = ThreadPoolExecutor(1, thread_name_prefix="adapter-cleaner")
        self._newest = stored.newest  # Number of a change. Threads hold ``_changes`` to use it.
        self._followed = set[int]()  # Numbers of changes. Threads hold ``_changes`` to use them.
        self.notes = (
            self._load(stored) if settings.enabled else ("adapters are disabled: the base model is served alone",)
        )

    def register(
        self,
        name: str,
        source: str,
        *,
        replace: bool = False,
        trusted: bool = False,
        persistent: bool | None = None,
        overrides: ChatOverrides = NO_OVERRIDES,
        shown_source: str = "",
        author: Author = NOBODY,
        takes_over: bool = False,
        shared: str = "",
    ) -> RegisteredAdapter:
        """Fetch an adapter from ``source``, check it, and register it under ``name``.

        Args:
            name: the name that clients send as ``model``.
            source: a folder or URL.
            replace: whether an existing name may get other content. Registering the same content again never changes
                anything, since controllers repeat their loads.
            trusted: whether the operator gave the source, so that it may be anywhere.
            persistent: whether to write the name to the registry for the next start. None writes names of untrusted
                sources only, since the command line repeats the trusted ones.
            overrides: chat settings that replace those in the adapter's files.
            shown_source: text reported instead of ``source``, for a source that is temporary.
            author: the author of the change. A tenant owns the names that it adds. A replaced name keeps its owner.
            takes_over: whether ``source`` is a folder of :meth:`receiving`, whose files are moved instead of copied.
            shared: name of shared weights that belong to the files of ``source``; empty for none.

        Returns:
            The adapter to which the name points, the adapter that it replaced, and warnings about ignored keys.

        Raises:
            AdapterExists: the name has other content, and ``replace`` is not set.
            AdapterBusy: another call is changing the name.
            AdapterQuotaExceeded: the author would own too many adapters or bytes.
            AdapterStoreError: the store or the registry cannot be written.
            AdapterError: the name, the source or the adapter is not valid.
        """
        check_name(name, self._reserved)
        staging = self._store.stage(source, trusted, overrides, takes_over, shared)
        with self._reserve(name), staging as staged, self._changes:
            self._check_open()
            is_kept = not trusted if persistent is None else persistent
            return self._register_staged(name, shown_source or source, staged, replace, is_kept, author)

    def locate(self, source: str, trusted: bool = False) -> str:
        """Return the URL on the Hub for a source ``org/repo`` that is not a folder's name, or else the source.

        Args:
            source: A folder, a URL or ``org/repo``.
            trusted: Whether the operator gives the source. Otherwise the repository must be below an allowed URL.
        """
        return self._store.locate(source, trusted)

    def receiving(self) -> AbstractContextManager[Path]:
        """Return a context with an empty folder for uploaded files."""
        return self._store.receiving()

    def alias(self, name: str, of: str, *, replace: bool = False, author: Author = NOBODY) -> RegisteredAdapter:
        """Register the version of another name under a second name, which needs no extra memory.

        Raises:
            UnknownAdapter: no adapter has the name ``of``.
            AdapterExists, AdapterBusy, AdapterQuotaExceeded, AdapterStoreError, AdapterError: see :meth:`register`.
        """
        check_name(name, self._reserved)
        with self._reserve(name), self._changes:
            self._check_open()
            record = self.get(of)
            if record is None:
                raise UnknownAdapter(f"no adapter is called {of!r}")
            row = record.row._replace(name=name, created_at=self._now(), owner=author.owner)
            alias = AdapterRecord(row, record.folder, record.persistent)
            self._check_free(alias, replace)
            return self._point(alias, replace, author)

    def remove(self, name: str, actor: str = "") -> AdapterRecord:
        """Remove a name.

        The files of the version are deleted when no name and no request uses them any more.

        Raises:
            UnknownAdapter: the name is not registered.
            AdapterBusy: another call is changing the name.
            AdapterStoreError: the registry cannot be written.
        """
        with self._reserve(name), self._changes:
            self._check_open()
            if name not in self._records:
                raise UnknownAdapter(f"no adapter is called {name!r}")
            self._registry.remove(name, actor)
            with self._state:
                record = self._records.pop(name)
                self.changes += 1
                self._names[record.digest] -= 1
            self._drop_if_unused(record.digest)
            return record

    def follow(self) -> list[FollowedChange]:
        """Apply changes that other servers have made in the registry since the last call or the first read.

        Names from the command line stay unchanged. The files of a new version must be in the store, which the servers
        share.

        Raises:
            AdapterStoreError: the registry cannot be read, or the catalog is closed.
        """
        with self._changes:
            self._check_open()
            changed = self._registry.changed(self._newest - _LATE_CHANGES)
            names = {changed[number] for number in changed.keys() - self._followed}
            rows = self._registry.named(names) if names else {}
            followed = [self._follow(name, rows.get(name)) for name in sorted(names - self._reserved)]
            self._newest = max(changed, default=self._newest)
            self._followed = set(changed)
            return [change for change in followed if change is not None]

    def get(self, name: str) -> AdapterRecord | None:
        """Return the adapter with this name; None if there is none.

        Raises:
            AdapterNotServed: the adapter is registered, but its files are missing, or its weights overflow the dtype.
        """
        record = self._records.get(name)
        if record is not None and (why := self._not_served.get(record.digest)):
            raise AdapterNotServed(
                f"adapter {name!r} is registered, but {why}; register it again with replace, or unload it"
            )
        return record

    def owner(self, name: str) -> str | None:
        """Return the id of the tenant's key that owns a name.

        Empty if the operator owns it; None if the name is unknown.
        """
        record = self._records.get(name)
        return None if record is None else record.row.owner

    def names(self) -> list[str]:
        """Return all names, the oldest first."""
        with self._state:
            return list(self._records)

    def list(self) -> "list[AdapterRecord]":
        """Return all records, the oldest first, including adapters that cannot be served."""
        with self._state:
            return [*self._records.values()]

    def note_change(self, actor: str, action: str, name: str, detail: dict[str, object]) -> None:
        """Write a change of an adapter into the audit log. Raises AdapterStoreError if that fails."""
        self._registry.note(actor, action, name, detail)

    def splits(self) -> dict[str, str]:
        """Return the names whose requests are split between adapters, each with its split as JSON."""
        return self._registry.splits()

    def set_split(self, name: str, text: str, actor: str) -> None:
        """Write a name's split as JSON, or remove it if the text is empty; raises AdapterStoreError."""
        check_name(name, self._reserved)
        self._registry.set_split(name, text, actor)

    def has(self, digest: AdapterDigest) -> bool:
        """Return whether a name points to a version."""
        return self._names[digest] > 0

    def versions(self) -> tuple[AdapterRef, ...]:
        """Return, once each, all servable versions to which a name points."""
        with self._state:
            records = [record for record in self._records.values() if record.digest not in self._not_served]
        return tuple({record.digest: record.ref for record in records}.values())

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, name: str) -> bool:
        return name in self._records

    def acquire(self, digest: AdapterDigest) -> None:
        """Keep the files of a version for a request until ``release``.

        Raises:
            UnknownAdapter: the version was removed after it was looked up.
        """
        with self._state:
            if not self._names[digest] and not self._uses[digest]:
                raise UnknownAdapter(f"no adapter has the digest {digest}")
            self._uses[digest] += 1

    def release(self, digest: AdapterDigest) -> None:
        """End one use of a version.

        After the last use of a removed version, its files are deleted in the background.

        Raises:
            ValueError: the version was not acquired.
        """
        with self._state:
            if not self._uses[digest]:
                raise ValueError(f"adapter {digest} was released more often than acquired")
            self._uses[digest] -= 1
            unused = not self._uses[digest] and not self._names[digest]
        if unused:
            self._cleaner.submit(self._clean, digest)

    def close(self) -> None:
        """Wait for changes in progress, and close registry and store. Unfinished registrations fail."""
        with self._changes:
            self._is_closed = True
        self._cleaner.shutdown()
        self._registry.close()
        self._store.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise AdapterStoreError("the adapter store is closed, since the server is stopping")

    def _load(self, stored: StoredAdapters) -> tuple[str, ...]:
        if self._registry.newest() != stored.newest:  # Another server has registered or removed some names.
            stored.read()
            self._newest = stored.newest
        records = stored.records
        present = self._collect({record.row.digest for of_base in records.values() for record in of_base.values()})
        self._records = records.pop(self._registry.base, {})
        hidden = sorted(self._reserved & self._records.keys())
        for name in hidden:  # The name now means the base model.
            del self._records[name]
        self._names = Counter([record.row.digest for record in self._records.values()])
        for digest in self._names.keys() - present:
            self._not_served[digest] = f"its files are missing from {self._store.folder(AdapterDigest(digest))}"
        for digest in self._names.keys() & present:
            if self._store.overflows(AdapterDigest(digest)):
                self._not_served[digest] = f"its weights are too large for {self.dtype}"
        notes = [
            f"adapter {name!r} is registered, but {self._not_served[record.row.digest]}"
            for name, record in (self._records.items() if self._not_served else ())
            if record.row.digest in self._not_served
        ]
        if hidden:
            notes.append(f"{_some(hidden)} registered under a name that now belongs to the base model: not served")
        if others := sorted(name for of_base in records.values() for name in of_base):
            notes.append(f"{_some(others)} registered for another base model: not served")
        return tuple(notes)

    def _follow(self, name: str, row: RegistryRow | None) -> FollowedChange | None:
        """Change the record of a name to the registry's, or return None if both are equal.

        The caller holds ``_changes``.
        """
        old = self._records.get(name)
        if (row is None and old is None) or (old is not None and not (old.persistent and _differs(old.row, row))):
            return None
        record = None if row is None else AdapterRecord(row, str(self._store.folder(AdapterDigest(row.digest))))
        why_not = "" if record is None else self._why_not(record)
        with self._state:
            self.changes += 1
            if record is None:
                del self._records[name]
            else:
                self._records[name] = record
                self._names[record.digest] += 1
                self._not_served.pop(record.digest, None)
                if why_not:
                    self._not_served[record.digest] = why_not
            if old is not None:
                self._names[old.digest] -= 1
        if old is not None:
            self._drop_if_unused(old.digest)
        return FollowedChange(name, record, old, why_not)

    def _why_not(self, record: AdapterRecord) -> str:
        """Return why a stored version cannot be served; empty if it can."""
        if not Path(record.folder).is_dir():
            return f"its files are missing from {record.folder}"
        if self._store.overflows(record.digest):
            return f"its weights are too large for {self.dtype}"
        try:
            self._accept(record.ref)
        except AdapterError as error:
            return str(error)
        return ""

    def _collect(self, named: Set[str]) -> set[AdapterDigest]:
        """Delete versions without a name (from trusted sources, or left by a crash), and return the others."""
        present = self._store.digests()
        with self._store.alone() as alone:
            if not alone:
                return present
            self._store.clear_incoming()
            for digest in sorted(present - named):
                if self._registry.remove_version_if_unnamed(digest):
                    self._store.remove(digest)
                    present.discard(digest)
        return present

    @contextmanager
    def _reserve(self, name: str) -> Iterator[None]:
        with self._state:
            if name in self._busy:
                raise AdapterBusy(f"adapter {name!r} is being changed by another call; try again later")
            self._busy.add(name)
        try:
            yield
        finally:
            with self._state:
                self._busy.discard(name)

    def _register_staged(
        self, name: str, source: str, staged: StagedVersion, replace: bool, persistent: bool, author: Author
    ) -> RegisteredAdapter:
        max_rank = largest_rank(staged.ranks)
        row = RegistryRow(
            name=name,
            digest=staged.digest,
            source=source,
            created_at=self._now(),
            ranks=encode_shape(staged.ranks, staged.extras, changes_tower=bool(staged.description.tower)),
            max_rank=max_rank,
            weight_bytes=staged.description.weight_bytes,
            chat=self._chat_of(source, staged),
            owner=author.owner,
        )
        record = AdapterRecord(row, str(self._store.folder(staged.digest)), persistent)
        self._check_free(record, replace)
        self._accept(record.ref)
        self._store.publish(staged, is_durable=persistent)
        return self._point(record, replace, author, staged.description.warnings)

    def _check_free(self, record: AdapterRecord, replace: bool) -> None:
        """Raise AdapterExists if a record's name has other content and may not be replaced."""
        old = self._records.get(record.name)
        if old is not None and not replace and not _has_content_of(old, record):
            raise AdapterExists(
                f"adapter {record.name!r} is registered already with other content; unload it first, or replace it"
            )

    def _point(
        self, record: AdapterRecord, replace: bool, author: Author, warnings: tuple[str, ...] = ()
    ) -> RegisteredAdapter:
        """Make a name point to a stored version. The caller holds ``_changes``."""
        name = record.name
        digest = record.digest
        old = self._records.get(name)
        if old is not None and old.row.owner:
            record = dataclasses.replace(record, row=record.row._replace(owner=old.row.owner))
        if old is not None and _has_content_of(old, record) and (old.persistent or not record.persistent):
            self._not_served.pop(digest, None)
            return RegisteredAdapter(old, None, warnings, is_unchanged=True)
        try:
            if record.persistent:
                self._registry.add(record.row, replace, author)
        except Exception:
            self._drop_if_unused(digest)
            raise
        with self._state:
            self.changes += 1
            self._not_served.pop(digest, None)
            self._records[name] = record
            self._names[digest] += 1
            if old is not None:
                self._names[old.digest] -= 1
        if old is not None:
            self._drop_if_unused(old.digest)
        replaced = old if old is not None and old.digest != digest else None
        return RegisteredAdapter(record, replaced, warnings)

    def _chat_of(self, source: str, staged: StagedVersion) -> str:
        try:
            return as_text(self._fit_chat(staged.description.chat))
        except AdapterError as error:
            raise AdapterError(f"{source}: {error}") from error

    def _clean(self, digest: AdapterDigest) -> None:
        with self._changes:
            self._drop_if_unused(digest)

    def _drop_if_unused(self, digest: AdapterDigest) -> None:
        """Delete a version that no name, request or row of another base model needs.

        The caller holds ``_changes``.

        A failure is only logged, since the call that used the version last has succeeded.
        """
        with self._state:
            if self._names[digest] or self._uses[digest]:
                return
            del self._names[digest], self._uses[digest]
            self._not_served.pop(digest, None)
        try:
            # Otherwise another process may use the version, and a later start deletes it.
            with self._store.alone() as alone:
                if alone and self._registry.remove_version_if_unnamed(digest):
                    self._store.remove(digest)
        except Exception:  # The next start deletes the version.
            _LOG.exception("adapter %s: no longer used, but its files cannot be deleted", digest)


def _has_content_of(old: AdapterRecord, new: AdapterRecord) -> bool:
    return (old.digest, old.row.chat) == (new.digest, new.row.chat)


def _differs(old: RegistryRow, new: RegistryRow | None) -> bool:
    return new is None or (old.digest, old.chat, old.owner) != (new.digest, new.chat, new.owner)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"{len(names)} adapter{'s' if len(names) > 1 else ''} ({shown})"
