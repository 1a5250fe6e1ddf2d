"""LoRAServe's adapter pool: sources of fetches, and deletions."""

from unittest.mock import Mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lorikeet.cluster.adapters.pool import NOTHING, AdapterPool, Fetch, PoolActions
from lorikeet.cluster.tables import AdapterTable, ReplicaShare, RoutingTable
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId
from tests.support.placement import digest
from tests.support.step_counts import examples

A3 = digest("A3")
S1, S2, S3, S4 = (ReplicaId(name) for name in ("S1", "S2", "S3", "S4"))


def routed(**shares: float) -> RoutingTable:
    return RoutingTable(0, {A3: tuple(ReplicaShare(ReplicaId(replica), share) for replica, share in shares.items())})


def pool_of(routing: RoutingTable, *holders: ReplicaId) -> AdapterPool:
    pool = AdapterPool(routing)
    for replica in holders:
        pool.seed(A3, replica)
    return pool


def begin(pool: AdapterPool, request: str, replica: ReplicaId) -> PoolActions:
    return pool.begin(RequestId(request), A3, replica)


def only_fetch(todo: PoolActions) -> Fetch:
    (fetch,) = todo.fetches
    return fetch


def test_the_storage_sequence() -> None:
    pool = pool_of(routed(S2=1.0), S2)
    assert pool.swap(routed(S1=1.0)) == NOTHING  # nothing moves, and S2 has the last copy
    fetch = only_fetch(begin(pool, "r1", S1))
    assert fetch[1:] == (A3, S2, S1)
    assert begin(pool, "r2", S1) == NOTHING  # the same fetch
    assert pool.fetched(fetch) == PoolActions(ready=(RequestId("r1"), RequestId("r2")), deletes=((A3, S2),))
    assert pool.table.holders(A3) == {S1}
    assert pool.table.held_by(S2) == set()
    assert pool.end(RequestId("r1")) == pool.end(RequestId("r2")) == NOTHING

    assert pool.swap(routed(S1=0.5, S3=0.5)) == NOTHING
    assert pool.swap(routed(S1=1.0)) == NOTHING  # nobody was sent to S3: no fetch

    pool.swap(routed(S1=0.5, S3=0.5))
    pool.fetched(only_fetch(begin(pool, "r3", S3)))
    assert pool.table.holders(A3) == {S1, S3}
    pool.end(RequestId("r3"))
    assert pool.swap(routed(S1=1.0)) == PoolActions(deletes=((A3, S3),))
    assert pool.table.holders(A3) == {S1}


def test_swap_to_same_table_checks_only_adapters_seeded_since(monkeypatch: pytest.MonkeyPatch) -> None:
    table = routed(S1=1.0)
    pool = pool_of(table, S1)
    pool.swap(table)
    monkeypatch.setattr(AdapterTable, "__iter__", Mock(side_effect=AssertionError("it looked at all adapters")))
    assert pool.swap(table) == NOTHING
    pool.seed(A3, S2)
    assert pool.swap(table) == PoolActions(deletes=((A3, S2),))


def test_the_papers_example_keeps_a_source_that_stays_routed() -> None:
    pool = pool_of(routed(S2=1.0), S2)
    pool.swap(routed(S1=0.7, S2=0.3))
    assert pool.fetched(only_fetch(begin(pool, "r", S1))) == PoolActions(ready=(RequestId("r"),))
    assert pool.table.holders(A3) == {S1, S2}
    assert begin(pool, "later", S1) == PoolActions(ready=(RequestId("later"),))


def test_a_copy_in_use_is_deleted_when_its_last_request_ends() -> None:
    pool = pool_of(routed(S1=0.5, S2=0.5), S1, S2)
    begin(pool, "r1", S2)
    begin(pool, "r2", S2)
    assert pool.swap(routed(S1=1.0)) == NOTHING
    assert pool.end(RequestId("r1")) == NOTHING
    assert pool.end(RequestId("r2")) == PoolActions(deletes=((A3, S2),))


