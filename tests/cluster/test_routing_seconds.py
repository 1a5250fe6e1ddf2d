"""Routing by added seconds: learned costs, and the bytes in the pool."""

from types import SimpleNamespace
from typing import cast

import pytest

from lorikeet.cluster.controller.dispatcher import Dispatcher
from lorikeet.cluster.controller.learned_costs import LearnedCosts
from lorikeet.cluster.routing.base import ANYWHERE
from lorikeet.cluster.routing.fleet import ReplicaInfo
from lorikeet.cluster.routing.plain import RoundRobin
from lorikeet.cluster.routing.seconds import FewestSeconds
from lorikeet.core.ids import AdapterDigest, ReplicaId
from lorikeet.core.messages import EngineStats, RouteStats
from lorikeet.core.plan import KernelForm
from lorikeet.core.replica_costs import ReplicaCosts
from tests.support.fleets import ask, fleet_of, routed_to, run, send, several

COSTS = ReplicaCosts(0.01, 1e-3, 1e-4, 0.0, 1e-6, 1e-6, load_s=0.0, load_bytes_per_s=1e9)
A, B, C = (ReplicaId(name) for name in "abc")


def blocks(prefix: str, count: int) -> tuple[bytes, ...]:
    return tuple(f"{prefix}{number}".encode() for number in range(count))


def test_a_prompt_goes_to_its_prefix_unless_the_queue_there_costs_more() -> None:
    policy, fleet = FewestSeconds(COSTS), fleet_of(A, B)
    first = ask("first", known_tokens=160, expected_tokens=1, keys=blocks("x", 9))
    assert routed_to(policy, first, fleet) == A
    again = ask("again", known_tokens=160, expected_tokens=1, keys=blocks("x", 9))
    send(fleet, "a", ask("between", known_tokens=100, expected_tokens=1))
    choice = policy.route(again, fleet, ANYWHERE, 0.0)  # 0.144 s of prefill saved, 0.1 s of queue
    assert choice is not None
    assert choice.replica == A
    assert choice.saved_s > 0
    send(fleet, "a", ask("more", known_tokens=100, expected_tokens=1))
    assert routed_to(policy, again, fleet) == B


def test_an_adapter_goes_where_it_is_unless_loading_it_costs_less() -> None:
    policy, fleet = FewestSeconds(COSTS), fleet_of(A, B)
    fleet.loaded(B, AdapterDigest("x"))
    for size, home in ((100_000_000, B), (1_000, B)):
        assert routed_to(policy, ask("one", 8, "x", adapter_bytes=size), fleet) == home
    run(fleet, "b", *several(5, 8))
    assert routed_to(policy, ask("two", 8, "x", adapter_bytes=1_000), fleet) == A
    assert routed_to(policy, ask("two", 8, "x", adapter_bytes=10**9), fleet) == B


def test_a_copy_that_must_be_fetched_first_costs_more() -> None:
    policy, fleet = FewestSeconds(COSTS), fleet_of(A, B, C)
    asked = ask("one", 8, "x", adapter_bytes=10**8)
    assert routed_to(policy, asked, fleet, holders={C}) == C


def test_memory_that_is_short_costs_the_time_until_it_is_free() -> None:
    policy, asked = FewestSeconds(COSTS), ask("new", known_tokens=100, expected_tokens=10)
    fleet = fleet_of(ReplicaInfo(A, total_tokens=200), ReplicaInfo(B, total_tokens=10_000))
    for replica in (A, B):
        run(fleet, replica, ask(f"at {replica}", known_tokens=150, expected_tokens=40))
    short, ample = policy.seconds(asked, fleet, fleet.is_warm(None), None)
    # 50 tokens lack; the request there holds 150 for 40 more steps of two sequences.
    assert short - ample == pytest.approx(40 * (0.01 + 2 * 1e-4) * 50 / 150)


def test_other_costs_make_other_choices() -> None:
    """With prompts that cost nothing there is no reason to follow a prefix."""
    policy, fleet = FewestSeconds(COSTS), fleet_of(A, B)
    routed_to(policy, ask("first", known_tokens=160, expected_tokens=1, keys=blocks("x", 9)), fleet)
    send(fleet, "a", ask("between", known_tokens=100, expected_tokens=1))
    policy.learn(ReplicaCosts(0.01, 0.0, 1e-3))
    assert routed_to(policy, ask("again", known_tokens=160, expected_tokens=1, keys=blocks("x", 9)), fleet) == B


