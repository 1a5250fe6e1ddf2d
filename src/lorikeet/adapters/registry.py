"""The adapter registry: a database of adapter names and versions, and the records that other packages use.

SQLite or PostgreSQL through SQLAlchemy. A name points to an immutable version, which is identified by its digest.
"""

import hashlib
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Delete,
    Float,
    ForeignKey,
    Integer,
    MetaData,
    Select,
    String,
    Table,
    create_engine,
    delete,
    event,
    func,
    inspect,
    select,
)
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.schema import CreateIndex, CreateTable

from lorikeet.adapters.audit import AUDIT, changed_subjects, newest_change, note_change
from lorikeet.adapters.chat import AdapterChat
from lorikeet.adapters.errors import AdapterError, AdapterExists, AdapterQuotaExceeded, AdapterStoreError
from lorikeet.adapters.sources import shown_source
from lorikeet.adapters.url_reader import without_credentials
from lorikeet.core.adapter import AdapterExtra, AdapterRef
from lorikeet.core.geometry import ModelGeometry
from lorikeet.core.ids import AdapterDigest, AdapterName
from lorikeet.core.text import format_size, install_command

_DATABASES = ("sqlite", "postgresql")
"""Both support ``ON CONFLICT``; other databases are not supported."""
_NAMES_AT_ONCE = 1000
_CREATE_TABLES_LOCK = 0x6C6F72696B656574
"""Key of PostgreSQL's advisory lock: "lorikeet" in ASCII."""


def open_engine(url: str, postgresql_arguments: dict[str, Any] | None = None) -> Engine:
    """Return a SQLAlchemy engine for a URL, without connecting.

    Args:
        url: SQLAlchemy URL (SQLite or PostgreSQL).
        postgresql_arguments: connection arguments for PostgreSQL's driver.

    Raises:
        ValueError: the URL names another database.
        ImportError: the driver is not installed.
        sqlalchemy.exc.ArgumentError: the text is not a URL.
    """
    parsed = _with_driver(make_url(url))
    backend = parsed.get_backend_name()
    if backend not in _DATABASES:
        raise ValueError(f"a registry is SQLite or PostgreSQL, not {backend}")
    arguments = (postgresql_arguments or {}) if backend == "postgresql" else {}
    try:
        engine = create_engine(parsed, pool_pre_ping=True, connect_args=arguments)
    except ImportError as error:
        raise ImportError(f"PostgreSQL needs a driver: run `{install_command('postgres')}` ({error})") from error
    if backend == "sqlite":
        event.listen(engine, "connect", _tune_sqlite)
    return engine


def insert_of(engine: Engine) -> Callable[..., Any]:
    """Return the INSERT construct of the engine's database, which supports ``ON CONFLICT``."""
    insert: Callable[..., Any] = import_module(f"sqlalchemy.dialects.{engine.dialect.name}").insert
    return insert


def create_tables(engine: Engine, metadata: MetaData) -> None:
    """Create missing tables and indexes.

    Several servers may do so at the same time.

    PostgreSQL's IF NOT EXISTS is not atomic: another server can create the table between check and creation. A lock
    until the end of the transaction prevents this. Existing indexes are not created again: creating an index locks its
    table against writes, and locks on two tables can cause a deadlock with a server that writes to both. SQLite has
    only one writer.
    """
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(select(func.pg_advisory_xact_lock(_CREATE_TABLES_LOCK)))
        for table in metadata.sorted_tables:
            connection.execute(CreateTable(table, if_not_exists=True))
            there = {index["name"] for index in inspect(connection).get_indexes(table.name)}
            for index in table.indexes:
                if index.name not in there:
                    connection.execute(CreateIndex(index, if_not_exists=True))


def sqlite_url(file: Path) -> str:
    """Return the SQLAlchemy URL of a SQLite file."""
    return URL.create("sqlite", database=str(file)).render_as_string(hide_password=False)


def _with_driver(url: URL) -> URL:
    """Return ``url`` with the driver of the ``postgres`` extra, if it is a plain ``postgresql://`` URL."""
    if url.drivername in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    return url


def _tune_sqlite(connection: Any, _record: Any) -> None:
    """Set up a SQLite connection: a timeout of 10 s, and WAL, so that readers and the writer do not block each other.

    A new file is switched to WAL once. If several connections try to switch at the same time, SQLite refuses some
    immediately, regardless of the busy timeout, to avoid a deadlock. The refused connections try again.
    """
    cursor = connection.cursor()
    for pragma in ("busy_timeout=10000", "synchronous=NORMAL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    deadline_s = time.monotonic() + 10.0
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            break
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)
    cursor.close()