def test_a_source_is_not_deleted_while_others_fetch_from_it() -> None:
    pool = pool_of(routed(S1=0.5, S3=0.5), S2)
    first, second = (only_fetch(begin(pool, f"r{replica}", replica)) for replica in (S1, S3))
    assert pool.fetched(first).deletes == ()
    assert pool.fetched(second).deletes == ((A3, S2),)


def test_a_source_stays_routed_has_few_transfers_and_a_low_id_in_this_order() -> None:
    pool = pool_of(routed(S2=0.4, S3=0.3, S4=0.3), S1, S2, S3)
    begin(pool, "holds-s1", S1)  # so that it is not collected
    assert only_fetch(begin(pool, "r4", S4)).source == S2
    pool.swap(routed(S1=0.5, S4=0.5))
    other = digest("other")
    pool.seed(other, S2)
    pool.seed(other, S3)
    assert only_fetch(pool.begin(RequestId("other"), other, S1)).source == S3  # S2 is busy


def test_source_of_a_copy_is_a_holder_not_the_last_placement() -> None:
    pool = pool_of(routed(S1=1.0), S1)
    pool.swap(routed(S2=1.0))
    pool.swap(routed(S3=1.0))
    assert only_fetch(begin(pool, "r", S3)).source == S1


def test_failed_fetch_tries_the_next_holder_then_fails_waiting_requests() -> None:
    pool = pool_of(routed(S1=0.4, S2=0.3, S3=0.3), S1, S2)
    first = only_fetch(begin(pool, "r1", S3))
    begin(pool, "r2", S3)
    second = only_fetch(pool.fetch_failed(first))
    assert (first.source, second.source) == (S1, S2)
    assert pool.fetch_failed(first) == NOTHING  # told twice
    assert pool.fetch_failed(second) == PoolActions(failed=(RequestId("r1"), RequestId("r2")))
    assert pool.table.holders(A3) == {S1, S2}
    assert only_fetch(begin(pool, "r3", S3)).source == S1  # a later request tries anew


def test_adapter_without_a_holder_fails_at_once() -> None:
    pool = pool_of(routed(S1=1.0))
    assert begin(pool, "r", S1) == PoolActions(failed=(RequestId("r"),))
    pool.seed(A3, S2)
    assert only_fetch(begin(pool, "r", S1)).source == S2


def test_a_request_begins_once() -> None:
    pool = pool_of(routed(S1=1.0), S1)
    begin(pool, "r", S1)
    with pytest.raises(ValueError, match="before"):
        begin(pool, "r", S1)


def test_an_aborted_request_leaves_its_fetch_to_the_others() -> None:
    pool = pool_of(routed(S1=1.0), S2)
    fetch = only_fetch(begin(pool, "r1", S1))
    begin(pool, "r2", S1)
    assert pool.end(RequestId("r1")) == NOTHING
    assert pool.fetched(fetch).ready == (RequestId("r2"),)


def test_a_copy_from_elsewhere_may_come_before_a_fetch() -> None:
    pool = pool_of(routed(S1=1.0), S2)
    fetch = only_fetch(begin(pool, "waits", S1))
    pool.seed(A3, S1)
    assert begin(pool, "later", S1).ready == (RequestId("later"),)
    assert pool.end(RequestId("later")) == NOTHING
    assert pool.fetched(fetch) == PoolActions(ready=(RequestId("waits"),), deletes=((A3, S2),))


def test_request_stays_where_routed_when_the_table_changes_during_its_fetch() -> None:
    pool = pool_of(routed(S1=1.0), S2)
    fetch = only_fetch(begin(pool, "r", S1))
    pool.swap(routed(S2=1.0))
    assert pool.fetched(fetch) == PoolActions(ready=(RequestId("r"),))
    assert pool.table.holders(A3) == {S1, S2}
    assert pool.end(RequestId("r")) == PoolActions(deletes=((A3, S1),))


