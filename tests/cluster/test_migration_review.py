"""Observations of a fleet for co-migration."""

import math
from collections.abc import Callable

from lorikeet.cluster.migration.problem import MovableRequest, MoveTimes, ReplicaLoad
from lorikeet.cluster.migration.review import observe
from lorikeet.cluster.routing.fleet import Fleet, ReplicaGauges, ReplicaInfo
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId
from tests.support.fleets import ask, fleet_of, run, send

A, B = ReplicaId("a"), ReplicaId("b")


def info(replica: str) -> ReplicaInfo:
    """1000 tokens of KV, 2 bytes each."""
    return ReplicaInfo(ReplicaId(replica), total_tokens=1000, kv_token_bytes=2.0)


def sent(**at_s: float) -> dict[RequestId, float]:
    return {RequestId(name): each for name, each in at_s.items()}


def rebuilt(move_s: Callable[[int], float]) -> MoveTimes:
    """Moves that take so long, since KV cannot travel."""
    return MoveTimes(move_s, math.inf, 2.0, None)


NO_COST = rebuilt(lambda tokens: 0.0)


def test_observation_has_memory_and_move_time_of_each_request() -> None:
    fleet = fleet_of(info("a"), execution_s=3.0)
    run(fleet, "a", ask("x", 8, "one", known_tokens=100, adapter_bytes=70))
    fleet.generated(A, RequestId("x"), 5)
    send(fleet, "a", ask("y", known_tokens=40))
    times = MoveTimes(lambda tokens: tokens / 10, 10.0, 2.0, None)
    observed = observe(fleet, sent(x=0.0, y=1.0), {RequestId("x"): 0.5}, times, now=2.0)
    assert observed.requests == [
        MovableRequest(RequestId("x"), AdapterDigest("one"), A, 210, 3.0, move_s=52.5, moved_s=0.5),
        MovableRequest(RequestId("y"), None, A, 80, 3.0, move_s=16.0),
    ]
    assert observed.adapter_bytes == {AdapterDigest("one"): 70}


def test_kv_moves_along_where_that_is_faster() -> None:
    """100 tokens of 2 bytes take 2 s to travel and then a step of 1 s; computing them anew takes 1 s a ten."""
    fleet = fleet_of(info("a"))
    run(fleet, "a", ask("long", known_tokens=100), ask("short", known_tokens=10))
    times = MoveTimes(lambda tokens: max(1.0, tokens / 10), math.inf, 2.0, lambda: 100.0)
    observed = observe(fleet, sent(long=0.0, short=0.0), {}, times, now=1.0)
    found = {each.request_id: (each.transfers_kv, each.move_s) for each in observed.requests}
    assert found == {"long": (True, 3.0), "short": (False, 1.0)}


def test_replica_is_observed_with_free_room_and_its_longest_wait() -> None:
    fleet = fleet_of(info("a"), info("b"))
    run(fleet, "a", ask("x", known_tokens=100))
    send(fleet, "a", ask("y"), ask("z"))
    fleet.gauges(ReplicaGauges(A, 0, 1, requests=3, free_tokens=850.0))
    observed = observe(fleet, sent(x=0.0, y=6.0, z=4.0), {}, NO_COST, now=10.0, reserved_share=0.05)
    assert observed.replicas == [
        ReplicaLoad(A, 2000, 1700, 6.0, reserved_bytes=100, running=1),
        ReplicaLoad(B, 2000, 2000, 0.0, reserved_bytes=100),
    ]


def test_preempted_request_has_had_its_turn() -> None:
    fleet = fleet_of(info("a"))
    run(fleet, "a", ask("x"))
    fleet.preempted(A, RequestId("x"))
    (load,) = observe(fleet, sent(x=0.0), {}, NO_COST, now=10.0).replicas
    assert load.queue_delay_s == 0


def test_requests_not_handed_over_and_closed_replicas_are_left_out() -> None:
    fleet = fleet_of(info("a"), info("b"), "unknown")
    send(fleet, "a", ask("x", 8, "one"), ask("y"))
    fleet.drain(B)
    observed = observe(fleet, sent(y=0.0), {}, NO_COST, now=1.0)
    assert [load.replica for load in observed.replicas] == [A]
    assert [request.request_id for request in observed.requests] == ["y"]
    assert observed.adapter_bytes == {}


def test_an_empty_fleet_has_nothing_to_tell() -> None:
    assert observe(Fleet(), {}, {}, NO_COST, now=0.0) == ([], [], {})