_TABLES = MetaData()
"""Plain tables: their rows are read and written in bulk, and the mapper of SQLAlchemy costs a tenth of a start."""

VERSIONS = Table(
    "versions",
    _TABLES,
    Column("digest", String, primary_key=True),
    Column("ranks", String, nullable=False),
    Column("max_rank", Integer, nullable=False),
    Column("weight_bytes", BigInteger, nullable=False),
    Column("source", String, nullable=False),
    Column("created_at", Float, nullable=False),
)
"""Versions, to which names point. ``ranks`` is JSON, which is decoded only for adapters in use."""


def _table_of_names(table: str, *columns: Column[Any]) -> Table:
    """Return a table that has at most one row for a name of a base model."""
    key = (Column("base", String, primary_key=True), Column("name", String, primary_key=True))
    return Table(table, _TABLES, *key, *columns)


NAMES = _table_of_names(
    "adapters",
    Column("digest", String, ForeignKey("versions.digest"), nullable=False, index=True),
    Column("source", String, nullable=False),
    Column("created_at", Float, nullable=False),
)
"""Names for one base model. ``created_at`` is in Unix seconds."""

_CHATS = _table_of_names(
    "adapter_chats",
    Column("chat", String, nullable=False),
)
"""Chat settings of a name that differ from the base model's, as JSON; most names have no row."""

_SPLITS = _table_of_names(
    "adapter_splits",
    Column("split", String, nullable=False),
)
"""Names whose requests are split between adapters, as JSON."""

_OWNERS = _table_of_names(
    "adapter_owners",
    Column("key_id", String, nullable=False, index=True),
)
"""The tenant that owns a name; names of the operator have no row. ``key_id`` is the id of the tenant's key."""


def _is_of_name(table: Table) -> ColumnElement[bool]:
    """Return the condition that a row of a table has the same name as a row of ``NAMES``."""
    return (table.c.base == NAMES.c.base) & (table.c.name == NAMES.c.name)


_ALL_ROWS = (
    select(
        NAMES.c.base,
        NAMES.c.name,
        NAMES.c.digest,
        NAMES.c.source,
        NAMES.c.created_at,
        VERSIONS.c.ranks,
        VERSIONS.c.max_rank,
        VERSIONS.c.weight_bytes,
        func.coalesce(_CHATS.c.chat, ""),
        func.coalesce(_OWNERS.c.key_id, ""),
    )
    .select_from(NAMES)
    .join(VERSIONS, VERSIONS.c.digest == NAMES.c.digest)
    .outerjoin(_CHATS, _is_of_name(_CHATS))
    .outerjoin(_OWNERS, _is_of_name(_OWNERS))
)
"""A ``RegistryRow`` for each name of each base model, after the identity of the base."""


class Author(NamedTuple):
    """The author of a change of adapters.

    Attributes:
        actor: name in the audit log.
        owner: id of the tenant's key that owns new names; empty for the operator.
        max_adapters: maximum number of adapters of the owner; 0 for no limit.
        max_bytes: maximum bytes of the weights of these adapters; 0 for no limit.
    """

    actor: str = ""
    owner: str = ""
    max_adapters: int = 0
    max_bytes: int = 0


NOBODY = Author()
"""The author of changes without a request, by the command line or by the server itself."""


class RegistryRow(NamedTuple):
    """A name joined with its version.

    ``ranks`` is the JSON of ranks and extras (:func:`encode_shape`), ``chat`` the JSON of an ``AdapterChat``, empty if
    it is the default. ``owner`` is the id of a tenant's key; empty for the operator.
    """

    name: str
    digest: str
    source: str
    created_at: float
    ranks: str
    max_rank: int
    weight_bytes: int
    chat: str = ""
    owner: str = ""


