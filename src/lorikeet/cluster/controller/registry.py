"""Stores replicas, their adapters and the orchestrator's state in the adapter registry's database.

A restarted server and other programs read these tables. Several controllers can share a database, each under a
different identity.
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
"""Pairs of an adapter and a replica with its files."""

_POSTGRESQL = {"connect_timeout": 5, "tcp_user_timeout": 10_000}
"""Connecting fails after 5 s, and a statement fails 10,000 ms after its server was lost."""


class RegistryUnavailable(RuntimeError):
    """The database does not answer. A later call may succeed."""


class EpochConflict(RuntimeError):
    """Another process has written since the caller last read, so nothing was written."""


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
    """Describes a replica in the registry.

    Attributes:
        replica: id of the replica.
        epoch: incarnation of the replica.
        address: address of the machine that runs its engine.
        pid: process id of its engine.
        state: ``up`` or ``down``, see ``registry_writer``.
        joined_at: Unix seconds.
    """

    replica: ReplicaId
    epoch: int
    address: str
    pid: int
    state: str
    joined_at: float


class StoredState(NamedTuple):
    """Holds the saved state of an orchestrator.

    Attributes:
        epoch: number of the write; rises by one with every write.
        content: the state as JSON.
    """

    epoch: int
    content: str


class ClusterRegistry:
    """Reads and writes the tables of one cluster.

    Thread-safe. The database may be unavailable when this object is created.

    Args:
        url: SQLAlchemy URL (SQLite or PostgreSQL).
        cluster: identity of the cluster; rows of other clusters are not changed.

    Raises:
        ValueError: the URL is invalid, or its driver is not installed.
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
        """Replace the replicas of this cluster.

        Raises:
            RegistryUnavailable: the database does not answer.
        """
        values = [{"cluster": self._cluster, **row._asdict()} for row in rows]
        with self._transaction() as connection:
            connection.execute(delete(_Replica).where(_Replica.cluster == self._cluster))
            if values:
                connection.execute(insert(_Replica), values)

    def replicas(self) -> list[ReplicaRow]:
        """Return the replicas, ordered by id.

        Raises:
            RegistryUnavailable: the database does not answer.
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
        """Replace the adapter copies of this cluster.

        Raises:
            RegistryUnavailable: the database does not answer.
        """
        with self._transaction() as connection:
            connection.execute(delete(_Copy).where(_Copy.cluster == self._cluster))
            self._add(connection, copies)

    def change_copies(self, added: Copies, removed: Copies) -> None:
        """Add and remove adapter copies.

        Raises:
            RegistryUnavailable: the database does not answer.
        """
        gone = [{"gone_digest": digest, "gone_replica": replica} for digest, replica in removed]
        this = (_Copy.digest == bindparam("gone_digest"), _Copy.replica == bindparam("gone_replica"))
        with self._transaction() as connection:
            if gone:
                connection.execute(delete(_Copy).where(_Copy.cluster == self._cluster, *this), gone)
            self._add(connection, added)

    def copies(self) -> set[tuple[AdapterDigest, ReplicaId]]:
        """Return the adapter copies of this cluster.

        Raises:
            RegistryUnavailable: the database does not answer.
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
        """Return the state that was saved last; None if no state is saved.

        Raises:
            RegistryUnavailable: the database does not answer.
        """
        query = select(_State.epoch, _State.content).where(_State.cluster == self._cluster)
        with self._transaction() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else StoredState(*row)

    def save_state(self, content: str, after: int) -> int:
        """Save the state of an orchestrator.

        The save fails if another process has saved a state since the caller's last load or save.

        Args:
            content: the state as JSON.
            after: epoch that the caller loaded or saved last; 0 if there was none.

        Returns:
            The new epoch.

        Raises:
            EpochConflict: another epoch is stored.
            RegistryUnavailable: the database does not answer.
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
                raise EpochConflict(f"cluster {self._cluster}: epoch {after} is not the latest saved state")
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
            self._has_tables = False  # The tables may be missing when the database is back.
            reason = error.orig if isinstance(error, DBAPIError) else error
            raise RegistryUnavailable(f"the cluster's registry does not answer: {reason}") from error
