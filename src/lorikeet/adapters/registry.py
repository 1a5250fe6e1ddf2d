"""Which names point to which versions, kept in a database so that it outlives the server."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, ForeignKey, delete, select
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from lorikeet.adapters.database import create_tables, insert_of, open_engine
from lorikeet.adapters.errors import AdapterError, AdapterExists, AdapterStoreError


class _Base(DeclarativeBase):
    pass


class VersionRow(_Base):
    """A version: the content that names point to. ``ranks`` is JSON, decoded only for adapters in use."""

    __tablename__ = "versions"
    digest: Mapped[str] = mapped_column(primary_key=True)
    ranks: Mapped[str]
    max_rank: Mapped[int]
    weight_bytes: Mapped[int] = mapped_column(BigInteger)
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
            self._engine = open_engine(url)
            self._insert = insert_of(self._engine)
            create_tables(self._engine, _Base.metadata)
        except (SQLAlchemyError, ImportError, OSError, ValueError) as error:
            raise AdapterError(f"the adapter registry cannot be opened: {error}") from error

    def load(self) -> list[RegistryRow]:
        """Return all rows of this base, oldest first, in one query.

        Raises:
            AdapterStoreError: the database cannot be read.
        """
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
        with self._reading() as connection:
            return [RegistryRow(*row) for row in connection.execute(query)]

    def names_of_other_bases(self) -> list[str]:
        """Return the names that are registered for other base models; errors as of :meth:`load`."""
        query = select(AdapterNameRow.name).where(AdapterNameRow.base != self._base).order_by(AdapterNameRow.name)
        with self._reading() as connection:
            return list(connection.scalars(query))

    def add(self, row: RegistryRow, replace: bool) -> None:
        """Insert a row, or with ``replace`` put it in the place of the name's present one.

        Raises:
            AdapterExists: the name is taken, by another process since this one looked.
            AdapterStoreError: the database does not take the row.
        """
        insert_name = self._insert(AdapterNameRow).values(self._name(row))
        if replace:
            new = {key: insert_name.excluded[key] for key in ("digest", "source", "created_at")}
            insert_name = insert_name.on_conflict_do_update(index_elements=["base", "name"], set_=new)
        insert_version = self._insert(VersionRow).values(_version(row)).on_conflict_do_nothing()
        with self._writing(row.name) as connection:
            connection.execute(insert_version)
            connection.execute(insert_name)

    def remove(self, name: str) -> None:
        """Delete a name; one that is not there is no error.

        Raises:
            AdapterStoreError: the database cannot be written.
        """
        with self._writing() as connection:
            where = (AdapterNameRow.base == self._base, AdapterNameRow.name == name)
            connection.execute(delete(AdapterNameRow).where(*where))

    def remove_version_if_unnamed(self, digest: str) -> bool:
        """Delete a version to which no name of any base points; False if one does.

        Raises:
            AdapterStoreError: the database cannot be written.
        """
        with self._writing() as connection:
            named = select(AdapterNameRow.name).where(AdapterNameRow.digest == digest).limit(1)
            if connection.scalar(named) is not None:
                return False
            connection.execute(delete(VersionRow).where(VersionRow.digest == digest))
            return True

    def named_digests(self) -> set[str]:
        """Return the digests that a name of any base points to; errors as of :meth:`load`."""
        with self._reading() as connection:
            return set(connection.scalars(select(AdapterNameRow.digest).distinct()))

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
        """A transaction that adds the rows called ``adding``, or none."""
        try:
            with self._engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            if adding and isinstance(error, IntegrityError):
                raise AdapterExists(f"adapter {adding!r} is registered already") from error
            raise AdapterStoreError(f"the adapter registry cannot be written: {_reason(error)}") from error

    def _name(self, row: RegistryRow) -> dict[str, Any]:
        columns = ("name", "digest", "source", "created_at")
        return {"base": self._base, **{column: getattr(row, column) for column in columns}}


def _version(row: RegistryRow) -> dict[str, Any]:
    columns = ("digest", "ranks", "max_rank", "weight_bytes", "source", "created_at")
    return {column: getattr(row, column) for column in columns}


def _reason(error: SQLAlchemyError) -> object:
    """Return what the database itself said, without the statement."""
    return error.orig if isinstance(error, DBAPIError) else error
