"""An orchestrator that is restarted: its state comes from the registry or from the controller."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lorikeet.adapters.registry import sqlite_url
from lorikeet.cluster.controller.persistent_orchestrator import PersistentOrchestrator, StateSaver
from lorikeet.cluster.controller.registry import ClusterRegistry, EpochConflict, RegistryUnavailable
from lorikeet.cluster.placement.orchestrator import AdapterInfo, DemandReport, Orchestrator
from lorikeet.cluster.tables import RoutingTable
from lorikeet.core.clock import VirtualClock
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.papers.loraserve.placement import RandomPlacement

REPLICAS = [ReplicaId(f"r{number}") for number in range(4)]
KNOWN = [AdapterInfo(AdapterDigest(f"a{number}"), 8 << number % 4, 1000 + number) for number in range(12)]
SEEN = DemandReport(((KNOWN[0].adapter, 100), (KNOWN[1].adapter, 50)), ((KNOWN[0].adapter, 20),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "registry"


class Life:
    """Orchestrators, one after the other, each of which draws its homes differently."""

    def __init__(self, folder: Path) -> None:
        self._url = sqlite_url(folder / "registry.sqlite3")
        self._made: list[PersistentOrchestrator] = []
        self.clock = VirtualClock()

    def begin(self) -> PersistentOrchestrator:
        self.saver = StateSaver(ClusterRegistry(self._url, "one"), retry_s=0.01)
        orchestrator = Orchestrator(RandomPlacement(seed=len(self._made)), REPLICAS, self.clock.now())
        self._made.append(PersistentOrchestrator(orchestrator, self.saver, self.clock))
        return self._made[-1]

    def close(self) -> None:
        for each in self._made:
            each.close()


@pytest.fixture
def life(folder: Path) -> Iterator[Life]:
    made = Life(folder)
    yield made
    made.close()


def test_new_orchestrator_continues_from_saved_state(life: Life, folder: Path) -> None:
    folder.mkdir()
    first = life.begin()
    table = first.register(KNOWN)
    life.clock.advance(10.0)
    first.period(SEEN)
    assert first.drop(KNOWN[11].adapter).shares.keys() == {each.adapter for each in KNOWN[:11]}
    state, table = first.state(), first.table
    assert state.demand.adapters[KNOWN[0].adapter].history == [12.0]
    assert life.saver.wait(60.0)
    second = life.begin()
    assert second.state() == state
    assert (second.table.epoch, second.table.shares) == (table.epoch, table.shares)
    after = second.register([*KNOWN[:11], KNOWN[11]])
    assert after.epoch == table.epoch + 1
    assert {adapter: after.shares[adapter] for adapter in table.shares} == table.shares


def test_state_is_written_when_the_registry_is_back(life: Life, folder: Path) -> None:
    first = life.begin()
    table = first.register(KNOWN)
    assert len(table.shares) == len(KNOWN)
    assert not life.saver.wait(3600.0), "told at once that it is gone, not when nobody waits any more"
    first.set_replicas(REPLICAS[:2])
    folder.mkdir()
    while not life.saver.wait(60.0):
        pass
    assert life.begin().state() == first.state()


def test_replaced_orchestrator_stops_writing(life: Life, folder: Path) -> None:
    folder.mkdir()
    first = life.begin()
    first.register(KNOWN[:3])
    replaced = life.saver
    assert replaced.wait(60.0)
    second = life.begin()
    second.register(KNOWN)
    assert life.saver.wait(60.0)
    table = first.drop(KNOWN[0].adapter)
    assert len(table.shares) == 2, "it goes on for its own head"
    assert not replaced.wait(3600.0), "it has tried, and was refused"
    assert life.begin().state() == second.state()


def test_unreadable_state_is_replaced(life: Life, folder: Path) -> None:
    folder.mkdir()
    registry = ClusterRegistry(sqlite_url(folder / "registry.sqlite3"), "one")
    registry.save_state('{"epoch": "many"}', 0)
    registry.close()
    first = life.begin()
    first.register(KNOWN)
    assert life.saver.wait(60.0)
    assert life.begin().state() == first.state()


class DiesAfterCommit(ClusterRegistry):
    """A registry that is lost between a commit and its answer as often as it is told to."""

    deaths = 0

    def save_state(self, content: str, after: int) -> int:
        epoch = super().save_state(content, after)
        if self.deaths:
            self.deaths -= 1
            raise RegistryUnavailable("it died")
        return epoch


def test_own_unconfirmed_write_is_recognised(folder: Path) -> None:
    folder.mkdir()
    url = sqlite_url(folder / "registry.sqlite3")
    registry = DiesAfterCommit(url, "one")
    saver = StateSaver(registry, retry_s=0.01)
    kept = PersistentOrchestrator(Orchestrator(RandomPlacement(seed=0), REPLICAS, 0.0), saver, VirtualClock())
    registry.deaths = 3
    kept.register(KNOWN[:3])
    while not saver.wait(60.0):
        pass
    kept.register(KNOWN)
    assert saver.wait(60.0), "it is not the end of saving"
    other = StateSaver(ClusterRegistry(url, "one"))
    stored = other.load()
    assert stored is not None
    assert stored.demand.adapters.keys() == {each.adapter for each in KNOWN}
    other.close()
    kept.close()


def test_empty_registry_is_filled_again(folder: Path) -> None:
    folder.mkdir()
    url = sqlite_url(folder / "registry.sqlite3")
    registry = ClusterRegistry(url, "one")
    saver = StateSaver(registry, retry_s=0.01)
    kept = PersistentOrchestrator(Orchestrator(RandomPlacement(seed=0), REPLICAS, 0.0), saver, VirtualClock())
    kept.register(KNOWN)
    assert saver.wait(60.0)
    registry.close()
    for file in folder.iterdir():
        file.unlink()
    kept.drop(KNOWN[0].adapter)
    while not saver.wait(60.0):
        pass
    other = ClusterRegistry(url, "one")
    with pytest.raises(EpochConflict):
        other.save_state("", 0)
    other.close()
    kept.close()


def test_controller_brings_a_new_orchestrator_up_to_date(life: Life, folder: Path) -> None:
    folder.mkdir()
    first = life.begin()
    first.register(KNOWN[:6])
    life.clock.advance(10.0)
    stored = first.period(SEEN)
    assert life.saver.wait(60.0)

    shares = {each.adapter: stored.shares.get(each.adapter, stored.shares[KNOWN[0].adapter]) for each in KNOWN[1:8]}
    newer = RoutingTable(stored.epoch + 5, shares)
    second = life.begin()
    table = second.begin(KNOWN[1:8], REPLICAS, newer)
    assert (table.epoch, table.shares) == (newer.epoch, shares), "the head's table counts, and fits"
    assert second.state().demand.adapters.keys() == {each.adapter for each in KNOWN[1:8]}
    assert second.state().demand.adapters[KNOWN[1].adapter].history == [7.0]

    older = RoutingTable(1, {KNOWN[1].adapter: stored.shares[KNOWN[1].adapter]})
    assert second.begin(KNOWN[1:8], None, older).shares == shares, "what is newer than the head's table counts"
    assert second.begin(None, REPLICAS[:1], None).replicas(KNOWN[1].adapter) == {REPLICAS[0]}
    assert second.table.epoch == newer.epoch + 1
