"""The registry keeps the same promises on SQLite and on PostgreSQL."""

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from lorikeet.adapters.catalog import AdapterCatalog
from lorikeet.adapters.errors import AdapterError, AdapterExists, AdapterStoreError
from lorikeet.adapters.registry import AdapterRegistry, RegistryRow, sqlite_url
from lorikeet.config import AdapterSettings
from tests.adapters.builders import geometry, write_adapter


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
        connection.execute(text("DROP TABLE IF EXISTS adapters, versions"))
    engine.dispose()


def row(name: str, digest: str = "d", created_at: float = 1.0) -> RegistryRow:
    return RegistryRow(name, digest, f"source of {name}", created_at, '{"q":[4]}', 4, 100)


def test_rows_come_back_oldest_first_after_opening_again(url: str) -> None:
    first = AdapterRegistry(url, "base")
    rows = [row("b", "1", 1.5), row("c", "2", 2.25), row("a", "1", 3.125)]
    for each in reversed(rows):
        first.add(each, replace=False)
    first.close()
    second = AdapterRegistry(url, "base")
    assert second.load() == {"base": rows}
    second.close()


def test_a_name_is_added_once_and_replaced_on_demand(url: str) -> None:
    registry = AdapterRegistry(url, "base")
    registry.add(row("a", "1"), replace=False)
    with pytest.raises(AdapterExists, match="'a'"):
        registry.add(row("a", "2"), replace=False)
    assert registry.load() == {"base": [row("a", "1")]}
    added = registry.newest()
    registry.add(row("a", "2", 7.0), replace=True)
    assert registry.load() == {"base": [row("a", "2", 7.0)]}
    assert registry.newest() > added
    registry.remove("a")
    registry.remove("a")
    assert registry.load() == {}
    registry.close()


def test_a_version_is_deleted_only_when_no_base_names_it(url: str) -> None:
    one = AdapterRegistry(url, "one")
    other = AdapterRegistry(url, "other")
    one.add(row("a"), replace=False)
    other.add(row("a"), replace=False)
    one.remove("a")
    assert not one.remove_version_if_unnamed("d")
    assert one.load() == {"other": [row("a")]}
    other.remove("a")
    assert other.load() == {}
    assert one.remove_version_if_unnamed("d")
    one.close()
    other.close()


def test_of_many_threads_that_add_one_name_one_wins(url: str) -> None:
    registry = AdapterRegistry(url, "base")
    outcomes: list[str] = []

    def add(number: int) -> None:
        try:
            registry.add(row("a", str(number)), replace=False)
            outcomes.append("added")
        except AdapterExists:
            outcomes.append("exists")

    threads = [threading.Thread(target=add, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(outcomes) == ["added"] + ["exists"] * 5
    registry.close()


@pytest.mark.slow
def test_servers_that_start_at_once_on_an_empty_database_share_it(url: str) -> None:
    together = threading.Barrier(6)
    failures: list[Exception] = []

    def start(number: int) -> None:
        together.wait(60)
        try:
            registry = AdapterRegistry(url, "base")
            registry.add(row(str(number)), replace=False)
            registry.close()
        except AdapterError as error:
            failures.append(error)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    registry = AdapterRegistry(url, "base")
    assert len(registry.load()["base"]) == 6
    registry.close()


def test_adapters_of_more_than_two_gigabytes_are_kept(url: str) -> None:
    registry = AdapterRegistry(url, "base")
    large = row("large")._replace(weight_bytes=2**40)
    registry.add(large, replace=False)
    assert registry.load() == {"base": [large]}
    registry.close()


def test_a_write_that_the_database_refuses_is_an_error_of_its_own(url: str) -> None:
    registry = AdapterRegistry(url, "base")
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE adapters"))
    engine.dispose()
    for change in (lambda: registry.add(row("a"), replace=False), lambda: registry.remove("a")):
        with pytest.raises(AdapterStoreError, match="the adapter registry cannot be written"):
            change()
    registry.close()


def test_an_unreadable_registry_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "registry.sqlite3"
    AdapterRegistry(sqlite_url(file), "base").close()
    with sqlite3.connect(file) as connection:
        connection.execute("ALTER TABLE adapters RENAME COLUMN source TO origin")
    registry = AdapterRegistry(sqlite_url(file), "base")
    with pytest.raises(AdapterStoreError, match="the adapter registry cannot be read: no such column"):
        registry.load()


def test_a_catalog_survives_a_restart(url: str, tmp_path: Path) -> None:
    write_adapter(tmp_path / "formal")
    settings = AdapterSettings(adapter_dir=str(tmp_path), store_dir=str(tmp_path / "store"), registry_url=url)
    first = AdapterCatalog(settings, "base", geometry())
    before = first.register("x", "formal").record
    first.close()
    second = AdapterCatalog(settings, "base", geometry())
    after = second.get("x")
    assert after is not None
    assert after.ref == before.ref
    second.remove("x")
    second.close()


@pytest.mark.parametrize(
    "bad", ["nonsense", "mysql://x/y", "sqlite:////no/such/folder/r.db", "postgresql://x@127.0.0.1:1/y"]
)
def test_a_database_that_cannot_be_opened_is_reported(bad: str) -> None:
    with pytest.raises(AdapterError, match="the adapter registry"):
        AdapterRegistry(bad, "base")
