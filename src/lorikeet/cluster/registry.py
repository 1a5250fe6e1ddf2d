"""The cluster's tables in the registry's database: who is there, who holds what, and what placement goes on from.

Beside the tables of adapters, in the same database. What is here serves restarts, other processes that look, and
several heads that must not write over each other; a head that runs needs none of it to serve.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from sqlalchemy import Text, delete, select, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from lorikeet.adapters.database import create_tables, insert_of, open_engine
from lorikeet.core.ids import AdapterDigest, ReplicaId

LEFT = "left"
"""State of a replica that is there no longer; its row stays, so that its epochs only rise."""

_POSTGRESQL = {"connect_timeout": 5, "tcp_user_timeout": 10_000}
"""A lost server is noticed after so many seconds, and so many milliseconds while a statement is under way."""


class RegistryGone(RuntimeError):
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
        state: in the words of whoever writes it, or :data:`LEFT`.
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

    # --- replicas ------------------------------------------------------------------------------------

    def join(self, replica: ReplicaId, address: str, pid: int, state: str, joined_at: float) -> int:
        """Note an incarnation of a replica, which takes the place of any earlier one.

        Returns:
            Its epoch, larger than that of every earlier one. Whoever has it may write what follows.

        Raises:
            RegistryGone: see there.
        """
        values = {"address": address, "pid": pid, "state": state, "joined_at": joined_at}
        joining = self._insert(_Replica).values(cluster=self._cluster, replica=replica, epoch=1, **values)
        joining = joining.on_conflict_do_update(
            index_elements=["cluster", "replica"], set_={**values, "epoch": _Replica.epoch + 1}
        ).returning(_Replica.epoch)
        with self._transaction() as connection:
            return int(connection.execute(joining).scalar_one())

    def set_state(self, replica: ReplicaId, epoch: int, state: str) -> None:
        """Note what became of an incarnation.

        Raises:
            EpochConflict: there is a later one.
            RegistryGone: see there.
        """
        with self._transaction() as connection:
            self._set_state(connection, replica, epoch, state)

    def leave(self, replica: ReplicaId, epoch: int) -> None:
        """Note that a replica is gone, and its copies with it.

        Raises:
            EpochConflict: there is a later incarnation.
            RegistryGone: see there.
        """
        with self._transaction() as connection:
            self._set_state(connection, replica, epoch, LEFT)
            of_replica = (_Copy.cluster == self._cluster, _Copy.replica == replica)
            connection.execute(delete(_Copy).where(*of_replica))

    def replicas(self) -> list[ReplicaRow]:
        """Return the replicas that have not left, by id.

        Raises:
            RegistryGone: see there.
        """
        columns = (
            _Replica.replica,
            _Replica.epoch,
            _Replica.address,
            _Replica.pid,
            _Replica.state,
            _Replica.joined_at,
        )
        here = (_Replica.cluster == self._cluster, _Replica.state != LEFT)
        with self._transaction() as connection:
            rows = connection.execute(select(*columns).where(*here).order_by(_Replica.replica))
            return [ReplicaRow(ReplicaId(row.replica), *row[1:]) for row in rows]

    def _set_state(self, connection: Connection, replica: ReplicaId, epoch: int, state: str) -> None:
        this = (_Replica.cluster == self._cluster, _Replica.replica == replica, _Replica.epoch == epoch)
        changed = connection.execute(update(_Replica).where(*this).values(state=state).returning(_Replica.epoch))
        if changed.scalar_one_or_none() is None:
            raise EpochConflict(f"replica {replica}: epoch {epoch} is not the last one")

    # --- copies --------------------------------------------------------------------------------------

    def add_copy(self, digest: AdapterDigest, replica: ReplicaId) -> None:
        """Note that a replica holds an adapter.

        Raises:
            RegistryGone: see there.
        """
        values = {"cluster": self._cluster, "digest": digest, "replica": replica}
        with self._transaction() as connection:
            connection.execute(self._insert(_Copy).values(values).on_conflict_do_nothing())

    def remove_copy(self, digest: AdapterDigest, replica: ReplicaId) -> None:
        """Note that it holds it no longer.

        Raises:
            RegistryGone: see there.
        """
        this = (_Copy.cluster == self._cluster, _Copy.digest == digest, _Copy.replica == replica)
        with self._transaction() as connection:
            connection.execute(delete(_Copy).where(*this))

    def set_copies(self, replica: ReplicaId, digests: Iterable[AdapterDigest]) -> None:
        """Note all that a replica holds.

        Raises:
            RegistryGone: see there.
        """
        rows = [{"cluster": self._cluster, "digest": digest, "replica": replica} for digest in digests]
        of_replica = (_Copy.cluster == self._cluster, _Copy.replica == replica)
        with self._transaction() as connection:
            connection.execute(delete(_Copy).where(*of_replica))
            if rows:
                connection.execute(self._insert(_Copy).on_conflict_do_nothing(), rows)

    def copies(self) -> dict[ReplicaId, set[AdapterDigest]]:
        """Return what each replica holds.

        Raises:
            RegistryGone: see there.
        """
        held: dict[ReplicaId, set[AdapterDigest]] = {}
        with self._transaction() as connection:
            query = select(_Copy.replica, _Copy.digest).where(_Copy.cluster == self._cluster)
            for replica, digest in connection.execute(query):
                held.setdefault(ReplicaId(replica), set()).add(AdapterDigest(digest))
        return held

    # --- the orchestrator ----------------------------------------------------------------------------

    def load_state(self) -> StoredState | None:
        """Return what was saved last, None if nothing was.

        Raises:
            RegistryGone: see there.
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
            RegistryGone: see there.
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
            raise RegistryGone(f"the cluster's registry does not answer: {reason}") from error
