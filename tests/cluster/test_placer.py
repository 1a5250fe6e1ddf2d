"""A head's dealings with an orchestrator that comes and goes."""

import asyncio
from collections.abc import Iterable, Sequence

import pytest

from lorikeet.cluster.orchestrator import Known, Orchestrator, Seen
from lorikeet.cluster.placement.static import FullReplication
from lorikeet.cluster.placer import Placer
from lorikeet.cluster.placing import InProcess, OrchestratorGone
from lorikeet.cluster.tables import RoutingTable
from lorikeet.core.ids import AdapterDigest, ReplicaId

S1, S2, S3 = (ReplicaId(name) for name in ("S1", "S2", "S3"))
A = Known(AdapterDigest("A"), 8, 100)


class Service(InProcess):
    """An orchestrator whose next calls fail as they are told to, and which notes what it hears.

    Attributes:
        errors: of the next calls, in their order.
        heard: calls that came through.
    """

    def __init__(self) -> None:
        super().__init__(Orchestrator(FullReplication((S1,)), 0.0))
        self.errors: list[Exception] = []
        self.heard: list[object] = []

    def _hear(self, what: object) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.heard.append(what)

    async def know(self, adapters: Iterable[Known]) -> RoutingTable:
        new = tuple(adapters)
        self._hear(new)
        return await super().know(new)

    async def drop(self, adapter: AdapterDigest) -> RoutingTable:
        self._hear(adapter)
        return await super().drop(adapter)

    async def set_replicas(self, replicas: Sequence[ReplicaId]) -> RoutingTable:
        self._hear(tuple(replicas))
        return await super().set_replicas(replicas)

    async def period(self, seen: Seen) -> RoutingTable:
        self._hear(seen)
        return await super().period(seen)


def placer_of(service: Service, period_s: float = 3600.0) -> tuple[Placer, list[RoutingTable]]:
    tables: list[RoutingTable] = []
    return Placer(service, period_s, tables.append), tables


async def test_what_was_missed_is_told_before_anything_newer() -> None:
    service = Service()
    placer, tables = placer_of(service)
    service.errors = [OrchestratorGone("it was killed")] * 3
    await placer.know([A])
    await placer.set_replicas([S1, S2])
    await placer.set_replicas([S2])
    assert (service.heard, tables) == ([], [])
    await placer.drop(A.adapter)
    assert service.heard == [(A,), (S1, S2), (S2,), A.adapter], "the last word is the last"
    assert placer.table.shares == {}
    assert placer.table is tables[-1]


async def test_a_missed_call_that_fails_keeps_no_newer_one_from_being_made() -> None:
    service = Service()
    placer, _ = placer_of(service)
    service.errors = [OrchestratorGone("it was killed"), ValueError("a mistake")]
    await placer.know([A])
    await placer.set_replicas([S3])
    assert service.heard == [(S3,)]
    service.errors = [ValueError("a mistake")]
    with pytest.raises(ValueError, match="a mistake"):
        await placer.set_replicas([S1])
    await placer.know([A])
    assert service.heard == [(S3,), (A,)]


async def test_a_period_in_which_the_orchestrator_is_gone_is_told_of_in_the_next() -> None:
    service = Service()
    placer, _ = placer_of(service, period_s=0.001)
    service.errors = [OrchestratorGone("it was killed")] * 2
    await placer.know([A])
    placer.arrived(A.adapter, 10)
    running = asyncio.create_task(placer.run())
    await placer.period()
    assert service.heard[:2] == [(A,), Seen(((A.adapter, 10),), ())]
    running.cancel()


async def test_the_first_request_begins_a_period_and_whoever_waits_for_periods_waits_for_a_whole_one() -> None:
    service = Service()
    placer, tables = placer_of(service, period_s=0.2)
    running = asyncio.create_task(placer.run())
    await asyncio.sleep(0)
    placer.arrived(None, 10)
    await placer.period()
    assert service.heard[0] == Seen(((None, 10),), ())
    assert len(service.heard) == 5, "four short ones, which make a whole one, are over first"
    assert len(tables) == 5
    running.cancel()


async def test_a_period_that_fails_is_not_the_last() -> None:
    service = Service()
    placer, _ = placer_of(service, period_s=0.001)
    service.errors = [ValueError("a mistake")]
    placer.arrived(None, 10)
    running = asyncio.create_task(placer.run())
    await placer.period()
    assert service.heard[0] == Seen(), "what may have counted already does not count twice"
    assert not running.done()
    running.cancel()