class AdapterRegistry:
    """The registered adapters of one base model.

    Thread-safe.

    Args:
        url: SQLAlchemy URL (SQLite or PostgreSQL).
        base: identity of the base model; "" if it is not known yet.

    Attributes:
        base: identity of the base model. It must be set before any change. Rows of other base models are not changed.

    Raises:
        AdapterError: the database cannot be opened.
    """

    def __init__(self, url: str, base: str = "") -> None:
        self.base = base
        try:
            self._engine = open_engine(url)
            self._insert = insert_of(self._engine)
            create_tables(self._engine, _TABLES)
            create_tables(self._engine, AUDIT)
        except (SQLAlchemyError, ImportError, OSError, ValueError) as error:
            raise AdapterError(f"the adapter registry cannot be opened: {error}") from error

    def load(self) -> dict[str, list[RegistryRow]]:
        """Return all rows by base model, the oldest first, in one query.

        Raises:
            AdapterStoreError: the database cannot be read.
        """
        rows: dict[str, list[RegistryRow]] = {}
        with self._reading() as connection:
            for base, *row in connection.execute(_ALL_ROWS.order_by(NAMES.c.created_at, NAMES.c.name)):
                rows.setdefault(base, []).append(RegistryRow(*row))
        return rows

    def named(self, names: Iterable[str]) -> dict[str, RegistryRow]:
        """Return the rows of these names for this base model.

        Raises:
            AdapterStoreError: the database cannot be read.
        """
        rows = dict[str, RegistryRow]()
        wanted = sorted(names)
        with self._reading() as connection:
            for at in range(0, len(wanted), _NAMES_AT_ONCE):
                some = wanted[at : at + _NAMES_AT_ONCE]
                query = _ALL_ROWS.where(NAMES.c.base == self.base, NAMES.c.name.in_(some))
                rows |= {name: RegistryRow(name, *row) for _, name, *row in connection.execute(query)}
        return rows

    def newest(self) -> int:
        """Return the number of the latest change; 0 before the first.

        Raises:
            AdapterStoreError: the database cannot be read.
        """
        with self._reading() as connection:
            return newest_change(connection)

    def changed(self, after: int) -> dict[int, str]:
        """Return the names and ids of keys that any server has changed after the change with this number, by number.

        Raises:
            AdapterStoreError: the database cannot be read.
        """
        with self._reading() as connection:
            return changed_subjects(connection, after)

    def add(self, row: RegistryRow, replace: bool, author: Author = NOBODY) -> None:
        """Insert a row and note it in the audit log; a row that another server has just inserted changes nothing.

        Args:
            row: The row.
            replace: Whether it may replace another row of the name.
            author: The author of the change.

        Raises:
            AdapterExists: the name has another row, possibly from another process since the caller checked.
            AdapterQuotaExceeded: the author would own too many adapters or bytes.
            AdapterStoreError: the database cannot be written.
        """
        insert_name = self._insert(NAMES).values(self._name(row))
        if replace:
            new = {key: insert_name.excluded[key] for key in ("digest", "source", "created_at")}
            insert_name = insert_name.on_conflict_do_update(index_elements=["base", "name"], set_=new)
        insert_version = self._insert(VERSIONS).values(_version(row)).on_conflict_do_nothing()
        with self._writing(row.name) as connection:
            old = connection.scalar(select(NAMES.c.digest).where(NAMES.c.base == self.base, NAMES.c.name == row.name))
            if old == row.digest and not replace:
                chat = connection.scalar(self._value(_CHATS.c.chat, row.name))
                owner = connection.scalar(self._value(_OWNERS.c.key_id, row.name))
                if (chat or "", owner or "") == (row.chat, row.owner):
                    return
            connection.execute(insert_version)
            connection.execute(insert_name)
            for table, column, value in ((_CHATS, "chat", row.chat), (_OWNERS, "key_id", row.owner)):
                connection.execute(self._delete(table, row.name))
                if value:
                    connection.execute(self._insert(table).values(base=self.base, name=row.name, **{column: value}))
            if author.owner:
                _check_quota(connection, author)
            detail = {"digest": row.digest, "source": shown_source(without_credentials(row.source))}
            action = "adapter added" if old is None else "adapter replaced"
            note_change(connection, author.actor, action, row.name, detail | ({"replaced": old} if old else {}))

    def remove(self, name: str, actor: str = "") -> None:
        """Delete a name, and note the change in the audit log.

        An unknown name is ignored.

        Raises:
            AdapterStoreError: the database cannot be written.
        """
        with self._writing() as connection:
            removed = connection.execute(self._delete(NAMES, name)).rowcount
            connection.execute(self._delete(_CHATS, name))
            connection.execute(self._delete(_OWNERS, name))
            if removed:
                note_change(connection, actor, "adapter removed", name, {})

    def note(self, actor: str, action: str, name: str, detail: dict[str, Any]) -> None:
        """Write another change of an adapter into the audit log.

        Raises:
            AdapterStoreError: the database cannot be written.
        """
        with self._writing() as connection:
            note_change(connection, actor, action, name, detail)

    def splits(self) -> dict[str, str]:
        """Return the splits of this base model as JSON, by name.

        Raises:
            AdapterStoreError: the database cannot be read.
        """
        with self._reading() as connection:
            rows = connection.execute(select(_SPLITS.c.name, _SPLITS.c.split).where(_SPLITS.c.base == self.base))
            return {row.name: row.split for row in rows}

    def set_split(self, name: str, text: str, actor: str) -> None:
        """Write the split of a name, or delete it if the text is empty. The audit log records the change.

        Raises:
            AdapterStoreError: the database cannot be written.
        """
        with self._writing() as connection:
            connection.execute(self._delete(_SPLITS, name))
            if text:
                connection.execute(self._insert(_SPLITS).values(base=self.base, name=name, split=text))
            note_change(connection, actor, "split changed" if text else "split removed", name, {"split": text})

    def remove_version_if_unnamed(self, digest: str) -> bool:
        """Delete a version if no name of any base model points to it.

        Return whether no name did.

        Raises:
            AdapterStoreError: the database cannot be written.
        """
        with self._writing() as connection:
            named = select(NAMES.c.name).where(NAMES.c.digest == digest).limit(1)
            if connection.scalar(named) is not None:
                return False
            connection.execute(delete(VERSIONS).where(VERSIONS.c.digest == digest))
            return True

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        try:
            with self._engine.connect() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise AdapterStoreError(f"the adapter registry cannot be read: {_reason(error)}") from error

    @contextmanager
    def _writing(self, adding: str = "") -> Iterator[Connection]:
        """Open a transaction. ``adding`` is the name that it inserts, for the error message."""
        try:
            with self._engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            if adding and isinstance(error, IntegrityError):
                raise AdapterExists(f"adapter {adding!r} is registered already") from error
            raise AdapterStoreError(f"the adapter registry cannot be written: {_reason(error)}") from error

    def _value(self, column: Column[str], name: str) -> Select[str]:
        table = column.table
        return select(column).where(table.c.base == self.base, table.c.name == name)

    def _delete(self, table: Table, name: str) -> Delete:
        return delete(table).where(table.c.base == self.base, table.c.name == name)

    def _name(self, row: RegistryRow) -> dict[str, Any]:
        columns = ("name", "digest", "source", "created_at")
        return {"base": self.base, **{column: getattr(row, column) for column in columns}}


