"""The dispatcher: no request is lost, sent twice, or sent to a replica without its adapter."""

from collections import Counter
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lorikeet.cluster.adapters.pool import Fetch
from lorikeet.cluster.controller.dispatcher import REST_S, Actions, Dispatcher, Provision, Send
from lorikeet.cluster.routing.by_table import ByTable
from lorikeet.cluster.routing.fleet import ReplicaInfo
from lorikeet.cluster.routing.plain import LeastLoaded, RoundRobin
from lorikeet.cluster.routing.request import RoutingRequest
from lorikeet.cluster.tables import ReplicaShare, RoutingTable
from lorikeet.core.events import Finished, FinishReason
from lorikeet.core.ids import AdapterDigest, ReplicaId, RequestId
from lorikeet.core.messages import StepOutputs
from lorikeet.papers.toppings.first_fit import FirstFit
from tests.support.placement import digest
from tests.support.step_counts import examples

A, B = digest("A"), digest("B")
S1, S2, S3 = (ReplicaId(name) for name in ("S1", "S2", "S3"))


def asked(name: str, adapter: AdapterDigest | None = A, tokens: int = 10) -> RoutingRequest:
    return RoutingRequest(RequestId(name), adapter, 8, 1000, tokens, 10)


def table(epoch: int, **homes: Iterable[ReplicaId]) -> RoutingTable:
    """By the adapters' names their replicas, with equal shares."""
    shares = {
        digest(name): tuple(ReplicaShare(each, 1 / len(list(where))) for each in where) for name, where in homes.items()
    }
    return RoutingTable(epoch, shares)


def dispatcher_of(*replicas: ReplicaId, **homes: Iterable[ReplicaId]) -> Dispatcher:
    dispatcher = Dispatcher(ByTable(seed=1))
    for replica in replicas:
        dispatcher.join(ReplicaInfo(replica), 0.0)
    dispatcher.swap(table(1, **homes), 0.0)
    return dispatcher


def only_provision(actions: Actions) -> Provision:
    (provision,) = actions.provisions
    return provision


def only_fetch(actions: Actions) -> Fetch:
    (fetch,) = actions.fetches
    return fetch


def finished(name: str) -> StepOutputs:
    return StepOutputs((), (Finished(RequestId(name), 1.0, FinishReason.LENGTH),), ())


def test_adapter_without_a_holder_is_provided_once_for_all_waiting_requests() -> None:
    dispatcher = dispatcher_of(S1, S2, A=[S1])
    provision = only_provision(dispatcher.arrive(asked("r1"), 0.0))
    assert provision[1:] == (A, S1)
    assert dispatcher.arrive(asked("r2"), 0.0) == Actions()
    assert dispatcher.provided(provision) == Actions(sends=(Send(RequestId("r1"), S1), Send(RequestId("r2"), S1)))
    assert dispatcher.arrive(asked("r3"), 0.0).sends == (Send(RequestId("r3"), S1),)


def test_other_replicas_fetch_from_where_the_adapter_was_provided() -> None:
    dispatcher = Dispatcher(RoundRobin())
    for replica in (S1, S2):
        dispatcher.join(ReplicaInfo(replica), 0.0)
    provision = only_provision(dispatcher.arrive(asked("r1"), 0.0))
    assert provision.replica == S1
    assert dispatcher.arrive(asked("r2"), 0.0) == Actions()
    actions = dispatcher.provided(provision)
    assert actions.sends == (Send(RequestId("r1"), S1),)
    fetch = only_fetch(actions)
    assert fetch[1:] == (A, S1, S2)
    assert dispatcher.fetched(fetch).sends == (Send(RequestId("r2"), S2),)


