"""Opening the database that registries keep their tables in: SQLite, or PostgreSQL where several servers share one."""

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import MetaData, create_engine, event, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.schema import CreateIndex, CreateTable

_INSERTS: dict[str, Callable[..., Any]] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
"""Both know ``ON CONFLICT``; other databases are not supported."""
_CREATING_LOCK = 0x6C6F72696B656574
"""Key of PostgreSQL's advisory lock: "lorikeet" in ASCII."""


def open_engine(url: str, postgresql_arguments: dict[str, Any] | None = None) -> Engine:
    """Return an engine for a URL. Nothing is connected yet.

    Args:
        url: SQLAlchemy URL (SQLite or PostgreSQL).
        postgresql_arguments: passed to its driver with each new connection.

    Raises:
        ValueError: another database.
        ImportError: the driver is not installed.
        sqlalchemy.exc.ArgumentError: not a URL.
    """
    parsed = _with_driver(make_url(url))
    backend = parsed.get_backend_name()
    if backend not in _INSERTS:
        raise ValueError(f"a registry is SQLite or PostgreSQL, not {backend}")
    arguments = (postgresql_arguments or {}) if backend == "postgresql" else {}
    engine = create_engine(parsed, pool_pre_ping=True, connect_args=arguments)
    if backend == "sqlite":
        event.listen(engine, "connect", _tune_sqlite)
    return engine


def insert_of(engine: Engine) -> Callable[..., Any]:
    """Return SQLAlchemy's INSERT of the engine's database, which has ``ON CONFLICT``."""
    return _INSERTS[engine.dialect.name]


def create_tables(engine: Engine, metadata: MetaData) -> None:
    """Create what is missing; two servers may start at once.

    PostgreSQL's IF NOT EXISTS looks and creates in two steps, between which another server can create the
    table; a lock until the end of the transaction keeps others out. SQLite has one writer anyway.
    """
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(select(func.pg_advisory_xact_lock(_CREATING_LOCK)))
        for table in metadata.sorted_tables:
            connection.execute(CreateTable(table, if_not_exists=True))
            for index in table.indexes:
                connection.execute(CreateIndex(index, if_not_exists=True))


def sqlite_url(file: Path) -> str:
    """The URL of a SQLite file."""
    return URL.create("sqlite", database=str(file)).render_as_string(hide_password=False)


def _with_driver(url: URL) -> URL:
    """Name the driver that the ``postgres`` extra installs; users write plain ``postgresql://``."""
    if url.drivername in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    return url


def _tune_sqlite(connection: Any, _record: Any) -> None:
    """Readers and the writer do not wait for each other (WAL); two writers wait up to 10 s.

    A new file changes to WAL once. Connections that ask for it at the same moment could wait for each other
    forever, so SQLite refuses some of them at once, whatever the busy timeout; they ask again.
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
