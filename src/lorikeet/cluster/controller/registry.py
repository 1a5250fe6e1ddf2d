"""The cluster's tables in the registry's database: who is there, who holds what, and what placement goes on from.

Beside the tables of adapters, in the same database. What is here serves restarts and other processes that look; a head
that runs needs none of it to serve. Several heads share a database: each writes under an identity of its own.
"""

import threading
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from typing import NamedTuple

from sqlalchemy import Text, bindparam, delete, insert, select, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from lorikeet.adapters.registry import create_tables, insert_of, open_engine
from lorikeet.core.ids import AdapterDigest, ReplicaId

Copies = Set[tuple[AdapterDigest, ReplicaId]]
"""Adapters, each at a replica that has its files."""

_POSTGRESQL = {"connect_timeout": 5, "tcp_user_timeout": 10_000}
"""A lost server is noticed after so many seconds, and so many milliseconds while a statement is under way."""


class RegistryUnavailable(RuntimeError):
    """The database does not answer; the same call may succeed later."""


class EpochConflict(RuntimeError):
    """Somebody else has written since the caller looked, and nothing was written now."""


class _Base(DeclarativeBase):
    pass


class _Replica(_Base):
    __tablename__ = "cluster_replicas"
    cluster: Mapped[str] = mapped_column(primary_key=True)
    replica: Mapped[str] = mapped_column(primary_key=True)
    epoch: Mapped[int]
    address: Mapped[str]
    pid: Mapped[int]
    state: Mapped[str]
    joined_at: Mapped[float]


class _State(_Base):
    __tablename__ = "cluster_state"
    cluster: Mapped[str] = mapped_column(primary_key=True)
    epoch: Mapped[int]
    content: Mapped[str] = mapped_column(Text)


class _Copy(_Base):
    __tablename__ = "cluster_copies"
    cluster: Mapped[str] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column(primary_key=True)
    replica: Mapped[str] = mapped_column(primary_key=True)


class ReplicaRow(NamedTuple):
    """A replica as the registry knows it.

    Attributes:
        replica: which.
        epoch: its incarnation.
        address: of the machine that its engine runs on.
        pid: process id of its engine there.
        state: in the words of whoever writes it.
        joined_at: Unix seconds.
    """

    replica: ReplicaId
    epoch: int
    address: str
    pid: int
    state: str
    joined_at: float


class StoredState(NamedTuple):
    """What an orchestrator goes on from.

    Attributes:
        epoch: rises by one with every write.
        content: JSON.
    """

    epoch: int
    content: str


class ClusterRegistry:
    """The tables of one cluster. Safe to use from several threads. The database may be away when this is made.

    Args:
        url: SQLAlchemy URL (SQLite or PostgreSQL).
        cluster: identity of the cluster; rows of others stay untouched.

    Raises:
        ValueError: not such a URL, or its driver is not installed.
    """

    def __init__(self, url: str, cluster: str) -> None:
        self._cluster = cluster
        try:
            self._engine = open_engine(url, _POSTGRESQL)
        except (SQLAlchemyError, ImportError) as error:
            raise ValueError(f"the cluster's registry cannot be used: {error}") from error
        self._insert = insert_of(self._engine)
        self._preparing = threading.Lock()
        self._has_tables = False

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    # --- replicas and copies -------------------------------------------------------------------------

    def set_replicas(self, rows: Iterable[ReplicaRow]) -> None:
        """Note all replicas that there are, in place of those that were noted.

        Raises:
            RegistryUnavailable: see there.
        """
        values = [{"cluster": self._cluster, **row._asdict()} for row in rows]
        with self._transaction() as connection:
            connection.execute(delete(_Replica).where(_Replica.cluster == self._cluster))
            if values:
                connection.execute(insert(_Replica), values)

    def replicas(self) -> list[ReplicaRow]:
        """Return the replicas, by id.

        Raises:
            RegistryUnavailable: see there.
        """
        columns = (
            _Replica.replica,
            _Replica.epoch,
            _Replica.address,
            _Replica.pid,
            _Replica.state,
            _Replica.joined_at,
        )
        query = select(*columns).where(_Replica.cluster == self._cluster).order_by(_Replica.replica)
        with self._transaction() as connection:
            return [ReplicaRow(ReplicaId(row.replica), *row[1:]) for row in connection.execute(query)]

    def set_copies(self, copies: Copies) -> None:
        """Note all adapters that replicas hold, in place of those that were noted.

        Raises:
            RegistryUnavailable: see there.
        """
        with self._transaction() as connection:
            connection.execute(delete(_Copy).where(_Copy.cluster == self._cluster))
            self._add(connection, copies)

    def change_copies(self, added: Copies, removed: Copies) -> None:
        """Note what has changed of the adapters that replicas hold.

        Raises:
            RegistryUnavailable: see there.
        """
        gone = [{"gone_digest": digest, "gone_replica": replica} for digest, replica in removed]
        this = (_Copy.digest == bindparam("gone_digest"), _Copy.replica == bindparam("gone_replica"))
        with self._transaction() as connection:
            if gone:
                connection.execute(delete(_Copy).where(_Copy.cluster == self._cluster, *this), gone)
            self._add(connection, added)

    def copies(self) -> set[tuple[AdapterDigest, ReplicaId]]:
        """Return the adapters that replicas hold.

        Raises:
            RegistryUnavailable: see there.
        """
        query = select(_Copy.digest, _Copy.replica).where(_Copy.cluster == self._cluster)
        with self._transaction() as connection:
            return {(AdapterDigest(digest), ReplicaId(replica)) for digest, replica in connection.execute(query)}

    def _add(self, connection: Connection, copies: Copies) -> None:
        values = [{"cluster": self._cluster, "digest": digest, "replica": replica} for digest, replica in copies]
        if values:
            connection.execute(self._insert(_Copy).on_conflict_do_nothing(), values)

    # --- the orchestrator ----------------------------------------------------------------------------

    def load_state(self) -> StoredState | None:
        """Return what was saved last, None if nothing was.

        Raises:
            RegistryUnavailable: see there.
        """
        query = select(_State.epoch, _State.content).where(_State.cluster == self._cluster)
        with self._transaction() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else StoredState(*row)

    def save_state(self, content: str, after: int) -> int:
        """Save what an orchestrator goes on from, if nobody else has since the caller loaded or saved it.

        Args:
            content: JSON.
            after: epoch of what the caller loaded or saved last; 0 if there was nothing.

        Returns:
            The epoch of what is saved now.

        Raises:
            EpochConflict: another one is stored.
            RegistryUnavailable: see there.
        """
        values = {"epoch": after + 1, "content": content}
        if after:
            this = (_State.cluster == self._cluster, _State.epoch == after)
            statement = update(_State).where(*this).values(**values).returning(_State.epoch)
        else:
            first = self._insert(_State).values(cluster=self._cluster, **values)
            statement = first.on_conflict_do_nothing().returning(_State.epoch)
        with self._transaction() as connection:
            if connection.execute(statement).scalar_one_or_none() is None:
                raise EpochConflict(f"cluster {self._cluster}: the state of epoch {after} is not the last one")
        return after + 1

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        try:
            with self._preparing:
                if not self._has_tables:
                    create_tables(self._engine, _Base.metadata)
                    self._has_tables = True
            with self._engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            self._has_tables = False  # it may come back empty
            reason = error.orig if isinstance(error, DBAPIError) else error
            raise RegistryUnavailable(f"the cluster's registry does not answer: {reason}") from error