def test_prefetch_fetches_adapters_added_by_a_table() -> None:
    pool = AdapterPool(routed(S1=1.0), prefetch=True)
    pool.seed(A3, S1)
    to_s2, to_s3 = pool.swap(routed(S2=0.5, S3=0.5)).fetches
    assert (to_s2.destination, to_s3.destination) == (S2, S3)
    assert begin(pool, "r", S2) == NOTHING  # it is on its way
    assert pool.fetched(to_s2) == PoolActions(ready=(RequestId("r"),))
    assert pool.fetched(to_s3) == PoolActions(deletes=((A3, S1),))


def test_a_source_that_leaves_is_replaced_and_its_late_report_is_ignored() -> None:
    pool = pool_of(routed(S1=0.4, S2=0.3, S3=0.3), S1, S2)
    first = only_fetch(begin(pool, "r", S3))
    todo, lost = pool.leave(S1)
    assert lost == []
    second = only_fetch(todo)
    assert second.source == S2
    assert pool.fetch_failed(first) == pool.fetched(first) == NOTHING
    assert pool.fetched(second).ready == (RequestId("r"),)


def test_a_replica_that_leaves_may_take_the_last_copy() -> None:
    pool = pool_of(routed(S1=1.0), S1)
    begin(pool, "there", S1)
    begin(pool, "elsewhere", S2)
    todo, lost = pool.leave(S1)
    assert (todo, lost) == (PoolActions(failed=(RequestId("elsewhere"),)), [A3])
    pool.seed(A3, S2)
    assert begin(pool, "there", S2).ready == (RequestId("there"),)


def test_a_destination_that_leaves_frees_its_source() -> None:
    pool = pool_of(routed(S1=1.0), S1, S2)
    begin(pool, "keeps", S2)
    pool.begin(RequestId("r"), A3, S3)  # from S1, which is routed
    pool.swap(routed(S4=1.0))
    pool.end(RequestId("keeps"))
    assert pool.table.holders(A3) == {S1}
    pool.seed(A3, S4)
    assert pool.leave(S3) == (PoolActions(deletes=((A3, S1),)), [])


def test_retired_adapter_is_deleted_everywhere_once_unused() -> None:
    pool = pool_of(routed(S1=0.5, S2=0.5), S1, S2)
    begin(pool, "r", S1)
    assert pool.retire(A3) == PoolActions(deletes=((A3, S2),))
    assert pool.end(RequestId("r")) == PoolActions(deletes=((A3, S1),))
    assert list(pool.table) == []


REPLICAS = [S1, S2, S3, S4]
ADAPTERS = [digest(name) for name in "abc"]
SOME_REPLICAS = st.lists(st.sampled_from(REPLICAS), min_size=1, max_size=3, unique=True)
ROUTING = st.fixed_dictionaries(dict.fromkeys(ADAPTERS, SOME_REPLICAS))
INDEX = st.integers(0, 100)