def test_requests_of_a_session_stay_at_its_replica_while_that_is_open() -> None:
    dispatcher = Dispatcher(RoundRobin())
    for replica in (S1, S2):
        dispatcher.join(ReplicaInfo(replica), 0.0)

    def replica_of(name: str, session: str) -> ReplicaId:
        request = msgspec.structs.replace(asked(name, None), session=session)
        ((_, replica),) = dispatcher.arrive(request, 0.0).sends
        return replica

    first = replica_of("r1", "a")
    other = replica_of("r2", "b")
    assert {first, other} == {S1, S2}
    assert [replica_of(f"a{number}", "a") for number in range(4)] == [first] * 4
    assert replica_of("b1", "b") == other
    dispatcher.drain(first)
    assert replica_of("a9", "a") == other


def test_session_follows_its_adapter_to_other_replicas() -> None:
    dispatcher = dispatcher_of(S1, S2, A=[S1])
    request = msgspec.structs.replace(asked("r1"), session="a")
    dispatcher.arrive(request, 0.0)
    dispatcher.swap(table(2, A=[S2]), 0.0)
    dispatcher.arrive(msgspec.structs.replace(request, request_id=RequestId("r2")), 0.0)
    assert [dispatcher.fleet.where(RequestId(name)) for name in ("r1", "r2")] == [S1, S2]


def test_failed_fetches_fall_back_to_source_files() -> None:
    dispatcher = dispatcher_of(S2, A=[S1, S2])
    dispatcher.join(ReplicaInfo(S1), 0.0, [A])
    dispatcher.swap(table(2, A=[S2]), 0.0)
    fetch = only_fetch(dispatcher.arrive(asked("r1"), 0.0))
    assert fetch[1:] == (A, S1, S2)
    provision = only_provision(dispatcher.fetch_failed(fetch))
    assert provision[1:] == (A, S2)
    assert dispatcher.provided(provision).sends == (Send(RequestId("r1"), S2),)


def test_unreadable_files_fail_only_the_waiting_requests() -> None:
    dispatcher = dispatcher_of(S1, A=[S1], B=[S1])
    provision = only_provision(dispatcher.arrive(asked("r1"), 0.0))
    other = only_provision(dispatcher.arrive(asked("r2", B), 0.0))
    assert dispatcher.provision_failed(provision, 0.0) == Actions(failed=(RequestId("r1"),))
    assert not dispatcher.uses(A)
    assert dispatcher.fleet.loads.requests.tolist() == [1]
    assert dispatcher.provided(other).sends == (Send(RequestId("r2"), S1),)


def test_failed_provision_is_retried_at_another_replica_with_waiters() -> None:
    dispatcher = Dispatcher(RoundRobin())
    for replica in (S1, S2):
        dispatcher.join(ReplicaInfo(replica), 0.0)
    first = only_provision(dispatcher.arrive(asked("r1"), 0.0))
    assert first.replica == S1
    dispatcher.arrive(asked("r2"), 0.0)
    actions = dispatcher.provision_failed(first, 0.0)
    second = only_provision(actions)
    assert (second[1:], actions.failed) == ((A, S2), ()), "S1 has no room, perhaps"
    assert dispatcher.provision_failed(first, 0.0) == Actions(), "it is told of once"
    actions = dispatcher.provided(second)
    assert actions.sends == (Send(RequestId("r2"), S2),)
    fetch = only_fetch(actions)
    assert fetch[1:] == (A, S2, S1), "who waits at S1 has another chance"
    last = only_provision(dispatcher.fetch_failed(fetch))
    assert dispatcher.provision_failed(last, 0.0) == Actions(sends=(Send(RequestId("r1"), S2),)), "S2 has it"
    assert dispatcher.fleet.loads.requests.tolist() == [0, 2]


