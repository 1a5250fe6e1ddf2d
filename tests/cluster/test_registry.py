"""The cluster's tables in the registry, on SQLite and PostgreSQL."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from lorikeet.adapters.registry import AdapterRegistry, sqlite_url
from lorikeet.cluster.controller.registry import (
    ClusterRegistry,
    EpochConflict,
    RegistryUnavailable,
    ReplicaRow,
    StoredState,
)
from lorikeet.core.ids import AdapterDigest, ReplicaId

pytestmark = pytest.mark.slow

R0, R1 = ReplicaId("r0"), ReplicaId("r1")
A, B, C = (AdapterDigest(name) for name in "abc")
TABLES = "cluster_replicas, cluster_state, cluster_copies, adapters, versions"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database of each kind."""
    if request.param == "sqlite":
        yield sqlite_url(tmp_path / "registry.sqlite3")
        return
    url = request.getfixturevalue("postgres_url")
    yield url
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(text(f"DROP TABLE IF EXISTS {TABLES}"))
    engine.dispose()


@pytest.fixture
def registry(url: str) -> Iterator[ClusterRegistry]:
    made = ClusterRegistry(url, "one")
    yield made
    made.close()


def row(replica: ReplicaId, epoch: int, state: str = "up") -> ReplicaRow:
    return ReplicaRow(replica, epoch, "10.0.0.1", 11, state, 1.5)


def test_saved_replicas_replace_earlier_ones(registry: ClusterRegistry) -> None:
    assert registry.replicas() == []
    registry.set_replicas([row(R1, 1), row(R0, 2, "down")])
    assert registry.replicas() == [row(R0, 2, "down"), row(R1, 1)]
    registry.set_replicas([row(R0, 3)])
    assert registry.replicas() == [row(R0, 3)]
    registry.set_replicas([])
    assert registry.replicas() == []


def test_copies_are_saved_whole_or_by_changes(registry: ClusterRegistry) -> None:
    registry.set_copies({(A, R0), (B, R0), (A, R1)})
    registry.change_copies({(C, R1), (A, R0)}, {(B, R0), (B, R1)})
    assert registry.copies() == {(A, R0), (A, R1), (C, R1)}
    registry.change_copies(set(), {(A, R1)})
    assert registry.copies() == {(A, R0), (C, R1)}
    registry.set_copies({(B, R1)})
    assert registry.copies() == {(B, R1)}
    registry.set_copies(set())
    assert registry.copies() == set()


def test_heads_share_a_database_with_each_other_and_with_adapters(url: str) -> None:
    one, other, adapters = ClusterRegistry(url, "one"), ClusterRegistry(url, "other"), AdapterRegistry(url, "base")
    for number, head in enumerate((one, other), 1):
        head.set_replicas([row(R0, number)])
        head.set_copies({(A, R0), (B, R0)})
        head.save_state(f"state {number}", 0)
    one.set_replicas([])
    one.change_copies(set(), {(A, R0)})
    one.save_state("state 3", 1)
    assert (one.replicas(), one.copies()) == ([], {(B, R0)})
    one.set_copies(set())
    assert other.replicas() == [row(R0, 2)]
    assert other.copies() == {(A, R0), (B, R0)}
    assert other.load_state() == StoredState(1, "state 2")
    assert adapters.load() == {}
    for each in (one, other, adapters):
        each.close()


def test_only_one_of_two_orchestrators_writes(url: str) -> None:
    one, other = ClusterRegistry(url, "one"), ClusterRegistry(url, "one")
    assert one.load_state() is None
    assert one.save_state("first", 0) == 1
    with pytest.raises(EpochConflict):
        other.save_state("late", 0)
    assert other.load_state() == StoredState(1, "first")
    assert other.save_state("second", 1) == 2
    with pytest.raises(EpochConflict, match="epoch 1"):
        one.save_state("stale", 1)
    assert one.load_state() == StoredState(2, "second")
    one.close()
    other.close()


def test_no_write_is_lost_among_orchestrators_that_write_at_once(url: str) -> None:
    writers = [ClusterRegistry(url, "one") for _ in range(4)]
    barrier = threading.Barrier(len(writers))

    def count(writer: ClusterRegistry) -> None:
        barrier.wait()
        left = 10
        while left:
            stored = writer.load_state() or StoredState(0, "0")
            try:
                writer.save_state(str(int(stored.content) + 1), stored.epoch)
                left -= 1
            except EpochConflict:
                continue

    threads = [threading.Thread(target=count, args=(writer,)) for writer in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writers[0].load_state() == StoredState(40, "40")
    for writer in writers:
        writer.close()


def test_sqlite_file_may_become_available_later(tmp_path: Path) -> None:
    registry = ClusterRegistry(sqlite_url(tmp_path / "later" / "registry.sqlite3"), "one")
    with pytest.raises(RegistryUnavailable, match="unable to open"):
        registry.load_state()
    (tmp_path / "later").mkdir()
    assert registry.load_state() is None
    assert registry.save_state("first", 0) == 1
    registry.close()


def test_postgresql_is_used_again_after_an_outage(postgres_url: str) -> None:
    admin = create_engine(postgres_url.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT")
    with admin.connect() as server:
        server.execute(text("CREATE DATABASE elsewhere"))
        registry = ClusterRegistry(postgres_url.removesuffix("/postgres") + "/elsewhere", "one")
        registry.save_state("first", 0)
        server.execute(text("ALTER DATABASE elsewhere ALLOW_CONNECTIONS false"))
        ending = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = 'elsewhere'"
        server.execute(text(ending))
        for _ in range(2):
            with pytest.raises(RegistryUnavailable, match="elsewhere"):
                registry.save_state("second", 1)
        server.execute(text("ALTER DATABASE elsewhere ALLOW_CONNECTIONS true"))
        assert registry.load_state() == StoredState(1, "first")
        assert registry.save_state("second", 1) == 2
        registry.close()
        server.execute(text("DROP DATABASE elsewhere WITH (FORCE)"))
    admin.dispose()


@pytest.mark.parametrize("url", ["mysql://host/db", "nonsense"])
def test_other_databases_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"SQLite or PostgreSQL|cannot be used"):
        ClusterRegistry(url, "one")
