"""First fit (TOPPINGS, section 7.5)."""

from lorikeet.cluster.routing.fleet import ReplicaInfo
from lorikeet.core.ids import ReplicaId
from lorikeet.papers.toppings.first_fit import FirstFit
from tests.support.fleets import ask, fleet_of, routed_to, send


def test_first_fit_fills_batches_in_order_and_then_waits() -> None:
    fleet = fleet_of(*(ReplicaInfo(ReplicaId(name), max_batch=2) for name in "ab"))
    policy, chosen = FirstFit(), []
    for number in range(5):
        chosen.append(replica := routed_to(policy, ask(str(number)), fleet))
        if replica is not None:
            fleet.dispatched(ask(str(number)), replica)
    assert chosen == ["a", "a", "b", "b", None]
    fleet.ended(ReplicaId("b"), ask("2").request_id, 1.0)
    assert routed_to(policy, ask("4"), fleet) == "b"


def test_first_fit_needs_room_for_kv_and_for_an_adapter_that_is_not_there() -> None:
    fleet = fleet_of(*(ReplicaInfo(ReplicaId(name), total_tokens=250, kv_token_bytes=10) for name in "ab"))
    send(fleet, "a", ask("1", 8, "x", 100, adapter_bytes=500))
    assert routed_to(FirstFit(), ask("2", 8, "x", 150, adapter_bytes=500), fleet) == "a"
    assert routed_to(FirstFit(), ask("2", 8, "y", 150, adapter_bytes=500), fleet) == "b"
    assert routed_to(FirstFit(), ask("2", known_tokens=151), fleet) == "b"