def test_replica_unable_to_store_an_adapter_delays_and_loses_no_request() -> None:
    dispatcher = Dispatcher(RoundRobin())
    dispatcher.join(ReplicaInfo(S1), 0.0, [A])
    dispatcher.join(ReplicaInfo(S2), 0.0)
    assert dispatcher.arrive(asked("r1"), 0.0).sends == (Send(RequestId("r1"), S1),)
    fetch = only_fetch(dispatcher.arrive(asked("r2"), 0.0))
    provision = only_provision(dispatcher.fetch_failed(fetch))
    assert provision[1:] == (A, S2)
    assert dispatcher.arrive(asked("r3"), 0.0).sends == (Send(RequestId("r3"), S1),), "S1 has it"
    assert dispatcher.provision_failed(provision, 0.0) == Actions(sends=(Send(RequestId("r2"), S1),))
    assert dispatcher.fleet.loads.requests.tolist() == [3, 0]
    for name in ("r1", "r2", "r3"):
        dispatcher.apply_outputs(S1, finished(name), 1.0)
    assert dispatcher.fleet.loads.requests.tolist() == [0, 0]


def test_a_replica_with_a_full_disk_loses_no_request_and_gets_no_new_adapters_for_a_while() -> None:
    dispatcher = Dispatcher(RoundRobin())
    for replica in (S1, S2, S3):
        dispatcher.join(ReplicaInfo(replica), 0.0)
    full = only_provision(dispatcher.arrive(asked("r1"), 0.0))
    dispatcher.arrive(asked("r2"), 0.0)
    assert full.replica == S1
    assert dispatcher.rest(S1, 0.0)
    assert not dispatcher.rest(S1, 0.0), "it is logged once"
    again = only_provision(dispatcher.provision_failed(full, 0.0, is_storable=False))
    assert again.replica == S2
    assert set(dispatcher.provided(again).sends) == {Send(RequestId("r1"), S2), Send(RequestId("r2"), S2)}
    homes = [dispatcher.arrive(asked(f"b{number}", digest(f"b{number}")), 1.0) for number in range(6)]
    assert {only_provision(actions).replica for actions in homes} == {S2, S3}
    assert [dispatcher.arrive(asked(f"base{at}", None), 1.0).sends[0].replica for at in range(3)] == [S3, S1, S2]
    later = [dispatcher.arrive(asked(f"c{number}", digest(f"c{number}")), REST_S + 1) for number in range(3)]
    assert {only_provision(actions).replica for actions in later} == {S1, S2, S3}, "there may be room again"


def test_a_fetch_to_a_full_disk_is_not_tried_from_other_holders() -> None:
    dispatcher = Dispatcher(RoundRobin())
    for replica, held in ((S1, [A]), (S2, [A]), (S3, [])):
        dispatcher.join(ReplicaInfo(replica), 0.0, held)
    dispatcher.arrive(asked("r1"), 0.0)
    dispatcher.arrive(asked("r2"), 0.0)
    fetch = only_fetch(dispatcher.arrive(asked("r3"), 0.0))
    assert fetch.destination == S3
    dispatcher.rest(S3, 0.0)
    provision = only_provision(dispatcher.fetch_failed(fetch, is_storable=False))
    (sent,) = dispatcher.provision_failed(provision, 0.0, is_storable=False).sends
    assert sent == Send(RequestId("r3"), S1)
    for number in range(4):
        assert dispatcher.arrive(asked(f"s{number}"), 0.0).sends[0].replica in (S1, S2)


def test_when_every_disk_is_full_each_replica_is_tried_once() -> None:
    dispatcher = Dispatcher(RoundRobin())
    for replica in (S1, S2, S3):
        dispatcher.join(ReplicaInfo(replica), 0.0)
    actions, tried = dispatcher.arrive(asked("r1"), 0.0), []
    while actions.provisions:
        provision = only_provision(actions)
        tried.append(provision.replica)
        dispatcher.rest(provision.replica, 0.0)
        actions = dispatcher.provision_failed(provision, 0.0, is_storable=False)
    assert sorted(tried) == [S1, S2, S3]
    assert actions == Actions(failed=(RequestId("r1"),))