def _check_quota(connection: Connection, author: Author) -> None:
    """Check an owner's limits, including the name that this transaction adds.

    Only one server checks at a time.

    Raises:
        AdapterQuotaExceeded: the owner has too many adapters or bytes.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(func.hashtext(author.owner))))
    owned = (
        select(func.count(), func.coalesce(func.sum(VERSIONS.c.weight_bytes), 0))
        .select_from(_OWNERS)
        .join(NAMES, _is_of_name(_OWNERS))
        .join(VERSIONS, VERSIONS.c.digest == NAMES.c.digest)
        .where(_OWNERS.c.key_id == author.owner)
    )
    number, size_bytes = connection.execute(owned).one()
    if 0 < author.max_adapters < number:
        raise AdapterQuotaExceeded(f"this key may own {author.max_adapters} adapters, and owns that many already")
    if 0 < author.max_bytes < size_bytes:
        raise AdapterQuotaExceeded(
            f"this key may own {format_size(author.max_bytes)} of adapters; with this one it would own "
            f"{format_size(size_bytes)}"
        )


def _version(row: RegistryRow) -> dict[str, Any]:
    columns = ("digest", "ranks", "max_rank", "weight_bytes", "source", "created_at")
    return {column: getattr(row, column) for column in columns}


def _reason(error: SQLAlchemyError) -> object:
    """Return the error of the database driver, without the SQL statement."""
    return error.orig if isinstance(error, DBAPIError) else error


_NAME = re.compile(r"[A-Za-z0-9_@-][A-Za-z0-9._/@-]{0,127}")


@dataclass(frozen=True)
class AdapterRecord:
    """One registered name.

    Attributes:
        row: the name's row in the registry.
        folder: folder of the version's files.
        persistent: whether the name is in the registry and survives a restart.
    """

    row: RegistryRow
    folder: str
    persistent: bool = True

    @property
    def name(self) -> AdapterName:
        """The registered name."""
        return AdapterName(self.row.name)

    @property
    def digest(self) -> AdapterDigest:
        """The digest of the version to which the name points."""
        return AdapterDigest(self.row.digest)

    @property
    def source(self) -> str:
        """Source of the adapter, without credentials."""
        return without_credentials(self.row.source)

    @property
    def shown_source(self) -> str:
        """Source of the adapter in the form shown to clients."""
        return shown_source(self.source)

    @property
    def created_at(self) -> float:
        """Time at which the name was registered with this version, in Unix seconds."""
        return self.row.created_at

    @property
    def max_rank(self) -> int:
        """Largest rank of the adapter."""
        return self.row.max_rank

    @cached_property
    def chat(self) -> AdapterChat:
        """The adapter's chat settings that differ from the base model's."""
        return _decode_chat(self.row.chat)

    @cached_property
    def request_chat(self) -> AdapterChat:
        """The chat settings that requests need: all but the examples, which would travel with every large body."""
        return msgspec.structs.replace(self.chat, examples=()) if self.chat.examples else self.chat

    @cached_property
    def ref(self) -> AdapterRef:
        """Reference to the version for requests, created on first use."""
        shape = _decode_shape(self.row.ranks)
        size = self.row.weight_bytes
        return AdapterRef(self.name, self.digest, self.folder, shape.ranks, size, shape.extras, shape.changes_tower)


class RegisteredAdapter(NamedTuple):
    """Result of registering a name.

    Attributes:
        record: the adapter to which the name points now.
        replaced: the adapter to which the name pointed before; None if there was none, or if it was the same version.
        warnings: sentences about ignored keys of the adapter's config.
        is_unchanged: Whether the name had this content already.
    """

    record: AdapterRecord
    replaced: AdapterRecord | None
    warnings: tuple[str, ...] = ()
    is_unchanged: bool = False


@lru_cache(maxsize=256)
def _decode_chat(text: str) -> AdapterChat:
    return msgspec.json.decode(text, type=AdapterChat) if text else AdapterChat()


class _StoredShape(msgspec.Struct, frozen=True):
    """Ranks, extras and whether the vision tower is changed, in the form of one field of a row."""

    ranks: dict[str, tuple[int, ...]]
    extras: tuple[AdapterExtra, ...] = ()
    changes_tower: bool = False


_WITH_EXTRAS = '{"ranks":'
"""Start of the JSON of an adapter with more than A and B of the decoder; other adapters have only their ranks."""


def encode_shape(
    ranks: dict[str, tuple[int, ...]], extras: tuple[AdapterExtra, ...], *, changes_tower: bool = False
) -> str:
    """Return ranks, extras and whether the vision tower is changed as the JSON for a row."""
    has_more = bool(extras) or changes_tower
    return msgspec.json.encode(_StoredShape(ranks, extras, changes_tower) if has_more else ranks).decode()


@lru_cache(maxsize=256)
def _decode_shape(text: str) -> _StoredShape:
    """Return the ranks and extras in a row, which callers must not change.

    They are cached, since many adapters share the same.
    """
    if text.startswith(_WITH_EXTRAS):
        return msgspec.json.decode(text, type=_StoredShape)
    return _StoredShape(msgspec.json.decode(text, type=dict[str, tuple[int, ...]]))


def check_name(name: str, reserved: set[str]) -> None:
    """Check that an adapter may have this name.

    Raises:
        AdapterError: the name is malformed or reserved.
    """
    if not _NAME.fullmatch(name) or ".." in name or "//" in name or name.endswith("/"):
        raise AdapterError(
            f"{name[:200]!r} cannot name an adapter: 1 to 128 of letters, digits and . _ - / @, "
            f"not starting with . or /, without '..'"
        )
    if name.endswith("/stats"):
        raise AdapterError(f"{name!r} cannot name an adapter: /v1/adapters/NAME/stats is the route of statistics")
    if name in reserved:
        raise AdapterError(f"{name!r} is the name of the base model")


def base_identity(base_name: str, geometry: ModelGeometry) -> str:
    """Return the identity of a base model in the registry: its name and a hash of its sizes, without the dtype."""
    sizes = msgspec.json.encode(msgspec.structs.replace(geometry.sizes, dtype_bytes=0), order="deterministic")
    return f"{base_name} {hashlib.sha256(sizes).hexdigest()[:16]}"
