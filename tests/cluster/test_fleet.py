"""The fleet's state for routing: every request counts once, at one replica, whatever the order of reports."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from lorikeet.cluster.routing import fleet as module
from lorikeet.cluster.routing.fleet import (
    Fleet,
    ReplicaGauges,
    ReplicaInfo,
    RequestAverages,
    apply_outputs,
    replica_gauges,
)
from lorikeet.cluster.routing.request import routing_request
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId
from lorikeet.scheduling.state import SchedulerLimits
from tests.support.fleets import ask, fleet_of, run, send
from tests.support.scripted import BLOCK_TOKENS, Bench, adapter, request

A, B = ReplicaId("a"), ReplicaId("b")


def counts(fleet: Fleet, index: int = 0) -> tuple[int, int, int]:
    """Requests, running, queued."""
    loads = fleet.loads
    return int(loads.requests[index]), int(loads.running[index]), int(loads.queued[index])


def test_a_request_counts_as_queued_as_soon_as_it_is_sent() -> None:
    fleet = fleet_of("a", "b")
    send(fleet, "b", ask("x", 8, known_tokens=100, expected_tokens=50))
    assert counts(fleet, 0) == (0, 0, 0)
    assert counts(fleet, 1) == (1, 0, 1)
    assert (fleet.loads.prefill_tokens[1], fleet.loads.decode_tokens[1]) == (100, 50)
    assert (fleet.loads.queued_rows[1], fleet.loads.queued_largest_rank[1], fleet.loads.queued_total_rank[1]) == (
        1,
        8,
        8,
    )


def test_ends_are_averaged_unless_they_were_cut_short() -> None:
    fleet = fleet_of("a", output_tokens=200)
    x, y = ask("x"), ask("y")
    run(fleet, "a", x, y)
    fleet.generated(A, x.request_id, 7)
    fleet.ended(A, x.request_id, 5.0)
    fleet.ended(A, y.request_id, 5.0, is_complete=False)
    assert counts(fleet) == (0, 0, 0)
    assert fleet.averages.output_tokens == 7
    assert fleet.averages.execution_s(None) == 5.0


def test_moved_answer_counts_all_its_tokens_and_its_time_is_unknown() -> None:
    fleet = fleet_of("a", execution_s=2.0)
    x = ask("x", generated_tokens=20)
    run(fleet, "a", x)
    fleet.generated(A, x.request_id, 7)
    fleet.ended(A, x.request_id, 5.0)
    assert fleet.averages.output_tokens == 27
    assert fleet.averages.execution_s(None) == 2.0


def test_a_moved_request_is_counted_where_it_is_now_only() -> None:
    fleet = fleet_of("a", "b")
    x = ask("x", 8)
    run(fleet, "a", x)
    send(fleet, "b", x)
    assert (counts(fleet, 0), counts(fleet, 1)) == ((0, 0, 0), (1, 0, 1))
    fleet.generated(A, x.request_id)
    fleet.ended(A, x.request_id, 1.0)
    assert (counts(fleet, 0), counts(fleet, 1)) == ((0, 0, 0), (1, 0, 1))
    assert fleet.where(x.request_id) == B


def test_leaving_replica_returns_its_requests_in_order() -> None:
    fleet = fleet_of("a", "b", "c")
    send(fleet, "a", ask("1"), ask("2", 8))
    send(fleet, "b", ask("3", 16))
    run(fleet, "a", ask("4", 8, "adapter"))
    fleet.loaded(A, AdapterDigest("adapter"))
    assert fleet.leave(A) == ["1", "2", "4"]
    assert [info.replica for info in fleet.infos()] == ["b", "c"]
    assert (counts(fleet, 0), fleet.loads.largest_rank[0]) == ((1, 0, 1), 16)
    assert fleet.open_index == {"b": 0, "c": 1}
    assert not fleet.is_warm(AdapterDigest("adapter")).any()
    assert fleet.where(RequestId("1")) is None
    fleet.ended(B, RequestId("3"), 1.0)
    assert counts(fleet, 0) == (0, 0, 0)


def test_restarted_replica_must_leave_before_it_joins() -> None:
    fleet = fleet_of("a", "b")
    send(fleet, "a", ask("x"))
    with pytest.raises(ValueError, match="has joined already"):
        fleet.join(ReplicaInfo(A, epoch=1))
    assert fleet.leave(A) == ["x"]
    fleet.join(ReplicaInfo(A, epoch=1))
    assert [(info.replica, info.epoch) for info in fleet.infos()] == [("b", 0), ("a", 1)]
    assert counts(fleet, 1) == (0, 0, 0)


def test_a_drained_replica_keeps_its_requests_and_is_not_open() -> None:
    fleet = fleet_of("a", "b")
    send(fleet, "a", ask("x"))
    fleet.drain(A)
    assert fleet.open.tolist() == [1]
    assert counts(fleet, 0) == (1, 0, 1)


def test_gauges_count_others_and_none_of_ours_twice() -> None:
    fleet = fleet_of("a")
    send(fleet, "a", ask("x"), ask("y"))
    assert fleet.gauges(ReplicaGauges(A, 0, 1, requests=5))
    assert counts(fleet) == (5, 0, 2)
    fleet.ended(A, RequestId("x"), 1.0)
    assert counts(fleet) == (4, 0, 1)
    assert fleet.gauges(ReplicaGauges(A, 0, 2, requests=1))
    assert counts(fleet) == (1, 0, 1)
    for past in (
        ReplicaGauges(A, 0, 2, requests=9),
        ReplicaGauges(A, -1, 3, requests=9),
        ReplicaGauges(B, 0, 3, requests=9),
    ):
        assert not fleet.gauges(past)
    assert counts(fleet) == (1, 0, 1)


def test_free_room_follows_requests_between_reports() -> None:
    fleet = fleet_of(ReplicaInfo(A, total_tokens=1000))
    x, y = ask("x", known_tokens=100), ask("y", known_tokens=200)
    run(fleet, "a", x)
    send(fleet, "a", y)
    assert fleet.loads.free_tokens[0] == 700
    fleet.gauges(ReplicaGauges(A, 0, 1, requests=2, free_tokens=850))  # 50 are held by what is not known here
    assert fleet.loads.free_tokens[0] == 650
    fleet.admitted(A, y.request_id, 1.0)
    fleet.generated(A, y.request_id, 10)
    assert fleet.loads.free_tokens[0] == 640
    fleet.ended(A, x.request_id, 1.0)
    assert fleet.loads.free_tokens[0] == 740


def test_an_adapter_is_warm_where_it_is_and_where_a_request_brings_it() -> None:
    fleet = fleet_of("a", "b", "c")
    digest = AdapterDigest("adapter")
    send(fleet, "a", ask("x", 8, "adapter"))
    fleet.loaded(B, digest)
    assert fleet.is_warm(digest).tolist() == [True, True, False]
    assert fleet.loads.adapters.tolist() == [1, 1, 0]
    fleet.loaded(A, digest)
    assert fleet.loads.adapters.tolist() == [1, 1, 0], "needed and resident is once"
    fleet.evicted(A, digest)
    fleet.ended(A, RequestId("x"), 1.0)
    assert fleet.is_warm(digest).tolist() == [False, True, False]
    assert fleet.loads.adapters.tolist() == [0, 1, 0]
    fleet.evicted(B, digest)
    assert not fleet.is_warm(digest).any()
    fleet.gauges(ReplicaGauges(A, 0, 1, requests=0, resident=frozenset({digest})))
    assert fleet.is_warm(digest).tolist() == [True, False, False]
    fleet.gauges(ReplicaGauges(A, 0, 2, requests=0, resident=frozenset()))
    assert not fleet.is_warm(digest).any()
    assert fleet.is_warm(None).all()


def test_a_cold_adapter_needs_room_where_the_size_of_a_token_is_known() -> None:
    fleet = fleet_of(ReplicaInfo(A, kv_token_bytes=10), ReplicaInfo(B, kv_token_bytes=10), "c")
    fleet.loaded(B, AdapterDigest("adapter"))
    one = ask("x", 8, "adapter", 100, adapter_bytes=500)
    assert fleet.needed_tokens(one, fleet.is_warm(one.adapter)).tolist() == [150, 100, 100]


@dataclass
class Known:
    """A request, as the plain model of the test below knows it."""

    rank: int
    known: int
    expected: int
    replica: ReplicaId
    running: bool = False
    prefilled: bool = False
    output: int = 0


def recount(known: list[Known], replica: ReplicaId) -> dict[str, float]:
    """Every counter of a replica, from scratch."""
    here = [each for each in known if each.replica == replica]
    queued = [each for each in here if not each.running]
    ranks, queued_ranks = ([each.rank for each in some if each.rank] for some in (here, queued))
    return {
        "requests": len(here),
        "running": len(here) - len(queued),
        "queued": len(queued),
        "rows": len(ranks),
        "largest_rank": max(ranks, default=0),
        "total_rank": sum(ranks),
        "queued_rows": len(queued_ranks),
        "queued_largest_rank": max(queued_ranks, default=0),
        "queued_total_rank": sum(queued_ranks),
        "prefill_tokens": sum(each.known + each.output for each in here if not each.prefilled),
        "decode_tokens": sum(max(0, each.expected - each.output) for each in here),
        "held_tokens": sum(each.known + each.output for each in here if each.running),
        "queued_tokens": sum(each.known + each.output for each in queued),
        "queued_s": float(len(queued)),
    }


@pytest.mark.parametrize("seed", range(10))
def test_counters_equal_a_recount_after_every_event(seed: int) -> None:
    draws = random.Random(seed)
    fleet = fleet_of("a", "b", "c")
    replicas, known, names = [ReplicaId(name) for name in "abc"], dict[RequestId, Known](), iter(range(10_000))
    epochs = dict.fromkeys(replicas, 0)

    def dispatch() -> None:
        name = RequestId(str(next(names)))
        known[name] = each = Known(draws.choice([0, 8, 16, 64]), draws.randrange(1, 50), 5, draws.choice(replicas))
        send(fleet, each.replica, ask(name, each.rank, None, each.known, each.expected))

    def admit(name: RequestId, each: Known) -> None:
        each.running = True
        fleet.admitted(each.replica, name, 0.0)

    def preempt(name: RequestId, each: Known) -> None:
        each.running = each.prefilled = False
        fleet.preempted(each.replica, name)

    def generate(name: RequestId, each: Known) -> None:
        each.prefilled, each.output = True, each.output + 2
        fleet.generated(each.replica, name, 2)

    def end(name: RequestId, each: Known) -> None:
        fleet.ended(each.replica, name, 0.0, is_complete=False)
        del known[name]

    def restart() -> None:
        replica = draws.choice(replicas)
        epochs[replica] += 1
        lost = fleet.leave(replica)
        fleet.join(ReplicaInfo(replica, epochs[replica]))
        assert lost == [name for name, each in known.items() if each.replica == replica]
        for name in lost:
            del known[name]

    steps: list[Callable[[RequestId, Known], None]] = [admit, preempt, generate, generate, end]
    for _ in range(400):
        if not known or draws.random() < 0.3:
            dispatch()
        elif draws.random() < 0.02:
            restart()
        else:
            draws.choice(steps)(*draws.choice(list(known.items())))
        for index, info in enumerate(fleet.infos()):
            expected = recount(list(known.values()), info.replica)
            assert {name: getattr(fleet.loads, name)[index] for name in expected} == expected


def test_the_fleet_follows_an_engine_by_its_events() -> None:
    """Preemptions, cold adapters and finishes included: after every step both count the same."""
    bench = Bench(blocks=12, limits=SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=32))
    fleet = fleet_of(ReplicaInfo(A, total_tokens=12 * BLOCK_TOKENS))
    refs = [None, adapter("one"), adapter("two", 2)]
    for number in range(9):
        one = request(f"r{number}", [1 + number, 2, 3, 4], float(number), refs[number % 3], max_tokens=14)
        fleet.dispatched(routing_request(one), A)
        bench.engine.submit(one)
    preempted = 0
    while bench.engine.has_requests:
        outputs = bench.engine.step()
        apply_outputs(fleet, A, outputs)
        stats = bench.engine.stats()
        preempted = stats.preemptions
        assert fleet.loads.requests[0] == stats.running + stats.waiting
        assert fleet.loads.running[0] == stats.running + stats.waiting_for_adapter + stats.waiting_for_kv
        fleet.gauges(replica_gauges(A, 0, stats, BLOCK_TOKENS))
        assert fleet.loads.others[0] == 0
        assert all(fleet.is_warm(digest)[0] for digest in stats.resident_adapters)
    assert preempted, "the engine had too much room for this test"
    assert counts(fleet) == (0, 0, 0)
    assert fleet.loads.pending_tokens[0] == fleet.loads.held_tokens[0] == 0
    assert fleet.averages.output_tokens == pytest.approx(14)


# --- Averages over finished requests ------------------------------------------------------------


def test_least_recently_finished_adapter_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_ADAPTERS", 2)
    averages = RequestAverages()
    for name, seconds in (("x", 1.0), ("y", 2.0), ("x", 3.0), ("z", 8.0)):
        averages.finished(AdapterDigest(name), 10, seconds)
    of = {name: averages.execution_s(AdapterDigest(name)) for name in "xyz"}
    assert (of["x"], of["z"]) == (2.0, 8.0)
    assert of["y"] == averages.execution_s(AdapterDigest("unknown")) == pytest.approx(3.5)