def test_provision_failing_at_every_replica_fails_all_waiting_requests() -> None:
    dispatcher = Dispatcher(RoundRobin())
    for replica in (S1, S2, S3):
        dispatcher.join(ReplicaInfo(replica), 0.0)
    first = only_provision(dispatcher.arrive(asked("r1"), 0.0))
    dispatcher.arrive(asked("r2"), 0.0)
    second = only_provision(dispatcher.provision_failed(first, 0.0))
    actions = dispatcher.provision_failed(second, 0.0)
    assert actions == Actions(failed=(RequestId("r1"), RequestId("r2"))), "nobody waits at S3"
    assert not dispatcher.uses(A)


def test_requests_wait_for_a_replica_in_the_order_in_which_they_came() -> None:
    dispatcher = Dispatcher(LeastLoaded())
    for name in ("r1", "r2", "r3"):
        assert dispatcher.arrive(asked(name, None), 0.0) == Actions()
    assert dispatcher.ended(RequestId("r2"), 0.0, is_complete=False) == Actions()
    assert dispatcher.waiting == 2
    assert dispatcher.join(ReplicaInfo(S1), 0.0).sends == (Send(RequestId("r1"), S1), Send(RequestId("r3"), S1))


def test_later_request_does_not_overtake_one_waiting_for_room() -> None:
    dispatcher = Dispatcher(FirstFit())
    dispatcher.join(ReplicaInfo(S1, total_tokens=100), 0.0)
    assert len(dispatcher.arrive(asked("r1", None, 60), 0.0).sends) == 1
    assert dispatcher.arrive(asked("large", None, 90), 0.0) == Actions()
    assert dispatcher.arrive(asked("small", None, 5), 0.0) == Actions()
    actions = dispatcher.apply_outputs(S1, finished("r1"), 1.0)
    assert actions.sends == (Send(RequestId("large"), S1), Send(RequestId("small"), S1))


def test_slots_of_requests_failed_by_a_provision_are_reused_at_once() -> None:
    dispatcher = Dispatcher(FirstFit())
    dispatcher.join(ReplicaInfo(S1, max_batch=1), 0.0)
    provision = only_provision(dispatcher.arrive(asked("r1"), 0.0))
    assert dispatcher.arrive(asked("r2", None), 0.0) == Actions()
    actions = dispatcher.provision_failed(provision, 0.0)
    assert actions == Actions(sends=(Send(RequestId("r2"), S1),), failed=(RequestId("r1"),))


def test_slots_of_requests_sent_to_another_holder_are_reused_at_once() -> None:
    dispatcher = Dispatcher(FirstFit())
    dispatcher.join(ReplicaInfo(S1, max_batch=1), 0.0, [A])
    dispatcher.join(ReplicaInfo(S2, max_batch=1), 0.0)
    dispatcher.arrive(asked("r1"), 0.0)
    provision = only_provision(dispatcher.fetch_failed(only_fetch(dispatcher.arrive(asked("r2"), 0.0))))
    assert dispatcher.arrive(asked("r3", None), 0.0) == Actions()
    actions = dispatcher.provision_failed(provision, 0.0)
    assert actions == Actions(sends=(Send(RequestId("r2"), S1), Send(RequestId("r3"), S2)))


def test_orphaned_requests_arrive_again() -> None:
    dispatcher = dispatcher_of(S1, S2, A=[S1])
    provision = only_provision(dispatcher.arrive(asked("r1"), 0.0))
    dispatcher.provided(provision)
    actions, homeless = dispatcher.leave(S1)
    assert (actions, homeless) == (Actions(), ["r1"])
    again = only_provision(dispatcher.arrive(asked("r1"), 1.0))
    assert again[1:] == (A, S2), "its only home is gone, so another serves it, and nobody has its adapter"
    assert dispatcher.provided(provision) == Actions(), "what ends late ended in vain"
    assert dispatcher.provided(again).sends == (Send(RequestId("r1"), S2),)