class PoolMachine(RuleBasedStateMachine):
    """Requests, fetches that end well or badly, and new tables in any order; what copies there are is kept beside."""

    @initialize(homes=st.fixed_dictionaries(dict.fromkeys(ADAPTERS, st.sampled_from(REPLICAS))), prefetch=st.booleans())
    def start(self, homes: dict[AdapterDigest, ReplicaId], prefetch: bool) -> None:
        self.routing = {adapter: [home] for adapter, home in homes.items()}
        self.pool = AdapterPool(self.table(), prefetch)
        self.copies = {adapter: {home} for adapter, home in homes.items()}
        self.fetches: list[Fetch] = []
        self.placed: dict[RequestId, tuple[AdapterDigest, ReplicaId]] = {}
        self.ready: set[RequestId] = set()
        self.requests = 0
        for adapter, home in homes.items():
            self.pool.seed(adapter, home)

    def table(self) -> RoutingTable:
        return RoutingTable(
            0, {a: tuple(ReplicaShare(each, 1 / len(routed)) for each in routed) for a, routed in self.routing.items()}
        )

    def take(self, todo: PoolActions) -> None:
        self.ready |= {*todo.ready}
        for request in todo.failed:
            del self.placed[request]
        self.fetches += todo.fetches
        for adapter, replica in todo.deletes:
            self.copies[adapter].remove(replica)
            assert self.copies[adapter], "the last copy"
            assert replica not in self.routing[adapter]
            assert (adapter, replica) not in [self.placed[each] for each in self.ready]
            assert (adapter, replica) not in [(fetch.adapter, fetch.source) for fetch in self.fetches]

    @rule(adapter=st.sampled_from(ADAPTERS), index=INDEX)
    def arrive(self, adapter: AdapterDigest, index: int) -> None:
        replica = self.routing[adapter][index % len(self.routing[adapter])]
        request = RequestId(str(self.requests))
        self.requests += 1
        self.placed[request] = (adapter, replica)
        self.take(self.pool.begin(request, adapter, replica))

    @rule(index=INDEX)
    def end(self, index: int) -> None:
        if self.placed:
            request = list(self.placed)[index % len(self.placed)]
            del self.placed[request]
            self.ready.discard(request)
            self.take(self.pool.end(request))

    def pop_fetch(self, index: int) -> Fetch | None:
        return self.fetches.pop(index % len(self.fetches)) if self.fetches else None

    @rule(index=INDEX)
    def arrives(self, index: int) -> None:
        if fetch := self.pop_fetch(index):
            assert fetch.source in self.copies[fetch.adapter]
            self.copies[fetch.adapter].add(fetch.destination)
            self.take(self.pool.fetched(fetch))

    @rule(index=INDEX)
    def breaks(self, index: int) -> None:
        if fetch := self.pop_fetch(index):
            self.take(self.pool.fetch_failed(fetch))

    @rule(routing=ROUTING)
    def swap(self, routing: dict[AdapterDigest, list[ReplicaId]]) -> None:
        self.routing = routing
        self.take(self.pool.swap(self.table()))

    @rule(replica=st.sampled_from(REPLICAS))
    def leave(self, replica: ReplicaId) -> None:
        """It is gone, and another of its name joins with nothing."""
        for request in [request for request, (_, where) in self.placed.items() if where == replica]:
            del self.placed[request]
            self.ready.discard(request)
        given_up = [fetch for fetch in self.fetches if replica in (fetch.source, fetch.destination)]
        self.fetches = [fetch for fetch in self.fetches if fetch not in given_up]
        for copies in self.copies.values():
            copies.discard(replica)
        todo, lost = self.pool.leave(replica)
        assert lost == [adapter for adapter in ADAPTERS if not self.copies[adapter]]
        self.take(todo)
        for fetch in given_up:
            assert self.pool.fetch_failed(fetch) == NOTHING
        for adapter in lost:
            self.copies[adapter].add(S1)
            self.pool.seed(adapter, S1)

    @invariant()
    def every_ready_request_has_its_adapter(self) -> None:
        for request in getattr(self, "ready", ()):
            adapter, replica = self.placed[request]
            assert replica in self.copies[adapter]

    @invariant()
    def the_table_tells_what_copies_there_are(self) -> None:
        for adapter, copies in getattr(self, "copies", {}).items():
            assert self.pool.table.holders(adapter) == copies

    @invariant()
    def whoever_waits_waits_for_one_fetch(self) -> None:
        under_way = [(fetch.adapter, fetch.destination) for fetch in getattr(self, "fetches", ())]
        assert len(under_way) == len({*under_way})
        waiting = {pair for request, pair in getattr(self, "placed", {}).items() if request not in self.ready}
        assert waiting <= {*under_way}

    def teardown(self) -> None:
        """When all has ended, only what is routed is held, and of what nobody routed to has fetched one copy."""
        if not hasattr(self, "pool"):
            return
        while self.fetches:
            self.arrives(0)
        while self.placed:
            self.end(0)
        for adapter, copies in self.copies.items():
            assert copies <= {*self.routing[adapter]} or len(copies) == 1


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