def test_padded_kernels_send_a_small_rank_where_ranks_are_small() -> None:
    costs = ReplicaCosts(0.01, 1e-3, 1e-4, 0.0, 1e-5, 1e-6)
    for form, home in ((KernelForm.UNPADDED, A), (KernelForm.PADDED, B)):
        fleet = fleet_of(A, B)
        run(fleet, "a", ask("large", 128))
        run(fleet, "b", ask("small", 8), ask("other", 8))
        assert routed_to(FewestSeconds(costs, form), ask("new", 8, known_tokens=200), fleet) == home


# --- what replicas measure ---------------------------------------------------------------------------


def stats_of(costs: ReplicaCosts | None, loaded_bytes: int = 0, busy_s: float = 0.0) -> EngineStats:
    """Statistics in which only costs and transfers are read."""
    routes = {"host-device": RouteStats(1, loaded_bytes, 0, busy_s), "device-host": RouteStats(1, 10**9, 0, 1.0)}
    return cast(EngineStats, SimpleNamespace(costs=costs, memory=SimpleNamespace(transfers=routes)))


def test_costs_are_the_median_of_reports() -> None:
    learned = LearnedCosts(COSTS)
    assert not learned.note(A, stats_of(None))
    assert not learned.note(A, stats_of(ReplicaCosts(0.0101, 1e-3, 1e-4, 0.0, 1e-6, 1e-6)))
    fast, slow = (ReplicaCosts(0.01 * factor, 1e-3 * factor, 1e-4 * factor) for factor in (1.0, 3.0))
    learned.note(A, stats_of(fast))
    assert learned.note(B, stats_of(slow))
    learned.note(C, stats_of(slow))
    assert learned.costs.prefill_token_s == pytest.approx(3e-3)
    learned.forget(B)
    learned.forget(C)
    assert learned.note(A, stats_of(fast))
    assert learned.costs.prefill_token_s == pytest.approx(1e-3)


def test_load_costs_follow_measured_loads() -> None:
    learned = LearnedCosts(COSTS)
    assert not learned.note(A, stats_of(None, 1000, 1.0)), "too little to tell"
    assert learned.note(A, stats_of(None, 10**8, 1.0))
    assert learned.costs.load_bytes_per_s == pytest.approx(1e8)


# --- bytes of copies ---------------------------------------------------------------------------------


def test_copies_stay_within_their_share_and_nothing_is_lost() -> None:
    """Four adapters of 10 bytes on four replicas: 160 bytes in all, of which half may be held."""
    dispatcher = Dispatcher(RoundRobin(), held_share=0.5)
    replicas = [ReplicaId(f"r{number}") for number in range(4)]
    for replica in replicas:
        dispatcher.join(ReplicaInfo(replica), 0.0)
    adapters = [AdapterDigest(f"a{number}") for number in range(4)]
    for adapter in adapters:
        dispatcher.register(adapter, size_bytes=10)
    asked = 0
    for turn in range(6):
        for adapter in adapters:
            name = f"{turn}-{adapter}"
            pending = [dispatcher.arrive(ask(name, 8, adapter), 0.0)]
            while pending:
                actions = pending.pop()
                pending += [dispatcher.provided(provision) for provision in actions.provisions]
                pending += [dispatcher.fetched(fetch) for fetch in actions.fetches]
            asked += 1
            dispatcher.ended(ask(name, 8, adapter).request_id, 0.0, is_complete=True)
            held = sum(len(dispatcher.pool.table.holders(each)) for each in adapters)
            assert dispatcher.pool.held_bytes == 10 * held <= 80
    assert all(dispatcher.pool.table.holders(adapter) for adapter in adapters)
    assert asked == 24


def test_a_copy_in_use_is_not_deleted_though_there_are_too_many() -> None:
    dispatcher = Dispatcher(RoundRobin(), held_share=0.5)
    for replica in (A, B):
        dispatcher.join(ReplicaInfo(replica), 0.0)
    dispatcher.register(AdapterDigest("x"), size_bytes=10)
    first = dispatcher.arrive(ask("one", 8, "x"), 0.0)
    dispatcher.provided(first.provisions[0])
    second = dispatcher.arrive(ask("two", 8, "x"), 0.0)
    assert dispatcher.fetched(second.fetches[0]).deletes == ()
    assert dispatcher.pool.held_bytes == 20
    ended = dispatcher.ended(ask("one", 8, "x").request_id, 0.0, is_complete=True)
    assert len(ended.deletes) == 1
    assert dispatcher.pool.held_bytes == 10