def test_provision_restarts_elsewhere_when_its_replica_leaves() -> None:
    dispatcher = Dispatcher(RoundRobin())
    for replica in (S1, S2):
        dispatcher.join(ReplicaInfo(replica), 0.0)
    dispatcher.arrive(asked("r1"), 0.0)
    dispatcher.arrive(asked("r2"), 0.0)
    actions, homeless = dispatcher.leave(S1)
    assert homeless == ["r1"]
    assert only_provision(actions)[1:] == (A, S2)


def test_moved_request_fetches_its_adapter_and_frees_its_old_replica() -> None:
    dispatcher = dispatcher_of(S1, S2, A=[S1])
    dispatcher.provided(only_provision(dispatcher.arrive(asked("r1"), 0.0)))
    dispatcher.swap(table(2, A=[S2]), 0.0)
    fetch = only_fetch(dispatcher.move(asked("r1", A, 15), S2, 1.0))
    assert fetch[1:] == (A, S1, S2)
    assert dispatcher.apply_outputs(S1, finished("r1"), 1.0) == Actions(), (
        "what its old replica still says is of the past"
    )
    assert dispatcher.fetched(fetch) == Actions(sends=(Send(RequestId("r1"), S2),), deletes=((A, S1),))
    dispatcher.apply_outputs(S2, finished("r1"), 2.0)
    assert dispatcher.fleet.loads.requests.tolist() == [0, 0]


def test_move_to_a_departed_replica_is_routed_again() -> None:
    dispatcher = dispatcher_of(S1, S2)
    dispatcher.arrive(asked("r1", None), 0.0)
    assert dispatcher.fleet.where(RequestId("r1")) == S1
    dispatcher.leave(S2)
    assert dispatcher.move(asked("r1", None, 15), S2, 1.0).sends == (Send(RequestId("r1"), S1),)
    assert dispatcher.fleet.loads.requests.tolist() == [1]


def test_a_retired_adapter_is_deleted_when_its_last_request_ends() -> None:
    dispatcher = dispatcher_of(S1, A=[S1])
    dispatcher.provided(only_provision(dispatcher.arrive(asked("r1"), 0.0)))
    assert dispatcher.retire(A) == Actions()
    assert dispatcher.uses(A)
    assert dispatcher.apply_outputs(S1, finished("r1"), 1.0) == Actions(deletes=((A, S1),))
    assert not dispatcher.uses(A)


def test_whether_an_adapter_is_used_takes_no_look_at_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = dispatcher_of(A=[S1])
    dispatcher.arrive(asked("one"), 0.0)
    monkeypatch.setattr(dispatcher, "_requests", None)  # of which there may be thousands
    assert dispatcher.uses(A)
    assert not dispatcher.uses(B)


def test_an_adapter_retired_while_it_is_provided_does_not_stay() -> None:
    dispatcher = dispatcher_of(S1, A=[S1])
    provision = only_provision(dispatcher.arrive(asked("r1"), 0.0))
    dispatcher.retire(A)
    dispatcher.ended(RequestId("r1"), 0.0, is_complete=False)
    assert dispatcher.provided(provision) == Actions(deletes=((A, S1),))


def test_a_retired_adapter_goes_though_a_replica_comes_back_with_a_copy() -> None:
    dispatcher = dispatcher_of(S1, A=[S1])
    dispatcher.provided(only_provision(dispatcher.arrive(asked("r1"), 0.0)))
    dispatcher.retire(A)
    assert dispatcher.join(ReplicaInfo(S2), 1.0, [A]) == Actions(deletes=((A, S2),))
    assert dispatcher.apply_outputs(S1, finished("r1"), 2.0) == Actions(deletes=((A, S1),))
    assert not dispatcher.uses(A)
    assert dispatcher.join(ReplicaInfo(S3), 3.0, [A]) == Actions(deletes=((A, S3),))
    assert not dispatcher.uses(A)


def test_so_many_retired_adapters_are_remembered_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorikeet.cluster.controller.dispatcher.MAX_RETIRED", 2)
    dispatcher = dispatcher_of(S1)
    for name in ("A", "B", "C"):
        dispatcher.retire(digest(name))
    assert dispatcher.join(ReplicaInfo(S2), 0.0, [A, B, digest("C")]).deletes == ((B, S2), (digest("C"), S2))


