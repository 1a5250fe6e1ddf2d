"""The controller's client of an orchestrator that is sometimes unavailable."""

import asyncio
from collections.abc import Iterable, Sequence

import pytest

from lorikeet.cluster.placement.everywhere import FullReplication
from lorikeet.cluster.placement.orchestrator import AdapterInfo, DemandReport, Orchestrator
from lorikeet.cluster.placement.service import LocalPlacementService, OrchestratorUnavailable, PlacementClient
from lorikeet.cluster.tables import RoutingTable
from lorikeet.core.ids import AdapterDigest, ReplicaId

S1, S2, S3 = (ReplicaId(name) for name in ("S1", "S2", "S3"))
A = AdapterInfo(AdapterDigest("A"), 8, 100)


class Service(LocalPlacementService):
    """An orchestrator whose next calls fail as they are told to, and which notes what it hears.

    Attributes:
        errors: of the next calls, in their order; None for a call that comes through.
        heard: calls that came through.
    """

    def __init__(self) -> None:
        super().__init__(Orchestrator(FullReplication(), (S1,), 0.0))
        self.errors: list[Exception | None] = []
        self.heard: list[object] = []

    @property
    def periods(self) -> list[DemandReport]:
        """What it has heard of periods."""
        return [each for each in self.heard if isinstance(each, DemandReport)]

    def _hear(self, what: object) -> None:
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        self.heard.append(what)

    async def register(self, adapters: Iterable[AdapterInfo]) -> RoutingTable:
        new = tuple(adapters)
        self._hear(new)
        return await super().register(new)

    async def drop(self, adapter: AdapterDigest) -> RoutingTable:
        self._hear(adapter)
        return await super().drop(adapter)

    async def set_replicas(self, replicas: Sequence[ReplicaId]) -> RoutingTable:
        self._hear(tuple(replicas))
        return await super().set_replicas(replicas)

    async def period(self, seen: DemandReport) -> RoutingTable:
        self._hear(seen)
        return await super().period(seen)


def placer_of(service: Service, period_s: float = 3600.0) -> tuple[PlacementClient, list[RoutingTable]]:
    tables: list[RoutingTable] = []
    return PlacementClient(service, period_s, tables.append), tables


async def test_missed_calls_precede_newer_ones() -> None:
    service = Service()
    placer, tables = placer_of(service)
    service.errors = [OrchestratorUnavailable("it was killed")] * 3
    await placer.register([A])
    await placer.set_replicas([S1, S2])
    await placer.set_replicas([S2])
    assert (service.heard, tables) == ([], [])
    await placer.drop(A.adapter)
    assert service.heard == [(A,), (S1, S2), (S2,), A.adapter], "the last word is the last"
    assert placer.table.shares == {}
    assert placer.table is tables[-1]


async def test_failing_missed_call_does_not_block_newer_ones() -> None:
    service = Service()
    placer, _ = placer_of(service)
    service.errors = [OrchestratorUnavailable("it was killed"), ValueError("a mistake")]
    await placer.register([A])
    await placer.set_replicas([S3])
    assert service.heard == [(S3,)]
    service.errors = [ValueError("a mistake")]
    with pytest.raises(ValueError, match="a mistake"):
        await placer.set_replicas([S1])
    await placer.register([A])
    assert service.heard == [(S3,), (A,)]


async def test_demand_during_an_outage_is_reported_later() -> None:
    service = Service()
    placer, _ = placer_of(service, period_s=0.001)
    service.errors = [OrchestratorUnavailable("it was killed")] * 3
    await placer.register([A])
    placer.arrived(A.adapter, 10)
    running = asyncio.create_task(placer.run())
    await placer.period()
    assert service.heard[0] == (A,)
    assert [seen.arrivals for seen in service.periods if seen.arrivals] == [((A.adapter, 10),)]
    running.cancel()


async def test_long_outage_keeps_one_period_of_demand() -> None:
    class Gone(Service):
        """Whenever it does not answer, one more request comes, of as many tokens as calls will fail from here on."""

        async def period(self, seen: DemandReport) -> RoutingTable:
            if self.errors:
                placer.arrived(A.adapter, len(self.errors))
                placer.answered(A.adapter, len(self.errors))
            return await super().period(seen)

    service = Gone()
    placer, _ = placer_of(service, period_s=0.001)
    service.errors = [OrchestratorUnavailable("it was killed")] * 50
    placer.arrived(None, 0)
    running = asyncio.create_task(placer.run())
    await placer.period()
    assert service.periods[0] == DemandReport(((A.adapter, 2), (A.adapter, 1)), ((A.adapter, 2), (A.adapter, 1)))
    await placer.period()
    assert service.periods[1] == DemandReport()
    running.cancel()


async def test_the_first_request_begins_a_period_which_is_looked_at_before_its_end() -> None:
    service = Service()
    placer, tables = placer_of(service, period_s=0.01)
    running = asyncio.create_task(placer.run())
    await placer.period()
    assert service.periods[0] == DemandReport(), "nobody has asked"
    before = len(service.periods)
    placer.arrived(None, 10)
    await placer.period()
    await placer.period()
    looks = service.periods[before:]
    assert [seen.is_period_end for seen in looks] == [True, False, False, False, True]
    assert [seen.arrivals for seen in looks] == [(), ((None, 10),), (), (), ()], "it is of the period that it begins"
    assert len(tables) == len(service.heard)
    running.cancel()


async def test_periods_go_on_after_a_failed_one() -> None:
    service = Service()
    placer, _ = placer_of(service, period_s=0.001)
    service.errors = [None, ValueError("a mistake")]
    placer.arrived(None, 10)
    running = asyncio.create_task(placer.run())
    await placer.period()
    await placer.period()
    assert service.periods[:2] == [DemandReport(), DemandReport((), (), is_period_end=False)], (
        "what may have counted does not count twice"
    )
    assert not running.done()
    running.cancel()
