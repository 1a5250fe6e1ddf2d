"""The orchestrator: placements by reported demand, and continuation from a saved state."""

from collections.abc import Callable

import msgspec
import pytest

from lorikeet.cluster.placement.base import PlacementPolicy
from lorikeet.cluster.placement.everywhere import FullReplication
from lorikeet.cluster.placement.operating_points import OperatingPoints
from lorikeet.cluster.placement.orchestrator import AdapterInfo, DemandReport, Orchestrator, OrchestratorState
from lorikeet.core.ids import ReplicaId
from lorikeet.papers.loraserve.placement import ContiguousPlacement, LoRAServe, RandomPlacement
from tests.support.placement import digest

S1, S2, S3 = (ReplicaId(name) for name in ("S1", "S2", "S3"))
SMALL = [AdapterInfo(digest(f"s{number}"), 8, 100) for number in range(4)]
LARGE = [AdapterInfo(digest(f"l{number}"), 128, 1600) for number in range(4)]
POINTS = OperatingPoints({8: 1000.0, 128: 500.0})


def loraserve() -> LoRAServe:
    return LoRAServe(POINTS)


def busy(known: AdapterInfo, requests: int) -> DemandReport:
    return DemandReport(((known.adapter, 100),) * requests, ((known.adapter, 10),) * requests)


def test_every_adapter_is_placed_before_any_request() -> None:
    orchestrator = Orchestrator(loraserve(), (S1, S2), 0.0)
    table = orchestrator.register([*SMALL, *LARGE], 0.0)
    assert table is orchestrator.table
    assert table.shares.keys() == {known.adapter for known in (*SMALL, *LARGE)}


def test_demand_of_a_period_moves_shares_in_the_next() -> None:
    orchestrator = Orchestrator(loraserve(), (S1, S2), 0.0)
    before = orchestrator.register([*SMALL, *LARGE], 0.0)
    orchestrator.record(busy(LARGE[0], 500))
    after = orchestrator.close_period(10.0)
    assert after.epoch > before.epoch
    assert len(after.replicas(LARGE[0].adapter)) == 2, "more than one replica can serve"


def test_replicas_that_leave_serve_nothing() -> None:
    orchestrator = Orchestrator(FullReplication(), (S1, S2, S3), 0.0)
    orchestrator.register(SMALL, 0.0)
    table = orchestrator.set_replicas((S1, S3), 1.0)
    assert table.replicas(SMALL[0].adapter) == {S1, S3}
    with pytest.raises(ValueError, match="needs a replica"):
        orchestrator.set_replicas((), 2.0)


def test_dropped_adapter_is_not_placed_and_its_late_requests_do_not_count() -> None:
    orchestrator = Orchestrator(loraserve(), (S1, S2), 0.0)
    orchestrator.register(SMALL, 0.0)
    assert SMALL[0].adapter not in orchestrator.drop(SMALL[0].adapter, 1.0).shares
    orchestrator.drop(SMALL[0].adapter, 1.0)
    orchestrator.record(busy(SMALL[0], 3))
    assert SMALL[0].adapter not in orchestrator.close_period(10.0).shares


@pytest.mark.parametrize(
    "make",
    [
        loraserve,
        lambda: RandomPlacement(5),
        ContiguousPlacement,
        FullReplication,
    ],
)
def test_another_goes_on_from_its_state(make: Callable[[], PlacementPolicy]) -> None:
    first = Orchestrator(make(), (S1, S2), 0.0)
    first.register([*SMALL, *LARGE], 0.0)
    for period in range(1, 4):
        first.record(busy(LARGE[period], 20 * period))
        first.close_period(10.0 * period)
    encoded = msgspec.json.encode(first.state())
    second = Orchestrator(make(), (S1, S2), 100.0)
    table = second.resume(msgspec.json.decode(encoded, type=OrchestratorState), 100.0)
    assert (table.epoch, table.shares) == (first.table.epoch, first.table.shares)
    first.record(busy(SMALL[1], 50))
    second.record(busy(SMALL[1], 50))
    assert first.close_period(40.0).shares == second.close_period(110.0).shares


def test_homes_of_another_policy_are_not_kept() -> None:
    first = Orchestrator(ContiguousPlacement(), (S1, S2), 0.0, policy="contiguous")
    stored = first.register([*SMALL, *LARGE], 0.0)
    second, fresh = (Orchestrator(RandomPlacement(5), (S1, S2), 0.0, policy="random") for _ in range(2))
    assert first.state().policy == "contiguous"
    table = second.resume(first.state(), 0.0)
    assert table.shares == fresh.register([*SMALL, *LARGE], 0.0).shares != stored.shares
    assert table.epoch > stored.epoch
    assert second.state().policy == "random"


def test_its_state_is_a_copy() -> None:
    orchestrator = Orchestrator(loraserve(), (S1, S2), 0.0)
    orchestrator.register(SMALL, 0.0)
    state = orchestrator.state()
    orchestrator.record(busy(SMALL[0], 5))
    orchestrator.close_period(10.0)
    assert state.demand.adapters[SMALL[0].adapter].history == []


def test_load_is_the_forecast_for_all_adapters_and_the_base_model() -> None:
    orchestrator = Orchestrator(FullReplication(), (S1, S2), 0.0, POINTS)
    orchestrator.register([SMALL[0], LARGE[0]], 0.0)
    assert orchestrator.load(0.0) is None, "no period has ended"
    orchestrator.record(DemandReport(((SMALL[0].adapter, 500),) * 10, ((SMALL[0].adapter, 100),) * 10))
    orchestrator.close_period(10.0)
    assert orchestrator.load(0.0) == pytest.approx((500 + 100) / 1000)
    orchestrator = Orchestrator(FullReplication(), (S1, S2), 0.0, POINTS)
    orchestrator.register([SMALL[0], LARGE[0]], 0.0)
    orchestrator.record(DemandReport(((LARGE[0].adapter, 500),) * 10 + ((None, 1500),) * 10, ((None, 500),) * 10))
    orchestrator.close_period(10.0)
    large, base = 500 / 500, (1500 + 500) / 1000
    assert orchestrator.load(0.0) == pytest.approx(large + base)
    assert None not in orchestrator.table.shares
    assert orchestrator.table.shares.keys() == {SMALL[0].adapter, LARGE[0].adapter}, "the base model is nowhere placed"
    assert Orchestrator(FullReplication(), (S1,), 0.0).load(0.0) is None