def test_adapter_registered_again_stays() -> None:
    dispatcher = dispatcher_of(S1, A=[S1])
    dispatcher.provided(only_provision(dispatcher.arrive(asked("r1"), 0.0)))
    dispatcher.retire(A)
    dispatcher.register(A)
    assert dispatcher.apply_outputs(S1, finished("r1"), 1.0) == Actions()
    assert dispatcher.pool.table.holders(A) == {S1}


def test_prefetch_makes_a_table_real_before_any_request() -> None:
    dispatcher = Dispatcher(ByTable(seed=1), prefetch=True)
    for replica in (S1, S2):
        dispatcher.join(ReplicaInfo(replica), 0.0)
    provision = only_provision(dispatcher.swap(table(1, A=[S3, S2, S1]), 0.0))
    assert provision[1:] == (A, S2), "S3 is not there"
    assert dispatcher.swap(table(2, A=[S1, S2]), 0.0) == Actions(), "it is on its way"
    fetch = only_fetch(dispatcher.provided(provision))
    assert fetch[1:] == (A, S2, S1)
    dispatcher.fetched(fetch)
    assert dispatcher.pool.table.holders(A) == {S1, S2}


def test_prefetch_ignores_replicas_outside_the_fleet() -> None:
    dispatcher = Dispatcher(ByTable(seed=1), prefetch=True)
    dispatcher.join(ReplicaInfo(S1), 0.0, [A])
    assert dispatcher.swap(table(1, A=[S1, S2]), 0.0) == Actions(), "nobody would tell of its end"
    dispatcher.join(ReplicaInfo(S2), 0.0)
    assert only_fetch(dispatcher.swap(table(1, A=[S1, S2]), 0.0))[1:] == (A, S1, S2)


def test_a_request_may_not_arrive_twice_nor_a_replica_join_twice() -> None:
    dispatcher = dispatcher_of(S1)
    dispatcher.arrive(asked("r1", None), 0.0)
    with pytest.raises(ValueError, match="r1 is known already"):
        dispatcher.arrive(asked("r1", None), 0.0)
    with pytest.raises(ValueError, match="S1 has joined already"):
        dispatcher.join(ReplicaInfo(S1, epoch=1), 0.0)


ADAPTERS = (None, A, B, digest("C"))
REPLICAS = (S1, S2, S3)


