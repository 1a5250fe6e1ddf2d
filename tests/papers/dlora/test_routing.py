"""dLoRA's routing by pending time."""

import pytest

from lorikeet.cluster.routing.fleet import ReplicaInfo
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.papers.dlora.routing import PendingTime
from tests.support.fleets import ask, fleet_of, routed_to, run, send, several, table


@pytest.mark.parametrize(("queued_ms", "pending_ms", "choice"), [(5, [10, 8.5], "r1"), (8, [10, 11.5], "r0")])
def test_ex_7b_the_adapters_load_time_counts_where_it_is_absent(
    queued_ms: int, pending_ms: list[float], choice: str
) -> None:
    """56 MB at 16 GB/s take 3.5 ms (EX-6a)."""
    fleet = fleet_of(*(ReplicaInfo(ReplicaId(name), max_batch=1) for name in ("r0", "r1")))
    fleet.loaded(ReplicaId("r0"), AdapterDigest("wanted"))
    for replica, other, ms in (("r0", "slow", 10), ("r1", "fast", queued_ms)):
        run(fleet, replica, ask("before", 8, other))
        fleet.ended(ReplicaId(replica), ask("before").request_id, ms / 1000)
        send(fleet, replica, ask(other, 8, other))
    policy, asked = PendingTime(load_bytes_per_s=16e9), ask("new", 8, "wanted", adapter_bytes=56_000_000)
    assert policy.pending_s(asked, fleet, fleet.is_warm(asked.adapter)) * 1000 == pytest.approx(pending_ms)
    assert routed_to(policy, asked, fleet) == choice


def test_pending_time_divides_the_queue_by_batch_without_running_requests() -> None:
    fleet = fleet_of(ReplicaInfo(ReplicaId("a"), max_batch=4), execution_s=2.0)
    run(fleet, "a", *several(4, 8))
    send(fleet, "a", *several(6, 16))
    assert PendingTime().pending_s(ask("new"), fleet, fleet.is_warm(None)).tolist() == [3.0]


def test_pending_time_counts_evictions_and_prefers_holders_on_ties() -> None:
    fleet = fleet_of(*(ReplicaInfo(ReplicaId(name), total_tokens=150, kv_token_bytes=10) for name in "ab"))
    run(fleet, "a", ask("x"))
    policy = PendingTime(load_bytes_per_s=1000)
    assert policy.pending_s(ask("new"), fleet, fleet.is_warm(None)).tolist() == [0.5, 0.0]
    fleet.ended(ReplicaId("a"), ask("x").request_id, 0.0, is_complete=False)
    fleet.loaded(ReplicaId("b"), AdapterDigest("y"))
    assert routed_to(policy, ask("new", 8, "y"), fleet) == "b", "both wait for nothing, but b has it"


def test_pending_time_takes_the_most_room_among_equals() -> None:
    fleet = fleet_of(*(ReplicaInfo(ReplicaId(name), total_tokens=150) for name in "abc"))
    run(fleet, "a", ask("x", known_tokens=50))
    run(fleet, "b", ask("y", known_tokens=40))
    run(fleet, "c", ask("z", known_tokens=60))
    assert routed_to(PendingTime(), ask("new", known_tokens=10), fleet) == "b"


def test_pending_time_leaves_the_table_where_a_load_is_sooner_than_the_queue() -> None:
    """Dynamic loading (5.1): the table only says where adapters are loaded ahead."""
    fleet = fleet_of(*(ReplicaInfo(ReplicaId(name), max_batch=1) for name in "ab"), execution_s=2.0)
    policy = PendingTime(load_s=1.0)
    placed = table(wanted={"a": 1.0})
    fleet.loaded(ReplicaId("a"), AdapterDigest("wanted"))
    assert routed_to(policy, ask("first", 8, "wanted"), fleet, placed) == "a"
    send(fleet, "a", ask("first", 8, "wanted"))
    assert routed_to(policy, ask("second", 8, "wanted"), fleet, placed) == "b"
