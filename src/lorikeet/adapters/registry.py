"""Which names point to which versions, kept in a database so that it outlives the server."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import ForeignKey, create_engine, delete, event, insert, select
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from lorikeet.adapters.errors import AdapterError, AdapterExists


class _Base(DeclarativeBase):
    pass


class VersionRow(_Base):
    """A version: the content that names point to. ``ranks`` is JSON, decoded only for adapters in use."""

    __tablename__ = "versions"
    digest: Mapped[str] = mapped_column(primary_key=True)
    ranks: Mapped[str]
    max_rank: Mapped[int]
    weight_bytes: Mapped[int]
    source: Mapped[str]
    created_at: Mapped[float]


class AdapterNameRow(_Base):
    """A name, valid for one base model. ``created_at`` in Unix seconds."""

    __tablename__ = "adapters"
    base: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column(ForeignKey("versions.digest"), index=True)
    source: Mapped[str]
    created_at: Mapped[float]


class RegistryRow(NamedTuple):
    """A name joined with its version; ``ranks`` is the JSON of ``AdapterRef.ranks``."""

    name: str
    digest: str
    source: str
    created_at: float
    ranks: str
    max_rank: int
    weight_bytes: int


class Registry:
    """The database of one base model's adapters. Safe to use from several threads.

    Args:
        url: SQLAlchemy URL (SQLite or PostgreSQL).
        base: identity of the base model; rows of others stay untouched.

    Raises:
        AdapterError: the database cannot be opened.
    """

    def __init__(self, url: str, base: str) -> None:
        self._base = base
        try:
            parsed = _with_driver(make_url(url))
            self._engine = create_engine(parsed, pool_pre_ping=True)
            if parsed.get_backend_name() == "sqlite":
                event.listen(self._engine, "connect", _tune_sqlite)
            _Base.metadata.create_all(self._engine)
        except (SQLAlchemyError, ArgumentError, ImportError, OSError) as error:
            raise AdapterError(f"the adapter registry cannot be opened: {error}") from error

    def load(self) -> list[RegistryRow]:
        """All rows of this base, oldest first, in one query."""
        query = (
            select(
                AdapterNameRow.name,
                AdapterNameRow.digest,
                AdapterNameRow.source,
                AdapterNameRow.created_at,
                VersionRow.ranks,
                VersionRow.max_rank,
                VersionRow.weight_bytes,
            )
            .join(VersionRow, VersionRow.digest == AdapterNameRow.digest)
            .where(AdapterNameRow.base == self._base)
            .order_by(AdapterNameRow.created_at, AdapterNameRow.name)
        )
        with self._engine.connect() as connection:
            return [RegistryRow(*row) for row in connection.execute(query)]

    def names_of_other_bases(self) -> list[str]:
        """Names that are registered for other base models."""
        query = select(AdapterNameRow.name).where(AdapterNameRow.base != self._base).order_by(AdapterNameRow.name)
        with self._engine.connect() as connection:
            return list(connection.scalars(query))

    def add(self, row: RegistryRow, replace: bool) -> None:
        """Insert a row, or with ``replace`` put it in the place of the name's present one.

        Raises:
            AdapterExists: the name is taken, by another process since this one looked.
        """
        try:
            with Session(self._engine) as session, session.begin():
                session.merge(self._version(row))
                session.flush()
                name = self._name(row)
                if replace:
                    session.merge(name)
                else:
                    session.add(name)
        except IntegrityError as error:
            raise AdapterExists(f"adapter {row.name!r} is registered already") from error

    def add_many(self, rows: Iterable[RegistryRow]) -> None:
        """Insert new rows of new versions in one transaction."""
        rows = list(rows)
        if not rows:
            return
        versions = {row.digest: _columns(self._version(row)) for row in rows}
        with self._engine.begin() as connection:
            connection.execute(insert(VersionRow), list(versions.values()))
            connection.execute(insert(AdapterNameRow), [_columns(self._name(row)) for row in rows])

    def remove(self, name: str) -> None:
        """Delete a name; one that is not there is no error."""
        with self._engine.begin() as connection:
            where = (AdapterNameRow.base == self._base, AdapterNameRow.name == name)
            connection.execute(delete(AdapterNameRow).where(*where))

    def remove_version_if_unnamed(self, digest: str) -> bool:
        """Delete a version to which no name of any base points; False if one does."""
        with self._engine.begin() as connection:
            named = select(AdapterNameRow.name).where(AdapterNameRow.digest == digest).limit(1)
            if connection.scalar(named) is not None:
                return False
            connection.execute(delete(VersionRow).where(VersionRow.digest == digest))
            return True

    def named_digests(self) -> set[str]:
        """Digests that a name of any base points to."""
        with self._engine.connect() as connection:
            return set(connection.scalars(select(AdapterNameRow.digest).distinct()))

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def _version(self, row: RegistryRow) -> VersionRow:
        return VersionRow(
            digest=row.digest,
            ranks=row.ranks,
            max_rank=row.max_rank,
            weight_bytes=row.weight_bytes,
            source=row.source,
            created_at=row.created_at,
        )

    def _name(self, row: RegistryRow) -> AdapterNameRow:
        return AdapterNameRow(
            base=self._base, name=row.name, digest=row.digest, source=row.source, created_at=row.created_at
        )


def sqlite_url(file: Path) -> str:
    """The URL of a SQLite file."""
    return URL.create("sqlite", database=str(file)).render_as_string(hide_password=False)


def _with_driver(url: URL) -> URL:
    """Name the driver that the ``postgres`` extra installs; users write plain ``postgresql://``."""
    if url.drivername in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    return url


def _tune_sqlite(connection: Any, _record: Any) -> None:
    """Readers and the writer do not wait for each other (WAL); two writers wait up to 10 s."""
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", "busy_timeout=10000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _columns(row: _Base) -> dict[str, Any]:
    return {column.key: getattr(row, column.key) for column in row.__mapper__.column_attrs}