class Cluster(RuleBasedStateMachine):
    """Carries out what the dispatcher wants, in any order, while replicas and requests come and go."""

    @initialize(prefetch=st.booleans())
    def begin(self, prefetch: bool) -> None:
        self.dispatcher = Dispatcher(ByTable(seed=0), prefetch=prefetch)
        self.copies: list[Fetch | Provision] = []
        self.late: list[Fetch | Provision] = []  # given up, since a replica left, and not ended yet
        self.holds: dict[ReplicaId, set[AdapterDigest]] = {}
        self.sent: dict[str, tuple[ReplicaId, AdapterDigest | None]] = {}
        self.open: dict[str, AdapterDigest | None] = {}
        self.epoch = 0
        self.arrived = 0

    def do(self, actions: Actions) -> None:
        for adapter, replica in actions.deletes:
            self.holds[replica].discard(adapter)
            used = {(where, which) for where, which in self.sent.values()}
            assert (replica, adapter) not in used, "in use"
            assert not any(
                isinstance(copy, Fetch) and (copy.source, copy.adapter) == (replica, adapter) for copy in self.copies
            ), "being copied"
        self.copies += [*actions.fetches, *actions.provisions]
        for request_id, replica in actions.sends:
            adapter = self.open[request_id]
            assert request_id not in self.sent, "sent twice"
            assert replica in self.holds
            assert adapter is None or adapter in self.holds[replica]
            self.sent[request_id] = replica, adapter
        for request_id in actions.failed:
            assert request_id not in self.sent
            del self.open[request_id]

    @rule(data=st.data())
    @precondition(lambda self: len(self.holds) < len(REPLICAS))
    def join(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from([each for each in REPLICAS if each not in self.holds]))
        held = data.draw(st.sets(st.sampled_from(ADAPTERS[1:])))
        self.holds[replica] = {each for each in held if each is not None}
        self.epoch += 1
        self.do(self.dispatcher.join(ReplicaInfo(replica, self.epoch), 0.0, self.holds[replica]))

    @rule(data=st.data())
    @precondition(lambda self: self.holds)
    def leave(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(sorted(self.holds)))
        del self.holds[replica]
        self.late += [copy for copy in self.copies if replica in copy]
        self.copies = [copy for copy in self.copies if replica not in copy]
        actions, homeless = self.dispatcher.leave(replica)
        assert {name for name, (where, _) in self.sent.items() if where == replica} <= set(homeless)
        for name in homeless:
            self.sent.pop(name, None)
        self.do(actions)
        for name in homeless:
            self.do(self.dispatcher.arrive(asked(name, self.open[name]), 0.0))

    @rule(adapter=st.sampled_from(ADAPTERS))
    def arrive(self, adapter: AdapterDigest | None) -> None:
        self.arrived += 1
        name = f"r{self.arrived}"
        self.open[name] = adapter
        self.do(self.dispatcher.arrive(asked(name, adapter), 0.0))

    @rule(data=st.data())
    @precondition(lambda self: self.open)
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        where = self.sent.pop(name, None)
        del self.open[name]
        if where is None:
            self.do(self.dispatcher.ended(RequestId(name), 0.0, is_complete=False))
        else:
            self.do(self.dispatcher.apply_outputs(where[0], finished(name), 0.0))

    @rule(data=st.data())
    @precondition(lambda self: self.sent and self.holds)
    def move(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.sent)))
        target = data.draw(st.sampled_from(sorted(self.holds)))
        _, adapter = self.sent.pop(name)
        self.do(self.dispatcher.move(asked(name, adapter, 20), target, 0.0))

    @rule(data=st.data(), works=st.booleans(), is_full=st.booleans())
    @precondition(lambda self: self.copies or self.late)
    def copied(self, data: st.DataObject, works: bool, is_full: bool) -> None:
        copy = data.draw(st.sampled_from([*self.copies, *self.late]))
        (self.copies if copy in self.copies else self.late).remove(copy)
        where = copy.destination if isinstance(copy, Fetch) else copy.replica
        if works and where in self.holds:
            self.holds[where].add(copy.adapter)
        if works:
            self.do(self.dispatcher.fetched(copy) if isinstance(copy, Fetch) else self.dispatcher.provided(copy))
            return
        if is_full:
            self.dispatcher.rest(where, 0.0)
        if isinstance(copy, Fetch):
            self.do(self.dispatcher.fetch_failed(copy, is_storable=not is_full))
        else:
            self.do(self.dispatcher.provision_failed(copy, 0.0, is_storable=not is_full))

    @rule(homes=st.lists(st.sets(st.sampled_from(REPLICAS), min_size=1), min_size=3, max_size=3))
    def swap(self, homes: list[set[ReplicaId]]) -> None:
        self.epoch += 1
        named = dict(zip(("A", "B", "C"), map(sorted, homes), strict=True))
        self.do(self.dispatcher.swap(table(self.epoch, **named), 0.0))

    @invariant()
    def every_request_is_somewhere(self) -> None:
        pending = len(self.open) - len(self.sent)
        if self.holds and not self.copies:
            assert pending == 0, "nobody waits for nothing"
        assert self.dispatcher.fleet.loads.requests.sum() + self.dispatcher.waiting == len(self.open)
        assert self.dispatcher._requests_by_adapter == Counter(self.open.values())


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
